//! The lookup tables of all query heads, for the kernels that read the layout of `pq-core`.

use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error, Program, VectorElement};

/// Compile-time shape of [`Lut`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LutShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Query heads per KV head.
    pub group: usize,
    /// Element type of the queries.
    pub element: VectorElement,
}

impl LutShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        let dsub = self.quantizer.dsub();
        if self.group == 0 || self.group > 16 || self.group * dsub > 8192 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "1 to 16 query heads per key/value head, with 8,192 elements per subspace",
            });
        }
        let defines = [
            ("M", self.quantizer.m()),
            ("KSUB", self.quantizer.ksub()),
            ("DSUB", dsub),
            ("GROUP", self.group),
            ("ELEMENT", self.element as usize),
        ];
        Ok(Program::new(source!("pq_lut.cu"), &defines).without_fused_multiply_add())
    }
}

const OPERATION: Operation = Operation("pq::Lut");

/// Pointers and sizes of one launch of [`Lut`].
#[derive(Clone, Copy, Debug)]
pub struct LutArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Elements (batch, heads, group, dim).
    pub queries: DevicePtr<AnyElement>,
    /// Factor of the queries, such as `1 / sqrt(dim)`. The products are rounded to `f32`.
    pub scale: f32,
    /// `f32` (heads, m, ksub, dsub): the codebooks.
    pub centroids: DevicePtr<f32>,
    /// `f32` (batch, heads, group, m, ksub), fully written.
    pub luts: DevicePtr<f32>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    queries: DevicePtr<AnyElement>,
    centroids: DevicePtr<f32>,
    luts: DevicePtr<f32>,
    scale: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 32);

/// `pq_core::lut_into` for all heads, with the same bits: the lookup tables of [`Scan`](super::Scan),
/// [`Search`](super::Search) and [`AttendGeneric`](super::AttendGeneric).
///
/// # Cost
/// group * ksub * dim multiply-adds per head.
pub struct Lut {
    kernel: Kernel,
    shape: LutShape,
}

impl Lut {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: LutShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&shape.program()?, "pq_lut", 0)?, shape })
    }

    /// Launches the computation of the tables on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &LutArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 {
            return Ok(());
        }
        let subspaces = self.shape.quantizer.m();
        let grid = OPERATION.grid(&[("subspaces", subspaces), ("heads", a.heads), ("sequences", a.batch)])?;
        let kernel_arguments =
            KernelArguments { queries: a.queries, centroids: a.centroids, luts: a.luts, scale: a.scale };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, 256, false, &kernel_arguments) }
    }
}
