//! The scan: scores of all codes by table lookup.
//!
//! The vector form keeps tables in registers. A table of floats is four tables of bytes, a table of 16-bit
//! integers two, and tables of up to 256 bytes are looked up for 64 tokens at a time ([`Simd::look_up`]). The
//! four bytes form the float that the scalar form reads, so both forms add the same values in the same order
//! and agree bit for bit.
//!
//! N.B. At 8 bits `vpgatherdps` makes 2.9 G lookups per second on Zen 4, the registers of AVX-512 10 G. At 6
//! bits `vpermi2ps` needs more instructions than lookups of bytes do (24 against 16 per 64 codes).
//! Prefetching the runs of later blocks does not help.

use core::ops::Range;

use crate::blocks::{Blocks, QUERIES, Room, SMALL_PAGES};
use crate::error::check_len;
use crate::pack::unpack_run;
use crate::simd::{BLOCK, Kernel, Run, Simd, for_nbits, row_len};
use crate::{Backend, Codes, Error, Lut, LutPrecision, QuantizedLut};

/// Scores every code against a query's lookup table (asymmetric distance computation).
///
/// `scores[i] = sum over j of lut[j, codes[i, j]]`, added in `f32` in ascending `j`: the same bits on every
/// backend.
///
/// # Shapes
/// `lut` (m, ksub); `codes` (n, m) packed; `scores` (n,), fully written.
/// # Errors
/// [`Error::ShapeMismatch`] or [`Error::Length`]; `scores` is then untouched.
/// # Cost
/// n * m lookups and additions, one pass over `codes`, no allocation.
/// # Source
/// Jégou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search", TPAMI 2011.
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, CodesBuf, PqShape, lut_into, scan_into};
/// let shape = PqShape::new(2, 1, 1)?; // one subspace, two centroids
/// let codebook = CodebookBuf::new(shape, &[1.0, 0.0, 0.0, 1.0])?;
/// let mut codes = CodesBuf::new(shape);
/// codes.append(&codebook.view(), &[0.9_f32, 0.1, 0.2, 0.8])?;
/// let mut table = [0.0; 2];
/// let luts = lut_into(&codebook.view(), &[3.0_f32, 5.0], &mut table)?;
/// let mut scores = [0.0; 2];
/// scan_into(&luts.lut(0), &codes.view(), &mut scores)?;
/// assert_eq!(scores, [3.0, 5.0]);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn scan_into(lut: &Lut<'_>, codes: &Codes<'_>, scores: &mut [f32]) -> Result<(), Error> {
    scan_into_with(Backend::detect(), lut, codes, scores)
}

/// [`scan_into`] on a given backend.
///
/// # Errors
/// As [`scan_into`], and [`Error::BackendUnavailable`].
pub fn scan_into_with(
    backend: Backend,
    lut: &Lut<'_>,
    codes: &Codes<'_>,
    scores: &mut [f32],
) -> Result<(), Error> {
    backend.check()?;
    if lut.shape() != codes.shape() {
        return Err(Error::ShapeMismatch);
    }
    check_len("scores", scores.len(), codes.n())?;
    backend.run(Scan { lut, codes, scores });
    Ok(())
}

