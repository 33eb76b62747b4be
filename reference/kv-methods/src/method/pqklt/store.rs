//! PQ codes of transformed keys and values: the query-metric KLT, a norm per token, and attention on the
//! codes.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use kv_attend::owner::{Pair, Side};
use kv_llama::ops::dot;
use kv_llama::{Footprint, HeadFit};
use kv_model::Rope;
use pq_core::{
    CodebookBuf, CodedTokens, CodesBuf, Luts, RopeMeanBuf, Start, TrainOptions, attend_into,
    attend_scratch_len, decode_into, decode_norm, divide_by_norms, lut_into, train,
};
use svd_core::{MapBuf, Rows, RowsMut, SoftmaxStats};

use super::mean_errors::MeanErrors;
use crate::Result;
use crate::cache::{CodingError, Geometry, Store, Sums, head_fits, merge_part};

/// The space in which keys are coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeySpace {
    /// After RoPE, minus the rotated pre-RoPE mean: one score table serves all positions, and the mean's
    /// contribution is computed from the position.
    RotatedMean,
    /// Before RoPE: the most accurate codes, but a score needs the decoded key, rotated to its position.
    BeforeRope,
    /// After RoPE: a score is a sum of table entries only. The mean is part of the centroids.
    AfterRope,
}

/// The transform and codebook of one head's keys or values.
pub(crate) struct HeadCode {
    pub mean: Vec<f32>, // (head_dim,); of keys, before RoPE
    pub basis: MapBuf,  // projects rows
    pub dual: MapBuf,   // projects queries and reconstructs rows
    pub codebook: Arc<CodebookBuf>,
    pub is_gaussian: bool, // the codebook is that of all heads, basis and dual too but for a scale
    pub norms: Option<f32>, // factor of rows, which are then divided by their norms, stored in a byte each
    /// Mean squared error of each component of a key, as the query sees it, on the calibration rows:
    /// (head_dim,). Empty for values.
    pub errors: Vec<f32>,
    pub error: f32, // squared error relative to the squared rows, on the calibration rows
}

impl HeadCode {
    /// Transforms mean-free rows (n, head_dim) in place; with a gain, also divides them by their norms, and
    /// returns these times the gain.
    pub fn transform(basis: &MapBuf, gain: Option<f32>, rows: &mut Vec<f32>) -> Result<Vec<u8>> {
        let dim = basis.view().dim();
        let mut transformed = vec![0.0; rows.len()];
        let out = RowsMut::contiguous(&mut transformed, dim)?;
        basis.view().project_into(Rows::contiguous(rows, dim)?, out)?;
        *rows = transformed;
        let mut coded = vec![];
        if let Some(gain) = gain {
            rows.iter_mut().for_each(|x| *x *= gain);
            coded = vec![0; rows.len() / dim];
            divide_by_norms(rows, dim, &mut coded)?;
        }
        Ok(coded)
    }

    /// Codes transformed rows, undoes their division by the norms and returns what coding has lost of them.
    pub fn residuals(
        codebook: &CodebookBuf,
        rows: &mut [f32],
        gain: Option<f32>,
        norms: &[u8],
    ) -> Result<Vec<f32>> {
        let (codebook, shape) = (codebook.view(), codebook.view().shape());
        let mut codes = CodesBuf::new(shape);
        codes.append(&codebook, rows)?;
        let mut residuals = vec![0.0; rows.len()];
        decode_into(&codebook, &codes.view(), 0, &mut residuals)?;
        Self::multiply_by_norms(rows, gain, norms);
        Self::multiply_by_norms(&mut residuals, None, norms);
        residuals.iter_mut().zip(rows.iter()).for_each(|(decoded, x)| *decoded = x - *decoded);
        Ok(residuals)
    }

