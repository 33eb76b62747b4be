//! Attention of a prompt on rows of two ranks per head, with the longest blocks of queries first.

use cudarc::driver::sys::{CUstream, CUtensorMap};

use super::AttendShape;
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::Pages;
use crate::tensor_map::RowsOfHeads;
use crate::{Device, Error, Program};

/// On sm_80: warps of a block, its rows (queries) at full rank, tokens of a tile, and blocks of a
/// multiprocessor.
const WARPS: usize = 4;
const WARP_BLOCK_ROWS: usize = 16 * WARPS;
const WARP_TILE_TOKENS: usize = 64;
const RESIDENT_BLOCKS: usize = 2;
/// On sm_90: rows of a warpgroup, threads of a warpgroup, tokens of a tile, stages of the rings, and bytes of
/// mbarriers.
const GROUP_ROWS: usize = 64;
const GROUP_THREADS: u32 = 128;
const TILE_TOKENS: usize = 128;
const STAGES: usize = 2;
const BARRIER_BYTES: usize = (6 * STAGES + 1) * 8;
/// Pages have a multiple of so many tokens.
const PAGE_UNIT: usize = 16;
/// Ranks have a tensor map each: 8, 16, ... 128.
const MAPS: usize = 16;
/// Parts of a row block, at most; and parts of all of them, for which there is room in the workspace, in rounds
/// of the blocks that run at the same time.
const MAX_PARTS: usize = 64;
const SPLIT_ROUNDS: usize = 3;
/// Bytes of keys and values that stay in L2 while row blocks read them.
const NEAR_BYTES: usize = 32 << 20;

const OPERATION: Operation = Operation("svd::Prefill");

/// Pointers and sizes of one launch of [`Prefill`].
#[derive(Clone, Copy, Debug)]
pub struct PrefillArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Number of query heads per KV head.
    pub group: usize,
    /// Capacity of a page (or of a sequence, without pages) in tokens; of a page a multiple of 16. A sequence
    /// has room for at most 2^30 tokens.
    pub capacity: usize,
    /// Maximum number of queries (new tokens) of a sequence.
    pub max_count: usize,
    /// Elements (pages or batch, heads, capacity, key rank of the head).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (pages or batch, heads, capacity, value rank of the head).
    pub values: DevicePtr<AnyElement>,
    /// The page table, given if and only if the kernel is [for pages](Prefill::paged).
    pub pages: Option<Pages>,
    /// Elements (batch, `max_count`, heads * group, dim), with the strides below and a contiguous last
    /// dimension: projected queries, read up to the key rank of the head.
    pub queries: DevicePtr<AnyElement>,
    /// Strides of sequences, queries and query heads in elements, multiples of 2, for queries and outputs.
    pub strides: [usize; 3],
    /// `u32` (batch,): the number of keys of each sequence.
    pub lengths: DevicePtr<u32>,
    /// `u32` (batch,): the number of queries of each sequence. They belong to its last tokens, and each
    /// attends to the keys up to its own token.
    pub counts: DevicePtr<u32>,
    /// Sliding window: the number of keys that a query attends to, its own token's included. `None` for all.
    pub window: Option<usize>,
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
    /// Whether rows of keys and values are padded to `dim` elements, of which only the first `rank` are read.
    /// Offsets and sums are then those of rank `dim`, and outputs are zero from the value rank on, so that a
    /// matrix product may read whole rows.
    pub padded: bool,
    /// Factor of the scores, positive: `1 / sqrt(head_dim)` of the model.
    pub scale: f32,
    /// Elements in the layout of the queries, written up to the value rank of the head, or to `dim` if
    /// `padded`.
    pub out: DevicePtr<AnyElement>,
    /// Bytes ([`Prefill::workspace_len`],), zeroed before the first launch; every launch leaves it ready for
    /// the next one. Launches on one stream can share it; concurrent launches need one each.
    pub workspace: DevicePtr<u8>,
}

