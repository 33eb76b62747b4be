//! Input of the vector forms: the codes of 64 vectors at a time.
//!
//! A run of 64 codes is gathered from the short runs of small pages without unpacking, in whole bytes: with
//! `w` bits in the narrowest plane of a code, a run consists of groups of `8 w` bytes, to which each of `p`
//! pages contributes `8 w / p` in turn. The planes of a short run are packed by the same rule, so all planes
//! of a vector end up in the same lane, which is the vector's own only at 8 bits. The scores are permuted to
//! token order once for all subspaces ([`Blocks::order_as_tokens`]). Shifting and masking the codes of each
//! subspace instead would take longer than a scan.
//!
//! On pages of 16 tokens attention of one query takes 1.07 to 1.18 times as long as on contiguous codes
//! (AVX-512, codes in L2). Half of the difference is the L2 latency of a page's cache lines, which the
//! arithmetic hides for contiguous codes. N.B. Prefetching is slower, of the next subspaces as well as of the
//! next blocks: pages at power-of-two distances share few L1 sets. Aligning the gathered bytes does not help.
//! Units of 2 to 16 bytes copied one by one, without [`Simd::interleave`], took 1.5 times as long at 6 bits
//! and 1.3 times at 4.

use crate::QuantizedLut;
use crate::simd::{BLOCK, Simd};

/// Consecutive blocks of 64 vectors.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'b> {
    parts: &'b [&'b [u8]], // (blocks, `of_block`)
    of_block: usize,       // 1, or the number of small pages, 2 or 4
}

/// The runs of some subspaces.
#[derive(Clone, Copy)]
pub(crate) struct Runs<'r> {
    /// Every block, from the run of the first subspace on.
    pub blocks: &'r [&'r [u8]],
    /// The subspace after the last.
    pub end: usize,
}

/// Tokens of a chunk of attention.
pub(crate) const CHUNK: usize = 16 * BLOCK;

/// Queries that share a chunk's codes: floats of a 128-bit register.
pub(crate) const QUERIES: usize = 4;

/// Maximum bytes gathered at a time: with 32 blocks of pages of 16 tokens, two cache lines of each page. With
/// half as many, attention takes 1 to 2 % longer. One block of as many subspaces as integer sums allow fits.
const ROOM: usize = QuantizedLut::MAX_M * BLOCK;

/// Maximum blocks gathered.
const MOST: usize = 64;

/// Maximum small pages per chunk: 32 blocks of pages of 16 tokens.
pub(crate) const SMALL_PAGES: usize = 128;

/// Buffer for gathered runs, shared by all chunks. It stays `None` if all blocks are whole, since clearing it
/// takes longer than a small scan.
pub(crate) type Room = Option<[u8; ROOM]>;

/// The list of the gathered blocks, `None` until needed as well.
pub(crate) type List<'r> = Option<[&'r [u8]; MOST]>;

