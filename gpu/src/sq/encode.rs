//! Scalar codes of blocks of transformed keys and values.

use cudarc::driver::sys::CUstream;
use half::f16;
use pq_core::sq;

use super::{KeyTable, Side};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::pq::Pages;
use crate::{Device, Error, Program};

/// Compile-time shape of [`Encode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeShape {
    /// Components of a row: 64, 96, 128 or 256.
    pub dim: usize,
    /// Keys or values, and their bits.
    pub side: Side,
    /// Tokens of a block: a multiple of 32, at most 256.
    pub block: usize,
    /// Whether blocks are in pages.
    pub paged: bool,
}

impl EncodeShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        let defines = self.side.defines(self.dim, self.block);
        let defines =
            defines.map_err(|supported| Error::Unsupported { operation: format!("{self:?}"), supported })?;
        let source = match self.side {
            Side::Keys { .. } => source!("sq_encode_keys.cu"),
            Side::Values { .. } => source!("sq_encode_values.cu"),
        };
        Ok(Program::new(source, &defines).define_if(self.paged, "PAGED").without_fused_multiply_add())
    }

    /// The kernel's name, and threads per component.
    const fn entry(&self) -> (&'static str, usize) {
        match self.side {
            Side::Keys { .. } => ("sq_encode_keys", 3),
            Side::Values { .. } => ("sq_encode_values", 1),
        }
    }
}

const OPERATION: Operation = Operation("sq::Encode");

/// Pointers and sizes of one launch of [`Encode`]. Arrays of blocks are those of
/// [`AttendArguments`](super::AttendArguments).
#[derive(Clone, Copy, Debug)]
pub struct EncodeArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Maximum number of rows of a sequence.
    pub max_rows: usize,
    /// `f32` (batch, heads, `max_rows`, dim): transformed rows, as
    /// [`encode_keys_into`](pq_core::sq::encode_keys_into) and
    /// [`encode_values_into`](pq_core::sq::encode_values_into) take them.
    pub rows: DevicePtr<f32>,
    /// `u32` (batch,): the block of the sequence that the first row begins.
    pub firsts: DevicePtr<u32>,
    /// `u32` (batch,): rows of each sequence. If their number is not a multiple of a block, the last block is
    /// incomplete: its further tokens are not written, nor is their part of its codes meaningful.
    pub counts: DevicePtr<u32>,
    /// `u32` (heads, [`KeyTable::table_len`]), given if and only if the rows are keys.
    pub key_tables: Option<DevicePtr<u32>>,
    /// Bytes (pages or batch, heads, blocks, dim): steps of keys; or (pages or batch, heads, blocks, tokens of
    /// a block): norms of values. Written at the new blocks.
    pub scales: DevicePtr<u8>,
    /// Words (pages or batch, heads, blocks, [`words_len`](pq_core::sq::Shape::words_len) of a block), written
    /// at the new blocks.
    pub words: DevicePtr<u32>,
    /// `f16` (pages or batch, heads, blocks, dim), for values only: their mean errors, as
    /// [`mean_error_into`](pq_core::sq::mean_error_into) computes them, written at the new blocks.
    pub mean_errors: Option<DevicePtr<f16>>,
    /// Blocks of a page, or of a sequence without pages.
    pub blocks: usize,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
}

/// `Arguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    rows: DevicePtr<f32>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    key_tables: Option<DevicePtr<u32>>,
    pages: Option<DevicePtr<u32>>,
    scales: DevicePtr<u8>,
    words: DevicePtr<u32>,
    mean_errors: Option<DevicePtr<f16>>,
    heads: u32,
    max_rows: u32,
    blocks: u32,
    max_pages: u32,
    steps: [f32; 9],
    padding: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 120);

/// `pq_core::sq::encode_keys_into` or `encode_values_into` for blocks of a ragged batch, bit for bit, except
/// where the logarithm of a step or a norm is within a rounding of the middle of two bytes.
///
/// # Cost
/// Keys: 10 dim multiply-adds per row; values: one pass.
pub struct Encode {
    kernel: Kernel,
    shape: EncodeShape,
}

impl Encode {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: EncodeShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&shape.program()?, shape.entry().0, 0)?, shape })
    }

    /// The layout of the tables of keys.
    #[must_use]
    pub const fn key_table(&self) -> Option<KeyTable> {
        self.shape.side.key_table(self.shape.dim)
    }

    /// Launches the encoding on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. For every sequence, the new blocks do not exceed
    /// the blocks of the sequence or of its pages, the count does not exceed `max_rows`, and every page number
    /// refers to an existing page: the kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &EncodeArguments) -> Result<(), Error> {
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
            ("blocks", a.max_rows.div_ceil(self.shape.block)),
            ("heads", a.heads),
            ("sequences", a.batch),
        ])?;
        let kernel_arguments = KernelArguments {
            rows: a.rows,
            firsts: a.firsts,
            counts: a.counts,
            key_tables: a.key_tables,
            pages: a.pages.map(|pages| pages.table),
            scales: a.scales,
            words: a.words,
            mean_errors: a.mean_errors,
            heads: a.heads as u32,
            max_rows: in_32_bits("rows", a.max_rows)?,
            blocks: in_32_bits("blocks", a.blocks)?,
            max_pages: in_32_bits("pages", a.pages.map_or(0, |pages| pages.max_pages))?,
            steps: sq::STEPS,
            padding: 0,
        };
        let threads = (self.shape.entry().1 * self.shape.dim) as u32;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, threads, false, &kernel_arguments) }
    }
}
