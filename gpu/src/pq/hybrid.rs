use cudarc::driver::sys::CUstream;
use half::f16;
use pq_core::{GroupRule, PqShape};

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::attend::{ExactTokens, Pages};
use crate::pq::layout::{CodeLayout, Side, TILE};
use crate::pq::scan::CHUNK;
use crate::pq::search::{ROW_BYTES, SELECT_THREADS};
use crate::{Device, Element, Error, Program};

/// Bytes of a row of a table in shared memory: `ROW` of the kernels.
const ROW: usize = 256;
/// Bytes for a `Plan`.
const PLAN_BYTES: usize = 64;
/// At least the size of `Shared` of `select_sm90.cu`: keys, counts and totals of three digits, and sums.
const SELECT_SHARED_BYTES: usize = 4 * 32_768 + 2 * 4 * 4096 + 8 * (16 + 32) + 4 * 3 * 8;
/// Blocks of a cluster that selects.
const CLUSTERS: [usize; 4] = [16, 8, 4, 2];

/// Compile-time shape of [`Hybrid`].
///
/// # Examples
/// ```
/// use kv_gpu::{Element, pq::HybridShape};
/// use pq_core::{GroupRule, PqShape};
/// let shape = HybridShape {
///     keys: PqShape::new(128, 16, 8)?,
///     values: PqShape::new(128, 8, 8)?,
///     group: 4,
///     element: Element::F16,
///     rule: GroupRule::SumOfSoftmax,
///     paged: false,
/// };
/// assert!(shape.check().is_ok());
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HybridShape {
    /// Quantizer of the keys.
    pub keys: PqShape,
    /// Quantizer of the values, of the same `dim`.
    pub values: PqShape,
    /// Query heads per key/value head.
    pub group: usize,
    /// Element type of queries, exact rows and outputs.
    pub element: Element,
    /// How the query heads of a group choose together.
    pub rule: GroupRule,
    /// Whether the codes are in pages.
    pub paged: bool,
}

/// Bytes of shared memory, and warps, of the kernels.
struct Plan {
    scores: usize,
    score_warps: usize,
    attend: usize,
    attend_warps: usize,
}

impl HybridShape {
    /// Checks that the kernels support the shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        self.plan(usize::MAX).map(|_| ())
    }

    fn dim(&self) -> usize {
        self.keys.dim()
    }

    /// Queries that a table entry serves: `VEC` of the kernels.
    const fn entry(&self) -> usize {
        match self.group {
            ..=2 => 2,
            3 | 4 => 4,
            _ => 8,
        }
    }

    /// `RESULT` of the kernels.
    fn result_len(&self) -> usize {
        self.dim() + 4
    }

    fn plan(&self, shared_memory: usize) -> Result<Plan, Error> {
        let unsupported = |supported| Err(Error::Unsupported { operation: format!("{self:?}"), supported });
        for (quantizer, side) in [(self.keys, Side::Keys), (self.values, Side::Values)] {
            CodeLayout::new(quantizer, side)?;
            if !matches!(quantizer.m(), 8 | 16 | 32) || !matches!(quantizer.nbits(), 4 | 8) {
                return unsupported("8, 16 or 32 subspaces of 4 or 8 bits");
            }
        }
        if self.dim() != self.values.dim() || !(1..=8).contains(&self.group) {
            return unsupported("keys and values of the same dim, and 1 to 8 query heads per key/value head");
        }
        let entry = self.entry();
        let two_rows = self.keys.m() == 32 && entry == 8; // a code's entries do not fit one row
        let lut = self.keys.ksub() * ROW * if two_rows { 2 } else { 1 };
        let builder = 4 * (self.keys.m() * entry + entry);
        let score_warps = if entry == 8 { 16 } else { 32 }; // more queries need more registers
        let scores = lut + builder + 8 * entry * score_warps + PLAN_BYTES;
        // A code of 128 components and at most 16 subspaces has two rows, 2^16 bytes apart.
        let half = if self.dim() == 128 && self.values.m() <= 16 { 1 << 16 } else { 0 };
        let table = half + self.values.ksub() * ROW;
        let attend = |warps: usize| table + 4 * warps * entry * self.result_len() + PLAN_BYTES;
        // A thread has 128 registers in a block of 16 warps, 168 in one of 12, 255 in one of 8.
        let most = match (entry, self.values.m()) {
            (8, 32) => 8,
            (8, _) | (_, 32) => 12,
            _ => 16,
        };
        let warps = [most, 12, 8].into_iter().find(|&warps| attend(warps) <= shared_memory);
        match warps.filter(|_| scores <= shared_memory) {
            Some(attend_warps) => {
                Ok(Plan { scores, score_warps, attend: attend(attend_warps), attend_warps })
            }
            None => unsupported("tables that fit the shared memory of the device"),
        }
    }

    /// The kernels for a compute capability and blocks of up to `shared_memory` bytes
    /// ([`Device::shared_memory`]): those that score, select and attend. From 9.0 on, one kernel selects.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn programs(&self, capability: (i32, i32), shared_memory: usize) -> Result<[Program; 3], Error> {
        Ok(self.plan(shared_memory)?.programs(self, has_clusters(capability, shared_memory)))
    }
}