/// Scores every code against a table of integers.
///
/// `scores[i] = offset + scale * (sum over j of lut[j, codes[i, j]])`: an integer sum, then a product and an
/// addition, rounded once each: the same bits on every backend. See [`QuantizedLut::error_bound`].
///
/// # Shapes
/// As [`scan_into`].
/// # Errors
/// [`Error::ShapeMismatch`] or [`Error::Length`]; `scores` is then untouched.
/// # Cost
/// n * m lookups per byte of precision, one pass over `codes`, no allocation.
/// # Examples
/// ```
/// use pq_core::{Codes, Lut, LutPrecision, PqShape, QuantizedLut, pack_codes_into, scan_quantized_into};
/// let shape = PqShape::new(2, 2, 1)?;
/// let mut bytes = vec![0; shape.codes_len(3)];
/// pack_codes_into(shape, &[0_u8, 0, 0, 1, 1, 1], &mut bytes)?;
/// let table = [0.0, 1.5, -10.0, 20.0];
/// let mut storage = vec![0; shape.quantized_lut_len(LutPrecision::U8)];
/// let lut = QuantizedLut::new(&Lut::new(shape, &table)?, LutPrecision::U8, &mut storage)?;
/// let mut scores = [0.0; 3];
/// scan_quantized_into(&lut, &Codes::new(shape, 3, &bytes)?, &mut scores)?;
/// assert!(scores.iter().zip([-10.0, 20.0, 21.5]).all(|(s, exact)| (s - exact).abs() <= lut.error_bound()));
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn scan_quantized_into(
    lut: &QuantizedLut<'_>,
    codes: &Codes<'_>,
    scores: &mut [f32],
) -> Result<(), Error> {
    scan_quantized_into_with(Backend::detect(), lut, codes, scores)
}

/// [`scan_quantized_into`] on a given backend.
///
/// # Errors
/// As [`scan_quantized_into`], and [`Error::BackendUnavailable`].
pub fn scan_quantized_into_with(
    backend: Backend,
    lut: &QuantizedLut<'_>,
    codes: &Codes<'_>,
    scores: &mut [f32],
) -> Result<(), Error> {
    backend.check()?;
    if lut.shape() != codes.shape() {
        return Err(Error::ShapeMismatch);
    }
    check_len("scores", scores.len(), codes.n())?;
    backend.run(ScanQuantized { lut, codes, scores });
    Ok(())
}

struct Scan<'a, 'b> {
    lut: &'a Lut<'a>,
    codes: &'a Codes<'a>,
    scores: &'b mut [f32],
}

/// The definition of the scan.
pub(crate) fn scan_scalar(lut: &Lut<'_>, codes: &Codes<'_>, scores: &mut [f32]) {
    let (nbits, block) = (codes.shape().nbits(), codes.block_vectors());
    for (b, scores) in scores.chunks_mut(block).enumerate() {
        let runs = codes.block(b).chunks_exact(codes.run_len());
        for ((j, row), run) in lut.rows().enumerate().zip(runs) {
            for (score, c) in scores.iter_mut().zip(unpack_run(run, nbits, block)) {
                let x = row[usize::from(c)];
                *score = if j == 0 { x } else { *score + x };
            }
        }
    }
}

impl Kernel for Scan<'_, '_> {
    type Output = ();

    fn scalar(self) {
        scan_scalar(self.lut, self.codes, self.scores);
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        if self.codes.shape().nbits() > 8 {
            return self.scalar(); // registers hold tables of at most 256 entries
        }
        match self.codes.parts() {
            1 => self.scan_chunks::<S, TOGETHER>(s),
            _ => self.scan_chunks::<S, SMALL_PAGES>(s),
        }
    }
}

/// Blocks scanned together, few enough for their scores to stay in L1 across subspaces.
const TOGETHER: usize = 64;

impl Scan<'_, '_> {
    /// Scans with a list of `PARTS` blocks or small pages.
    #[inline(always)]
    fn scan_chunks<S: Simd, const PARTS: usize>(self, s: S) {
        let (step, mut room) = (PARTS / self.codes.parts(), None);
        for (i, scores) in self.scores.chunks_mut(step * BLOCK).enumerate() {
            let mut parts = [&[][..]; PARTS];
            let blocks = self.codes.blocks(i * step, &mut parts);
            let n = scores.len();
            scan_chunk(s, core::slice::from_ref(self.lut), blocks, scores, [n, n], &mut room);
        }
    }
}

