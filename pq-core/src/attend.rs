use crate::error::check_len;
use crate::exp::exp;
use crate::{Codebook, Codes, Error, Lut};

/// What a softmax over some tokens needs to be merged with one over others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxStats {
    /// The highest score; minus infinity for no tokens.
    pub max: f32,
    /// Sum over the tokens of `exp(score - max)`.
    pub sum: f32,
}

/// Attention of one query on coded keys and values, never decoding a token.
///
/// With `s_t = sum_j lut[j, key_codes[t, j]]`, writes `out = sum_t exp(s_t - max s) * value_t`, not divided by the sum,
/// and returns the two numbers that divide or merge it. Scale the query by `1 / sqrt(head_dim)` before making `lut`.
///
/// Scores come from the table. Values are never gathered: the softmax weights of the tokens that share a
/// centroid are added up first, then each centroid is multiplied once.
///
/// # Shapes
/// `lut` (m_k, ksub_k); `key_codes`, `value_codes` n vectors each; `scores` (n,) and `weights` (m_v, ksub_v) scratch;
/// `out` (dim_v,), fully written.
/// # Errors
/// [`Error::ShapeMismatch`] or [`Error::Length`]; `out` is then untouched.
/// # Cost
/// n * (m_k + m_v) additions, n exponentials, ksub_v * dim_v multiply-adds, no allocation.
/// # Source
/// MILLION (DAC 2025), III-B.
pub fn attend_into(
    lut: &Lut<'_>,
    key_codes: &Codes<'_>,
    values: &Codebook<'_>,
    value_codes: &Codes<'_>,
    scores: &mut [f32],
    weights: &mut [f32],
    out: &mut [f32],
) -> Result<SoftmaxStats, Error> {
    let shape = values.shape();
    if value_codes.shape() != shape {
        return Err(Error::ShapeMismatch);
    }
    check_len("value_codes", value_codes.n(), key_codes.n())?;
    check_len("weights", weights.len(), shape.lut_len())?;
    check_len("out", out.len(), shape.dim())?;
    crate::scan_into(lut, key_codes, scores)?;

    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    weights.fill(0.0);
    for (i, &score) in scores.iter().enumerate() {
        let weight = exp(score - max);
        sum += weight;
        for (row, c) in weights.chunks_exact_mut(shape.ksub()).zip(value_codes.iter_vector(i)) {
            row[c] += weight;
        }
    }
    out.fill(0.0);
    for (j, (row, out)) in
        weights.chunks_exact(shape.ksub()).zip(out.chunks_exact_mut(shape.dsub())).enumerate()
    {
        for (&weight, centroid) in row.iter().zip(values.subspace(j).chunks_exact(shape.dsub())) {
            for (out, &y) in out.iter_mut().zip(centroid) {
                *out += weight * y;
            }
        }
    }
    Ok(SoftmaxStats { max, sum })
}
