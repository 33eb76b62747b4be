//! Hybrid attention: selection of tokens by their codes, and one softmax over codes and exact rows.

mod mean_errors;

use cudarc::driver::sys::CUstream;
use half::f16;
use kv_attend::owner::Side;
use pq_core::{GroupRule, PqShape};

use self::mean_errors::AddMeanErrors;
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::addends::Addends;
use crate::pq::attend::{ExactTokens, Pages};
use crate::pq::mean_errors::BlockMeans;
use crate::pq::select::{
    CommonArguments, ErrorBound, PLAN_BYTES, ROW, Select, SelectArguments, SelectShape, check_quantizer,
    has_clusters,
};
use crate::{Device, Element, Error, Program};

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
///     addends: false,
///     key_norms: false,
///     value_norms: false,
///     mean_errors: false,
///     adaptive: false,
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
    /// Query heads per KV head.
    pub group: usize,
    /// Element type of queries, exact rows and outputs.
    pub element: Element,
    /// How the query heads of a group choose together.
    pub rule: GroupRule,
    /// Whether the codes are in pages.
    pub paged: bool,
    /// Whether [`Addends`] are added to the scores.
    pub addends: bool,
    /// Whether the scores of codes are multiplied by [norms](HybridArguments::key_norms).
    pub key_norms: bool,
    /// Whether decoded values are multiplied by [norms](HybridArguments::value_norms).
    pub value_norms: bool,
    /// Whether the [mean errors](HybridArguments::mean_errors) of the coded values are added.
    pub mean_errors: bool,
    /// Whether [`Hybrid::select`] determines how many tokens each head reads exactly ([`ErrorBound`]), up to
    /// k.
    pub adaptive: bool,
}

/// Bytes of `is_again` and `lost` of the attention kernel, padded.
const PASS_BYTES: usize = 16;

/// Offsets in the workspace.
struct Parts {
    partials: usize,
    mean_errors: usize,
    select: usize,
}

/// Shared memory and warps of the attention kernel.
#[derive(Clone, Copy)]
struct Plan {
    shared_bytes: usize,
    warps: usize,
    copies: Option<usize>, // of the centroids of the values; none if weights are summed by code
}

