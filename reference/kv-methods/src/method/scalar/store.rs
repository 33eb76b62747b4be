//! Blocks of scalar codes.
//!
//! A [`CodedStore`] splits the tokens of a head into blocks, coded by a [`BlockCodec`] for keys (after RoPE,
//! and at a lower rank if the head is truncated) and one for values. Attention decodes block by block. A
//! codec that rotates its rows leaves them rotated: instead the query is rotated, and the output rotated
//! back, once per step.

use std::sync::Arc;

use kv_attend::Backend;
use kv_attend::owner::{Pair, Side};
use kv_llama::Footprint;
use kv_model::Rope;
use svd_core::{HeadMaps, Rows, SoftmaxStats};

use crate::Result;
use crate::cache::{Geometry, RotatedStore, Store, Sums, attend_rows, merge_part};

/// Codec between rows (n, head_dim) of one head and bytes.
pub(crate) trait BlockCodec: Send + Sync {
    /// Appends the codes of `rows` to `bytes`.
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>);
    /// Decodes all of `bytes` into `rows`; rotated rows stay rotated.
    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]);
    /// Applies the codec's rotation to a row.
    fn rotate(&self, _row: &mut [f32]) {}
    /// Undoes [`Self::rotate`].
    fn rotate_back(&self, _row: &mut [f32]) {}
}

/// Blocks of codes per head.
#[derive(Clone)]
pub(crate) struct CodedStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    maps: Option<Vec<Arc<HeadMaps>>>, // (n_kv_heads,)
    codecs: Pair<Arc<dyn BlockCodec>>,
    block: usize, // tokens
    blocks: Vec<Block>,
    len: usize,
}

#[derive(Clone)]
struct Block {
    coded: usize,              // tokens in the codes
    valid: usize,              // tokens left after truncation
    codes: Vec<Pair<Vec<u8>>>, // per head
}

impl CodedStore {
    pub fn new(
        geometry: Geometry,
        rope: Arc<Rope>,
        maps: Option<Vec<Arc<HeadMaps>>>,
        codecs: Pair<Arc<dyn BlockCodec>>,
        block: usize,
    ) -> Self {
        Self { geometry, rope, maps, codecs, block, blocks: vec![], len: 0 }
    }

    /// The maps to lower ranks of a head that is truncated.
    fn maps(&self, head: usize) -> Option<&HeadMaps> {
        self.maps.as_ref().map(|maps| &*maps[head])
    }

    /// Components of a head's keys and of its values.
    fn ranks(&self, head: usize) -> Pair<usize> {
        let full = Pair::of(|_| self.geometry.head_dim);
        self.maps(head).map_or(full, |maps| Pair::new(maps.keys().rank(), maps.values().rank()))
    }
}

impl RotatedStore for CodedStore {
    fn push_rotated(&mut self, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        for (k, v) in k.chunks(self.block * kv_dim).zip(v.chunks(self.block * kv_dim)) {
            let mut codes = vec![];
            for head in 0..self.geometry.n_kv_heads {
                let [keys, values] = [k, v].map(|rows| self.geometry.head(head, rows));
                let (rows, ranks) = (Pair::new(keys?, values?), self.ranks(head));
                let rows: Pair<Vec<f32>> = match self.maps(head) {
                    None => Pair::of(|side| rows[side].iter().flatten().copied().collect()),
                    Some(maps) => Pair {
                        keys: maps.keys().reduce(Backend::detect(), rows.keys)?,
                        values: maps.values().reduce(Backend::detect(), rows.values)?,
                    },
                };
                codes.push(Pair::of(|side| {
                    let mut bytes = vec![];
                    self.codecs[side].encode(&rows[side], ranks[side], &mut bytes);
                    bytes
                }));
            }
            let tokens = k.len() / kv_dim;
            self.blocks.push(Block { coded: tokens, valid: tokens, codes });
            self.len += tokens;
        }
        Ok(())
    }
}

impl Store for CodedStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.push_rotated(&self.rope.rotated(k, self.geometry.kv_dim(), pos), v)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.len = len;
        let mut left = len;
        for block in &mut self.blocks {
            block.valid = block.valid.min(left);
            left -= block.valid;
        }
        self.blocks.retain(|block| block.valid > 0);
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let (ranks, group) = (self.ranks(head), sums.stats.len());
        let longest = self.blocks.iter().map(|block| block.coded).max().unwrap_or(0);
        let mut rows = Pair::of(|side| vec![0.0; longest * ranks[side]]);
        let mut q = match self.maps(head) {
            None => q.to_vec(),
            Some(maps) => {
                let mut projected = vec![0.0; group * ranks.keys];
                let rows = Rows::contiguous(q, self.geometry.head_dim)?;
                maps.keys().project_queries(Backend::detect(), rows, &mut projected)?;
                projected
            }
        };
        q.chunks_exact_mut(ranks.keys).for_each(|q| self.codecs.keys.rotate(q));
        let mut rotated = vec![0.0; group * ranks.values];
        let mut rotated_stats = vec![SoftmaxStats::EMPTY; group];
        let mut start = 0; // the block's first token
        for block in &self.blocks {
            let hidden = first.saturating_sub(start).min(block.valid);
            start += block.valid;
            if hidden == block.valid {
                continue;
            }
            for side in Side::ALL {
                let rows = &mut rows[side][..block.coded * ranks[side]];
                self.codecs[side].decode(&block.codes[head][side], ranks[side], rows);
            }
            let valid = |side: Side| &rows[side][hidden * ranks[side]..block.valid * ranks[side]];
            let mut sums = Sums { out: &mut rotated, stats: &mut rotated_stats };
            attend_rows(&q, valid(Side::Keys), valid(Side::Values), &mut sums)?;
        }
        merge_part((&rotated, &rotated_stats), sums, |rotated, _, row| {
            let row = &mut row[..ranks.values];
            row.copy_from_slice(rotated);
            self.codecs.values.rotate_back(row);
            Ok(())
        })
    }

    fn footprint(&self) -> Footprint {
        let kept =
            self.blocks.iter().flat_map(|block| block.codes.iter().flat_map(Pair::iter)).map(Vec::len).sum();
        let shared = self.maps.iter().flatten().map(|maps| maps.size()).sum();
        Footprint { kept, shared, ..Footprint::default() }
    }
}
