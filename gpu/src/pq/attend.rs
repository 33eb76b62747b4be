//! Decode attention over codes and exact rows in one launch: the shape, the tables that fit, the arguments.

use cudarc::driver::sys::CUstream;
use half::f16;
use kv_attend::owner::Side;
use pq_core::PqShape;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::Addends;
use crate::pq::layout::{CodeLayout, Paging};
use crate::{Device, Element, Error, Program};

/// Bytes of a row of the codebook tables in shared memory: `ROW` of the kernel.
const ROW: usize = 256;
/// Maximum bytes of shared memory of a block on sm_90.
const SHARED_MEMORY_SM_90: usize = 227 << 10;
/// Maximum number of query heads of a block.
const MAX_QUERIES: usize = 8;
/// Bytes of a query's weights of a tile in shared memory: `WEIGHT_ROW` of the kernel for one query and for
/// several.
const WEIGHT_ROWS: [usize; 2] = [64, 80];

/// Compile-time shape of [`Attend`].
///
/// # Examples
/// ```
/// use kv_gpu::{Element, pq::{AttendShape, Paging}};
/// let keys = pq_core::PqShape::new(128, 64, 8)?;
/// let (element, paging) = (Element::F16, Paging::HalfTiles); // pages of 16 tokens
/// let (addends, norms, exact_fp8) = (false, false, false);
/// let shape = AttendShape { keys, values: keys, group: 4, element, paging, addends, norms, exact_fp8 };
/// assert!(shape.check().is_ok());
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendShape {
    /// Quantizer of the keys.
    pub keys: PqShape,
    /// Quantizer of the values, of the same `dim`.
    pub values: PqShape,
    /// Query heads per KV head.
    pub group: usize,
    /// Element type of queries, exact tokens and outputs.
    pub element: Element,
    /// Whether and how the codes are paged.
    pub paging: Paging,
    /// Whether the scores of coded tokens have [`Addends`].
    pub addends: bool,
    /// Whether decoded keys and values are multiplied by [`Norms`].
    pub norms: bool,
    /// Whether exact tokens are bytes in FP8 (E4M3, `torch.float8_e4m3fn`) instead of elements.
    pub exact_fp8: bool,
}

/// The kernel's constants for a shape.
struct Plan {
    keys: CodeLayout,
    values: CodeLayout,
    element: Element,
    norms: bool,
    queries: usize, // of a block
    copies: usize,  // of the key table
    warps: usize,
    interleaved: bool, // a warp interleaves the steps of two tiles
}

impl AttendShape {
    /// Checks that a kernel supports the shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        self.plan(usize::MAX).map(|_| ())
    }

    fn plan(&self, shared_memory: usize) -> Result<Plan, Error> {
        let keys = CodeLayout::of(self.keys, Side::Keys, self.paging)?;
        let values = CodeLayout::of(self.values, Side::Values, self.paging)?;
        if self.keys.dim() != self.values.dim() || self.group == 0 || self.group > 16 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "keys and values of the same dim, and 1 to 16 query heads per key/value head",
            });
        }
        if self.keys.m().min(self.values.m()) < 16 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "16 subspaces or more",
            });
        }
        // A larger group is split into slices with separate blocks.
        let queries = self.group.div_ceil(self.group.div_ceil(MAX_QUERIES)).next_power_of_two();
        let plan = |copies: usize| {
            // A block has fewer warps where a thread needs more registers: with more queries, on sm_80, with
            // codes of several words, and with pages, norms or FP8 and two queries. Two interleaved tiles
            // need the most registers, and pay off only if codes need no expansion.
            let simple = [&keys, &values].iter().all(|codes| codes.components() == 2);
            let expanded = [&keys, &values].iter().any(|codes| codes.bits() < 8);
            let interleaved = queries >= 4 && copies == 2 && simple && !expanded && self.keys.dim() == 128;
            let sm_90 = shared_memory >= SHARED_MEMORY_SM_90;
            let warps = match (queries, copies) {
                (1, _) if simple && sm_90 => 16,
                (2, 2) if simple && sm_90 && !self.paging.has_pages() && !self.norms && !self.exact_fp8 => 16,
                (1 | 2, _) => 12,
                (4, 2) if !interleaved => 12,
                _ => 8,
            };
            let Self { element, norms, .. } = *self;
            Plan { keys, values, element, norms, queries, copies, warps, interleaved }
        };
        let two_tables = plan(2);
        if two_tables.queries > 1 && two_tables.shared_bytes() <= shared_memory {
            return Ok(two_tables);
        }
        // One query needs no second table; sm_80 has no room for one at 8 bits.
        let one_table = plan(1);
        if one_table.shared_bytes() > shared_memory {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "tables that fit the shared memory of the device",
            });
        }
        Ok(one_table)
    }

    /// The kernel for blocks of up to `shared_memory` bytes ([`Device::shared_memory`]): 163 KiB on sm_80,
    /// 227 KiB on sm_90.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self, shared_memory: usize) -> Result<Program, Error> {
        Ok(self.plan(shared_memory)?.program(self))
    }
}

