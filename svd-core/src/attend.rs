// One index counts registers and the rows or columns that they hold.
#![allow(clippy::needless_range_loop)]

use crate::dot::dot;
use crate::error::{check_len, count_rows};
use crate::simd::{Kernel, Simd};
use crate::softmax::{LANES, add_scores};
use crate::{Backend, Element, Error, SoftmaxStats};

/// Most tokens of a block: their weights, keys and values stay in L1 and L2.
const TOKENS: usize = 64;

/// Attention of a group of query heads on the rows of their common key/value head, whose keys and values may
/// differ in rank.
///
/// With `s_t = <q, k_t>`, adds `sum_t exp(s_t - max s) * v_t` to each query's `out`, and updates its `stats`
/// (maximum and sum). Begin with zeros and [`SoftmaxStats::EMPTY`], call the function for every part of the
/// sequence, then [`normalize`](SoftmaxStats::normalize). Every row is read from memory once for the whole
/// group. The caller scales queries by `1 / sqrt(head_dim)`.
///
/// The softmax runs over 64 tokens at a time. A token with a NaN score makes the result NaN.
///
/// # Shapes
/// `queries` (group, rank_k); `keys` (n, rank_k); `values` (n, rank_v); `out` (group, rank_v); `stats`
/// (group,).
/// # Errors
/// [`Error::PartialRow`] if `stats` does not divide `queries` or `out`, or `keys` does not consist of whole
/// rows; [`Error::Length`] if `values` has another number of rows; [`Error::Zero`] for no query or an empty
/// row. `out` and `stats` are then unchanged.
/// # Cost
/// group * n * (rank_k + rank_v) multiply-adds, group * n exponentials, one pass over the rows, no
/// allocation.
/// # Source
/// ZACK, 5.1: attention in the rotated space, without reconstruction.
/// # Examples
/// ```
/// use svd_core::SoftmaxStats;
/// let (keys, values) = ([0.0_f32, 0.0], [1.0, 3.0]); // two tokens of rank 1, equal scores
/// let (mut out, mut stats) = ([0.0; 2], [SoftmaxStats::EMPTY; 2]); // two query heads
/// svd_core::attend_into(&[2.0, 5.0], &keys, &values, &mut out, &mut stats)?;
/// stats[1].normalize(&mut out[1..]);
/// assert_eq!(out[1], 2.0);
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn attend_into<E: Element>(
    queries: &[f32],
    keys: &[E],
    values: &[E],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    attend_into_with(Backend::detect(), queries, keys, values, out, stats)
}

/// [`attend_into`] on a given backend.
///
/// # Errors
/// As for [`attend_into`], and [`Error::BackendUnavailable`].
pub fn attend_into_with<E: Element>(
    backend: Backend,
    queries: &[f32],
    keys: &[E],
    values: &[E],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    backend.check()?;
    let group = stats.len();
    if group == 0 {
        return Err(Error::Zero { what: "number of queries" });
    }
    let (rank_k, rank_v) =
        (count_rows("queries", queries.len(), group)?, count_rows("out", out.len(), group)?);
    if rank_k == 0 || rank_v == 0 {
        return Err(Error::Zero { what: "rank" });
    }
    let n = count_rows("keys", keys.len(), rank_k)?;
    check_len("values", values.len(), n.checked_mul(rank_v).ok_or(Error::TooLarge)?)?;
    backend.run(Attend { queries, keys, values, out, stats });
    Ok(())
}

struct Attend<'a, 'b, E> {
    queries: &'a [f32],
    keys: &'a [E],
    values: &'a [E],
    out: &'b mut [f32],
    stats: &'b mut [SoftmaxStats],
}

impl<E: Element> Kernel for Attend<'_, '_, E> {
    type Output = ();

