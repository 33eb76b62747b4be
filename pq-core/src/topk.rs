//! The k highest scores, in time linear in n for every k and every input.
//!
//! Scores are mapped to order-preserving integers (`key`). A radix select then narrows an interval that
//! contains the k-th highest key: one pass counts the keys above the interval and distributes those inside
//! over 2,048 buckets, and the bucket of the k-th key becomes the next interval. 32 bits need at most three
//! passes. A sample gives the first interval, so that the first pass distributes few keys. If the k-th key is
//! not in that interval, the search starts again with all keys. A last pass writes the indices in order.

use crate::error::check_at_least;
use crate::simd::{Kernel, Run, Simd};
use crate::{Backend, Error};

/// Selects the `k` highest scores in linear time.
///
/// Writes their indices to the front of `indices`, in ascending order, and returns how many: `min(k, n)`. Of
/// equal scores the lower index wins; NaN ranks with minus infinity, and the two zeros are equal. The result
/// is fully determined: every backend returns the same indices.
///
/// # Shapes
/// `scores` (n,), n below 2^32; `indices` at least `min(k, n)` elements. Elements beyond the result are
/// undefined.
/// # Errors
/// [`Error::TooShort`] for `indices`; [`Error::TooLarge`] for 2^32 scores or more.
/// # Cost
/// Four passes over `scores` for most inputs and five at most, 8 KiB of stack, no allocation.
/// # Source
/// The sample is that of Floyd, Rivest, "Expected time bounds for selection", CACM 1975.
/// # Examples
/// ```
/// let mut indices = [0; 2];
/// let n = pq_core::top_k_into(&[0.5, 2.0, 2.0, -1.0, 2.0], 2, &mut indices)?;
/// assert_eq!((n, indices), (2, [1, 2]));
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn top_k_into(scores: &[f32], k: usize, indices: &mut [u32]) -> Result<usize, Error> {
    top_k_into_with(Backend::detect(), scores, k, indices)
}

/// [`top_k_into`] on a given backend.
///
/// # Errors
/// As [`top_k_into`], and [`Error::BackendUnavailable`].
pub fn top_k_into_with(
    backend: Backend,
    scores: &[f32],
    k: usize,
    indices: &mut [u32],
) -> Result<usize, Error> {
    backend.check()?;
    if u32::try_from(scores.len()).is_err() {
        return Err(Error::TooLarge);
    }
    let k = k.min(scores.len());
    check_at_least("indices", indices.len(), k)?;
    if k > 0 {
        let cut = backend.run(FindCut { scores, k });
        backend.run(Write { scores, cut, indices });
    }
    Ok(k)
}

/// An order-preserving integer for a score.
#[inline(always)]
fn key(score: f32) -> u32 {
    let score = if score.is_nan() { f32::NEG_INFINITY } else { score + 0.0 };
    let bits = score.to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 0x8000_0000)
}

/// The selected keys: all above `key`, and the first `ties` of those equal to it.
#[derive(Clone, Copy)]
struct Cut {
    key: u32,
    ties: usize,
}

/// Keys `low..=high`, which contain the k-th highest.
#[derive(Clone, Copy)]
struct Interval {
    low: u32,
    high: u32,
}

const BUCKETS_LOG2: u32 = 11;
const BUCKETS: usize = 1 << BUCKETS_LOG2;

impl Interval {
    const ALL: Self = Self { low: 0, high: u32::MAX };

    /// Number of low bits in which the keys of a bucket differ.
    const fn shift(&self) -> u32 {
        (u32::BITS - (self.high - self.low).leading_zeros()).saturating_sub(BUCKETS_LOG2)
    }
}

