//! The k best tokens by their codes: scores, the group's combination and radix selection.

use cudarc::driver::sys::CUstream;
use pq_core::{GroupRule, PqShape};

use super::clusters::Clusters;
use super::scan::{CHUNK, ScanShape};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, Program};

/// Compile-time shape of [`Search`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Query heads per KV head.
    pub group: usize,
    /// How the weights of a group's query heads are combined.
    pub rule: GroupRule,
}

/// Bytes of `Row` of radix.cuh.
pub(super) const ROW_BYTES: usize = 4 * (2048 + 8);
/// Maximum bits of a token's codes for `search_histogram_sm90.cu`, which counts the tokens of every joint
/// code instead of scoring each token.
const JOINT_BITS: usize = 12;
/// Cluster sizes of that kernel in blocks, largest first.
const JOINT_CLUSTERS: [usize; 3] = [8, 4, 2];
/// Threads of a block of the kernels that score.
const SCORE_THREADS: u32 = 512;
/// Threads of a block of the kernels that select.
pub(super) const SELECT_THREADS: u32 = 1024;

impl SearchShape {
    const fn scan(&self) -> ScanShape {
        ScanShape { quantizer: self.quantizer, group: self.group }
    }

    /// The kernels for a compute capability and blocks of up to `shared_memory` bytes
    /// ([`Device::shared_memory`]). From 9.0 on, codes of up to 12 bits per token have a separate kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self, capability: (i32, i32), shared_memory: usize) -> Result<Program, Error> {
        let defines = self.scan().defines(shared_memory)?;
        let program = if self.is_joint(capability, shared_memory) {
            let defines = [&defines[..], &[("SHARED_BYTES", self.joint_shared_bytes())]].concat();
            Program::new(source!("pq_search/search_histogram_sm90.cu"), &defines)
        } else {
            let defines = [&defines[..], &[("ROW_BYTES", ROW_BYTES)]].concat();
            Program::new(source!("pq_search/search.cu"), &defines)
        };
        Ok(program.define_if(self.rule == GroupRule::MaxOfSoftmax, "MAX_RULE"))
    }

    /// At least the size of `Shared` of that kernel: codes of a block's first tokens; counts, keys and remote
    /// counts of the joint codes; buckets; lookup tables; exchange between warps and blocks.
    const fn joint_shared_bytes(&self) -> usize {
        let joint = 1 << JOINT_BITS;
        joint * (8 + 4 + 8 + 4) + 4 * (4096 + 128) + 4 * self.group * (self.quantizer.lut_len() + 136)
    }

    const fn is_joint(&self, capability: (i32, i32), shared_memory: usize) -> bool {
        capability.0 >= 9 && self.joint_shared_bytes() <= shared_memory && self.joint_bits() <= JOINT_BITS
    }

    const fn joint_bits(&self) -> usize {
        self.quantizer.m() * self.quantizer.nbits() as usize
    }
}

const OPERATION: Operation = Operation("pq::Search");

/// Pointers and sizes of one launch of [`Search`].
#[derive(Clone, Copy, Debug)]
pub struct SearchArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Capacity of a sequence in tokens.
    pub capacity: usize,
    /// `f32` (batch, heads, group, m, ksub): lookup tables, by [`Lut`](super::Lut) from scaled queries.
    pub luts: DevicePtr<f32>,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), in the layout of
    /// [`Codes`](pq_core::Codes).
    pub codes: DevicePtr<u8>,
    /// `u32` (batch,): the length of each sequence in tokens.
    pub lengths: DevicePtr<u32>,
    /// `u32` (batch,): k, the number of tokens to select by score, in addition to the sinks and the recent
    /// tokens.
    pub ks: DevicePtr<u32>,
    /// Number of first tokens that are always selected.
    pub sinks: usize,
    /// Number of last tokens that are always selected.
    pub recent: usize,
    /// Bytes ([`Search::workspace_len`],), overwritten.
    pub workspace: DevicePtr<u8>,
    /// `u32` (batch, heads, `tokens_len`), written: the selected tokens in ascending order. Those beyond
    /// `tokens_len` are dropped.
    pub tokens: DevicePtr<u32>,
    /// Capacity of `tokens` per head. The sum of k, sinks and recent tokens always suffices.
    pub tokens_len: usize,
    /// `u32` (batch,), written unless `capacity` is 0: the number of selected tokens
    /// ([`pq_core::Search::found`]).
    pub counts: DevicePtr<u32>,
    /// `f32` (batch, heads, group, 2), written: the maximum of the scores, and the sum of their exponentials
    /// relative to it.
    pub stats: Option<DevicePtr<f32>>,
    /// With programmatic dependent launch (PDL), on sm_90, blocks start before the previous kernel on the
    /// stream ends. If `pdl`, they read codes, lengths and k *before* they wait for it
    /// (`griddepcontrol.wait`), so that kernel must not write these; it may write the lookup tables.
    /// Otherwise they wait before they read anything.
    pub pdl: bool,
}

/// `Arguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    luts: DevicePtr<f32>,
    codes: DevicePtr<u8>,
    lengths: DevicePtr<u32>,
    ks: DevicePtr<u32>,
    tokens: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    stats: Option<DevicePtr<f32>>,
    workspace: DevicePtr<u32>,
    code_stride: u64,
    tokens_len: u64,
    heads: u32,
    rows: u32,
    capacity: u32,
    sinks: u32,
    recent: u32,
    tickets: u32,
    pdl: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 112);

