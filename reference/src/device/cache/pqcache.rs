use cudarc::driver::CudaStream;
use kv_gpu::pq::{
    EncodeGeneric, EncodeGenericArguments, EncodeGenericShape, Gather, GatherArguments, Lut, LutArguments,
    LutShape, Search, SearchArguments, SearchShape,
};
use kv_gpu::svd::{Attend, AttendArguments, AttendShape};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, VectorElement};
use pq_core::{CodebookBuf, GroupRule, PqShape, Window};
use rayon::prelude::*;

use super::dense::{RANDOM_ROWS, fill_rows};
use super::million::{RANDOM_BOOKS, RANDOM_CODES, fill_codes, random_codebook};
use super::turns::Turns;
use super::{DeviceCache, Rows, Sequences};
use crate::device::host_memory::{HostBuffer, check_available};
use crate::device::memory::Buffer;
use crate::device::{Gpu, programs};
use crate::method::{Budget, Retrieval};
use crate::model::Config;
use crate::side::Side;
use crate::{Error, Result};

/// Bytes by which layers of codes are aligned.
const ALIGNMENT: usize = 256;

/// Bytes of shared memory that the driver reserves for two blocks.
const RESERVED_SHARED_MEMORY: usize = 2 << 10;

/// PQCache: codes of keys on the device, exact rows of all tokens in page-locked host memory.
///
/// For each layer a step makes the lookup tables of its queries (`pq::Lut`), finds the best tokens
/// (`pq::Search`), reads their rows over the link (`pq::Gather`) and attends to them together with sinks and
/// window (`svd::Attend` at full rank). The rows that are read have a place behind the exact ones, so that
/// one launch attends to both. All lengths are on the device.
///
/// A token's rows go to the host when its keys go to the quantizer, up to a ring and at least half a ring
/// before a step can choose them ([`Turns`]). The decoder's stream writes them, so its order is the fence
/// between these stores and the loads of `pq::Gather`.
pub struct PqCache {
    kernels: Kernels,
    element: Element,
    rows: Buffer<u16>,           // (layer, keys and values, batch, heads, capacity of `rows`, head_dim)
    host: Vec<HostBuffer<u16>>,  // per layer: (keys and values, batch, heads, stored, head_dim)
    codes: Buffer<u8>,           // (layer, (batch, heads, codes of `stored` keys), padded)
    centroids: Buffer<f32>,      // (layer, heads, m, ksub, dsub)
    staged: Buffer<u16>,         // (layer, batch, heads, ring, head_dim): keys
    turns: Turns,
    ranks: Buffer<u32>,
    offsets: Buffer<u64>,
    scratch: Scratch,
    retrieval: Retrieval,
    shape: Shape,
}

struct Kernels {
    budget: Kernel,
    leave: Kernel,
    lut: Lut,
    search: Search,
    gather: Gather,
    attend: Attend,
    encode: EncodeGeneric,
}

/// What one layer after the other uses within a step.
struct Scratch {
    ks: Buffer<u32>,       // (batch,)
    counts: Buffer<u32>,   // (batch, heads): as `ks`
    attended: Buffer<u32>, // (batch,)
    luts: Buffer<f32>,     // (batch, heads, group, m, ksub)
    tokens: Buffer<u32>,   // (batch, heads, most)
    found: Buffer<u32>,    // (batch,)
    search: Buffer<u8>,
    attend: Buffer<u8>,
}

/// Sizes of the cache.
#[derive(Clone, Copy)]
struct Shape {
    n_layers: usize,
    batch: usize,
    heads: usize,
    group: usize,
    head_dim: usize,
    sinks: usize,
    ring: usize,
    capacity: usize,
    stored: usize, // tokens of a sequence that the host has room for
    most: usize,   // tokens of a sequence that a step fetches
    codes: usize,  // bytes of a layer's codes, padded
}

impl Shape {
    /// Rows of a head on the device: exact ones, then fetched ones.
    const fn kept(&self) -> usize {
        self.sinks + self.ring + self.most
    }

