//! The tokens of largest softmax weight by their coded keys: scores of all tiles, then selection.

use cudarc::driver::sys::CUstream;
use half::f16;
use kv_attend::owner::Side;
use pq_core::{GroupRule, PqShape};

use crate::compile::{Source, source};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::addends::Addends;
use crate::pq::attend::{ExactTokens, Pages};
use crate::pq::clusters::Clusters;
use crate::pq::layout::{CodeLayout, TILE};
use crate::pq::scan::CHUNK;
use crate::pq::search::{ROW_BYTES, SELECT_THREADS};
use crate::{Device, Element, Error, Program};

/// Bytes of a row of a table in shared memory: `ROW` of the kernels.
pub(super) const ROW: usize = 256;
/// Bytes for a `Plan`.
pub(super) const PLAN_BYTES: usize = 64;
/// Bytes of the flag that all scores are complete, padded.
const SCORED_BYTES: usize = 16;
/// Cluster sizes of the selection kernel in blocks, largest first.
const CLUSTERS: [usize; 4] = [16, 8, 4, 2];

/// Compile-time shape of [`Select`].
///
/// # Examples
/// ```
/// use kv_gpu::{Element, pq::SelectShape};
/// use pq_core::{GroupRule, PqShape};
/// let shape = SelectShape {
///     keys: PqShape::new(128, 16, 8)?,
///     group: 4,
///     element: Element::F16,
///     rule: GroupRule::SumOfSoftmax,
///     paged: false,
///     addends: false,
///     key_norms: false,
/// };
/// assert!(shape.check().is_ok());
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectShape {
    /// Quantizer of the keys.
    pub keys: PqShape,
    /// Query heads per KV head.
    pub group: usize,
    /// Element type of the queries.
    pub element: Element,
    /// How the query heads of a group choose together.
    pub rule: GroupRule,
    /// Whether the codes are in pages.
    pub paged: bool,
    /// Whether [`Addends`] are added to the scores.
    pub addends: bool,
    /// Whether the scores of codes are multiplied by [norms](SelectArguments::norms).
    pub key_norms: bool,
}

/// Shared memory and warps of the scoring kernel.
#[derive(Clone, Copy)]
struct Plan {
    shared_bytes: usize,
    warps: usize,
}

impl Plan {
    /// Threads of a block.
    const fn threads(self) -> u32 {
        self.warps as u32 * 32
    }
}

/// Checks that the kernels support a quantizer of keys or values.
pub(super) fn check_quantizer(quantizer: PqShape, side: Side) -> Result<(), Error> {
    CodeLayout::new(quantizer, side)?;
    let fits = match quantizer.nbits() {
        4 | 8 => matches!(quantizer.m(), 8 | 16 | 32),
        6 => side == Side::Keys && matches!(quantizer.m(), 16 | 32),
        _ => false,
    };
    if fits {
        return Ok(());
    }
    let supported = "8, 16 or 32 subspaces of 4 or 8 bits, of keys also 16 or 32 of 6 bits";
    Err(Error::Unsupported { operation: format!("{quantizer:?} for {side:?}"), supported })
}

