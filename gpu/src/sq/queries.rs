//! The queries of a decode step for scalar codes.

use cudarc::driver::sys::CUstream;

use super::AttendShape;
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::Pages;
use crate::{Device, Error, Program};

/// Blocks of tokens that a warp takes together: `ROWS` of the kernel.
const ROWS: usize = 16;
/// Bytes of shared memory beside maps, at most: constants of 256 components, and 16 queries.
const CONSTANTS: usize = 20 << 10;

const OPERATION: Operation = Operation("sq::Queries");

impl AttendShape {
    /// The kernel of [`Queries`] for blocks of up to `shared_memory` bytes ([`Device::shared_memory`]), for
    /// [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn queries_program(&self, shared_memory: usize) -> Result<Program, Error> {
        Ok(self.queries_plan(shared_memory)?.program(self))
    }

    fn queries_plan(&self, shared_memory: usize) -> Result<Plan, Error> {
        self.check()?;
        let (parts, room) = (self.dim / 16, shared_memory.saturating_sub(CONSTANTS));
        let map_bytes = parts * parts * 32 * 16;
        // A thread has the sums of a sixteenth of the products of a warp.
        let warps = if self.dim > 128 { 8 } else { 16 };
        let plan =
            |passes: usize, queries: usize| Plan { passes, queries, warps, map_bytes: map_bytes / passes };
        match (room / map_bytes).min(self.group) {
            0 if room >= map_bytes / 2 && parts.is_multiple_of(2) => Ok(plan(2, 1)),
            0 => Err(Error::Unsupported {
                operation: format!("the queries of {self:?}"),
                supported: "shapes of which half a map fits the shared memory of the device",
            }),
            // Slices of as many queries.
            most => Ok(plan(1, self.group.div_ceil(self.group.div_ceil(most)))),
        }
    }
}

/// How the queries of a shape are computed.
#[derive(Clone, Copy)]
struct Plan {
    passes: usize,
    queries: usize,   // of a slice of a group
    warps: usize,     // of a block of threads
    map_bytes: usize, // of a query's map in a pass
}

impl Plan {
    fn program(&self, shape: &AttendShape) -> Program {
        let defines = [
            ("HEAD_DIM", shape.dim),
            ("GROUP", shape.group),
            ("ELEMENT", shape.element as usize),
            ("BLOCK", shape.block),
            ("KEY_SLOTS", shape.key_slots),
            ("KEY_WIDTH", shape.key_width()),
            ("QUERIES", self.queries),
            ("PASSES", self.passes),
            ("WARPS", self.warps),
        ];
        Program::new(source!("sq_queries.cu"), &defines).define_if(shape.paged, "PAGED")
    }

    const fn shared_bytes(&self) -> usize {
        self.queries * self.map_bytes
    }
}

/// The queries of a step as integers, for every block of tokens: [`Queries`] writes them, and
/// [`Attend`](super::Attend) reads them.
#[derive(Clone, Copy, Debug)]
pub struct IntegerQueries {
    /// Words (batch, heads, `blocks`, group, dim / 4, 2): the high bytes and the low bytes of four components
    /// each. A component is `256 high + low` units, both with a sign.
    pub words: DevicePtr<u32>,
    /// `f32` (batch, heads, `blocks`, group, 2): the unit of the products of integers and codes, as
    /// logarithms to base 2, and what moves the codes to their levels.
    pub units: DevicePtr<f32>,
    /// Blocks of a sequence that there is room for, the same for all sequences.
    pub blocks: usize,
}

impl IntegerQueries {
    /// Words of a query.
    #[must_use]
    pub const fn words_len(dim: usize) -> usize {
        dim / 2
    }
}

