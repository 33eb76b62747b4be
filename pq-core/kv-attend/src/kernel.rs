//! The loops of exact attention.

// One index counts registers and the rows or columns that they hold.
#![allow(clippy::needless_range_loop)]

use core::ops::Range;

mod block_rows;

use block_rows::{BlockRows, Dense, Listed, Next};

use crate::dot::dot;
use crate::exp::tanh;
use crate::simd::{Kernel, Simd};
use crate::softmax::{LANES, add_scores};
use crate::{Attention, Element, ExactTokens, SoftmaxStats};

/// Maximum tokens per block: their weights, keys and values stay in L1 and L2.
const TOKENS: usize = 64;
/// Components of the values that the scalar form sums at a time.
const COMPONENTS: usize = 128;
/// Maximum bytes of a head's keys, and of its values, per block: both stay in L1 while the next block is
/// prefetched into L2.
const BLOCK_BYTES: usize = 8192;
/// Maximum bytes of all heads' keys, and of their values, per block of several heads: this block and the next
/// stay in L2.
const HEADS_BYTES: usize = 131_072;

pub struct Attend<'a, 'b, E> {
    pub attention: &'a Attention,
    pub queries: &'a [f32], // (query tokens, heads, group, dim_k), scaled
    pub query_tokens: usize,
    pub tokens: &'a ExactTokens<'a, E>,
    pub out: &'b mut [f32],            // (query tokens, heads, group, dim_v)
    pub stats: &'b mut [SoftmaxStats], // (query tokens, heads, group)
}

impl<E: Element> Kernel for Attend<'_, '_, E> {
    type Output = ();

