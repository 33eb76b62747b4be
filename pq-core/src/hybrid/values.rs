//! Sums of coded values weighted by the queries of a group.
//!
//! A token's weights for all queries are adjacent. One short vector addition per token and subspace adds them
//! to the sums of the token's centroid, and each centroid is multiplied by its sums once. With subspaces of 8
//! components and four queries that is 16 additions per token of 128 components, while a lookup of every
//! component takes 128 and as many multiply-adds per query. Four subspaces of 8 bits share the load of a
//! token's weights: on Zen 3 that takes half the time of one at a time.

use crate::blocks::CHUNK;
use crate::centroid_sums::flush;
use crate::pack::unpack_run;
use crate::{Codebook, Codes, PqShape};

/// Floats that [`Lanes`] needs for `group` queries.
pub(super) const fn weighted_values_len(values: PqShape, group: usize) -> usize {
    lanes(group).saturating_mul(values.lut_len().saturating_mul(2).saturating_add(CHUNK))
}

/// Maximum queries processed at once.
pub(super) const MOST: usize = 8;

/// Lanes for `group` queries.
const fn lanes(group: usize) -> usize {
    match group {
        0 | 1 => 1,
        2 => 2,
        3 | 4 => 4,
        _ => MOST,
    }
}

/// The weights of a chunk and the sums per centroid, one lane per query.
pub(super) struct Lanes<'a> {
    shape: PqShape,
    lanes: usize,
    weights: &'a mut [f32], // (CHUNK, lanes); zeros in lanes without a query
    sums: &'a mut [f32],    // (m, ksub, lanes): of the tokens since the last flush
    totals: &'a mut [f32],  // the same of all earlier tokens
}

impl<'a> Lanes<'a> {
    /// Zeros for `queries` of at most [`MOST`] queries.
    #[inline(always)]
    pub fn new(shape: PqShape, queries: usize, floats: &'a mut [f32]) -> Self {
        let lanes = lanes(queries);
        let floats = &mut floats[..weighted_values_len(shape, queries)];
        floats.fill(0.0);
        let (weights, floats) = floats.split_at_mut(CHUNK * lanes);
        let (sums, totals) = floats.split_at_mut(shape.lut_len() * lanes);
        Self { shape, lanes, weights, sums, totals }
    }

    /// Sets the weights of query `g` for a chunk.
    #[inline(always)]
    pub fn set_weights(&mut self, g: usize, weights: &[f32]) {
        for (lanes, &weight) in self.weights.chunks_exact_mut(self.lanes).zip(weights) {
            lanes[g] = weight;
        }
    }

    /// Adds the weights of a chunk to the sums of its centroids.
    #[inline(always)]
    pub fn add(&mut self, codes: &Codes<'_>) {
        match self.lanes {
            1 => self.add_lanes::<1>(codes),
            2 => self.add_lanes::<2>(codes),
            4 => self.add_lanes::<4>(codes),
            _ => self.add_lanes::<MOST>(codes),
        }
    }

    #[inline(always)]
    fn add_lanes<const L: usize>(&mut self, codes: &Codes<'_>) {
        let (weights, sums) = (self.weights.as_chunks::<L>().0, self.sums.as_chunks_mut::<L>().0);
        let (nbits, ksub) = (self.shape.nbits(), self.shape.ksub());
        let (block, run_len) = (codes.block_vectors(), codes.run_len());
        let weights = &weights[..codes.n()];
        let together = if nbits == 8 { self.shape.m() / SUBSPACES * SUBSPACES } else { 0 };
        let (sums, rest) = sums.split_at_mut(together * ksub);
        let parts = sums.as_chunks_mut::<256>().0.as_chunks_mut::<SUBSPACES>().0;
        for (i, sums) in parts.iter_mut().enumerate() {
            for (b, weights) in weights.chunks(block).enumerate() {
                let runs = &codes.block(b)[i * SUBSPACES * run_len..][..SUBSPACES * run_len];
                // In an 8-bit run, byte `i` is the code of token `i`.
                add_runs(sums, weights, runs);
            }
        }
        for (j, sums) in rest.chunks_exact_mut(ksub).enumerate() {
            for (b, weights) in weights.chunks(block).enumerate() {
                let run = &codes.block(b)[(together + j) * run_len..][..run_len];
                add_run(sums, weights, &unpack_run(run, nbits, block));
            }
        }
    }