    /// Elements of a layer's keys of `rows` rows a head.
    const fn side_len(&self, rows: usize) -> usize {
        self.batch * self.heads * rows * self.head_dim
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct BudgetArguments {
    exact_lengths: DevicePtr<u32>,
    coded_lengths: DevicePtr<u32>,
    ks: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    attended: DevicePtr<u32>,
    ratio: f64,
    tokens: u32,
    reserved: u32,
    sequences: u32,
    heads: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LeaveArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    host_keys: DevicePtr<u16>,
    host_values: DevicePtr<u16>,
    staged: DevicePtr<u16>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    heads: u32,
    sinks: u32,
    ring: u32,
    capacity: u32,
    stored: u32,
    chunks: u32,
}

const _: () = assert!(size_of::<BudgetArguments>() == 64 && size_of::<LeaveArguments>() == 80);

impl PqCache {
    /// An empty cache; `codebooks` per layer and head, or hashed ones.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the host has no room for the rows; [`Error::Argument`] for a window of an
    /// odd number of tokens, or none, and for more tokens than 32 bits count; [`Error::Device`].
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        gpu: &Gpu,
        config: &Config,
        element: Element,
        retrieval: Retrieval,
        codebooks: Option<Vec<Vec<CodebookBuf>>>,
        window: Window,
        batch: usize,
        capacity: usize,
    ) -> Result<Self> {
        let (n_layers, quantizer) = (config.n_layers, retrieval.quantizer);
        let (heads, group, head_dim) = (config.n_kv_heads, config.gqa_group(), config.head_dim);
        let stored = capacity.saturating_sub(window.sinks).max(1);
        let row_bytes = size_of::<u16>() * head_dim;
        let host_bytes = [2 * n_layers, batch, heads, stored].iter().try_fold(row_bytes, |all, &n| all.checked_mul(n));
        check_available(host_bytes.unwrap_or(usize::MAX))?;
        if u32::try_from(capacity).is_err() {
            return Err(Error::Argument(format!("a sequence of {capacity} tokens: 32 bits count them")));
        }
        let turns = Turns::new(gpu, n_layers, batch, window)?;
        let most = retrieval.budget.k(stored, window.sinks + window.recent);
        let codes = (batch * heads * quantizer.codes_len(stored)).next_multiple_of(ALIGNMENT);
        let (sinks, ring) = (window.sinks, window.recent);
        let shape =
            Shape { n_layers, batch, heads, group, head_dim, sinks, ring, capacity, stored, most, codes };
        let kernels = Kernels::new(gpu, element, retrieval, &shape)?;
        let host = (0..n_layers).into_par_iter().map(|_| HostBuffer::new(gpu, 2 * shape.side_len(stored)));
        let host = host.collect::<Result<Vec<_>>>()?;
        let codebooks = match codebooks {
            Some(codebooks) => codebooks,
            None => random_codebooks(n_layers, heads, quantizer)?,
        };
        let centroids = codebooks.iter().flatten().flat_map(CodebookBuf::centroids);
        let offsets: Vec<u64> = (0..heads).map(|head| (head * head_dim) as u64).collect();
        let cache = Self {
            rows: Buffer::zeros(gpu, 2 * n_layers * shape.side_len(shape.kept()))?,
            host,
            codes: Buffer::zeros(gpu, n_layers * codes)?,
            centroids: Buffer::of(gpu, &centroids.collect::<Vec<f32>>())?,
            staged: Buffer::zeros(gpu, n_layers * shape.side_len(ring))?,
            turns,
            ranks: Buffer::of(gpu, &vec![head_dim as u32; heads])?,
            offsets: Buffer::of(gpu, &offsets)?,
            scratch: Scratch::new(gpu, &kernels, retrieval, &shape)?,
            kernels,
            element,
            retrieval,
            shape,
        };
        gpu.synchronize()?; // the codebooks are copied
        Ok(cache)
    }

    /// Rows of a layer on the host: keys, or values.
    fn host(&self, side: Side, layer: usize) -> DevicePtr<u16> {
        self.host[layer].pointer().offset(side as usize * self.shape.side_len(self.shape.stored))
    }

    fn codes(&self, layer: usize) -> DevicePtr<u8> {
        self.codes.pointer().offset(layer * self.shape.codes)
    }

    fn centroids(&self, layer: usize) -> DevicePtr<f32> {
        let len = self.retrieval.quantizer.codebook_len();
        self.centroids.pointer().offset(layer * self.shape.heads * len)
    }

    fn staged(&self, layer: usize) -> DevicePtr<u16> {
        self.staged.pointer().offset(layer * self.shape.side_len(self.shape.ring))
    }

    /// Launches what tells a step how many tokens it fetches and attends to.
    fn launch_budget(&self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Shape { batch, heads, sinks, ring, .. } = self.shape;
        let (ratio, tokens) = match self.retrieval.budget {
            Budget::Ratio(ratio) => (ratio, 0),
            Budget::Tokens(tokens) => (0.0, tokens as u32),
        };
        let arguments = BudgetArguments {
            exact_lengths: sequences.exact_lengths.pointer(),
            coded_lengths: sequences.coded_lengths.pointer(),
            ks: self.scratch.ks.pointer(),
            counts: self.scratch.counts.pointer(),
            attended: self.scratch.attended.pointer(),
            ratio,
            tokens,
            reserved: (sinks + ring) as u32,
            sequences: batch as u32,
            heads: heads as u32,
        };
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`.
        Ok(unsafe { self.kernels.budget.launch(gpu.stream(), Grid::new([1, 1, 1])?, 32, false, &arguments) }?)
    }

    /// Launches the choice of a layer's tokens.
    fn launch_search(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let Shape { batch, heads, head_dim, stored, most, .. } = self.shape;
        let Scratch { ks, luts, tokens, found, search, .. } = &self.scratch;
        let lut = LutArguments {
            batch,
            heads,
            queries,
            scale: 1.0 / (head_dim as f32).sqrt(),
            centroids: self.centroids(layer),
            luts: luts.pointer(),
        };
        let search = SearchArguments {
            batch,
            heads,
            capacity: stored,
            luts: luts.pointer(),
            codes: self.codes(layer),
            lengths: sequences.coded_lengths.pointer(),
            ks: ks.pointer(),
            sinks: 0,
            recent: 0,
            workspace: search.pointer(),
            tokens: tokens.pointer(),
            tokens_len: most,
            counts: found.pointer(),
            stats: None,
            pdl: true,
        };
        // SAFETY: the buffers have the lengths of `new`; the decoder keeps lengths within the capacity. The
        // tables are launched without PDL, so that queries and `ks` are complete when they start; they write
        // neither codes nor lengths nor `ks`. The background stream writes codes of later tokens only.
        unsafe {
            self.kernels.lut.launch(gpu.stream(), &lut)?;
            self.kernels.search.launch(gpu.stream(), &search)?;
        }
        Ok(())
    }

    /// Launches the copy of the chosen rows from the host to their place behind the exact ones.
    fn launch_gather(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, sinks, ring, stored, most, .. } = self.shape;
        let Rows { keys, values, capacity } = self.rows(layer);
        let behind_exact = |rows: DevicePtr<AnyElement>| rows.cast::<u16>().offset((sinks + ring) * head_dim).cast();
        let arguments = GatherArguments {
            heads: batch * heads,
            keys: self.host(Side::Keys, layer).cast(),
            values: self.host(Side::Values, layer).cast(),
            head_rows: stored,
            rows: self.scratch.tokens.pointer(),
            places: None,
            counts: Some(self.scratch.counts.pointer()),
            list_len: most,
            keys_out: behind_exact(keys),
            values_out: behind_exact(values),
            out_len: capacity,
        };
        // SAFETY: the buffers have the lengths of `new`, and a head's last fetched row is its last one: counts
        // are at most `most`. The search has written tokens below `stored`, whose rows this stream has
        // written to the host.
        Ok(unsafe { self.kernels.gather.launch(gpu.stream(), &arguments) }?)
    }

    /// Copies the rows of the layer's tokens whose turn it is to the host, and their keys to the quantizer.
    fn launch_leave(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, sinks, ring, stored, .. } = self.shape;
        let Rows { keys, values, capacity } = self.rows(layer);
        let arguments = LeaveArguments {
            keys,
            values,
            host_keys: self.host(Side::Keys, layer),
            host_values: self.host(Side::Values, layer),
            staged: self.staged(layer),
            firsts: self.turns.firsts(layer),
            counts: self.turns.counts(layer),
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            capacity: capacity as u32,
            stored: stored as u32,
            chunks: (head_dim / 8) as u32,
        };
        let grid = Grid::new([heads, batch, 2])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The plan
        // counts at most a ring of tokens, which come before tokens that fit. The background stream no longer
        // reads the staged keys: the event of the layer's last turn has been waited for.
        Ok(unsafe { self.kernels.leave.launch(gpu.stream(), grid, 256, false, &arguments) }?)
    }

    /// Encodes the staged keys of a layer.
    fn launch_encode(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, ring, stored, .. } = self.shape;
        let arguments = EncodeGenericArguments {
            batch,
            heads,
            max_count: ring,
            vectors: self.staged(layer).cast(),
            strides: [heads * ring * head_dim, ring * head_dim, head_dim],
            centroids: self.centroids(layer),
            firsts: self.turns.firsts(layer),
            counts: self.turns.counts(layer),
            capacity: stored,
            codes: self.codes(layer),
        };
        // SAFETY: the buffers have the lengths of `new`. The plan counts at most a ring of tokens, whose
        // codes fit since they come before tokens that fit. The search reads only codes before `firsts` until
        // the layer's next turn, which waits for this; bits of those keep their values.
        Ok(unsafe { self.kernels.encode.launch(stream.cu_stream(), &arguments) }?)
    }
}

impl Kernels {
    fn new(gpu: &Gpu, element: Element, retrieval: Retrieval, shape: &Shape) -> Result<Self> {
        let device = &gpu.device;
        let (quantizer, group) = (retrieval.quantizer, shape.group);
        let vectors = match element {
            Element::F16 => VectorElement::F16,
            Element::Bf16 => VectorElement::Bf16,
        };
        let program = programs::pqcache();
        Ok(Self {
            budget: device.kernel(&program, "budget", 0)?,
            leave: device.kernel(&program, "leave", 0)?,
            lut: Lut::new(device, LutShape { quantizer, group, element: vectors })?,
            search: Search::new(device, SearchShape { quantizer, group, rule: GroupRule::SumOfSoftmax })?,
            gather: Gather::new(device, size_of::<u16>() * shape.head_dim)?,
            attend: Attend::new(device, AttendShape { dim: shape.head_dim, element })?,
            encode: EncodeGeneric::new(device, EncodeGenericShape { quantizer, element: vectors })?,
        })
    }
}

impl Scratch {
    fn new(gpu: &Gpu, kernels: &Kernels, retrieval: Retrieval, shape: &Shape) -> Result<Self> {
        let Shape { batch, heads, group, stored, most, .. } = *shape;
        let words = |n| Buffer::<u32>::zeros(gpu, n);
        Ok(Self {
            ks: words(batch)?,
            counts: words(batch * heads)?,
            attended: words(batch)?,
            luts: Buffer::zeros(gpu, batch * heads * group * retrieval.quantizer.lut_len())?,
            tokens: words(batch * heads * most)?,
            found: words(batch)?,
            search: Buffer::zeros(gpu, kernels.search.workspace_len(batch, heads, stored))?,
            attend: Buffer::zeros(gpu, kernels.attend.workspace_len(batch, heads, group))?,
        })
    }
}

impl DeviceCache for PqCache {
    fn rows(&self, layer: usize) -> Rows {
        let capacity = self.shape.kept();
        let len = self.shape.side_len(capacity);
        let side = |side: usize| self.rows.pointer().offset((2 * layer + side) * len).cast();
        Rows { keys: side(0), values: side(1), capacity }
    }

    fn sinks(&self) -> usize {
        self.shape.sinks
    }

    fn ring(&self) -> usize {
        self.shape.ring
    }

    fn capacity(&self) -> usize {
        self.shape.capacity
    }

    fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        if layer == 0 {
            self.launch_budget(gpu, sequences)?;
        }
        self.launch_search(gpu, layer, sequences, queries)?;
        self.launch_gather(gpu, layer)?;
        let Rows { keys, values, capacity } = self.rows(layer);
        let Shape { batch, heads, group, head_dim, .. } = self.shape;
        let arguments = AttendArguments {
            batch,
            heads,
            group,
            capacity,
            keys,
            values,
            queries,
            lengths: self.scratch.attended.pointer(),
            key_ranks: self.ranks.pointer(),
            value_ranks: self.ranks.pointer(),
            key_offsets: self.offsets.pointer(),
            value_offsets: self.offsets.pointer(),
            key_rank_sum: heads * head_dim,
            value_rank_sum: heads * head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out,
            log_sum_exp: None,
            pdl: true,
            workspace: self.scratch.attend.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`, ranks and offsets are those of full rank, and lengths
        // are at most the capacity: where tokens are fetched, sinks and ring are full. The kernel before this
        // one writes rows, which are read after the PDL wait, and not lengths: the budget has written them.
        Ok(unsafe { self.kernels.attend.launch(gpu.stream(), &arguments) }?)
    }

    fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Some(turn) = self.turns.begin(gpu, sequences)? else { return Ok(()) };
        turn.layers().try_for_each(|layer| self.launch_leave(gpu, layer))?;
        let background = self.turns.background(gpu)?;
        turn.layers().try_for_each(|layer| self.launch_encode(background, layer))?;
        self.turns.end(&turn)
    }

    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        let Shape { n_layers, stored, .. } = self.shape;
        let (kept, stored) = (self.shape.side_len(self.shape.kept()), self.shape.side_len(stored));
        for layer in 0..n_layers {
            for side in Side::ALL {
                let tensor = RANDOM_ROWS + (2 * layer + side as usize) as u32;
                let rows = self.rows.pointer().offset((2 * layer + side as usize) * kept);
                fill_rows(gpu, self.element, rows, kept, tensor)?;
                fill_rows(gpu, self.element, self.host(side, layer), stored, tensor)?;
            }
        }
        fill_codes(gpu, &self.codes, RANDOM_CODES)?;
        self.turns.restart(gpu, tokens)?;
        gpu.synchronize()
    }

    fn background_shared_memory(&self) -> usize {
        self.kernels.encode.shared_memory() + RESERVED_SHARED_MEMORY
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        let Shape { n_layers, batch, heads, sinks, ring, .. } = self.shape;
        let exact = tokens.min(sinks + ring);
        let coded = tokens - exact;
        let k = self.retrieval.budget.k(coded, sinks + ring);
        let codes = batch * heads * self.retrieval.quantizer.codes_len(coded);
        n_layers * (codes + 4 * self.shape.side_len(exact + k))
    }

    fn bytes(&self) -> usize {
        self.rows.bytes() + self.codes.bytes() + self.centroids.bytes() + self.staged.bytes()
    }

    fn host_bytes(&self) -> usize {
        self.host.iter().map(HostBuffer::bytes).sum()
    }

    fn fetched_rows(&self, tokens: usize) -> usize {
        let Shape { n_layers, batch, heads, sinks, ring, .. } = self.shape;
        n_layers * batch * heads * self.retrieval.budget.k(tokens.saturating_sub(sinks + ring), sinks + ring)
    }
}

/// Codebooks for timing, hashed: the same for all heads of a layer.
fn random_codebooks(n_layers: usize, heads: usize, quantizer: PqShape) -> Result<Vec<Vec<CodebookBuf>>> {
    let layer = |layer| Ok(vec![random_codebook(quantizer, RANDOM_BOOKS + 2 * layer as u32)?; heads]);
    (0..n_layers).map(layer).collect()
}
