//! Launches of a segment's pieces: embedding, append and attention.

use kv_device::Rows;
use kv_gpu::svd::PrefillArguments;
use kv_gpu::{DevicePtr, Grid};

use super::plan::{Piece, Segment};
use super::{Decoder, LENGTHS, Prompts};
use crate::Result;
use crate::products::Qkv;

/// Threads of `embed`.
const THREADS: u32 = 256;

/// Places of a piece's `lengths`, 16 bytes apart.
const COUNT: usize = 4;
const ONE: usize = 8;

#[derive(Clone, Copy)]
#[repr(C)]
struct EmbedArguments {
    embedding: DevicePtr<u16>,
    ids: DevicePtr<u32>,
    residual: DevicePtr<f32>,
    hidden: u32,
}

const _: () = assert!(size_of::<EmbedArguments>() == 32);

impl Decoder {
    /// Embeds the tokens of a segment.
    pub(super) fn start_segment(&self, state: &Prompts, segment: &Segment) -> Result<()> {
        let (gpu, tokens) = (&*self.gpu, &segment.tokens);
        state.ids.write_first(gpu, tokens)?;
        let mut lengths = vec![0; state.sizes.pieces * LENGTHS];
        let pieces = segment.groups.iter().flat_map(|group| &group.pieces);
        for (lengths, Piece { chunk, .. }) in lengths.chunks_exact_mut(LENGTHS).zip(pieces) {
            (lengths[0], lengths[COUNT], lengths[ONE]) = (chunk.end() as u32, chunk.count as u32, 1);
        }
        state.lengths.write_first(gpu, &lengths)?;
        let arguments = EmbedArguments {
            embedding: self.weights.embedding.pointer(),
            ids: state.ids.pointer(),
            residual: state.residual.pointer(),
            hidden: self.weights.config.hidden_size as u32,
        };
        let grid = Grid::new([tokens.len(), 1, 1])?;
        // SAFETY: the structure is the kernel's argument, the tokens are in the vocabulary, and the buffers
        // have rows for as many tokens.
        unsafe { state.embed.launch(gpu.stream(), grid, THREADS, false, &arguments) }?;
        state.products.begin(&self.context(), state.residual.pointer(), tokens.len())
    }

    /// Appends a piece to a layer of its sequence, and attends. At the end of the model only the last token
    /// of a prompt attends.
    pub(super) fn run_piece(
        &mut self,
        state: &Prompts,
        (qkv, piece): (Qkv, &Piece),
        l: usize,
        is_end: bool,
    ) -> Result<()> {
        let rows = self.cache.chunk_rows(&self.gpu, l, &piece.chunk)?;
        self.append_rows(state, (qkv, piece), l, &rows)?;
        let skipped = match is_end {
            true if piece.is_last => piece.chunk.count - 1,
            true => piece.chunk.count,
            false => 0,
        };
        self.attend_rows(state, piece, l, &rows, skipped)?;
        Ok(self.cache.append(&self.gpu, l, &piece.chunk)?)
    }

    /// Rotates queries and keys, and writes keys and values behind those of the tokens before.
    fn append_rows(&self, state: &Prompts, (qkv, piece): (Qkv, &Piece), l: usize, rows: &Rows) -> Result<()> {
        let config = &self.weights.config;
        let queries = state.queries.pointer().offset(piece.start * config.q_dim());
        let qkv = qkv.from(piece.start, config);
        // SAFETY: the chunk ends within the capacity of rows and of the tables of angles; the buffers have
        // rows for the tokens of a group.
        unsafe { state.append.chunk(&self.context(), qkv, &piece.chunk, queries, (rows, self.angles())) }?;
        let Some(transform) = self.cache.transform() else { return Ok(()) };
        // SAFETY: these rows have just been written, and nothing else uses them before attention.
        Ok(unsafe { transform.chunk(&self.gpu, l, &piece.chunk, queries, rows) }?)
    }

    /// Attention of the piece's queries from `skipped` on.
    fn attend_rows(
        &self,
        state: &Prompts,
        piece: &Piece,
        l: usize,
        rows: &Rows,
        skipped: usize,
    ) -> Result<()> {
        let config = &self.weights.config;
        let (heads, head_dim, q_dim) = (config.n_kv_heads, config.head_dim, config.q_dim());
        let (max_count, first) = (piece.chunk.count - skipped, (piece.start + skipped) * q_dim);
        let counts = if max_count == 1 { ONE } else { COUNT };
        let lengths = state.lengths.pointer().offset(piece.index * LENGTHS);
        let [key_ranks, value_ranks] = self.cache.chunk_ranks(l)?.unwrap_or([state.ranks.pointer(); 2]);
        let arguments = PrefillArguments {
            batch: 1,
            heads,
            group: config.gqa_group(),
            capacity: rows.capacity,
            max_count,
            keys: rows.keys,
            values: rows.values,
            pages: None,
            queries: state.queries.pointer().offset(first).cast(),
            strides: [0, q_dim, head_dim],
            lengths,
            counts: lengths.offset(counts),
            window: None,
            key_ranks,
            value_ranks,
            key_offsets: state.offsets.pointer(),
            value_offsets: state.offsets.pointer(),
            key_rank_sum: heads * head_dim,
            value_rank_sum: heads * head_dim,
            padded: true,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out: state.attended.pointer().offset(first).cast(),
            workspace: state.workspace.pointer(),
        };
        // SAFETY: the rows have keys and values up to the chunk's end, which is within their capacity, and
        // ranks are at most `head_dim`. Either all queries are attended to, or the last one, or none, which
        // launches nothing.
        Ok(unsafe { state.attend.launch(self.gpu.stream(), &arguments) }?)
    }
}
