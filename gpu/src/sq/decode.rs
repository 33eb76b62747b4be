//! Transformed rows of coded keys and values.

use cudarc::driver::sys::CUstream;
use pq_core::sq;

use super::blocks::{BlockArguments, CodedBlocks};
use super::{EncodeShape, Side};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error, Program, VectorElement};

/// Threads of a block, which decodes a tile.
const THREADS: u32 = 128;

/// Compile-time shape of [`Decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// The shape that the rows were encoded with.
    pub coded: EncodeShape,
    /// Element type of the rows.
    pub element: VectorElement,
}

impl DecodeShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        self.coded.program_of(source!("sq_decode.cu"), &[("ELEMENT", self.element as usize)])
    }
}

const OPERATION: Operation = Operation("sq::Decode");

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    blocks: BlockArguments,
    rows: DevicePtr<AnyElement>,
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
    shape: EncodeShape,
}

impl Decode {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: DecodeShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&shape.program()?, "sq_decode", 0)?, shape: shape.coded })
    }

    /// Launches the decoding on a stream.
    ///
    /// # Shapes
    /// `rows` elements (batch, heads, `max_rows`, dim): the transformed rows that [`Encode`](super::Encode)
    /// took, as far as the codes keep them. Keys are relative to the middle of their block and in the order of
    /// [`allot`](pq_core::sq::allot). Rows beyond the counts are not written.
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with rows aligned to 16 bytes. For every
    /// sequence, the blocks do not exceed those of the sequence or of its pages, the count does not exceed
    /// `max_rows`, and every page number refers to an existing page: the kernel does not clamp them.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        coded: &CodedBlocks,
        rows: DevicePtr<AnyElement>,
    ) -> Result<(), Error> {
        let Some(blocks) = coded.arguments(OPERATION, &self.shape)? else { return Ok(()) };
        let tiles = coded.max_rows.div_ceil(sq::TILE);
        let grid = OPERATION.grid(&[("tiles", tiles), ("heads", coded.heads), ("sequences", coded.batch)])?;
        let unit_step = match self.shape.side {
            Side::Keys { .. } => 0.0,
            Side::Values { bits } => sq::STEPS[bits] / (self.shape.dim as f32).sqrt(),
        };
        let prepared = KernelArguments { blocks, rows, unit_step, padding: 0 };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, THREADS, false, &prepared) }
    }
}
