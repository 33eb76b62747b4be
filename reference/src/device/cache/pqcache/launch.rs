//! The launches of a step of a [`PqCache`].

use cudarc::driver::CudaStream;
use kv_gpu::pq::{EncodeGenericArguments, LutArguments, SearchArguments};
use kv_gpu::svd::AttendArguments;
use kv_gpu::{AnyElement, DevicePtr};

use super::{PqCache, Scratch, Shape};
use crate::Result;
use crate::device::Gpu;
use crate::device::cache::{Chunk, DeviceCache, Rows, Sequences};
use crate::side::Side;

impl PqCache {
    /// Launches the choice of a layer's tokens.
    pub(super) fn launch_search(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let Shape { batch, books, heads, head_dim, stored, most, .. } = self.shape;
        let Scratch { luts, tokens, found, search, .. } = &self.scratch;
        let lut = LutArguments {
            // Heads of sequences that have codebooks of their own are heads of one sequence.
            batch: batch / books,
            heads: books * heads,
            queries,
            scale: 1.0 / (head_dim as f32).sqrt(),
            centroids: self.centroids(layer, 0),
            luts: luts.pointer(),
        };
        let search = SearchArguments {
            batch,
            heads,
            capacity: stored,
            luts: luts.pointer(),
            codes: self.codes(layer, 0),
            lengths: sequences.coded_lengths.pointer(),
            ks: self.budget.ks(),
            sinks: 0,
            recent: 0,
            workspace: search.pointer(),
            tokens: tokens.pointer(),
            tokens_len: most,
            counts: found.pointer(),
            stats: None,
            pdl: true,
        };
        // SAFETY: the buffers have the lengths of `new`; the decoder keeps lengths within the capacity. The
        // tables are launched without PDL, so that queries and `ks` are complete when they start; they write
        // neither codes nor lengths nor `ks`. The background stream writes codes of later tokens only.
        unsafe {
            self.kernels.lut.launch(gpu.stream(), &lut)?;
            self.kernels.search.launch(gpu.stream(), &search)?;
        }
        Ok(())
    }

    /// Encodes the staged keys of a layer.
    pub(super) fn launch_encode(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let Shape { batch, books, heads, head_dim, ring, stored, .. } = self.shape;
        let staged = heads * ring * head_dim; // of a sequence
        for first in (0..batch).step_by(batch / books) {
            let arguments = EncodeGenericArguments {
                batch: batch / books,
                heads,
                max_count: ring,
                vectors: self.store.staged(Side::Keys, layer).offset(first * staged).cast(),
                strides: [staged, ring * head_dim, head_dim],
                centroids: self.centroids(layer, first),
                firsts: self.turns.firsts(layer).offset(first),
                counts: self.turns.counts(layer).offset(first),
                capacity: stored,
                codes: self.codes(layer, first),
            };
            // SAFETY: the buffers have the lengths of `new`. The plan counts at most a ring of tokens, whose
            // codes fit since they come before tokens that fit. The search reads only codes before `firsts`
            // until the layer's next turn, which waits for this; bits of those keep their values.
            unsafe { self.kernels.encode.launch(stream.cu_stream(), &arguments) }?;
        }
        Ok(())
    }

    /// Encodes the keys that a chunk's end stores, from rows of all tokens.
    pub(super) fn launch_encode_chunk(&self, stream: &CudaStream, layer: usize, chunk: &Chunk) -> Result<()> {
        let Shape { heads, head_dim, sinks, stored, .. } = self.shape;
        let (first, count) = self.window.shape.stored_by(chunk);
        let Rows { keys, capacity, .. } = self.window.past()?;
        let arguments = EncodeGenericArguments {
            batch: 1,
            heads,
            max_count: count,
            vectors: keys.cast::<u16>().offset((sinks + first) * head_dim).cast(),
            strides: [0, capacity * head_dim, head_dim],
            centroids: self.centroids(layer, chunk.sequence),
            firsts: self.span.first(),
            counts: self.span.count(),
            capacity: stored,
            codes: self.codes(layer, chunk.sequence),
        };
        // SAFETY: the rows have all tokens from the first on, whose codes fit since the tokens do.
        Ok(unsafe { self.kernels.encode.launch(stream.cu_stream(), &arguments) }?)
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
        // SAFETY: the buffers have the lengths of `new`, ranks and offsets are those of full rank, and lengths
        // are at most the capacity: where tokens are fetched, sinks and ring are full. `pq::Gather`, which
        // runs before, writes rows, and they are read after the PDL wait; `StepBudget` has written the lengths.
        Ok(unsafe { self.kernels.attend.launch(gpu.stream(), &arguments) }?)
    }
}
