//! The loops of exact attention.

// One index counts registers and the rows or columns that they hold.
#![allow(clippy::needless_range_loop)]

use core::ops::Range;

use crate::dot::dot;
use crate::exp::tanh;
use crate::simd::{Kernel, Simd};
use crate::softmax::{LANES, add_scores};
use crate::{Attention, Element, ExactTokens, SoftmaxStats};

/// Most tokens of a block: their weights, keys and values stay in L1 and L2.
const TOKENS: usize = 64;
/// Most bytes of keys, and of values, in a block: both stay in L1 while the next block's arrive in L2.
const BLOCK_BYTES: usize = 8192;

pub(crate) struct Attend<'a, 'b, E> {
    pub attention: &'a Attention,
    pub queries: &'a [f32], // (query tokens, group, dim_k), scaled
    pub query_tokens: usize,
    pub tokens: &'a ExactTokens<'a, E>,
    pub out: &'b mut [f32],            // (query tokens, group, dim_v)
    pub stats: &'b mut [SoftmaxStats], // (query tokens, group)
}

impl<E: Element> Kernel for Attend<'_, '_, E> {
    type Output = ();

    fn scalar(self) {
        let (dim_k, dim_v) = (self.tokens.keys.components(), self.tokens.values.components());
        let group = self.stats.len() / self.query_tokens;
        for block in self.blocks(TOKENS) {
            for i in 0..self.query_tokens {
                let visible = self.visible(i);
                let mut rows = [0; TOKENS];
                let mut n = 0;
                for token in block.clone().map(|at| self.token(at)).filter(|token| visible.contains(token)) {
                    rows[n] = token;
                    n += 1;
                }
                for query in i * group..(i + 1) * group {
                    let out = &mut self.out[query * dim_v..][..dim_v];
                    let mut weights = [f32::NEG_INFINITY; TOKENS];
                    for (&row, score) in rows[..n].iter().zip(&mut weights) {
                        *score = dot(&self.queries[query * dim_k..][..dim_k], self.tokens.keys.row(row));
                    }
                    cap(self.attention.softcap, &mut weights[..n]);
                    let weights = &mut weights[..n.next_multiple_of(LANES)];
                    add_scores::<1>(weights, &mut self.stats[query..=query], out);
                    for (&row, weight) in rows[..n].iter().zip(weights) {
                        let value = self.tokens.values.row(row);
                        out.iter_mut().zip(value).for_each(|(out, x)| *out += *weight * x.to_f32());
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(mut self, s: S) {
        let ExactTokens { keys, values, chosen, .. } = *self.tokens;
        let longest = keys.components().max(values.components());
        let tokens = (BLOCK_BYTES / (longest * size_of::<E>())).clamp(16, TOKENS);
        if let (Some(keys), Some(values), None) = (keys.as_slice(), values.as_slice(), chosen) {
            let (dim_k, dim_v) = (self.tokens.keys.components(), self.tokens.values.components());
            for block in self.blocks(tokens) {
                for i in 0..self.query_tokens {
                    let visible = self.visible(i);
                    let rows = block.start.max(visible.start)..block.end.min(visible.end);
                    if !rows.is_empty() {
                        let keys = Dense { rows: &keys[rows.start * dim_k..rows.end * dim_k], dim: dim_k };
                        let values =
                            Dense { rows: &values[rows.start * dim_v..rows.end * dim_v], dim: dim_v };
                        self.group(s, i, keys, values);
                    }
                }
            }
            return;
        }
        for block in self.blocks(tokens) {
            // The rows after those of the block are prefetched; the last row stands for those that do not
            // exist.
            let mut list = [0; 2 * TOKENS];
            let last = self.end() - 1;
            for (at, token) in list[..2 * block.len()].iter_mut().enumerate() {
                *token = self.token((block.start + at).min(last));
            }
            let (rows, next) = list[..2 * block.len()].split_at(block.len());
            for i in 0..self.query_tokens {
                let visible = self.visible(i);
                let mut seen = [0; TOKENS];
                let mut n = 0;
                for &row in rows {
                    seen[n] = row;
                    n += usize::from(visible.contains(&row));
                }
                if n > 0 {
                    let rows = &seen[..n];
                    self.group(s, i, Listed::new(keys, rows, next), Listed::new(values, rows, next));
                }
            }
        }
    }
}

impl<'a, E: Element> Attend<'a, '_, E> {
    /// Positions that query token `i` sees.
    fn visible(&self, i: usize) -> Range<usize> {
        self.tokens.visible(self.attention.window, i, self.query_tokens)
    }

    /// The row of the token at `at`, in the list or of all.
    #[inline(always)]
    fn token(&self, at: usize) -> usize {
        self.tokens.chosen.map_or(at, |tokens| tokens[at] as usize)
    }

    /// Tokens of the list, or rows that any query sees: the end of the loop over tokens.
    fn end(&self) -> usize {
        self.tokens.chosen.map_or_else(
            || self.visible(self.query_tokens - 1).end.min(self.tokens.keys.rows()),
            <[u32]>::len,
        )
    }

    /// All tokens that a query may see, `len` at a time.
    fn blocks(&self, len: usize) -> impl Iterator<Item = Range<usize>> + use<'a, E> {
        let start = if self.tokens.chosen.is_some() { 0 } else { self.visible(0).start };
        let end = self.end();
        (start..end).step_by(len).map(move |at| at..end.min(at + len))
    }

    /// Adds a block of tokens to the queries of query token `i`.
    #[inline(always)]
    fn group<S: Simd, R: BlockRows<E>>(&mut self, s: S, i: usize, keys: R, values: R) {
        let (dim_k, dim_v) = (self.tokens.keys.components(), self.tokens.values.components());
        let group = self.stats.len() / self.query_tokens;
        let (mut first, end) = (i * group, (i + 1) * group);
        while first < end {
            let n = (end - first).min(4);
            let block = Block {
                softcap: self.attention.softcap,
                queries: &self.queries[first * dim_k..][..n * dim_k],
                keys,
                values,
                out: &mut self.out[first * dim_v..][..n * dim_v],
                stats: &mut self.stats[first..][..n],
            };
            match n {
                1 => block.add::<S, E, 1, 1>(s),
                2 => block.add::<S, E, 2, 2>(s),
                3 => block.add::<S, E, 3, 4>(s),
                _ => block.add::<S, E, 4, 4>(s),
            }
            first += n;
        }
    }
}

/// Applies the cap to scores, if there is one.
#[inline(always)]
fn cap(softcap: Option<f32>, scores: &mut [f32]) {
    if let Some(cap) = softcap {
        scores.iter_mut().for_each(|score| *score = cap * tanh(*score / cap));
    }
}

/// The keys or values of a block of at most 64 tokens.
///
/// # Safety
/// [`row`](Self::row) gives `dim` readable elements for every index below `n`.
unsafe trait BlockRows<E>: Copy {
    /// Whether every row has its own cache sets and page, so that few passes over them count more than
    /// registers.
    const APART: bool;
    fn n(self) -> usize;
    /// Components of a row.
    fn dim(self) -> usize;
    /// Row `t`, which must be below `n`.
    fn row(self, t: usize) -> *const E;
    /// Prefetches part of the next block. The caller loops over tiles of rows, in a tile over registers of a
    /// row, and in a register column over the rows of the tile. This call is for register `c` of row `t`, the
    /// `step`-th of the tile that begins at row `first`.
    fn prefetch<S: Simd>(self, s: S, first: usize, step: usize, t: usize, c: usize);
}

/// Rows without gaps.
///
/// N.B. The hardware prefetcher stops where the loop changes from keys to values. Each block therefore
/// prefetches the cache lines of the next block, one by one and in order. Without that, `f32` rows take 1.7
/// times as long. Slower alternatives: prefetching all lines at once, interleaving rows, prefetching into L1,
/// and tiles of four tokens by four queries.
#[derive(Clone, Copy)]
struct Dense<'a, E> {
    rows: &'a [E], // (n, dim)
    dim: usize,
}

// SAFETY: `rows` holds n rows of `dim`.
unsafe impl<E: Element> BlockRows<E> for Dense<'_, E> {
    const APART: bool = false;
    #[inline(always)]
    fn n(self) -> usize {
        self.rows.len() / self.dim
    }
    #[inline(always)]
    fn dim(self) -> usize {
        self.dim
    }
    #[inline(always)]
    fn row(self, t: usize) -> *const E {
        self.rows.as_ptr().wrapping_add(t * self.dim)
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, first: usize, step: usize, _: usize, _: usize) {
        let next = self.row(first).wrapping_add(self.rows.len());
        prefetch_line(s, next, step * S::LANES);
    }
}

/// Rows at a distance, or of a list.
///
/// N.B. A copy into a buffer without gaps takes 1.2 to 1.7 times as long with AVX-512 as reading the rows in
/// place.
///
/// N.B. Rows of one of 8 heads of 128 components, 512 tokens, take about twice as long in `f32` as rows
/// without gaps, 1.5 times in `f16` (Zen 3, AVX2, on a shared machine). 4 KiB apart, all rows of a head in
/// `f32` share an eighth of the sets of L1 and L2: with 9 heads they take 1.4 to 1.8 times as long, in `f16`
/// 1.3 to 1.4. Every row needs an entry of the TLB: with huge pages a tenth less time in `f32`. A caller that
/// walks blocks of 64 to 256 tokens over 8 heads saves a seventh to a third of the time at 16,384 tokens, and
/// nothing at 4,096 and less (Zen 4, on a shared machine).
#[derive(Clone, Copy)]
struct Listed<'a, E> {
    data: &'a [E],
    stride: usize,
    dim: usize,
    rows: &'a [usize], // of the block
    next: &'a [usize], // of the next block, as many
}

