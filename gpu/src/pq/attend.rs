use cudarc::driver::sys::CUstream;
use half::f16;
use pq_core::PqShape;

use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::layout::{CodeLayout, Side};
use crate::{Device, Element, Error, KERNELS, Program};

/// Bytes of a row of the tables in shared memory: `ROW` of the kernel.
const ROW: usize = 256;
/// Bytes of shared memory that a block of sm_90 can have.
const SHARED_MEMORY_SM_90: usize = 227 << 10;
/// Query heads that one block serves at most.
const MAX_QUERIES: usize = 4;

/// What an attention on codes is compiled for.
///
/// # Examples
/// ```
/// use kv_gpu::{Element, pq::AttendShape};
/// let keys = pq_core::PqShape::new(128, 64, 8)?;
/// let shape = AttendShape { keys, values: keys, group: 4, element: Element::F16, paged: false };
/// assert!(shape.check().is_ok());
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendShape {
    /// The keys' quantizer.
    pub keys: PqShape,
    /// The values' quantizer, of the same `dim`.
    pub values: PqShape,
    /// Query heads per key/value head.
    pub group: usize,
    /// Element of queries, exact tokens and outputs.
    pub element: Element,
    /// Whether codes lie in pages.
    pub paged: bool,
}

/// How a shape maps to the kernel's constants.
struct Plan {
    keys: CodeLayout,
    values: CodeLayout,
    queries: usize, // of a block
    copies: usize,  // of the key table
    warps: usize,
    interleaved: bool, // two tiles in work at a time
}

impl AttendShape {
    /// Whether there is a kernel for it.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        self.plan(usize::MAX).map(|_| ())
    }

    fn plan(&self, shared_memory: usize) -> Result<Plan, Error> {
        let keys = CodeLayout::new(self.keys, Side::Keys)?;
        let values = CodeLayout::new(self.values, Side::Values)?;
        if self.keys.dim() != self.values.dim() || self.group == 0 || self.group > 16 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "keys and values of the same dim, and 1 to 16 query heads a key/value head",
            });
        }
        // A larger group is cut into slices, each with blocks of its own. Three queries are served like four.
        let queries = self.group.div_ceil(self.group.div_ceil(MAX_QUERIES)).next_power_of_two();
        // Warps by the registers that are needed: the more, the more queries, with one table on sm_80, and where codes stand for several
        // words; most for two tiles at a time, which pay where codes need not be expanded.
        let simple = [&keys, &values].iter().all(|codes| codes.components() == 2);
        let expanded = [&keys, &values].iter().any(|codes| codes.bits() < 8);
        let interleaved = queries == 4 && simple && !expanded && self.keys.dim() == 128;
        let two_tables = match queries {
            2 if simple => 16,
            4 if interleaved => 8,
            _ => 12,
        };
        let one_table = match queries {
            1 if simple && shared_memory >= SHARED_MEMORY_SM_90 => 16,
            1 | 2 => 12,
            _ => 8,
        };
        let mut plan = Plan { keys, values, queries, copies: 2, warps: two_tables, interleaved };
        if queries == 1 || plan.shared_bytes() > shared_memory {
            (plan.copies, plan.warps) = (1, one_table); // sm_80 has no room for a second table at 8 bits
        }
        if plan.shared_bytes() > shared_memory {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "what fits the shared memory of the device",
            });
        }
        Ok(plan)
    }

    /// The program for a device whose blocks can have so many bytes of shared memory: 163 KiB on sm_80, 227 KiB on sm_90.
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
        self.dim() + 4
    }

    /// Floats between `RESULTS` and `QUERY_ROWS`.
    fn results_len(&self) -> usize {
        self.warps * self.queries * self.result_len()
    }

    /// `SHARED` of the kernel, which asserts that it agrees.
    fn shared_bytes(&self) -> usize {
        let far_copy = if self.copies == 2 && self.dim() == 128 { 1 << 16 } else { 0 };
        let tables = far_copy + (ROW << self.keys.bits()) + (ROW << self.values.bits());
        let weights = self.warps * self.queries * 32 * 2;
        let queries = self.queries * (self.dim() * 2 + 64);
        tables + weights + self.results_len() * 4 + queries + 72
    }

    fn program(&self, shape: &AttendShape) -> Program {
        let defines = [
            ("HEAD_DIM", self.dim()),
            ("QUERIES", self.queries),
            ("KEY_BITS", self.keys.bits()),
            ("VALUE_BITS", self.values.bits()),
            ("KEY_SUB", self.keys.components()),
            ("VALUE_SUB", self.values.components()),
            ("COPIES", self.copies),
            ("WARPS", self.warps),
            ("INTERLEAVED", usize::from(self.interleaved)),
            ("SHARED_BYTES", self.shared_bytes()),
            ("KEY_TILE_BYTES", self.keys.tile_len()),
            ("VALUE_TILE_BYTES", self.values.tile_len()),
        ];
        Program::new("pq_attend", KERNELS.pq_attend, &defines)
            .define_if(shape.paged, "PAGED")
            .define_if(shape.element == Element::Bf16, "BFLOAT")
    }
}

/// Codes in pages. Keys and values use the same ones. All pages together have fewer than 2^32 tiles, heads counted.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// `u32` (batch, `max_pages`): the page of each part of a sequence.
    pub table: DevicePtr<u32>,
    /// Row length of the table.
    pub max_pages: usize,
}

/// Tokens that are kept exactly, of any length and in any order: sinks, and the window of recent ones, which may be a ring.
#[derive(Clone, Copy, Debug)]
pub struct ExactTokens {
    /// Elements (batch, heads, capacity, dim).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, capacity, dim).
    pub values: DevicePtr<AnyElement>,
    /// `u32` (batch,).
    pub lengths: DevicePtr<u32>,
    /// Tokens that there is room for.
    pub capacity: usize,
}

