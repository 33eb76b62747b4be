mod past;

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};
use half::f16;
use kv_gpu::pq::{
    Attend, AttendArguments, AttendShape, CodeLayout, Encode, EncodeArguments, EncodeShape, ExactTokens, TILE,
};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, VectorElement};
use pq_core::{CodebookBuf, PqShape, Window};

use super::dense::{RANDOM_ROWS, fill_rows};
use super::{Chunk, ChunkCache, DeviceCache, Rows, Sequences};
use crate::device::memory::Buffer;
use crate::device::{Gpu, driver, hashed, programs};
use crate::model::Config;
use crate::side::{Pair, Side};
use crate::{Error, Result};
use past::Past;

/// The number of the hashed tensor that fills the codes, or the codebooks, of a layer's keys; the values' is
/// the next.
pub(super) const RANDOM_CODES: u32 = 2 << 16;
pub(super) const RANDOM_BOOKS: u32 = 3 << 16;

/// Bytes of shared memory that a block of `pq::Encode` takes at 64 subspaces, and what the driver reserves
/// for two blocks.
const ENCODE_SHARED_MEMORY: usize = (40 + 2) << 10;

/// MILLION: sinks and a ring of recent tokens exact, all tokens behind them as codes: `pq::Attend`.
///
/// A token's code is needed only once the ring has overwritten its row, so tokens are encoded ahead. Every
/// half ring, a layer copies the tokens that will be overwritten within a ring (`kernels/leaving.cu`) and
/// encodes them on the low-priority stream, while decoding goes on. Layers take turns, so that all steps have
/// about the same work. At every step exactly the last tokens of a ring's length are exact, as on the CPU
/// with a window of that length.
pub struct MillionCache {
    attend: Attend,
    encoders: Pair<Encode>,
    plan: Kernel,
    stage: Kernel,
    layouts: Pair<CodeLayout>,
    element: Element,
    rows: Buffer<u16>,       // (layer, keys and values, batch, heads, sinks + ring, head_dim)
    codes: Pair<Buffer<u8>>, // (layer, batch, heads, tiles, tile_len)
    tables: Pair<Buffer<f16>>, // (layer, heads, table_len)
    centroids: Pair<Buffer<f32>>, // (layer, heads, m, ksub, dsub)
    staged: Buffer<u16>,     // (layer, keys and values, batch, heads, ring, head_dim)
    planned: Buffer<u32>,    // (layer, batch)
    firsts: Buffer<u32>,     // (layer, batch)
    counts: Buffer<u32>,     // (layer, batch)
    workspace: Buffer<u8>,
    background: Arc<CudaStream>,
    /// Whether encoding runs on the low-priority stream; else decoding waits for it.
    pub asynchronous: bool,
    encoded: Vec<Option<CudaEvent>>, // for each turn, of the background stream
    steps: usize,
    past: Option<Past>, // from the first chunk of a prompt on
    shape: Shape,
}

/// Sizes of the cache.
#[derive(Clone, Copy)]
struct Shape {
    n_layers: usize,
    batch: usize,
    heads: usize,
    head_dim: usize,
    sinks: usize,
    ring: usize,
    capacity: usize,
    tiles: usize,
}

