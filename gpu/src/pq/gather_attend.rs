//! Decode attention over resident and missing rows: arithmetic on the former hides the transfer of the
//! latter.

use cudarc::driver::sys::CUstream;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::Prefetch;
use crate::{Device, Element, Error, Program};

/// `QUERIES`, `TILE` and `WARPS` of the kernel.
const QUERIES: usize = 8;
const TILE: usize = 16;
const WARPS: usize = 8;

/// Minimum tiles of a block, if a head has as many: merging smaller parts costs more than they save.
const LEAST_TILES: usize = 8;

const OPERATION: Operation = Operation("pq::GatherAttend");

/// Compile-time shape of [`GatherAttend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherAttendShape {
    /// Components of a row: 64 or 128.
    pub dim: usize,
    /// Element type of queries, keys, values and outputs.
    pub element: Element,
}

impl GatherAttendShape {
    /// `RESULT` of the kernel.
    const fn result_len(&self) -> usize {
        self.dim + 4
    }

    /// Shared memory of the results and of the kernel's `Work`, in bytes.
    const fn shared_bytes(&self) -> usize {
        WARPS * QUERIES * self.result_len() * 4 + 64
    }

    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        if !matches!(self.dim, 64 | 128) {
            return Err(Error::Unsupported { operation: format!("{self:?}"), supported: "dim 64 or 128" });
        }
        let defines = [
            ("DIM", self.dim),
            ("ELEMENT", self.element as usize),
            ("WARPS", WARPS),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        Ok(Program::new(source!("gather_attend.cu"), &defines))
    }
}

/// Pointers and sizes of one launch of [`GatherAttend`].
#[derive(Clone, Copy, Debug)]
pub struct GatherAttendArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Number of query heads per KV head.
    pub group: usize,
    /// Rows of a head in `keys` and `values`.
    pub capacity: usize,
    /// Elements (batch, heads, capacity, dim): exact rows, and slots from row `first_slot` on.
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, capacity, dim): as `keys`.
    pub values: DevicePtr<AnyElement>,
    /// The row of the first slot.
    pub first_slot: usize,
    /// `u32` (batch,): the number of exact rows of each sequence, from row 0 on.
    pub exact_lengths: DevicePtr<u32>,
    /// `u32` (batch,): the number of chosen tokens of each head of a sequence.
    pub counts: DevicePtr<u32>,
    /// `u32` (batch, heads, `list_len`): the slot of each chosen token.
    pub slots: DevicePtr<u32>,
    /// Capacity of a list in tokens.
    pub list_len: usize,
    /// The chosen rows that are not in their slots yet; none by default.
    pub missing: Option<MissingRows>,
    /// Elements (batch, heads, group, dim).
    pub queries: DevicePtr<AnyElement>,
    /// Factor of the scores: `1 / sqrt(head_dim)` of the model.
    pub scale: f32,
    /// Elements (batch, heads, group, dim), fully written. A sequence without tokens gives zeros.
    pub out: DevicePtr<AnyElement>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read lengths and counts *before* they wait for it (`griddepcontrol.wait`), so that
    /// kernel must not write these. They read everything else after the wait.
    pub pdl: bool,
    /// Bytes ([`GatherAttend::workspace_len`],), zeroed before the first launch; every launch leaves it ready
    /// for the next one of the same sizes. Launches on one stream can share it; concurrent launches need one
    /// each.
    pub workspace: DevicePtr<u8>,
}

/// Chosen rows that are only in host memory, pinned or managed: a launch reads them over PCIe and stores them
/// in their slots.
#[derive(Clone, Copy, Debug)]
pub struct MissingRows {
    /// Elements (batch, heads, `head_rows`, dim) in host memory: keys.
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, `head_rows`, dim) in host memory: values.
    pub values: DevicePtr<AnyElement>,
    /// Number of rows of a head.
    pub head_rows: usize,
    /// `u32` (batch, heads, `list_len`): the row of each chosen token.
    pub tokens: DevicePtr<u32>,
    /// `u32` (batch, heads, `list_len.div_ceil(32)`): a bitmap of the chosen tokens, lowest bit first: 1 if
    /// the row is missing.
    pub bits: DevicePtr<u32>,
    /// Memory to prefetch into L2 for later kernels.
    pub prefetch: Option<Prefetch>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    exact_lengths: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    slots: DevicePtr<u32>,
    host_keys: Option<DevicePtr<AnyElement>>,
    host_values: Option<DevicePtr<AnyElement>>,
    tokens: Option<DevicePtr<u32>>,
    missing: Option<DevicePtr<u32>>,
    queries: DevicePtr<AnyElement>,
    partials: DevicePtr<f32>,
    arrived: DevicePtr<u32>,
    out: DevicePtr<AnyElement>,
    capacity: u64,
    host_rows: u64,
    list_len: u64,
    first_slot: u64,
    heads: u32,
    group: u32,
    scale: f32,
    prefetch: Option<DevicePtr<u8>>,
    prefetch_len: u64,
}