impl<'a, E> Listed<'a, E> {
    /// The given rows, all of which exist.
    #[inline(always)]
    fn new(of: crate::Rows<'a, E>, rows: &'a [usize], next: &'a [usize]) -> Self {
        assert!(rows.len() <= next.len() && rows.iter().all(|&row| row < of.rows()));
        Self {
            data: of.data(),
            stride: of.row_stride(),
            dim: of.components(),
            rows,
            next: &next[..rows.len()],
        }
    }
}

// SAFETY: `new` has checked that the rows exist, and `Rows` that those end within `data`.
unsafe impl<E: Element> BlockRows<E> for Listed<'_, E> {
    const APART: bool = true;
    #[inline(always)]
    fn n(self) -> usize {
        self.rows.len()
    }
    #[inline(always)]
    fn dim(self) -> usize {
        self.dim
    }
    #[inline(always)]
    fn row(self, t: usize) -> *const E {
        self.data.as_ptr().wrapping_add(self.rows[t] * self.stride)
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, _: usize, _: usize, t: usize, c: usize) {
        let next = self.data.as_ptr().wrapping_add(self.next[t] * self.stride);
        prefetch_line(s, next, c);
    }
}

/// Prefetches the cache line of element `i` if a line begins there, counted from `from`.
#[inline(always)]
fn prefetch_line<S: Simd, E: Element>(s: S, from: *const E, i: usize) {
    if i.is_multiple_of(64 / size_of::<E>()) {
        s.prefetch(from.wrapping_add(i).cast());
    }
}

