//! The codes of a batch: rows to codes, and codes to rows.

use std::ops::Range;

use bytemuck::Pod;
use half::f16;
use kv_attend::owner::{Pair, Side};
use kv_gpu::sq::{CodedBlocks, Decode, DecodeShape, Encode, EncodeShape, KeyTable, Side as CodedSide};
use kv_gpu::{DevicePtr, VectorElement};
use pq_core::sq::Shape;

use super::transform::{BlockRows, HeadData, Transform};
use super::window_shape;
use crate::Result;
use crate::cache::window::WindowShape;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_CODES, fill_codes};
use crate::memory::Buffer;
use crate::plan::ScalarPlan;
use crate::shape::CacheShape;

/// Codes of all complete blocks of a batch.
pub(super) struct Codes {
    pub transform: Transform,
    pub blocks: usize, // of a sequence
    encoders: Pair<Encode>,
    decoders: Pair<Decode>,
    words: Pair<Buffer<u32>>, // (layer, batch, heads, blocks, words of a block)
    scales: Pair<Buffer<u8>>, // (layer, batch, heads, blocks, head_dim or tokens of a block)
    mean_errors: Option<Buffer<f16>>, // (layer, batch, heads, blocks, head_dim)
    tables: Buffer<u32>,      // (layer, heads, table_len)
    table_len: usize,
    shape: WindowShape,
}

/// The encoder of a side.
pub(super) const fn encoder(shape: &CacheShape, plan: &ScalarPlan, side: Side) -> EncodeShape {
    let side = match side {
        Side::Keys => CodedSide::Keys { slots: plan.key_slots },
        Side::Values => CodedSide::Values { bits: plan.value_bits },
    };
    EncodeShape { dim: shape.head_dim, side, block: shape.window.batch, paged: false }
}