const _: () = assert!(size_of::<KernelArguments>() == 168);

/// Decode attention over exact rows and chosen rows; missing rows are read from host memory:
/// `pq_core::attend_exact_into` over both.
///
/// A launch replaces a [`Gather`](super::Gather) and the attention after it. It attends to resident rows
/// while missing rows are in flight, and to these as they arrive. The same rows give the same bytes, resident
/// or not. A launch allocates nothing and does not synchronize, and a captured graph stays valid.
///
/// # Cost
/// Every row is read once for up to 8 query heads of its group; from host memory, PCIe is the limit.
/// # Source
/// PQCache (arXiv 2407.12820), 3.4. The overlap of the transfer with attention is not in the paper.
pub struct GatherAttend {
    kernel: Kernel,
    shape: GatherAttendShape,
    sm_count: usize,
}

impl GatherAttend {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: GatherAttendShape) -> Result<Self, Error> {
        let kernel = device.kernel(&shape.program()?, "gather_attend", shape.shared_bytes())?;
        Ok(Self { kernel: kernel.prefer_l1(32 * WARPS as u32)?, shape, sm_count: device.sm_count() })
    }

    /// The heads of all sequences times the slices of a group.
    fn entries(batch: usize, heads: usize, group: usize) -> usize {
        batch.saturating_mul(heads).saturating_mul(group.div_ceil(QUERIES))
    }

    /// Size of the counters in front of the partial results, in floats.
    fn counters_len(entries: usize) -> usize {
        entries.saturating_add(3) / 4 * 4
    }

    /// Bytes of workspace for launches of `batch` sequences with `heads` KV heads and `group` query heads per
    /// KV head.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize, group: usize) -> usize {
        let entries = Self::entries(batch, heads, group);
        let partials = entries.max(self.sm_count).saturating_mul(2 * QUERIES * self.shape.result_len());
        Self::counters_len(entries).saturating_add(partials).saturating_mul(4)
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes; missing
    /// rows may be in pinned or managed host memory. Exact lengths are at most `first_slot`, counts at most
    /// `list_len`, slots below `capacity - first_slot`, tokens below `head_rows`, and no two chosen tokens of
    /// a head have the same slot: the kernel does not clamp them. The workspace was zeroed before the first
    /// launch of these sizes, and no other launch uses it at the same time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &GatherAttendArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.group == 0 {
            return Ok(());
        }
        if a.first_slot > a.capacity {
            return Err(OPERATION.error("slots begin behind the last row"));
        }
        OPERATION.in_32_bits("rows of a head", a.capacity)?;
        OPERATION.in_32_bits("tokens of a head", a.first_slot.saturating_add(a.list_len))?;
        let entries = Self::entries(a.batch, a.heads, a.group);
        let most_tiles = a.first_slot.saturating_add(a.list_len).div_ceil(TILE);
        let splits = (self.sm_count / entries).min(most_tiles.div_ceil(LEAST_TILES)).max(1);
        let heads = a.batch.saturating_mul(a.heads);
        let prefetch = a.missing.and_then(|missing| missing.prefetch);
        let slices = a.group.div_ceil(QUERIES);
        let grid = OPERATION.grid(&[("splits", splits), ("heads", heads), ("slices of a group", slices)])?;
        let kernel_arguments = KernelArguments {
            keys: a.keys,
            values: a.values,
            exact_lengths: a.exact_lengths,
            counts: a.counts,
            slots: a.slots,
            host_keys: a.missing.map(|missing| missing.keys),
            host_values: a.missing.map(|missing| missing.values),
            tokens: a.missing.map(|missing| missing.tokens),
            missing: a.missing.map(|missing| missing.bits),
            queries: a.queries,
            partials: a.workspace.cast::<f32>().offset(Self::counters_len(entries)),
            arrived: a.workspace.cast(),
            out: a.out,
            capacity: a.capacity as u64,
            host_rows: a.missing.map_or(0, |missing| missing.head_rows as u64),
            list_len: a.list_len as u64,
            first_slot: a.first_slot as u64,
            heads: OPERATION.in_32_bits("heads", a.heads)?,
            group: OPERATION.in_32_bits("query heads", a.group)?,
            scale: a.scale * std::f32::consts::LOG2_E,
            prefetch: prefetch.map(|prefetch| prefetch.bytes),
            prefetch_len: prefetch.map_or(0, |prefetch| prefetch.len as u64),
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, 32 * WARPS as u32, a.pdl, &kernel_arguments) }
    }
}
