//! Sums of coded values weighted by the queries of a group.
//!
//! The weights of all queries of a token lie next to each other. One addition of a short vector per token and
//! subspace then adds them to the sums of the token's centroid, and each centroid is multiplied by its sums
//! once. With subspaces of 8 components and four queries that is 16 additions per token of 128 components,
//! where a lookup of every component takes 128 and as many multiply-adds per query.

use crate::pack::{BLOCK, unpack_run};
use crate::{Codebook, Codes, PqShape};

/// Tokens per chunk, whose weights and one subspace's sums stay in L1.
pub(super) const CHUNK: usize = 16 * BLOCK;

/// Floats that [`Lanes`] needs for `group` queries.
pub(super) const fn weighted_values_len(values: PqShape, group: usize) -> usize {
    lanes(group).saturating_mul(values.lut_len().saturating_add(CHUNK))
}

/// Most queries that are processed at once.
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
    sums: &'a mut [f32],    // (m, ksub, lanes)
}

impl<'a> Lanes<'a> {
    /// Zeros for `queries` of at most [`MOST`] queries.
    #[inline(always)]
    pub fn new(shape: PqShape, queries: usize, floats: &'a mut [f32]) -> Self {
        let lanes = lanes(queries);
        let floats = &mut floats[..weighted_values_len(shape, queries)];
        floats.fill(0.0);
        let (weights, sums) = floats.split_at_mut(CHUNK * lanes);
        Self { shape, lanes, weights, sums }
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
        for (j, sums) in sums.chunks_exact_mut(ksub).enumerate() {
            for (b, weights) in weights[..codes.n()].chunks(block).enumerate() {
                let run = &codes.block(b)[j * run_len..][..run_len];
                if nbits == 8 {
                    // A run of 8 bits has a token's code in its byte.
                    add_run(sums, weights, run);
                } else {
                    add_run(sums, weights, &unpack_run(run, nbits, block));
                }
            }
        }
    }

    /// Adds query `g`'s sum of weighted values, times `scale`, to `out` (dim,).
    #[inline(always)]
    pub fn add_values(&self, g: usize, codebook: &Codebook<'_>, scale: f32, out: &mut [f32]) {
        let (ksub, dsub) = (self.shape.ksub(), self.shape.dsub());
        let sums = self.sums.chunks_exact(ksub * self.lanes).zip(out.chunks_exact_mut(dsub));
        for (subspace, (sums, out)) in codebook.subspaces().zip(sums) {
            for (d, out) in out.iter_mut().enumerate() {
                let mut parts = [0.0; 16];
                let terms = subspace.column(d).iter().zip(sums.chunks_exact(self.lanes));
                for (i, (&y, sums)) in terms.enumerate() {
                    parts[i % 16] += y * sums[g];
                }
                *out += scale * parts.iter().sum::<f32>();
            }
        }
    }
}

/// Adds the weights of up to 64 tokens to the sums of their centroids.
#[inline(always)]
fn add_run<const L: usize, C: Copy + Into<u16>>(sums: &mut [[f32; L]], weights: &[[f32; L]], codes: &[C]) {
    for (weights, &c) in weights.iter().zip(codes) {
        // A code is below ksub, a power of two: the remainder spares the bounds check.
        let at = usize::from(c.into()) & (sums.len() - 1);
        for (sum, weight) in sums[at].iter_mut().zip(weights) {
            *sum += weight;
        }
    }
}
