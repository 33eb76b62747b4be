use std::sync::Arc;

use pq_core::{
    Codebook, CodebookBuf, CodedTokens, CodesBuf, SoftmaxStats, attend_into, attend_scratch_len, lut_into,
};

use crate::Result;
use crate::cache::accumulate::Accumulator;
use crate::cache::{Footprint, Geometry, Store};
use crate::model::Rope;

/// Offline codebooks of one key/value head, shared by all sequences.
pub(crate) struct HeadCodebooks {
    pub keys: CodebookBuf,
    pub values: CodebookBuf,
}

impl HeadCodebooks {
    /// Bytes of the centroids, as `f32`.
    pub fn bytes(&self) -> usize {
        let len = |codebook: Codebook<'_>| codebook.shape().codebook_len();
        4 * (len(self.keys.view()) + len(self.values.view()))
    }
}

/// MILLION: keys (rotated) and values are product-quantized; attention runs on the codes.
#[derive(Clone)]
pub(crate) struct MillionStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    codebooks: Arc<Vec<HeadCodebooks>>, // (n_kv_heads,)
    codes: Vec<[CodesBuf; 2]>,          // per head: keys and values
    len: usize,
}

impl MillionStore {
    pub fn new(geometry: Geometry, rope: Arc<Rope>, codebooks: Arc<Vec<HeadCodebooks>>) -> Self {
        let codes = codebooks
            .iter()
            .map(|books| [&books.keys, &books.values].map(|book| CodesBuf::new(book.view().shape())))
            .collect();
        Self { geometry, rope, codebooks, codes, len: 0 }
    }
}

impl Store for MillionStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let rotated = self.rope.rotated(k, kv_dim, pos);
        for (head, (books, codes)) in self.codebooks.iter().zip(&mut self.codes).enumerate() {
            codes[0].append(&books.keys.view(), &self.geometry.head_rows(head, &rotated))?;
            codes[1].append(&books.values.view(), &self.geometry.head_rows(head, v))?;
        }
        self.len += k.len() / kv_dim;
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.codes.iter_mut().flatten().for_each(|codes| codes.truncate(len));
        self.len = len;
        Ok(())
    }

    fn attend(&self, head: usize, q: &[f32], group: &mut [Accumulator]) -> Result<()> {
        let (books, [keys, values]) = (&self.codebooks[head], &self.codes[head]);
        let tokens = CodedTokens {
            keys: keys.view(),
            values: values.view(),
            codebook: books.values.view(),
            key_scales: None,
            value_scales: None,
            bias: None,
        };
        let mut luts = vec![0.0; group.len() * tokens.keys.shape().lut_len()];
        lut_into(&books.keys.view(), q, &mut luts)?;
        attend_to_codes(&luts, &tokens, group)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.codes.iter().flatten().map(|codes| codes.view().size()).sum(),
            shared: self.codebooks.iter().map(HeadCodebooks::bytes).sum(),
            ..Footprint::default()
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}

/// Adds the attention of a group's query heads on coded tokens to their accumulators.
pub(crate) fn attend_to_codes(
    luts: &[f32],
    tokens: &CodedTokens<'_>,
    group: &mut [Accumulator],
) -> Result<()> {
    let shape = tokens.codebook.shape();
    let mut scratch = vec![0.0; attend_scratch_len(shape, group.len())];
    let mut out = vec![0.0; group.len() * shape.dim()];
    let mut stats = vec![SoftmaxStats::EMPTY; group.len()];
    attend_into(luts, tokens, &mut scratch, &mut out, &mut stats)?;
    for ((accumulator, stats), out) in group.iter_mut().zip(stats).zip(out.chunks_exact(shape.dim())) {
        accumulator.merge(stats.max, stats.sum, out);
    }
    Ok(())
}
