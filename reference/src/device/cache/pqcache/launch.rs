//! The launches of a step of a [`PqCache`].

use cudarc::driver::CudaStream;
use kv_gpu::svd::AttendArguments;
use kv_gpu::{AnyElement, DevicePtr};

use super::index::KeysToEncode;
use super::{PqCache, Shape};
use crate::Result;
use crate::device::Gpu;
use crate::device::cache::{Chunk, DeviceCache, Rows};
use crate::side::Side;

impl PqCache {
    /// Encodes the staged keys of a layer.
    pub(super) fn launch_encode(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let Shape { batch, books, heads, head_dim, ring, .. } = self.shape;
        let staged = heads * ring * head_dim; // of a sequence
        // The plan counts at most a ring of tokens, whose codes fit since they come before tokens that fit.
        // The search reads only codes before `firsts` until the layer's next turn, which waits for this; bits
        // of those keep their values.
        (0..batch).step_by(batch / books).try_for_each(|first| {
            let keys = KeysToEncode {
                first,
                batch: batch / books,
                max_count: ring,
                vectors: self.store.staged(Side::Keys, layer).offset(first * staged).cast(),
                strides: [staged, ring * head_dim, head_dim],
                firsts: self.turns.firsts(layer).offset(first),
                counts: self.turns.counts(layer).offset(first),
            };
            self.index.encode(stream, layer, &keys)
        })
    }

    /// Encodes the keys that a chunk's end stores, from rows of all tokens: they are all there, and their
    /// codes fit since the tokens do.
    pub(super) fn launch_encode_chunk(&self, stream: &CudaStream, layer: usize, chunk: &Chunk) -> Result<()> {
        let Shape { head_dim, sinks, .. } = self.shape;
        let (first, count) = self.window.shape.stored_by(chunk);
        let Rows { keys, capacity, .. } = self.window.past()?;
        let keys = KeysToEncode {
            first: chunk.sequence,
            batch: 1,
            max_count: count,
            vectors: keys.cast::<u16>().offset((sinks + first) * head_dim).cast(),
            strides: [0, capacity * head_dim, head_dim],
            firsts: self.span.first(),
            counts: self.span.count(),
        };
        self.index.encode(stream, layer, &keys)
    }

    /// Brings the rows of a layer's chosen tokens behind the exact ones.
    pub(super) fn fetch(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let chosen = (self.scratch.tokens.pointer(), self.budget.counts());
        let held = self.held.as_ref().map(|held| held.rows(layer));
        self.store.fetch(gpu, layer, chosen, self.window.slots(layer), held)
    }

    /// Launches attention to the exact rows and the chosen ones behind them.
    pub(super) fn launch_attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let Rows { keys, values, capacity } = self.rows(layer);
        let Shape { batch, heads, group, head_dim, .. } = self.shape;
        let arguments = AttendArguments {
            batch,
            heads,
            group,
            capacity,
            keys,
            values,
            pages: None,
            queries,
            lengths: self.budget.attended(),
            key_ranks: self.ranks.pointer(),
            value_ranks: self.ranks.pointer(),
            key_offsets: self.offsets.pointer(),
            value_offsets: self.offsets.pointer(),
            key_rank_sum: heads * head_dim,
            value_rank_sum: heads * head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out,
            log_sum_exp: None,
            pdl: true,
            workspace: self.scratch.attend.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`, ranks and offsets are those of full rank, and
        // lengths are at most the capacity: where tokens are fetched, sinks and ring are full. `pq::Gather`,
        // which runs before, writes rows, and they are read after the PDL wait; `StepBudget` has written the
        // lengths.
        Ok(unsafe { self.attend.launch(gpu.stream(), &arguments) }?)
    }
}
