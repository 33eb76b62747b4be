//! Means of keys that codes leave out, and their part of the scores.

use half::f16;
use kv_gpu::pq::{Addends, RopeMeanScores, RopeMeanScoresArguments, RopeMeanScoresShape, TILE};
use kv_gpu::{AnyElement, DevicePtr};

use super::window::WindowShape;
use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::rows::Sequences;
use crate::shape::CacheShape;

/// The means of keys before RoPE, less which rotated keys are coded, and what they add to the scores of coded
/// tokens.
pub(crate) struct KeyMeans {
    scores: RopeMeanScores,
    means: Buffer<f32>,       // (layer, heads, head_dim), in the model's basis
    frequencies: Buffer<f32>, // (head_dim / 2,): radians a position
    addends: Buffer<f16>,     // (batch, heads, tiles, group, TILE): of one layer after the other
    tiles: usize,             // of a sequence
    shape: WindowShape,
}

impl KeyMeans {
    /// Means (layer, heads, head_dim).
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, shape: &CacheShape, means: &[f32]) -> Result<Self> {
        let &CacheShape { batch, heads, head_dim: dim, group, element, capacity, .. } = shape;
        let frequencies: Vec<f32> = shape.frequencies.iter().map(|&radians| radians as f32).collect();
        let tiles = capacity.div_ceil(TILE).max(1);
        Ok(Self {
            scores: RopeMeanScores::new(&gpu.device, RopeMeanScoresShape { dim, group, element })?,
            means: Buffer::of(gpu, means)?,
            frequencies: Buffer::of(gpu, &frequencies)?,
            addends: Buffer::zeros(gpu, batch * heads * tiles * group * TILE)?,
            tiles,
            shape: WindowShape::new(shape),
        })
    }

    /// Means of a layer, (heads, head_dim).
    pub fn of(&self, layer: usize) -> DevicePtr<f32> {
        self.means.pointer().offset(layer * self.shape.heads * self.shape.head_dim)
    }

    /// Radians a position, (head_dim / 2,).
    pub fn frequencies(&self) -> DevicePtr<f32> {
        self.frequencies.pointer()
    }

    /// Launches what a layer's means add to the scores of rotated queries (batch, n_heads, head_dim), which
    /// are in the model's basis still.
    ///
    /// # Safety
    /// As [`DeviceCache::attend`](super::DeviceCache::attend).
    pub unsafe fn launch(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let WindowShape { batch, heads, head_dim, sinks, .. } = self.shape;
        let arguments = RopeMeanScoresArguments {
            batch,
            heads,
            tiles: self.tiles,
            means: self.of(layer),
            frequencies: self.frequencies(),
            first: sinks,
            queries,
            lengths: sequences.coded_lengths,
            scale: 1.0 / (head_dim as f32).sqrt(),
            addends: self.addends.pointer(),
            pdl: true,
        };
        // SAFETY: the buffers have the lengths of `new`; the caller keeps lengths within the capacity. The
        // kernel before this one writes queries, and not means, frequencies or lengths.
        Ok(unsafe { self.scores.launch(gpu.stream(), &arguments) }?)
    }

    /// What [`Self::launch`] has written.
    pub fn addends(&self) -> Addends {
        Addends { values: self.addends.pointer(), tiles: self.tiles }
    }

    /// Bytes of what steps write.
    pub const fn working_bytes(&self) -> usize {
        self.addends.bytes()
    }

    /// Bytes of means and frequencies.
    pub const fn shared_bytes(&self) -> usize {
        self.means.bytes() + self.frequencies.bytes()
    }
}