impl HybridShape {
    /// Checks that the kernels support the shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        self.selection().check()?;
        self.plan(usize::MAX).map(|_| ())
    }

    /// The shape of the selection.
    const fn selection(&self) -> SelectShape {
        let &Self { keys, group, element, rule, paged, addends, key_norms, .. } = self;
        SelectShape { keys, group, element, rule, paged, addends, key_norms }
    }

    /// Floats of a partial result: `RESULT` of the kernels.
    fn result_len(&self) -> usize {
        self.values.dim() + 4
    }

    /// Additions of weights per token, if these are summed by code.
    const fn additions(&self) -> usize {
        self.values.m() * self.group
    }

    fn plan(&self, shared_memory: usize) -> Result<Plan, Error> {
        let unsupported = |supported| Err(Error::Unsupported { operation: format!("{self:?}"), supported });
        check_quantizer(self.values, Side::Values)?;
        if self.keys.dim() != self.values.dim() {
            return unsupported("keys and values of the same dim");
        }
        let entry = self.selection().entry();
        // Weights are summed by code where that takes at most half of the accesses to shared memory, for up
        // to two queries: more take longer to multiply by the codebook. Counters lack the range for weights
        // times norms. For look-ups, two copies of the
        // centroids of at most 16 subspaces avoid bank conflicts: with 128 components a code then has two
        // rows, 2^16 bytes apart.
        let (m, ksub, dim) = (self.values.m(), self.values.ksub(), self.values.dim());
        let sums_by_code = self.group <= 2 && !self.value_norms && 4 * self.additions() <= dim;
        let plan = |copies: Option<usize>, warps: usize| {
            let values = match copies {
                None => ksub * ROW, // counters of two queries
                Some(2) if dim == 128 => (1 << 16) + ksub * ROW,
                Some(_) => ksub * ROW,
            };
            let shared_bytes = values + 4 * entry * (warps * self.result_len() + 1) + PLAN_BYTES + PASS_BYTES;
            Plan { shared_bytes, warps, copies }
        };
        // A thread has 128 registers in a block of 16 warps, 168 in one of 12, 255 in one of 8.
        let most = match (entry, m) {
            (8, 32) => 8,
            (8, _) | (_, 32) => 12,
            _ => 16,
        };
        let by_code = sums_by_code.then(|| plan(None, 16));
        let copies = [if m <= 16 { 2 } else { 1 }, 1].map(Some);
        let by_look_up = copies.into_iter().flat_map(|copies| [most, 12, 8].map(|warps| plan(copies, warps)));
        let mut plans = by_code.into_iter().chain(by_look_up);
        match plans.find(|plan| plan.shared_bytes <= shared_memory) {
            Some(plan) => Ok(plan),
            None => unsupported("tables that fit the shared memory of the device"),
        }
    }

    /// The kernels for a compute capability and blocks of up to `shared_memory` bytes
    /// ([`Device::shared_memory`]): those of [`SelectShape::programs`], attention after the selection and, if
    /// they exist, attention concurrent with the selection and the addition of mean errors.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn programs(&self, capability: (i32, i32), shared_memory: usize) -> Result<Vec<Program>, Error> {
        let mut programs = self.selection().programs_of(self.adaptive, capability, shared_memory)?.to_vec();
        let plan = self.plan(shared_memory)?;
        programs.push(self.attend_program(plan, false));
        if self.may_attend_beside(capability, shared_memory) {
            programs.push(self.attend_program(plan, true));
        }
        programs.extend(self.mean_errors.then(|| AddMeanErrors::program(self)));
        Ok(programs)
    }

    /// Whether attention can run concurrently with the selection: not if the selection determines how many
    /// rows a head reads.
    const fn may_attend_beside(&self, capability: (i32, i32), shared_memory: usize) -> bool {
        !self.adaptive && has_clusters(capability, shared_memory)
    }

    fn attend_program(&self, plan: Plan, beside: bool) -> Program {
        let defines = [
            ("VALUE_M", self.values.m()),
            ("VALUE_BITS", self.values.nbits() as usize),
            ("ATTEND_SHARED_BYTES", plan.shared_bytes),
            ("ATTEND_WARPS", plan.warps),
        ];
        let values = plan.copies.map_or(("HISTOGRAM_VALUES", 1), |copies| ("VALUE_COPIES", copies));
        let program =
            self.selection().program(source!("pq_hybrid/attend.cu"), &[&defines[..], &[values]].concat());
        program
            .define_if(self.adaptive, "ADAPTIVE")
            .define_if(beside, "CONCURRENT_SELECT")
            .define_if(self.value_norms, "VALUE_NORMS")
    }
}

/// The row of the `i`-th selected token in [`ExactRows`].
#[derive(Clone, Copy, Debug)]
pub enum RowIndex {
    /// Row `i`: the order in which [`Gather`](super::Gather) collects rows.
    Order,
    /// The row with the token's index.
    Token,
    /// Row `i` of the list, `u32` (batch, heads, [`HybridArguments::selected_len`]): slots of a cache of
    /// rows.
    List(DevicePtr<u32>),
}

/// Exact keys and values of the selected tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExactRows {
    /// Elements (batch, heads, capacity, dim).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, capacity, dim).
    pub values: DevicePtr<AnyElement>,
    /// Rows that each head has room for.
    pub capacity: usize,
    /// The rows of the selected tokens.
    pub index: RowIndex,
    /// Whether the kernel before [`Hybrid::attend`] on the stream writes these rows, as
    /// [`Gather`](super::Gather) does: it writes nothing else that `attend` reads, and triggers its launch
    /// (PDL) only after all earlier kernels have ended. On sm_90 `attend` then sums coded values while rows
    /// arrive.
    pub arriving: bool,
}