/// `Arguments` of the kernel for sm_80.
#[derive(Clone, Copy)]
#[repr(C)]
struct WarpsArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    pages: Option<DevicePtr<u32>>,
    queries: DevicePtr<AnyElement>,
    lengths: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    key_ranks: DevicePtr<u32>,
    value_ranks: DevicePtr<u32>,
    key_offsets: DevicePtr<u64>,
    value_offsets: DevicePtr<u64>,
    out: DevicePtr<AnyElement>,
    results: DevicePtr<f32>,
    arrived: DevicePtr<u32>,
    key_rank_sum: u64,
    value_rank_sum: u64,
    capacity: u64,
    strides: [u64; 3],
    max_pages: u32,
    heads: u32,
    group: u32,
    parts: u32,
    window: u32,
    scale: f32,
    padded: u32,
}

const _: () = assert!(size_of::<WarpsArguments>() == 184);

/// `Arguments` of the kernel for sm_90.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct WarpgroupsArguments {
    keys: [CUtensorMap; MAPS],
    values: [CUtensorMap; MAPS],
    pages: Option<DevicePtr<u32>>,
    queries: DevicePtr<AnyElement>,
    lengths: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    key_ranks: DevicePtr<u32>,
    value_ranks: DevicePtr<u32>,
    key_offsets: DevicePtr<u64>,
    value_offsets: DevicePtr<u64>,
    out: DevicePtr<AnyElement>,
    results: DevicePtr<f32>,
    arrived: DevicePtr<u32>,
    strides: [u64; 3],
    key_chunks: u32,
    value_chunks: u32,
    capacity: u32,
    box_rows: u32,
    max_pages: u32,
    heads: u32,
    group: u32,
    window: u32,
    near_tokens: u32,
    row_blocks: u32,
    whole: u32,
    parts: u32,
    total: u32,
    scale: f32,
    padded: u32,
}

const _: () = assert!(size_of::<WarpgroupsArguments>() == 4096 + 256);

/// Causal attention of many queries with two ranks per head: `svd_core::attend_exact_into`, query by query. It
/// may be limited to a sliding window, and keys and values may lie in pages.
///
/// On sm_90 a block of 128 queries (192 for `dim` 64) takes tiles of 128 tokens; on sm_80, ZACK's rule makes
/// blocks cost about the same: 64 queries and tiles of 64 tokens, or 128 queries of a head whose ranks are
/// both at most half of `dim`. The longest blocks run first. The work of a query is that of the higher rank,
/// rounded up to a multiple of 32 (on sm_80, of `dim / 4`). A NaN or infinite value makes the outputs of all
/// queries whose block attends to its tile NaN.
///
/// Where few blocks have queries, as in a short chunk over a long cache, several of them share the keys, and
/// the last one merges their results. The same inputs give the same bytes.
///
/// The kernel for sm_90 has more than 4 KiB of arguments, which requires CUDA 12.1.
///
/// # Cost
/// Twice the higher rank in multiply-adds for every pair of a query and a token that it attends to, on tensor
/// cores. With a window, a block of queries skips the tiles that none of them sees.
/// # Source
/// ZACK, 5.3, prefill; the loops are FlashAttention-3's (arXiv 2407.08608) and, on sm_80, FlashAttention-2's
/// (arXiv 2307.08691).
pub struct Prefill {
    kernel: Kernel,
    shape: AttendShape,
    in_warpgroups: bool,
    is_paged: bool,
    sm_count: usize,
}