impl<'b> Blocks<'b> {
    /// Blocks of `of_block` parts each.
    #[inline(always)]
    pub const fn new(parts: &'b [&'b [u8]], of_block: usize) -> Self {
        Self { parts, of_block }
    }

    /// Number of blocks.
    #[inline(always)]
    pub const fn len(&self) -> usize {
        self.parts.len() / self.of_block
    }

    /// All runs of whole blocks.
    #[inline(always)]
    pub const fn whole(&self, m: usize) -> Runs<'b> {
        Runs { blocks: self.parts, end: m }
    }

    /// The runs from subspace `j` of `m` on: all of them, or as many as fit in the buffer, a multiple of
    /// `least`.
    #[inline(always)]
    pub fn runs<'r, S: Simd>(
        &self,
        s: S,
        nbits: u32,
        (j, m, least): (usize, usize, usize),
        room: &'r mut Room,
        list: &'r mut List<'r>,
    ) -> Runs<'r>
    where
        'b: 'r,
    {
        match self.of_block {
            1 => self.whole(m),
            2 => s.call(
                #[inline(always)]
                || self.gather::<S, 2>(s, nbits, (j, m, least), room, list),
            ),
            _ => s.call(
                #[inline(always)]
                || self.gather::<S, 4>(s, nbits, (j, m, least), room, list),
            ),
        }
    }

    /// Gathers as many subspaces as fit, so that each cache line of a page is read once: it would not stay in
    /// L1 until the next subspace.
    #[inline(always)]
    fn gather<'r, S: Simd, const PARTS: usize>(
        &self,
        s: S,
        nbits: u32,
        (j, m, least): (usize, usize, usize),
        room: &'r mut Room,
        list: &'r mut List<'r>,
    ) -> Runs<'r> {
        let run_len = 8 * nbits as usize;
        let (blocks, part_len) = (self.parts.as_chunks::<PARTS>().0, run_len / PARTS);
        let count = (ROOM / (blocks.len() * run_len) / least * least).min(m - j);
        let room = room.get_or_insert_with(|| [0; ROOM]);
        let list = &mut list.get_or_insert_with(|| [&[][..]; MOST])[..blocks.len()];
        for ((parts, runs), slot) in blocks.iter().zip(room.chunks_exact_mut(count * run_len)).zip(&mut *list)
        {
            let mut parts = *parts;
            for part in &mut parts {
                *part = &part[j * part_len..][..count * part_len];
            }
            match unit(nbits, PARTS) {
                2 => s.interleave::<2, PARTS>(parts, runs),
                4 => s.interleave::<4, PARTS>(parts, runs),
                8 => s.interleave::<8, PARTS>(parts, runs),
                16 => s.interleave::<16, PARTS>(parts, runs),
                _ => s.interleave::<32, PARTS>(parts, runs),
            }
            *slot = runs;
        }
        Runs { blocks: list, end: j + count }
    }

    /// Permutes values from block order to token order.
    pub fn order_as_tokens(&self, nbits: u32, values: &mut [f32]) {
        transpose(steps(nbits), self.of_block, values);
    }

    /// Permutes values from token order to block order.
    pub fn order_as_codes(&self, nbits: u32, values: &mut [f32]) {
        transpose(self.of_block, steps(nbits), values);
    }
}

/// Bytes that each of `parts` parts contributes at a time.
#[inline(always)]
const fn unit(nbits: u32, parts: usize) -> usize {
    (8 << nbits.trailing_zeros()) / parts
}

/// Codes in a byte of the narrowest plane.
#[inline(always)]
const fn steps(nbits: u32) -> usize {
    8 >> nbits.trailing_zeros()
}

/// Turns each block, (rows, columns, units of values), into (columns, rows, units).
fn transpose(rows: usize, columns: usize, values: &mut [f32]) {
    match (rows, columns) {
        (2, 2) => transpose_blocks::<2, 2>(values),
        (2, 4) => transpose_blocks::<2, 4>(values),
        (2, 8) => transpose_blocks::<2, 8>(values),
        (4, 2) => transpose_blocks::<4, 2>(values),
        (4, 4) => transpose_blocks::<4, 4>(values),
        (4, 8) => transpose_blocks::<4, 8>(values),
        (8, 2) => transpose_blocks::<8, 2>(values),
        (8, 4) => transpose_blocks::<8, 4>(values),
        _ => {} // a single row or column
    }
}

/// [`transpose`] with compile-time lengths: register moves instead of calls.
fn transpose_blocks<const ROWS: usize, const COLUMNS: usize>(values: &mut [f32]) {
    let unit = BLOCK / (ROWS * COLUMNS);
    for block in values.as_chunks_mut::<BLOCK>().0 {
        let old = *block;
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                let from = &old[(row * COLUMNS + column) * unit..][..unit];
                block[(column * ROWS + row) * unit..][..unit].copy_from_slice(from);
            }
        }
    }
}