impl Plan {
    fn dim(&self) -> usize {
        self.keys.shape().dim()
    }

    /// `RESULT` of the kernel.
    fn result_len(&self) -> usize {
        self.dim() + 16
    }

    /// Floats between `RESULTS` and `QUERY_ROWS`.
    fn results_len(&self) -> usize {
        let slots = if self.queries == MAX_QUERIES { 4 } else { self.warps };
        slots * self.queries * self.result_len()
    }

    /// `SHARED` of the kernel, which asserts that it agrees.
    fn shared_bytes(&self) -> usize {
        let [keys, values] = [&self.keys, &self.values].map(|codes| ROW << codes.bits());
        let tables = match (self.copies, self.dim()) {
            (1, 64) => keys.max(values), // in the two halves of the rows
            (2, 128) => (1 << 16) + keys + values,
            _ => keys + values,
        };
        let weight_rows = self.queries + if self.norms { 2 } else { 0 };
        let weights = self.warps * weight_rows * WEIGHT_ROWS[usize::from(self.queries > 1)];
        let copies = if self.element == Element::Bf16 { 2 } else { 1 }; // of the queries: they are converted
        let queries = copies * self.queries * (self.dim() * 2 + 64);
        tables + weights + self.results_len() * 4 + queries + 112
    }

    fn program(&self, shape: &AttendShape) -> Program {
        let defines = [
            ("HEAD_DIM", self.dim()),
            ("ELEMENT", self.element as usize),
            ("QUERIES", self.queries),
            ("KEY_BITS", self.keys.bits()),
            ("VALUE_BITS", self.values.bits()),
            ("KEY_SUB", self.keys.components()),
            ("VALUE_SUB", self.values.components()),
            ("COPIES", self.copies),
            ("WARPS", self.warps),
            ("INTERLEAVED", usize::from(self.interleaved)),
            ("ADDENDS", usize::from(shape.addends)),
            ("NORMS", usize::from(shape.norms)),
            ("EXACT_FP8", usize::from(shape.exact_fp8)),
            ("SHARED_BYTES", self.shared_bytes()),
            ("KEY_RUN_BYTES", self.keys.tile_len()),
            ("VALUE_RUN_BYTES", self.values.tile_len()),
        ];
        shape.paging.define(Program::new(source!("pq_attend/attend.cu"), &defines))
    }
}

/// The page table of codes, or of rows for [`svd::Attend`](crate::svd::Attend) and
/// [`svd::Prefill`](crate::svd::Prefill), the same for keys and values. All pages of codes together have fewer
/// than 2^32 tiles, or half tiles with [`Paging::HalfTiles`], counted over heads.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// `u32` (batch, `max_pages`): page numbers of each sequence, in the order of its tokens.
    pub table: DevicePtr<u32>,
    /// Row length of the table.
    pub max_pages: usize,
}

/// Tokens whose keys and values are stored exactly: sinks and the window of recent tokens. Their order does
/// not matter, so that the window can be a ring buffer.
#[derive(Clone, Copy, Debug)]
pub struct ExactTokens {
    /// Elements (batch, heads, capacity, dim).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, capacity, dim).
    pub values: DevicePtr<AnyElement>,
    /// `u32` (batch,): the number of exact tokens of each sequence.
    pub lengths: DevicePtr<u32>,
    /// Capacity of a sequence in tokens.
    pub capacity: usize,
}

/// Norms of coded tokens, by which their keys and values were divided before encoding
/// ([`pq_core::divide_by_norms`]): factors of the decoded keys and values.
///
/// Their layout is that of the codes: (pages or batch, heads, tiles, tokens of a tile), in half tiles with
/// [`Paging::HalfTiles`]. Norms of values are at most 4,094, so that products with weights of up to 16 fit
/// `f16`.
#[derive(Clone, Copy, Debug)]
pub struct Norms {
    /// `f16`: norms of the keys, factors of the scores before any addend.
    pub keys: DevicePtr<f16>,
    /// `f16`: norms of the values.
    pub values: DevicePtr<f16>,
}

