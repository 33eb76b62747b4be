//! The launches of a step and of a chunk.

use bytemuck::Pod;
use kv_attend::owner::Side;
use kv_gpu::svd::AttendArguments;
use kv_gpu::{AnyElement, DevicePtr, Grid};

use super::{Layer, ZackCache};
use crate::Result;
use crate::cache::merge::Parts;
use crate::cache::window::WindowShape;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::rows::{Chunk, Rows, Sequences};

/// Threads of the kernels, and tokens of a block.
const THREADS: u32 = 256;
const TOKENS: usize = 32;

/// `Store` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Store {
    key_ranks: DevicePtr<u32>,
    value_ranks: DevicePtr<u32>,
    key_offsets: DevicePtr<u64>,
    value_offsets: DevicePtr<u64>,
    keys: DevicePtr<u16>,
    values: DevicePtr<u16>,
    key_rank_sum: u64,
    value_rank_sum: u64,
    capacity: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CutArguments {
    store: Store,
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    heads: u32,
    sinks: u32,
    ring: u32,
    rows: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RestoreArguments {
    store: Store,
    keys: DevicePtr<u16>,
    values: DevicePtr<u16>,
    tokens: u32,
    rows: u32,
}

const _: () = assert!(size_of::<Store>() == 72);
const _: () = assert!(size_of::<CutArguments>() == 120 && size_of::<RestoreArguments>() == 96);

impl ZackCache {
    /// A layer's part of a (layer, heads) buffer.
    pub(super) fn of_heads<T: Pod>(&self, all: &Buffer<T>, layer: usize) -> DevicePtr<T> {
        all.pointer().offset(layer * self.window.shape.heads)
    }

    /// The rows of a layer from a sequence on.
    fn store(&self, layer: usize, sequence: usize) -> Store {
        let Layer { rank_sums, offsets } = self.layers[layer];
        let capacity = self.window.shape.capacity;
        let rows =
            |side| self.stored[side].pointer().offset(offsets[side] + sequence * capacity * rank_sums[side]);
        Store {
            key_ranks: self.of_heads(&self.ranks.keys, layer),
            value_ranks: self.of_heads(&self.ranks.values, layer),
            key_offsets: self.of_heads(&self.offsets.keys, layer),
            value_offsets: self.of_heads(&self.offsets.values, layer),
            keys: rows(Side::Keys),
            values: rows(Side::Values),
            key_rank_sum: rank_sums.keys as u64,
            value_rank_sum: rank_sums.values as u64,
            capacity: capacity as u64,
        }
    }

    /// Launches attention to the stored rows.
    ///
    /// # Safety
    /// As [`DeviceCache::attend`](crate::DeviceCache::attend).
    pub(super) unsafe fn launch_stored(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let WindowShape { batch, heads, head_dim, capacity, .. } = self.window.shape;
        let store = self.store(layer, 0);
        let arguments = AttendArguments {
            batch,
            heads,
            group: self.group,
            capacity,
            keys: store.keys.cast(),
            values: store.values.cast(),
            pages: None,
            queries,
            lengths: sequences.coded_lengths,
            key_ranks: store.key_ranks,
            value_ranks: store.value_ranks,
            key_offsets: store.key_offsets,
            value_offsets: store.value_offsets,
            key_rank_sum: self.layers[layer].rank_sums.keys,
            value_rank_sum: self.layers[layer].rank_sums.values,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out: self.scratch.out.pointer().cast(),
            log_sum_exp: Some(self.scratch.log_sum_exps[1].pointer()),
            pdl: true,
            workspace: self.scratch.workspace.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`, and lengths are at most the capacity. Ranks are
        // multiples of `DeviceCuts::MULTIPLE`, or the method is refused; offsets and sums are theirs. This
        // kernel reads lengths, ranks and offsets before its PDL wait: the change of basis, which runs before it,
        // writes none of them, and has waited for the kernels that write queries and rows.
        Ok(unsafe { self.kernels.attend.launch(gpu.stream(), &arguments) }?)
    }

    /// Launches the merge of both parts.
    ///
    /// # Safety
    /// As [`DeviceCache::attend`](crate::DeviceCache::attend).
    pub(super) unsafe fn launch_merge(
        &self,
        gpu: &Gpu,
        layer: usize,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let WindowShape { batch, heads, .. } = self.window.shape;
        let parts = Parts {
            out,
            stored: self.scratch.out.pointer(),
            log_sum_exps: self.scratch.log_sum_exps.each_ref().map(Buffer::pointer),
            ranks: Some(self.of_heads(&self.ranks.values, layer)),
        };
        // SAFETY: the buffers have the lengths of `new`; the caller's contract.
        unsafe { self.kernels.merge.launch(gpu, heads * self.group, batch, &parts) }
    }

    /// Launches the copy of the evicted tokens of a layer into the store.
    pub(super) fn launch_cut_of_evicted(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let WindowShape { batch, heads, sinks, ring, .. } = self.window.shape;
        let Rows { keys, values, capacity } = self.window.rows(layer);
        let arguments = CutArguments {
            store: self.store(layer, 0),
            keys,
            values,
            firsts: self.evictions.firsts(layer),
            counts: self.evictions.counts(layer),
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            rows: capacity as u32,
        };
        let grid = Grid::new([heads, batch, ring.div_ceil(TOKENS)])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The plan
        // counts at most a ring of tokens, which are in it and come before tokens that fit.
        Ok(unsafe { self.kernels.cut.launch(gpu.stream(), grid, THREADS, false, &arguments) }?)
    }

    /// Launches the copy of a chunk's tokens into the store, from the rows of all tokens.
    pub(super) fn launch_cut_of_chunk(&self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        let WindowShape { heads, sinks, .. } = self.window.shape;
        let Rows { keys, values, capacity } = self.window.prefix()?;
        let (_, count) = self.window.shape.stored_by(chunk);
        let arguments = CutArguments {
            store: self.store(layer, chunk.sequence),
            keys,
            values,
            firsts: self.span.first(),
            counts: self.span.count(),
            heads: heads as u32,
            sinks: sinks as u32,
            ring: capacity as u32, // rows of all tokens, not a ring
            rows: capacity as u32,
        };
        if count == 0 {
            return Ok(());
        }
        let grid = Grid::new([heads, 1, count.div_ceil(TOKENS)])?;
        // SAFETY: as above, with the rows of one sequence up to the chunk's end; the span has been written.
        Ok(unsafe { self.kernels.cut.launch(gpu.stream(), grid, THREADS, false, &arguments) }?)
    }

    /// Launches the copy of the stored tokens before a chunk to its rows.
    pub(super) fn launch_restore(&self, gpu: &Gpu, layer: usize, chunk: &Chunk, rows: &Rows) -> Result<()> {
        let WindowShape { heads, head_dim, sinks, .. } = self.window.shape;
        let tokens = self.window.shape.stored(chunk.position);
        if tokens == 0 {
            return Ok(());
        }
        let arguments = RestoreArguments {
            store: self.store(layer, chunk.sequence),
            keys: rows.keys.cast().offset(sinks * head_dim),
            values: rows.values.cast().offset(sinks * head_dim),
            tokens: tokens as u32,
            rows: rows.capacity as u32,
        };
        let grid = Grid::new([heads, tokens.div_ceil(TOKENS), 1])?;
        // SAFETY: as above; rows have room for all tokens of a sequence.
        Ok(unsafe { self.kernels.restore.launch(gpu.stream(), grid, THREADS, false, &arguments) }?)
    }
}
