//! Attention of a decode step to scalar codes.

use cudarc::driver::sys::CUstream;
use half::f16;
use pq_core::sq;

use super::{DualTable, IntegerQueries, KeyTable};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::{Addends, Pages};
use crate::{Device, Element, Error, Program};

/// The most slots of keys: bits of each byte lane of a tile, 8 bits of 128 components.
const MAX_KEY_SLOTS: usize = 64;
/// Stages of a warp's ring of tiles.
const STAGES: usize = 2;
/// Floats of a query's result after its components.
const RESULT_PADDING: usize = 4;
/// The shared memory of a block on sm_90.
const SHARED_MEMORY_SM_90: usize = 227 << 10;
/// Bytes of shared memory that the system takes of every block.
const RESERVED: usize = 1 << 10;

/// Compile-time shape of [`Attend`].
///
/// # Examples
/// ```
/// use kv_gpu::{Element, sq::AttendShape};
/// let keys = pq_core::sq::Shape::uniform(128, 3)?; // or of any mix of widths: `pq_core::sq::allot`
/// let (dim, key_slots, value_bits, block, group) = (keys.dim(), keys.slots(), 2, 256, 4);
/// let shape = AttendShape {
///     dim,
///     key_slots,
///     uniform_keys: true,
///     value_bits,
///     block,
///     group,
///     element: Element::F16,
///     mean_errors: true,
///     addends: false,
///     paged: false,
/// };
/// assert!(shape.check().is_ok());
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendShape {
    /// Components of a row: 64, 96, 128 or 256.
    pub dim: usize,
    /// [`Shape::slots`](pq_core::sq::Shape::slots) of the keys, the same for all heads. The widths of their
    /// components are data: a [`KeyTable`] per head.
    pub key_slots: usize,
    /// Whether all components of the keys of all heads have the same bits. The kernel then needs no table,
    /// and fewer instructions for a key.
    pub uniform_keys: bool,
    /// Bits of the values' components, 1 to 4.
    pub value_bits: usize,
    /// Tokens of a block, which have the same steps and queries: a multiple of 32, at most 256.
    pub block: usize,
    /// Query heads per KV head, 1 to 16.
    pub group: usize,
    /// Element type of the outputs.
    pub element: Element,
    /// Whether values have a mean error per block
    /// ([`mean_error_into`](pq_core::sq::mean_error_into)).
    pub mean_errors: bool,
    /// Whether terms of the scores are given ([`Addends`]).
    pub addends: bool,
    /// Whether blocks are in pages.
    pub paged: bool,
}

