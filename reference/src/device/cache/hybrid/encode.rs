//! Tokens become codes: keys are projected first.

use cudarc::driver::CudaStream;
use kv_gpu::DevicePtr;
use kv_gpu::pq::EncodeArguments;
use kv_gpu::svd::ProjectArguments;

use super::{COUNT, HybridCache};
use crate::Result;
use crate::device::Gpu;
use crate::device::cache::Chunk;
use crate::device::cache::window::WindowShape;
use crate::device::memory::Buffer;
use crate::side::{Pair, Side};

impl HybridCache {
    /// Encodes the staged tokens of a layer.
    pub(super) fn encode_turn(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let WindowShape { batch, heads, head_dim, ring, .. } = self.window.shape;
        let of_sequence = heads * ring * head_dim;
        for sequence in 0..batch {
            let staged = self.store.staged(Side::Keys, layer).offset(sequence * of_sequence);
            let projected = self.projected.pointer().offset(sequence * of_sequence);
            self.project_keys(stream, layer, (staged, ring), ring, projected)?;
        }
        let vectors = Pair::new(self.projected.pointer(), self.store.staged(Side::Values, layer));
        for side in Side::ALL {
            let arguments = EncodeArguments {
                batch,
                max_count: ring,
                vectors: vectors[side].cast(),
                strides: [of_sequence, ring * head_dim, head_dim],
                firsts: self.turns.firsts(layer),
                counts: self.turns.counts(layer),
                ..self.encoding(side, layer, 0)
            };
            // SAFETY: the buffers have the lengths of `new`. The plan counts at most a ring of tokens, whose
            // codes fit since they come before tokens that fit. Attention reads only codes before `firsts`
            // until the layer's next turn, which waits for this.
            unsafe { self.kernels.encoders[side].launch(stream.cu_stream(), &arguments) }?;
        }
        Ok(())
    }

    /// Makes the buffer of projected keys large enough for `count` keys of each head of a sequence.
    pub(super) fn make_room_for_projected(&mut self, gpu: &Gpu, count: usize) -> Result<()> {
        let len = self.window.shape.heads * count * self.window.shape.head_dim;
        if self.projected.len() < len {
            self.turns.wait(gpu)?;
            self.projected = Buffer::zeros(gpu, len)?;
        }
        Ok(())
    }

    /// Encodes the tokens that a chunk's end stores, (first, count) behind the sinks, from rows of all tokens.
    pub(super) fn encode_chunk(
        &self,
        stream: &CudaStream,
        layer: usize,
        chunk: &Chunk,
        (first, count): (usize, usize),
    ) -> Result<()> {
        let WindowShape { head_dim, sinks, capacity, .. } = self.window.shape;
        let rows = self.window.past()?;
        let behind = |rows: DevicePtr<u16>| rows.offset((sinks + first) * head_dim);
        let projected = self.projected.pointer();
        self.project_keys(stream, layer, (behind(rows.keys.cast()), capacity), count, projected)?;
        let vectors = Pair::new((projected, count), (behind(rows.values.cast()), capacity));
        for side in Side::ALL {
            let (vectors, rows) = vectors[side];
            let arguments = EncodeArguments {
                batch: 1,
                max_count: count,
                vectors: vectors.cast(),
                strides: [0, rows * head_dim, head_dim],
                firsts: self.span.pointer(),
                counts: self.span.pointer().offset(COUNT),
                ..self.encoding(side, layer, chunk.sequence)
            };
            // SAFETY: the rows have all tokens from the first on, whose codes fit since the tokens do.
            unsafe { self.kernels.encoders[side].launch(stream.cu_stream(), &arguments) }?;
        }
        Ok(())
    }

    /// Where the codes of a layer go from a sequence on.
    fn encoding(&self, side: Side, layer: usize, sequence: usize) -> EncodeArguments {
        let codebook = self.kernels.layouts[side].shape().codebook_len();
        EncodeArguments {
            batch: 0,
            heads: self.window.shape.heads,
            max_count: 0,
            vectors: DevicePtr::dangling(),
            strides: [0; 3],
            centroids: self.heads.of_layer(&self.heads.centroids[side], codebook, layer),
            firsts: DevicePtr::dangling(),
            counts: DevicePtr::dangling(),
            codes: self.codes(side, layer, sequence),
            tiles: self.tiles,
            pages: None,
        }
    }

    /// Projects `n` keys of each head of one sequence, whose heads have `stride` rows, to (heads, n, head_dim).
    fn project_keys(
        &self,
        stream: &CudaStream,
        layer: usize,
        (rows, stride): (DevicePtr<u16>, usize),
        n: usize,
        out: DevicePtr<u16>,
    ) -> Result<()> {
        let WindowShape { heads, head_dim, .. } = self.window.shape;
        let arguments = ProjectArguments {
            heads,
            n,
            rows: rows.cast(),
            strides: [stride * head_dim, head_dim],
            columns: self.heads.map(Side::Keys, layer),
            out: out.cast(),
            pdl: false,
        };
        // SAFETY: the callers' buffers have these rows, and room for as many.
        Ok(unsafe { self.kernels.keys.launch(stream.cu_stream(), &arguments) }?)
    }
}
