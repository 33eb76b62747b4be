//! Products of rows with the truncated bases of all heads.

use cudarc::driver::sys::{CUstream, CUtensorMap};

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::tensor_map::{BOX_WIDTH, RowsOfHeads};
use crate::{Device, Element, Error, Program};

/// On sm_80: warps of a block, and rows of a warp at a time.
const WARPS: usize = 8;
const WARP_ROWS: usize = 16;
/// On sm_90: rows of a tile, tiles of the ring buffer, consumer warpgroups of a block, and bytes of
/// mbarriers.
const TILE_ROWS: usize = 64;
const STAGES: usize = 6;
const GROUPS: usize = 2;
const BARRIER_BYTES: usize = 16 * STAGES;

/// Compile-time shape of [`Project`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProjectShape {
    /// Elements of a row: 32, 64, 96 or 128.
    pub dim: usize,
    /// Elements of a result: a multiple of 8, at most `dim`.
    pub rank: usize,
    /// Element type of rows and results.
    pub element: Element,
}

impl ProjectShape {
    /// Whether the sm_90 kernel, which copies boxes by TMA, runs instead of the sm_80 kernel, which loads
    /// rows to registers.
    const fn in_boxes(&self, capability: (i32, i32)) -> bool {
        matches!(capability, (9, 0)) && self.dim.is_multiple_of(BOX_WIDTH)
    }

    fn shared_bytes(&self, capability: (i32, i32)) -> usize {
        let map_parts = if self.element == Element::Bf16 { 2 } else { 1 };
        if !self.in_boxes(capability) {
            return map_parts * self.rank.div_ceil(32) * 32 * self.dim * 2;
        }
        let columns = self.rank.next_multiple_of(BOX_WIDTH);
        let elements =
            (STAGES * TILE_ROWS + map_parts * columns) * self.dim + GROUPS * 2 * TILE_ROWS * columns;
        2 * elements + BARRIER_BYTES
    }

    /// The kernel for a compute capability. For 9.0, rows of 64 and 128 elements have their own kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self, capability: (i32, i32)) -> Result<Program, Error> {
        let dim_fits = matches!(self.dim, 32 | 64 | 96 | 128);
        if !dim_fits || self.rank == 0 || self.rank > self.dim || !self.rank.is_multiple_of(8) {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "dim 32, 64, 96 or 128, and a rank that is a multiple of 8 and not above it",
            });
        }
        let shared = self.shared_bytes(capability);
        let defines = [
            ("DIM", self.dim),
            ("RANK", self.rank),
            ("ELEMENT", self.element as usize),
            ("SHARED_BYTES", shared),
        ];
        let program = if self.in_boxes(capability) {
            Program::new(source!("svd_project/project_sm90.cu"), &defines).arch_specific()
        } else {
            Program::new(source!("svd_project/project_sm80.cu"), &defines)
        };
        Ok(program)
    }
}

const OPERATION: Operation = Operation("svd::Project");

/// Pointers and sizes of one launch of [`Project`].
#[derive(Clone, Copy, Debug)]
pub struct ProjectArguments {
    /// Number of KV heads, each with its own map.
    pub heads: usize,
    /// Number of rows of a head.
    pub n: usize,
    /// Elements (heads, n, dim), with the strides below and a contiguous last dimension.
    pub rows: DevicePtr<AnyElement>,
    /// Strides of heads and rows in elements, multiples of 8.
    pub strides: [usize; 2],
    /// `f32` (heads, dim, rank): the columns of `svd_core::Map`.
    pub columns: DevicePtr<f32>,
    /// Elements (heads, n, rank), fully written.
    pub out: DevicePtr<AnyElement>,
    /// With programmatic dependent launch (PDL), on sm_90 with 64 or 128 elements, blocks start before the
    /// previous kernel on the stream ends. If `pdl`, they read the columns *before* they wait for it
    /// (`griddepcontrol.wait`), so that kernel must not write them. They read everything else after the wait.
    pub pdl: bool,
}

/// `Arguments` of the kernel for sm_80.
#[derive(Clone, Copy)]
#[repr(C)]
struct RegistersArguments {
    rows: DevicePtr<AnyElement>,
    columns: DevicePtr<f32>,
    out: DevicePtr<AnyElement>,
    n: u64,
    head_stride: u64,
    row_stride: u64,
}

const _: () = assert!(size_of::<RegistersArguments>() == 48);

/// `Arguments` of the kernel for sm_90.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct BoxesArguments {
    rows: CUtensorMap,
    out: CUtensorMap,
    columns: DevicePtr<f32>,
    n: u64,
    pdl: u32,
}

const _: () = assert!(size_of::<BoxesArguments>() == 384);

/// `svd_core::Map::project_into` for all heads: projects keys, values or queries to the ranks of their
/// rotations.
///
/// # Cost
/// One pass over the rows and one over the results; n * dim * rank multiply-adds per head on tensor cores.
pub struct Project {
    kernel: Kernel,
    shape: ProjectShape,
    in_boxes: bool,
    sm_count: usize,
}

impl Project {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: ProjectShape) -> Result<Self, Error> {
        let capability = device.capability();
        let kernel =
            device.kernel(&shape.program(capability)?, "svd_project", shape.shared_bytes(capability))?;
        Ok(Self { kernel, shape, in_boxes: shape.in_boxes(capability), sm_count: device.sm_count() })
    }

    /// Launches the projection on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &ProjectArguments) -> Result<(), Error> {
        let a = arguments;
        if a.heads == 0 || a.n == 0 {
            return Ok(());
        }
        OPERATION.at_most(i32::MAX as u32, "rows of a head", a.n)?;
        if a.strides.iter().any(|stride| !stride.is_multiple_of(8)) {
            return Err(OPERATION.error("a stride is not a multiple of 8"));
        }
        // A block holds the map of one head, so it takes rows of that head only.
        let grid = |rows_at_once: usize, blocks: usize| {
            let blocks = a.n.div_ceil(rows_at_once).min((blocks / a.heads).max(1));
            OPERATION.grid(&[("blocks", blocks), ("heads", a.heads)])
        };
        // SAFETY: the structures are the kernels' arguments; the caller upholds the contract of their
        // pointers.
        unsafe {
            if self.in_boxes {
                self.kernel.bind_to_thread()?; // for the tensor maps
                let ProjectShape { dim, rank, element } = self.shape;
                let (rows, heads, n, strides) = (a.rows, a.heads, a.n, a.strides);
                let rows = RowsOfHeads { rows, element, heads, n, dim, strides, box_rows: TILE_ROWS };
                let out = RowsOfHeads { rows: a.out, dim: rank, strides: [n * rank, rank], ..rows };
                let (rows, out) = (rows.map()?, out.map()?);
                let pdl = u32::from(a.pdl);
                let arguments = BoxesArguments { rows, out, columns: a.columns, n: n as u64, pdl };
                let grid = grid(TILE_ROWS, self.sm_count)?;
                self.kernel.launch(stream, grid, 128 * GROUPS as u32 + 32, true, &arguments)
            } else {
                let arguments = RegistersArguments {
                    rows: a.rows,
                    columns: a.columns,
                    out: a.out,
                    n: a.n as u64,
                    head_stride: a.strides[0] as u64,
                    row_stride: a.strides[1] as u64,
                };
                let grid = grid(WARPS * WARP_ROWS, 2 * self.sm_count)?;
                self.kernel.launch(stream, grid, WARPS as u32 * 32, true, &arguments)
            }
        }
    }
}
