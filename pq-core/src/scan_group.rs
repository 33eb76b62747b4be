//! The scan for up to four queries at a time, where a table of floats does not fit in registers.
//!
//! The tables of four queries are interleaved, (ksub, 4), so that one load brings a token's entries for all
//! four. Per subspace and token that is a load and an addition, where each query alone takes an eighth of a
//! gather: 4 queries at (64, 8) take 0.25 of the time on Zen 4 with AVX2. The additions are those of the
//! scan, in the same order.

use crate::Luts;
use crate::pack::BLOCK;
use crate::simd::Simd;

/// Queries at a time: floats of a 128-bit register.
pub(crate) const QUERIES: usize = 4;

/// Subspaces at a time, whose tables fill half of L1.
const SUBSPACES: usize = 4;

/// Scores the tokens of up to `CHUNK / 64` blocks of codes for the queries from `first` on, as many as
/// `scores` (queries, `CHUNK`) has rows, at most four.
#[inline(always)]
pub(crate) fn scan_group<S: Simd, const NBITS: u32, const CHUNK: usize>(
    s: S,
    luts: &Luts<'_>,
    first: usize,
    blocks: &[&[u8]],
    scores: &mut [f32],
) {
    let shape = luts.shape();
    let run_len = 8 * NBITS as usize;
    // Adding to -0.0 and adding -0.0 change no bit.
    let mut sums = [[-0.0_f32; QUERIES]; CHUNK];
    let mut tables = [[[-0.0_f32; QUERIES]; 256]; SUBSPACES];
    let mut codes = [[0_u16; BLOCK]; SUBSPACES];
    let queries = scores.len() / CHUNK;
    for j in (0..shape.m()).step_by(SUBSPACES) {
        let count = SUBSPACES.min(shape.m() - j);
        for (i, table) in tables.iter_mut().enumerate() {
            if i >= count {
                table.fill([-0.0; QUERIES]);
                continue;
            }
            let row = |q: usize| &luts.lut(first + q.min(queries - 1)).row(j + i)[..1 << NBITS];
            let rows = [row(0), row(1), row(2), row(3)];
            for (c, entry) in table[..1 << NBITS].iter_mut().enumerate() {
                *entry = [rows[0][c], rows[1][c], rows[2][c], rows[3][c]];
            }
        }
        let sums = sums.as_chunks_mut::<BLOCK>().0;
        for (sums, block) in sums.iter_mut().zip(blocks) {
            let runs = &block[j * run_len..][..count * run_len];
            for (codes, run) in codes.iter_mut().zip(runs.chunks_exact(run_len)) {
                // SAFETY: a run has 8 * NBITS bytes.
                let bytes = unsafe { s.unpack::<NBITS>(run.as_ptr()) };
                s.store_sums(codes, s.add_bytes(s.no_sums(), bytes));
            }
            for (t, sums) in sums.iter_mut().enumerate() {
                for (table, codes) in tables.iter().zip(&codes) {
                    for (sum, &x) in sums.iter_mut().zip(&table[usize::from(codes[t] as u8)]) {
                        *sum += x;
                    }
                }
            }
        }
    }
    for (q, scores) in scores.chunks_exact_mut(CHUNK).enumerate() {
        for (score, sums) in scores.iter_mut().zip(&sums) {
            *score = sums[q];
        }
    }
}
