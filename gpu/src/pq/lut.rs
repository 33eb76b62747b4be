use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error, KERNELS, Program, VectorElement};

/// What tables are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LutShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Query heads per key/value head.
    pub group: usize,
    /// Element of the queries.
    pub element: VectorElement,
}

impl LutShape {
    /// The program.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        let dsub = self.quantizer.dsub();
        if self.group == 0 || self.group > 16 || self.group * dsub > 8192 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "1 to 16 query heads a key/value head, and 8,192 components of them a subspace",
            });
        }
        let defines = [
            ("M", self.quantizer.m()),
            ("KSUB", self.quantizer.ksub()),
            ("DSUB", dsub),
            ("GROUP", self.group),
            ("ELEMENT", self.element as usize),
        ];
        Ok(Program::new("pq_lut", KERNELS.pq_lut, &defines).without_fused_multiply_add())
    }
}

const OPERATION: Operation = Operation("pq::Lut");

/// Device pointers and sizes of one launch.
#[derive(Clone, Copy, Debug)]
pub struct LutArguments {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Elements (batch, heads, group, dim).
    pub queries: DevicePtr<AnyElement>,
    /// A factor of the queries, such as 1 / sqrt(dim); their products with it are rounded to `f32`.
    pub scale: f32,
    /// f32 (heads, m, ksub, dsub): the codebooks.
    pub centroids: DevicePtr<f32>,
    /// f32 (batch, heads, group, m, ksub), fully written.
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

/// `pq_core::lut_into` for all heads, with the same bits: the tables that [`Scan`](super::Scan), [`Search`](super::Search) and
/// [`AttendGeneric`](super::AttendGeneric) look up.
///
/// # Cost
/// group * ksub * dim multiply-adds a head.
pub struct Lut {
    kernel: Kernel,
    shape: LutShape,
}

impl Lut {
    /// Compiles it for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: LutShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&shape.program()?, "pq_lut", 0)?, shape })
    }

    /// Puts the making of tables on a stream.
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
        // SAFETY: the structure is the kernel's argument; the caller vouches for what its pointers lead to.
        unsafe { self.kernel.launch(stream, grid, 256, false, &kernel_arguments) }
    }
}
