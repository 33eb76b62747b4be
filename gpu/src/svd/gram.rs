//! Second moments of rows, on tensor cores with sums that are exact enough for a decomposition.

use cudarc::driver::sys::{CUstream, CUtensorMap};

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::tensor_map::{BOX_WIDTH, RowsOfHeads};
use crate::{Device, Element, Error, Program};

/// Rows of a tile: `ROWS` of the kernel.
const ROWS: usize = 128;

/// Compile-time shape of [`Gram`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GramShape {
    /// Elements of a row: a multiple of 16 up to 128.
    pub dim: usize,
    /// Element type of the rows.
    pub element: Element,
}

impl GramShape {
    /// The kernels for a compute capability. For 9.0, rows of 64 and 128 elements have their own kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self, capability: (i32, i32)) -> Result<Program, Error> {
        if self.dim == 0 || self.dim > 128 || !self.dim.is_multiple_of(16) {
            let operation = format!("{self:?}");
            return Err(Error::Unsupported { operation, supported: "multiples of 16 up to 128" });
        }
        let defines = [
            ("DIM", self.dim),
            ("ELEMENT", self.element as usize),
            ("SHARED_BYTES", self.shared_bytes(capability)),
        ];
        let program = if self.in_squares(capability) {
            Program::new(source!("svd_gram/gram_sm90.cu"), &defines).arch_specific()
        } else {
            Program::new(source!("svd_gram/gram_sm80.cu"), &defines)
        };
        Ok(program)
    }

    /// Whether the sm_90 kernel, which computes squares of the matrix, runs instead of the sm_80 kernel,
    /// which computes strips.
    const fn in_squares(&self, capability: (i32, i32)) -> bool {
        matches!(capability, (9, 0)) && self.dim.is_multiple_of(BOX_WIDTH)
    }

    /// Bytes of shared memory: on sm_90 six tiles, the matrix of ones and two mbarriers per tile, rounded up;
    /// on sm_80 three tiles.
    const fn shared_bytes(&self, capability: (i32, i32)) -> usize {
        let tile = ROWS * self.dim * 2;
        if self.in_squares(capability) { 6 * tile + 256 } else { 3 * tile }
    }

    /// Elements of the partial sums of a block: `PART` of the kernel.
    const fn part_len(&self) -> usize {
        self.dim * (self.dim + 1)
    }
}

const OPERATION: Operation = Operation("svd::Gram");

/// Pointers and sizes of one launch of [`Gram`].
#[derive(Clone, Copy, Debug)]
pub struct GramArguments {
    /// Number of heads.
    pub heads: usize,
    /// Number of rows of a head.
    pub n: usize,
    /// Elements (heads, n, dim), with the strides below and a contiguous last dimension.
    pub rows: DevicePtr<AnyElement>,
    /// Strides of heads and rows in elements, multiples of 8.
    pub strides: [usize; 2],
    /// `f64` (heads, dim, dim): the full symmetric matrices, to which `x^T x` of every row is added. Zero
    /// them before the first launch.
    pub matrices: DevicePtr<f64>,
    /// `f64` (heads, dim): the sums of the rows, to which every row is added. Zero them before the first
    /// launch.
    pub sums: DevicePtr<f64>,
    /// Bytes ([`Gram::workspace_len`],), overwritten.
    pub workspace: DevicePtr<u8>,
}

/// `Sums` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Sums {
    matrices: DevicePtr<f64>,
    sums: DevicePtr<f64>,
    parts: DevicePtr<f32>,
    n: u64,
    part_count: u32,
}

const _: () = assert!(size_of::<Sums>() == 40);

/// `Arguments` of the kernel for sm_80.
#[derive(Clone, Copy)]
#[repr(C)]
struct StripsArguments {
    sums: Sums,
    rows: DevicePtr<AnyElement>,
    head_stride: u64,
    row_stride: u64,
}

const _: () = assert!(size_of::<StripsArguments>() == 64);