/// The vector form of the scan for at most [`QUERIES`] queries, over few enough blocks for their scores to
/// stay in cache; the last may be incomplete. `scores` has `n` tokens of each query, `stride` apart. Blocks
/// in small pages are gathered once for all queries.
#[inline(always)]
pub(crate) fn scan_chunk<S: Simd>(
    s: S,
    luts: &[Lut<'_>],
    blocks: Blocks<'_>,
    scores: &mut [f32],
    [n, stride]: [usize; 2],
    room: &mut Room,
) {
    let Some(shape) = luts.first().map(Lut::shape) else { return };
    let (m, nbits) = (shape.m(), shape.nbits());
    let mut last = [[0.0; BLOCK]; QUERIES];
    let mut end = 0;
    while end < m {
        let (first, mut list) = (end, None);
        let runs = blocks.runs(s, nbits, (first, m, PAIR), room, &mut list);
        end = runs.end;
        for ((lut, scores), last) in luts.iter().zip(scores.chunks_mut(stride)).zip(&mut last) {
            let whole = scores[..n].as_chunks_mut::<BLOCK>().0;
            for_nbits!(nbits, N => s.call(
                #[inline(always)]
                || add_subspaces::<S, N>(s, lut, runs.blocks, first..end, whole, last),
            ));
        }
    }
    for (scores, last) in scores.chunks_mut(stride).zip(&mut last).take(luts.len()) {
        let (whole, tail) = scores[..n].as_chunks_mut::<BLOCK>();
        blocks.order_as_tokens(nbits, whole.as_flattened_mut());
        blocks.order_as_tokens(nbits, last);
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

/// Maximum subspaces added to the scores at a time.
const PAIR: usize = 2;

/// Adds consecutive subspaces to the scores, given their runs in each block.
#[inline(always)]
fn add_subspaces<S: Simd, const NBITS: u32>(
    s: S,
    lut: &Lut<'_>,
    codes: &[&[u8]],
    subspaces: Range<usize>,
    whole: &mut [[f32; BLOCK]],
    tail: &mut [f32; BLOCK],
) {
    // Small tables: two subspaces at a time halve the passes over the scores.
    let most = if NBITS <= 6 { PAIR } else { 1 };
    let mut j = subspaces.start;
    while j < subspaces.end {
        let width = most.min(subspaces.end - j);
        let offset = (j - subspaces.start) * 8 * NBITS as usize;
        let part = Part { lut, codes, offset, j, last: j + width == lut.shape().m() };
        if width == PAIR {
            part.add::<S, NBITS, PAIR>(s, whole, tail);
        } else {
            part.add::<S, NBITS, 1>(s, whole, tail);
        }
        j += width;
    }
}

/// Consecutive subspaces of a scan.
struct Part<'a> {
    lut: &'a Lut<'a>,
    codes: &'a [&'a [u8]],
    offset: usize, // of the first run in each of the codes
    j: usize,      // the first subspace
    last: bool,    // whether the scores are complete after it
}

impl Part<'_> {
    /// Adds `J` subspaces to the scores of all blocks, which are in block order until the scan is complete.
    #[inline(always)]
    fn add<S: Simd, const NBITS: u32, const J: usize>(
        &self,
        s: S,
        whole: &mut [[f32; BLOCK]],
        tail: &mut [f32; BLOCK],
    ) {
        let mut planes = [[0_u8; 4 * 256]; J];
        let planes_len = 4 * row_len(1 << NBITS);
        for (i, planes) in planes.iter_mut().enumerate() {
            split_planes(self.lut.row(self.j + i), &mut planes[..planes_len]);
        }
        let mut tables = [self.table::<S, NBITS>(s, 0, &planes[0]); J];
        for (i, table) in tables.iter_mut().enumerate().skip(1) {
            *table = self.table::<S, NBITS>(s, i, &planes[i]);
        }
        for (b, runs) in self.codes.iter().enumerate() {
            let scores = whole.get_mut(b).unwrap_or(&mut *tail);
            self.add_block::<S, NBITS, J>(s, &tables, &runs[self.offset..], scores);
        }
    }

    /// The table of subspace `i` of the part, in registers. Not a closure: if it is not inlined, every
    /// intrinsic becomes a call.
    #[inline(always)]
    fn table<S: Simd, const NBITS: u32>(&self, s: S, i: usize, planes: &[u8; 4 * 256]) -> S::FloatTable {
        // SAFETY: a row has ksub floats, its planes max(16, ksub) bytes each; both outlive the table.
        unsafe { s.float_table::<NBITS>(self.lut.row(self.j + i).as_ptr(), planes.as_ptr()) }
    }

    #[inline(always)]
    fn add_block<S: Simd, const NBITS: u32, const J: usize>(
        &self,
        s: S,
        tables: &[S::FloatTable; J],
        runs: &[u8],
        scores: &mut [f32; BLOCK],
    ) {
        let run_len = 8 * NBITS as usize;
        let runs = &runs[..J * run_len];
        let mut totals = s.zero_block();
        for (i, &table) in tables.iter().enumerate() {
            // SAFETY: `runs` holds J runs, and `scores` 64 floats.
            let codes = unsafe { s.unpack::<NBITS>(runs.as_ptr().add(i * run_len)) };
            let values = s.look_up_floats::<NBITS>(table, codes);
            if i == 0 && self.j == 0 {
                totals = values;
                continue;
            }
            if i == 0 {
                // SAFETY: as above.
                totals = unsafe { s.load_raw(scores.as_ptr()) };
            }
            for (total, &value) in totals.as_mut().iter_mut().zip(values.as_ref()) {
                *total = s.add(*total, value);
            }
        }
        // SAFETY: as above.
        unsafe {
            if self.last {
                s.store_block(scores.as_mut_ptr(), totals);
            } else {
                s.store_raw(scores.as_mut_ptr(), totals);
            }
        }
    }
}