/// Likely bounds of the k-th highest key, from a strided sample: four standard deviations of its rank to
/// either side.
fn sampled_interval(scores: &[f32], k: usize) -> Interval {
    const SAMPLE: usize = 512;
    if scores.len() < 8 * SAMPLE {
        return Interval::ALL;
    }
    let mut sample = [0; SAMPLE];
    for (i, slot) in sample.iter_mut().enumerate() {
        *slot = key(scores[i * (scores.len() / SAMPLE)]);
    }
    let fraction = k as f32 / scores.len() as f32;
    let rank = (fraction * SAMPLE as f32) as usize; // from the top
    let spread = 4 + (4.0 * libm::sqrtf(SAMPLE as f32 * fraction * (1.0 - fraction))) as usize;
    // Ranks from the bottom.
    let high = if rank > spread { *sample.select_nth_unstable(SAMPLE - (rank - spread)).1 } else { u32::MAX };
    let low =
        if rank + spread < SAMPLE { *sample.select_nth_unstable(SAMPLE - 1 - (rank + spread)).1 } else { 0 };
    Interval { low, high }
}

struct FindCut<'a> {
    scores: &'a [f32],
    k: usize, // 1..=n
}

/// Keys that one pass finds above the interval, and in each of its buckets.
struct Counts {
    above: usize,
    buckets: [u32; BUCKETS],
}

impl FindCut<'_> {
    /// Finds the k-th key; `count` is a pass over all scores.
    #[inline(always)]
    fn find(self, mut count: impl FnMut(&[f32], Interval, &mut Counts)) -> Cut {
        let mut interval = sampled_interval(self.scores, self.k);
        let mut counts = Counts { above: 0, buckets: [0; BUCKETS] };
        loop {
            counts.above = 0;
            counts.buckets.fill(0);
            count(self.scores, interval, &mut counts);
            let shift = interval.shift();
            let mut above = counts.above;
            let holds = |above: usize, count: u32| above < self.k && self.k <= above + count as usize;
            let bucket = (0..BUCKETS).rev().find(|&b| {
                let found = holds(above, counts.buckets[b]);
                above += if found { 0 } else { counts.buckets[b] as usize };
                found
            });
            let Some(bucket) = bucket else {
                interval = Interval::ALL; // the sample was not representative
                continue;
            };
            let low = interval.low + ((bucket as u32) << shift);
            let wanted = self.k - above;
            if shift == 0 {
                return Cut { key: low, ties: wanted };
            }
            if wanted == counts.buckets[bucket] as usize {
                // The whole bucket is selected: all keys above `low - 1` or, if `low` is 0, all keys.
                return match low.checked_sub(1) {
                    Some(key) => Cut { key, ties: 0 },
                    None => Cut { key: 0, ties: usize::MAX },
                };
            }
            interval = Interval { low, high: interval.high.min(low.saturating_add((1 << shift) - 1)) };
        }
    }
}

impl Kernel for FindCut<'_> {
    type Output = Cut;

    fn scalar(self) -> Cut {
        self.find(|scores, interval, counts| {
            for &score in scores {
                count_key(key(score), interval, counts);
            }
        })
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> Cut {
        self.find(
            #[inline(always)]
            |scores, interval, counts| count_vector(s, scores, interval, counts),
        )
    }
}

#[inline(always)]
fn count_key(key: u32, interval: Interval, counts: &mut Counts) {
    if key > interval.high {
        counts.above += 1;
    } else if key >= interval.low {
        count_inside(key, interval, counts);
    }
}

/// Keys inside the interval are compacted into a buffer, so that no branch depends on the data.
#[inline(always)]
fn count_vector<S: Simd>(s: S, scores: &[f32], interval: Interval, counts: &mut Counts) {
    const BUFFER: usize = 512;
    const MAX_LANES: usize = 16;
    let mut buffer = [0; BUFFER + MAX_LANES];
    let mut buffered = 0;
    let low = s.splat_u32(interval.low);
    let (beyond, open) = (s.splat_u32(interval.high.wrapping_add(1)), interval.high == u32::MAX);
    let chunks = scores.chunks_exact(S::LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        // SAFETY: `chunk` has LANES elements; `buffered` is at most BUFFER, so LANES more fit.
        unsafe {
            let keys = s.keys(s.load(chunk.as_ptr()));
            let above = if open { 0 } else { s.at_least(keys, beyond) };
            let inside = s.at_least(keys, low) & !above;
            counts.above += above.count_ones() as usize;
            s.write_chosen(buffer.as_mut_ptr().add(buffered), keys, inside);
            buffered += inside.count_ones() as usize;
        }
        if buffered > BUFFER - MAX_LANES {
            buffer[..buffered].iter().for_each(|&key| count_inside(key, interval, counts));
            buffered = 0;
        }
    }
    buffer[..buffered].iter().for_each(|&key| count_inside(key, interval, counts));
    for &score in rest {
        count_key(key(score), interval, counts);
    }
}