    /// Multiplies rows by their norms, if there are any, and divides them by the gain, which the norms
    /// include.
    fn multiply_by_norms(rows: &mut [f32], gain: Option<f32>, norms: &[u8]) {
        let dim = rows.len() / norms.len().max(1);
        for (row, &norm) in rows.chunks_exact_mut(dim.max(1)).zip(norms) {
            let factor = decode_norm(norm) / gain.unwrap_or(1.0);
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// Subtracts the mean from unrotated rows.
    pub fn subtract_mean(mean: &[f32], rows: &mut [f32]) {
        for row in rows.chunks_exact_mut(mean.len()) {
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        }
    }
}

/// The transforms and codebooks of one layer.
pub(crate) struct TransformedPlan {
    pub heads: Vec<Pair<HeadCode>>, // (n_kv_heads,)
    pub space: KeySpace,
    /// Iterations for which codebooks are trained further on the prompt; they are then the sequence's own.
    pub refine: usize,
}

/// One head's keys or values.
#[derive(Clone)]
struct Coded {
    codes: CodesBuf,
    norms: Vec<u8>,                    // (len,) or empty
    refined: Option<Arc<CodebookBuf>>, // refined on this sequence's prompt
    error: CodingError,                // of all tokens coded since the first one
}

/// See the module documentation.
#[derive(Clone)]
pub(crate) struct TransformedStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    plan: Arc<TransformedPlan>,
    key_means: Arc<Vec<RopeMeanBuf>>, // per head, for `RotatedMean`
    heads: Vec<Pair<Coded>>,
    decoded: Vec<Vec<f32>>, // per head: rotated keys (len, head_dim), for `BeforeRope`
    value_errors: Vec<MeanErrors>, // per head, or empty
    first: usize,           // position of the first token
    len: usize,
}

/// Minimum tokens to refine codebooks on.
const ENOUGH: usize = 256;

impl TransformedStore {
    pub fn new(geometry: Geometry, rope: Arc<Rope>, plan: Arc<TransformedPlan>) -> Result<Self> {
        let coded = |code: &HeadCode| Coded {
            codes: CodesBuf::new(code.codebook.view().shape()),
            norms: vec![],
            refined: None,
            error: CodingError::default(),
        };
        let heads = plan.heads.iter().map(|codes| Pair::of(|side| coded(&codes[side]))).collect();
        let decoded = vec![vec![]; geometry.n_kv_heads];
        let key_means = plan.heads.iter().filter(|_| plan.space == KeySpace::RotatedMean);
        let key_means = key_means.map(|code| RopeMeanBuf::new(&code.keys.mean, rope.frequencies()));
        let key_means = Arc::new(key_means.collect::<std::result::Result<_, _>>()?);
        let value_errors = vec![];
        Ok(Self { geometry, rope, plan, key_means, heads, decoded, value_errors, first: 0, len: 0 })
    }

    /// An empty store that keeps the mean errors of its values.
    pub fn with_mean_errors(self) -> Self {
        let Geometry { n_kv_heads, head_dim, .. } = self.geometry;
        Self { value_errors: vec![MeanErrors::new(head_dim); n_kv_heads], ..self }
    }

    /// Transforms and encodes mean-free rows; returns the decoded rows, transformed.
    fn encode(&mut self, head: usize, side: Side, mut rows: Vec<f32>) -> Result<Vec<f32>> {
        let (code, coded) = (&self.plan.heads[head][side], &mut self.heads[head][side]);
        let shape = code.codebook.view().shape();
        let norms = HeadCode::transform(&code.basis, code.norms, &mut rows)?;
        let is_prompt = coded.codes.view().n() == 0 && rows.len() / shape.dim() >= ENOUGH;
        let iterations = self.plan.refine;
        if is_prompt && iterations > 0 && !code.is_gaussian {
            let start = code.codebook.centroids();
            let options = TrainOptions { iterations, start: Start::From(&start), ..Default::default() };
            let centroids = halved(&train(shape, &rows, &options)?.centroids);
            coded.refined = Some(Arc::new(CodebookBuf::new(shape, &centroids)?));
        }
        let codebook = coded.refined.as_ref().unwrap_or(&code.codebook);
        let start = coded.codes.view().n();
        coded.codes.append(&codebook.view(), &rows)?;
        coded.norms.extend(&norms);
        HeadCode::multiply_by_norms(&mut rows, code.norms, &norms);
        let decoded = self.decoded(head, side, start)?;
        let elements = rows.iter().zip(&decoded).map(|(&x, decoded)| (x, x - decoded));
        self.heads[head][side].error.add(rows.len() / shape.dim(), elements);
        if let (Side::Values, Some(errors)) = (side, self.value_errors.get_mut(head)) {
            errors.add_rows(&rows, &decoded);
        }
        Ok(decoded)
    }

    /// The rows of one head that the codes from token `start` on stand for: without the mean, transformed.
    fn decoded(&self, head: usize, side: Side, start: usize) -> Result<Vec<f32>> {
        let (code, coded) = (&self.plan.heads[head][side], &self.heads[head][side]);
        let codebook = coded.refined.as_ref().unwrap_or(&code.codebook).view();
        let codes = coded.codes.view();
        let mut rows = vec![0.0; (codes.n() - start) * codebook.shape().dim()];
        decode_into(&codebook, &codes, start, &mut rows)?;
        HeadCode::multiply_by_norms(&mut rows, None, coded.norms.get(start..).unwrap_or_default());
        Ok(rows)
    }