impl SelectShape {
    /// Checks that the kernels support the shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        self.plan(usize::MAX).map(|_| ())
    }

    /// Queries of a table entry: `VEC` of the kernels.
    pub(super) const fn entry(&self) -> usize {
        match self.group {
            ..=2 => 2,
            3 | 4 => 4,
            _ => 8,
        }
    }

    fn plan(&self, shared_memory: usize) -> Result<Plan, Error> {
        let unsupported = |supported| Err(Error::Unsupported { operation: format!("{self:?}"), supported });
        check_quantizer(self.keys, Side::Keys)?;
        if !(1..=8).contains(&self.group) {
            return unsupported("1 to 8 query heads per key/value head");
        }
        let entry = self.entry();
        let two_rows = self.keys.m() == 32 && entry == 8; // a code's entries do not fit one row
        let lut = self.keys.ksub() * ROW * if two_rows { 2 } else { 1 };
        let bases = entry * if self.key_norms { 2 } else { 1 };
        let builder = 4 * (self.keys.m() * entry + bases);
        let warps = if entry == 8 { 16 } else { 32 }; // more queries need more registers
        let shared_bytes = lut + builder + 8 * entry * warps + PLAN_BYTES;
        if shared_bytes > shared_memory {
            return unsupported("tables that fit the shared memory of the device");
        }
        Ok(Plan { shared_bytes, warps })
    }

    /// The kernels for a compute capability and blocks of up to `shared_memory` bytes
    /// ([`Device::shared_memory`]): scoring, then selection, which is a single kernel from 9.0 on.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn programs(&self, capability: (i32, i32), shared_memory: usize) -> Result<[Program; 2], Error> {
        self.programs_of(false, capability, shared_memory)
    }

    /// As [`Self::programs`]; if `adaptive`, the kernels determine the number of tokens.
    pub(super) fn programs_of(
        &self,
        adaptive: bool,
        capability: (i32, i32),
        shared_memory: usize,
    ) -> Result<[Program; 2], Error> {
        let plan = self.plan(shared_memory)?;
        let select = if has_clusters(capability, shared_memory) {
            source!("pq_hybrid/select_sm90.cu")
        } else {
            source!("pq_hybrid/select.cu")
        };
        let defines = [
            ("KEY_M", self.keys.m()),
            ("KEY_BITS", self.keys.nbits() as usize),
            ("ROW_BYTES", ROW_BYTES),
            ("SCORE_WARPS", plan.warps),
            ("SCORES_SHARED_BYTES", plan.shared_bytes),
            ("SELECT_SHARED_BYTES", select_shared_bytes(adaptive)),
        ];
        let program = |source| {
            self.program(source, &defines).define_if(self.rule == GroupRule::MaxOfSoftmax, "MAX_RULE")
        };
        let scores = program(source!("pq_hybrid/scores.cu"));
        let scores = scores.define_if(self.addends, "ADDENDS").define_if(self.key_norms, "KEY_NORMS");
        Ok([scores, program(select).define_if(adaptive, "ADAPTIVE")])
    }

    /// A kernel of the folder, with definitions in addition to the common ones.
    pub(super) fn program(&self, source: Source, defines: &[(&str, usize)]) -> Program {
        let of_all =
            [("HEAD_DIM", self.keys.dim()), ("GROUP", self.group), ("ELEMENT", self.element as usize)];
        Program::new(source, &[&of_all, defines].concat()).define_if(self.paged, "PAGED")
    }
}

/// Whether a cluster of blocks can select the tokens of a row.
pub(super) const fn has_clusters(capability: (i32, i32), shared_memory: usize) -> bool {
    capability.0 >= 9 && select_shared_bytes(true) <= shared_memory
}

/// At least the size of `Shared` of `select_sm90.cu`: keys, lists, counts and totals of three digits, and
/// sums; if `adaptive` also `Budget` of `budget.cuh`.
const fn select_shared_bytes(adaptive: bool) -> usize {
    let budget = if adaptive { 8 * 8 * (32 + 16) + 4 * 8 + 16 } else { 0 };
    4 * 32_768 + 8 * 32 * 192 + 2 * 4 * 4096 + 8 * (16 + 32) + 4 * 3 * 8 + budget
}

const OPERATION: Operation = Operation("pq::Select");