const OPERATION: Operation = Operation("pq::Attend");

/// Pointers and sizes of one launch of [`Attend`].
#[derive(Clone, Copy, Debug)]
pub struct AttendArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Capacity of a page (or of a sequence, without pages) in tiles of [`TILE`](crate::pq::TILE) tokens, or
    /// in half tiles with [`Paging::HalfTiles`]: 1 for pages of 16 tokens.
    pub tiles: usize,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]): codes of the keys.
    pub key_codes: DevicePtr<u8>,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]): codes of the values.
    pub value_codes: DevicePtr<u8>,
    /// `f16` (heads, [`CodeLayout::table_len`]): codebooks of the keys, by [`CodeLayout::table_into`].
    pub key_table: DevicePtr<f16>,
    /// `f16` (heads, [`CodeLayout::table_len`]): codebooks of the values.
    pub value_table: DevicePtr<f16>,
    /// Elements (batch, heads, group, dim), within the range of `f16`.
    pub queries: DevicePtr<AnyElement>,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernel reads them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
    /// Terms of the scores of coded tokens, given if and only if the shape has addends.
    pub addends: Option<Addends>,
    /// Norms of coded tokens, given if and only if the shape has norms.
    pub norms: Option<Norms>,
    /// Exact tokens in addition to the coded ones, in elements or in FP8 ([`AttendShape::exact_fp8`]).
    pub exact: Option<ExactTokens>,
    /// `f32` (heads, 2), given if and only if exact tokens are in FP8: the factors of a head's exact keys and
    /// values.
    pub exact_factors: Option<DevicePtr<f32>>,
    /// Factor of the scores: `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Elements (batch, heads, group, dim), fully written. A sequence without tokens gives zeros.
    pub out: DevicePtr<AnyElement>,
    /// `f32` (batch, heads, group), fully written: the log-sum-exp of the scores (natural logarithm), to
    /// merge the result with attention over other tokens.
    pub log_sum_exp: Option<DevicePtr<f32>>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read the tables and all lengths, those of exact tokens included, *before* they wait
    /// for it (`griddepcontrol.wait`), so that kernel must not write these. They read everything else after
    /// the wait.
    pub pdl: bool,
    /// Bytes ([`Attend::workspace_len`],), zeroed before the first launch; every launch leaves it ready for
    /// the next one. Launches on one stream can share it; concurrent launches need one each.
    pub workspace: DevicePtr<u8>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    key_codes: DevicePtr<u8>,
    value_codes: DevicePtr<u8>,
    key_table: DevicePtr<f16>,
    value_table: DevicePtr<f16>,
    queries: DevicePtr<AnyElement>,
    lengths: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    exact_keys: Option<DevicePtr<AnyElement>>,
    exact_values: Option<DevicePtr<AnyElement>>,
    exact_lengths: Option<DevicePtr<u32>>,
    partials: DevicePtr<f32>,
    arrived: DevicePtr<u32>,
    out: DevicePtr<AnyElement>,
    log_sum_exp: Option<DevicePtr<f32>>,
    batch: u32,
    heads: u32,
    list_heads: u32,
    group: u32,
    page_tiles: u32,
    max_pages: u32,
    exact_capacity: u32,
    scale: f32,
    addends: Option<DevicePtr<f16>>,
    key_norms: Option<DevicePtr<f16>>,
    value_norms: Option<DevicePtr<f16>>,
    addend_tiles: u32,
    exact_factors: Option<DevicePtr<f32>>,
}

const _: () = assert!(size_of::<KernelArguments>() == 184);

/// The division of heads into equal lists, each with its own blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lists {
    lists: usize,
    slices: usize, // of the group of each head
    blocks: usize, // of each slice of each list
}

impl Lists {
    /// The largest number of lists that leaves at most a sixteenth of the multiprocessors without a block, so
    /// that blocks change tables as rarely as possible.
    fn of(heads: usize, slices: usize, sm_count: usize) -> Self {
        let blocks = |lists: usize| sm_count / (lists * slices);
        let busy = |lists: usize| 16 * blocks(lists) * lists * slices >= 15 * sm_count;
        let divisors = (1..=heads.min(sm_count)).rev().filter(|&lists| heads.is_multiple_of(lists));
        let lists = divisors.clone().find(|&lists| busy(lists)).unwrap_or(1);
        Self { lists, slices, blocks: blocks(lists).max(1) }
    }
}

