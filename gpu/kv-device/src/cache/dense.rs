//! The cache of exact rows.

use kv_attend::owner::Footprint;
use kv_gpu::{AnyElement, DevicePtr, Element};

use super::full_rank::FullRank;
use super::{ChunkCache, StepCache};
use crate::Result;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_ROWS, fill_rows};
use crate::memory::Buffer;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;

/// Every token exact, in 16 bits.
pub(crate) struct DenseCache {
    attend: FullRank,
    element: Element,
    rows: Buffer<u16>, // (layer, keys and values, batch, heads, capacity, head_dim)
    batch: usize,
    heads: usize,
    head_dim: usize,
    n_layers: usize,
    capacity: usize,
}

impl DenseCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, shape: &CacheShape) -> Result<Self> {
        let &CacheShape { layers: n_layers, heads, head_dim, element, batch, capacity, .. } = shape;
        Ok(Self {
            attend: FullRank::new(gpu, shape, false)?,
            element,
            rows: Buffer::zeros(gpu, 2 * n_layers * batch * heads * capacity * head_dim)?,
            batch,
            heads,
            head_dim,
            n_layers,
            capacity,
        })
    }

    /// Elements of a layer's keys.
    fn side_len(&self) -> usize {
        self.batch * self.heads * self.capacity * self.head_dim
    }

    /// Bytes of the rows of `tokens` tokens in every sequence.
    pub(super) const fn bytes_of(&self, tokens: usize) -> usize {
        2 * size_of::<u16>() * self.n_layers * self.batch * self.heads * tokens * self.head_dim
    }

    /// Rows of a layer from a sequence on.
    pub(super) fn rows_of(&self, layer: usize, sequence: usize) -> Rows {
        let row = sequence * self.heads * self.capacity * self.head_dim;
        let side =
            |side: usize| self.rows.pointer().offset((2 * layer + side) * self.side_len() + row).cast();
        Rows { keys: side(0), values: side(1), capacity: self.capacity }
    }
}

impl StepCache for DenseCache {
    fn rows(&self, layer: usize) -> Rows {
        self.rows_of(layer, 0)
    }

    fn slot_mapping(&self) -> SlotMapping {
        SlotMapping { sinks: self.capacity, ring: 0, leaving: 1 }
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let (rows, lengths) = ((self.rows(layer), None), sequences.exact_lengths);
        // SAFETY: the buffers have the lengths of `new`, and lengths are at most the capacity, which the
        // caller checks. The preceding kernel writes queries and rows, but not lengths: `begin` has written
        // them.
        unsafe { self.attend.launch(gpu, rows, lengths, queries, out, None) }
    }

    fn clear(&mut self, _gpu: &Gpu) -> Result<()> {
        Ok(())
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        Footprint { kept: self.bytes_of(tokens), ..Footprint::default() }
    }

    fn bytes(&self) -> usize {
        self.rows.bytes()
    }
}

impl Timed for DenseCache {
    fn fill_random(&mut self, gpu: &Gpu, _tokens: usize) -> Result<()> {
        for (tensor, side) in (0..2 * self.n_layers).enumerate() {
            let at = self.rows.pointer().offset(side * self.side_len());
            fill_rows(gpu, self.element, at, self.side_len(), RANDOM_ROWS + tensor as u32)?;
        }
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.bytes_of(tokens)
    }
}

impl ChunkCache for DenseCache {
    fn chunk_rows(&mut self, _gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        Ok(self.rows_of(layer, chunk.sequence))
    }

    fn has_rows_of_all(&self) -> bool {
        true
    }

    fn append(&mut self, _gpu: &Gpu, _layer: usize, _chunk: &Chunk) -> Result<()> {
        Ok(()) // they have been written in place
    }

    fn set_lengths(&mut self, _gpu: &Gpu, _lengths: &[usize]) -> Result<()> {
        Ok(())
    }

    fn set_length(&mut self, _gpu: &Gpu, _sequence: usize, _length: usize) -> Result<()> {
        Ok(())
    }
}
