//! The scan for up to four queries at a time, for float tables that do not fit in registers.
//!
//! The tables of four queries are interleaved, (ksub, 4), so that one load fetches a token's entries for all
//! four. Per subspace and token that is a load and an addition, instead of an eighth of a gather per query: 4
//! queries at (64, 8) take 0.25 of the time on Zen 4 with AVX2. The additions are those of the scan, in the
//! same order.

use crate::Luts;
use crate::blocks::{Blocks, CHUNK, QUERIES, Room};
use crate::simd::{BLOCK, Simd};

/// Subspaces at a time, whose tables fill half of L1.
const SUBSPACES: usize = 4;

/// Cache-line alignment: no entry of four floats straddles two lines.
#[repr(align(64))]
struct Aligned<T>(T);

/// Computes the table scores of up to four queries from `first` on, `scores` (queries, CHUNK), if that is
/// faster together: for three or more, if the tables do not fit in registers. Returns whether it did.
#[inline(always)]
pub(crate) fn score_together<S: Simd>(
    s: S,
    luts: &Luts<'_>,
    first: usize,
    keys: Blocks<'_>,
    scores: &mut [f32],
    room: &mut Room,
) -> bool {
    if const { S::FLOAT_TABLE_BITS >= 8 } {
        return false; // all tables fit: the rest is not compiled
    }
    let nbits = luts.shape().nbits();
    let together = scores.len() >= 3 * CHUNK && nbits > S::FLOAT_TABLE_BITS && nbits <= 8;
    if together {
        s.call(
            #[inline(always)]
            || scan_group(s, luts, first, keys, scores, room),
        );
    }
    together
}

/// Scores the tokens of up to `CHUNK / 64` blocks of codes of 7 or 8 bits for the queries from `first` on, as
/// many as `scores` (queries, `CHUNK`) has rows, at most four.
#[inline(always)]
fn scan_group<S: Simd>(
    s: S,
    luts: &Luts<'_>,
    first: usize,
    blocks: Blocks<'_>,
    scores: &mut [f32],
    room: &mut Room,
) {
    let (m, nbits, ksub) = (luts.shape().m(), luts.shape().nbits(), luts.shape().ksub());
    // Adding to -0.0 and adding -0.0 change no bit.
    let Aligned(sums) = &mut Aligned([[-0.0_f32; QUERIES]; CHUNK]);
    let Aligned(tables) = &mut Aligned([[[-0.0_f32; QUERIES]; 256]; SUBSPACES]);
    let mut codes = [[0_u16; BLOCK]; SUBSPACES];
    let queries = scores.len() / CHUNK;
    let mut end = 0;
    while end < m {
        let (start, mut list) = (end, None);
        let runs = blocks.runs(s, nbits, (start, m, SUBSPACES), room, &mut list);
        end = runs.end;
        for j in (start..end).step_by(SUBSPACES) {
            let count = SUBSPACES.min(end - j);
            for (i, table) in tables.iter_mut().enumerate() {
                if i >= count {
                    table.fill([-0.0; QUERIES]);
                    continue;
                }
                let row = |q: usize| &luts.lut(first + q.min(queries - 1)).row(j + i)[..ksub];
                let rows = [row(0), row(1), row(2), row(3)];
                for (c, entry) in table[..ksub].iter_mut().enumerate() {
                    *entry = [rows[0][c], rows[1][c], rows[2][c], rows[3][c]];
                }
            }
            let run_len = 8 * nbits as usize;
            for (sums, block) in sums.as_chunks_mut::<BLOCK>().0.iter_mut().zip(runs.blocks) {
                let runs = &block[(j - start) * run_len..][..count * run_len];
                add_block(s, nbits, tables, &mut codes, runs, sums);
            }
        }
    }
    for (q, scores) in scores.chunks_exact_mut(CHUNK).enumerate() {
        for (score, sums) in scores.iter_mut().zip(&*sums) {
            *score = sums[q];
        }
        blocks.order_as_tokens(nbits, scores);
    }
}

/// Adds up to `SUBSPACES` runs of a block.
#[inline(always)]
fn add_block<S: Simd>(
    s: S,
    nbits: u32,
    tables: &[[[f32; QUERIES]; 256]; SUBSPACES],
    codes: &mut [[u16; BLOCK]; SUBSPACES],
    runs: &[u8],
    sums: &mut [[f32; QUERIES]; BLOCK],
) {
    for (codes, run) in codes.iter_mut().zip(runs.chunks_exact(8 * nbits as usize)) {
        // SAFETY: a run has 8 * nbits bytes.
        let bytes = unsafe {
            match nbits {
                7 => s.unpack::<7>(run.as_ptr()),
                _ => s.unpack::<8>(run.as_ptr()),
            }
        };
        s.store_sums(codes, s.add_bytes(s.no_sums(), bytes));
    }
    for (t, sums) in sums.iter_mut().enumerate() {
        for (table, codes) in tables.iter().zip(&*codes) {
            for (sum, &x) in sums.iter_mut().zip(&table[usize::from(codes[t] as u8)]) {
                *sum += x;
            }
        }
    }
}