impl AttendShape {
    /// Checks that a kernel supports the shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        let supported = if !matches!(self.dim, 64 | 96 | 128 | 256) {
            "64, 96, 128 or 256 components"
        } else if !(1..=MAX_KEY_SLOTS.min(self.dim / 2)).contains(&self.key_slots) {
            "keys of 1 to 64 slots, of at most 8 bits per component"
        } else if self.uniform_keys && !(16 * self.key_slots).is_multiple_of(self.dim) {
            "whole bits per component of uniform keys"
        } else if !(1..=4).contains(&self.value_bits) {
            "values of 1 to 4 bits"
        } else if !self.block.is_multiple_of(sq::TILE) || !(1..=sq::MAX_BLOCK).contains(&self.block) {
            "blocks of a multiple of 32 tokens, at most 256"
        } else if !(1..=16).contains(&self.group) {
            "1 to 16 query heads per key/value head"
        } else {
            return Ok(());
        };
        Err(Error::Unsupported { operation: format!("{self:?}"), supported })
    }

    /// Queries of a block of threads, whose limbs fill one or two MMAs of 8 columns. A thread has no
    /// registers for the sums of 8 queries of 256 components.
    const fn queries(&self) -> usize {
        if self.group <= 4 || self.dim > 128 { 4 } else { 8 }
    }

    /// The layout of the tables of the keys.
    #[must_use]
    pub const fn key_table(&self) -> KeyTable {
        KeyTable::new(self.dim, self.key_slots)
    }

    /// The layout of the duals of the keys' bases.
    #[must_use]
    pub const fn dual_table(&self) -> DualTable {
        DualTable::new(self.dim)
    }

    /// The bits of every component of the keys, 0 if they differ.
    pub(super) const fn key_width(&self) -> usize {
        if self.uniform_keys { self.key_slots * 16 / self.dim } else { 0 }
    }

    /// How few long sequences of heads are run, and many.
    fn plans(&self, shared_memory: usize) -> Result<[Plan; 2], Error> {
        self.check()?;
        // A thread of 4 times 4 warps has 128 registers, of 3 times 4 or of 12 warps 168. On sm_80 options take
        // some more. Pages do not change the plan, so that the results are the same bytes.
        let few_options = shared_memory >= SHARED_MEMORY_SM_90 || !(self.mean_errors || self.addends);
        let small = self.queries() == 4 && self.dim <= 128 && few_options;
        let few = if self.queries() == 8 && !few_options { 8 } else { 12 };
        let many = if small { 4 } else { 3 };
        let fitting = |layouts: &[(usize, usize)]| {
            let mut plans = layouts.iter().map(|&(warps, resident)| Plan { shape: *self, warps, resident });
            plans.find(|plan| plan.shared_bytes() <= plan.of_block(shared_memory))
        };
        match (fitting(&[(few, 1), (8, 1), (4, 1)]), fitting(&[(4, many), (4, 2), (4, 1)])) {
            (Some(few), Some(many)) => Ok([few, many]),
            _ => Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "shapes of which two tiles for 4 warps fit the shared memory of the device",
            }),
        }
    }

    /// The kernels for blocks of up to `shared_memory` bytes ([`Device::shared_memory`]), for
    /// [`compile`](crate::compile) without a device: for few long sequences of heads, and for many.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn programs(&self, shared_memory: usize) -> Result<[Program; 2], Error> {
        Ok(self.plans(shared_memory)?.map(|plan| plan.program()))
    }
}

/// How a shape is run.
#[derive(Clone, Copy)]
struct Plan {
    shape: AttendShape,
    warps: usize,    // of a block of threads
    resident: usize, // blocks of a multiprocessor
}

impl Plan {
    /// Bytes of shared memory that a block can have if a block alone can have `shared_memory`.
    const fn of_block(&self, shared_memory: usize) -> usize {
        (shared_memory + RESERVED) / self.resident - RESERVED
    }

    fn threads(&self) -> u32 {
        self.warps as u32 * 32
    }

    /// `STAGE` of the kernel: bytes of a tile.
    fn stage_bytes(&self) -> usize {
        let AttendShape { dim, key_slots, value_bits, addends, .. } = self.shape;
        let codes = [key_slots, dim / 16 * value_bits].map(|slots| (64 * slots).next_multiple_of(128));
        let addends = if addends { self.shape.queries() * sq::TILE * 2 } else { 0 };
        codes[0] + codes[1] + 128 + addends
    }

    /// `SHARED` of the kernel.
    fn shared_bytes(&self) -> usize {
        let (dim, queries) = (self.shape.dim, self.shape.queries());
        let results = 4 * queries * (dim + RESULT_PADDING);
        let blocks = 2 * queries * (2 * dim + 8); // one is copied while another one is used
        let of_warp = STAGES * self.stage_bytes() + results + blocks;
        let table = if self.shape.uniform_keys { 0 } else { self.shape.key_table().table_len() };
        self.warps * of_warp + (table.next_multiple_of(4) + 16) * 4
    }

