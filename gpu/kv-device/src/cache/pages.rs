//! Paged memory of a batch: its sequences take pages as they grow.

use std::ops::Range;

use kv_gpu::pq::Pages as PageTable;

use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::plan::PagedMemory;
use crate::rows::Sequences;
use crate::{Error, Result};

/// Tokens per tile of attention: a tile lies in one page.
const STEP: usize = 16;

/// The pages of a batch and its page table on the device.
///
/// The host grants pages ahead of the steps that need them, since it knows that a step adds one token to a
/// sequence. A grant copies the new table entries in stream order: nothing waits, and a step's graph reads
/// the table at a fixed address. Sequences without tokens have a spare page, to which the steps of the others
/// may write for them.
pub(super) struct Pages {
    grants: Grants,
    table: Buffer<u32>, // (batch, max_pages)
    max_pages: usize,
    outside: usize, // first tokens of a sequence, which are not in pages
    /// Length of each sequence as known to the host, although it may have ended earlier; none if it is idle.
    lengths: Vec<Option<usize>>,
}

impl Pages {
    /// No pages granted; the first `outside` tokens of a sequence need none.
    ///
    /// # Errors
    /// [`Error::Argument`] for pages of no tokens, or too many; [`Error::Gpu`].
    pub fn new(
        gpu: &Gpu,
        memory: PagedMemory,
        (batch, capacity): (usize, usize),
        outside: usize,
    ) -> Result<Self> {
        let PagedMemory { page, pool } = memory;
        if page == 0 || !page.is_multiple_of(STEP) {
            return Err(Error::Argument(format!("pages of {page} tokens: a multiple of {STEP}")));
        }
        let max_pages = capacity.div_ceil(page);
        let count = pool.map_or(batch * max_pages, |tokens| tokens.div_ceil(page));
        if u32::try_from(count).is_err() {
            return Err(Error::Argument(format!("{count} pages: 32 bits count them")));
        }
        let grants = Grants::new(page, count, batch);
        let table = Buffer::of(gpu, &vec![grants.spare(); batch * max_pages])?;
        Ok(Self { grants, table, max_pages, outside, lengths: vec![Some(0); batch] })
    }

    /// Number of pages, the spare one included.
    pub const fn count(&self) -> usize {
        self.grants.pages + 1
    }

    /// Tokens per page.
    pub const fn page(&self) -> usize {
        self.grants.page
    }

    /// The page table from a sequence on.
    pub fn table(&self, sequence: usize) -> PageTable {
        let table = self.table.pointer().offset(sequence * self.max_pages);
        PageTable { table, max_pages: self.max_pages }
    }

    /// Takes pages for sequences that have these lengths after the next prompts.
    ///
    /// # Errors
    /// [`Error::Pages`] if there are not enough; no sequence has got any then. [`Error::Gpu`].
    pub fn reserve(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.resize(gpu, lengths)
    }

    /// Restarts with sequences of these lengths.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.resize(gpu, lengths)?;
        self.lengths = lengths.iter().map(|&length| Some(length)).collect();
        Ok(())
    }

    /// Rejects a sequence that is to have more tokens than [`Self::reserve`] has taken pages for.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_reserved(&self, sequence: usize, tokens: usize) -> Result<()> {
        let reserved = self.outside + self.grants.held[sequence].len() * self.grants.page;
        match tokens <= reserved {
            true => Ok(()),
            false => Err(Error::Argument(format!("{tokens} tokens in pages reserved for {reserved}"))),
        }
    }

    /// Sets one sequence to this length, for which [`Self::reserve`] has taken pages.
    pub fn set_length(&mut self, sequence: usize, length: usize) {
        self.lengths[sequence] = Some(length);
    }

    /// As [`Self::set_lengths`] with `tokens` in every sequence, in pages of a hashed order, as if many
    /// sequences had come and gone.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn set_lengths_anywhere(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.grants.shuffle();
        self.set_lengths(gpu, &vec![tokens; self.lengths.len()])
    }

    /// Frees the pages of one sequence, which is idle from now on.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn end(&mut self, gpu: &Gpu, sequence: usize) -> Result<()> {
        self.lengths[sequence] = None;
        let lengths: Vec<usize> = self.lengths.iter().map(|length| length.unwrap_or(0)).collect();
        self.resize(gpu, &lengths)
    }

    /// Takes pages for the next token of every sequence. If there are not enough, it waits for the device to
    /// report which sequences have ended.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    /// # Safety
    /// There are positions of the batch.
    pub unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        if let Err(Error::Pages { .. }) = self.resize(gpu, &self.next_lengths()) {
            // SAFETY: the caller's contract.
            let positions = unsafe { sequences.read_positions(gpu, self.lengths.len()) }?;
            for (length, position) in self.lengths.iter_mut().zip(positions) {
                *length = length.map(|_| position);
            }
            self.resize(gpu, &self.next_lengths())?;
        }
        self.lengths.iter_mut().flatten().for_each(|length| *length += 1);
        Ok(())
    }

    /// Lengths that the next step needs pages for.
    fn next_lengths(&self) -> Vec<usize> {
        self.lengths.iter().map(|length| length.map_or(0, |tokens| tokens + 1)).collect()
    }

    /// Gives every sequence the pages for its length, and takes back those that it no longer needs.
    fn resize(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        let tokens: Vec<usize> = lengths.iter().map(|length| length.saturating_sub(self.outside)).collect();
        let had: Vec<bool> = self.grants.held.iter().map(|held| !held.is_empty()).collect();
        let granted = self.grants.resize(&tokens)?;
        for (sequence, (range, had)) in granted.into_iter().zip(had).enumerate() {
            let (first, held) = (sequence * self.max_pages, &self.grants.held[sequence]);
            if held.is_empty() && had {
                self.table.write_at(gpu, first, &[self.grants.spare()])?;
            } else if !range.is_empty() {
                self.table.write_at(gpu, first + range.start, &held[range])?;
            }
        }
        Ok(())
    }

    /// Bytes of the table.
    pub const fn bytes(&self) -> usize {
        self.table.bytes()
    }
}