    /// Adds the sums to the totals.
    #[inline(always)]
    pub fn flush(&mut self) {
        flush(self.sums, self.totals);
    }

    /// Adds each query's total of weighted values, times its scale, to `out` (queries, dim).
    #[inline(always)]
    pub fn add_values(&self, codebook: &Codebook<'_>, scales: &[f32], out: &mut [f32]) {
        match self.lanes {
            1 => self.add_values_of::<1>(codebook, scales, out),
            2 => self.add_values_of::<2>(codebook, scales, out),
            4 => self.add_values_of::<4>(codebook, scales, out),
            _ => self.add_values_of::<MOST>(codebook, scales, out),
        }
    }

    #[inline(always)]
    fn add_values_of<const L: usize>(&self, codebook: &Codebook<'_>, scales: &[f32], out: &mut [f32]) {
        let (dim, totals) = (self.shape.dim(), self.totals.as_chunks::<L>().0);
        for (j, totals) in totals.chunks_exact(self.shape.ksub()).enumerate() {
            let subspace = codebook.subspace(j);
            for d in 0..self.shape.dsub() {
                let mut parts = [[0.0; L]; PARTS];
                for (i, (&y, totals)) in subspace.column(d).iter().zip(totals).enumerate() {
                    for (part, total) in parts[i % PARTS].iter_mut().zip(totals) {
                        *part += y * total;
                    }
                }
                let outs = out[j * self.shape.dsub() + d..].iter_mut().step_by(dim);
                for (g, (out, scale)) in outs.zip(scales).enumerate() {
                    *out += scale * parts.iter().map(|part| part[g]).sum::<f32>();
                }
            }
        }
    }
}

/// Partial sums over the centroids, which hide the latency of the additions.
const PARTS: usize = 8;

/// Subspaces at a time. For four queries their sums and the weights of a chunk take 32 KiB.
const SUBSPACES: usize = 4;

/// Adds the weights of up to 64 tokens to the sums of their centroids, given a run of each subspace.
#[inline(always)]
fn add_runs<const L: usize>(sums: &mut [[[f32; L]; 256]; SUBSPACES], weights: &[[f32; L]], runs: &[u8]) {
    let (first, second) = runs.split_at(runs.len() / 2);
    let [(a, b), (c, d)] = [first, second].map(|half| half.split_at(half.len() / 2));
    let [sums_a, sums_b, sums_c, sums_d] = sums;
    for ((((&weights, &a), &b), &c), &d) in weights.iter().zip(a).zip(b).zip(c).zip(d) {
        add(&mut sums_a[usize::from(a)], weights);
        add(&mut sums_b[usize::from(b)], weights);
        add(&mut sums_c[usize::from(c)], weights);
        add(&mut sums_d[usize::from(d)], weights);
    }
}

/// Adds the weights of up to 64 tokens to the sums of their centroids in one subspace.
#[inline(always)]
fn add_run<const L: usize>(sums: &mut [[f32; L]], weights: &[[f32; L]], codes: &[u16]) {
    for (&weights, &c) in weights.iter().zip(codes) {
        // A code is below ksub, a power of two: the remainder spares the bounds check.
        let at = usize::from(c) & (sums.len() - 1);
        add(&mut sums[at], weights);
    }
}

/// Adds one weight per query.
#[inline(always)]
fn add<const L: usize>(sums: &mut [f32; L], weights: [f32; L]) {
    let mut total = *sums;
    for (sum, weight) in total.iter_mut().zip(weights) {
        *sum += weight;
    }
    *sums = total;
}
