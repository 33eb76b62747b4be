//! Transformed rows of coded keys and values.

use cudarc::driver::sys::CUstream;
use half::f16;
use pq_core::sq;

use super::{KeyTable, Side};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::Pages;
use crate::{Device, Error, Program, VectorElement};

/// Threads of a block, which decodes a tile.
const THREADS: u32 = 128;

/// Compile-time shape of [`Decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Components of a row: 64, 96, 128 or 256.
    pub dim: usize,
    /// Keys or values, and their bits.
    pub side: Side,
    /// Tokens of a block: a multiple of 32, at most 256.
    pub block: usize,
    /// Element type of the rows.
    pub element: VectorElement,
    /// Whether blocks are in pages.
    pub paged: bool,
}

impl DecodeShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        let defines = self.side.defines(self.dim, self.block);
        let [dim, bits, block] =
            defines.map_err(|supported| Error::Unsupported { operation: format!("{self:?}"), supported })?;
        let defines = [dim, bits, block, ("ELEMENT", self.element as usize)];
        let program = Program::new(source!("sq_decode.cu"), &defines).define_if(self.paged, "PAGED");
        Ok(program.without_fused_multiply_add())
    }
}

const OPERATION: Operation = Operation("sq::Decode");

/// Pointers and sizes of one launch of [`Decode`]. Arrays of blocks are those of
/// [`AttendArguments`](super::AttendArguments).
#[derive(Clone, Copy, Debug)]
pub struct DecodeArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Maximum number of rows of a sequence.
    pub max_rows: usize,
    /// `u32` (batch,): the block of the sequence that the first row begins.
    pub firsts: DevicePtr<u32>,
    /// `u32` (batch,): rows of each sequence, at most `max_rows`. Their last block may be incomplete.
    pub counts: DevicePtr<u32>,
    /// `u32` (heads, [`KeyTable::table_len`]), given if and only if the rows are keys.
    pub key_tables: Option<DevicePtr<u32>>,
    /// Bytes (pages or batch, heads, blocks, dim): steps of keys; or (pages or batch, heads, blocks, tokens
    /// of a block): norms of values.
    pub scales: DevicePtr<u8>,
    /// Words (pages or batch, heads, blocks, [`words_len`](pq_core::sq::Shape::words_len) of a block).
    pub words: DevicePtr<u32>,
    /// `f16` (pages or batch, heads, blocks, dim), for values only: mean errors, which are added to every row
    /// of their block, as attention adds them.
    pub mean_errors: Option<DevicePtr<f16>>,
    /// Blocks of a page, or of a sequence without pages.
    pub blocks: usize,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
    /// Elements (batch, heads, `max_rows`, dim): the transformed rows that [`Encode`](super::Encode) took, as
    /// far as the codes keep them. Keys are relative to the middle of their block and in the order of
    /// [`allot`](pq_core::sq::allot). Rows beyond the counts are not written.
    pub rows: DevicePtr<AnyElement>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    key_tables: Option<DevicePtr<u32>>,
    pages: Option<DevicePtr<u32>>,
    scales: DevicePtr<u8>,
    words: DevicePtr<u32>,
    mean_errors: Option<DevicePtr<f16>>,
    rows: DevicePtr<AnyElement>,
    heads: u32,
    max_rows: u32,
    blocks: u32,
    max_pages: u32,
    unit_step: f32,
    padding: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 88);

/// `pq_core::sq::decode_keys_into` or `decode_values_into` for blocks of a ragged batch, bit for bit, rounded
/// to the element type: for products of many queries with coded tokens, such as a further chunk of a prompt
/// ([`svd::Prefill`](crate::svd::Prefill)).
///
/// # Cost
/// Reading the codes and writing the rows.
pub struct Decode {
    kernel: Kernel,
    shape: DecodeShape,
}

impl Decode {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: DecodeShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&shape.program()?, "sq_decode", 0)?, shape })
    }

    /// The layout of the tables of keys.
    #[must_use]
    pub const fn key_table(&self) -> Option<KeyTable> {
        self.shape.side.key_table(self.shape.dim)
    }

    /// Launches the decoding on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with rows aligned to 16 bytes. For every
    /// sequence, the blocks do not exceed those of the sequence or of its pages, the count does not exceed
    /// `max_rows`, and every page number refers to an existing page: the kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &DecodeArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.max_rows == 0 {
            return Ok(());
        }
        if self.shape.paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        let keys = matches!(self.shape.side, Side::Keys { .. });
        if keys != a.key_tables.is_some() || keys && a.mean_errors.is_some() {
            return Err(OPERATION.error("keys have tables, and only values may have mean errors"));
        }
        if a.blocks == 0 {
            return Err(OPERATION.error("no room for a block"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        let grid = OPERATION.grid(&[
            ("tiles", a.max_rows.div_ceil(sq::TILE)),
            ("heads", a.heads),
            ("sequences", a.batch),
        ])?;
        let unit_step = match self.shape.side {
            Side::Keys { .. } => 0.0,
            Side::Values { bits } => sq::STEPS[bits] / (self.shape.dim as f32).sqrt(),
        };
        let kernel_arguments = KernelArguments {
            firsts: a.firsts,
            counts: a.counts,
            key_tables: a.key_tables,
            pages: a.pages.map(|pages| pages.table),
            scales: a.scales,
            words: a.words,
            mean_errors: a.mean_errors,
            rows: a.rows,
            heads: a.heads as u32,
            max_rows: in_32_bits("rows", a.max_rows)?,
            blocks: in_32_bits("blocks", a.blocks)?,
            max_pages: in_32_bits("pages", a.pages.map_or(0, |pages| pages.max_pages))?,
            unit_step,
            padding: 0,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, THREADS, false, &kernel_arguments) }
    }
}
