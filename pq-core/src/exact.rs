//! Attention on exact rows: window, sinks, retrieved tokens.

use crate::error::{check_len, count_rows};
use crate::simd::Kernel;
use crate::softmax::{exponentiate, max};
use crate::{Backend, Element, Error, SoftmaxStats};

/// Attention of a group of query heads on exact keys and values.
///
/// Adds the tokens to `out` and `stats`, as [`attend_into`](crate::attend_into) does, so that both contribute
/// to one softmax. Scale queries by `1 / sqrt(head_dim)`. This is the plain definition, vectorized by the
/// compiler; the function of the same purpose in `svd-core` is tuned for long sequences.
///
/// # Shapes
/// `queries` (group, dim); `keys` (n, dim); `values` (n, dim_v); `scores` (n,) scratch; `out` (group, dim_v);
/// `stats` (group,).
/// # Errors
/// [`Error::Zero`] for no query or a dimension of zero, [`Error::PartialRow`], [`Error::Length`]; `out` and
/// `stats` are then untouched.
/// # Cost
/// group * n * (dim + dim_v) multiply-adds, no allocation.
pub fn attend_exact_into<E: Element>(
    queries: &[f32],
    keys: &[E],
    values: &[E],
    scores: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    attend_exact_into_with(Backend::detect(), queries, keys, values, scores, out, stats)
}

/// [`attend_exact_into`] on a given backend.
///
/// # Errors
/// As [`attend_exact_into`], and [`Error::BackendUnavailable`].
pub fn attend_exact_into_with<E: Element>(
    backend: Backend,
    queries: &[f32],
    keys: &[E],
    values: &[E],
    scores: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    backend.check()?;
    let (group, n) = (stats.len(), scores.len());
    if group == 0 || queries.is_empty() || out.is_empty() {
        return Err(Error::Zero { what: "the number of query or value components" });
    }
    let dim = count_rows("queries", queries.len(), group)?;
    let dim_v = count_rows("out", out.len(), group)?;
    check_len("keys", keys.len(), n.saturating_mul(dim))?;
    check_len("values", values.len(), n.saturating_mul(dim_v))?;
    backend.run(AttendExact { queries, keys, values, scores, out, stats });
    Ok(())
}

struct AttendExact<'a, 'b, E> {
    queries: &'a [f32],
    keys: &'a [E],
    values: &'a [E],
    scores: &'b mut [f32],
    out: &'b mut [f32],
    stats: &'b mut [SoftmaxStats],
}

impl<E: Element> Kernel for AttendExact<'_, '_, E> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        let group = self.stats.len();
        let (dim, dim_v) = (self.queries.len() / group, self.out.len() / group);
        let queries = self.queries.chunks_exact(dim).zip(self.out.chunks_exact_mut(dim_v));
        for ((query, out), stats) in queries.zip(self.stats) {
            for (key, score) in self.keys.chunks_exact(dim).zip(self.scores.iter_mut()) {
                *score = dot(query, key);
            }
            stats.raise_max(max(self.scores), out);
            stats.sum += exponentiate(self.scores, stats.finite_max());
            for (value, &weight) in self.values.chunks_exact(dim_v).zip(self.scores.iter()) {
                for (out, &x) in out.iter_mut().zip(value) {
                    *out += weight * x.to_f32();
                }
            }
        }
    }
}

/// Computes the scores (group, n) of exact keys.
pub(crate) struct ExactScores<'a, 'b, E> {
    pub queries: &'a [f32], // (group, dim)
    pub keys: &'a [E],      // (n, dim)
    pub dim: usize,         // at least 1
    pub scores: &'b mut [f32],
}

impl<E: Element> Kernel for ExactScores<'_, '_, E> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        let n = self.keys.len() / self.dim;
        for (query, scores) in self.queries.chunks_exact(self.dim).zip(self.scores.chunks_exact_mut(n.max(1)))
        {
            for (key, score) in self.keys.chunks_exact(self.dim).zip(scores) {
                *score = dot(query, key);
            }
        }
    }
}

/// Inner product in sixteen partial sums, added in order.
#[inline(always)]
fn dot<E: Element>(query: &[f32], key: &[E]) -> f32 {
    let mut lanes = [0.0; 16];
    let (q, q_tail) = query.as_chunks::<16>();
    let (k, k_tail) = key.as_chunks::<16>();
    for (q, k) in q.iter().zip(k) {
        for ((lane, &q), &k) in lanes.iter_mut().zip(q).zip(k) {
            *lane += q * k.to_f32();
        }
    }
    for ((lane, &q), &k) in lanes.iter_mut().zip(q_tail).zip(k_tail) {
        *lane += q * k.to_f32();
    }
    lanes.into_iter().sum()
}
