//! The arithmetic of a forward pass on plain slices.

mod dot_rows;
mod matmul;

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;
use kv_attend::SoftmaxStats;
use kv_model::Linear;
use rayon::prelude::*;

pub use matmul::matmul;

use crate::{Error, Result};

/// `y = W x + b` for every row: `x` (n, n_in); `y` (n, n_out), fully written.
///
/// # Panics
/// As [`matmul`].
pub fn linear(layer: &Linear, x: &[f32], y: &mut [f32]) {
    matmul(&layer.weight, x, y);
    if let Some(bias) = &layer.bias {
        y.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
    }
}

/// Inner product in 16 interleaved partial sums.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let ((a_chunks, a_tail), (b_chunks, b_tail)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum::<f32>()
}

/// `a += b`.
pub fn add(a: &mut [f32], b: &[f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

/// `out = x / rms(x) * weight` for every row of `x`, (n, weight.len()).
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        let scale = rms_scale(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * w;
        }
    }
}

/// As [`rms_norm`], in place.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    for x in x.chunks_exact_mut(weight.len()) {
        let scale = rms_scale(x, eps);
        for (x, w) in x.iter_mut().zip(weight) {
            *x = *x * scale * w;
        }
    }
}

fn rms_scale(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// `gate = silu(gate) * up`.
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate *= up / (1.0 + (-*gate).exp());
    }
}

/// Turns scores into probabilities; returns the largest score, and the sum of `exp(score - largest)`.
pub fn softmax(x: &mut [f32]) -> SoftmaxStats {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in &mut *x {
        *x = (*x - max).exp();
        sum += *x;
    }
    for x in x {
        *x /= sum;
    }
    SoftmaxStats { max, sum }
}

/// Index of the first largest element; 0 for none.
#[must_use]
pub fn argmax(x: &[f32]) -> usize {
    let mut best = 0;
    for (i, &value) in x.iter().enumerate() {
        if value > x[best] {
            best = i;
        }
    }
    best
}

/// The heads and the window of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Components of a head.
    pub head_dim: usize,
    /// Sliding window: most recent tokens that a query attends to, its own included; `None` for all.
    pub window: Option<usize>,
}

/// Causal exact attention of consecutive tokens: a token sees itself and earlier tokens in its window.
///
/// `q` (n, n_heads * head_dim) and `k` (n, n_kv_heads * head_dim) rotated, `v` like `k`; `out` like `q` and
/// `stats` (n, n_heads), fully written. `out` is normalized by these statistics.
///
/// # Errors
/// [`Error::Argument`] when a size is 0, `n_kv_heads` does not divide `n_heads` or the lengths are
/// inconsistent; `out` and `stats` are then untouched.
pub fn causal_attention(
    shape: AttentionShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<()> {
    const BLOCK: usize = 64; // query rows per task
    let AttentionShape { n_heads, n_kv_heads, head_dim, window } = shape;
    let row_lens = || -> Option<(usize, usize)> {
        let (q_dim, kv_dim) = (n_heads.checked_mul(head_dim)?, n_kv_heads.checked_mul(head_dim)?);
        let n = q.len().checked_div(q_dim)?;
        let fits = n_heads.checked_rem(n_kv_heads)? == 0
            && (q.len(), out.len()) == (n * q_dim, n * q_dim)
            && (k.len(), v.len()) == (n * kv_dim, n * kv_dim)
            && stats.len() == n * n_heads
            && window != Some(0);
        fits.then_some((q_dim, kv_dim))
    };
    let (q_dim, kv_dim) = row_lens().ok_or_else(|| {
        let [q, k, v, out, stats] = [q.len(), k.len(), v.len(), out.len(), stats.len()];
        Error::Argument(format!(
            "attention of {n_heads} heads of {head_dim} on {n_kv_heads} in a window of {window:?} does not fit {q} \
             queries, {k} keys, {v} values, {out} outputs and {stats} statistics"
        ))
    })?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let first_seen = |t: usize| window.map_or(0, |window| (t + 1).saturating_sub(window));
    let blocks = out
        .par_chunks_mut(BLOCK.saturating_mul(q_dim))
        .zip(stats.par_chunks_mut(BLOCK.saturating_mul(n_heads)));
    blocks.enumerate().for_each(|(block, (out, stats))| {
        let (first, rows) = (block * BLOCK, out.len() / q_dim);
        let base = first_seen(first); // the first key that the block sees
        let seen = first + rows - base; // keys from it to the last row's
        let mut scores = vec![0.0; rows * seen];
        for h in 0..n_heads {
            let kv = h / (n_heads / n_kv_heads) * head_dim;
            let q = &q[first * q_dim + h * head_dim..];
            // SAFETY: `row_lens` has found that all of q, k, v and out are n whole rows, of which
            // `first..first + rows` and `base..base + seen` exist, and that n_kv_heads divides n_heads, so
            // that columns `kv..kv + head_dim` lie inside a row of k and v, as the query head's do inside one
            // of q. Every element that these strides reach lies inside its slice.
            unsafe {
                product(
                    rows,
                    seen,
                    head_dim,
                    &mut scores,
                    seen,
                    q,
                    (q_dim, 1),
                    &k[base * kv_dim + kv..],
                    (1, kv_dim),
                    scale,
                    Parallelism::None,
                );
            }
            for (i, row) in scores.chunks_exact_mut(seen).enumerate() {
                let (before, row) = row.split_at_mut(first_seen(first + i) - base);
                let (visible, after) = row.split_at_mut(first + i + 1 - base - before.len());
                stats[i * n_heads + h] = softmax(visible);
                before.fill(0.0);
                after.fill(0.0);
            }
            // SAFETY: as above; the head's columns of `out` lie inside its rows.
            unsafe {
                product(
                    rows,
                    head_dim,
                    seen,
                    &mut out[h * head_dim..],
                    q_dim,
                    &scores,
                    (seen, 1),
                    &v[base * kv_dim + kv..],
                    (kv_dim, 1),
                    1.0,
                    Parallelism::None,
                );
            }
        }
    });
    Ok(())
}

/// Log-softmax of logits, in `f64`.
///
/// # Examples
/// ```
/// let log_p = kv_llama::ops::log_softmax(&[0.0, 0.0, f32::NEG_INFINITY]);
/// assert!((log_p[0] - 0.5_f64.ln()).abs() < 1e-12);
/// ```
#[must_use]
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    logits.iter().map(|&x| f64::from(x - max) - sum.ln()).collect()
}