const OPERATION: Operation = Operation("pq::Hybrid");

/// Pointers and sizes of one step of [`Hybrid`], the same for both of its launches.
#[derive(Clone, Copy, Debug)]
pub struct HybridArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Capacity of a page (or of a sequence, without pages) in tiles of [`TILE`](super::TILE) tokens.
    pub tiles: usize,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`](super::CodeLayout::tile_len)): codes of
    /// the keys.
    pub key_codes: DevicePtr<u8>,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`](super::CodeLayout::tile_len)): codes of
    /// the values.
    pub value_codes: DevicePtr<u8>,
    /// `f16` (heads, [`CodeLayout::table_len`](super::CodeLayout::table_len)): codebooks of the keys, by
    /// [`CodeLayout::table_into`](super::CodeLayout::table_into).
    pub key_table: DevicePtr<f16>,
    /// `f16` (heads, [`CodeLayout::table_len`](super::CodeLayout::table_len)): codebooks of the values.
    pub value_table: DevicePtr<f16>,
    /// `f32` (heads, dim): mean squared errors of the coded keys, for
    /// [`score_variances`](pq_core::Hybrid::score_variances); zeros if absent.
    pub key_errors: Option<DevicePtr<f32>>,
    /// `f16` (pages or batch, heads, tiles, [`TILE`](super::TILE)), given exactly if the shape has
    /// `key_norms`: the norms by which keys were divided before encoding ([`pq_core::divide_by_norms`]),
    /// finite, as in [`Norms`](super::Norms).
    pub key_norms: Option<DevicePtr<f16>>,
    /// `f16` (pages or batch, heads, tiles, [`TILE`](super::TILE)), given exactly if the shape has
    /// `value_norms`: the norms by which values were divided before encoding
    /// ([`pq_core::divide_by_norms`]), as in [`Norms`](super::Norms). They are below 256, as coded norms are.
    pub value_norms: Option<DevicePtr<f16>>,
    /// Given exactly if the shape has `mean_errors`: what the coded values lack on average, as
    /// [`MeanErrors`](super::MeanErrors) has it.
    pub mean_errors: Option<BlockMeans>,
    /// Elements (batch, heads, group, dim), within the range of `f16`.
    pub queries: DevicePtr<AnyElement>,
    /// As `queries`, in the space of the key codes if these encode rotated or projected keys
    /// ([`svd::Project`](crate::svd::Project)). [`Hybrid::select`] scores with them; `queries` if absent.
    pub code_queries: Option<DevicePtr<AnyElement>>,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernels read them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// The page table, given exactly if the shape is `paged`.
    pub pages: Option<Pages>,
    /// Terms that [`Hybrid::select`] adds to the scores of the codes, given exactly if the shape has
    /// `addends`. They are not added to the scores of exact rows.
    pub addends: Option<Addends>,
    /// `u32` (batch,): k, the number of tokens to select, or its maximum if the shape is `adaptive`, clamped
    /// to `selected_len` and to the length.
    pub ks: DevicePtr<u32>,
    /// The bound that determines how many tokens a head reads, given exactly if the shape is `adaptive`.
    pub bound: Option<ErrorBound>,
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
    /// Bytes ([`Hybrid::workspace_len`],), zeroed before the first step. It passes scores and selection from
    /// one launch to the other; no other step may use it in between.
    pub workspace: DevicePtr<u8>,
}