/// The pages of each sequence of a batch.
struct Grants {
    page: usize, // tokens
    pages: usize,
    free: Vec<u32>,
    held: Vec<Vec<u32>>, // of each sequence, in the order of its tokens
}

impl Grants {
    fn new(page: usize, pages: usize, batch: usize) -> Self {
        Self { page, pages, free: (0..pages as u32).rev().collect(), held: vec![vec![]; batch] }
    }

    /// The spare page, after all others.
    const fn spare(&self) -> u32 {
        self.pages as u32
    }

    /// Returns the range of new pages in every sequence's list.
    fn resize(&mut self, tokens: &[usize]) -> Result<Vec<Range<usize>>> {
        let wanted = || tokens.iter().map(|tokens| tokens.div_ceil(self.page));
        let kept = |(held, wanted): (&Vec<u32>, usize)| held.len().min(wanted);
        let all_kept: usize = self.held.iter().zip(wanted()).map(kept).sum();
        let (needed, free) = (wanted().sum::<usize>() - all_kept, self.pages - all_kept);
        if needed > free {
            return Err(Error::Pages { needed, free, pages: self.pages, page: self.page });
        }
        let wanted: Vec<usize> = wanted().collect();
        for (held, &wanted) in self.held.iter_mut().zip(&wanted) {
            self.free.extend(held.drain(wanted.min(held.len())..).rev());
        }
        let grant = |(held, &wanted): (&mut Vec<u32>, &usize)| {
            let first = held.len();
            held.extend(self.free.drain(self.free.len() - (wanted - first)..).rev());
            first..wanted
        };
        Ok(self.held.iter_mut().zip(&wanted).map(grant).collect())
    }

    /// Takes all pages back, to be granted in hashed order.
    fn shuffle(&mut self) {
        self.held.iter_mut().for_each(Vec::clear);
        self.free = (0..self.pages as u32).collect();
        self.free.sort_by_key(|page| page.wrapping_mul(0x9E37_79B1).rotate_left(7));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    struct Rng(u64);

    impl Rng {
        /// Uniform in `0..n`.
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
        }
    }

    /// No page is held twice, and none is lost.
    fn check(grants: &Grants) {
        let mut all: Vec<u32> = grants.held.iter().flatten().chain(&grants.free).copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..grants.pages as u32).collect::<Vec<_>>());
    }

    #[test]
    fn sequences_grow_and_end_without_losing_pages() {
        for seed in 0..50 {
            let mut random = Rng(seed);
            let mut below = |n: usize| random.below(n);
            let (page, pages, batch) = (1 + below(40), 1 + below(60), 1 + below(6));
            let mut grants = Grants::new(page, pages, batch);
            let mut tokens: Vec<usize> = vec![0; batch];
            for _ in 0..300 {
                let mut wanted = tokens.clone();
                match below(8) {
                    0 => wanted[below(batch)] = 0,
                    1 => wanted[below(batch)] += below(10 * page),
                    _ => wanted.iter_mut().for_each(|tokens| *tokens += 1),
                }
                let (before, free) = (grants.held.clone(), grants.free.clone());
                let total: usize = wanted.iter().map(|tokens| tokens.div_ceil(page)).sum();
                match grants.resize(&wanted) {
                    Ok(granted) => {
                        assert!(total <= pages);
                        for (sequence, range) in granted.into_iter().enumerate() {
                            let (held, before) = (&grants.held[sequence], &before[sequence]);
                            assert_eq!(held.len(), wanted[sequence].div_ceil(page));
                            // Tokens do not move.
                            assert_eq!(held[..range.start], before[..range.start]);
                            assert_eq!((range.start, range.end), (held.len().min(before.len()), held.len()));
                        }
                        tokens = wanted;
                    }
                    Err(Error::Pages { needed, free: named, .. }) => {
                        assert!(total > pages && needed > named);
                        assert_eq!((&grants.held, &grants.free), (&before, &free), "nothing has changed");
                        tokens[below(batch)] = 0;
                        grants.resize(&tokens).unwrap();
                    }
                    Err(other) => panic!("{other}"),
                }
                check(&grants);
            }
            grants.shuffle();
            check(&grants);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers() {
        let mut grants = Grants::new(16, 8, 2);
        grants.resize(&[64, 40]).unwrap(); // four pages and three
        let error = grants.resize(&[64, 65]).unwrap_err().to_string();
        assert!(error.starts_with("2 more pages of 16 tokens are needed, and 1 of 8 are free"), "{error}");
        grants.resize(&[0, 65]).unwrap();
        assert_eq!((grants.held[0].len(), grants.held[1].len()), (0, 5));
    }
}