/// `Arguments` of the kernel for sm_90.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct SquaresArguments {
    rows: CUtensorMap,
    sums: Sums,
}

const _: () = assert!(size_of::<SquaresArguments>() == 256);

/// Second moments: `svd_core::Gram::add_rows` for all heads. `svd_core::Gram::from_sums` takes the results.
///
/// Products are exact. Sums of 128 rows are in `f32` with the rounding of tensor cores, the sums of a block
/// in two floats, rounded to one at its end, and all further sums in `f64`. Their order is fixed, so that two
/// runs give the same bytes. A NaN or infinite element makes sums of its head NaN.
///
/// Its kernels use programmatic dependent launch (PDL) on sm_90. They wait for the previous kernel before
/// they read anything.
///
/// # Cost
/// One pass over the rows, and about n * dim * dim / 2 multiply-adds per head on tensor cores; on sm_90 3 / 4
/// of n * dim * dim for 128 elements, and n * dim * dim for 64.
pub struct Gram {
    gram: Kernel,
    join: Kernel,
    shape: GramShape,
    in_squares: bool,
    sm_count: usize,
}

impl Gram {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: GramShape) -> Result<Self, Error> {
        let program = shape.program(device.capability())?;
        Ok(Self {
            gram: device.kernel(&program, "svd_gram", shape.shared_bytes(device.capability()))?,
            join: device.kernel(&program, "svd_gram_join", 0)?,
            shape,
            in_squares: shape.in_squares(device.capability()),
            sm_count: device.sm_count(),
        })
    }

    /// Blocks that share a head: all heads together have about one block per SM.
    fn parts(&self, heads: usize) -> usize {
        (self.sm_count / heads.max(1)).max(1)
    }

    /// Bytes of workspace for `heads` heads.
    #[must_use]
    pub fn workspace_len(&self, heads: usize) -> usize {
        heads.saturating_mul(self.parts(heads)).saturating_mul(4 * self.shape.part_len())
    }

    /// Launches the addition on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &GramArguments) -> Result<(), Error> {
        let a = arguments;
        if a.heads == 0 || a.n == 0 {
            return Ok(());
        }
        OPERATION.at_most(i32::MAX as u32, "rows of a head", a.n)?;
        if a.strides.iter().any(|stride| !stride.is_multiple_of(8)) {
            return Err(OPERATION.error("a stride is not a multiple of 8"));
        }
        let parts = self.parts(a.heads);
        let sums = Sums {
            matrices: a.matrices,
            sums: a.sums,
            parts: a.workspace.cast(),
            n: a.n as u64,
            part_count: parts as u32,
        };
        let grid = OPERATION.grid(&[("parts", parts), ("heads", a.heads)])?;
        let strips = self.shape.dim / 16;
        let join_grid = OPERATION.grid(&[("blocks", strips * (strips + 1) / 2 + 1), ("heads", a.heads)])?;
        // SAFETY: the structures are the kernels' arguments; the caller upholds the contract of their
        // pointers.
        unsafe {
            if self.in_squares {
                self.gram.bind_to_thread()?; // for the tensor map
                let GramShape { dim, element } = self.shape;
                let (rows, heads, n, strides) = (a.rows, a.heads, a.n, a.strides);
                let rows = RowsOfHeads { rows, element, heads, n, dim, strides, box_rows: ROWS }.map()?;
                let squares = (dim / BOX_WIDTH) * (dim / BOX_WIDTH + 1) / 2;
                let threads = 128 * squares as u32 + 32;
                self.gram.launch(stream, grid, threads, true, &SquaresArguments { rows, sums })?;
            } else {
                let (head_stride, row_stride) = (a.strides[0] as u64, a.strides[1] as u64);
                let arguments = StripsArguments { sums, rows: a.rows, head_stride, row_stride };
                self.gram.launch(stream, grid, 2 * self.shape.dim as u32, true, &arguments)?;
            }
            self.join.launch(stream, join_grid, 256, true, &sums)
        }
    }
}