/// Decode attention over product-quantized keys and values, `pq_core::attend_into`, and over exact tokens,
/// `pq_core::attend_exact_into`, in one launch.
///
/// A coded token's score is `<query, key> * norm * scale + addend`, in `f32`; its norms and its addend are
/// compile-time options.
///
/// The kernel splits the tokens of a batch evenly over its blocks. A launch allocates nothing and does not
/// synchronize, and a captured graph stays valid. The same inputs give the same bytes.
///
/// # Cost
/// Every code is read once for up to 8 query heads of its group.
/// # Source
/// MILLION (DAC 2025), III-B and III-C.
pub struct Attend {
    kernel: Kernel,
    shape: AttendShape,
    plan: Plan,
    sm_count: usize,
}

impl Attend {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        let plan = shape.plan(device.shared_memory())?;
        let kernel = device.kernel(&plan.program(&shape), "pq_attend", plan.shared_bytes())?;
        Ok(Self { kernel, shape, plan, sm_count: device.sm_count() })
    }

    fn grid(&self, heads: usize) -> Lists {
        Lists::of(heads, self.shape.group.div_ceil(self.plan.queries), self.sm_count)
    }

    /// Floats of the partial results of blocks that share a sequence.
    fn partials_len(&self, heads: usize) -> usize {
        let Lists { lists, slices, blocks } = self.grid(heads);
        let all = lists.saturating_mul(slices * blocks);
        all.saturating_mul(2 * self.plan.queries * self.plan.result_len())
    }

    /// Bytes of workspace for launches of up to `batch` sequences with exactly `heads` KV heads. Another
    /// number of heads changes its layout: zero it again before such a launch.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize) -> usize {
        let slices = self.grid(heads).slices;
        let counters = batch.saturating_mul(heads).saturating_mul(slices);
        self.partials_len(heads).saturating_add(counters).saturating_mul(4)
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the capacity of a sequence or of its pages, exact lengths do not exceed their capacity,
    /// and every page number refers to an existing page: the kernel does not clamp them. The workspace was
    /// zeroed before the first launch with this number of heads, and no other launch uses it at the same
    /// time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &AttendArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 {
            return Ok(());
        }
        if self.shape.paging.has_pages() != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if self.shape.addends != a.addends.is_some() || self.shape.norms != a.norms.is_some() {
            return Err(OPERATION.error("addends and norms are given exactly when it is compiled for them"));
        }
        if self.shape.exact_fp8 != a.exact_factors.is_some() {
            return Err(
                OPERATION.error("factors are given exactly when it is compiled for exact tokens in FP8")
            );
        }
        if a.tiles == 0 {
            return Err(OPERATION.error("no room for a tile"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        if a.pages.is_none() {
            in_32_bits("tiles", a.batch.saturating_mul(a.heads).saturating_mul(a.tiles))?;
        }
        let Lists { lists, slices, blocks } = self.grid(a.heads);
        let grid = OPERATION.grid(&[
            ("blocks", blocks),
            ("slices of a group", slices),
            ("lists of heads", lists),
        ])?;
        let partials = a.workspace.cast::<f32>();
        let kernel_arguments = KernelArguments {
            key_codes: a.key_codes,
            value_codes: a.value_codes,
            key_table: a.key_table,
            value_table: a.value_table,
            queries: a.queries,
            lengths: a.lengths,
            pages: a.pages.map(|pages| pages.table),
            exact_keys: a.exact.map(|exact| exact.keys),
            exact_values: a.exact.map(|exact| exact.values),
            exact_lengths: a.exact.map(|exact| exact.lengths),
            partials,
            arrived: partials.offset(self.partials_len(a.heads)).cast(),
            out: a.out,
            log_sum_exp: a.log_sum_exp,
            batch: in_32_bits("sequences", a.batch)?,
            heads: in_32_bits("heads", a.heads)?,
            list_heads: (a.heads / lists) as u32,
            group: self.shape.group as u32,
            page_tiles: in_32_bits("tiles", a.tiles)?,
            max_pages: in_32_bits("pages", a.pages.map_or(0, |pages| pages.max_pages))?,
            exact_capacity: in_32_bits("exact tokens", a.exact.map_or(0, |exact| exact.capacity))?,
            scale: a.scale * std::f32::consts::LOG2_E,
            addends: a.addends.map(|addends| addends.values),
            key_norms: a.norms.map(|norms| norms.keys),
            value_norms: a.norms.map(|norms| norms.values),
            addend_tiles: in_32_bits("tiles of addends", a.addends.map_or(0, |addends| addends.tiles))?,
            exact_factors: a.exact_factors,
        };
        let threads = self.plan.warps as u32 * 32;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, threads, a.pdl, &kernel_arguments) }
    }
}