/// Counts a key that is inside the interval.
#[inline(always)]
fn count_inside(key: u32, interval: Interval, counts: &mut Counts) {
    // The shifted key is below BUCKETS by the interval's width; the remainder spares the bounds check.
    counts.buckets[((key - interval.low) >> interval.shift()) as usize % BUCKETS] += 1;
}

/// The pass that writes the indices of the selected scores.
struct Write<'a, 'b> {
    scores: &'a [f32],
    cut: Cut,
    indices: &'b mut [u32],
}

impl Kernel for Write<'_, '_> {
    type Output = ();

    fn scalar(self) {
        let Self { scores, mut cut, indices } = self;
        let mut written = 0;
        write_scalar(scores, 0, &mut cut, indices, &mut written);
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let Self { scores, mut cut, indices } = self;
        let bound = s.splat_u32(cut.key);
        let (beyond, last) = (s.splat_u32(cut.key.wrapping_add(1)), cut.key == u32::MAX);
        let mut written = 0;
        let mut i = 0;
        // A compressing write touches LANES slots, so the scalar form writes the last ones.
        while i + S::LANES <= scores.len() && written + S::LANES <= indices.len() {
            // SAFETY: LANES scores from `i` on, and LANES slots from `written` on, exist.
            unsafe {
                let keys = s.keys(s.load(scores.as_ptr().add(i)));
                let mut chosen = if last { 0 } else { s.at_least(keys, beyond) };
                let mut equal = s.at_least(keys, bound) & !chosen;
                while equal != 0 && cut.ties > 0 {
                    cut.ties -= 1;
                    chosen |= equal & equal.wrapping_neg();
                    equal &= equal - 1;
                }
                let here = s.add_u32(s.lanes(), s.splat_u32(i as u32));
                s.write_chosen(indices.as_mut_ptr().add(written), here, chosen);
                written += chosen.count_ones() as usize;
            }
            i += S::LANES;
        }
        write_scalar(scores, i, &mut cut, indices, &mut written);
    }
}

/// Writes the indices of the selected scores from `start` on.
fn write_scalar(scores: &[f32], start: usize, cut: &mut Cut, indices: &mut [u32], written: &mut usize) {
    for (i, &score) in scores.iter().enumerate().skip(start) {
        let key = key(score);
        if key < cut.key || (key == cut.key && cut.ties == 0) {
            continue;
        }
        cut.ties -= usize::from(key == cut.key);
        indices[*written] = i as u32;
        *written += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn selected(scores: &[f32], k: usize) -> Vec<u32> {
        let mut indices = vec![0; k.min(scores.len())];
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
        assert_eq!(selected(&[f32::NAN, f32::NEG_INFINITY, f32::NAN], 2), [0, 1]);
        assert_eq!(selected(&[-0.0, 0.0, -0.0], 2), [0, 1]);
        assert!(top_k_into(&[1.0, 2.0], 2, &mut [0]).is_err());
    }

    #[test]
    fn an_unrepresentative_sample_gives_the_same_result() {
        // The strided sample contains only zeros.
        let n = 8 * 512 * 4;
        let scores: Vec<f32> = (0..n).map(|i| if i % 32 == 0 { 0.0 } else { 1.0 + i as f32 }).collect();
        for k in [1, 100, n / 10, n - 1] {
            let mut expected: Vec<u32> = (0..n as u32).collect();
            expected.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
            expected.truncate(k);
            expected.sort_unstable();
            assert_eq!(selected(&scores, k), expected);
        }
    }
}
