mod encode;

use half::f16;
use kv_gpu::pq::{
    CodeLayout, Encode, EncodeShape, ExactRows, ExactTokens, Hybrid, HybridArguments, HybridShape, RowIndex,
    TILE,
};
use kv_gpu::svd::{Project, ProjectShape};
use kv_gpu::{AnyElement, DevicePtr, Element, VectorElement};
use pq_core::{GroupRule, PqShape};

use super::dense::{RANDOM_ROWS, fill_rows};
use super::million::{RANDOM_BOOKS, RANDOM_CODES, fill_codes, random_codebook, tables};
use super::project_queries::{ProjectQueries, ProjectQueriesArguments};
use super::row_store::{RowStore, StoreShape};
use super::step_budget::StepBudget;
use super::turns::Turns;
use super::window::{Window, WindowShape};
use super::{Chunk, ChunkCache, DeviceCache, Rows, Sequences, check_tokens};
use crate::Result;
use crate::cache::Footprint;
use crate::device::memory::Buffer;
use crate::device::{Gpu, hashed};
use crate::method::{HybridHead, HybridPlan};
use crate::model::Config;
use crate::side::{Pair, Side};

/// The number of the hashed tensor that fills the maps of a layer's keys; the queries' is the next.
const RANDOM_MAPS: u32 = 4 << 16;

/// Hybrid attention: coarse codes of all tokens on the device, and in the same softmax the exact rows of the few
/// that hold most of the weight, from a `RowStore` in memory of the device or the host.
///
/// For each layer a step projects its queries into the space of the key codes (`ProjectQueries`), scores all
/// tokens and selects (`pq::Hybrid::select`), fetches the rows that the host has and attends
/// (`pq::Hybrid::attend`). Values arrive and leave in the basis of their codes, which the model has folded into
/// its weights. Tokens are encoded before the ring overwrites their rows (`Turns`).
pub struct HybridCache {
    kernels: Kernels,
    element: Element,
    plan: HybridPlan,
    window: Window,
    store: RowStore,
    slots: Buffer<u16>, // (layer, keys and values, batch, heads, most, head_dim): rows of the host
    turns: Turns,
    budget: StepBudget,
    codes: Pair<Buffer<u8>>, // (layer, batch, heads, tiles, tile_len)
    tiles: usize,            // of a head
    heads: Heads,
    scratch: Scratch,
    projected: Buffer<u16>, // (heads, tokens, head_dim): keys of a turn or a chunk, for the quantizer
    span: Buffer<u32>,      // of a chunk: the first token that it encodes, and at COUNT how many
}

struct Kernels {
    queries: ProjectQueries,
    keys: Project,
    hybrid: Hybrid,
    encoders: Pair<Encode>,
    layouts: Pair<CodeLayout>,
}

/// What the heads of all layers have.
struct Heads {
    tables: Pair<Buffer<f16>>,    // (layer, heads, table_len)
    centroids: Pair<Buffer<f32>>, // (layer, heads, m, ksub, dsub)
    maps: Pair<Buffer<f32>>,      // (layer, heads, head_dim, head_dim) of keys, and of queries
    errors: Buffer<f32>,          // (layer, heads, head_dim)
    ranks: Buffer<u32>,           // (heads,)
}

/// What one layer after the other uses within a step.
struct Scratch {
    queries: Buffer<u16>,  // (batch, heads, group, head_dim): projected
    selected: Buffer<u32>, // (batch, heads, most)
    workspace: Buffer<u8>,
}

/// Where the count of a span is: 16 bytes on.
const COUNT: usize = 4;