/// `dst = scale * a b`, with the row stride of `dst` and (row, column) strides of `a` (m, k), `b` (k, n).
///
/// # Safety
/// Every element that the sizes and strides reach must lie inside its slice.
#[allow(clippy::too_many_arguments)]
unsafe fn product(
    m: usize,
    n: usize,
    k: usize,
    dst: &mut [f32],
    dst_stride: usize,
    a: &[f32],
    a_strides: (usize, usize),
    b: &[f32],
    b_strides: (usize, usize),
    scale: f32,
    parallelism: Parallelism,
) {
    // The kernel writes columns: it gets the transposed product, `b^T a^T`.
    // SAFETY: the caller's contract.
    unsafe {
        get_gemm_fn()(
            n,
            m,
            k,
            dst.as_mut_ptr(),
            dst_stride as isize,
            1,
            false,
            b.as_ptr(),
            b_strides.0 as isize,
            b_strides.1 as isize,
            a.as_ptr(),
            a_strides.0 as isize,
            a_strides.1 as isize,
            0.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causal_attention_equals_the_formula() {
        let (n, n_heads, n_kv, d) = (70, 4, 2, 6); // more than one block
        let value = |i: usize| ((i * 7919) % 1000) as f32 / 500.0 - 1.0;
        let q: Vec<f32> = (0..n * n_heads * d).map(value).collect();
        let k: Vec<f32> = (0..n * n_kv * d).map(|i| value(i + 3)).collect();
        let v: Vec<f32> = (0..n * n_kv * d).map(|i| value(i + 5)).collect();
        for window in [None, Some(1), Some(2), Some(5), Some(64), Some(69), Some(70), Some(1000)] {
            let shape = AttentionShape { n_heads, n_kv_heads: n_kv, head_dim: d, window };
            let (mut out, mut stats) = (vec![0.0; q.len()], vec![SoftmaxStats::EMPTY; n * n_heads]);
            causal_attention(shape, &q, &k, &v, &mut out, &mut stats).unwrap();
            for t in 0..n {
                for h in 0..n_heads {
                    let row =
                        |x: &[f32], t: usize, heads: usize, h: usize| x[(t * heads + h) * d..][..d].to_vec();
                    let seen = window.map_or(0, |window| (t + 1).saturating_sub(window))..t + 1;
                    let scores: Vec<f32> = (seen.clone())
                        .map(|s| dot(&row(&q, t, n_heads, h), &row(&k, s, n_kv, h / 2)) / (d as f32).sqrt())
                        .collect();
                    let mut p = scores.clone();
                    softmax(&mut p);
                    for c in 0..d {
                        let parts = seen.clone().zip(&p);
                        let exact: f32 = parts.map(|(s, p)| p * row(&v, s, n_kv, h / 2)[c]).sum();
                        assert!((exact - row(&out, t, n_heads, h)[c]).abs() < 1e-4, "{window:?}");
                    }
                    let log_sum = scores.iter().map(|x| x.exp()).sum::<f32>().ln();
                    let SoftmaxStats { max, sum } = stats[t * n_heads + h];
                    assert!((max + sum.ln() - log_sum).abs() < 1e-4, "{window:?}");
                }
            }
        }
    }
}
