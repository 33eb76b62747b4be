//! Sums of weights per centroid, in two levels.
//!
//! In one long `f32` sum of similar weights, the n-th weight is rounded by up to n / 2^24 of itself, and its
//! neighbours in the same direction: with 131,072 tokens of one centroid that is an error of 1e-3, with four
//! million 4e-2. So the weights of [`flush_interval`] tokens at a time are summed, and these sums are added to
//! totals.

use crate::blocks::CHUNK;

/// Tokens whose weights are summed before the sums are added to the totals, a multiple of [`CHUNK`]. They are
/// at least eight for each centroid, so that the additions to the totals hardly count.
pub(crate) const fn flush_interval(ksub: usize) -> usize {
    let chunks = 8 * ksub / CHUNK;
    CHUNK * if chunks < 4 { 4 } else { chunks }
}

/// Moves the sums to the totals.
#[inline(always)]
pub(crate) fn flush(sums: &mut [f32], totals: &mut [f32]) {
    for (sum, total) in sums.iter_mut().zip(totals) {
        *total += *sum;
        *sum = 0.0;
    }
}
