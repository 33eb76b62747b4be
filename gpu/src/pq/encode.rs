//! Encoding of many tokens, keys or values, into the tiles that attention reads.

use cudarc::driver::sys::CUstream;
use kv_attend::owner::Side;
use pq_core::PqShape;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::append::{AppendKernel, AppendSide, NewTokens};
use crate::pq::attend::Pages;
use crate::pq::layout::{CodeLayout, Paging, TILE};
use crate::{Device, Error, Program, VectorElement};

/// Compile-time shape of [`Encode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Keys or values: their tiles differ.
    pub side: Side,
    /// Element type of the vectors.
    pub element: VectorElement,
    /// Whether and how the codes are paged.
    pub paging: Paging,
}

/// Tokens of a block: `TOKENS` of the kernel.
const BLOCK_TOKENS: usize = 128;

impl EncodeShape {
    /// Maximum new vectors of a sequence for which [`Append`](super::Append)'s kernel is faster: it splits
    /// the subspaces over blocks, while a block of the other kernel takes as long for one vector as for 128.
    const fn few(&self) -> usize {
        self.quantizer.ksub() / 2
    }

    fn layout(&self) -> Result<CodeLayout, Error> {
        CodeLayout::of(self.quantizer, self.side, self.paging)
    }

    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        let (shape, layout) = (self.quantizer, self.layout()?);
        let defines = [
            ("HEAD_DIM", shape.dim()),
            ("M", shape.m()),
            ("DSUB", shape.dsub()),
            ("NBITS", shape.nbits() as usize),
            ("KEPT_M", shape.dim() / layout.components()),
            ("KEPT_BITS", layout.bits()),
            ("TILE_BYTES", layout.tile_len()),
            ("ELEMENT", self.element as usize),
        ];
        let program = Program::new(source!("pq_encode.cu"), &defines)
            .define_if(shape.dsub() == 1, "JOINED")
            .define_if(self.side == Side::Keys, "KEYS");
        Ok(self.paging.define(program))
    }
}

const OPERATION: Operation = Operation("pq::Encode");

/// Pointers and sizes of one launch of [`Encode`].
#[derive(Clone, Copy, Debug)]
pub struct EncodeArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Maximum number of new vectors of a sequence.
    pub max_count: usize,
    /// Elements (batch, heads, `max_count`, dim), with the strides below and a contiguous last dimension.
    pub vectors: DevicePtr<AnyElement>,
    /// Strides of sequences, heads and vectors in elements.
    pub strides: [usize; 3],
    /// `f32` (heads, m, ksub, dsub): the codebooks.
    pub centroids: DevicePtr<f32>,
    /// `u32` (batch,): the position of the first new vector in its sequence. Earlier tokens keep their codes.
    pub firsts: DevicePtr<u32>,
    /// `u32` (batch,): the number of new vectors of each sequence.
    pub counts: DevicePtr<u32>,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]), written at the new tokens.
    pub codes: DevicePtr<u8>,
    /// Capacity of a page (or of a sequence, without pages) in tiles, or in half tiles with
    /// [`Paging::HalfTiles`].
    pub tiles: usize,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    vectors: DevicePtr<AnyElement>,
    centroids: DevicePtr<f32>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    tiles: DevicePtr<u8>,
    strides: [u64; 3],
    heads: u32,
    page_tiles: u32,
    max_pages: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 88);

/// `pq_core::encode_into` into the tiles that [`Attend`](super::Attend) reads. One launch appends tokens to
/// sequences of different lengths. For few tokens, [`Append`](super::Append) encodes keys and values in one
/// launch.
///
/// On [`Device::background_stream`] it quantizes the tokens that leave the window while decoding continues.
///
/// # Cost
/// ksub * dim multiply-adds per vector.
pub struct Encode {
    many: Kernel,
    few: AppendKernel,
    shape: EncodeShape,
}

impl Encode {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: EncodeShape) -> Result<Self, Error> {
        let many = device.kernel(&shape.program()?, "pq_encode", 0)?;
        let few = AppendKernel::new(device, &[shape.layout()?], shape.element, shape.paging)?;
        Ok(Self { many, few, shape })
    }

    /// Launches the encoding on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer but `vectors` aligned to 16
    /// bytes. For every sequence, `firsts + counts` does not exceed the capacity of the sequence or of its
    /// pages, the count does not exceed `max_count`, and every page number refers to an existing page: the
    /// kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &EncodeArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.max_count == 0 {
            return Ok(());
        }
        if self.shape.paging.has_pages() != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if a.tiles == 0 {
            return Err(OPERATION.error("no room for a tile"));
        }
        if a.max_count <= self.shape.few() {
            let side = AppendSide { vectors: a.vectors, centroids: a.centroids, codes: a.codes };
            let tokens = NewTokens {
                batch: a.batch,
                heads: a.heads,
                max_count: a.max_count,
                strides: a.strides,
                firsts: a.firsts,
                counts: a.counts,
                tiles: a.tiles,
                pages: a.pages,
            };
            // SAFETY: the caller's contract; the kernel has one side and ignores the other.
            return unsafe { self.few.launch(OPERATION, stream, [side; 2], &tokens, false) };
        }
        // The first vector need not be the first of a tile.
        let blocks = a.max_count.saturating_add(TILE - 1).div_ceil(BLOCK_TOKENS);
        let grid =
            OPERATION.grid(&[("blocks of tiles", blocks), ("heads", a.heads), ("sequences", a.batch)])?;
        let kernel_arguments = KernelArguments {
            vectors: a.vectors,
            centroids: a.centroids,
            firsts: a.firsts,
            counts: a.counts,
            pages: a.pages.map(|pages| pages.table),
            tiles: a.codes,
            strides: a.strides.map(|stride| stride as u64),
            heads: a.heads as u32,
            page_tiles: OPERATION.in_32_bits("tiles", a.tiles)?,
            max_pages: OPERATION.in_32_bits("pages", a.pages.map_or(0, |pages| pages.max_pages))?,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.many.launch(stream, grid, 256, false, &kernel_arguments) }
    }
}