/// Whether a cluster of blocks can select the tokens of a row.
const fn has_clusters(capability: (i32, i32), shared_memory: usize) -> bool {
    capability.0 >= 9 && SELECT_SHARED_BYTES <= shared_memory
}

impl Plan {
    /// Threads of a block that scores.
    const fn score_threads(&self) -> u32 {
        self.score_warps as u32 * 32
    }

    fn programs(&self, shape: &HybridShape, has_clusters: bool) -> [Program; 3] {
        let defines = [
            ("HEAD_DIM", shape.dim()),
            ("GROUP", shape.group),
            ("KEY_M", shape.keys.m()),
            ("KEY_BITS", shape.keys.nbits() as usize),
            ("VALUE_M", shape.values.m()),
            ("VALUE_BITS", shape.values.nbits() as usize),
            ("ELEMENT", shape.element as usize),
            ("ROW_BYTES", ROW_BYTES),
            ("SCORE_WARPS", self.score_warps),
            ("SCORES_SHARED_BYTES", self.scores),
            ("SELECT_SHARED_BYTES", SELECT_SHARED_BYTES),
            ("ATTEND_SHARED_BYTES", self.attend),
            ("ATTEND_WARPS", self.attend_warps),
        ];
        let select =
            if has_clusters { source!("pq_hybrid/select_sm90.cu") } else { source!("pq_hybrid/select.cu") };
        let sources = [source!("pq_hybrid/scores.cu"), select, source!("pq_hybrid/attend.cu")];
        sources.map(|source| {
            Program::new(source, &defines)
                .define_if(shape.rule == GroupRule::MaxOfSoftmax, "MAX_RULE")
                .define_if(shape.paged, "PAGED")
        })
    }
}

/// Which of [`ExactRows`] is that of the `i`-th selected token.
#[derive(Clone, Copy, Debug)]
pub enum RowIndex {
    /// Row `i`: the order in which [`Gather`](super::Gather) collects rows.
    Order,
    /// The row of the token's own number.
    Token,
    /// Row `i` of the list, `u32` (batch, heads, [`HybridArguments::selected_len`]): slots of a cache of rows.
    List(DevicePtr<u32>),
}

/// Exact keys and values of the selected tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExactRows {
    /// Elements (batch, heads, capacity, dim).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, capacity, dim).
    pub values: DevicePtr<AnyElement>,
    /// Rows of a head.
    pub capacity: usize,
    /// Where the selected tokens have theirs.
    pub index: RowIndex,
    /// Whether the kernel before [`Hybrid::attend`] on the stream brings these rows, as
    /// [`Gather`](super::Gather) does: it writes nothing else that `attend` reads, and lets it start only once
    /// the kernels before have ended. On sm_90 `attend` then sums coded values while rows arrive.
    pub arriving: bool,
}

const OPERATION: Operation = Operation("pq::Hybrid");

