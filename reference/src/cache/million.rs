use std::sync::Arc;

use pq_core::{
    CodebookBuf, CodedTokens, CodesBuf, Outlier, attend_into, attend_scratch_len, decode_into,
    extract_outliers, lut_into, restore_outliers,
};
use svd_core::SoftmaxStats;

use crate::Result;
use crate::cache::{Footprint, Geometry, Store};
use crate::model::Rope;
use crate::side::Pair;

/// One head's keys or values.
#[derive(Clone)]
struct Coded {
    codes: CodesBuf,
    centre: Vec<f32>,       // (head_dim,) mean of the first rows; empty without outliers
    outliers: Vec<Outlier>, // of all rows
}

impl Coded {
    fn new(codebook: &CodebookBuf) -> Self {
        Self { codes: CodesBuf::new(codebook.view().shape()), centre: vec![], outliers: vec![] }
    }

    /// Appends rows (n, head_dim) of which `percent` of the elements are kept exact next to the codes.
    fn append(&mut self, codebook: &CodebookBuf, mut rows: Vec<f32>, percent: usize) -> Result<()> {
        if percent > 0 {
            let dim = codebook.view().shape().dim();
            if self.centre.is_empty() {
                self.centre = mean_row(&rows, dim);
            }
            let first = (self.codes.view().n() * dim) as u32;
            let found = take_outliers(&mut rows, &self.centre, percent)?;
            self.outliers.extend(found.iter().map(|x| Outlier { index: first + x.index, ..*x }));
        }
        self.codes.append(&codebook.view(), &rows)?;
        Ok(())
    }

    fn truncate(&mut self, len: usize) {
        self.codes.truncate(len);
        let end = len * self.codes.view().shape().dim();
        self.outliers.retain(|x| (x.index as usize) < end);
    }

    /// The rows that codes and outliers stand for.
    fn decoded(&self, codebook: &CodebookBuf) -> Result<Vec<f32>> {
        let codes = self.codes.view();
        let mut rows = vec![0.0; codes.n() * codes.shape().dim()];
        decode_into(&codebook.view(), &codes, &mut rows)?;
        restore_outliers(&mut rows, &self.outliers)?;
        Ok(rows)
    }

    fn bytes(&self) -> usize {
        self.codes.view().size() + size_of_val(&self.outliers[..]) + size_of_val(&self.centre[..])
    }
}

/// The mean of rows (n, dim).
pub(crate) fn mean_row(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut mean = vec![0.0_f64; dim];
    for row in rows.chunks_exact(dim) {
        mean.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    let n = (rows.len() / dim) as f64;
    mean.into_iter().map(|sum| (sum / n) as f32).collect()
}

/// Replaces the `percent` of elements that are farthest from the centre of their channel by it, and lists them.
pub(crate) fn take_outliers(rows: &mut [f32], centre: &[f32], percent: usize) -> Result<Vec<Outlier>> {
    let count = (rows.len() * percent).div_ceil(100);
    let (mut distances, mut indices) = (vec![0.0; rows.len()], vec![0; count]);
    let mut outliers = vec![Outlier::default(); count];
    extract_outliers(rows, centre, &mut distances, &mut indices, &mut outliers)?;
    Ok(outliers)
}

/// MILLION: keys (rotated) and values are product-quantized; attention runs on the codes.
///
/// With outliers, which is the paper's study and not its method, rows are decoded and corrected instead.
#[derive(Clone)]
pub(crate) struct MillionStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    codebooks: Arc<Vec<Pair<CodebookBuf>>>, // (n_kv_heads,), offline, shared by all sequences
    outliers: usize,                        // percent of the elements that are kept exact
    heads: Vec<Pair<Coded>>,
    len: usize,
}

impl MillionStore {
    pub fn new(
        geometry: Geometry,
        rope: Arc<Rope>,
        codebooks: Arc<Vec<Pair<CodebookBuf>>>,
        outliers: usize,
    ) -> Self {
        let heads = codebooks.iter().map(|books| Pair::of(|side| Coded::new(&books[side]))).collect();
        Self { geometry, rope, codebooks, outliers, heads, len: 0 }
    }
}

impl Store for MillionStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let rotated = self.rope.rotated(k, kv_dim, pos);
        for (head, (books, Pair { keys, values })) in self.codebooks.iter().zip(&mut self.heads).enumerate() {
            keys.append(&books.keys, self.geometry.head_rows(head, &rotated), self.outliers)?;
            values.append(&books.values, self.geometry.head_rows(head, v), self.outliers)?;
        }
        self.len += k.len() / kv_dim;
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().flat_map(Pair::iter_mut).for_each(|coded| coded.truncate(len));
        self.len = len;
        Ok(())
    }

    fn attend(&self, head: usize, q: &[f32], out: &mut [f32], stats: &mut [SoftmaxStats]) -> Result<()> {
        let (books, Pair { keys, values }) = (&self.codebooks[head], &self.heads[head]);
        if self.outliers > 0 {
            let (keys, values) = (keys.decoded(&books.keys)?, values.decoded(&books.values)?);
            return Ok(svd_core::attend_into(q, &keys, &values, out, stats)?);
        }
        let tokens = CodedTokens {
            keys: keys.codes.view(),
            values: values.codes.view(),
            codebook: books.values.view(),
            key_scales: None,
            value_scales: None,
            bias: None,
        };
        let mut luts = vec![0.0; stats.len() * tokens.keys.shape().lut_len()];
        lut_into(&books.keys.view(), q, &mut luts)?;
        attend_to_codes(&luts, &tokens, out, stats)
    }

    fn footprint(&self) -> Footprint {
        let codebooks = self.codebooks.iter().flat_map(Pair::iter);
        Footprint {
            kept: self.heads.iter().flat_map(Pair::iter).map(Coded::bytes).sum(),
            shared: codebooks.map(|codebook| 4 * codebook.view().shape().codebook_len()).sum(),
            ..Footprint::default()
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}

/// [`pq_core::attend_into`] with its own scratch, and with the softmax statistics of `svd-core`: the cores do not know each
/// other, and here is where their two types meet.
pub(crate) fn attend_to_codes(
    luts: &[f32],
    tokens: &CodedTokens<'_>,
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<()> {
    let mut scratch = vec![0.0; attend_scratch_len(tokens.codebook.shape(), stats.len())];
    let mut pq_stats: Vec<_> =
        stats.iter().map(|&SoftmaxStats { max, sum }| pq_core::SoftmaxStats { max, sum }).collect();
    attend_into(luts, tokens, &mut scratch, out, &mut pq_stats)?;
    for (stats, pq_core::SoftmaxStats { max, sum }) in stats.iter_mut().zip(pq_stats) {
        *stats = SoftmaxStats { max, sum };
    }
    Ok(())
}
