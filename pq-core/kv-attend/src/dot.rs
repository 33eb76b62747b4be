//! The inner product whose order of additions is the definition of a score.

use crate::Element;

/// Inner product in sixteen partial sums, added in order. Excess elements of the longer slice are ignored.
#[inline(always)]
#[must_use]
pub fn dot<E: Element>(query: &[f32], key: &[E]) -> f32 {
    let mut lanes = [0.0; 16];
    let ((q, q_tail), (k, k_tail)) = (query.as_chunks::<16>(), key.as_chunks::<16>());
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
