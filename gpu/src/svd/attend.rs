//! Decode attention on rows of two ranks per head, its work split evenly over the blocks.

use cudarc::driver::sys::CUstream;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::Pages;
use crate::{Device, Element, Error, Program};

/// Query heads of a block, and tokens of a tile: `QUERIES` and `TILE` of the kernel.
const QUERIES: usize = 8;
const TILE: usize = 16;

/// Compile-time shape of [`Attend`] and [`Prefill`](super::Prefill).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendShape {
    /// Largest rank: 64 or 128.
    pub dim: usize,
    /// Element type of queries, keys, values and outputs.
    pub element: Element,
}

impl AttendShape {
    /// Warps of a block: fewer for more registers per tile.
    const fn warps(&self) -> usize {
        if self.dim == 128 { 12 } else { 16 }
    }

    /// Threads of a block.
    const fn threads(&self) -> u32 {
        self.warps() as u32 * 32
    }

    /// `RESULT` of the kernel.
    const fn result_len(&self) -> usize {
        self.dim + 4
    }

    /// Shared memory of the results and of the plan.
    const fn shared_bytes(&self) -> usize {
        self.warps() * QUERIES * self.result_len() * 4 + 64
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        if matches!(self.dim, 64 | 128) {
            return Ok(());
        }
        Err(Error::Unsupported { operation: format!("{self:?}"), supported: "dim 64 or 128" })
    }

    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        self.check()?;
        let defines = [
            ("DIM", self.dim),
            ("ELEMENT", self.element as usize),
            ("WARPS", self.warps()),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        Ok(Program::new(source!("svd_attend.cu"), &defines))
    }

    /// The kernel for keys and values in pages.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn paged_program(&self) -> Result<Program, Error> {
        Ok(self.program()?.define_if(true, "PAGED"))
    }
}

const OPERATION: Operation = Operation("svd::Attend");

/// Pointers and sizes of one launch of [`Attend`].
#[derive(Clone, Copy, Debug)]
pub struct AttendArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Number of query heads per KV head.
    pub group: usize,
    /// Capacity of a page (or of a sequence, without pages) in tokens; of a page a multiple of 16.
    pub capacity: usize,
    /// Elements (pages or batch, heads, capacity, key rank of the head).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (pages or batch, heads, capacity, value rank of the head).
    pub values: DevicePtr<AnyElement>,
    /// The page table, given if and only if the kernel is [for pages](Attend::paged).
    pub pages: Option<Pages>,
    /// Elements (batch, heads, group, dim): projected queries, read up to the key rank of the head.
    pub queries: DevicePtr<AnyElement>,
    /// `u32` (batch,): the length of each sequence in tokens. The kernel reads them, so that a captured graph
    /// stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// `u32` (heads,): ranks of the keys, multiples of 8.
    pub key_ranks: DevicePtr<u32>,
    /// `u32` (heads,): ranks of the values, multiples of 8.
    pub value_ranks: DevicePtr<u32>,
    /// `u64` (heads,): exclusive prefix sums of the key ranks.
    pub key_offsets: DevicePtr<u64>,
    /// `u64` (heads,): exclusive prefix sums of the value ranks.
    pub value_offsets: DevicePtr<u64>,
    /// Sum of all key ranks.
    pub key_rank_sum: usize,
    /// Sum of all value ranks.
    pub value_rank_sum: usize,
    /// Factor of the scores: `1 / sqrt(head_dim)` of the model.
    pub scale: f32,
    /// Elements (batch, heads, group, dim), written up to the value rank of the head. A sequence without
    /// tokens gives zeros.
    pub out: DevicePtr<AnyElement>,
    /// `f32` (batch, heads, group), fully written: the log-sum-exp of the scores (natural logarithm), to
    /// merge the result with attention over other tokens.
    pub log_sum_exp: Option<DevicePtr<f32>>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read lengths, ranks and offsets *before* they wait for it (`griddepcontrol.wait`),
    /// so that kernel must not write these. They read everything else after the wait.
    pub pdl: bool,
    /// Bytes ([`Attend::workspace_len`],), zeroed before the first launch; every launch leaves it ready for
    /// the next one. Launches on one stream can share it; concurrent launches need one each.
    pub workspace: DevicePtr<u8>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    queries: DevicePtr<AnyElement>,
    lengths: DevicePtr<u32>,
    key_ranks: DevicePtr<u32>,
    value_ranks: DevicePtr<u32>,
    key_offsets: DevicePtr<u64>,
    value_offsets: DevicePtr<u64>,
    partials: DevicePtr<f32>,
    arrived: DevicePtr<u32>,
    out: DevicePtr<AnyElement>,
    log_sum_exp: Option<DevicePtr<f32>>,
    key_rank_sum: u64,
    value_rank_sum: u64,
    capacity: u64,
    batch: u32,
    heads: u32,
    group: u32,
    scale: f32,
    pages: Option<DevicePtr<u32>>,
    max_pages: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 152);