/// A block of tokens and at most four queries.
struct Block<'a, 'b, R> {
    softcap: Option<f32>,
    queries: &'a [f32],
    keys: R,
    values: R,
    out: &'b mut [f32],
    stats: &'b mut [SoftmaxStats],
}

impl<R> Block<'_, '_, R> {
    /// Adds the tokens to `G` queries. Scores are (tokens, P).
    ///
    /// Floor: the bytes of keys and values. On AVX-512, 4 queries with 128 + 128 components of 32 bits need
    /// 64 multiply-adds per token, about half the time of its bytes from memory.
    #[inline(always)]
    fn add<S: Simd, E: Element, const G: usize, const P: usize>(self, s: S)
    where
        R: BlockRows<E>,
    {
        let (n, dim_v) = (self.keys.n(), self.values.dim());
        let mut weights = [0.0; TOKENS * 4];
        for t in (0..n).step_by(8 / P) {
            score_tile::<S, E, R, G, P>(s, self.queries, self.keys, t, &mut weights);
        }
        cap(self.softcap, &mut weights[..n * P]);
        let weights = &mut weights[..(n * P).next_multiple_of(LANES)];
        weights[n * P..].fill(f32::NEG_INFINITY);
        add_scores::<P>(weights, self.stats, self.out);
        let mut c = 0;
        while c + 4 * S::LANES <= dim_v && (S::WIDE || R::APART && G <= 2) {
            add_values::<S, E, R, G, P, 4>(s, weights, self.values, self.out, c);
            c += 4 * S::LANES;
        }
        while c + 2 * S::LANES <= dim_v {
            add_values::<S, E, R, G, P, 2>(s, weights, self.values, self.out, c);
            c += 2 * S::LANES;
        }
        while c + S::LANES <= dim_v {
            add_values::<S, E, R, G, P, 1>(s, weights, self.values, self.out, c);
            c += S::LANES;
        }
        if c < dim_v {
            for (g, out) in self.out.chunks_exact_mut(dim_v).enumerate() {
                for (t, weights) in weights.chunks_exact(P).take(n).enumerate() {
                    // SAFETY: t is below n, and a row has `dim_v` elements.
                    let value = unsafe { core::slice::from_raw_parts(self.values.row(t), dim_v) };
                    out[c..].iter_mut().zip(&value[c..]).for_each(|(out, x)| *out += weights[g] * x.to_f32());
                }
            }
        }
    }
}

