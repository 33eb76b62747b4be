//! Rows of a whole prompt, for caches that do not keep them.

use crate::gpu::Gpu;
use crate::ledger::Allocating;
use crate::memory::Buffer;
use crate::rows::{Chunk, Rows};
use crate::{Error, Result};

/// Rows of all tokens of one sequence and layer, to which the chunks of a prompt attend, for a cache that
/// stores tokens in another form.
pub(super) struct PromptRows {
    rows: Option<Buffer<u16>>, // (keys and values, heads, capacity, head_dim), made by the first chunk
    heads: usize,
    head_dim: usize,
    capacity: usize,                // of `rows`
    closed: Option<(usize, Chunk)>, // layer and chunk up to whose end the rows are valid
}

impl PromptRows {
    /// No rows yet.
    pub const fn new(heads: usize, head_dim: usize) -> Self {
        Self { rows: None, heads, head_dim, capacity: 0, closed: None }
    }

    /// Makes room for this many tokens. Rows that are reallocated become undefined.
    pub fn open(&mut self, gpu: &Gpu, tokens: usize) -> Result<Rows> {
        if self.capacity < tokens {
            let _purpose = Allocating::new("prompts");
            self.closed = None;
            self.rows = None;
            self.rows = Some(Buffer::zeros(gpu, 2 * self.heads * tokens * self.head_dim)?);
            self.capacity = tokens;
        }
        self.rows()
    }

    /// Marks the rows up to a chunk's end as those of its sequence in this layer.
    pub const fn close(&mut self, layer: usize, chunk: &Chunk) {
        self.closed = Some((layer, *chunk));
    }

    /// Whether the rows still hold the tokens before this chunk in the same layer, so that none have to be
    /// restored.
    pub fn hold_those_before(&self, layer: usize, chunk: &Chunk) -> bool {
        self.closed.is_some_and(|(of, before)| {
            of == layer && before.sequence == chunk.sequence && before.end() == chunk.position
        })
    }

    /// Invalidates the rows, which are about to be overwritten.
    pub const fn invalidate(&mut self) {
        self.closed = None;
    }

    /// The rows of the last [`Self::open`].
    pub fn rows(&self) -> Result<Rows> {
        let rows = self.rows.as_ref().ok_or_else(|| Error::argument("no rows for a chunk"))?;
        let side = |side: usize| rows.pointer().offset(side * rows.len() / 2).cast();
        Ok(Rows { keys: side(0), values: side(1), capacity: self.capacity })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.rows.as_ref().map_or(0, Buffer::bytes)
    }
}
