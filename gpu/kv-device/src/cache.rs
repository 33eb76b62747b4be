//! KV caches on a device, one file each, and what all of them do.

pub(crate) mod cachegen;
pub(crate) mod codes;
pub(crate) mod dense;
pub(crate) mod eviction;
mod full_rank;
pub(crate) mod hybrid;
pub(crate) mod int4;
mod key_means;
pub(crate) mod merge;
pub(crate) mod million;
pub(crate) mod paged;
mod pages;
pub(crate) mod pqcache;
mod prompt_rows;
pub(crate) mod row_store;
pub(crate) mod row_transform;
mod span;
pub(crate) mod sq;
mod step_budget;
pub(crate) mod transformed;
mod window;
pub(crate) mod zack;

use kv_attend::owner::Footprint;
use kv_gpu::pq::{Pages, Prefetch};
use kv_gpu::{AnyElement, DevicePtr};

use crate::Result;
use crate::gpu::Gpu;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::timed::Timed;
use row_transform::RowTransform;

/// A cache of a plan: `DeviceCache` checks the arguments of all calls and documents them.
pub(crate) trait Cache: StepCache + ChunkCache + Timed {}

impl<T: StepCache + ChunkCache + Timed> Cache for T {}

/// What steps need of a cache.
pub(crate) trait StepCache {
    fn rows(&self, layer: usize) -> Rows;

    fn slot_mapping(&self) -> SlotMapping;

    fn pages(&self) -> Option<Pages> {
        None
    }

    fn transform(&self) -> Option<RowTransform<'_>> {
        None
    }

    /// # Safety
    /// As `DeviceCache::turn_stored`.
    unsafe fn turn_stored(&self, gpu: &Gpu, layer: usize, chunk: &Chunk, rows: &Rows) -> Result<()> {
        match self.transform() {
            // SAFETY: the caller's contract.
            Some(RowTransform { bases, .. }) => unsafe { bases.turn_stored(gpu, layer, chunk, rows) },
            None => Ok(()),
        }
    }

    /// # Safety
    /// As `DeviceCache::attend`.
    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()>;

    fn prefetch_next(&mut self, _gpu: &Gpu, _reads: &[Prefetch]) {}

    fn clear(&mut self, gpu: &Gpu) -> Result<()>;

    fn end(&mut self, _gpu: &Gpu, _sequence: usize) -> Result<()> {
        Ok(())
    }

    /// # Safety
    /// As `DeviceCache::attend`.
    unsafe fn before_step(&mut self, _gpu: &Gpu, _sequences: &Sequences) -> Result<()> {
        Ok(())
    }

    fn background_shared_memory(&self) -> usize {
        0
    }

    fn footprint(&self, tokens: usize) -> Footprint;

    fn bytes(&self) -> usize;

    fn host_bytes(&self) -> usize {
        0
    }

    fn fetched_rows(&self, _gpu: &Gpu) -> Result<u64> {
        Ok(0)
    }

    fn fetched_row_bytes(&self) -> usize {
        0
    }

    fn selected_rows(&self, _gpu: &Gpu) -> Result<Option<u64>> {
        Ok(None)
    }
}

/// What prompts need of a cache.
pub(crate) trait ChunkCache {
    fn reserve(&mut self, _gpu: &Gpu, _lengths: &[usize]) -> Result<()> {
        Ok(())
    }

    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows>;

    fn chunk_ranks(&self, _layer: usize) -> Option<[DevicePtr<u32>; 2]> {
        None
    }

    fn has_rows_of_all(&self) -> bool {
        false
    }

    fn is_exact(&self) -> bool {
        self.has_rows_of_all()
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()>;

    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()>;

    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()>;
}
