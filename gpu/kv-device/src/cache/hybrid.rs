//! Hybrid attention on a device, to codes of all tokens and exact rows of a few.

use kv_attend::owner::{Footprint, Pair, Side};
use kv_gpu::pq::{
    ErrorBound, ExactRows, ExactTokens, Hybrid, HybridArguments, HybridShape, Prefetch, RowIndex, TILE,
};
use kv_gpu::{AnyElement, DevicePtr, Element};
use pq_core::GroupRule;

use super::codes::{TokenCodes, Transform};
use super::eviction::Evictions;
use super::key_means::KeyMeans;
use super::row_store::{RowStore, StoreShape};
use super::row_transform::RowTransform;
use super::step_budget::StepBudget;
use super::transformed::TransformedCodes;
use super::window::{Window, WindowShape};
use super::{ChunkCache, StepCache};
use crate::Result;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_ROWS, fill_rows};
use crate::memory::Buffer;
use crate::plan::HybridPlan;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;

/// Hybrid attention: coarse codes of all tokens on the device, and in the same softmax the exact rows of the
/// few that hold most of the weight, from a `RowStore` in memory of the device or the host.
///
/// For each layer a step scores all tokens and selects, k of them or as many as a bound needs
/// (`pq::Hybrid::select`), fetches the rows that the host
/// has and attends (`pq::Hybrid::attend`). Queries and keys arrive in the basis of the key codes (`Bases`),
/// and values in that of theirs, which is folded into the model. Codes may be of keys less their rotated
/// mean, whose part of the scores comes before (`KeyMeans`). Tokens are encoded before the ring overwrites
/// their rows (`Evictions`).
pub(crate) struct HybridCache {
    hybrid: Hybrid,
    element: Element,
    plan: HybridPlan,
    window: Window,
    store: RowStore,
    slots: Buffer<u16>, // (layer, keys and values, batch, heads, held, head_dim): rows of the host
    held: usize,        // of a head, those that recent steps have selected
    evictions: Evictions,
    budget: StepBudget,
    codes: TokenCodes,
    errors: Buffer<f32>, // (layer, heads, head_dim): mean squares of the coding errors of keys
    selected: Buffer<u32>, // (batch, heads, most)
    adaptive: Option<Adaptive>,
    workspace: Buffer<u8>,
}

/// How many rows heads read where a bound decides it.
struct Adaptive {
    bound: f32,
    value_errors: Buffer<f32>, // (layer, heads)
    found: Buffer<u32>,        // (batch, heads)
    total: Buffer<u64>,        // (1,): of all steps so far
}

