//! The launches of a step of a [`PqCache`].

use cudarc::driver::CudaStream;
use kv_attend::owner::Side;
use kv_gpu::pq::GatherAttendArguments;
use kv_gpu::{AnyElement, DevicePtr};

use super::index::KeysToEncode;
use super::{PqCache, Shape};
use crate::Result;
use crate::cache::StepCache;
use crate::gpu::Gpu;
use crate::rows::{Chunk, Rows, Sequences};

impl PqCache {
    /// Encodes the staged keys of a layer.
    pub(super) fn launch_encode(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let Shape { batch, books, heads, head_dim, ring, .. } = self.shape;
        let staged = heads * ring * head_dim; // of a sequence
        // The plan counts at most a ring of tokens, whose codes fit since they come before tokens that fit.
        // The search reads only codes before `firsts` until the layer's next eviction, which waits for this;
        // bits of those keep their values.
        (0..batch).step_by(batch / books).try_for_each(|first| {
            let keys = KeysToEncode {
                first,
                batch: batch / books,
                max_count: ring,
                vectors: self.store.staged(Side::Keys, layer).offset(first * staged).cast(),
                strides: [staged, ring * head_dim, head_dim],
                firsts: self.evictions.firsts(layer).offset(first),
                counts: self.evictions.counts(layer).offset(first),
            };
            self.index.encode(stream, layer, &keys)
        })
    }

    /// Encodes the keys stored at a chunk's end, from the rows of all tokens: the rows are complete, and the
    /// codes fit since the tokens do.
    pub(super) fn launch_encode_chunk(&self, stream: &CudaStream, layer: usize, chunk: &Chunk) -> Result<()> {
        let Shape { head_dim, sinks, .. } = self.shape;
        let (first, count) = self.window.shape.stored_by(chunk);
        let Rows { keys, capacity, .. } = self.window.prefix()?;
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

    /// Launches the lookup of a layer's chosen tokens, and attention over them and the exact rows.
    ///
    /// # Safety
    /// As [`DeviceCache::attend`].
    pub(super) unsafe fn launch_attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let chosen = (self.scratch.tokens.pointer(), self.budget.counts());
        let found = self.store.find(gpu, layer, chosen, self.window.slots(layer))?;
        let Rows { keys, values, capacity } = self.rows(layer);
        let Shape { batch, heads, group, head_dim, sinks, ring, most, .. } = self.shape;
        let arguments = GatherAttendArguments {
            batch,
            heads,
            group,
            capacity,
            keys,
            values,
            first_slot: sinks + ring,
            exact_lengths: sequences.exact_lengths,
            counts: self.budget.ks(),
            slots: found.slots,
            list_len: most,
            missing: found.missing,
            queries,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out,
            pdl: true,
            workspace: self.scratch.attend.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`; at most sinks and ring are exact, and `StepBudget`
        // has written counts of at most `most`. The look-up, which runs before, writes slots that differ and
        // are below the number of rows that stay, and writes neither lengths nor counts. Tokens are below
        // `stored`, and this stream has written their rows to the host.
        Ok(unsafe { self.attend.launch(gpu.stream(), &arguments) }?)
    }
}
