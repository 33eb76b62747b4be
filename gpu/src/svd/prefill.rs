use cudarc::driver::sys::CUstream;

use super::AttendShape;
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error, Program};

/// Warps of a block, and its rows (queries) at full rank: `WARPS` and `ROWS` of the kernel.
const WARPS: usize = 4;
const ROWS: usize = 16 * WARPS;
/// Tokens of a tile: `TOKENS` of the kernel.
const TOKENS: usize = 64;

const OPERATION: Operation = Operation("svd::Prefill");

/// Pointers and sizes of one launch of [`Prefill`].
#[derive(Clone, Copy, Debug)]
pub struct PrefillArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of key/value heads.
    pub heads: usize,
    /// Number of query heads per key/value head.
    pub group: usize,
    /// Capacity of a sequence in tokens.
    pub capacity: usize,
    /// Maximum number of queries (new tokens) of a sequence.
    pub max_count: usize,
    /// Elements (batch, heads, capacity, key rank of the head).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, capacity, value rank of the head).
    pub values: DevicePtr<AnyElement>,
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
    /// Factor of the scores, positive: `1 / sqrt(head_dim)` of the model.
    pub scale: f32,
    /// Elements in the layout of the queries, written up to the value rank of the head.
    pub out: DevicePtr<AnyElement>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    queries: DevicePtr<AnyElement>,
    lengths: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    key_ranks: DevicePtr<u32>,
    value_ranks: DevicePtr<u32>,
    key_offsets: DevicePtr<u64>,
    value_offsets: DevicePtr<u64>,
    out: DevicePtr<AnyElement>,
    key_rank_sum: u64,
    value_rank_sum: u64,
    capacity: u64,
    strides: [u64; 3],
    heads: u32,
    group: u32,
    scale: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 144);

/// Causal attention of many queries with two ranks per head: `svd_core::attend_exact_into`, query by query.
///
/// The kernel splits queries into blocks by ZACK's rule: a head whose ranks are both at most half of `dim`
/// has twice the queries per block, so that blocks cost about the same. The longest blocks run first. The
/// work of a query is that of the higher rank, rounded up to a multiple of a quarter of `dim`. A NaN or
/// infinite value makes the outputs NaN of all queries whose block attends to its tile of 64 tokens.
///
/// # Cost
/// Twice the higher rank in multiply-adds for every pair of a query and a token that it attends to, on tensor
/// cores.
/// # Source
/// ZACK, 5.3, prefill; the loop is FlashAttention-2's (arXiv 2307.08691).
pub struct Prefill {
    kernel: Kernel,
}

impl Prefill {
    /// The kernel for a shape, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(shape: AttendShape) -> Result<Program, Error> {
        shape.check()?;
        let defines =
            [("DIM", shape.dim), ("ELEMENT", shape.element as usize), ("SHARED_BYTES", shared_bytes(shape))];
        Ok(Program::new(source!("svd_prefill.cu"), &defines))
    }

    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&Self::program(shape)?, "svd_prefill", shared_bytes(shape))? })
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the capacity, and counts exceed neither lengths nor `max_count`; ranks are multiples of
    /// 8 from 8 to `dim`, and offsets and sums match the ranks: the kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &PrefillArguments) -> Result<(), Error> {
        let a = arguments;
        let (heads, blocks) = (a.heads.saturating_mul(a.group), a.max_count.div_ceil(ROWS));
        if a.batch == 0 || heads == 0 || blocks == 0 {
            return Ok(());
        }
        let grid = OPERATION.grid(&[
            ("query heads", heads),
            ("blocks of 64 queries", blocks),
            ("sequences", a.batch),
        ])?;
        if a.scale.is_nan() || a.scale <= 0.0 {
            return Err(OPERATION.error("a scale that is not positive"));
        }
        if a.strides.iter().any(|stride| !stride.is_multiple_of(2)) {
            return Err(OPERATION.error("a stride is not a multiple of 2"));
        }
        let kernel_arguments = KernelArguments {
            keys: a.keys,
            values: a.values,
            queries: a.queries,
            lengths: a.lengths,
            counts: a.counts,
            key_ranks: a.key_ranks,
            value_ranks: a.value_ranks,
            key_offsets: a.key_offsets,
            value_offsets: a.value_offsets,
            out: a.out,
            key_rank_sum: a.key_rank_sum as u64,
            value_rank_sum: a.value_rank_sum as u64,
            capacity: a.capacity as u64,
            strides: a.strides.map(|stride| stride as u64),
            heads: a.heads as u32,
            group: a.group as u32,
            scale: a.scale * std::f32::consts::LOG2_E,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, WARPS as u32 * 32, false, &kernel_arguments) }
    }
}

/// Shared memory of two tiles of keys and two of values.
const fn shared_bytes(shape: AttendShape) -> usize {
    4 * TOKENS * shape.dim * 2
}
