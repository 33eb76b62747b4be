mod past;

use cudarc::driver::CudaStream;
use half::f16;
use kv_gpu::pq::{
    Attend, AttendArguments, AttendShape, CodeLayout, Encode, EncodeArguments, EncodeShape, ExactTokens, TILE,
};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, VectorElement};
use pq_core::{CodebookBuf, PqShape};

use super::turns::Turns;
use super::window::{Window, WindowShape};
use super::{Chunk, ChunkCache, DeviceCache, Rows, Sequences};
use crate::Result;
use crate::cache::Footprint;
use crate::device::memory::Buffer;
use crate::device::{Gpu, hashed, programs};
use crate::model::Config;
use crate::side::{Pair, Side};
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
/// Tokens are encoded before the ring overwrites their rows (`Turns`): a turn copies them
/// (`kernels/leaving.cu`), so that the ring goes on meanwhile. At every step exactly the last tokens of a
/// ring's length are exact, as on the CPU with a window of that length.
pub struct MillionCache {
    attend: Attend,
    encoders: Pair<Encode>,
    stage: Kernel,
    layouts: Pair<CodeLayout>,
    element: Element,
    window: Window,
    turns: Turns,
    codes: Pair<Buffer<u8>>,      // (layer, batch, heads, tiles, tile_len)
    tables: Pair<Buffer<f16>>,    // (layer, heads, table_len)
    centroids: Pair<Buffer<f32>>, // (layer, heads, m, ksub, dsub)
    staged: Buffer<u16>,          // (layer, keys and values, batch, heads, ring, head_dim)
    workspace: Buffer<u8>,
    tiles: usize,       // of a head
    past: Option<Past>, // from the first chunk of a prompt on
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
        window: pq_core::Window,
        batch: usize,
        capacity: usize,
    ) -> Result<Self> {
        let (n_layers, group) = (config.n_layers, config.gqa_group());
        let (heads, tiles) = (config.n_kv_heads, capacity.div_ceil(TILE).max(1));
        let turns = Turns::new(gpu, n_layers, batch, window)?;
        let shape = WindowShape::new(config, window, batch, capacity);
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
        let books = |side: Side| codebooks.iter().flatten().map(move |pair| &pair[side]);
        let tables = Pair::try_of(|side| tables(gpu, &layouts[side], books(side)))?;
        let centroids = Pair::try_of(|side| {
            Buffer::of(gpu, &books(side).flat_map(CodebookBuf::centroids).collect::<Vec<f32>>())
        })?;
        let cache = Self {
            stage: gpu.device.kernel(&programs::leaving(), "stage", 0)?,
            window: Window::new(gpu, shape)?,
            turns,
            codes: Pair::try_of(|side| {
                Buffer::zeros(gpu, n_layers * batch * heads * tiles * layouts[side].tile_len())
            })?,
            tables,
            centroids,
            staged: Buffer::zeros(gpu, 2 * n_layers * shape.side_len(shape.ring))?,
            workspace: Buffer::zeros(gpu, attend.workspace_len(batch, heads))?,
            tiles,
            past: None,
            attend,
            encoders,
            layouts,
            element,
        };
        gpu.synchronize()?; // the tables are copied
        Ok(cache)
    }

    /// Codes of a layer.
    fn codes(&self, side: Side, layer: usize) -> DevicePtr<u8> {
        let WindowShape { batch, heads, .. } = self.window.shape;
        self.codes[side].pointer().offset(layer * batch * heads * self.tiles * self.layouts[side].tile_len())
    }

    fn table(&self, side: Side, layer: usize) -> DevicePtr<f16> {
        self.tables[side].pointer().offset(layer * self.window.shape.heads * self.layouts[side].table_len())
    }

    /// Codebooks of a layer.
    fn centroids_of(&self, side: Side, layer: usize) -> DevicePtr<f32> {
        let codebook = self.layouts[side].shape().codebook_len();
        self.centroids[side].pointer().offset(layer * self.window.shape.heads * codebook)
    }

    /// Encodes the staged tokens of a layer.
    fn encode(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let WindowShape { batch, heads, head_dim, ring, .. } = self.window.shape;
        for side in Side::ALL {
            let staged = (2 * layer + side as usize) * self.window.shape.side_len(ring);
            let arguments = EncodeArguments {
                batch,
                heads,
                max_count: ring,
                vectors: self.staged.pointer().offset(staged).cast(),
                strides: [heads * ring * head_dim, ring * head_dim, head_dim],
                centroids: self.centroids_of(side, layer),
                firsts: self.turns.firsts(layer),
                counts: self.turns.counts(layer),
                codes: self.codes(side, layer),
                tiles: self.tiles,
                pages: None,
            };
            // SAFETY: the buffers have the lengths of `new`. The plan counts at most a ring of tokens, whose
            // codes fit since they come before tokens that fit. Attention reads only codes before `firsts`
            // until the layer's next turn, which waits for this.
            unsafe { self.encoders[side].launch(stream.cu_stream(), &arguments) }?;
        }
        Ok(())
    }

    /// Copies the tokens of a layer whose turn it is.
    fn stage(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let WindowShape { batch, heads, head_dim, sinks, ring, .. } = self.window.shape;
        let stage = StageArguments {
            rows: self.window.rows(layer).keys.cast(),
            staged: self.staged.pointer().offset(2 * layer * self.window.shape.side_len(ring)),
            firsts: self.turns.firsts(layer),
            counts: self.turns.counts(layer),
            sequences: batch as u32,
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            most: ring as u32,
            chunks: (head_dim / 8) as u32,
        };
        let grid = Grid::new([heads, batch, 2])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The
        // background stream no longer reads what this writes: the layer's last turn has been waited for.
        Ok(unsafe { self.stage.launch(gpu.stream(), grid, 256, false, &stage) }?)
    }
}

