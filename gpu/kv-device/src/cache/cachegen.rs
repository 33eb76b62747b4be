//! CacheGen on a device: rows that leave the window become bits and rows again.

mod codec;

use std::sync::Arc;

use codec_core::{FitOptions, PlaneBuf, PredictorKind, Steps, TransformBuf};
use kv_attend::owner::{Footprint, Pair};
use kv_gpu::{AnyElement, DevicePtr};
use pq_core::Window;

use super::dense::DenseCache;
use super::{ChunkCache, StepCache};
use crate::gpu::Gpu;
use crate::hashed::hashed;
use crate::plan::Bitstream;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;
use crate::{Error, Result};
use codec::{Codec, Span};

/// CacheGen: the rows of all tokens, as in [`DenseCache`]. The rows of tokens that leave the window are
/// replaced by their reconstruction: they are encoded to a bitstream, which is decoded (`Codec`).
///
/// Tokens leave the window as on the CPU, `batch` of them before the step whose token evicts them. The host
/// launches the codec, so it must know the positions of all sequences: it counts steps, and reads the
/// positions when tokens may leave.
pub(crate) struct CacheGenCache {
    dense: DenseCache,
    codec: Codec,
    window: Window,
    coded: Vec<usize>,    // coded tokens after the sinks, of each sequence
    furthest: Vec<usize>, // position of the next token of each sequence, which may have ended before it
    stream_bytes: usize,  // of all frames, including those of ended sequences
    planes_bytes: usize,
    n_layers: usize,
}

impl CacheGenCache {
    /// An empty cache, with planes of every layer.
    ///
    /// # Errors
    /// [`Error::Argument`] for a window without a token: the last one stays exact until the next one;
    /// [`Error::Gpu`], also for planes that the device cannot encode.
    pub fn new(gpu: &Gpu, shape: &CacheShape, planes: &[Pair<PlaneBuf>]) -> Result<Self> {
        let &CacheShape { layers: n_layers, window, batch, .. } = shape;
        if window.recent == 0 {
            return Err(Error::argument("a window of no tokens"));
        }
        let dense = DenseCache::new(gpu, shape)?;
        Ok(Self {
            codec: Codec::new(gpu, shape, planes, &dense)?,
            dense,
            window,
            coded: vec![0; batch],
            furthest: vec![0; batch],
            stream_bytes: 0,
            planes_bytes: planes.iter().flat_map(Pair::iter).map(|plane| plane.to_bytes().len()).sum(),
            n_layers,
        })
    }

    /// Coded tokens after the sinks in a sequence of `tokens`.
    const fn coded_of(&self, tokens: usize) -> usize {
        self.window.to_evict(tokens.saturating_sub(self.window.sinks))
    }

    /// Codes tokens after the sinks.
    fn code(&mut self, gpu: &Gpu, span: Span) -> Result<()> {
        let sinks = self.window.sinks;
        let tokens = sinks + span.tokens.start..sinks + span.tokens.end;
        self.codec.code(gpu, &Span { tokens, ..span })
    }

    /// Adds up the bits coded so far. Waits for them.
    fn count_bits(&mut self, gpu: &Gpu) -> Result<()> {
        self.stream_bytes += self.codec.finish(gpu)?;
        Ok(())
    }

    /// Restarts with sequences of these lengths, whose tokens outside the window are all coded.
    fn restart(&mut self, lengths: &[usize]) {
        lengths.iter().enumerate().for_each(|(sequence, &length)| self.place(sequence, length));
    }

    /// Sets one sequence to this length, with all tokens outside the window coded.
    fn place(&mut self, sequence: usize, length: usize) {
        self.coded[sequence] = self.coded_of(length);
        self.furthest[sequence] = length;
    }
}

/// Planes of hashed rows for every layer, with bins of half a deviation, for timing.
pub(crate) fn hashed_planes(shape: &CacheShape, bitstream: &Bitstream) -> Result<Vec<Pair<PlaneBuf>>> {
    const TOKENS: usize = 256;
    let (channels, dim) = (shape.kv_dim(), shape.head_dim);
    let identity: Vec<f32> =
        (0..channels * dim).map(|i| f32::from(u8::from(i / dim % dim == i % dim))).collect();
    let transform = bitstream.has_transform.then(|| TransformBuf::new(dim, identity.clone(), identity));
    let transform = transform.transpose()?.map(Arc::new);
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: bitstream.models,
        ..FitOptions::default()
    };
    let plane = |side| {
        let rows: Vec<f32> =
            (0..(TOKENS * channels) as u64).map(|i| hashed(side as u32, i, 3.0_f32.sqrt())).collect();
        PlaneBuf::fit(&rows, channels, transform.clone(), &options)
    };
    Ok(vec![Pair::try_of(plane)?; shape.layers])
}

impl StepCache for CacheGenCache {
    fn rows(&self, layer: usize) -> Rows {
        self.dense.rows(layer)
    }

    fn slot_mapping(&self) -> SlotMapping {
        self.dense.slot_mapping()
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.dense.attend(gpu, layer, sequences, queries, out) }
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.restart(&vec![0; self.coded.len()]);
        self.stream_bytes = 0;
        self.dense.clear(gpu)
    }

    fn end(&mut self, _gpu: &Gpu, sequence: usize) -> Result<()> {
        self.place(sequence, 0);
        Ok(())
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let leaves = |(position, coded): (&usize, &usize)| self.coded_of(position + 1) > *coded;
        if self.furthest.iter().zip(&self.coded).any(leaves) {
            // SAFETY: the caller's contract.
            self.furthest = unsafe { sequences.read_positions(gpu, self.furthest.len()) }?;
            for sequence in 0..self.furthest.len() {
                let (first, end) = (self.coded[sequence], self.coded_of(self.furthest[sequence] + 1));
                if first < end {
                    self.code(gpu, Span { sequence, layers: 0..self.n_layers, tokens: first..end })?;
                    self.coded[sequence] = end;
                }
            }
            self.count_bits(gpu)?;
        }
        self.furthest.iter_mut().for_each(|position| *position += 1);
        Ok(())
    }

    /// Coded bits count as kept, and the rows decoded from them as working memory.
    fn footprint(&self, tokens: usize) -> Footprint {
        let decoded = self.dense.bytes_of(self.coded_of(tokens));
        Footprint {
            kept: self.stream_bytes + self.dense.bytes_of(tokens) - decoded,
            working: decoded,
            shared: self.planes_bytes,
            ..Footprint::default()
        }
    }

    fn bytes(&self) -> usize {
        self.dense.bytes() + self.codec.bytes()
    }
}

impl Timed for CacheGenCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.restart(&vec![tokens; self.coded.len()]);
        self.dense.fill_random(gpu, tokens)
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.dense.step_bytes(tokens)
    }
}

impl ChunkCache for CacheGenCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.dense.chunk_rows(gpu, layer, chunk)
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        let tokens = self.coded_of(chunk.position)..self.coded_of(chunk.end());
        self.code(gpu, Span { sequence: chunk.sequence, layers: layer..layer + 1, tokens })
    }

    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.restart(lengths);
        self.count_bits(gpu)
    }

    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.place(sequence, length);
        self.count_bits(gpu)
    }
}
