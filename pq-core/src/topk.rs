use core::cmp::Ordering;

use crate::Error;
use crate::error::check_len;

/// Selects the `k` highest scores in expected linear time.
///
/// Writes their indices to the front of `indices`, in ascending order, and returns how many: `min(k, n)`. Of equal
/// scores the lower index wins; NaN ranks below every number.
///
/// # Shapes
/// `scores` (n,); `indices` (n,), whose tail is scratch.
/// # Errors
/// [`Error::Length`] when `indices.len() != n`.
/// # Cost
/// Expected O(n + k log k), no allocation.
/// # Examples
/// ```
/// let mut indices = [0; 5];
/// let n = pq_core::top_k_into(&[0.5, 2.0, 2.0, -1.0, 2.0], 2, &mut indices)?;
/// assert_eq!(indices[..n], [1, 2]);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn top_k_into(scores: &[f32], k: usize, indices: &mut [u32]) -> Result<usize, Error> {
    check_len("indices", indices.len(), scores.len())?;
    let k = k.min(scores.len());
    for (i, slot) in indices.iter_mut().enumerate() {
        *slot = i as u32;
    }
    if k > 0 && k < scores.len() {
        indices.select_nth_unstable_by(k - 1, |&a, &b| by_score(scores, a, b));
    }
    indices[..k].sort_unstable();
    Ok(k)
}

/// Higher score first, then lower index; NaN last.
fn by_score(scores: &[f32], a: u32, b: u32) -> Ordering {
    let key = |i: u32| {
        let score = scores[i as usize];
        if score.is_nan() { f32::NEG_INFINITY } else { score }
    };
    key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn selected(scores: &[f32], k: usize) -> Vec<u32> {
        let mut indices = vec![0; scores.len()];
        let n = top_k_into(scores, k, &mut indices).unwrap();
        indices.truncate(n);
        indices
    }

    #[test]
    fn edges() {
        assert_eq!(selected(&[], 3), []);
        assert_eq!(selected(&[1.0, 2.0], 0), []);
        assert_eq!(selected(&[1.0, 2.0], 9), [0, 1]);
        assert_eq!(selected(&[7.0; 6], 3), [0, 1, 2]);
        assert_eq!(selected(&[f32::NAN, 1.0, f32::NAN, f32::INFINITY], 2), [1, 3]);
    }
}