/// Decode attention with two ranks per head: `svd_core::attend_exact_into` for a ragged batch.
///
/// The kernel splits the work (tokens times ranks) evenly over its blocks. A launch allocates nothing and
/// does not synchronize, and a captured graph stays valid. The same inputs give the same bytes.
///
/// # Cost
/// Every stored element is read once for up to 8 query heads of its group.
/// # Source
/// ZACK, 5.1 and 5.3, with work split by tokens as well as by heads.
pub struct Attend {
    kernel: Kernel,
    shape: AttendShape,
    is_paged: bool,
    sm_count: usize,
}

impl Attend {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        Self::of(device, shape, &shape.program()?, false)
    }

    /// Compiles the kernel for a shape, with keys and values in pages of a multiple of 16 tokens. The result
    /// has the same bytes as without pages.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn paged(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        Self::of(device, shape, &shape.paged_program()?, true)
    }

    fn of(device: &Device, shape: AttendShape, program: &Program, is_paged: bool) -> Result<Self, Error> {
        let kernel = device.kernel(program, "svd_attend", shape.shared_bytes())?;
        let kernel = kernel.prefer_l1(shape.threads())?;
        Ok(Self { kernel, shape, is_paged, sm_count: device.sm_count() })
    }

    /// Blocks of a slice of a group, and slices.
    fn grid(&self, group: usize) -> (usize, usize) {
        let slices = group.div_ceil(QUERIES).max(1);
        ((self.sm_count / slices).max(1), slices)
    }

    /// Floats of the partial results of blocks that share a sequence.
    fn partials_len(&self, group: usize) -> usize {
        let (blocks, slices) = self.grid(group);
        (blocks * slices).saturating_mul(2 * QUERIES * self.shape.result_len())
    }

    /// Bytes of workspace for launches of up to `batch` sequences with up to `heads` KV heads and exactly
    /// `group` query heads per KV head. Another group changes its layout: zero it again before such a launch.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize, group: usize) -> usize {
        let counters = batch.saturating_mul(heads).saturating_mul(self.grid(group).1);
        self.partials_len(group).saturating_add(counters).saturating_mul(4)
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the capacity of a sequence or of its pages, every page number refers to an existing
    /// page, ranks are multiples of 8 from 8 to `dim`, and offsets and sums match the ranks: the kernel does
    /// not clamp them. The workspace was zeroed before the first launch with this group, and no other launch
    /// uses it at the same time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &AttendArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.group == 0 {
            return Ok(());
        }
        if self.is_paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if a.pages.is_some() && (a.capacity == 0 || !a.capacity.is_multiple_of(TILE)) {
            return Err(OPERATION.error("pages that do not have a multiple of 16 tokens"));
        }
        let max_pages = a.pages.map_or(1, |pages| pages.max_pages);
        // The kernel counts work in 32 bits: at most 128 units per tile, and 3,000 per head of a sequence.
        let entries = a.batch.saturating_mul(a.heads);
        let tiles = a.capacity.div_ceil(TILE).saturating_mul(max_pages);
        let units = entries.saturating_mul(tiles.saturating_mul(128).saturating_add(3000));
        OPERATION.in_32_bits("units of work (128 for 16 tokens of a head, 3,000 for the head)", units)?;
        if a.group > 16 {
            return Err(OPERATION.error("more than 16 query heads per key/value head"));
        }
        let (blocks, slices) = self.grid(a.group);
        let grid = OPERATION.grid(&[("blocks", blocks), ("slices of a group", slices)])?;
        let partials = a.workspace.cast::<f32>();
        let kernel_arguments = KernelArguments {
            keys: a.keys,
            values: a.values,
            queries: a.queries,
            lengths: a.lengths,
            key_ranks: a.key_ranks,
            value_ranks: a.value_ranks,
            key_offsets: a.key_offsets,
            value_offsets: a.value_offsets,
            partials,
            arrived: partials.offset(self.partials_len(a.group)).cast(),
            out: a.out,
            log_sum_exp: a.log_sum_exp,
            key_rank_sum: a.key_rank_sum as u64,
            value_rank_sum: a.value_rank_sum as u64,
            capacity: a.capacity as u64,
            batch: a.batch as u32,
            heads: a.heads as u32,
            group: a.group as u32,
            scale: a.scale * std::f32::consts::LOG2_E,
            pages: a.pages.map(|pages| pages.table),
            max_pages: OPERATION.in_32_bits("pages", max_pages)?,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, self.shape.threads(), a.pdl, &kernel_arguments) }
    }
}