/// Pointers and sizes of one launch of [`Queries`]. Arrays of the keys' blocks are those of
/// [`AttendArguments`](super::AttendArguments).
#[derive(Clone, Copy, Debug)]
pub struct QueriesArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Elements (batch, heads, group, dim): queries after RoPE, which rotates component `i` with
    /// `i + dim / 2`.
    pub queries: DevicePtr<AnyElement>,
    /// `f32` (heads, [`DualTable::table_len`](super::DualTable::table_len)): duals of the keys' bases.
    pub duals: DevicePtr<f32>,
    /// `f32` (dim / 2,): radians that each pair of components turns by per position.
    pub frequencies: DevicePtr<f32>,
    /// The position of the first coded token.
    pub first: usize,
    /// Bytes (pages or batch, heads, blocks, dim): steps of the keys.
    pub steps: DevicePtr<u8>,
    /// `u32` (heads, [`KeyTable::table_len`](super::KeyTable::table_len)): not read if all have the same
    /// bits.
    pub key_tables: DevicePtr<u32>,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernel reads them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// Blocks of a page, or of a sequence without pages.
    pub blocks: usize,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
    /// Factor of the scores: `1 / sqrt(head_dim)`, if the queries are not scaled.
    pub scale: f32,
    /// Written for the blocks that a sequence has.
    pub out: IntegerQueries,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read lengths and tables *before* they wait for it (`griddepcontrol.wait`), so that
    /// kernel must not write these. They read everything else after the wait.
    pub pdl: bool,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    queries: DevicePtr<AnyElement>,
    duals: DevicePtr<f32>,
    frequencies: DevicePtr<f32>,
    steps: DevicePtr<u8>,
    key_tables: DevicePtr<u32>,
    lengths: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    words: DevicePtr<u32>,
    units: DevicePtr<f32>,
    heads: u32,
    first: u32,
    blocks: u32,
    max_pages: u32,
    query_blocks: u32,
    scale: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 96);

/// The queries of a decode step, rotated by minus the position of the middle of every block of tokens, times
/// the dual of the keys' basis and the steps of the block, as integers of 15 bits: what
/// [`Attend`](super::Attend) multiplies with the keys.
///
/// Factors and waves of positions are rounded to `f16`. A launch allocates nothing and does not synchronize,
/// and a captured graph stays valid. The same inputs give the same bytes.
///
/// # Cost
/// `2 dim^2` operations per block and query on tensor cores, and `2 dim` bytes written.
/// # Source
/// `pq_core::sq`: keys are coded relative to the middle of their block.
pub struct Queries {
    shape: AttendShape,
    plan: Plan,
    kernel: Kernel,
    sm_count: usize,
}

impl Queries {
    /// Compiles the kernel for a shape, that of [`Attend`](super::Attend).
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        let plan = shape.queries_plan(device.shared_memory())?;
        let kernel = device.kernel(&plan.program(&shape), "sq_queries", plan.shared_bytes())?;
        Ok(Self { shape, plan, kernel, sm_count: device.sm_count() })
    }

    /// Launches the operation on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the blocks of a sequence or of its pages, or of `out`, and every page number refers to
    /// an existing page: the kernel does not clamp them. The tables are of [`AttendShape::dual_table`] and
    /// [`AttendShape::key_table`].
    pub unsafe fn launch(&self, stream: CUstream, arguments: &QueriesArguments) -> Result<(), Error> {
        let (a, shape) = (arguments, &self.shape);
        if a.batch == 0 || a.heads == 0 || a.out.blocks == 0 {
            return Ok(());
        }
        if shape.paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        let last = a.out.blocks.saturating_mul(shape.block).saturating_add(a.first);
        OPERATION.at_most(i32::MAX as u32, "positions", last)?;
        // As many blocks of threads as run at once, each of which makes maps; all warps take as many tiles.
        let Plan { queries, warps, .. } = self.plan;
        let slices = shape.group.div_ceil(queries);
        let tiles = (a.out.blocks.div_ceil(ROWS) * queries).div_ceil(warps);
        let most = (self.sm_count / a.heads.saturating_mul(a.batch).saturating_mul(slices)).max(1);
        let blocks = tiles.div_ceil(tiles.div_ceil(most));
        let entries = a.heads.saturating_mul(slices);
        let axes = [("blocks", blocks), ("slices of heads", entries), ("sequences", a.batch)];
        let kernel_arguments = KernelArguments {
            queries: a.queries,
            duals: a.duals,
            frequencies: a.frequencies,
            steps: a.steps,
            key_tables: a.key_tables,
            lengths: a.lengths,
            pages: a.pages.map(|pages| pages.table),
            words: a.out.words,
            units: a.out.units,
            heads: in_32_bits("heads", a.heads)?,
            first: in_32_bits("positions", a.first)?,
            blocks: in_32_bits("blocks", a.blocks)?,
            max_pages: in_32_bits("pages", a.pages.map_or(1, |pages| pages.max_pages))?,
            query_blocks: in_32_bits("blocks of queries", a.out.blocks)?,
            scale: a.scale * std::f32::consts::LOG2_E,
        };
        let (grid, threads) = (OPERATION.grid(&axes)?, warps as u32 * 32);
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, threads, a.pdl, &kernel_arguments) }
    }
}