/// The kernels of a search.
enum Kernels {
    /// One kernel, with a cluster of blocks for each row.
    Clusters(Kernel, Clusters),
    /// Four kernels in order, with their threads per block, and a block for each chunk of a row.
    Chunks(Vec<(Kernel, u32)>),
}

/// `pq_core::search_into` for all heads: the k best tokens by the scores of a group, the sinks and the recent
/// tokens, in ascending order. The kernel reads lengths and k, so that a captured graph stays valid as
/// sequences grow.
///
/// If the weights of two tokens differ by less than rounding, the CPU may select the other one. Of tokens of
/// equal weight, those of lower index are selected.
///
/// # Cost
/// 2 n * m lookups for every four queries, and 4 bytes per token, written once and read twice. For codes of
/// up to 12 bits per token on sm_90, one increment per token.
/// # Source
/// PQCache (arXiv 2407.12820), 3.1 and 3.4.
pub struct Search {
    kernels: Kernels,
    shape: SearchShape,
    sm_count: usize,
}

impl Search {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: SearchShape) -> Result<Self, Error> {
        let (capability, shared_memory) = (device.capability(), device.shared_memory());
        let program = shape.program(capability, shared_memory)?;
        let kernels = if shape.is_joint(capability, shared_memory) {
            let kernel = device.kernel(&program, "pq_search_histogram", shape.joint_shared_bytes())?;
            // Every block of a cluster has at least one joint code.
            let sizes = JOINT_CLUSTERS.into_iter().filter(|&blocks| blocks <= 1 << shape.joint_bits());
            let clusters = Clusters::new(&kernel, SELECT_THREADS, sizes)?;
            Kernels::Clusters(kernel, clusters)
        } else {
            let tables = shape.scan().shared_bytes(shared_memory);
            let kernels = [
                ("pq_search_stats", tables, SCORE_THREADS),
                ("pq_search_keys", tables, SCORE_THREADS),
                ("pq_search_collect", 0, SELECT_THREADS),
                ("pq_search_write", 0, SELECT_THREADS),
            ];
            let load = |(name, shared, threads)| Ok((device.kernel(&program, name, shared)?, threads));
            Kernels::Chunks(kernels.into_iter().map(load).collect::<Result<_, Error>>()?)
        };
        Ok(Self { kernels, shape, sm_count: device.sm_count() })
    }

    /// Bytes of workspace: 0 for the histogram kernel.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize, capacity: usize) -> usize {
        if matches!(self.kernels, Kernels::Clusters(..)) {
            return 0;
        }
        let chunks = capacity.div_ceil(CHUNK);
        let row = chunks.saturating_mul(8 + 8 * self.shape.group + 8 * CHUNK).saturating_add(ROW_BYTES);
        batch.saturating_mul(heads).saturating_mul(row)
    }

    /// Launches the search on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. The
    /// kernels clamp lengths to the capacity, and k to the length.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &SearchArguments) -> Result<(), Error> {
        let a = arguments;
        let rows = a.batch.saturating_mul(a.heads);
        if rows == 0 || a.capacity == 0 {
            return Ok(());
        }
        let chunks = a.capacity.div_ceil(CHUNK);
        OPERATION.in_32_bits("tokens of whole chunks", chunks.saturating_mul(CHUNK))?;
        let blocks = match &self.kernels {
            Kernels::Clusters(_, clusters) => clusters.largest(rows),
            Kernels::Chunks(_) => chunks,
        };
        let grid = OPERATION.grid(&[("chunks", blocks), ("heads of sequences", rows)])?;
        let at_most_capacity = |tokens: usize| tokens.min(a.capacity) as u32;
        let kernel_arguments = KernelArguments {
            luts: a.luts,
            codes: a.codes,
            lengths: a.lengths,
            ks: a.ks,
            tokens: a.tokens,
            counts: a.counts,
            stats: a.stats,
            workspace: a.workspace.cast(),
            code_stride: self.shape.quantizer.codes_len(a.capacity) as u64,
            tokens_len: a.tokens_len as u64,
            heads: a.heads as u32,
            rows: rows as u32,
            capacity: a.capacity as u32,
            sinks: at_most_capacity(a.sinks),
            recent: at_most_capacity(a.recent),
            // Blocks of `write` wait for each other. Every multiprocessor has room for at least one, so
            // `sm_count` blocks are always resident together.
            tickets: u32::from(rows.saturating_mul(chunks) > self.sm_count),
            pdl: u32::from(a.pdl),
        };
        match &self.kernels {
            Kernels::Clusters(kernel, _) => {
                let (cluster, threads) = (blocks as u32, SELECT_THREADS);
                // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its
                // pointers.
                unsafe { kernel.launch_in_clusters(stream, grid, cluster, threads, true, &kernel_arguments) }
            }
            Kernels::Chunks(kernels) => kernels.iter().try_for_each(|(kernel, threads)| {
                // SAFETY: as above.
                unsafe { kernel.launch(stream, grid, *threads, true, &kernel_arguments) }
            }),
        }
    }
}
