//! What the vector forms read: codes of 64 vectors at a time.
//!
//! A run of 64 codes is gathered from the short runs of small pages as it is, in units of whole bytes: with
//! `w` bits in the narrowest plane of a code, a run of 64 codes consists of `8 w` bytes at a time, to which
//! each of `p` pages contributes `8 w / p` in turn. Since the planes of a short run are packed by the same
//! rule, all planes of a vector arrive at one place, which is the vector's own only at 8 bits. Scores are put
//! in order once for all subspaces ([`Blocks::order_as_tokens`]). To shift and mask the codes of each
//! subspace instead would take longer than a scan does.
//!
//! Pages of 16 tokens cost attention of one query a fifth to a half of its time (AVX-512, codes in L2): a run
//! is read and written in units of 8 bytes at 4 bits, 16 at 8, before it is read as one. Tried: units
//! interleaved in registers, by shuffles of four lines, instead of one by one; at (64, 4) the factor over one
//! piece fell from 1.36 to 1.28, at 8 bits not at all. Lines of the next subspaces prefetched into L1 (Zen
//! 5): 1.28 instead of 1.20 at (64, 8), 1.60 instead of 1.53 at (64, 4), so it is not their latency. Next:
//! codes unpacked straight from the parts, by one load and three masked broadcasts into a register, without
//! the copy.

use crate::pack::BLOCK;
use crate::simd::{Simd, for_nbits};

/// Consecutive blocks of 64 vectors.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'b> {
    parts: &'b [&'b [u8]], // (blocks, `of_block`)
    of_block: usize,       // 1, or the number of small pages, 2 or 4
}

/// The runs of some subspaces.
#[derive(Clone, Copy)]
pub(crate) struct Runs<'r> {
    /// Every block from the run of the first of them on.
    pub blocks: &'r [&'r [u8]],
    /// The subspace after the last of them.
    pub end: usize,
}

/// Most bytes that are gathered at a time: with 32 blocks of pages of 16 tokens, a cache line of each page.
const ROOM: usize = 8192;

/// Most blocks that are gathered.
const MOST: usize = 64;

/// Most small pages of a chunk: those of 32 blocks of pages of 16 tokens.
pub(crate) const SMALL_PAGES: usize = 128;

/// Memory in which runs are gathered. It begins as `None` and stays so where all blocks are whole.
pub(crate) type Room = Option<[u8; ROOM]>;

/// The list of the blocks that are gathered, which begins as `None` likewise.
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

    /// Whether nothing has to be gathered.
    #[inline(always)]
    pub const fn are_whole(&self) -> bool {
        self.of_block == 1
    }

    /// All runs of blocks that are whole.
    #[inline(always)]
    pub const fn whole(&self, m: usize) -> Runs<'b> {
        Runs { blocks: self.parts, end: m }
    }

    /// The runs from subspace `j` of `m` on: all that there are, or a multiple of `least` that there is room
    /// to gather.
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
            2 => for_nbits!(nbits, N => s.call(
                #[inline(always)]
                || self.gather::<N, 2>((j, m, least), room, list),
            )),
            _ => for_nbits!(nbits, N => s.call(
                #[inline(always)]
                || self.gather::<N, 4>((j, m, least), room, list),
            )),
        }
    }

    /// Gathers as many subspaces as there is room for: a page's cache lines are read once, since a line does
    /// not stay in L1 until the next subspace.
    #[inline(always)]
    fn gather<'r, const NBITS: u32, const PARTS: usize>(
        &self,
        (j, m, least): (usize, usize, usize),
        room: &'r mut Room,
        list: &'r mut List<'r>,
    ) -> Runs<'r> {
        let run_len = 8 * NBITS as usize;
        let (blocks, part_len) = (self.parts.as_chunks::<PARTS>().0, run_len / PARTS);
        let count = (ROOM / (blocks.len() * run_len) / least * least).min(m - j);
        let room = room.get_or_insert_with(|| [0; ROOM]);
        let list = &mut list.get_or_insert_with(|| [&[][..]; MOST])[..blocks.len()];
        for ((parts, runs), slot) in blocks.iter().zip(room.chunks_exact_mut(count * run_len)).zip(&mut *list)
        {
            let parts = parts.map(|part| &part[j * part_len..][..count * part_len]);
            match unit(NBITS, PARTS) {
                2 => interleave::<2, PARTS>(parts, runs),
                4 => interleave::<4, PARTS>(parts, runs),
                8 => interleave::<8, PARTS>(parts, runs),
                16 => interleave::<16, PARTS>(parts, runs),
                _ => interleave::<32, PARTS>(parts, runs),
            }
            *slot = runs;
        }
        Runs { blocks: list, end: j + count }
    }

    /// Puts values of the codes of blocks into the order of the tokens.
    #[inline(always)]
    pub fn order_as_tokens(&self, nbits: u32, values: &mut [f32]) {
        let (unit, steps) = (unit(nbits, self.of_block), steps(nbits));
        if !self.are_whole() && steps > 1 {
            values
                .as_chunks_mut()
                .0
                .iter_mut()
                .for_each(|block| transpose(block, steps, self.of_block, unit));
        }
    }

    /// Puts values of tokens into the order of the codes of blocks.
    #[inline(always)]
    pub fn order_as_codes(&self, nbits: u32, values: &mut [f32]) {
        let (unit, steps) = (unit(nbits, self.of_block), steps(nbits));
        if !self.are_whole() && steps > 1 {
            values
                .as_chunks_mut()
                .0
                .iter_mut()
                .for_each(|block| transpose(block, self.of_block, steps, unit));
        }
    }
}

/// From (`PARTS`, units) to (units, `PARTS`), where a unit has `UNIT` bytes.
#[inline(always)]
fn interleave<const UNIT: usize, const PARTS: usize>(parts: [&[u8]; PARTS], out: &mut [u8]) {
    let out = out.as_chunks_mut::<UNIT>().0.as_chunks_mut::<PARTS>().0;
    let parts = parts.map(|part| &part.as_chunks::<UNIT>().0[..out.len()]);
    for (i, out) in out.iter_mut().enumerate() {
        for (unit, part) in out.iter_mut().zip(&parts) {
            *unit = part[i];
        }
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

/// From (rows, columns, unit) to (columns, rows, unit).
#[inline(always)]
fn transpose(block: &mut [f32; BLOCK], rows: usize, columns: usize, unit: usize) {
    let old = *block;
    for (i, from) in old.chunks_exact(unit).enumerate() {
        let (row, column) = (i / columns, i % columns);
        block[(column * rows + row) * unit..][..unit].copy_from_slice(from);
    }
}