impl Prefill {
    /// The kernel for a shape and a compute capability, for [`compile`](crate::compile) without a device. 9.0
    /// has its own kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(shape: AttendShape, capability: (i32, i32)) -> Result<Program, Error> {
        shape.check()?;
        let defines = [
            ("DIM", shape.dim),
            ("ELEMENT", shape.element as usize),
            ("SHARED_BYTES", shared_bytes(shape, capability)),
        ];
        let program = if in_warpgroups(capability) {
            Program::new(source!("svd_prefill/prefill_sm90.cu"), &defines).arch_specific()
        } else {
            Program::new(source!("svd_prefill/prefill_sm80.cu"), &defines)
        };
        Ok(program)
    }

    /// The kernel for keys and values in pages.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn paged_program(shape: AttendShape, capability: (i32, i32)) -> Result<Program, Error> {
        Ok(Self::program(shape, capability)?.define_if(true, "PAGED"))
    }

    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        Self::of(device, shape, &Self::program(shape, device.capability())?, false)
    }

    /// Compiles the kernel for a shape, with keys and values in pages of a multiple of 16 tokens.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn paged(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        Self::of(device, shape, &Self::paged_program(shape, device.capability())?, true)
    }

    fn of(device: &Device, shape: AttendShape, program: &Program, is_paged: bool) -> Result<Self, Error> {
        let capability = device.capability();
        let kernel = device.kernel(program, "svd_prefill", shared_bytes(shape, capability))?;
        let in_warpgroups = in_warpgroups(capability);
        Ok(Self { kernel, shape, in_warpgroups, is_paged, sm_count: device.sm_count() })
    }

    /// Blocks that run at the same time.
    fn resident(&self) -> usize {
        self.sm_count * if self.in_warpgroups { 1 } else { RESIDENT_BLOCKS }
    }

    /// Rows of a block of queries.
    fn block_rows(&self) -> usize {
        if self.in_warpgroups { groups(self.shape) * GROUP_ROWS } else { WARP_BLOCK_ROWS }
    }

    /// Parts of all row blocks for which there is room in the workspace.
    fn max_parts(&self) -> usize {
        SPLIT_ROUNDS * self.resident()
    }

    /// Floats of the results of all parts: the sums of a row, and the maxima and sums of weights of 4 threads.
    fn results_len(&self) -> usize {
        self.max_parts() * self.block_rows() * (self.shape.dim + if self.in_warpgroups { 8 } else { 16 })
    }

    /// Parts of each of `row_blocks` row blocks, which do not fill all rounds of blocks: those that take the
    /// shortest time, if the start and end of a part take 3 % of a row block, and its merge .1 %.
    fn parts(&self, row_blocks: usize) -> usize {
        let rounds = |parts: usize| (row_blocks * parts).div_ceil(self.resident());
        let time = |&parts: &usize| rounds(parts) * (1000 / parts + 30) + parts;
        (1..=MAX_PARTS.min(self.max_parts() / row_blocks.max(1))).min_by_key(time).unwrap_or(1)
    }

    /// Bytes of workspace for launches of any size.
    #[must_use]
    pub fn workspace_len(&self) -> usize {
        (self.results_len() + self.max_parts() * self.block_rows() / 16) * 4 // at most a counter for a warp
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the capacity of a sequence or of its pages, and counts exceed neither lengths nor
    /// `max_count`; ranks are multiples of 8 from 8 to `dim`, and offsets and sums match the ranks: the
    /// kernel does not clamp them. Every page number of a sequence's tokens refers to an existing page, in
    /// the first 32 GiB of keys and of values. The workspace was zeroed before the first launch, and no other
    /// launch uses it at the same time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &PrefillArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.group == 0 || a.max_count == 0 || a.capacity == 0 {
            return Ok(());
        }
        if a.scale.is_nan() || a.scale <= 0.0 {
            return Err(OPERATION.error("a scale that is not positive"));
        }
        if a.window == Some(0) {
            return Err(OPERATION.error("a window of no tokens"));
        }
        if self.is_paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if self.is_paged && !a.capacity.is_multiple_of(PAGE_UNIT) {
            return Err(OPERATION.error("pages that do not have a multiple of 16 tokens"));
        }
        for sum in [a.key_rank_sum, a.value_rank_sum] {
            let ranks = a.heads.saturating_mul(8)..=a.heads.saturating_mul(self.shape.dim);
            if !sum.is_multiple_of(8) || !ranks.contains(&sum) || (a.padded && sum != *ranks.end()) {
                return Err(OPERATION.error("a sum of ranks that the ranks of the heads cannot have"));
            }
        }
        let max_pages = a.pages.map_or(1, |pages| pages.max_pages);
        // The kernels compare tokens as signed integers, up to a tile beyond the last one.
        OPERATION.at_most(1 << 30, "tokens of a sequence", a.capacity.saturating_mul(max_pages))?;
        if a.strides.iter().any(|stride| !stride.is_multiple_of(2)) {
            return Err(OPERATION.error("a stride is not a multiple of 2"));
        }
        // SAFETY: the caller's contract.
        unsafe {
            if self.in_warpgroups { self.launch_warpgroups(stream, a) } else { self.launch_warps(stream, a) }
        }
    }

    /// Launches the kernel for sm_80.
    ///
    /// # Safety
    /// That of [`launch`](Self::launch).
    unsafe fn launch_warps(&self, stream: CUstream, a: &PrefillArguments) -> Result<(), Error> {
        let (query_heads, row_blocks) =
            (a.heads.saturating_mul(a.group), a.max_count.div_ceil(self.block_rows()));
        let total = a.batch.saturating_mul(query_heads).saturating_mul(row_blocks);
        let parts = self.parts(total);
        let grid = OPERATION.grid(&[
            ("query heads", query_heads),
            ("blocks of 64 queries", row_blocks.saturating_mul(parts)),
            ("sequences", a.batch),
        ])?;
        let workspace = a.workspace.cast::<f32>();
        let arguments = WarpsArguments {
            keys: a.keys,
            values: a.values,
            pages: a.pages.map(|pages| pages.table),
            queries: a.queries,
            lengths: a.lengths,
            counts: a.counts,
            key_ranks: a.key_ranks,
            value_ranks: a.value_ranks,
            key_offsets: a.key_offsets,
            value_offsets: a.value_offsets,
            out: a.out,
            results: workspace,
            arrived: workspace.offset(self.results_len()).cast(),
            key_rank_sum: a.key_rank_sum as u64,
            value_rank_sum: a.value_rank_sum as u64,
            capacity: a.capacity as u64,
            strides: a.strides.map(|stride| stride as u64),
            max_pages: max_pages(a),
            heads: a.heads as u32,
            group: a.group as u32,
            parts: parts as u32,
            window: window(a),
            scale: a.scale * std::f32::consts::LOG2_E,
            padded: a.padded.into(),
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, WARPS as u32 * 32, false, &arguments) }
    }

    /// Launches the kernel for sm_90.
    ///
    /// # Safety
    /// That of [`launch`](Self::launch).
    unsafe fn launch_warpgroups(&self, stream: CUstream, a: &PrefillArguments) -> Result<(), Error> {
        let row_blocks = a.max_count.div_ceil(self.block_rows());
        let total = a.batch.saturating_mul(a.heads).saturating_mul(a.group).saturating_mul(row_blocks);
        let total = OPERATION.at_most(i32::MAX as u32, "blocks of queries", total)? as usize;
        let whole = total - total % self.sm_count;
        let parts = self.parts(total - whole);
        let total = whole + (total - whole) * parts;
        let grid = OPERATION.grid(&[("blocks", self.sm_count.min(total))])?;
        let workspace = a.workspace.cast::<f32>();
        let [keys, values] = [(a.keys, a.key_rank_sum), (a.values, a.value_rank_sum)];
        let rank_sum = a.key_rank_sum.saturating_add(a.value_rank_sum).max(1);
        let near_tokens = (NEAR_BYTES / 2).saturating_mul(a.heads) / rank_sum;
        let arguments = WarpgroupsArguments {
            keys: self.maps(a, keys)?,
            values: self.maps(a, values)?,
            pages: a.pages.map(|pages| pages.table),
            queries: a.queries,
            lengths: a.lengths,
            counts: a.counts,
            key_ranks: a.key_ranks,
            value_ranks: a.value_ranks,
            key_offsets: a.key_offsets,
            value_offsets: a.value_offsets,
            out: a.out,
            results: workspace,
            arrived: workspace.offset(self.results_len()).cast(),
            strides: a.strides.map(|stride| stride as u64),
            key_chunks: (a.key_rank_sum / 8) as u32,
            value_chunks: (a.value_rank_sum / 8) as u32,
            capacity: a.capacity as u32,
            box_rows: box_rows(a) as u32,
            max_pages: max_pages(a),
            heads: a.heads as u32,
            group: a.group as u32,
            window: window(a),
            near_tokens: near_tokens.try_into().unwrap_or(u32::MAX),
            row_blocks: row_blocks as u32,
            whole: whole as u32,
            parts: parts as u32,
            total: total as u32,
            scale: a.scale * std::f32::consts::LOG2_E,
            padded: a.padded.into(),
        };
        let threads = (groups(self.shape) as u32 + 1) * GROUP_THREADS;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, threads, false, &arguments) }
    }

    /// The tensor maps of keys or values, one for each rank; none above `dim` is used. Their head stride is 8
    /// elements, so that the offset of any head is a coordinate.
    fn maps(
        &self,
        a: &PrefillArguments,
        (rows, rank_sum): (DevicePtr<AnyElement>, usize),
    ) -> Result<[CUtensorMap; MAPS], Error> {
        let most = i32::MAX as usize;
        let chunks = match a.pages {
            Some(_) => most, // how many pages there are is not known
            None => a.batch.saturating_mul(a.capacity).saturating_mul(rank_sum / 8).max(1),
        };
        OPERATION.at_most(most as u32, "16-byte chunks of keys or values", chunks)?;
        self.kernel.bind_to_thread()?; // for the maps
        let (element, heads, n) = (self.shape.element, chunks, a.capacity);
        let map = |dim| {
            let strides = [8, if a.padded { self.shape.dim.max(dim) } else { dim }];
            RowsOfHeads { rows, element, heads, n, dim, strides, box_rows: box_rows(a) }.map()
        };
        let mut maps = [map(8)?; MAPS];
        for (i, of_rank) in maps.iter_mut().enumerate().skip(1) {
            *of_rank = map(8 * (i + 1))?;
        }
        Ok(maps)
    }
}