impl HybridCache {
    /// An empty cache; `heads` per layer, or hashed ones.
    ///
    /// # Errors
    /// [`Error::HostMemory`](crate::Error::HostMemory) when the host has no room for the rows;
    /// [`Error::Argument`](crate::Error::Argument) for a window of an odd number of tokens, or none, and for
    /// more tokens than 32 bits count; [`Error::Device`](crate::Error::Device).
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        gpu: &Gpu,
        config: &Config,
        element: Element,
        plan: HybridPlan,
        heads: Option<Vec<Vec<HybridHead>>>,
        window: pq_core::Window,
        batch: usize,
        capacity: usize,
    ) -> Result<Self> {
        check_tokens(capacity)?;
        let n_layers = config.n_layers;
        let turns = Turns::new(gpu, n_layers, batch, window)?;
        let shape = WindowShape::new(config, window, batch, capacity);
        let kernels = Kernels::new(gpu, config, element, plan.quantizers)?;
        let (stored, tiles) = (capacity.saturating_sub(shape.sinks).max(1), capacity.div_ceil(TILE).max(1));
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
        let heads = match heads {
            Some(heads) => heads,
            None => random_heads(config, plan.quantizers)?,
        };
        let store = RowStore::new(gpu, store, plan.home)?;
        let fetched = if store.slots().is_some() { most } else { 0 };
        let cache = Self {
            budget: StepBudget::new(gpu, plan.budget, shape.sinks + shape.ring, batch, shape.heads)?,
            slots: Buffer::zeros(gpu, 2 * n_layers * shape.side_len(fetched))?,
            codes: Pair::try_of(|side| {
                let len = kernels.layouts[side].tile_len();
                Buffer::zeros(gpu, n_layers * batch * shape.heads * tiles * len)
            })?,
            tiles,
            heads: Heads::new(gpu, &kernels.layouts, config, &heads)?,
            scratch: Scratch {
                queries: Buffer::zeros(gpu, batch * config.q_dim())?,
                selected: Buffer::zeros(gpu, batch * shape.heads * most)?,
                workspace: Buffer::zeros(
                    gpu,
                    kernels.hybrid.workspace_len(batch, shape.heads, tiles * TILE),
                )?,
            },
            projected: Buffer::zeros(gpu, shape.side_len(shape.ring))?,
            span: Buffer::zeros(gpu, 2 * COUNT)?,
            window: Window::new(gpu, shape)?,
            store,
            turns,
            kernels,
            element,
            plan,
        };
        gpu.synchronize()?; // tables and maps are copied
        Ok(cache)
    }

    /// Codes of a layer from a sequence on.
    fn codes(&self, side: Side, layer: usize, sequence: usize) -> DevicePtr<u8> {
        let WindowShape { batch, heads, .. } = self.window.shape;
        let of_sequence = heads * self.tiles * self.kernels.layouts[side].tile_len();
        self.codes[side].pointer().offset((layer * batch + sequence) * of_sequence)
    }

    /// Rows of a layer's tokens that a step fetches from the host.
    fn slots(&self, layer: usize) -> Rows {
        let capacity = self.store.shape.most;
        let len = self.store.shape.side_len(capacity);
        let side = |side: usize| self.slots.pointer().offset((2 * layer + side) * len).cast();
        Rows { keys: side(0), values: side(1), capacity }
    }

    /// Exact rows of a layer's selected tokens, which a step has fetched if the host has them.
    fn selected_rows(&self, layer: usize) -> ExactRows {
        match self.store.slots() {
            Some(slots) => {
                let Rows { keys, values, capacity } = self.slots(layer);
                ExactRows { keys, values, capacity, index: RowIndex::List(slots) }
            }
            None => ExactRows {
                keys: self.store.rows(Side::Keys, layer).cast(),
                values: self.store.rows(Side::Values, layer).cast(),
                capacity: self.store.shape.stored,
                index: RowIndex::Token,
            },
        }
    }

    /// Launches the projection of the queries to the space of the key codes.
    fn launch_project(&self, gpu: &Gpu, layer: usize, queries: DevicePtr<AnyElement>) -> Result<()> {
        let WindowShape { batch, heads, .. } = self.window.shape;
        let arguments = ProjectQueriesArguments {
            batch,
            heads,
            queries,
            maps: self.heads.map(Side::Values, layer),
            ranks: self.heads.ranks.pointer(),
            out: self.scratch.queries.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`; maps and ranks never change.
        unsafe { self.kernels.queries.launch(gpu, &arguments) }
    }
}

impl Kernels {
    fn new(gpu: &Gpu, config: &Config, element: Element, quantizers: Pair<PqShape>) -> Result<Self> {
        let (device, group, dim) = (&gpu.device, config.gqa_group(), config.head_dim);
        let vectors = match element {
            Element::F16 => VectorElement::F16,
            Element::Bf16 => VectorElement::Bf16,
        };
        let hybrid = HybridShape {
            keys: quantizers.keys,
            values: quantizers.values,
            group,
            element,
            rule: GroupRule::SumOfSoftmax,
            paged: false,
        };
        let encoder = |side: Side| {
            let quantizer = quantizers[side];
            Encode::new(device, EncodeShape { quantizer, side: side.into(), element: vectors, paged: false })
        };
        Ok(Self {
            hybrid: Hybrid::new(device, hybrid)?,
            queries: ProjectQueries::new(gpu, element, dim, group)?,
            keys: Project::new(device, ProjectShape { dim, rank: dim, element })?,
            encoders: Pair::try_of(encoder)?,
            layouts: Pair::try_of(|side| CodeLayout::new(quantizers[side], side.into()))?,
        })
    }
}

impl Heads {
    fn new(
        gpu: &Gpu,
        layouts: &Pair<CodeLayout>,
        config: &Config,
        heads: &[Vec<HybridHead>],
    ) -> Result<Self> {
        let all = || heads.iter().flatten();
        let codebooks = |side: Side| all().map(move |head| &head.codebooks[side]);
        Ok(Self {
            tables: Pair::try_of(|side| tables(gpu, &layouts[side], codebooks(side)))?,
            centroids: Pair::try_of(|side| {
                Buffer::of(gpu, &codebooks(side).flat_map(|book| book.centroids()).collect::<Vec<f32>>())
            })?,
            maps: Pair::try_of(|side| {
                Buffer::of(gpu, &all().flat_map(|head| head.maps[side].clone()).collect::<Vec<f32>>())
            })?,
            errors: Buffer::of(gpu, &all().flat_map(|head| head.key_errors.clone()).collect::<Vec<f32>>())?,
            ranks: Buffer::of(gpu, &vec![config.head_dim as u32; config.n_kv_heads])?,
        })
    }

    /// What a layer has of `len` elements a head.
    fn of_layer<T: Copy>(&self, all: &Buffer<T>, len: usize, layer: usize) -> DevicePtr<T> {
        all.pointer().offset(layer * self.ranks.len() * len)
    }

    /// Maps of a layer's keys, or its queries.
    fn map(&self, side: Side, layer: usize) -> DevicePtr<f32> {
        let layers = self.errors.len(); // times components of a head
        let dim = self.maps[side].len() / layers;
        self.of_layer(&self.maps[side], dim * dim, layer)
    }
}

impl DeviceCache for HybridCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn sinks(&self) -> usize {
        self.window.shape.sinks
    }

    fn ring(&self) -> usize {
        self.window.shape.ring
    }

    fn capacity(&self) -> usize {
        self.window.shape.capacity
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
            self.budget.launch(gpu, sequences)?;
        }
        self.launch_project(gpu, layer, queries)?;
        let WindowShape { batch, heads, head_dim, .. } = self.window.shape;
        let Rows { keys, values, capacity } = self.rows(layer);
        let lengths = sequences.exact_lengths.pointer();
        let layouts = &self.kernels.layouts;
        let table = |side| self.heads.of_layer(&self.heads.tables[side], layouts[side].table_len(), layer);
        let arguments = HybridArguments {
            batch,
            heads,
            tiles: self.tiles,
            key_codes: self.codes(Side::Keys, layer, 0),
            value_codes: self.codes(Side::Values, layer, 0),
            key_table: table(Side::Keys),
            value_table: table(Side::Values),
            key_errors: Some(self.heads.of_layer(&self.heads.errors, head_dim, layer)),
            queries,
            code_queries: Some(self.scratch.queries.pointer().cast()),
            lengths: sequences.coded_lengths.pointer(),
            pages: None,
            ks: self.budget.ks(),
            selected: self.scratch.selected.pointer(),
            selected_len: self.store.shape.most,
            rows: self.selected_rows(layer),
            exact: Some(ExactTokens { keys, values, lengths, capacity }),
            scale: 1.0 / (head_dim as f32).sqrt(),
            out,
            log_sum_exp: None,
            pdl: true,
            workspace: self.scratch.workspace.pointer(),
        };
        let selected = (self.scratch.selected.pointer(), self.budget.counts());
        // SAFETY: the buffers have the lengths of `new`; the decoder keeps lengths within the capacity, and
        // `most` tokens are the most of the budget. The projection precedes `select`, and writes neither tables
        // nor lengths nor k; `fetch` writes the rows of all selected tokens to their slots.
        unsafe {
            self.kernels.hybrid.select(gpu.stream(), &arguments)?;
            self.store.fetch(gpu, layer, selected, self.slots(layer))?;
            self.kernels.hybrid.attend(gpu.stream(), &arguments)?;
        }
        Ok(())
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.store.forget(gpu)?;
        self.turns.restart_at(gpu, 0)
    }

    fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Some(turn) = self.turns.begin(gpu, sequences)? else { return Ok(()) };
        turn.layers()
            .try_for_each(|layer| self.store.take_turn(gpu, layer, self.rows(layer), &self.turns))?;
        let stream = self.turns.background(gpu)?;
        turn.layers().try_for_each(|layer| self.encode_turn(stream, layer))?;
        self.turns.end(&turn)
    }

    fn encode_synchronously(&mut self) {
        self.turns.asynchronous = false;
    }

    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        self.store.fill_random(gpu, self.element)?;
        for side in Side::ALL {
            fill_codes(gpu, &self.codes[side], RANDOM_CODES + side as u32)?;
        }
        fill_rows(gpu, self.element, self.slots.pointer(), self.slots.len(), RANDOM_ROWS)?;
        self.store.forget(gpu)?;
        self.turns.restart_at(gpu, tokens)?;
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        let shape = self.window.shape;
        let rows = self.plan.budget.k(shape.stored(tokens), shape.sinks + shape.ring);
        self.footprint(tokens).kept + 4 * shape.n_layers * shape.side_len(rows)
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let shape = self.window.shape;
        let stored = shape.stored(tokens);
        let codes: usize =
            self.kernels.layouts.iter().map(|layout| stored.div_ceil(TILE) * layout.tile_len()).sum();
        Footprint {
            kept: shape.n_layers * shape.batch * shape.heads * codes + shape.exact_bytes(tokens),
            offloaded: 4 * shape.n_layers * shape.side_len(stored),
            working: self.store.staged_bytes() + self.slots.bytes(),
            shared: self.heads.bytes(),
        }
    }

    fn bytes(&self) -> usize {
        let codes: usize = self.codes.iter().map(Buffer::bytes).sum();
        self.window.bytes() + self.store.bytes() + self.slots.bytes() + codes + self.heads.bytes()
    }

    fn host_bytes(&self) -> usize {
        self.store.host_bytes()
    }

    fn fetched_rows(&self, gpu: &Gpu) -> Result<u64> {
        self.store.fetched(gpu)
    }

    fn force_hits(&mut self, share: f32) {
        self.store.force_hits(share);
    }
}

impl ChunkCache for HybridCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.turns.wait(gpu)?; // of the layer before, from the same rows
        let rows = self.window.open(gpu, layer, chunk)?;
        if layer == 0 {
            let (first, count) = self.window.shape.stored_by(chunk);
            self.span.write(gpu, &[first as u32, 0, 0, 0, count as u32, 0, 0, 0])?;
        }
        let stored = self.window.shape.stored(chunk.position);
        self.store.restore(gpu, layer, chunk.sequence, stored, rows)?;
        Ok(rows)
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let rows = self.window.past()?;
        let tokens = self.window.shape.stored_by(chunk);
        self.make_room_for_projected(gpu, tokens.1)?;
        let stream = self.turns.background(gpu)?;
        self.store.take_chunk(gpu, stream, layer, chunk, tokens, rows)?;
        self.encode_chunk(stream, layer, chunk, tokens)
    }

    fn settle(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        let sinks = self.window.shape.sinks;
        let encoded = lengths.iter().map(|length| length.saturating_sub(sinks));
        self.store.forget(gpu)?;
        self.turns.restart(gpu, &encoded.collect::<Vec<_>>())
    }
}

impl Heads {
    fn bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(Buffer::bytes).sum();
        let floats = [&self.centroids, &self.maps].into_iter().flat_map(Pair::iter).map(Buffer::bytes);
        tables + floats.sum::<usize>() + self.errors.bytes()
    }
}

/// Codes for timing: hashed codebooks and maps, the same for all heads of a layer.
fn random_heads(config: &Config, quantizers: Pair<PqShape>) -> Result<Vec<Vec<HybridHead>>> {
    let dim = config.head_dim;
    let layer = |layer: usize| -> Result<_> {
        let tensor = |first: u32, side: Side| first + 2 * layer as u32 + side as u32;
        let columns = |side| {
            let amplitude = (3.0 / dim as f32).sqrt();
            (0..(dim * dim) as u64).map(|i| hashed(tensor(RANDOM_MAPS, side), i, amplitude)).collect()
        };
        let head = |_| {
            let book = |side| random_codebook(quantizers[side], tensor(RANDOM_BOOKS, side));
            let (codebooks, maps) = (Pair::try_of(book)?, Pair::of(columns));
            Ok(HybridHead { codebooks, maps, key_errors: vec![0.0; dim] })
        };
        (0..config.n_kv_heads).map(head).collect()
    };
    (0..config.n_layers).map(layer).collect()
}
