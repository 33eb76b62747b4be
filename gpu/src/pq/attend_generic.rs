//! Attention over codes in the layout of `pq-core`, for the quantizers that no fast kernel supports.

use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, Program};

/// Compile-time shape of [`AttendGeneric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendGenericShape {
    /// Quantizer of the keys.
    pub keys: PqShape,
    /// Quantizer of the values. Its `dim` may differ.
    pub values: PqShape,
    /// Query heads per KV head.
    pub group: usize,
}

impl AttendGenericShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        if self.group == 0 || self.group > 16 || self.values.dim() > 512 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "1 to 16 query heads per key/value head, and values of at most 512 elements",
            });
        }
        let defines = [
            ("DIM", self.values.dim()),
            ("GROUP", self.group),
            ("KEY_M", self.keys.m()),
            ("KEY_BITS", self.keys.nbits() as usize),
            ("VALUE_M", self.values.m()),
            ("VALUE_BITS", self.values.nbits() as usize),
        ];
        Ok(Program::new(source!("pq_attend_generic.cu"), &defines))
    }
}

const OPERATION: Operation = Operation("pq::AttendGeneric");

/// Pointers and sizes of one launch of [`AttendGeneric`].
#[derive(Clone, Copy, Debug)]
pub struct AttendGenericArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Capacity of a sequence in tokens.
    pub capacity: usize,
    /// `f32` (batch, heads, group, m, ksub): lookup tables of the keys, as `pq_core::lut_into` computes them
    /// from scaled queries.
    pub luts: DevicePtr<f32>,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), in the layout of
    /// [`Codes`](pq_core::Codes).
    pub key_codes: DevicePtr<u8>,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), in the layout of
    /// [`Codes`](pq_core::Codes).
    pub value_codes: DevicePtr<u8>,
    /// `f32` (heads, m, ksub, dsub): codebooks of the values.
    pub centroids: DevicePtr<f32>,
    /// `u32` (batch,): the length of each sequence in tokens.
    pub lengths: DevicePtr<u32>,
    /// `f32` (batch, heads, capacity): factors of the scores, by key.
    pub key_scales: Option<DevicePtr<f32>>,
    /// `f32` (batch, heads, capacity): factors of the values.
    pub value_scales: Option<DevicePtr<f32>>,
    /// `f32` (batch, heads, group, capacity): bias added to the scores.
    pub bias: Option<DevicePtr<f32>>,
    /// `f32` (batch, heads, group, dim), fully written. A sequence without tokens gives zeros.
    pub out: DevicePtr<f32>,
    /// `f32` (batch, heads, group), fully written: the log-sum-exp of the scores (natural logarithm), to
    /// merge the result with attention over other tokens.
    pub log_sum_exp: Option<DevicePtr<f32>>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    luts: DevicePtr<f32>,
    key_codes: DevicePtr<u8>,
    value_codes: DevicePtr<u8>,
    centroids: DevicePtr<f32>,
    lengths: DevicePtr<u32>,
    key_scales: Option<DevicePtr<f32>>,
    value_scales: Option<DevicePtr<f32>>,
    bias: Option<DevicePtr<f32>>,
    out: DevicePtr<f32>,
    log_sum_exp: Option<DevicePtr<f32>>,
    key_stride: u64,
    value_stride: u64,
    capacity: u64,
}

const _: () = assert!(size_of::<KernelArguments>() == 104);

/// `pq_core::attend_into` at every shape, including 12 bits, with scales and bias, over codes in the layout
/// of `pq-core`.
///
/// It is not a fast kernel: it launches one block per head and sequence. [`Attend`](super::Attend) is the
/// fast one.
///
/// # Cost
/// Per query n * m lookups for the scores and n * dim multiply-adds on centroids, from L1 and L2.
/// # Source
/// MILLION (DAC 2025), III-B.
pub struct AttendGeneric {
    kernel: Kernel,
    shape: AttendGenericShape,
}

impl AttendGeneric {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendGenericShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&shape.program()?, "pq_attend_generic", 0)?, shape })
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. Lengths do not exceed the capacity: the kernel
    /// does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &AttendGenericArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 {
            return Ok(());
        }
        let grid = OPERATION.grid(&[("heads", a.heads), ("sequences", a.batch)])?;
        let kernel_arguments = KernelArguments {
            luts: a.luts,
            key_codes: a.key_codes,
            value_codes: a.value_codes,
            centroids: a.centroids,
            lengths: a.lengths,
            key_scales: a.key_scales,
            value_scales: a.value_scales,
            bias: a.bias,
            out: a.out,
            log_sum_exp: a.log_sum_exp,
            key_stride: self.shape.keys.codes_len(a.capacity) as u64,
            value_stride: self.shape.values.codes_len(a.capacity) as u64,
            capacity: a.capacity as u64,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, 256, false, &kernel_arguments) }
    }
}