/// Pointers and sizes of one step of [`Hybrid`], the same for both of its launches.
#[derive(Clone, Copy, Debug)]
pub struct HybridArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of key/value heads.
    pub heads: usize,
    /// Capacity of a page (or of a sequence, without pages) in tiles of [`TILE`] tokens.
    pub tiles: usize,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]): codes of the keys.
    pub key_codes: DevicePtr<u8>,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]): codes of the values.
    pub value_codes: DevicePtr<u8>,
    /// `f16` (heads, [`CodeLayout::table_len`]): codebooks of the keys, by [`CodeLayout::table_into`].
    pub key_table: DevicePtr<f16>,
    /// `f16` (heads, [`CodeLayout::table_len`]): codebooks of the values.
    pub value_table: DevicePtr<f16>,
    /// `f32` (heads, dim): mean squared errors of the coded keys, for
    /// [`score_variances`](pq_core::Hybrid::score_variances); zeros if absent.
    pub key_errors: Option<DevicePtr<f32>>,
    /// Elements (batch, heads, group, dim), within the range of `f16`.
    pub queries: DevicePtr<AnyElement>,
    /// As `queries`, in the space of the key codes, where these are of rotated or projected keys
    /// ([`svd::Project`](crate::svd::Project)). [`Hybrid::select`] scores by them; `queries` if absent.
    pub code_queries: Option<DevicePtr<AnyElement>>,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernels read them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// The page table, given exactly if the shape is `paged`.
    pub pages: Option<Pages>,
    /// `u32` (batch,): k, the number of tokens to select. At most `selected_len` are, and at most all.
    pub ks: DevicePtr<u32>,
    /// `u32` (batch, heads, `selected_len`), written by [`Hybrid::select`]: the selected tokens in ascending
    /// order.
    pub selected: DevicePtr<u32>,
    /// Capacity of `selected` per head.
    pub selected_len: usize,
    /// Exact rows of the selected tokens. Only [`Hybrid::attend`] reads them.
    pub rows: ExactRows,
    /// Sinks and window: exact tokens in addition to the coded ones.
    pub exact: Option<ExactTokens>,
    /// Factor of the scores: `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Elements (batch, heads, group, dim), fully written. A sequence without tokens gives zeros.
    pub out: DevicePtr<AnyElement>,
    /// `f32` (batch, heads, group), fully written: the log-sum-exp of the scores (natural logarithm), to
    /// merge the result with attention over other tokens.
    pub log_sum_exp: Option<DevicePtr<f32>>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read the tables, the lengths and k *before* they wait for it
    /// (`griddepcontrol.wait`), so that kernel must not write these. They read everything else after the
    /// wait.
    pub pdl: bool,
    /// Bytes ([`Hybrid::workspace_len`],), zeroed before the first step. It carries scores and selection from
    /// one launch to the other; no other step may use it in between.
    pub workspace: DevicePtr<u8>,
}

/// `Arguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    key_codes: DevicePtr<u8>,
    value_codes: DevicePtr<u8>,
    key_table: DevicePtr<f16>,
    value_table: DevicePtr<f16>,
    queries: DevicePtr<AnyElement>,
    code_queries: DevicePtr<AnyElement>,
    lengths: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    exact_keys: Option<DevicePtr<AnyElement>>,
    exact_values: Option<DevicePtr<AnyElement>>,
    exact_lengths: Option<DevicePtr<u32>>,
    key_errors: Option<DevicePtr<f32>>,
    ks: DevicePtr<u32>,
    selected: DevicePtr<u32>,
    row_list: Option<DevicePtr<u32>>,
    row_keys: DevicePtr<AnyElement>,
    row_values: DevicePtr<AnyElement>,
    workspace: DevicePtr<u8>,
    out: DevicePtr<AnyElement>,
    log_sum_exp: Option<DevicePtr<f32>>,
    row_capacity: u64,
    batch: u32,
    heads: u32,
    page_tiles: u32,
    max_pages: u32,
    exact_capacity: u32,
    selected_len: u32,
    chunks: u32,
    blocks: u32,
    tickets: u32,
    scale: f32,
    rows_arrive: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 216);

/// The kernels that select.
enum Selection {
    /// One, with a cluster of blocks for each row; how many clusters of each of the `CLUSTERS` run at a time.
    Clusters(Kernel, [usize; 4]),
    /// Three in order, with a block for each chunk of a row.
    Chunks([Kernel; 3]),
}