/// The four bytes of every float of a table as four planes of equal length, lowest first.
#[inline(always)]
pub(crate) fn split_planes(row: &[f32], planes: &mut [u8]) {
    let len = planes.len() / 4;
    for (shift, plane) in planes.chunks_exact_mut(len).enumerate() {
        for (byte, x) in plane.iter_mut().zip(row) {
            *byte = (x.to_bits() >> (8 * shift)) as u8;
        }
    }
}

struct ScanQuantized<'a, 'b> {
    lut: &'a QuantizedLut<'a>,
    codes: &'a Codes<'a>,
    scores: &'b mut [f32],
}

impl Kernel for ScanQuantized<'_, '_> {
    type Output = ();

    fn scalar(self) {
        let (nbits, block) = (self.codes.shape().nbits(), self.codes.block_vectors());
        let planes = self.lut.precision().planes();
        for (b, scores) in self.scores.chunks_mut(block).enumerate() {
            let mut sums = [0_u32; BLOCK];
            for (j, run) in self.codes.block(b).chunks_exact(self.codes.run_len()).enumerate() {
                let codes = unpack_run(run, nbits, block);
                for plane in 0..planes {
                    let row = self.lut.row(plane, j);
                    for (sum, c) in sums.iter_mut().zip(codes) {
                        *sum += u32::from(row[usize::from(c)]) << (8 * plane);
                    }
                }
            }
            for (score, &sum) in scores.iter_mut().zip(&sums) {
                *score = self.lut.scale() * sum as f32 + self.lut.offset();
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        if self.codes.shape().nbits() > 8 {
            return self.scalar(); // registers hold tables of at most 256 entries
        }
        // N.B. One function for all widths: with one per width, 16-bit tables of 8-bit codes take twice as
        // long with AVX2.
        for_nbits!(self.codes.shape().nbits(), N => self.scan::<S, N>(s));
    }
}

impl ScanQuantized<'_, '_> {
    /// Several blocks share the loads of a table if there are registers for their sums.
    #[inline(always)]
    fn scan<S: Simd, const NBITS: u32>(self, s: S) {
        match self.lut.precision() {
            LutPrecision::U8 if const { S::LANES == 16 } => self.scan_groups::<S, NBITS, 4, 1>(s),
            LutPrecision::U8 => self.scan_groups::<S, NBITS, 1, 1>(s),
            LutPrecision::U16 if const { S::LANES == 16 } => self.scan_groups::<S, NBITS, 2, 2>(s),
            LutPrecision::U16 => self.scan_groups::<S, NBITS, 1, 2>(s),
        }
    }

    /// Scans `BLOCKS` blocks at a time, and the last ones, or those of small pages, one by one.
    #[inline(always)]
    fn scan_groups<S: Simd, const NBITS: u32, const BLOCKS: usize, const PLANES: usize>(self, s: S) {
        let Self { lut, codes, mut scores } = self;
        let mut b = 0;
        if const { BLOCKS > 1 } && codes.parts() == 1 {
            let mut groups = scores.chunks_exact_mut(BLOCKS * BLOCK);
            for scores in &mut groups {
                let runs = core::array::from_fn(|i| codes.block(b + i));
                scan_blocks::<S, NBITS, BLOCKS, PLANES>(s, lut, runs, scores);
                b += BLOCKS;
            }
            scores = groups.into_remainder();
        }
        let mut room = None;
        for (i, scores) in scores.chunks_mut(BLOCK).enumerate() {
            let (mut parts, mut list) = ([&[][..]; MOST_PARTS], None);
            let blocks = codes.blocks(b + i, &mut parts[..codes.parts()]);
            // All subspaces fit: a sum has at most `QuantizedLut::MAX_M`.
            let runs = blocks.runs(s, NBITS, (0, lut.shape().m(), 1), &mut room, &mut list);
            let mut whole = [0.0; BLOCK];
            scan_blocks::<S, NBITS, 1, PLANES>(s, lut, [runs.blocks[0]], &mut whole);
            if codes.parts() > 1 {
                blocks.order_as_tokens(NBITS, &mut whole);
            }
            scores.copy_from_slice(&whole[..scores.len()]);
        }
    }
}

/// Maximum small pages of a block.
const MOST_PARTS: usize = 4;

/// Scores `BLOCKS` blocks, given the runs of all subspaces of each.
#[inline(always)]
fn scan_blocks<S: Simd, const NBITS: u32, const BLOCKS: usize, const PLANES: usize>(
    s: S,
    lut: &QuantizedLut<'_>,
    blocks: [&[u8]; BLOCKS],
    scores: &mut [f32],
) {
    let (m, run_len) = (lut.shape().m(), 8 * NBITS as usize);
    let blocks = blocks.map(|block| &block[..m * run_len]);
    let mut sums = [[s.no_sums(); PLANES]; BLOCKS];
    for j in 0..m {
        // N.B. `array::from_fn` keeps the tables on the stack: half the speed.
        // SAFETY: a row has max(16, ksub) bytes.
        let mut tables = [unsafe { s.table::<NBITS>(lut.row(0, j).as_ptr()) }; PLANES];
        for (plane, table) in tables.iter_mut().enumerate().skip(1) {
            // SAFETY: as above.
            *table = unsafe { s.table::<NBITS>(lut.row(plane, j).as_ptr()) };
        }
        for (b, sums) in sums.iter_mut().enumerate() {
            // SAFETY: each of the blocks has m runs.
            let codes = unsafe { s.unpack::<NBITS>(blocks[b].as_ptr().add(j * run_len)) };
            for (sums, &table) in sums.iter_mut().zip(&tables) {
                *sums = s.add_bytes(*sums, s.look_up::<NBITS>(table, codes));
            }
        }
    }
    let (scale, offset) = (s.splat(lut.scale()), s.splat(lut.offset()));
    for (sums, scores) in sums.into_iter().zip(scores.as_chunks_mut::<BLOCK>().0) {
        let mut integers = [[0; BLOCK]; PLANES];
        for (integers, sums) in integers.iter_mut().zip(sums) {
            s.store_sums(integers, sums);
        }
        for at in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: at + LANES <= 64, the length of all arrays.
            unsafe {
                let mut sum = s.load_u16(integers[0].as_ptr().add(at));
                if PLANES == 2 {
                    // Both terms are exact, so this rounds as the conversion of the 32-bit sum does.
                    let high = s.load_u16(integers[PLANES - 1].as_ptr().add(at));
                    sum = s.add(sum, s.mul(high, s.splat(256.0)));
                }
                s.store(scores.as_mut_ptr().add(at), s.add(s.mul(scale, sum), offset));
            }
        }
    }
}