impl DeviceCache for MillionCache {
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
        let Rows { keys, values, capacity } = self.rows(layer);
        let lengths = sequences.exact_lengths.pointer();
        let arguments = AttendArguments {
            batch: self.window.shape.batch,
            heads: self.window.shape.heads,
            tiles: self.tiles,
            key_codes: self.codes(Side::Keys, layer),
            value_codes: self.codes(Side::Values, layer),
            key_table: self.table(Side::Keys, layer),
            value_table: self.table(Side::Values, layer),
            queries,
            lengths: sequences.coded_lengths.pointer(),
            pages: None,
            exact: Some(ExactTokens { keys, values, lengths, capacity }),
            scale: 1.0 / (self.window.shape.head_dim as f32).sqrt(),
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
        self.turns.restart_at(gpu, 0)
    }

    fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Some(turn) = self.turns.begin(gpu, sequences)? else { return Ok(()) };
        turn.layers().try_for_each(|layer| self.stage(gpu, layer))?;
        let stream = self.turns.background(gpu)?;
        turn.layers().try_for_each(|layer| self.encode(stream, layer))?;
        self.turns.end(&turn)
    }

    fn encode_synchronously(&mut self) {
        self.turns.asynchronous = false;
    }

    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        for side in Side::ALL {
            fill_codes(gpu, &self.codes[side], RANDOM_CODES + side as u32)?;
        }
        self.turns.restart_at(gpu, tokens)?;
        gpu.synchronize()
    }

    fn background_shared_memory(&self) -> usize {
        if self.turns.asynchronous { ENCODE_SHARED_MEMORY } else { 0 }
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.footprint(tokens).kept
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let shape = self.window.shape;
        let tiles = shape.stored(tokens).div_ceil(TILE);
        let codes: usize = self.layouts.iter().map(|layout| tiles * layout.tile_len()).sum();
        let tables: usize = self.tables.iter().map(Buffer::bytes).sum();
        let centroids: usize = self.centroids.iter().map(Buffer::bytes).sum();
        Footprint {
            kept: shape.n_layers * shape.batch * shape.heads * codes + shape.exact_bytes(tokens),
            working: self.staged.bytes(),
            shared: tables + centroids,
            ..Footprint::default()
        }
    }

    fn bytes(&self) -> usize {
        let codes: usize = self.codes.iter().map(Buffer::bytes).sum();
        self.window.bytes() + self.staged.bytes() + codes
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
        let sinks = self.window.shape.sinks;
        let encoded = lengths.iter().map(|length| length.saturating_sub(sinks));
        self.turns.restart(gpu, &encoded.collect::<Vec<_>>())
    }
}

/// The tables of codebooks.
pub(super) fn tables<'a>(
    gpu: &Gpu,
    layout: &CodeLayout,
    codebooks: impl Iterator<Item = &'a CodebookBuf>,
) -> Result<Buffer<f16>> {
    let mut all = vec![];
    for codebook in codebooks {
        let mut table = vec![f16::ZERO; layout.table_len()];
        layout.table_into(&codebook.view(), &mut table)?;
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
