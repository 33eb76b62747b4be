//! Scalar codes of blocks of transformed keys and values.

use cudarc::driver::sys::CUstream;
use pq_core::sq;

use super::blocks::{BlockArguments, CodedBlocks};
use super::{KeyTable, Side};
use crate::compile::{Source, source};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
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
        let source = match self.side {
            Side::Keys { .. } => source!("sq_encode_keys.cu"),
            Side::Values { .. } => source!("sq_encode_values.cu"),
        };
        self.program_of(source, &[])
    }

    /// A kernel for blocks of this shape, with definitions in addition to those of the shape.
    pub(super) fn program_of(&self, source: Source, defines: &[(&str, usize)]) -> Result<Program, Error> {
        let of_shape = self.side.defines(self.dim, self.block);
        let of_shape =
            of_shape.map_err(|supported| Error::Unsupported { operation: format!("{self:?}"), supported })?;
        let program = Program::new(source, &[&of_shape, defines].concat());
        Ok(program.define_if(self.paged, "PAGED").without_fused_multiply_add())
    }

    /// The kernel's name, and threads per component.
    const fn entry(&self) -> (&'static str, usize) {
        match self.side {
            Side::Keys { .. } => ("sq_encode_keys", 3),
            Side::Values { .. } => ("sq_encode_values", 1),
        }
    }

    /// The layout of the tables of keys.
    #[must_use]
    pub const fn key_table(&self) -> Option<KeyTable> {
        match self.side {
            Side::Keys { slots } => Some(KeyTable::new(self.dim, slots)),
            Side::Values { .. } => None,
        }
    }
}

const OPERATION: Operation = Operation("sq::Encode");

/// `Arguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    blocks: BlockArguments,
    rows: DevicePtr<f32>,
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

    /// Launches the encoding on a stream.
    ///
    /// # Shapes
    /// `rows` `f32` (batch, heads, `max_rows`, dim): transformed rows, as
    /// [`encode_keys_into`](pq_core::sq::encode_keys_into) and
    /// [`encode_values_into`](pq_core::sq::encode_values_into) take them; `coded` is written at the new blocks.
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. For every sequence, the new blocks do not exceed
    /// the blocks of the sequence or of its pages, the count does not exceed `max_rows`, and every page number
    /// refers to an existing page: the kernel does not clamp them.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        rows: DevicePtr<f32>,
        coded: &CodedBlocks,
    ) -> Result<(), Error> {
        let Some(blocks) = coded.arguments(OPERATION, &self.shape)? else { return Ok(()) };
        let of_sequence = coded.max_rows.div_ceil(self.shape.block);
        let grid =
            OPERATION.grid(&[("blocks", of_sequence), ("heads", coded.heads), ("sequences", coded.batch)])?;
        let threads = (self.shape.entry().1 * self.shape.dim) as u32;
        let prepared = KernelArguments { blocks, rows, steps: sq::STEPS, padding: 0 };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, threads, false, &prepared) }
    }
}