/// `AttendArguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    common: CommonArguments,
    codes: DevicePtr<u8>,
    table: DevicePtr<f16>,
    value_norms: Option<DevicePtr<f16>>,
    queries: DevicePtr<AnyElement>,
    exact_keys: Option<DevicePtr<AnyElement>>,
    exact_values: Option<DevicePtr<AnyElement>>,
    exact_lengths: Option<DevicePtr<u32>>,
    selected: DevicePtr<u32>,
    row_list: Option<DevicePtr<u32>>,
    row_keys: DevicePtr<AnyElement>,
    row_values: DevicePtr<AnyElement>,
    partials: DevicePtr<u8>,
    counts: DevicePtr<u8>,
    out: DevicePtr<AnyElement>,
    log_sum_exp: Option<DevicePtr<f32>>,
    found: Option<DevicePtr<u32>>,
    row_capacity: u64,
    exact_capacity: u32,
    rows_arrive: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 240);

/// Decode attention over the codes of all tokens, except that the few tokens with the largest weights use
/// their exact rows: `pq_core::hybrid_select_into`, `pq_core::hybrid_attend_into` and
/// `pq_core::attend_exact_into` in one softmax.
///
/// A step is two launches on one stream, [`Hybrid::select`], which is a [`Select`], and [`Hybrid::attend`].
/// If rows are in device memory, one follows the other; if they are on the host, a
/// [`Gather`](super::Gather) between them collects the selected ones. Alternatively `attend` reads rows from
/// pinned or managed host memory itself. A launch allocates nothing and does not synchronize, and a captured
/// graph stays valid. The same inputs give the same bytes.
///
/// If the weights of two tokens differ by less than rounding, the CPU may select the other one. Of tokens of
/// equal weight, those with lower indices are selected. If the shape is `adaptive`, [`Hybrid::select`]
/// determines how many tokens each head selects, as [`pq_core::RowBudget::Error`] does: exact tokens are
/// scored first, to find the share of the attention that the codes hold.
///
/// Table entries are `f16`, relative to the best of each subspace: a coded score is exact to about 2^-12 of
/// its distance from the best codes that a query could have.
///
/// # Cost
/// Every code is read once. The coded scores, 2 bytes per token and query, are written once and read twice.
/// Where a query's output has less than 2^-6 of the weight of all codes, since the selected tokens' rows are
/// far below their codes, one block attends to the head again, relative to the other tokens. With up to two
/// query heads per KV head and `4 * group * m <= dim` for the values, attention adds up the weights of each
/// code in place of values, unless these have norms. Mean errors are a third launch, which reads the coded
/// scores again.
/// # Source
/// MILLION (DAC 2025), III-B, for attention on codes; PQCache (arXiv 2407.12820), 3.4, for the group's rule.
pub struct Hybrid {
    select: Select,
    attend: Kernel,
    attend_beside: Option<Kernel>, // concurrent with the selection
    mean_errors: Option<AddMeanErrors>,
    shape: HybridShape,
    plan: Plan,
}