impl Shape {
    /// Elements of a layer's keys of `rows` rows a head.
    const fn side_len(&self, rows: usize) -> usize {
        self.batch * self.heads * rows * self.head_dim
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PlanArguments {
    positions: DevicePtr<u32>,
    planned: DevicePtr<u32>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    sequences: u32,
    sinks: u32,
    ring: u32,
    horizon: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct StageArguments {
    rows: DevicePtr<u16>,
    staged: DevicePtr<u16>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    sequences: u32,
    heads: u32,
    sinks: u32,
    ring: u32,
    most: u32,
    chunks: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FillWordsArguments {
    out: DevicePtr<u32>,
    n: u64,
    tensor: u32,
}

impl MillionCache {
    /// An empty cache; `codebooks` per layer and head, or hashed ones.
    ///
    /// # Errors
    /// [`Error::Argument`] for a window of an odd number of tokens, or none; [`Error::Device`].
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        gpu: &Gpu,
        config: &Config,
        element: Element,
        quantizers: Pair<PqShape>,
        codebooks: Option<Vec<Vec<Pair<CodebookBuf>>>>,
        window: Window,
        batch: usize,
        capacity: usize,
    ) -> Result<Self> {
        if window.recent < 2 || !window.recent.is_multiple_of(2) || window.batch > 1 {
            return Err(Error::argument(
                "on the device a window has an even number of tokens, which it leaves one by one (batch=1)",
            ));
        }
        let (heads, group, head_dim) = (config.n_kv_heads, config.gqa_group(), config.head_dim);
        let tiles = capacity.div_ceil(TILE).max(1);
        let (sinks, ring) = (window.sinks, window.recent);
        let n_layers = config.n_layers;
        let shape = Shape { n_layers, batch, heads, head_dim, sinks, ring, capacity, tiles };
        let attend =
            AttendShape { keys: quantizers.keys, values: quantizers.values, group, element, paged: false };
        let attend = Attend::new(&gpu.device, attend)?;
        let vectors = match element {
            Element::F16 => VectorElement::F16,
            Element::Bf16 => VectorElement::Bf16,
        };
        let encoders = Pair::try_of(|side| {
            let shape = EncodeShape {
                quantizer: quantizers[side],
                side: side.into(),
                element: vectors,
                paged: false,
            };
            Encode::new(&gpu.device, shape)
        })?;
        let layouts = Pair::try_of(|side| CodeLayout::new(quantizers[side], side.into()))?;
        let codebooks = match codebooks {
            Some(codebooks) => codebooks,
            None => random_codebooks(n_layers, heads, quantizers)?,
        };
        let tables = Pair::try_of(|side| tables(gpu, &layouts[side], side, &codebooks))?;
        let centroids = Pair::try_of(|side| {
            let books = codebooks.iter().flatten().flat_map(|pair| pair[side].centroids());
            Buffer::of(gpu, &books.collect::<Vec<f32>>())
        })?;
        let leaving = programs::leaving();
        let words = |n| Buffer::<u32>::zeros(gpu, n);
        let device = &gpu.device;
        let cache = Self {
            plan: device.kernel(&leaving, "plan", 0)?,
            stage: device.kernel(&leaving, "stage", 0)?,
            rows: Buffer::zeros(gpu, 2 * n_layers * shape.side_len(sinks + ring))?,
            codes: Pair::try_of(|side| {
                Buffer::zeros(gpu, n_layers * batch * heads * tiles * layouts[side].tile_len())
            })?,
            tables,
            centroids,
            staged: Buffer::zeros(gpu, 2 * n_layers * shape.side_len(ring))?,
            planned: words(n_layers * batch)?,
            firsts: words(n_layers * batch)?,
            counts: words(n_layers * batch)?,
            workspace: Buffer::zeros(gpu, attend.workspace_len(batch, heads))?,
            background: device.background_stream()?,
            asynchronous: true,
            encoded: (0..ring / 2).map(|_| None).collect(),
            steps: 0,
            past: None,
            attend,
            encoders,
            layouts,
            element,
            shape,
        };
        gpu.synchronize()?; // the tables are copied
        Ok(cache)
    }

    /// Codes of a layer.
    fn codes(&self, side: Side, layer: usize) -> DevicePtr<u8> {
        let Shape { batch, heads, tiles, .. } = self.shape;
        self.codes[side].pointer().offset(layer * batch * heads * tiles * self.layouts[side].tile_len())
    }

    fn table(&self, side: Side, layer: usize) -> DevicePtr<f16> {
        self.tables[side].pointer().offset(layer * self.shape.heads * self.layouts[side].table_len())
    }

    /// Codebooks of a layer.
    fn centroids_of(&self, side: Side, layer: usize) -> DevicePtr<f32> {
        let codebook = self.layouts[side].shape().codebook_len();
        self.centroids[side].pointer().offset(layer * self.shape.heads * codebook)
    }

    /// Encodes the staged tokens of a layer.
    fn encode(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, ring, tiles, .. } = self.shape;
        for side in Side::ALL {
            let staged = (2 * layer + side as usize) * self.shape.side_len(ring);
            let arguments = EncodeArguments {
                batch,
                heads,
                max_count: ring,
                vectors: self.staged.pointer().offset(staged).cast(),
                strides: [heads * ring * head_dim, ring * head_dim, head_dim],
                centroids: self.centroids_of(side, layer),
                firsts: self.firsts.pointer().offset(layer * batch),
                counts: self.counts.pointer().offset(layer * batch),
                codes: self.codes(side, layer),
                tiles,
                pages: None,
            };
            // SAFETY: the buffers have the lengths of `new`. The plan counts at most a ring of tokens, whose
            // codes fit since they come before tokens that fit. Attention reads only codes before `firsts`
            // until the layer's next turn, which waits for this.
            unsafe { self.encoders[side].launch(stream.cu_stream(), &arguments) }?;
        }
        Ok(())
    }

    /// Copies the tokens of a layer that the ring will overwrite, as far as they are not copied yet.
    fn stage(&self, gpu: &Gpu, sequences: &Sequences, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, sinks, ring, .. } = self.shape;
        let of_layer = |words: &Buffer<u32>| words.pointer().offset(layer * batch);
        let plan = PlanArguments {
            positions: sequences.positions.pointer(),
            planned: of_layer(&self.planned),
            firsts: of_layer(&self.firsts),
            counts: of_layer(&self.counts),
            sequences: batch as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            horizon: ring as u32,
        };
        let stage = StageArguments {
            rows: self.rows.pointer().offset(2 * layer * self.shape.side_len(sinks + ring)),
            staged: self.staged.pointer().offset(2 * layer * self.shape.side_len(ring)),
            firsts: plan.firsts,
            counts: plan.counts,
            sequences: batch as u32,
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            most: ring as u32,
            chunks: (head_dim / 8) as u32,
        };
        // SAFETY: the structures are the kernels' arguments, and the buffers have the lengths of `new`. The
        // background stream no longer reads what these write: the event of the layer's last turn has been
        // waited for.
        unsafe {
            self.plan.launch(gpu.stream(), Grid::new([1, 1, 1])?, 32, false, &plan)?;
            self.stage.launch(gpu.stream(), Grid::new([heads, batch, 2])?, 256, false, &stage)?;
        }
        Ok(())
    }

    /// Encodes what leaves the rings of the layers whose turn it is.
    fn take_turn(&mut self, gpu: &Gpu, sequences: &Sequences, turn: usize) -> Result<()> {
        let stream = &gpu.stream;
        if let Some(encoded) = self.encoded[turn].take() {
            stream.wait(&encoded).map_err(|e| driver("wait for codes", e))?;
        }
        let layers = || (turn..self.shape.n_layers).step_by(self.encoded.len());
        layers().try_for_each(|layer| self.stage(gpu, sequences, layer))?;
        if !self.asynchronous {
            return layers().try_for_each(|layer| self.encode(stream, layer));
        }
        let staged = stream.record_event(None).map_err(|e| driver("record staged tokens", e))?;
        self.background.wait(&staged).map_err(|e| driver("wait for staged tokens", e))?;
        layers().try_for_each(|layer| self.encode(&self.background, layer))?;
        let encoded = self.background.record_event(None);
        self.encoded[turn] = Some(encoded.map_err(|e| driver("record codes", e))?);
        Ok(())
    }
}

impl DeviceCache for MillionCache {
    fn rows(&self, layer: usize) -> Rows {
        let capacity = self.shape.sinks + self.shape.ring;
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
        let Rows { keys, values, capacity } = self.rows(layer);
        let lengths = sequences.exact_lengths.pointer();
        let arguments = AttendArguments {
            batch: self.shape.batch,
            heads: self.shape.heads,
            tiles: self.shape.tiles,
            key_codes: self.codes(Side::Keys, layer),
            value_codes: self.codes(Side::Values, layer),
            key_table: self.table(Side::Keys, layer),
            value_table: self.table(Side::Values, layer),
            queries,
            lengths: sequences.coded_lengths.pointer(),
            pages: None,
            exact: Some(ExactTokens { keys, values, lengths, capacity }),
            scale: 1.0 / (self.shape.head_dim as f32).sqrt(),
            out,
            log_sum_exp: None,
            pdl: true,
            workspace: self.workspace.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`; the decoder keeps lengths within the capacity. The
        // kernel before this one writes queries and rows, which are read after the PDL wait, and neither
        // tables nor lengths.
        Ok(unsafe { self.attend.launch(gpu.stream(), &arguments) }?)
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.settle(gpu, &vec![0; self.shape.batch])
    }

    fn chunks(&mut self) -> Option<&mut dyn ChunkCache> {
        Some(self)
    }

    fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let turn = self.steps % self.encoded.len();
        self.steps += 1;
        if turn < self.shape.n_layers { self.take_turn(gpu, sequences, turn) } else { Ok(()) }
    }

    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        let Shape { n_layers, batch, sinks, ring, .. } = self.shape;
        let len = self.shape.side_len(sinks + ring);
        for side in 0..2 * n_layers {
            fill_rows(
                gpu,
                self.element,
                self.rows.pointer().offset(side * len),
                len,
                RANDOM_ROWS + side as u32,
            )?;
        }
        for side in Side::ALL {
            fill_codes(gpu, &self.codes[side], RANDOM_CODES + side as u32)?;
        }
        // As if every layer had had its last turn just now.
        let planned = (tokens + ring / 2).saturating_sub(sinks + ring);
        self.planned.write(gpu, &vec![planned as u32; n_layers * batch])?;
        self.steps = 0;
        gpu.synchronize()
    }

    fn background_shared_memory(&self) -> usize {
        if self.asynchronous { ENCODE_SHARED_MEMORY } else { 0 }
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        let Shape { n_layers, batch, heads, sinks, ring, .. } = self.shape;
        let exact = tokens.min(sinks + ring);
        let tiles = (tokens - exact).div_ceil(TILE);
        let codes: usize = self.layouts.iter().map(|layout| tiles * layout.tile_len()).sum();
        n_layers * (batch * heads * codes + 4 * self.shape.side_len(exact))
    }

    fn bytes(&self) -> usize {
        let past = self.past.as_ref().map_or(0, |past| past.rows.bytes());
        let codes: usize = self.codes.iter().map(Buffer::bytes).sum();
        self.rows.bytes() + self.staged.bytes() + codes + past
    }
}

impl ChunkCache for MillionCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.rows_before(gpu, layer, chunk)
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.take(gpu, layer, chunk)
    }

    fn settle(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.wait_for_codes(gpu)?;
        self.encoded.iter_mut().for_each(|encoded| *encoded = None);
        let planned = lengths.iter().map(|length| length.saturating_sub(self.shape.sinks) as u32);
        self.planned.write(gpu, &planned.collect::<Vec<u32>>().repeat(self.shape.n_layers))
    }
}

/// The tables of every layer and head.
fn tables(
    gpu: &Gpu,
    layout: &CodeLayout,
    side: Side,
    codebooks: &[Vec<Pair<CodebookBuf>>],
) -> Result<Buffer<f16>> {
    let mut all = vec![];
    for pair in codebooks.iter().flatten() {
        let mut table = vec![f16::ZERO; layout.table_len()];
        layout.table_into(&pair[side].view(), &mut table)?;
        all.extend(table);
    }
    Buffer::of(gpu, &all)
}

/// Fills codes with hashed ones.
pub(super) fn fill_codes(gpu: &Gpu, codes: &Buffer<u8>, tensor: u32) -> Result<()> {
    let kernel = gpu.device.kernel(&programs::weights(0), "fill_words", 0)?;
    let (out, n) = (codes.pointer().cast(), (codes.len() / 4) as u64);
    let arguments = FillWordsArguments { out, n, tensor };
    // SAFETY: a quarter as many words as there are bytes, which are whole words.
    Ok(unsafe { kernel.launch(gpu.stream(), Grid::new([1024, 1, 1])?, 256, false, &arguments) }?)
}

/// A codebook for timing: centroids that are hashed, of variance 1.
pub(super) fn random_codebook(quantizer: PqShape, tensor: u32) -> Result<CodebookBuf> {
    let centroids = (0..quantizer.codebook_len() as u64).map(|i| hashed(tensor, i, 3.0_f32.sqrt()));
    Ok(CodebookBuf::new(quantizer, &centroids.collect::<Vec<f32>>())?)
}

/// Codebooks for timing, the same for all heads of a layer.
fn random_codebooks(
    n_layers: usize,
    heads: usize,
    quantizers: Pair<PqShape>,
) -> Result<Vec<Vec<Pair<CodebookBuf>>>> {
    let layer = |layer: usize| -> Result<_> {
        let tensor = |side: Side| RANDOM_BOOKS + 2 * layer as u32 + side as u32;
        let pair = Pair::try_of(|side| random_codebook(quantizers[side], tensor(side)))?;
        Ok(vec![pair; heads])
    };
    (0..n_layers).map(layer).collect()
}