/// Pointers and sizes of a launch of [`Select`].
#[derive(Clone, Copy, Debug)]
pub struct SelectArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Capacity of a page (or of a sequence, without pages) in tiles of [`TILE`] tokens.
    pub tiles: usize,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]): codes of the keys.
    pub codes: DevicePtr<u8>,
    /// `f16` (heads, [`CodeLayout::table_len`]): codebooks, by [`CodeLayout::table_into`].
    pub table: DevicePtr<f16>,
    /// `f16` (pages or batch, heads, tiles, [`TILE`]), given exactly if the shape has `key_norms`: the norms
    /// by which keys were divided before encoding ([`pq_core::divide_by_norms`]), finite. They are factors of
    /// the scores of the codes, before [errors](Self::errors) and [addends](Self::addends).
    pub norms: Option<DevicePtr<f16>>,
    /// `f32` (heads, dim): mean squared errors of the coded keys, for
    /// [`score_variances`](pq_core::Hybrid::score_variances); zeros if absent.
    pub errors: Option<DevicePtr<f32>>,
    /// Elements (batch, heads, group, dim), within the range of `f16`, in the space of the codes.
    pub queries: DevicePtr<AnyElement>,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernels read them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// The page table, given exactly if the shape is `paged`.
    pub pages: Option<Pages>,
    /// Terms to add to the scores, given exactly if the shape has `addends`.
    pub addends: Option<Addends>,
    /// `u32` (batch,): k, the number of tokens to select, clamped to `selected_len` and to the length.
    pub ks: DevicePtr<u32>,
    /// `u32` (batch, heads, `selected_len`), written: the selected tokens in ascending order. Elements after
    /// them are unchanged.
    pub selected: DevicePtr<u32>,
    /// Capacity of `selected` per head.
    pub selected_len: usize,
    /// Factor of the scores: `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read the table, the lengths and k *before* they wait for it
    /// (`griddepcontrol.wait`), so that kernel must not write these. They read everything else after the
    /// wait.
    pub pdl: bool,
    /// Bytes ([`Select::workspace_len`],), zeroed before the first launch.
    pub workspace: DevicePtr<u8>,
}

/// Offsets in the workspace. `sharers` come first.
struct Parts {
    scored: usize,
    stats: usize,
    scores: usize,
    selection: usize,
}

/// The common first arguments of all kernels of the folder: `Arguments` of `shape.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CommonArguments {
    lengths: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    ks: DevicePtr<u32>,
    scores: DevicePtr<u8>,
    sharers: DevicePtr<u8>,
    stats: DevicePtr<u8>,
    scored: DevicePtr<u8>,
    batch: u32,
    heads: u32,
    page_tiles: u32,
    max_pages: u32,
    selected_len: u32,
    chunks: u32,
    blocks: u32,
    scale: f32,
    hides: u32,
}

impl CommonArguments {
    /// Whether attention runs concurrently with the selection.
    pub(super) const fn is_beside(&self) -> bool {
        self.hides == 0
    }
}

/// `SelectArguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    common: CommonArguments,
    codes: DevicePtr<u8>,
    table: DevicePtr<f16>,
    norms: Option<DevicePtr<f16>>,
    queries: DevicePtr<AnyElement>,
    errors: Option<DevicePtr<f32>>,
    selected: DevicePtr<u32>,
    selection: DevicePtr<u8>,
    tickets: u32,
    bound: BoundArguments,
    addends: Option<DevicePtr<f16>>,
    addend_tiles: u32,
}

/// `ErrorBound` of the kernels.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct BoundArguments {
    queries: Option<DevicePtr<AnyElement>>,
    exact_keys: Option<DevicePtr<AnyElement>>,
    exact_lengths: Option<DevicePtr<u32>>,
    value_errors: Option<DevicePtr<f32>>,
    found: Option<DevicePtr<u32>>,
    total: Option<DevicePtr<u64>>,
    exact_capacity: u32,
    bound: f32,
}

const _: () = assert!(size_of::<CommonArguments>() == 96 && size_of::<KernelArguments>() == 232);

/// Lets [`Hybrid::select`](super::Hybrid::select) determine how many tokens each head reads exactly, as
/// `pq_core::RowBudget::Error`.
#[derive(Clone, Copy, Debug)]
pub struct ErrorBound {
    /// Bound of the norm of the output's error over the values' deviation (the root of their mean squared
    /// distance from their mean): finite and not negative.
    pub bound: f32,
    /// `f32` (heads,): mean squared errors of the coded values over the variance of the values.
    pub value_errors: DevicePtr<f32>,
    /// `u32` (batch, heads), written: the number of tokens that each head has selected, at most its k.
    pub found: DevicePtr<u32>,
    /// The sum of `found` over all heads is added to it.
    pub total: Option<DevicePtr<u64>>,
}

