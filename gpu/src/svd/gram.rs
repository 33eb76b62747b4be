use cudarc::driver::sys::CUstream;

use crate::device::Kernel;
use crate::{Device, Element, Error, KERNELS, Program};

/// Rows of a tile, and tiles of the ring: `ROWS` and `STAGES` of the kernel.
const ROWS: usize = 128;
const STAGES: usize = 3;

/// What second moments are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GramShape {
    /// Components of a row: a multiple of 16 up to 128.
    pub dim: usize,
    /// Element of the rows.
    pub element: Element,
}

impl GramShape {
    /// The program.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        if self.dim == 0 || self.dim > 128 || !self.dim.is_multiple_of(16) {
            let operation = format!("{self:?}");
            return Err(Error::Unsupported { operation, supported: "multiples of 16 up to 128" });
        }
        let defines = [("DIM", self.dim), ("SHARED_BYTES", self.shared_bytes())];
        Ok(Program::new("svd_gram", KERNELS.svd_gram, &defines)
            .define_if(self.element == Element::Bf16, "BFLOAT"))
    }

    const fn shared_bytes(&self) -> usize {
        STAGES * ROWS * self.dim * 2
    }

    /// Numbers of a block's part: `PACKED` of the kernel.
    const fn packed(&self) -> usize {
        let strips = self.dim / 16;
        strips * (strips / 2 + 1) * 256 + self.dim
    }
}

/// Device pointers and sizes of one launch.
#[derive(Clone, Copy, Debug)]
pub struct GramArguments {
    /// Heads.
    pub heads: usize,
    /// Rows of a head.
    pub n: usize,
    /// Elements (heads, n, dim), each dimension but the last with its stride.
    pub rows: u64,
    /// Elements from a head and a row to the next, multiples of 8.
    pub strides: [usize; 2],
    /// f64 (heads, dim, dim): `x^T x` of every row is added, to all of the symmetric matrix. Zeros to begin with.
    pub matrices: u64,
    /// f64 (heads, dim): every row is added. Zeros to begin with.
    pub sums: u64,
    /// Bytes ([`Gram::workspace_len`],), overwritten.
    pub workspace: u64,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    rows: u64,
    matrices: u64,
    sums: u64,
    partials: u64,
    n: u64,
    head_stride: u64,
    row_stride: u64,
}

/// `JoinArguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct JoinArguments {
    gram: KernelArguments,
    parts: u32,
}

/// `svd_core::Gram::add_rows` for all heads; `svd_core::Gram::from_sums` takes what comes out.
///
/// Products are exact; sums of 128 rows are in `f32`, as tensor cores round them, all above in `f64` and in one order, so that two runs
/// give the same bytes. What is no number spoils its head's sums.
///
/// # Cost
/// Reads the rows; n * dim * (dim / 2 + 16) multiply-adds a head, on tensor cores.
pub struct Gram {
    gram: Kernel,
    join: Kernel,
    shape: GramShape,
    processors: usize,
}

impl Gram {
    /// Compiles it for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: GramShape) -> Result<Self, Error> {
        let program = shape.program()?;
        Ok(Self {
            gram: device.kernel(&program, "svd_gram", shape.shared_bytes())?,
            join: device.kernel(&program, "svd_gram_join", 0)?,
            shape,
            processors: device.processors(),
        })
    }

    /// Blocks that share a head: one a multiprocessor, if heads are few.
    fn parts(&self, heads: usize) -> usize {
        (self.processors / heads.max(1)).max(1)
    }

    /// Bytes of scratch for so many heads.
    #[must_use]
    pub fn workspace_len(&self, heads: usize) -> usize {
        heads.saturating_mul(self.parts(heads)).saturating_mul(8 * self.shape.packed())
    }

    /// Puts the addition on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// Every pointer must be to device memory of the device, aligned to 16 bytes, with as many elements as its shape says, and
    /// stay so, unwritten by others, until the launch has run; `stream` must be of the device.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &GramArguments) -> Result<(), Error> {
        let a = arguments;
        let problem = |problem: &str| Error::Argument { operation: "svd::Gram", problem: problem.into() };
        if a.heads == 0 || a.n == 0 {
            return Ok(());
        }
        if a.heads > 65_535 {
            return Err(problem("more than 65,535 heads"));
        }
        if a.strides.iter().any(|stride| !stride.is_multiple_of(8)) {
            return Err(problem("a stride is not a multiple of 8"));
        }
        let (parts, heads) = (self.parts(a.heads) as u32, a.heads as u32);
        let gram = KernelArguments {
            rows: a.rows,
            matrices: a.matrices,
            sums: a.sums,
            partials: a.workspace,
            n: a.n as u64,
            head_stride: a.strides[0] as u64,
            row_stride: a.strides[1] as u64,
        };
        let join = JoinArguments { gram, parts };
        // SAFETY: the structures are the kernels' arguments; the caller vouches for what their pointers lead to.
        unsafe {
            self.gram.launch(stream, (parts, heads, 1), 2 * self.shape.dim as u32, false, &gram)?;
            self.join.launch(stream, (self.shape.packed().div_ceil(256) as u32, heads, 1), 256, false, &join)
        }
    }
}