    fn scalar(self) {
        let ExactTokens { keys, values, heads, .. } = *self.tokens;
        let (dim_k, dim_v) = (keys.components() / heads, values.components() / heads);
        let queries = self.stats.len() / self.query_tokens;
        for block in self.blocks(TOKENS) {
            let mut list = [0; TOKENS];
            self.fill(&mut list[..block.len()], block.start);
            for i in 0..self.query_tokens {
                let visible = self.visible(i);
                let mut rows = [0; TOKENS];
                let mut n = 0;
                for &token in list[..block.len()].iter().filter(|token| visible.contains(token)) {
                    rows[n] = token;
                    n += 1;
                }
                for query in i * queries..(i + 1) * queries {
                    let head = query % queries / (queries / heads);
                    let out = &mut self.out[query * dim_v..][..dim_v];
                    let mut weights = [f32::NEG_INFINITY; TOKENS];
                    for (&row, score) in rows[..n].iter().zip(&mut weights) {
                        let key = &keys.row(row)[head * dim_k..][..dim_k];
                        *score = dot(&self.queries[query * dim_k..][..dim_k], key);
                    }
                    cap(self.attention.softcap, &mut weights[..n]);
                    let weights = &mut weights[..n.next_multiple_of(LANES)];
                    add_scores::<1>(weights, &mut self.stats[query..=query], out);
                    for (c, out) in out.chunks_mut(COMPONENTS).enumerate() {
                        let mut sums = [0.0; COMPONENTS];
                        for (&row, weight) in rows[..n].iter().zip(&*weights) {
                            let value = &values.row(row)[head * dim_v + c * COMPONENTS..][..out.len()];
                            sums.iter_mut().zip(value).for_each(|(sum, x)| *sum += *weight * x.to_f32());
                        }
                        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(mut self, s: S) {
        let ExactTokens { keys, values, heads, chosen, .. } = *self.tokens;
        let (dim_k, dim_v) = (keys.components() / heads, values.components() / heads);
        let row = dim_k.max(dim_v) * size_of::<E>();
        let mut tokens = (BLOCK_BYTES / row).clamp(16, TOKENS);
        if let (Some(keys), Some(values), None, 1) = (keys.as_slice(), values.as_slice(), chosen, heads) {
            for block in self.blocks(tokens) {
                for i in 0..self.query_tokens {
                    let visible = self.visible(i);
                    let rows = block.start.max(visible.start)..block.end.min(visible.end);
                    if !rows.is_empty() {
                        let keys = Dense { rows: &keys[rows.start * dim_k..rows.end * dim_k], dim: dim_k };
                        let values =
                            Dense { rows: &values[rows.start * dim_v..rows.end * dim_v], dim: dim_v };
                        self.group(s, (i, 0), keys, values);
                    }
                }
            }
            return;
        }
        if heads > 1 {
            tokens = (HEADS_BYTES / (heads * row)).clamp(8, tokens);
        }
        for block in self.blocks(tokens) {
            let n = block.len();
            let mut list = [0; 2 * TOKENS];
            self.fill(&mut list[..2 * n], block.start);
            let (rows, next) = list[..2 * n].split_at(n);
            for head in 0..heads {
                let mut pieces = [0; TOKENS];
                let next = if heads > 1 && chosen.is_none() {
                    (block.end * heads + head * n..)
                        .zip(&mut pieces[..n])
                        .for_each(|(at, piece)| *piece = at);
                    Next::Pieces(&pieces[..n])
                } else {
                    Next::Rows(next)
                };
                for i in 0..self.query_tokens {
                    let visible = self.visible(i);
                    let mut seen = [0; TOKENS];
                    let rows = if rows.iter().all(|row| visible.contains(row)) {
                        rows
                    } else {
                        let mut count = 0;
                        for &row in rows {
                            seen[count] = row;
                            count += usize::from(visible.contains(&row));
                        }
                        &seen[..count]
                    };
                    if !rows.is_empty() {
                        let keys = Listed::new(keys, (heads, head), rows, next);
                        let values = Listed::new(values, (heads, head), rows, next);
                        self.group(s, (i, head), keys, values);
                    }
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

    /// Fills `list` with the rows of the tokens from `start` on. Past the end, the last row is repeated.
    #[inline(always)]
    fn fill(&self, list: &mut [usize], start: usize) {
        let end = self.end();
        match self.tokens.chosen {
            Some(tokens) => {
                let (there, missing) = list.split_at_mut((end - start).min(list.len()));
                there.iter_mut().zip(&tokens[start..]).for_each(|(row, &token)| *row = token as usize);
                missing.fill(tokens[end - 1] as usize);
            }
            None => (start..).zip(list).for_each(|(at, row)| *row = at.min(end - 1)),
        }
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

    /// Adds a head's block of tokens to the outputs of one query token.
    #[inline(always)]
    fn group<S: Simd, R: BlockRows<E>>(
        &mut self,
        s: S,
        (query_token, head): (usize, usize),
        keys: R,
        values: R,
    ) {
        let (dim_k, dim_v) = (keys.dim(), values.dim());
        let group = self.stats.len() / self.query_tokens / self.tokens.heads;
        let mut first = (query_token * self.tokens.heads + head) * group;
        let end = first + group;
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

/// Prefetches the cache line at element `i` of `from` if a line starts there.
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
                let mut sums = [0.0; LANES];
                for (t, weights) in weights.chunks_exact(P).take(n).enumerate() {
                    // SAFETY: t is below n, and a row has `dim_v` elements.
                    let value = unsafe { core::slice::from_raw_parts(self.values.row(t), dim_v) };
                    let value = sums.iter_mut().zip(&value[c..]);
                    value.for_each(|(sum, x)| *sum += weights[g] * x.to_f32());
                }
                out[c..].iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
            }
        }
    }
}

/// Scores of `G` queries on `8 / P` keys from token `first` on. Past the last key, its scores are repeated.
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
    let ahead: [*const E; 8] = core::array::from_fn(|t| keys.ahead(first, row(t)));
    let mut sums = [[s.splat(0.0); 4]; 2]; // (key, P): key t and query g at t * P + g
    for c in (0..wide).step_by(S::LANES) {
        for t in 0..8 / P {
            prefetch_line(s, ahead[t], if R::APART { c } else { c * (8 / P) + t * S::LANES });
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
    for t in 0..n {
        let mut value = [s.splat(0.0); V];
        let (row, ahead) = (values.row(t), values.ahead(0, t));
        for v in 0..V {
            let i = c + v * S::LANES;
            prefetch_line(s, ahead, if R::APART { i } else { c * n + (t * V + v) * S::LANES });
            // SAFETY: t is below n, and c + V * LANES at most `dim`, so LANES elements are readable.
            value[v] = unsafe { E::load(s, row.add(i)) };
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
            // SAFETY: G outputs of `dim`, and c + V * LANES is at most that.
            unsafe {
                let out = out.as_mut_ptr().add(g * dim + c + v * S::LANES);
                s.store(out, s.mul_add(s.splat(1.0), sums[g][v], s.load(out)));
            }
        }
    }
}
