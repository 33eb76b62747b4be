use crate::Error;
use crate::error::check_len;
use crate::exp::exp;

/// What a softmax over some tokens needs to be merged with one over others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxStats {
    /// The highest score; minus infinity for no tokens.
    pub max: f32,
    /// Sum over the tokens of `exp(score - max)`.
    pub sum: f32,
}

/// Attention of one query on the rows of its key/value head, at whatever ranks are left.
///
/// With `s_t = <q, k_t>`, writes `out = sum_t exp(s_t - max s) * v_t`, not divided by the sum, and returns the two numbers
/// that divide or merge it. Scale the query by `1 / sqrt(head_dim)` first. Dot products add 16 interleaved partial sums.
///
/// # Shapes
/// `q` (rank_k,); `keys` (n, rank_k); `values` (n, rank_v); `scores` (n,) scratch, left holding `exp(s_t - max s)`; `out`
/// (rank_v,), fully written.
/// # Errors
/// [`Error::Length`], or [`Error::Zero`] for a rank of 0; `out` is then untouched.
/// # Cost
/// n * (rank_k + rank_v) multiply-adds, n exponentials, one pass over the rows, no allocation.
/// # Source
/// ZACK, 5.1: attention in the rotated space, nothing is turned back.
/// # Examples
/// ```
/// let (keys, values) = ([0.0, 0.0], [1.0, 3.0]); // two tokens of rank 1, equal scores
/// let mut out = [0.0];
/// let stats = svd_core::attend_into(&[2.0], &keys, &values, &mut [0.0; 2], &mut out)?;
/// assert_eq!(out[0] / stats.sum, 2.0);
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn attend_into(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    scores: &mut [f32],
    out: &mut [f32],
) -> Result<SoftmaxStats, Error> {
    let (n, rank_k, rank_v) = (scores.len(), q.len(), out.len());
    if rank_k == 0 || rank_v == 0 {
        return Err(Error::Zero { what: "rank" });
    }
    check_len("keys", keys.len(), n.checked_mul(rank_k).ok_or(Error::TooLarge)?)?;
    check_len("values", values.len(), n.checked_mul(rank_v).ok_or(Error::TooLarge)?)?;

    let mut max = f32::NEG_INFINITY;
    for (key, score) in keys.chunks_exact(rank_k).zip(&mut *scores) {
        *score = dot(q, key);
        max = max.max(*score);
    }
    let mut sum = 0.0;
    out.fill(0.0);
    for (value, score) in values.chunks_exact(rank_v).zip(&mut *scores) {
        let weight = exp(*score - max);
        sum += weight;
        *score = weight;
        for (out, &v) in out.iter_mut().zip(value) {
            *out += weight * v;
        }
    }
    Ok(SoftmaxStats { max, sum })
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let ((a_chunks, a_tail), (b_chunks, b_tail)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum::<f32>()
}