    fn scalar(self) {
        let (rank_k, rank_v) = (self.queries.len() / self.stats.len(), self.out.len() / self.stats.len());
        for (keys, values) in self.keys.chunks(TOKENS * rank_k).zip(self.values.chunks(TOKENS * rank_v)) {
            let queries = self.queries.chunks_exact(rank_k).zip(self.out.chunks_exact_mut(rank_v));
            for ((query, out), stats) in queries.zip(self.stats.iter_mut()) {
                let mut weights = [0.0; TOKENS];
                let n = keys.len() / rank_k;
                let weights = &mut weights[..n.next_multiple_of(LANES)];
                weights[n..].fill(f32::NEG_INFINITY);
                for (key, score) in keys.chunks_exact(rank_k).zip(weights.iter_mut()) {
                    *score = dot(query, key);
                }
                add_scores::<1>(weights, core::slice::from_mut(stats), out);
                for (value, weight) in values.chunks_exact(rank_v).zip(weights) {
                    out.iter_mut().zip(value).for_each(|(out, x)| *out += *weight * x.to_f32());
                }
            }
        }
    }

    /// Floor: the bytes of keys and values. On AVX-512, 4 queries with 128 + 128 components of 32 bits need
    /// 64 multiply-adds per token, about half the time of its bytes from memory.
    ///
    /// N.B. The hardware prefetcher stops where the loop changes from keys to values. Each block therefore
    /// prefetches the cache lines of the next block, one by one and in order. Without that, `f32` rows take
    /// 1.7 times as long. Slower alternatives: prefetching all lines at once, interleaving rows, prefetching
    /// into L1, and tiles of four tokens by four queries.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (rank_k, rank_v) = (self.queries.len() / self.stats.len(), self.out.len() / self.stats.len());
        let tokens = (BLOCK_BYTES / (rank_k.max(rank_v) * size_of::<E>())).clamp(16, TOKENS);
        for (keys, values) in self.keys.chunks(tokens * rank_k).zip(self.values.chunks(tokens * rank_v)) {
            let mut first = 0;
            while first < self.stats.len() {
                let n = (self.stats.len() - first).min(4);
                let part = Attend {
                    queries: &self.queries[first * rank_k..][..n * rank_k],
                    keys,
                    values,
                    out: &mut self.out[first * rank_v..][..n * rank_v],
                    stats: &mut self.stats[first..][..n],
                };
                match n {
                    1 => part.block::<S, 1, 1>(s),
                    2 => part.block::<S, 2, 2>(s),
                    3 => part.block::<S, 3, 4>(s),
                    _ => part.block::<S, 4, 4>(s),
                }
                first += n;
            }
        }
    }
}

/// Most bytes of keys, and of values, in a block: both stay in L1 while the next block's arrive in L2.
const BLOCK_BYTES: usize = 8192;

impl<E: Element> Attend<'_, '_, E> {
    /// Adds at most 64 tokens for `G` queries. Scores are (tokens, P).
    #[inline(always)]
    fn block<S: Simd, const G: usize, const P: usize>(self, s: S) {
        let (rank_k, rank_v) = (self.queries.len() / G, self.out.len() / G);
        let n = self.keys.len() / rank_k;
        let mut weights = [0.0; TOKENS * 4];
        for t in (0..n).step_by(8 / P) {
            score_tile::<S, E, G, P>(s, self.queries, self.keys, t, &mut weights);
        }
        let weights = &mut weights[..(n * P).next_multiple_of(LANES)];
        weights[n * P..].fill(f32::NEG_INFINITY);
        add_scores::<P>(weights, self.stats, self.out);
        let mut c = 0;
        while c + 4 * S::LANES <= rank_v && S::WIDE {
            add_values::<S, E, G, P, 4>(s, weights, self.values, self.out, c);
            c += 4 * S::LANES;
        }
        while c + 2 * S::LANES <= rank_v {
            add_values::<S, E, G, P, 2>(s, weights, self.values, self.out, c);
            c += 2 * S::LANES;
        }
        while c + S::LANES <= rank_v {
            add_values::<S, E, G, P, 1>(s, weights, self.values, self.out, c);
            c += S::LANES;
        }
        for (g, out) in self.out.chunks_exact_mut(rank_v).enumerate() {
            for (value, weights) in self.values.chunks_exact(rank_v).zip(weights.chunks_exact(P)) {
                out[c..].iter_mut().zip(&value[c..]).for_each(|(out, x)| *out += weights[g] * x.to_f32());
            }
        }
    }
}