impl Hybrid {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: HybridShape) -> Result<Self, Error> {
        let plan = shape.plan(device.shared_memory())?;
        let attend = |beside| {
            device.kernel(&shape.attend_program(plan, beside), "pq_hybrid_attend", plan.shared_bytes)
        };
        let beside = shape.may_attend_beside(device.capability(), device.shared_memory());
        let attend_beside = beside.then(|| attend(true)).transpose()?;
        let mean_errors = shape.mean_errors.then(|| AddMeanErrors::new(device, shape)).transpose()?;
        let select = Select::deciding(device, shape.selection(), shape.adaptive)?;
        Ok(Self { select, attend: attend(false)?, attend_beside, mean_errors, shape, plan })
    }

    /// Offsets in the workspace. The counters of finished blocks come first.
    fn parts(&self, batch: usize, heads: usize) -> Parts {
        let rows = batch.saturating_mul(heads);
        let words = |count: usize| rows.saturating_mul(count).saturating_mul(4).saturating_add(15) / 16 * 16;
        let of_block = 2 * 4 * self.shape.selection().entry() * self.shape.result_len();
        let blocks = heads.saturating_mul(self.select.blocks(heads)).saturating_mul(of_block);
        let partials = words(1);
        let mean_errors = partials.saturating_add(blocks);
        let of_means = self.mean_errors.as_ref().map_or(0, |add| add.workspace_len(batch, heads));
        Parts { partials, mean_errors, select: mean_errors.saturating_add(of_means) }
    }

    /// Bytes of workspace for `batch` sequences of `heads` KV heads, with room for `tokens` coded tokens
    /// each: `tiles` of the arguments, times the pages of a sequence, times [`TILE`](super::TILE). Other
    /// sizes change its layout: zero it again before the first step with them.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize, tokens: usize) -> usize {
        let own = self.parts(batch, heads).select;
        own.saturating_add(self.select.workspace_len(batch, heads, tokens))
    }

    /// Scores all tokens by their codes and selects those with the largest weights.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the capacity of a sequence or its pages, and of its addends, and every page number
    /// refers to an existing page: the kernels do not clamp them. The workspace was zeroed before the first
    /// step of these sizes, and no other step uses it at the same time. With a bound, exact lengths do not
    /// exceed their capacity.
    pub unsafe fn select(&self, stream: CUstream, arguments: &HybridArguments) -> Result<(), Error> {
        self.check(arguments)?;
        let adaptive = arguments.bound.map(|bound| (bound, arguments.queries, arguments.exact));
        let (select, beside) = (self.select_arguments(arguments), self.attends_beside(arguments));
        // SAFETY: the caller upholds the contract.
        unsafe { self.select.launch_deciding(stream, &select, adaptive, beside) }
    }

    /// If attention may start while the selection runs, which it may not if the kernel between them writes
    /// rows: one in how many multiprocessors selects. Where attention takes the least time, half of them do
    /// (8/8 heads x 131,072: 33.2 us, with a quarter 35.4; 16/8 heads: 41.5 and 38.5, H200).
    fn attends_beside(&self, arguments: &HybridArguments) -> Option<usize> {
        if self.attend_beside.is_none() || arguments.rows.arriving {
            return None;
        }
        let is_fast = self.plan.copies.is_none() && 8 * self.shape.additions() <= self.shape.values.dim();
        Some(if is_fast { 2 } else { 4 })
    }

    fn check(&self, arguments: &HybridArguments) -> Result<(), Error> {
        if self.shape.adaptive != arguments.bound.is_some() {
            return Err(OPERATION.error("a bound is given exactly when it is compiled for one"));
        }
        if self.shape.value_norms != arguments.value_norms.is_some() {
            return Err(OPERATION.error("norms of values are given exactly when it is compiled for them"));
        }
        if self.shape.mean_errors != arguments.mean_errors.is_some() {
            return Err(OPERATION.error("mean errors are given exactly when it is compiled for them"));
        }
        Ok(())
    }

    /// Attends to the codes of all tokens but the selected ones, to their exact rows, and to the other exact
    /// tokens, and adds the mean errors of the coded values. [`Hybrid::select`] with the same arguments
    /// precedes it on the stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// As for [`Hybrid::select`]; rows exist for all selected tokens, and exact lengths do not exceed their
    /// capacity. A kernel between the two launches triggers this one (PDL) only after the selection has
    /// ended. No kernel after [`Hybrid::select`] writes tables, page tables, codes, norms, lengths (of exact
    /// tokens, too) or k: they are read before the PDL wait.
    pub unsafe fn attend(&self, stream: CUstream, arguments: &HybridArguments) -> Result<(), Error> {
        let a = arguments;
        self.check(a)?;
        let beside = self.attends_beside(a);
        let Some(common) = self.select.common(&self.select_arguments(a), beside)? else { return Ok(()) };
        let parts = self.parts(a.batch, a.heads);
        let of_means = a.workspace.offset(parts.mean_errors);
        let log_sum_exp =
            a.log_sum_exp.or_else(|| self.mean_errors.as_ref().map(|add| add.log_sum_exp(a, of_means)));
        let exact_capacity = a.exact.map_or(0, |exact| exact.capacity);
        let prepared = KernelArguments {
            common,
            codes: a.value_codes,
            table: a.value_table,
            value_norms: a.value_norms,
            queries: a.queries,
            exact_keys: a.exact.map(|exact| exact.keys),
            exact_values: a.exact.map(|exact| exact.values),
            exact_lengths: a.exact.map(|exact| exact.lengths),
            selected: a.selected,
            row_list: match a.rows.index {
                RowIndex::Order => None,
                RowIndex::Token => Some(a.selected),
                RowIndex::List(rows) => Some(rows),
            },
            row_keys: a.rows.keys,
            row_values: a.rows.values,
            partials: a.workspace.offset(parts.partials),
            counts: a.workspace,
            out: a.out,
            log_sum_exp,
            found: a.bound.map(|bound| bound.found),
            row_capacity: a.rows.capacity as u64,
            exact_capacity: OPERATION.in_32_bits("exact tokens", exact_capacity)?,
            rows_arrive: u32::from(a.rows.arriving),
        };
        let blocks = self.select.attending_blocks(&common, beside);
        let grid = OPERATION.grid(&[("blocks", blocks), ("heads", a.heads)])?;
        let attend = self.attend_beside.as_ref().filter(|_| common.is_beside()).unwrap_or(&self.attend);
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { attend.launch(stream, grid, self.plan.warps as u32 * 32, true, &prepared)? };
        match (&self.mean_errors, a.mean_errors, log_sum_exp) {
            (Some(add), Some(means), Some(log_sum_exp)) => {
                // SAFETY: the caller's contract; attention has just written the log-sum-exps.
                unsafe { add.launch(stream, common, a, means, log_sum_exp, of_means) }
            }
            _ => Ok(()),
        }
    }

    fn select_arguments(&self, a: &HybridArguments) -> SelectArguments {
        let parts = self.parts(a.batch, a.heads);
        SelectArguments {
            batch: a.batch,
            heads: a.heads,
            tiles: a.tiles,
            codes: a.key_codes,
            table: a.key_table,
            norms: a.key_norms,
            errors: a.key_errors,
            queries: a.code_queries.unwrap_or(a.queries),
            lengths: a.lengths,
            pages: a.pages,
            addends: a.addends,
            ks: a.ks,
            selected: a.selected,
            selected_len: a.selected_len,
            scale: a.scale,
            pdl: a.pdl,
            workspace: a.workspace.offset(parts.select),
        }
    }
}