/// On sm_90, tokens of a box: a tile, or as many as divide a page and are a power of two.
fn box_rows(a: &PrefillArguments) -> usize {
    let of_page = |_| 1 << a.capacity.trailing_zeros().min(TILE_TOKENS.ilog2());
    a.pages.map_or(TILE_TOKENS, of_page)
}

/// Entries of a row of the page table.
fn max_pages(a: &PrefillArguments) -> u32 {
    a.pages.map_or(1, |pages| pages.max_pages as u32)
}

/// The window as the kernels take it: a signed integer.
fn window(a: &PrefillArguments) -> u32 {
    a.window.map_or(i32::MAX as u32, |window| window.min(i32::MAX as usize) as u32)
}

/// Whether the sm_90 kernel, whose warpgroups share tiles loaded by TMA, runs instead of the sm_80 kernel,
/// whose warps load them.
const fn in_warpgroups(capability: (i32, i32)) -> bool {
    matches!(capability, (9, 0))
}

/// On sm_90, consumer warpgroups of a block: as many as the register file has room for.
const fn groups(shape: AttendShape) -> usize {
    if shape.dim == 64 { 3 } else { 2 }
}

/// Shared memory: on sm_90 the stages of queries, keys and values, and the mbarriers; on sm_80 two tiles of
/// keys and two of values.
const fn shared_bytes(shape: AttendShape, capability: (i32, i32)) -> usize {
    if in_warpgroups(capability) {
        STAGES * (groups(shape) * GROUP_ROWS + 2 * TILE_TOKENS) * shape.dim * 2 + BARRIER_BYTES
    } else {
        4 * WARP_TILE_TOKENS * shape.dim * 2
    }
}
