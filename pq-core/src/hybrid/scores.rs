//! Table scores of a group of queries, four at a time if that is faster.

use crate::blocks::{CHUNK, QUERIES};
use crate::scan_group::score_together;
use crate::simd::{Kernel, Run, Simd};
use crate::{Backend, Codes, Error, Luts, scan_into_with};

/// Writes the table scores of all queries, `scores` (group, n). `room` holds at least [`CHUNK`] floats for
/// each of up to [`QUERIES`] queries.
pub(super) fn score_group(
    backend: Backend,
    luts: &Luts<'_>,
    keys: &Codes<'_>,
    room: &mut [f32],
    scores: &mut [f32],
) -> Result<(), Error> {
    let n = keys.n().max(1);
    for (i, scores) in scores.chunks_mut(QUERIES * n).enumerate() {
        let first = i * QUERIES;
        let room = &mut room[..scores.len() / n * CHUNK];
        if backend.run(ScoreTogether { luts, first, keys, room, scores }) {
            continue;
        }
        for (g, scores) in scores.chunks_exact_mut(n).enumerate() {
            scan_into_with(backend, &luts.lut(first + g), keys, scores)?;
        }
    }
    Ok(())
}

/// The scores of up to [`QUERIES`] queries from `first` on.
struct ScoreTogether<'a, 'b> {
    luts: &'a Luts<'a>,
    first: usize,
    keys: &'a Codes<'a>,
    room: &'b mut [f32],   // (queries, CHUNK)
    scores: &'b mut [f32], // (queries, n)
}

impl Kernel for ScoreTogether<'_, '_> {
    /// Whether it has written the scores: only if that is faster than a scan per query.
    type Output = bool;

    fn scalar(self) -> bool {
        false
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> bool {
        let Self { luts, first, keys, room, scores } = self;
        let (n, mut gathered) = (keys.n(), None);
        for start in (0..n).step_by(CHUNK) {
            let end = n.min(start + CHUNK);
            let mut parts = [&[][..]; CHUNK / 16];
            let keys = keys.part(start, end);
            let blocks = keys.blocks(0, &mut parts[..CHUNK / keys.block_vectors()]);
            if !score_together(s, luts, first, blocks, room, &mut gathered) {
                return false;
            }
            for (scores, room) in scores.chunks_exact_mut(n).zip(room.chunks_exact(CHUNK)) {
                scores[start..end].copy_from_slice(&room[..end - start]);
            }
        }
        true
    }
}
