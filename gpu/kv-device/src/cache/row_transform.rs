//! What an engine applies to rotated queries and keys for a cache in another basis.

use kv_gpu::DevicePtr;

use super::key_means::KeyMeans;
use crate::Result;
use crate::bases::{Bases, Place, TurnedRows};
use crate::gpu::Gpu;
use crate::rows::{Chunk, Rows, Sequences};

/// The bases in which a cache takes rotated queries and keys: what an engine applies to them after RoPE.
#[derive(Clone, Copy)]
pub struct RowTransform<'a> {
    pub(crate) bases: &'a Bases,
    /// Means less which keys are coded. A step computes their part of the scores before queries leave the
    /// model's basis.
    pub(crate) means: Option<&'a KeyMeans>,
}

impl RowTransform<'_> {
    /// Launches the transform of a step's rotated queries (batch, n_heads, head_dim), and of the keys in the
    /// rows of a layer, the `slots`, `u32` (batch,), of all rows of its first head.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    /// # Safety
    /// As [`DeviceCache::attend`](crate::DeviceCache::attend); the rows at the slots are written.
    pub unsafe fn step(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<u16>,
        rows: &Rows,
        (slots, batch): (DevicePtr<u32>, usize),
    ) -> Result<()> {
        if let Some(means) = self.means {
            // SAFETY: the caller's contract.
            unsafe { means.launch(gpu, layer, sequences, queries.cast()) }?;
        }
        let (keys, capacity) = (rows.keys, rows.capacity);
        let rows = TurnedRows { queries, keys, capacity, tokens: batch, place: Place::Slots(slots) };
        // SAFETY: the caller's contract.
        unsafe { self.bases.turn(gpu, layer, &rows) }
    }

    /// Launches the transform of a chunk's rotated queries (count, n_heads, head_dim), and of its keys in the
    /// rows of [`DeviceCache::chunk_rows`](crate::DeviceCache::chunk_rows).
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds; the chunk's keys are written.
    pub unsafe fn chunk(
        &self,
        gpu: &Gpu,
        layer: usize,
        chunk: &Chunk,
        queries: DevicePtr<u16>,
        rows: &Rows,
    ) -> Result<()> {
        let (keys, capacity) = (rows.keys, rows.capacity);
        let place = Place::From(chunk.position);
        let rows = TurnedRows { queries, keys, capacity, tokens: chunk.count, place };
        // SAFETY: the caller's contract.
        unsafe { self.bases.turn(gpu, layer, &rows) }
    }
}