/// Decode attention in which codes stand for all tokens but the few of the largest weight, which have their
/// exact rows: `pq_core::hybrid_select_into`, `pq_core::hybrid_attend_into` and `pq_core::attend_exact_into`
/// in one softmax.
///
/// A step is two launches on one stream, [`Hybrid::select`] and [`Hybrid::attend`]. Where rows are in device
/// memory, one follows the other; where they are on the host, a [`Gather`](super::Gather) between them
/// collects the selected ones. Pinned host memory may also be given as it is. A launch allocates nothing and
/// does not synchronize, and a captured graph stays valid. The same inputs give the same bytes.
///
/// Where the weights of two tokens differ by less than rounding, the CPU may select the other one. Of tokens
/// of equal weight, those of lower index are selected.
///
/// # Cost
/// Every code is read once. The coded scores, 4 bytes per token and query, are written once and read twice.
/// # Source
/// MILLION (DAC 2025), III-B, for attention on codes; PQCache (arXiv 2407.12820), 3.4, for the group's rule.
pub struct Hybrid {
    scores: Kernel,
    selection: Selection,
    attend: Kernel,
    shape: HybridShape,
    plan: Plan,
    sm_count: usize,
}

impl Hybrid {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: HybridShape) -> Result<Self, Error> {
        let plan = shape.plan(device.shared_memory())?;
        let has_clusters = has_clusters(device.capability(), device.shared_memory());
        let [scores, select, attend] = plan.programs(&shape, has_clusters);
        let selection = if has_clusters {
            let kernel = device.kernel(&select, "pq_hybrid_select", SELECT_SHARED_BYTES)?;
            let mut active = [0; CLUSTERS.len()];
            for (active, blocks) in active.iter_mut().zip(CLUSTERS) {
                *active = kernel.active_clusters(blocks as u32, SELECT_THREADS)?;
            }
            Selection::Clusters(kernel, active)
        } else {
            Selection::Chunks([
                device.kernel(&select, "pq_hybrid_keys", 0)?,
                device.kernel(&select, "pq_hybrid_collect", 0)?,
                device.kernel(&select, "pq_hybrid_write", 0)?,
            ])
        };
        let scores = device.kernel(&scores, "pq_hybrid_scores", plan.scores)?;
        Ok(Self {
            scores: scores.prefer_l1(plan.score_threads())?,
            selection,
            attend: device.kernel(&attend, "pq_hybrid_attend", plan.attend)?,
            shape,
            plan,
            sm_count: device.sm_count(),
        })
    }

    /// Blocks of each head.
    fn blocks(&self, heads: usize) -> usize {
        (self.sm_count / heads.max(1)).max(1)
    }

    /// Chunks of a sequence of `pages` pages of `tiles` tiles.
    const fn chunks(tiles: usize, pages: usize) -> usize {
        tiles.saturating_mul(pages).saturating_mul(TILE).div_ceil(CHUNK)
    }

    /// Bytes of workspace for `batch` sequences of `heads` key/value heads, with room for `tokens` coded
    /// tokens each: `tiles` of the arguments, times the pages of a sequence, times [`TILE`]. Other sizes
    /// change its layout: zero it again before the first step with them.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize, tokens: usize) -> usize {
        let (rows, entry) = (batch.saturating_mul(heads), self.shape.entry());
        let blocks = self.blocks(heads);
        let counters = rows.saturating_mul(12).next_multiple_of(16);
        let stats = rows.saturating_mul(blocks).saturating_mul(8 * entry);
        let parts = heads.saturating_mul(blocks).saturating_mul(8 * entry * self.shape.result_len());
        // Scores, keys and candidates of each token, and a count.
        let chunk = CHUNK * (4 * self.shape.group + 8) + 8;
        let row = tokens.div_ceil(CHUNK).saturating_mul(chunk).saturating_add(ROW_BYTES);
        counters.saturating_add(stats).saturating_add(parts).saturating_add(rows.saturating_mul(row))
    }

    /// Scores all tokens by their codes and selects those of the largest weight.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the tokens that a sequence or its pages have room for, and every page number is that of
    /// an existing page: the kernels do not clamp them. The workspace was zeroed before the first step of
    /// these sizes, and no other step uses it at the same time.
    pub unsafe fn select(&self, stream: CUstream, arguments: &HybridArguments) -> Result<(), Error> {
        let Some(prepared) = self.prepare(arguments)? else { return Ok(()) };
        let a = arguments;
        let per_head = OPERATION.grid(&[("blocks", self.blocks(a.heads)), ("heads", a.heads)])?;
        let rows = a.batch.saturating_mul(a.heads);
        let chunks = prepared.chunks as usize;
        let blocks = match &self.selection {
            // The largest clusters of which those of all rows run at the same time.
            Selection::Clusters(_, active) => {
                let fitting = CLUSTERS.into_iter().zip(active).find(|&(_, &active)| rows <= active);
                fitting.map_or(1, |(blocks, _)| blocks.min(chunks.next_power_of_two()))
            }
            Selection::Chunks(_) => chunks,
        };
        let per_row = OPERATION.grid(&[("chunks", blocks), ("heads of sequences", rows)])?;
        // SAFETY: the structure is the kernels' argument; the caller upholds the contract of its pointers.
        unsafe { self.scores.launch(stream, per_head, self.plan.score_threads(), a.pdl, &prepared)? };
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

    /// Attends to the codes of all tokens but the selected ones, to their exact rows, and to the other exact
    /// tokens. [`Hybrid::select`] with the same arguments precedes it on the stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// As for [`Hybrid::select`]; rows exist for all selected tokens, and exact lengths do not exceed their
    /// capacity. Tables, lengths and k are not outputs of the previous kernel of the stream: they are read before
    /// the PDL wait.
    pub unsafe fn attend(&self, stream: CUstream, arguments: &HybridArguments) -> Result<(), Error> {
        let Some(prepared) = self.prepare(arguments)? else { return Ok(()) };
        let heads = arguments.heads;
        let grid = OPERATION.grid(&[("blocks", self.blocks(heads)), ("heads", heads)])?;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.attend.launch(stream, grid, self.plan.attend_warps as u32 * 32, true, &prepared) }
    }

    /// The kernels' arguments; `None` if there is nothing to do.
    fn prepare(&self, a: &HybridArguments) -> Result<Option<KernelArguments>, Error> {
        if a.batch == 0 || a.heads == 0 {
            return Ok(None);
        }
        if self.shape.paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if a.tiles == 0 {
            return Err(OPERATION.error("no room for a tile"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        let rows = a.batch.saturating_mul(a.heads);
        if a.pages.is_none() {
            in_32_bits("tiles", rows.saturating_mul(a.tiles))?;
        }
        let max_pages = a.pages.map_or(1, |pages| pages.max_pages);
        let chunks = Self::chunks(a.tiles, max_pages);
        in_32_bits("tokens of whole chunks", chunks.saturating_mul(CHUNK))?;
        Ok(Some(KernelArguments {
            key_codes: a.key_codes,
            value_codes: a.value_codes,
            key_table: a.key_table,
            value_table: a.value_table,
            queries: a.queries,
            code_queries: a.code_queries.unwrap_or(a.queries),
            lengths: a.lengths,
            pages: a.pages.map(|pages| pages.table),
            exact_keys: a.exact.map(|exact| exact.keys),
            exact_values: a.exact.map(|exact| exact.values),
            exact_lengths: a.exact.map(|exact| exact.lengths),
            key_errors: a.key_errors,
            ks: a.ks,
            selected: a.selected,
            row_list: match a.rows.index {
                RowIndex::Order => None,
                RowIndex::Token => Some(a.selected),
                RowIndex::List(rows) => Some(rows),
            },
            row_keys: a.rows.keys,
            row_values: a.rows.values,
            workspace: a.workspace,
            out: a.out,
            log_sum_exp: a.log_sum_exp,
            row_capacity: a.rows.capacity as u64,
            batch: in_32_bits("sequences", a.batch)?,
            heads: in_32_bits("heads", a.heads)?,
            page_tiles: in_32_bits("tiles of a page", a.tiles)?,
            max_pages: in_32_bits("pages", max_pages)?,
            exact_capacity: in_32_bits("exact tokens", a.exact.map_or(0, |exact| exact.capacity))?,
            selected_len: a.selected_len.min(u32::MAX as usize) as u32,
            chunks: chunks as u32,
            blocks: self.blocks(a.heads) as u32,
            // Blocks of `write` wait for each other. Every multiprocessor has room for at least one, so
            // `sm_count` blocks are always resident together.
            tickets: u32::from(rows.saturating_mul(chunks) > self.sm_count),
            scale: a.scale * std::f32::consts::LOG2_E,
            rows_arrive: u32::from(a.rows.arriving),
        }))
    }
}