    /// Keeps the first `len` tokens. The mean errors of values are those of the tokens that are kept:
    /// `values` gives the rows (n, head_dim) of a head's tokens again, up to 255. After an error nothing has
    /// changed.
    pub fn truncate_of(
        &mut self,
        len: usize,
        values: impl Fn(usize, Range<usize>) -> Result<Vec<f32>>,
    ) -> Result<()> {
        if len >= self.len {
            return Ok(());
        }
        let rest = MeanErrors::rest(len);
        let mut again = vec![];
        for (head, code) in self.plan.heads.iter().enumerate().take(self.value_errors.len()) {
            let mut rows = values(head, rest.clone())?;
            HeadCode::subtract_mean(&code.values.mean, &mut rows);
            let norms = HeadCode::transform(&code.values.basis, code.values.norms, &mut rows)?;
            HeadCode::multiply_by_norms(&mut rows, code.values.norms, &norms);
            again.push(rows);
        }
        self.truncate(len)?;
        for (head, rows) in again.iter().enumerate() {
            let decoded = self.decoded(head, Side::Values, rest.start)?;
            self.value_errors[head].keep_blocks(len);
            self.value_errors[head].add_rows(rows, &decoded);
        }
        Ok(())
    }

    /// Scores of the decoded keys: (group, len).
    fn scores_of_decoded(&self, head: usize, q: &[f32]) -> Vec<f32> {
        let dim = self.geometry.head_dim;
        q.chunks_exact(dim)
            .flat_map(|q| self.decoded[head].chunks_exact(dim).map(|key| dot(q, key)))
            .collect()
    }

    /// The contribution of the keys' rotated mean, if any, to the scores: (group, len).
    fn scores_of_mean(&self, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let dim = self.geometry.head_dim;
        let mut scores = vec![0.0; q.len() / dim * self.len];
        let Some(mean) = self.key_means.get(head).map(RopeMeanBuf::view) else { return Ok(scores) };
        for (q, scores) in q.chunks_exact(dim).zip(scores.chunks_exact_mut(self.len)) {
            mean.scores_into(q, self.first, scores)?;
        }
        Ok(scores)
    }
}

impl TransformedStore {
    /// Adds the attention over coded tokens, computed by `attend` in the basis of the codes, with tokens
    /// before `first` masked.
    pub fn attend_by(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        sums: &mut Sums<'_>,
        attend: impl FnOnce(&CodedStep<'_>, &mut Sums<'_>) -> Result<()>,
    ) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        let (plan, Pair { keys, values }) = (&self.plan.heads[head], &self.heads[head]);
        let Pair { keys: key_code, values: value_code } = plan;
        let scales = |coded: &Coded| -> Option<Vec<f32>> {
            (!coded.norms.is_empty()).then(|| coded.norms.iter().map(|&norm| decode_norm(norm)).collect())
        };
        let (mut key_scales, value_scales) = (scales(keys), scales(values));
        let group = sums.stats.len();
        let mut luts = vec![0.0; group * keys.codes.view().shape().lut_len()];
        let mut probes = q.to_vec();
        let mut bias = if self.plan.space == KeySpace::BeforeRope {
            key_scales = None; // tables of zeros: the bias is the whole score
            self.scores_of_decoded(head, q)
        } else {
            let dual = key_code.dual.view();
            let out = RowsMut::contiguous(&mut probes, dual.rank())?;
            dual.project_into(Rows::contiguous(q, dual.dim())?, out)?;
            lut_into(&keys.refined.as_ref().unwrap_or(&key_code.codebook).view(), &probes, &mut luts)?;
            self.scores_of_mean(head, q)?
        };
        bias.chunks_exact_mut(self.len).for_each(|bias| bias[..first].fill(f32::NEG_INFINITY));
        let codebook = values.refined.as_ref().unwrap_or(&value_code.codebook).view();
        let tokens = CodedTokens::new(keys.codes.view(), values.codes.view(), codebook)?
            .with_key_scales(key_scales.as_deref())?
            .with_value_scales(value_scales.as_deref())?
            .with_bias(&bias[..]);
        let variance = |probe: &[f32]| probe.iter().zip(&key_code.errors).map(|(q, e)| q * q * e).sum();
        let step = CodedStep {
            luts: Luts::new(keys.codes.view().shape(), &luts)?,
            tokens,
            score_variances: probes.chunks_exact(self.geometry.head_dim).map(variance).collect(),
            value_error: value_code.error,
            mean_errors: self.value_errors.get(head),
        };
        // Attention on the transformed values, mapped back once per query.
        let mut transformed = vec![0.0; sums.out.len()];
        let mut transformed_stats = vec![SoftmaxStats::EMPTY; group];
        attend(&step, &mut Sums { out: &mut transformed, stats: &mut transformed_stats })?;
        merge_part((&transformed, &transformed_stats), sums, |transformed, weight, row| {
            value_code.dual.view().reconstruct_into(transformed, row)?;
            row.iter_mut().zip(&value_code.mean).for_each(|(x, mean)| *x += weight * mean);
            Ok(())
        })
    }
}