const OPERATION: Operation = Operation("pq::Attend");

/// Device pointers and sizes of one launch.
#[derive(Clone, Copy, Debug)]
pub struct AttendArguments {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Tiles of [`TILE`](crate::pq::TILE) tokens that a page has room for, or a sequence where there are no pages.
    pub tiles: usize,
    /// Bytes (page or sequence, head, tile, [`CodeLayout::tile_len`]).
    pub key_codes: DevicePtr<u8>,
    /// Bytes (page or sequence, head, tile, [`CodeLayout::tile_len`]).
    pub value_codes: DevicePtr<u8>,
    /// f16 (head, [`CodeLayout::table_len`]).
    pub key_table: DevicePtr<f16>,
    /// f16 (head, [`CodeLayout::table_len`]).
    pub value_table: DevicePtr<f16>,
    /// Elements (batch, heads, group, dim), of a magnitude that f16 holds.
    pub queries: DevicePtr<AnyElement>,
    /// `u32` (batch,): coded tokens of each sequence. Read on the device, so a captured graph follows them as they grow.
    pub lengths: DevicePtr<u32>,
    /// Where the codes lie, when compiled for pages.
    pub pages: Option<Pages>,
    /// Tokens beside the coded ones.
    pub exact: Option<ExactTokens>,
    /// Factor of the scores: `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Elements (batch, heads, group, dim), fully written; zeros for a sequence without tokens.
    pub out: DevicePtr<AnyElement>,
    /// f32 (batch, heads, group), fully written: the natural logarithm of the sum of the exponentials, to merge the result
    /// with attention on other tokens.
    pub log_sum_exp: Option<DevicePtr<f32>>,
    /// Whether the launch may begin while the kernel before it on the stream ends, on sm_90: it then loads the table of the keys and plans
    /// its work by the lengths. That kernel must write neither tables nor lengths; all else is read when it has ended.
    pub pdl: bool,
    /// Bytes as [`Attend::workspace_len`] says, zeroed once before the first launch. Launches on one stream can share it; those
    /// that may run side by side need one each.
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
    group: u32,
    page_tiles: u32,
    max_pages: u32,
    exact_capacity: u32,
    scale: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 144);

/// Decode attention on product-quantized keys and values: `pq_core::attend_into` and, for exact tokens,
/// `pq_core::attend_exact_into`, in one launch.
///
/// The work of a batch is cut into equal parts by its lengths, on the device: nothing is allocated or waited for, and a
/// captured graph stays valid. The same inputs give the same bytes.
///
/// # Cost
/// Reads every code once for up to 4 query heads of its group.
/// # Source
/// MILLION (DAC 2025), III-B and III-C.
pub struct Attend {
    kernel: Kernel,
    shape: AttendShape,
    plan: Plan,
    sm_count: usize,
}

impl Attend {
    /// Compiles it for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        let plan = shape.plan(device.shared_memory())?;
        let kernel = device.kernel(&plan.program(&shape), "pq_attend", plan.shared_bytes())?;
        Ok(Self { kernel, shape, plan, sm_count: device.sm_count() })
    }

    /// Slices of a group, and blocks of each.
    fn grid(&self, heads: usize) -> (usize, usize) {
        let slices = self.shape.group.div_ceil(self.plan.queries);
        (slices, (self.sm_count / heads.saturating_mul(slices).max(1)).max(1))
    }

    /// Floats of what blocks that share a sequence leave to the last.
    fn partials_len(&self, heads: usize) -> usize {
        let (slices, blocks) = self.grid(heads);
        heads.saturating_mul(slices * blocks * 2 * self.plan.queries * self.plan.result_len())
    }

    /// Bytes of workspace for launches of up to `batch` sequences of just so many key/value heads: with other heads its parts lie
    /// elsewhere, and it must be zeroed again.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize) -> usize {
        let (slices, _) = self.grid(heads);
        let counters = batch.saturating_mul(heads).saturating_mul(slices);
        self.partials_len(heads).saturating_add(counters).saturating_mul(4)
    }

    /// Puts the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths do not exceed the tokens
    /// that a sequence or its pages have room for, exact lengths do not exceed their capacity, and page numbers are those of
    /// pages: the kernel does not clamp them. The workspace was zeroed before the first launch with this number of heads, and no
    /// other launch uses it at the same time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &AttendArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 {
            return Ok(());
        }
        if self.shape.paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if a.tiles == 0 {
            return Err(OPERATION.error("no room for a tile"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        if a.pages.is_none() {
            in_32_bits("tiles", a.batch.saturating_mul(a.heads).saturating_mul(a.tiles))?;
        }
        let (slices, blocks) = self.grid(a.heads);
        let grid =
            OPERATION.grid(&[("blocks", blocks), ("slices of a group", slices), ("heads", a.heads)])?;
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
            heads: a.heads as u32,
            group: self.shape.group as u32,
            page_tiles: in_32_bits("tiles", a.tiles)?,
            max_pages: in_32_bits("pages", a.pages.map_or(0, |pages| pages.max_pages))?,
            exact_capacity: in_32_bits("exact tokens", a.exact.map_or(0, |exact| exact.capacity))?,
            scale: a.scale * std::f32::consts::LOG2_E,
        };
        let threads = self.plan.warps as u32 * 32;
        // SAFETY: the structure is the kernel's argument; the caller vouches for what its pointers lead to.
        unsafe { self.kernel.launch(stream, grid, threads, a.pdl, &kernel_arguments) }
    }
}