/// Scores of `G` queries on `8 / P` keys from token `first` on. Beyond the last key its scores are repeated.
#[inline(always)]
fn score_tile<S: Simd, E: Element, R: BlockRows<E>, const G: usize, const P: usize>(
    s: S,
    queries: &[f32],
    keys: R,
    first: usize,
    scores: &mut [f32; TOKENS * 4],
) {
    let (dim, n) = (keys.dim(), keys.n());
    assert!(queries.len() == G * dim && first < n && n <= TOKENS);
    let wide = dim / S::LANES * S::LANES;
    let row = |t: usize| (first + t).min(n - 1);
    let rows: [*const E; 8] = core::array::from_fn(|t| keys.row(row(t)));
    let mut sums = [[s.splat(0.0); 4]; 2]; // that of key t and query g is at t * P + g
    for c in (0..wide).step_by(S::LANES) {
        for t in 0..8 / P {
            keys.prefetch(s, first, c / S::LANES * (8 / P) + t, row(t), c);
            // SAFETY: c + LANES is at most `dim`, and the row exists.
            let key = unsafe { E::load(s, rows[t].add(c)) };
            for g in 0..G {
                // SAFETY: G queries of `dim`.
                let query = unsafe { s.load(queries.as_ptr().add(g * dim + c)) };
                let sum = &mut sums[(t * P + g) / 4][(t * P + g) % 4];
                *sum = s.mul_add(query, key, *sum);
            }
        }
    }
    let [low, high] = sums;
    let out = &mut scores[first * P..][..8];
    out[..4].copy_from_slice(&s.sum4(low));
    out[4..].copy_from_slice(&s.sum4(high));
    if wide < dim {
        for (t, scores) in out.chunks_exact_mut(P).enumerate() {
            // SAFETY: the row exists, and has `dim` elements.
            let key = unsafe { core::slice::from_raw_parts(rows[t], dim) };
            for (g, score) in scores.iter_mut().enumerate().take(G) {
                let tail = queries[g * dim..][wide..dim].iter().zip(&key[wide..]);
                *score += tail.map(|(q, k)| q * k.to_f32()).sum::<f32>();
            }
        }
    }
}

/// Adds the weighted values of at most 64 tokens to the outputs of `G` queries: `V` registers of components
/// from `c` on.
#[inline(always)]
fn add_values<S: Simd, E: Element, R: BlockRows<E>, const G: usize, const P: usize, const V: usize>(
    s: S,
    weights: &[f32],
    values: R,
    out: &mut [f32],
    c: usize,
) {
    let (dim, n) = (values.dim(), values.n());
    assert!(out.len() == G * dim && weights.len() >= n * P && c + V * S::LANES <= dim);
    let mut sums = [[s.splat(0.0); V]; G];
    for g in 0..G {
        for v in 0..V {
            // SAFETY: G outputs of `dim`, and c + V * LANES is at most that.
            sums[g][v] = unsafe { s.load(out.as_ptr().add(g * dim + c + v * S::LANES)) };
        }
    }
    for t in 0..n {
        let mut value = [s.splat(0.0); V];
        for v in 0..V {
            values.prefetch(s, 0, c / S::LANES * n + t * V + v, t, c + v * S::LANES);
            // SAFETY: t is below n, and c + V * LANES at most `dim`, so LANES elements are readable.
            value[v] = unsafe { E::load(s, values.row(t).add(c + v * S::LANES)) };
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
            unsafe { s.store(out.as_mut_ptr().add(g * dim + c + v * S::LANES), sums[g][v]) };
        }
    }
}