/// One head's coded tokens, and the queries of a step.
pub(crate) struct CodedStep<'a> {
    pub luts: Luts<'a>,
    pub tokens: CodedTokens<'a>,
    pub score_variances: Vec<f32>, // (group,): variance of exact around coded scores
    pub value_error: f32,          // squared error relative to the variance
    pub mean_errors: Option<&'a MeanErrors>,
}

/// Rounds centroids to 16 bits, as codebooks are stored.
pub(crate) fn halved(centroids: &[f32]) -> Vec<f32> {
    centroids.iter().map(|&x| f16::from_f32(x).to_f32()).collect()
}

impl Store for TransformedStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (dim, kv_dim) = (self.geometry.head_dim, self.geometry.kv_dim());
        if self.len == 0 {
            self.first = pos;
        }
        for head in 0..self.geometry.n_kv_heads {
            let plan = self.plan.clone();
            let Pair { keys, values } = &plan.heads[head];
            let mut rows = self.geometry.head_rows(head, k);
            match plan.space {
                KeySpace::RotatedMean => {
                    self.rope.rotate_rows(&mut rows, dim, pos);
                    self.key_means[head].view().subtract(pos, &mut rows)?;
                }
                KeySpace::BeforeRope => HeadCode::subtract_mean(&keys.mean, &mut rows),
                KeySpace::AfterRope => self.rope.rotate_rows(&mut rows, dim, pos),
            }
            let decoded = self.encode(head, Side::Keys, rows)?;
            if plan.space == KeySpace::BeforeRope {
                let mut rotated = vec![0.0; decoded.len()];
                keys.dual.view().reconstruct_into(&decoded, &mut rotated)?;
                for row in rotated.chunks_exact_mut(dim) {
                    row.iter_mut().zip(&keys.mean).for_each(|(x, mean)| *x += mean);
                }
                self.rope.rotate_rows(&mut rotated, dim, pos);
                self.decoded[head].extend(rotated);
            }
            let mut rows = self.geometry.head_rows(head, v);
            HeadCode::subtract_mean(&values.mean, &mut rows);
            self.encode(head, Side::Values, rows)?;
        }
        self.len += k.len() / kv_dim;
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        for coded in self.heads.iter_mut().flat_map(Pair::iter_mut) {
            coded.codes.truncate(len);
            coded.norms.truncate(len);
            if len == 0 {
                (coded.refined, coded.error) = (None, CodingError::default());
            }
        }
        self.decoded.iter_mut().for_each(|rows| rows.truncate(len * self.geometry.head_dim));
        self.len = len;
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        self.attend_by(head, first, q, sums, |step, Sums { out, stats }| {
            let mut scratch = vec![0.0; attend_scratch_len(step.tokens.value_shape(), stats.len())];
            Ok(attend_into(&step.luts, &step.tokens, &mut scratch, out, stats)?)
        })
    }

    fn footprint(&self) -> Footprint {
        let mut footprint = Footprint::default();
        let codes = self.plan.heads.iter().flat_map(Pair::iter);
        for (coded, code) in self.heads.iter().flat_map(Pair::iter).zip(codes) {
            let codebook = 2 * code.codebook.view().shape().codebook_len();
            footprint.kept += coded.codes.view().size() + coded.norms.len();
            footprint.kept += if coded.refined.is_some() { codebook } else { 0 };
            // The offline codebook, two maps and the mean; of the codebook of Gaussians and its Hadamard
            // transform, which every head of every layer shares, only the mean is a head's own.
            let own = codebook + 8 * code.mean.len() * code.mean.len();
            footprint.shared += 4 * code.mean.len() + if code.is_gaussian { 0 } else { own };
        }
        footprint.kept += self.value_errors.iter().map(MeanErrors::size).sum::<usize>();
        footprint.working = self.decoded.iter().map(|rows| 4 * rows.len()).sum();
        footprint
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        let fit = |coded: &Coded, code: &HeadCode| coded.error.fit(code.error.into());
        let heads = self.heads.iter().zip(&self.plan.heads);
        head_fits(layer, heads.map(|(coded, code)| Pair::of(|side| fit(&coded[side], &code[side]))))
    }
}