/// The inputs that determine how many tokens a row selects: the bound, the queries in the space of the exact
/// rows, and the sinks and window, whose attention is always exact.
pub(super) type Adaptive = (ErrorBound, DevicePtr<AnyElement>, Option<ExactTokens>);

impl BoundArguments {
    fn new((bound, queries, exact): Adaptive) -> Result<Self, Error> {
        let ErrorBound { bound, value_errors, found, total } = bound;
        if !(0.0..=f32::MAX).contains(&bound) {
            return Err(OPERATION.error("a bound that is negative or not finite"));
        }
        let exact_capacity = exact.map_or(0, |exact| exact.capacity);
        Ok(Self {
            queries: Some(queries),
            exact_keys: exact.map(|exact| exact.keys),
            exact_lengths: exact.map(|exact| exact.lengths),
            value_errors: Some(value_errors),
            found: Some(found),
            total,
            exact_capacity: OPERATION.in_32_bits("exact tokens", exact_capacity)?,
            bound,
        })
    }
}

/// The selection kernels.
enum Selection {
    /// One kernel, with a cluster of blocks for each row.
    Clusters(Kernel, Clusters),
    /// Several kernels in order, with a block for each chunk of a row.
    Chunks(Vec<Kernel>),
}

/// Selects the k tokens with the largest softmax weights, by coded keys in tiles:
/// `pq_core::hybrid_select_into`. One look-up scores up to eight queries of a group; table entries are `f16`.
///
/// [`Search`](super::Search) does the same with `f32` look-up tables on packed codes of any shape, and can
/// exclude sinks and a window; `Select` is faster for the shapes that it supports.
/// [`Hybrid`](super::Hybrid) combines it with attention to coded values.
///
/// A launch allocates nothing and does not synchronize, and a captured graph stays valid. The same inputs
/// give the same bytes. Where the weights of two tokens differ by less than rounding, the CPU may select the
/// other one. Of tokens of equal weight, those of lower index are selected.
///
/// # Cost
/// Every code is read once. The scores, 2 bytes per token and query, are written and read once.
/// # Source
/// PQCache (arXiv 2407.12820), 3.4.
pub struct Select {
    scores: Kernel,
    selection: Selection,
    shape: SelectShape,
    plan: Plan,
    sm_count: usize,
}