    fn program(&self) -> Program {
        let shape = &self.shape;
        let defines = [
            ("HEAD_DIM", shape.dim),
            ("ELEMENT", shape.element as usize),
            ("QUERIES", shape.queries()),
            ("KEY_SLOTS", shape.key_slots),
            ("KEY_WIDTH", shape.key_width()),
            ("VALUE_BITS", shape.value_bits),
            ("BLOCK", shape.block),
            ("WARPS", self.warps),
            ("RESIDENT", self.resident),
            ("STAGES", STAGES),
            ("MEAN_ERRORS", usize::from(shape.mean_errors)),
            ("ADDENDS", usize::from(shape.addends)),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        Program::new(source!("sq_attend/attend.cu"), &defines).define_if(shape.paged, "PAGED")
    }
}

const OPERATION: Operation = Operation("sq::Attend");

/// Pointers and sizes of one launch of [`Attend`].
///
/// Arrays of blocks begin with (pages or batch, heads, `blocks`): the blocks of a page, or of a sequence
/// without pages. The last block of a sequence may be incomplete; its other tokens may be anything.
#[derive(Clone, Copy, Debug)]
pub struct AttendArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Blocks of a page, or of a sequence without pages.
    pub blocks: usize,
    /// Words (pages or batch, heads, blocks, [`words_len`](pq_core::sq::Shape::words_len) of a block): codes
    /// of the keys.
    pub keys: DevicePtr<u32>,
    /// Words (pages or batch, heads, blocks, [`words_len`](pq_core::sq::Shape::words_len) of a block): codes
    /// of the values.
    pub values: DevicePtr<u32>,
    /// Bytes (pages or batch, heads, blocks, tokens of a block): norms of the values.
    pub norms: DevicePtr<u8>,
    /// `f16` (pages or batch, heads, blocks, dim): mean errors of the values, given if and only if the shape
    /// has them.
    pub mean_errors: Option<DevicePtr<f16>>,
    /// Terms that are added to the scores, such as those of the keys' mean, given if and only if the shape
    /// has them: [`pq::RopeMeanScores`](crate::pq::RopeMeanScores) writes them.
    pub addends: Option<Addends>,
    /// `u32` (heads, [`KeyTable::table_len`]): where the codes of keys are. Not read if all have the same
    /// bits.
    pub key_tables: DevicePtr<u32>,
    /// What [`Queries`](super::Queries) has written for each block.
    pub queries: IntegerQueries,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernel reads them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
    /// Elements (batch, heads, group, dim), fully written, in the basis of the values. A sequence without
    /// tokens gives zeros.
    pub out: DevicePtr<AnyElement>,
    /// `f32` (batch, heads, group), fully written: the log-sum-exp of the scores (natural logarithm), to
    /// merge the result with attention over other tokens.
    pub log_sum_exp: Option<DevicePtr<f32>>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read lengths *before* they wait for it (`griddepcontrol.wait`), so that kernel must
    /// not write these. They read everything else after the wait.
    pub pdl: bool,
    /// Bytes ([`Attend::workspace_len`],), zeroed before the first launch; every launch leaves it ready for
    /// the next one. Launches on one stream can share it; concurrent launches need one each.
    pub workspace: DevicePtr<u8>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    keys: DevicePtr<u32>,
    values: DevicePtr<u32>,
    norms: DevicePtr<u8>,
    mean_errors: Option<DevicePtr<f16>>,
    addends: Option<DevicePtr<f16>>,
    queries: DevicePtr<u32>,
    units: DevicePtr<f32>,
    key_tables: DevicePtr<u32>,
    lengths: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    partials: DevicePtr<f32>,
    arrived: DevicePtr<u32>,
    out: DevicePtr<AnyElement>,
    log_sum_exp: Option<DevicePtr<f32>>,
    batch: u32,
    heads: u32,
    group: u32,
    blocks: u32,
    max_pages: u32,
    query_blocks: u32,
    addend_tiles: u32,
    value_step: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 144);

/// Decode attention over scalar codes, `pq_core::sq::attend_into`, for a ragged batch.
///
/// Codes are multiplied as they are stored, by int8 tensor cores: the queries are integers of 15 bits, as on
/// the CPU, and the weights integers, of which the largest of 32 tokens has 10 to 16 bits. The kernel splits
/// the tokens of a batch evenly over its blocks. A launch allocates nothing and does not synchronize, and a
/// captured graph stays valid. The same inputs give the same bytes in batches of the same size.
///
/// # Cost
/// Every code is read once for up to 8 query heads of its group, 4 with 256 components.
/// # Source
/// Transform coding, as `pq_core::sq` describes it; limbs as in the int8 emulation of wider products.
pub struct Attend {
    shape: AttendShape,
    kernels: [(Kernel, Plan); 2], // for few long sequences of heads, and for many
    sm_count: usize,
}

