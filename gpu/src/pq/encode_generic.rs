//! Encoding of many tokens into the layout of `pq-core`, for any quantizer.

use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use super::nearest::{TILE, defines, shared_bytes};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error, Program, VectorElement};

/// Compile-time shape of [`EncodeGeneric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeGenericShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Element type of the vectors.
    pub element: VectorElement,
}

impl EncodeGenericShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for subspaces of more than about 150 elements.
    pub fn program(&self) -> Result<Program, Error> {
        let defines = defines(self.quantizer, self.element, shared_bytes(self.quantizer))?;
        Ok(Program::new(source!("pq_encode_generic.cu"), &defines))
    }
}

const OPERATION: Operation = Operation("pq::EncodeGeneric");

/// Pointers and sizes of one launch of [`EncodeGeneric`].
#[derive(Clone, Copy, Debug)]
pub struct EncodeGenericArguments {
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
    /// `u32` (batch,): the position of the first new vector in its sequence. All other tokens keep their
    /// codes.
    pub firsts: DevicePtr<u32>,
    /// `u32` (batch,): the number of new vectors of each sequence.
    pub counts: DevicePtr<u32>,
    /// Capacity of a sequence in tokens.
    pub capacity: usize,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), in the layout of
    /// [`Codes`](pq_core::Codes), written at the new tokens.
    pub codes: DevicePtr<u8>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    vectors: DevicePtr<AnyElement>,
    centroids: DevicePtr<f32>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    codes: DevicePtr<u8>,
    code_stride: u64,
    strides: [u64; 3],
    heads: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 80);

/// `pq_core::encode_into` into the layout of `pq-core`, which [`Search`](super::Search),
/// [`Scan`](super::Scan) and [`AttendGeneric`](super::AttendGeneric) read, for any quantizer. One launch
/// appends tokens to sequences of different lengths.
///
/// # Cost
/// ksub * dim multiply-adds per vector.
pub struct EncodeGeneric {
    kernel: Kernel,
    shape: EncodeGenericShape,
}

impl EncodeGeneric {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: EncodeGenericShape) -> Result<Self, Error> {
        let kernel = device.kernel(&shape.program()?, "pq_encode_generic", shared_bytes(shape.quantizer))?;
        Ok(Self { kernel, shape })
    }

    /// Bytes of shared memory of a block.
    #[must_use]
    pub const fn shared_memory(&self) -> usize {
        shared_bytes(self.shape.quantizer)
    }

    /// Launches the encoding on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. For every sequence, `firsts + counts` does not
    /// exceed the capacity, and the count does not exceed `max_count`: the kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &EncodeGenericArguments) -> Result<(), Error> {
        let a = arguments;
        let rows = a.batch.saturating_mul(a.heads);
        if rows == 0 || a.max_count == 0 {
            return Ok(());
        }
        OPERATION.in_32_bits("vectors of a sequence", a.max_count)?;
        // One tile more than `max_count` vectors fill: the first vector may lie in the middle of a tile.
        let tiles = a.max_count.div_ceil(TILE) + 1;
        let subspaces = self.shape.quantizer.m();
        let grid =
            OPERATION.grid(&[("tiles", tiles), ("subspaces", subspaces), ("heads of sequences", rows)])?;
        let kernel_arguments = KernelArguments {
            vectors: a.vectors,
            centroids: a.centroids,
            firsts: a.firsts,
            counts: a.counts,
            codes: a.codes,
            code_stride: self.shape.quantizer.codes_len(a.capacity) as u64,
            strides: a.strides.map(|stride| stride as u64),
            heads: a.heads as u32,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, TILE as u32, false, &kernel_arguments) }
    }
}