impl Select {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: SelectShape) -> Result<Self, Error> {
        Self::deciding(device, shape, false)
    }

    /// As [`Self::new`]; if `adaptive`, the kernels determine the number of tokens.
    pub(super) fn deciding(device: &Device, shape: SelectShape, adaptive: bool) -> Result<Self, Error> {
        let plan = shape.plan(device.shared_memory())?;
        let [scores, select] = shape.programs_of(adaptive, device.capability(), device.shared_memory())?;
        let selection = if has_clusters(device.capability(), device.shared_memory()) {
            let kernel = device.kernel(&select, "pq_hybrid_select", select_shared_bytes(adaptive))?;
            let clusters = Clusters::new(&kernel, SELECT_THREADS, CLUSTERS)?;
            Selection::Clusters(kernel, clusters)
        } else {
            let names = ["pq_hybrid_keys", "pq_hybrid_count", "pq_hybrid_collect", "pq_hybrid_write"];
            let names = names.into_iter().filter(|&name| adaptive || name != "pq_hybrid_count");
            Selection::Chunks(names.map(|name| device.kernel(&select, name, 0)).collect::<Result<_, _>>()?)
        };
        let scores = device.kernel(&scores, "pq_hybrid_scores", plan.shared_bytes)?;
        let scores = scores.prefer_l1(plan.threads())?;
        Ok(Self { scores, selection, shape, plan, sm_count: device.sm_count() })
    }

    /// Blocks per head.
    pub(super) fn blocks(&self, heads: usize) -> usize {
        (self.sm_count / heads.max(1)).max(1)
    }

    /// Cluster size of the selection if attention is to run concurrently with the clusters of all rows, which
    /// then take at most one in `beside` multiprocessors. `None` if there are too many rows.
    fn cluster_beside(&self, rows: usize, chunks: usize, beside: Option<usize>) -> Option<usize> {
        let most = self.sm_count / beside?;
        let Selection::Clusters(_, clusters) = &self.selection else { return None };
        let fits = |&blocks: &usize| rows.saturating_mul(blocks) <= most && clusters.run_with(blocks);
        let most = CLUSTERS.into_iter().chain([1]).find(fits)?;
        Some(most.min(chunks.next_power_of_two()))
    }

    /// Attention blocks per head, concurrent with the selection (`beside`) or after it.
    pub(super) fn attending_blocks(&self, common: &CommonArguments, beside: Option<usize>) -> usize {
        let CommonArguments { batch, heads, chunks, .. } = *common;
        let (rows, heads) = (batch as usize * heads as usize, heads as usize);
        let cluster = self.cluster_beside(rows, chunks as usize, beside);
        ((self.sm_count - cluster.map_or(0, |blocks| rows * blocks)) / heads).max(1)
    }

    /// Chunks of a sequence of `pages` pages of `tiles` tiles.
    const fn chunks(tiles: usize, pages: usize) -> usize {
        tiles.saturating_mul(pages).saturating_mul(TILE).div_ceil(CHUNK)
    }

    /// Bytes of workspace for `batch` sequences of `heads` KV heads, with room for `tokens` coded tokens
    /// each: `tiles` of the arguments, times the pages of a sequence, times [`TILE`]. Other sizes change its
    /// layout: zero it again before the first launch with them.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize, tokens: usize) -> usize {
        let rows = batch.saturating_mul(heads);
        let Parts { selection, .. } = self.parts(batch, heads, tokens.div_ceil(CHUNK));
        // Keys and candidates of each token, and a count.
        let row = tokens.div_ceil(CHUNK).saturating_mul(8 * CHUNK + 8).saturating_add(ROW_BYTES);
        selection.saturating_add(rows.saturating_mul(row))
    }

    fn parts(&self, batch: usize, heads: usize, chunks: usize) -> Parts {
        let rows = batch.saturating_mul(heads);
        let of_blocks = rows.saturating_mul(self.blocks(heads)).saturating_mul(8 * self.shape.entry());
        // A tile has a score of 2 bytes per token and query, and a level of 4 bytes per query.
        let of_tile = 2 * TILE * self.shape.group + 4 * self.shape.entry();
        let of_tokens = rows.saturating_mul(chunks).saturating_mul(CHUNK / TILE * of_tile);
        let scored = rows.saturating_mul(8).saturating_add(15) / 16 * 16;
        let stats = scored.saturating_add(SCORED_BYTES);
        let scores = stats.saturating_add(of_blocks);
        Parts { scored, stats, scores, selection: scores.saturating_add(of_tokens) }
    }

    /// Scores all tokens by their codes and selects those of the largest weight.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the capacity of a sequence or its pages, and of its addends, and every page number
    /// refers to an existing page: the kernels do not clamp them. The workspace was zeroed before the first
    /// launch of these sizes, and no other launch uses it at the same time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &SelectArguments) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.launch_deciding(stream, arguments, None, None) }
    }

    /// As [`Self::launch`]; `adaptive` is given exactly if the kernels have been compiled for it. If the next
    /// kernel may run concurrently with the selection, the selection takes at most one in `beside`
    /// multiprocessors.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit or an invalid bound, [`Error::Driver`].
    /// # Safety
    /// As for [`Self::launch`]; exact lengths do not exceed their capacity.
    pub(super) unsafe fn launch_deciding(
        &self,
        stream: CUstream,
        arguments: &SelectArguments,
        adaptive: Option<Adaptive>,
        beside: Option<usize>,
    ) -> Result<(), Error> {
        let a = arguments;
        let Some(common) = self.common(a, beside)? else { return Ok(()) };
        let per_head = OPERATION.grid(&[("blocks", self.blocks(a.heads)), ("heads", a.heads)])?;
        let (rows, chunks) = (a.batch.saturating_mul(a.heads), common.chunks as usize);
        let blocks = match &self.selection {
            Selection::Clusters(_, clusters) => self
                .cluster_beside(rows, chunks, beside)
                .unwrap_or_else(|| clusters.largest(rows).min(chunks.next_power_of_two())),
            Selection::Chunks(_) => chunks,
        };
        let per_row = OPERATION.grid(&[("chunks", blocks), ("heads of sequences", rows)])?;
        let parts = self.parts(a.batch, a.heads, chunks);
        let prepared = KernelArguments {
            common,
            codes: a.codes,
            table: a.table,
            norms: a.norms,
            queries: a.queries,
            errors: a.errors,
            selected: a.selected,
            selection: a.workspace.offset(parts.selection),
            // Blocks of `write` wait for each other. Every multiprocessor has room for at least one, so up to
            // `sm_count` blocks are always co-resident.
            tickets: u32::from(rows.saturating_mul(chunks) > self.sm_count),
            bound: adaptive.map(BoundArguments::new).transpose()?.unwrap_or_default(),
            addends: a.addends.map(|addends| addends.values),
            addend_tiles: OPERATION
                .in_32_bits("tiles of addends", a.addends.map_or(0, |addends| addends.tiles))?,
        };
        // SAFETY: the structure is the kernels' argument; the caller upholds the contract of its pointers.
        unsafe { self.scores.launch(stream, per_head, self.plan.threads(), a.pdl, &prepared)? };
        match &self.selection {
            Selection::Clusters(kernel, _) => {
                let cluster = blocks as u32;
                // SAFETY: as above.
                unsafe {
                    kernel.launch_in_clusters(stream, per_row, cluster, SELECT_THREADS, true, &prepared)
                }
            }
            Selection::Chunks(kernels) => kernels.iter().try_for_each(|kernel| {
                // SAFETY: as above.
                unsafe { kernel.launch(stream, per_row, SELECT_THREADS, true, &prepared) }
            }),
        }
    }

    /// The common arguments of the kernels; `None` if there is nothing to do.
    pub(super) fn common(
        &self,
        a: &SelectArguments,
        beside: Option<usize>,
    ) -> Result<Option<CommonArguments>, Error> {
        if a.batch == 0 || a.heads == 0 {
            return Ok(None);
        }
        if self.shape.paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if self.shape.addends != a.addends.is_some() {
            return Err(OPERATION.error("addends are given exactly when it is compiled for them"));
        }
        if self.shape.key_norms != a.norms.is_some() {
            return Err(OPERATION.error("norms of keys are given exactly when it is compiled for them"));
        }
        if a.tiles == 0 {
            return Err(OPERATION.error("no room for a tile"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        if a.pages.is_none() {
            in_32_bits("tiles", a.batch.saturating_mul(a.heads).saturating_mul(a.tiles))?;
        }
        let max_pages = a.pages.map_or(1, |pages| pages.max_pages);
        let chunks = Self::chunks(a.tiles, max_pages);
        in_32_bits("tokens of whole chunks", chunks.saturating_mul(CHUNK))?;
        let parts = self.parts(a.batch, a.heads, chunks);
        Ok(Some(CommonArguments {
            lengths: a.lengths,
            pages: a.pages.map(|pages| pages.table),
            ks: a.ks,
            scores: a.workspace.offset(parts.scores),
            sharers: a.workspace,
            stats: a.workspace.offset(parts.stats),
            scored: a.workspace.offset(parts.scored),
            batch: in_32_bits("sequences", a.batch)?,
            heads: in_32_bits("heads", a.heads)?,
            page_tiles: in_32_bits("tiles of a page", a.tiles)?,
            max_pages: in_32_bits("pages", max_pages)?,
            selected_len: a.selected_len.min(u32::MAX as usize) as u32,
            chunks: chunks as u32,
            blocks: self.blocks(a.heads) as u32,
            scale: a.scale * std::f32::consts::LOG2_E,
            hides: u32::from(self.cluster_beside(a.batch.saturating_mul(a.heads), chunks, beside).is_none()),
        }))
    }
}
