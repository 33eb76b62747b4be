//! Attention on exact rows: the window, the sinks, the retrieved tokens.

use crate::error::check_len;
use crate::simd::Kernel;
use crate::softmax::{exponentiate, max};
use crate::{Backend, Element, Error, SoftmaxStats};

/// Attention of a group of query heads on exact keys and values.
///
/// Adds the tokens to `out` and `stats`, as [`attend_into`](crate::attend_into) does, so that both make one softmax. Scale
/// queries by `1 / sqrt(head_dim)`.
///
/// # Shapes
/// `queries` (group, dim); `keys` (n, dim); `values` (n, dim_v); `scores` (n,) scratch; `out` (group, dim_v);
/// `stats` (group,).
/// # Errors
/// [`Error::Length`]; [`Error::Zero`] when there is no query; `out` and `stats` are then untouched.
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
    let (group, n) = (stats.len(), scores.len());
    let (dim, dim_v) = (queries.len() / group.max(1), out.len() / group.max(1));
    if dim == 0 || dim_v == 0 {
        return Err(Error::Zero { what: "dim" });
    }
    check_len("queries", queries.len(), group * dim)?;
    check_len("out", out.len(), group * dim_v)?;
    check_len("keys", keys.len(), n.saturating_mul(dim))?;
    check_len("values", values.len(), n.saturating_mul(dim_v))?;
    Backend::detect().run(AttendExact { queries, keys, values, scores, out, stats });
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

    /// Plain code, compiled to each set's registers.
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

/// Inner product in sixteen partial sums, added in order.
#[inline(always)]
pub(crate) fn dot<E: Element>(query: &[f32], key: &[E]) -> f32 {
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