#[cfg(test)]
mod tests {
    use pq_core::{GroupRule, PqShape};

    use super::HybridShape;
    use crate::Element;

    #[test]
    fn few_queries_sum_weights_by_code_on_every_device() -> Result<(), Box<dyn std::error::Error>> {
        let by_code = [(128, 8, 8, 2), (128, 16, 8, 2), (128, 32, 4, 1), (64, 8, 4, 2), (64, 16, 8, 1)];
        let by_look_up = [(128, 32, 8, 2), (128, 8, 8, 4), (64, 16, 8, 2), (64, 32, 4, 1)];
        for (shapes, is_by_code) in [(&by_code[..], true), (&by_look_up[..], false)] {
            for &(dim, m, nbits, group) in shapes {
                let quantizer = PqShape::new(dim, m, nbits)?;
                let shape = HybridShape {
                    keys: quantizer,
                    values: quantizer,
                    group,
                    element: Element::F16,
                    rule: GroupRule::SumOfSoftmax,
                    paged: false,
                    addends: false,
                    key_norms: false,
                    value_norms: false,
                    mean_errors: false,
                    adaptive: false,
                };
                for kib in [99, 163, 227] {
                    let plan = shape.plan(kib << 10)?;
                    assert_eq!(plan.copies.is_none(), is_by_code, "{shape:?}, {kib} KiB");
                    let plan = HybridShape { value_norms: true, ..shape }.plan(kib << 10)?;
                    assert!(plan.copies.is_some(), "{shape:?} with norms, {kib} KiB");
                }
            }
        }
        Ok(())
    }
}