/// Scores of `G` queries on `8 / P` keys from token `first` on. Beyond the last key its scores are repeated.
#[inline(always)]
fn score_tile<S: Simd, E: Element, const G: usize, const P: usize>(
    s: S,
    queries: &[f32],
    keys: &[E],
    first: usize,
    scores: &mut [f32; TOKENS * 4],
) {
    let rank = queries.len() / G;
    let last = keys.len() / rank - 1;
    assert!(queries.len() == G * rank && keys.len() == (last + 1) * rank && first <= last && last < TOKENS);
    let wide = rank / S::LANES * S::LANES;
    // SAFETY: the index is at most `last`, that of the last key.
    let rows: [*const E; 8] =
        core::array::from_fn(|t| unsafe { keys.as_ptr().add((first + t).min(last) * rank) });
    let mut sums = [[s.splat(0.0); 4]; 2]; // that of key t and query g is at t * P + g
    for c in (0..wide).step_by(S::LANES) {
        for t in 0..8 / P {
            let ahead = (c / S::LANES * (8 / P) + t) * S::LANES;
            prefetch(s, rows[0].wrapping_add(keys.len()), ahead);
            // SAFETY: c + LANES is at most `rank`.
            let key = unsafe { E::load(s, rows[t].add(c)) };
            for g in 0..G {
                // SAFETY: G queries of `rank`.
                let query = unsafe { s.load(queries.as_ptr().add(g * rank + c)) };
                let sum = &mut sums[(t * P + g) / 4][(t * P + g) % 4];
                *sum = s.mul_add(query, key, *sum);
            }
        }
    }
    let [low, high] = sums;
    let out = &mut scores[first * P..][..8];
    out[..4].copy_from_slice(&s.sum4(low));
    out[4..].copy_from_slice(&s.sum4(high));
    if wide < rank {
        for (t, scores) in out.chunks_exact_mut(P).enumerate() {
            let key = &keys[(first + t).min(last) * rank..][..rank];
            for (g, score) in scores.iter_mut().enumerate().take(G) {
                let tail = queries[g * rank..][wide..rank].iter().zip(&key[wide..]);
                *score += tail.map(|(q, k)| q * k.to_f32()).sum::<f32>();
            }
        }
    }
}

/// Adds the weighted values of at most 64 tokens to the outputs of `G` queries: `V` registers of components
/// from `c` on.
#[inline(always)]
fn add_values<S: Simd, E: Element, const G: usize, const P: usize, const V: usize>(
    s: S,
    weights: &[f32],
    values: &[E],
    out: &mut [f32],
    c: usize,
) {
    let rank = out.len() / G;
    let n = values.len() / rank;
    assert!(weights.len() >= n * P && c + V * S::LANES <= rank);
    let mut sums = [[s.splat(0.0); V]; G];
    for g in 0..G {
        for v in 0..V {
            // SAFETY: G outputs of `rank`, and c + V * LANES is at most that.
            sums[g][v] = unsafe { s.load(out.as_ptr().add(g * rank + c + v * S::LANES)) };
        }
    }
    for t in 0..n {
        let mut value = [s.splat(0.0); V];
        for v in 0..V {
            let ahead = c * n + (t * V + v) * S::LANES;
            prefetch(s, values.as_ptr().wrapping_add(values.len()), ahead);
            // SAFETY: n values of `rank`.
            let p = unsafe { values.as_ptr().add(t * rank + c + v * S::LANES) };
            // SAFETY: c + V * LANES is at most `rank`, so LANES components are readable.
            value[v] = unsafe { E::load(s, p) };
        }
        for g in 0..G {
            let weight = s.splat(weights[t * P + g]);
            for v in 0..V {
                sums[g][v] = s.mul_add(weight, value[v], sums[g][v]);
            }
        }
    }
    for g in 0..G {
        for v in 0..V {
            // SAFETY: as for the loads.
            unsafe { s.store(out.as_mut_ptr().add(g * rank + c + v * S::LANES), sums[g][v]) };
        }
    }
}

/// Prefetches the cache line of element `i` of the next block if a line begins there.
#[inline(always)]
fn prefetch<S: Simd, E: Element>(s: S, next: *const E, i: usize) {
    if i.is_multiple_of(64 / size_of::<E>()) {
        s.prefetch(next.wrapping_add(i).cast());
    }
}
