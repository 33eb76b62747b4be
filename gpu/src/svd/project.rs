use cudarc::driver::sys::CUstream;

use crate::device::Kernel;
use crate::{Device, Element, Error, KERNELS, Program};

const WARPS: usize = 8;
/// Rows of a warp at a time: `ROWS` of the kernel.
const ROWS: usize = 16;

/// What a projection is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProjectShape {
    /// Components of a row: 32, 64, 96 or 128.
    pub dim: usize,
    /// Components that are kept: a multiple of 8, at most `dim`.
    pub rank: usize,
    /// Element of rows and results.
    pub element: Element,
}

impl ProjectShape {
    fn shared_bytes(&self) -> usize {
        let parts = if self.element == Element::Bf16 { 2 } else { 1 };
        parts * self.rank.div_ceil(32) * 32 * self.dim * 2
    }

    /// The program.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        let dim_fits = matches!(self.dim, 32 | 64 | 96 | 128);
        if !dim_fits || self.rank == 0 || self.rank > self.dim || !self.rank.is_multiple_of(8) {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "dim 32, 64, 96 or 128, and a rank that is a multiple of 8 and not above it",
            });
        }
        let defines = [("DIM", self.dim), ("RANK", self.rank), ("SHARED_BYTES", self.shared_bytes())];
        Ok(Program::new("svd_project", KERNELS.svd_project, &defines)
            .define_if(self.element == Element::Bf16, "BFLOAT"))
    }
}

/// Device pointers and sizes of one launch.
#[derive(Clone, Copy, Debug)]
pub struct ProjectArguments {
    /// Key/value heads, each with a map of its own.
    pub heads: usize,
    /// Rows of a head.
    pub n: usize,
    /// Elements (heads, n, dim), each dimension but the last with its stride.
    pub rows: u64,
    /// Elements from a head and a row to the next: multiples of 8.
    pub strides: [usize; 2],
    /// f32 (heads, dim, rank): the columns of `svd_core::Map`.
    pub columns: u64,
    /// Elements (heads, n, rank), fully written.
    pub out: u64,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    rows: u64,
    columns: u64,
    out: u64,
    n: u64,
    head_stride: u64,
    row_stride: u64,
}

/// `svd_core::Map::project_into` for all heads: keys, values or queries into the components that their rotations keep.
///
/// # Cost
/// Reads the rows and writes the results, on tensor cores.
pub struct Project {
    kernel: Kernel,
    processors: usize,
}

impl Project {
    /// Compiles it for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: ProjectShape) -> Result<Self, Error> {
        let kernel = device.kernel(&shape.program()?, "svd_project", shape.shared_bytes())?;
        Ok(Self { kernel, processors: device.processors() })
    }

    /// Puts the projection on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// Every pointer must be to device memory of the device, aligned to 16 bytes, with as many elements as its shape says, and
    /// stay so, unwritten by others, until the launch has run; `stream` must be of the device.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &ProjectArguments) -> Result<(), Error> {
        let a = arguments;
        let problem = |problem: &str| Error::Argument { operation: "svd::Project", problem: problem.into() };
        if a.heads == 0 || a.n == 0 {
            return Ok(());
        }
        if a.heads > 65_535 {
            return Err(problem("more than 65,535 heads"));
        }
        if a.strides.iter().any(|stride| !stride.is_multiple_of(8)) {
            return Err(problem("a stride is not a multiple of 8"));
        }
        // Two blocks a multiprocessor, each with the map of one head.
        let blocks = a.n.div_ceil(WARPS * ROWS).min((2 * self.processors / a.heads).max(1));
        let kernel_arguments = KernelArguments {
            rows: a.rows,
            columns: a.columns,
            out: a.out,
            n: a.n as u64,
            head_stride: a.strides[0] as u64,
            row_stride: a.strides[1] as u64,
        };
        let grid = (blocks as u32, a.heads as u32, 1);
        // SAFETY: the structure is the kernel's argument; the caller vouches for what its pointers lead to.
        unsafe { self.kernel.launch(stream, grid, WARPS as u32 * 32, false, &kernel_arguments) }
    }
}
