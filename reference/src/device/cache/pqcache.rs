mod launch;
mod reuse;

use kv_gpu::pq::{EncodeGeneric, EncodeGenericShape, Gather, Lut, LutShape, Search, SearchShape};
use kv_gpu::svd::{Attend, AttendShape};
use kv_gpu::{AnyElement, DevicePtr, Element, Kernel, VectorElement};
use pq_core::{CodebookBuf, GroupRule, PqShape, Window};
use rayon::prelude::*;

use super::dense::{RANDOM_ROWS, fill_rows};
use super::million::{RANDOM_BOOKS, RANDOM_CODES, fill_codes, random_codebook};
use super::turns::Turns;
use super::{DeviceCache, Rows, Sequences};
use crate::cache::Footprint;
use crate::device::host_memory::{HostBuffer, check_available};
use crate::device::memory::Buffer;
use crate::device::{Gpu, programs};
use crate::method::Retrieval;
use crate::model::Config;
use crate::side::Side;
use crate::{Error, Result};
use reuse::Reuse;

/// Bytes by which layers of codes are aligned.
const ALIGNMENT: usize = 256;

/// Bytes of shared memory that the driver reserves for two blocks.
const RESERVED_SHARED_MEMORY: usize = 2 << 10;

/// PQCache: codes of keys on the device, exact rows of all tokens in page-locked host memory.
///
/// For each layer a step makes the lookup tables of its queries (`pq::Lut`), finds the best tokens
/// (`pq::Search`), reads the rows that the last step has not chosen over the link (`Reuse`, `pq::Gather`)
/// and attends to all together with sinks and window (`svd::Attend` at full rank). Chosen rows have slots
/// behind the exact ones, so that one launch attends to both. All lengths are on the device.
///
/// A token's rows go to the host when its keys go to the quantizer, up to a ring and at least half a ring
/// before a step can choose them (`Turns`). The decoder's stream writes them, so its order is the fence
/// between these stores and the loads of `pq::Gather`.
pub struct PqCache {
    kernels: Kernels,
    element: Element,
    rows: Buffer<u16>, // (layer, keys and values, batch, heads, capacity of `rows`, head_dim)
    host: Vec<HostBuffer<u16>>, // per layer: (keys and values, batch, heads, stored, head_dim)
    codes: Buffer<u8>, // (layer, (batch, heads, codes of `stored` keys), padded)
    centroids: Buffer<f32>, // (layer, heads, m, ksub, dsub)
    staged: Buffer<u16>, // (layer, batch, heads, ring, head_dim): keys
    turns: Turns,
    reuse: Reuse,
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
    most: usize,   // tokens of a sequence that a step chooses at most
    codes: usize,  // bytes of a layer's codes, padded
}

impl Shape {
    /// Rows of a head on the device: exact ones, then slots of chosen ones.
    const fn kept(&self) -> usize {
        self.sinks + self.ring + self.most
    }

    /// Elements of a layer's keys of `rows` rows a head.
    const fn side_len(&self, rows: usize) -> usize {
        self.batch * self.heads * rows * self.head_dim
    }
}

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
        let host_bytes =
            [2 * n_layers, batch, heads, stored].iter().try_fold(row_bytes, |all, &n| all.checked_mul(n));
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
            reuse: Reuse::new(gpu, n_layers, batch * heads, most)?,
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
        self.reuse.launch(gpu, layer, self.scratch.tokens.pointer(), self.scratch.counts.pointer())?;
        self.launch_gather(gpu, layer)?;
        self.launch_attend(gpu, layer, queries, out)
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.reuse.forget(gpu)?;
        self.turns.restart_at(gpu, 0)
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
        self.reuse.forget(gpu)?;
        self.turns.restart_at(gpu, tokens)?;
        gpu.synchronize()
    }

    fn encode_synchronously(&mut self) {
        self.turns.asynchronous = false;
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

    fn footprint(&self, tokens: usize) -> Footprint {
        let Shape { n_layers, batch, heads, sinks, ring, most, .. } = self.shape;
        let exact = tokens.min(sinks + ring);
        let codes = batch * heads * self.retrieval.quantizer.codes_len(tokens - exact);
        let rows = |rows| 4 * n_layers * self.shape.side_len(rows); // keys and values of 16 bits
        Footprint {
            kept: n_layers * codes + rows(exact),
            offloaded: rows(tokens - exact),
            working: self.staged.bytes() + rows(most),
            shared: self.centroids.bytes(),
        }
    }

    fn bytes(&self) -> usize {
        self.rows.bytes() + self.codes.bytes() + self.centroids.bytes() + self.staged.bytes()
    }

    fn host_bytes(&self) -> usize {
        self.host.iter().map(HostBuffer::bytes).sum()
    }

    fn fetched_rows(&self, gpu: &Gpu) -> Result<u64> {
        self.reuse.fetched(gpu)
    }

    fn force_hits(&mut self, share: f32) {
        self.reuse.force_hits(share);
    }
}

/// Codebooks for timing, hashed: the same for all heads of a layer.
fn random_codebooks(n_layers: usize, heads: usize, quantizer: PqShape) -> Result<Vec<Vec<CodebookBuf>>> {
    let layer = |layer| Ok(vec![random_codebook(quantizer, RANDOM_BOOKS + 2 * layer as u32)?; heads]);
    (0..n_layers).map(layer).collect()
}
