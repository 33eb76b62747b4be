use cudarc::driver::sys::CUstream;

use super::AttendShape;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Element, Error, KERNELS, Program};

/// Warps of a block, and its rows at full rank: `WARPS` and `ROWS` of the kernel.
const WARPS: usize = 4;
const ROWS: usize = 16 * WARPS;
/// Tokens of a tile: `TOKENS` of the kernel.
const TOKENS: usize = 64;

const OPERATION: Operation = Operation("svd::Prefill");

/// Device pointers and sizes of one launch.
#[derive(Clone, Copy, Debug)]
pub struct PrefillArguments {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Query heads per key/value head.
    pub group: usize,
    /// Tokens that a sequence has room for.
    pub capacity: usize,
    /// Most queries of a sequence.
    pub max_count: usize,
    /// Elements (batch, heads, capacity, key rank of the head).
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, capacity, value rank of the head).
    pub values: DevicePtr<AnyElement>,
    /// Elements (batch, queries, heads * group, dim), each dimension but the last with its stride: projected queries, of which the
    /// head's key rank counts.
    pub queries: DevicePtr<AnyElement>,
    /// Elements of queries and outputs from a sequence, a query and a query head to the next, multiples of 2.
    pub strides: [usize; 3],
    /// `u32` (batch,): keys of each sequence.
    pub lengths: DevicePtr<u32>,
    /// `u32` (batch,): queries of each sequence, those of its last tokens: a query sees the keys up to its own.
    pub counts: DevicePtr<u32>,
    /// `u32` (heads,): multiples of 8.
    pub key_ranks: DevicePtr<u32>,
    /// `u32` (heads,): multiples of 8.
    pub value_ranks: DevicePtr<u32>,
    /// `u64` (heads,): the sum of the key ranks of the heads before.
    pub key_offsets: DevicePtr<u64>,
    /// `u64` (heads,): the sum of the value ranks of the heads before.
    pub value_offsets: DevicePtr<u64>,
    /// Sum of all key ranks.
    pub key_rank_sum: usize,
    /// Sum of all value ranks.
    pub value_rank_sum: usize,
    /// Factor of the scores, positive: `1 / sqrt(head_dim)` of the model.
    pub scale: f32,
    /// Elements as the queries, of which the head's value rank is written.
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

/// Causal attention of many queries at two ranks a head: `svd_core::attend_into`, query by query.
///
/// Blocks of rows are cut on the device by ZACK's rule: a head whose ranks are both half or less has twice the rows in a block, so
/// that blocks cost about the same; they run longest first. A row's work is that of the higher of its ranks, in quarters of dim. A value that is no number spoils the queries whose block sees its 64 tokens.
///
/// # Cost
/// Twice the higher rank in multiply-adds for every token that a query sees, on tensor cores.
/// # Source
/// ZACK, 5.3, prefill; the loop is FlashAttention-2's (arXiv 2307.08691).
pub struct Prefill {
    kernel: Kernel,
}

impl Prefill {
    /// The program for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(shape: AttendShape) -> Result<Program, Error> {
        shape.check()?;
        let defines = [("DIM", shape.dim), ("SHARED_BYTES", shared_bytes(shape))];
        Ok(Program::new("svd_prefill", KERNELS.svd_prefill, &defines)
            .define_if(shape.element == Element::Bf16, "BFLOAT"))
    }

    /// Compiles it for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&Self::program(shape)?, "svd_prefill", shared_bytes(shape))? })
    }

    /// Puts the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths do not exceed the capacity, counts
    /// neither lengths nor `max_count`; ranks are multiples of 8 from 8 to `dim`, and offsets and sums are those of the ranks: the
    /// kernel does not clamp them.
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
        // SAFETY: the structure is the kernel's argument; the caller vouches for what its pointers lead to.
        unsafe { self.kernel.launch(stream, grid, WARPS as u32 * 32, false, &kernel_arguments) }
    }
}

/// Two tiles of keys and two of values.
const fn shared_bytes(shape: AttendShape) -> usize {
    4 * TOKENS * shape.dim * 2
}
