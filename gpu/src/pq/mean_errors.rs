//! The mean of what codes of values lose, by blocks of tokens.

use cudarc::driver::sys::CUstream;
use half::f16;
use kv_attend::owner::Side;
use pq_core::PqShape;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::pq::encode::EncodeArguments;
use crate::pq::layout::CodeLayout;
use crate::{Device, Element, Error, Program};

/// Tokens of a block that has one mean error: `MEAN_TOKENS` of the kernels.
pub const MEAN_TOKENS: usize = 256;
/// Tokens of a part of such a block, the parts, and threads for each component: of the kernels.
const PART_TOKENS: usize = 16;
const PARTS: usize = MEAN_TOKENS / PART_TOKENS;
const GROUPS: usize = 8;

/// Mean errors of the values of a batch: value minus decoded value, over the tokens of a block. The bytes are
/// zeroed before the first launch.
#[derive(Clone, Copy, Debug)]
pub struct BlockMeans {
    /// `f16` (batch, heads, `blocks`, dim): those of whole blocks of [`MEAN_TOKENS`] tokens.
    pub means: DevicePtr<f16>,
    /// Capacity of a sequence in blocks.
    pub blocks: usize,
    /// `f32` (batch, heads, `recent_parts`, dim): sums of parts of the last blocks, a ring.
    pub recent: DevicePtr<f32>,
    /// Capacity of that ring: [`BlockMeans::recent_parts`].
    pub recent_parts: usize,
    /// `u32` (batch, heads): the number of tokens of each sequence in the sums.
    pub summed: DevicePtr<u32>,
}

impl BlockMeans {
    /// Parts of the last blocks that a ring must hold where up to `ahead` tokens behind those of a step are
    /// encoded already.
    #[must_use]
    pub const fn recent_parts(ahead: usize) -> usize {
        PARTS + ahead.div_ceil(PART_TOKENS) + 2
    }
}

/// Compile-time shape of [`MeanErrors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeanErrorsShape {
    /// Quantizer of the values.
    pub quantizer: PqShape,
    /// Element type of the vectors.
    pub element: Element,
}

impl MeanErrorsShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        let layout = CodeLayout::new(self.quantizer, Side::Values)?;
        let dim = self.quantizer.dim();
        let defines = [
            ("HEAD_DIM", dim),
            ("ELEMENT", self.element as usize),
            ("KEPT_M", dim / layout.components()),
            ("KEPT_BITS", layout.bits()),
        ];
        Ok(Program::new(source!("pq_mean_errors.cu"), &defines))
    }
}

const OPERATION: Operation = Operation("pq::MeanErrors");

/// Pointers and sizes of one launch of [`MeanErrors`].
#[derive(Clone, Copy, Debug)]
pub struct MeanErrorsArguments {
    /// The launch of [`Encode`](super::Encode) before: its vectors, of 16-bit elements, and the codes that it
    /// has written. The centroids are not read.
    pub encoded: EncodeArguments,
    /// `f16` (heads, [`CodeLayout::table_len`]): codebooks, by [`CodeLayout::table_into`].
    pub table: DevicePtr<f16>,
    /// `f16` (pages or batch, heads, tiles, [`TILE`](super::TILE)): norms by which values were divided before
    /// encoding.
    pub norms: Option<DevicePtr<f16>>,
    /// The factor of the vectors besides the norms: [`pq_core::gaussian_gain`], or 1.
    pub gain: f32,
    /// Updated.
    pub means: BlockMeans,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    vectors: DevicePtr<u16>,
    codes: DevicePtr<u8>,
    table: DevicePtr<f16>,
    norms: Option<DevicePtr<f16>>,
    pages: Option<DevicePtr<u32>>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    means: DevicePtr<f16>,
    recent: DevicePtr<f32>,
    summed: DevicePtr<u32>,
    strides: [u64; 3],
    heads: u32,
    page_tiles: u32,
    max_pages: u32,
    blocks: u32,
    recent_parts: u32,
    gain: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 128);

/// Sums of what the codes of values have lost, which [`Hybrid::attend`](super::Hybrid::attend) adds to its
/// outputs: attention averages the errors of single values, but not what they have in common.
///
/// It follows [`Encode`](super::Encode) on its stream. Tokens come in order, the last ones may come again,
/// and a sequence begins anew with its first token. The same tokens give the same bytes, however many a
/// launch has, and a launch leaves alone what a step reads that attends to earlier tokens at the same time.
///
/// # Cost
/// A read of vectors and codes.
pub struct MeanErrors {
    kernel: Kernel,
    dim: usize,
}

impl MeanErrors {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: MeanErrorsShape) -> Result<Self, Error> {
        let kernel = device.kernel(&shape.program()?, "pq_mean_errors", 0)?;
        Ok(Self { kernel, dim: shape.quantizer.dim() })
    }

    /// Launches the sums on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// As for [`Encode::launch`](super::Encode::launch), which it follows; blocks hold all tokens of a
    /// sequence, and `recent` those that [`BlockMeans::recent_parts`] says.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &MeanErrorsArguments) -> Result<(), Error> {
        let MeanErrorsArguments { encoded, table, norms, gain, means } = *arguments;
        if encoded.batch == 0 || encoded.heads == 0 || encoded.max_count == 0 {
            return Ok(());
        }
        if means.recent_parts < PARTS {
            return Err(OPERATION.error("no room for the parts of a block"));
        }
        let prepared = KernelArguments {
            vectors: encoded.vectors.cast(),
            codes: encoded.codes,
            table,
            norms,
            pages: encoded.pages.map(|pages| pages.table),
            firsts: encoded.firsts,
            counts: encoded.counts,
            means: means.means,
            recent: means.recent,
            summed: means.summed,
            strides: encoded.strides.map(|stride| stride as u64),
            heads: OPERATION.in_32_bits("heads", encoded.heads)?,
            page_tiles: OPERATION.in_32_bits("tiles", encoded.tiles)?,
            max_pages: OPERATION.in_32_bits("pages", encoded.pages.map_or(0, |pages| pages.max_pages))?,
            blocks: OPERATION.in_32_bits("blocks of tokens", means.blocks)?,
            recent_parts: OPERATION.in_32_bits("parts of blocks", means.recent_parts)?,
            gain,
        };
        let grid = OPERATION.grid(&[("heads", encoded.heads), ("sequences", encoded.batch)])?;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, (GROUPS * self.dim) as u32, false, &prepared) }
    }
}