impl Codes {
    /// No codes.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, sizes: &CacheShape, plan: &ScalarPlan, heads: &HeadData) -> Result<Self> {
        let shape = window_shape(sizes);
        let WindowShape { n_layers, batch, head_dim: dim, leaving: block, .. } = shape;
        let blocks = (shape.stored(shape.capacity) / block).max(1);
        let all_blocks = n_layers * batch * shape.heads * blocks;
        let encoder = |side| encoder(sizes, plan, side);
        let decoder = |side| DecodeShape { coded: encoder(side), element: VectorElement::F32 };
        let values = Shape::uniform(dim, plan.value_bits as u32)?;
        // All heads have codes of one size.
        let words = Pair::of(|side| match side {
            Side::Keys => heads.shapes.first().map_or(0, |keys| keys.words_len(block)),
            Side::Values => values.words_len(block),
        });
        let table = KeyTable::new(dim, plan.key_slots);
        let mut tables = vec![0; heads.shapes.len() * table.table_len()];
        for (shape, table_of_head) in heads.shapes.iter().zip(tables.chunks_exact_mut(table.table_len())) {
            table.table_into(shape, table_of_head)?;
        }
        Ok(Self {
            encoders: Pair::try_of(|side| Encode::new(&gpu.device, encoder(side)))?,
            decoders: Pair::try_of(|side| Decode::new(&gpu.device, decoder(side)))?,
            words: Pair::try_of(|side| Buffer::zeros(gpu, all_blocks * words[side]))?,
            scales: Pair::new(Buffer::zeros(gpu, all_blocks * dim)?, Buffer::zeros(gpu, all_blocks * block)?),
            mean_errors: plan.mean_errors.then(|| Buffer::zeros(gpu, all_blocks * dim)).transpose()?,
            tables: Buffer::of(gpu, &tables)?,
            transform: Transform::new(gpu, sizes, plan, heads, blocks)?,
            table_len: table.table_len(),
            blocks,
            shape,
        })
    }

    /// Index of the first block of a layer's sequence.
    const fn block(&self, layer: usize, sequence: usize) -> usize {
        (layer * self.shape.batch + sequence) * self.shape.heads * self.blocks
    }

    /// The part of a buffer of all blocks from a sequence on.
    fn part<T: Pod>(&self, all: &Buffer<T>, layer: usize, sequence: usize) -> DevicePtr<T> {
        let WindowShape { n_layers, batch, heads, .. } = self.shape;
        let of_block = all.len() / (n_layers * batch * heads * self.blocks);
        all.pointer().offset(self.block(layer, sequence) * of_block)
    }

    /// Codes of a layer from a sequence on.
    pub fn words(&self, side: Side, layer: usize, sequence: usize) -> DevicePtr<u32> {
        self.part(&self.words[side], layer, sequence)
    }

    /// Steps of keys or norms of values, the same.
    pub fn scales(&self, side: Side, layer: usize, sequence: usize) -> DevicePtr<u8> {
        self.part(&self.scales[side], layer, sequence)
    }

    /// Mean errors of values, the same.
    pub fn mean_errors(&self, layer: usize, sequence: usize) -> Option<DevicePtr<f16>> {
        self.mean_errors.as_ref().map(|errors| self.part(errors, layer, sequence))
    }

    /// Tables of a layer's keys.
    pub fn tables(&self, layer: usize) -> DevicePtr<u32> {
        self.tables.pointer().offset(layer * self.shape.heads * self.table_len)
    }

    /// Encodes rows of a layer, up to `most` of each sequence.
    pub fn encode(&self, gpu: &Gpu, layer: usize, rows: &BlockRows, most: usize) -> Result<()> {
        self.transform.prepare(gpu, layer, rows, most)?;
        for side in Side::ALL {
            let (from, coded) = (self.transform.transformed(side), self.coded(side, layer, rows, most));
            // SAFETY: the buffers have the lengths of `new`; the blocks are complete, so they fit.
            unsafe { self.encoders[side].launch(gpu.stream(), from, &coded) }?;
        }
        Ok(())
    }

    /// The codes of a side of up to `most` of the transformed rows of each sequence.
    fn coded(&self, side: Side, layer: usize, rows: &BlockRows, most: usize) -> CodedBlocks {
        CodedBlocks {
            batch: rows.sequences,
            heads: self.shape.heads,
            max_rows: most,
            firsts: self.transform.firsts(),
            counts: self.transform.counts(),
            key_tables: (side == Side::Keys).then(|| self.tables(layer)),
            scales: self.scales(side, layer, rows.sequence),
            words: self.words(side, layer, rows.sequence),
            mean_errors: self.mean_errors(layer, rows.sequence).filter(|_| side == Side::Values),
            blocks: self.blocks,
            pages: None,
        }
    }

    /// Encodes tokens of one sequence, counted after the sinks; `rows` has all from there on.
    pub fn encode_span(&self, gpu: &Gpu, layer: usize, rows: &BlockRows, tokens: Range<usize>) -> Result<()> {
        for first in tokens.clone().step_by(self.transform.together) {
            let count = (tokens.end - first).min(self.transform.together);
            self.transform.set_spans(gpu, std::iter::once((first, count)))?;
            self.encode(gpu, layer, &rows.skip(first, self.shape.head_dim), count)?;
        }
        Ok(())
    }

    /// Writes rows of the first `tokens` tokens of one sequence after the sinks, from their codes.
    pub fn restore(&self, gpu: &Gpu, layer: usize, rows: &BlockRows, tokens: usize) -> Result<()> {
        for first in (0..tokens).step_by(self.transform.together) {
            let count = (tokens - first).min(self.transform.together);
            self.transform.set_spans(gpu, std::iter::once((first, count)))?;
            for side in Side::ALL {
                let (to, coded) = (self.transform.transformed(side), self.coded(side, layer, rows, count));
                // SAFETY: the buffers have the lengths of `new`; these blocks have been encoded.
                unsafe { self.decoders[side].launch(gpu.stream(), &coded, to.cast()) }?;
            }
            let rows = rows.skip(first, self.shape.head_dim);
            self.transform.restore(gpu, layer, &rows, count)?;
        }
        Ok(())
    }

    /// Fills the codes with hashed ones, of steps and norms 1.
    pub fn fill_random(&self, gpu: &Gpu) -> Result<()> {
        self.scales.iter().try_for_each(|scales| scales.fill(gpu, 128))?;
        Side::ALL
            .into_iter()
            .try_for_each(|side| fill_codes(gpu, &self.words[side], RANDOM_CODES + side as u32))
    }

    /// Bytes of the codes of `tokens` tokens, which are whole blocks, in every sequence.
    pub fn bytes_of(&self, tokens: usize) -> usize {
        self.code_bytes() / self.blocks * (tokens / self.shape.leaving)
    }

    fn code_bytes(&self) -> usize {
        let words: usize = self.words.iter().map(Buffer::bytes).sum();
        let scales: usize = self.scales.iter().map(Buffer::bytes).sum();
        words + scales + self.mean_errors.as_ref().map_or(0, Buffer::bytes)
    }

    /// Bytes of tables, maps and means.
    pub fn shared_bytes(&self) -> usize {
        self.tables.bytes() + self.transform.shared_bytes()
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.code_bytes() + self.tables.bytes() + self.transform.bytes()
    }
}
