use cudarc::driver::sys::CUstream;
use pq_core::{GroupRule, PqShape};

use super::scan::{CHUNK, ScanShape};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, KERNELS, Program};

/// What a search is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Query heads per key/value head.
    pub group: usize,
    /// How they agree.
    pub rule: GroupRule,
}

/// Bytes of `Row` of the kernel.
const ROW_BYTES: usize = 4 * (2048 + 8);
/// Bits of a token's codes that are counted rather than scored.
const JOINT_BITS: usize = 12;
/// `BLOCKS` of that kernel.
const JOINT_BLOCKS: usize = 8;
/// Threads of a block of kernels that score, and of those that select.
const SCORE_THREADS: u32 = 512;
const SELECT_THREADS: u32 = 1024;

impl SearchShape {
    const fn scan(&self) -> ScanShape {
        ScanShape { quantizer: self.quantizer, group: self.group }
    }

    /// The program for a compute capability and blocks of up to `shared_memory` bytes ([`Device::shared_memory`]): from 9.0 on, codes of up
    /// to 12 bits a token have one of their own.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self, capability: (i32, i32), shared_memory: usize) -> Result<Program, Error> {
        let defines = self.scan().defines(shared_memory)?;
        let program = if self.is_joint(capability, shared_memory) {
            let defines = [&defines[..], &[("SHARED_BYTES", self.joint_shared_bytes())]].concat();
            Program::new("pq_search_joint", KERNELS.pq_search_joint, &defines)
        } else {
            let defines = [&defines[..], &[("ROW_BYTES", ROW_BYTES)]].concat();
            Program::new("pq_search", KERNELS.pq_search, &defines)
        };
        Ok(program.define_if(self.rule == GroupRule::MaxOfSoftmax, "MAX_RULE"))
    }

    /// Enough for `Shared` of that kernel: codes of a block's first tokens; counts, marks, keys, totals and counts told of the joint codes;
    /// buckets; tables, and what passes between warps and blocks.
    const fn joint_shared_bytes(&self) -> usize {
        let joint = 1 << JOINT_BITS;
        joint * (8 + 4 + 1 + 8 + 1 + 4) + 4 * (4096 + 128) + 4 * self.group * (self.quantizer.lut_len() + 136)
    }

    const fn is_joint(&self, capability: (i32, i32), shared_memory: usize) -> bool {
        capability.0 >= 9
            && self.joint_shared_bytes() <= shared_memory
            && self.quantizer.m() * self.quantizer.nbits() as usize <= JOINT_BITS
    }
}

const OPERATION: Operation = Operation("pq::Search");

/// Device pointers and sizes of one launch.
#[derive(Clone, Copy, Debug)]
pub struct SearchArguments {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Tokens that a sequence has room for.
    pub capacity: usize,
    /// f32 (batch, heads, group, m, ksub): tables, as [`Lut`](super::Lut) makes them from scaled queries.
    pub luts: DevicePtr<f32>,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), as [`Codes`](pq_core::Codes) has them.
    pub codes: DevicePtr<u8>,
    /// `u32` (batch,): tokens of each sequence.
    pub lengths: DevicePtr<u32>,
    /// `u32` (batch,): tokens that are chosen by score, beside the sinks and the recent ones.
    pub ks: DevicePtr<u32>,
    /// First tokens that are always in.
    pub sinks: usize,
    /// Last tokens that are always in.
    pub recent: usize,
    /// Bytes ([`Search::workspace_len`],), overwritten.
    pub workspace: DevicePtr<u8>,
    /// `u32` (batch, heads, `tokens_len`), written: the found tokens in ascending order, those beyond the room left out.
    pub tokens: DevicePtr<u32>,
    /// Tokens of a head that there is room for; k, sinks and recent ones together always suffice.
    pub tokens_len: usize,
    /// `u32` (batch,), written: how many were found ([`pq_core::Search::found`]).
    pub counts: DevicePtr<u32>,
    /// f32 (batch, heads, group, 2), written: maximum of the scores, and sum of the exponentials of their differences to it.
    pub stats: Option<DevicePtr<f32>>,
    /// Whether the search may begin with codes while the kernel before it on the stream ends, on sm_90: that one must not write codes,
    /// lengths or k, but may be the one that makes the tables. Else it waits for that kernel before it reads anything.
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
    pdl: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 104);

/// `pq_core::search_into` for all heads: scores, agreement of the group, the k best tokens in ascending order, and those that are
/// always in. Lengths and k are read on the device, so a captured graph follows a growing sequence.
///
/// Tokens whose weights differ by less than rounding may be chosen the other way than on the CPU; of equal ones, the lower.
///
/// # Cost
/// 2 n * m look-ups for every four queries, and 4 bytes a token written once and read twice; for codes of up to 12 bits a token on
/// sm_90, one count a token.
/// # Source
/// PQCache (arXiv 2407.12820), 3.1 and 3.4.
pub struct Search {
    kernels: Vec<(Kernel, u32)>, // one, or four in their order, with the threads of their blocks
    shape: SearchShape,
}

impl Search {
    /// Compiles it for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: SearchShape) -> Result<Self, Error> {
        let (capability, shared_memory) = (device.capability(), device.shared_memory());
        let program = shape.program(capability, shared_memory)?;
        let tables = shape.scan().shared_bytes(shared_memory);
        let kernels: &[(&'static str, usize, u32)] = if shape.is_joint(capability, shared_memory) {
            &[("pq_search_joint", shape.joint_shared_bytes(), SELECT_THREADS)]
        } else {
            &[
                ("pq_search_stats", tables, SCORE_THREADS),
                ("pq_search_keys", tables, SCORE_THREADS),
                ("pq_search_collect", 0, SELECT_THREADS),
                ("pq_search_write", 0, SELECT_THREADS),
            ]
        };
        let kernels = kernels
            .iter()
            .map(|&(name, shared, threads)| Ok((device.kernel(&program, name, shared)?, threads)))
            .collect::<Result<_, Error>>()?;
        Ok(Self { kernels, shape })
    }

    /// Bytes of scratch: none, where tokens are counted.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize, capacity: usize) -> usize {
        if self.is_joint() {
            return 0;
        }
        let chunks = capacity.div_ceil(CHUNK);
        let row = chunks.saturating_mul(8 + 8 * self.shape.group + 8 * CHUNK).saturating_add(ROW_BYTES);
        batch.saturating_mul(heads).saturating_mul(row)
    }

    fn is_joint(&self) -> bool {
        self.kernels.len() == 1
    }

    /// Puts the search on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths above the capacity count as the
    /// capacity, and k as at most the length.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &SearchArguments) -> Result<(), Error> {
        let a = arguments;
        let rows = a.batch.saturating_mul(a.heads);
        if rows == 0 || a.capacity == 0 {
            return Ok(());
        }
        let chunks = a.capacity.div_ceil(CHUNK);
        OPERATION.in_32_bits("tokens of whole chunks", chunks.saturating_mul(CHUNK))?;
        let blocks = if self.is_joint() { JOINT_BLOCKS } else { chunks };
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
            pdl: u32::from(a.pdl),
        };
        for (kernel, threads) in &self.kernels {
            // SAFETY: the structure is the kernels' argument; the caller vouches for what its pointers lead to.
            unsafe { kernel.launch(stream, grid, *threads, true, &kernel_arguments)? };
        }
        Ok(())
    }
}