impl Attend {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        let kernel = |plan: Plan| {
            let kernel = device.kernel(&plan.program(), "sq_attend", plan.shared_bytes())?;
            Ok((kernel, plan))
        };
        let [few, many] = shape.plans(device.shared_memory())?.map(kernel);
        Ok(Self { shape, kernels: [few?, many?], sm_count: device.sm_count() })
    }

    /// Slices of a group.
    const fn slices(&self) -> usize {
        self.shape.group.div_ceil(self.shape.queries())
    }

    /// Blocks of a slice.
    fn blocks(&self, plan: &Plan) -> usize {
        (self.sm_count * plan.resident / self.slices()).max(1)
    }

    /// Floats of the partial results of blocks that share a sequence.
    fn partials_len(&self) -> usize {
        let blocks = self.kernels.iter().map(|(_, plan)| self.blocks(plan)).max().unwrap_or(0);
        let of_block = 2 * self.shape.queries() * (self.shape.dim + RESULT_PADDING);
        (blocks * self.slices()).saturating_mul(of_block)
    }

    /// Bytes of workspace for launches of up to `batch` sequences with up to `heads` KV heads.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize) -> usize {
        let counters = batch.saturating_mul(heads).saturating_mul(self.slices());
        self.partials_len().saturating_add(counters).saturating_mul(4)
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the blocks of a sequence or of its pages, of its queries, or the tiles of its addends, and
    /// every page number refers to an existing page: the kernel does not clamp them. The tables are of
    /// [`AttendShape::key_table`]. The workspace was zeroed before the first launch, and no other launch uses
    /// it at the same time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &AttendArguments) -> Result<(), Error> {
        let (a, shape) = (arguments, &self.shape);
        if a.batch == 0 || a.heads == 0 {
            return Ok(());
        }
        if shape.paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if shape.mean_errors != a.mean_errors.is_some() {
            return Err(OPERATION.error("mean errors are given exactly when it is compiled for them"));
        }
        if shape.addends != a.addends.is_some() {
            return Err(OPERATION.error("addends are given exactly when it is compiled for them"));
        }
        if a.blocks == 0 {
            return Err(OPERATION.error("no room for a block"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        let is_many = a.batch.saturating_mul(a.heads) >= self.sm_count / 2;
        let (kernel, plan) = &self.kernels[usize::from(is_many)];
        let max_pages = a.pages.map_or(1, |pages| pages.max_pages);
        let tiles = a.blocks.saturating_mul(max_pages).saturating_mul(shape.block / sq::TILE);
        // The kernel counts work in 32 bits: a tile is a unit, and the cost of an entry `ENTRY_COST`.
        let entry_cost = 5 * plan.warps;
        let units = tiles.saturating_add(entry_cost).saturating_mul(a.batch.saturating_mul(a.heads));
        in_32_bits("units of work (1 for 32 tokens of a head, and some for the head)", units)?;
        let grid = OPERATION.grid(&[("blocks", self.blocks(plan)), ("slices of a group", self.slices())])?;
        let partials = a.workspace.cast::<f32>();
        let step = sq::STEPS[shape.value_bits] / (shape.dim as f32).sqrt();
        let kernel_arguments = KernelArguments {
            keys: a.keys,
            values: a.values,
            norms: a.norms,
            mean_errors: a.mean_errors,
            addends: a.addends.map(|addends| addends.values),
            queries: a.queries.words,
            units: a.queries.units,
            key_tables: a.key_tables,
            lengths: a.lengths,
            pages: a.pages.map(|pages| pages.table),
            partials,
            arrived: partials.offset(self.partials_len()).cast(),
            out: a.out,
            log_sum_exp: a.log_sum_exp,
            batch: a.batch as u32,
            heads: a.heads as u32,
            group: shape.group as u32,
            blocks: in_32_bits("blocks", a.blocks)?,
            max_pages: in_32_bits("pages", max_pages)?,
            query_blocks: in_32_bits("blocks of queries", a.queries.blocks)?,
            addend_tiles: in_32_bits("tiles of addends", a.addends.map_or(0, |addends| addends.tiles))?,
            value_step: step,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { kernel.launch(stream, grid, plan.threads(), a.pdl, &kernel_arguments) }
    }
}