impl HybridCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::HostMemory`](crate::Error::HostMemory) when the host has no room for the rows;
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, sizes: &CacheShape, plan: HybridPlan, codes: TransformedCodes) -> Result<Self> {
        let &CacheShape { layers: n_layers, element, window, batch, capacity, .. } = sizes;
        let evictions = Evictions::new(gpu, n_layers, batch, window)?;
        let shape = WindowShape::new(sizes);
        let stored = capacity.saturating_sub(shape.sinks).max(1);
        let most = plan.budget.k(stored, shape.sinks + shape.ring);
        let store = StoreShape {
            n_layers,
            batch,
            heads: shape.heads,
            head_dim: shape.head_dim,
            sinks: shape.sinks,
            ring: shape.ring,
            stored,
            most,
            staged_sides: 2,
        };
        // Heads that choose by themselves need a slot more than they choose, or `residency` may use only the
        // first k.
        let held = plan.resident.min(stored).max(most + usize::from(plan.bound.is_some()));
        let store = RowStore::new(gpu, element, store, plan.home, held)?;
        let hybrid = Hybrid::new(&gpu.device, kernels(sizes, &plan))?;
        let transform = Transform::new(gpu, sizes, &codes)?;
        let (books, quantizers) = (codes.codebooks, plan.quantizers);
        let coded = TokenCodes::new(gpu, sizes, quantizers, books, Some(transform), None)?;
        let coded = if plan.mean_errors { coded.with_mean_errors(gpu, element)? } else { coded };
        let tiles = capacity.div_ceil(TILE).max(1);
        let held = if store.slots().is_some() { held } else { 0 };
        let cache = Self {
            budget: StepBudget::new(gpu, plan.budget, shape.sinks + shape.ring, batch, shape.heads)?,
            slots: Buffer::zeros(gpu, 2 * n_layers * shape.side_len(held))?,
            held,
            errors: Buffer::of(gpu, &codes.key_errors)?,
            codes: coded,
            selected: Buffer::zeros(gpu, batch * shape.heads * most)?,
            adaptive: match plan.bound {
                Some(bound) => Some(Adaptive {
                    bound,
                    value_errors: Buffer::of(gpu, &codes.value_errors)?,
                    found: Buffer::zeros(gpu, batch * shape.heads)?,
                    total: Buffer::zeros(gpu, 1)?,
                }),
                None => None,
            },
            workspace: Buffer::zeros(gpu, hybrid.workspace_len(batch, shape.heads, tiles * TILE))?,
            window: Window::new(gpu, shape)?,
            store,
            evictions,
            hybrid,
            element,
            plan,
        };
        gpu.synchronize()?; // tables and maps are copied
        Ok(cache)
    }

    /// Rows of a layer's tokens that steps have fetched from the host.
    fn slots(&self, layer: usize) -> Rows {
        let capacity = self.held;
        let len = self.store.shape.side_len(capacity);
        let side = |side: usize| self.slots.pointer().offset((2 * layer + side) * len).cast();
        Rows { keys: side(0), values: side(1), capacity }
    }

    /// Exact rows of a layer's selected tokens, which a step has fetched if the host has them.
    fn selected_rows(&self, layer: usize) -> ExactRows {
        match self.store.slots() {
            Some(slots) => {
                let Rows { keys, values, capacity } = self.slots(layer);
                ExactRows { keys, values, capacity, index: RowIndex::List(slots), arriving: true }
            }
            None => ExactRows {
                keys: self.store.rows(Side::Keys, layer).cast(),
                values: self.store.rows(Side::Values, layer).cast(),
                capacity: self.store.shape.stored,
                index: RowIndex::Token,
                arriving: false,
            },
        }
    }

    /// Bytes of what all sequences share.
    fn shared_bytes(&self) -> usize {
        self.codes.shared_bytes() + self.errors.bytes()
    }
}

/// The shape of a step's kernels.
pub(crate) const fn kernels(shape: &CacheShape, plan: &HybridPlan) -> HybridShape {
    HybridShape {
        keys: plan.quantizers.keys,
        values: plan.quantizers.values,
        group: shape.group,
        element: shape.element,
        rule: GroupRule::SumOfSoftmax,
        paged: false,
        adaptive: plan.bound.is_some(),
        addends: plan.form.rotated_mean,
        key_norms: plan.form.norms.keys.is_some(),
        value_norms: plan.form.norms.values.is_some(),
        mean_errors: plan.mean_errors,
    }
}

impl StepCache for HybridCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn slot_mapping(&self) -> SlotMapping {
        self.window.shape.slot_mapping()
    }

    fn transform(&self) -> Option<RowTransform<'_>> {
        self.codes.row_transform()
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        if layer == 0 {
            self.budget.launch(gpu, sequences)?;
        }
        let WindowShape { batch, heads, head_dim, .. } = self.window.shape;
        let Rows { keys, values, capacity } = self.rows(layer);
        let lengths = sequences.exact_lengths;
        let arguments = HybridArguments {
            batch,
            heads,
            tiles: self.codes.tiles,
            key_codes: self.codes.of(Side::Keys, layer, 0),
            value_codes: self.codes.of(Side::Values, layer, 0),
            key_table: self.codes.table(Side::Keys, layer),
            value_table: self.codes.table(Side::Values, layer),
            key_norms: self.codes.norms_of(Side::Keys, layer, 0),
            value_norms: self.codes.norms_of(Side::Values, layer, 0),
            mean_errors: self.codes.mean_errors(layer),
            key_errors: Some(self.errors.pointer().offset(layer * heads * head_dim)),
            queries,
            code_queries: None,
            addends: self.codes.means().map(KeyMeans::addends),
            lengths: sequences.coded_lengths,
            pages: None,
            ks: self.budget.ks(),
            bound: self.adaptive.as_ref().map(|adaptive| ErrorBound {
                bound: adaptive.bound,
                value_errors: adaptive.value_errors.pointer().offset(layer * heads),
                found: adaptive.found.pointer(),
                total: Some(adaptive.total.pointer()),
            }),
            selected: self.selected.pointer(),
            selected_len: self.store.shape.most,
            rows: self.selected_rows(layer),
            exact: Some(ExactTokens { keys, values, lengths, capacity }),
            scale: 1.0 / (head_dim as f32).sqrt(),
            out,
            log_sum_exp: None,
            pdl: true,
            workspace: self.workspace.pointer(),
        };
        let counts = self.adaptive.as_ref().map_or(self.budget.counts(), |adaptive| adaptive.found.pointer());
        let selected = (self.selected.pointer(), counts);
        // SAFETY: the buffers have the lengths of `new`; the caller keeps lengths within the capacity, and
        // `most` tokens are the most of the budget. What precedes `select` writes neither tables nor lengths;
        // `StepBudget` has written k without PDL. `fetch` waits for `select`, and writes the rows of all
        // selected tokens to their slots.
        unsafe {
            self.hybrid.select(gpu.stream(), &arguments)?;
            self.store.fetch(gpu, layer, selected, self.slots(layer))?;
            self.hybrid.attend(gpu.stream(), &arguments)?;
        }
        Ok(())
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.window.invalidate_prefix();
        self.store.invalidate(gpu)?;
        self.evictions.reset(gpu, 0)
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Some(eviction) = self.evictions.begin(gpu, sequences)? else { return Ok(()) };
        eviction
            .layers()
            .try_for_each(|layer| self.store.evict(gpu, layer, self.rows(layer), &self.evictions))?;
        let stream = self.evictions.background(gpu)?;
        let staged = |layer| Pair::of(|side| self.store.staged(side, layer));
        eviction
            .layers()
            .try_for_each(|layer| self.codes.encode_evicted(stream, layer, staged(layer), &self.evictions))?;
        self.evictions.end(&eviction)
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let shape = self.window.shape;
        let stored = shape.stored(tokens);
        Footprint {
            kept: self.codes.bytes_of(stored) + shape.exact_bytes(tokens),
            offloaded: shape.n_layers * shape.batch * shape.heads * stored * self.store.pair_bytes(),
            working: self.store.staged_bytes() + self.slots.bytes() + self.codes.working_bytes(),
            shared: self.shared_bytes(),
        }
    }

    fn bytes(&self) -> usize {
        let rows = self.window.bytes() + self.store.bytes() + self.slots.bytes();
        rows + self.codes.bytes() + self.shared_bytes()
    }

    fn host_bytes(&self) -> usize {
        self.store.host_bytes()
    }

    fn fetched_rows(&self, gpu: &Gpu) -> Result<u64> {
        self.store.fetched(gpu)
    }

    fn selected_rows(&self, gpu: &Gpu) -> Result<Option<u64>> {
        let Some(Adaptive { total, .. }) = &self.adaptive else { return Ok(None) };
        let mut rows = [0];
        total.read_into(gpu, &mut rows)?;
        Ok(Some(rows[0]))
    }

    fn fetched_row_bytes(&self) -> usize {
        self.store.pair_bytes()
    }

    fn prefetch_next(&mut self, gpu: &Gpu, reads: &[Prefetch]) {
        self.store.prefetch_next(gpu, reads);
    }
}

impl Timed for HybridCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        self.store.fill_random(gpu, self.element, |layer| self.rows(layer))?;
        self.codes.fill_random(gpu)?;
        fill_rows(gpu, self.element, self.slots.pointer(), self.slots.len(), RANDOM_ROWS)?;
        self.store.invalidate(gpu)?;
        self.evictions.reset(gpu, tokens)?;
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        let shape = self.window.shape;
        let rows = match self.adaptive {
            Some(_) => 0, // at least
            None => self.plan.budget.k(shape.stored(tokens), shape.sinks + shape.ring),
        };
        self.footprint(tokens).kept + 4 * shape.n_layers * shape.side_len(rows)
    }

    fn encode_synchronously(&mut self) {
        self.evictions.asynchronous = false;
    }

    fn force_hits(&mut self, share: f32) {
        self.store.force_hits(share);
    }
}

impl ChunkCache for HybridCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.evictions.wait(gpu)?; // of the layer before, from the same rows
        self.codes.begin_chunk(gpu, chunk)?;
        self.window.rows_before(gpu, layer, chunk, |stored, rows| {
            self.store.restore(gpu, layer, chunk.sequence, stored, rows)
        })
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let rows = self.window.prefix()?;
        let tokens = self.window.shape.stored_by(chunk);
        let stream = self.evictions.background(gpu)?;
        self.store.take_chunk(stream, layer, chunk, tokens, rows)?;
        self.codes.encode_chunk(stream, layer, chunk, rows)
    }

    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.window.invalidate_prefix();
        self.store.invalidate(gpu)?;
        self.evictions.set_lengths(gpu, lengths)
    }

    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.window.invalidate_prefix();
        self.store.invalidate_one(gpu, sequence)?;
        self.evictions.set_length(gpu, sequence, length)
    }
}
