//! Addresses of the blocks of a sequence's codes: contiguous, or in the pages of a pool.

use crate::error::check_at_least;
use crate::simd::BLOCK;
use crate::{Error, PqShape};

/// Maps the blocks of a sequence to byte offsets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'a> {
    vectors: usize,    // per block: 64, or fewer on smaller pages
    block_size: usize, // bytes
    pages: Option<Pages<'a>>,
}

#[derive(Clone, Copy, Debug)]
struct Pages<'a> {
    table: &'a [u32], // page numbers, each below the number of pages in the pool
    blocks: usize,    // of a page
    first: usize,     // first block of the sequence within the first page
}

impl<'a> Layout<'a> {
    /// Blocks of 64 vectors that follow one another.
    pub const fn whole(shape: PqShape) -> Self {
        Self { vectors: BLOCK, block_size: shape.block_size(), pages: None }
    }

    /// The blocks of `n` vectors in pages of a pool of `pool_len` bytes.
    pub fn paged(
        shape: PqShape,
        n: usize,
        pool_len: usize,
        table: &'a [u32],
        page_tokens: usize,
    ) -> Result<Self, Error> {
        if page_tokens == 0 {
            return Err(Error::Zero { what: "page_tokens" });
        }
        let vectors = page_tokens.min(BLOCK);
        if !page_tokens.is_multiple_of(BLOCK) && !matches!(page_tokens, 16 | 32) {
            return Err(Error::PageTokens { page_tokens });
        }
        let used = n.div_ceil(page_tokens);
        check_at_least("page table", table.len(), used)?;
        let pages = pool_len / shape.page_len(page_tokens);
        let missing = |&page: &u32| usize::try_from(page).map_or(true, |page| page >= pages);
        if let Some(index) = table[..used].iter().position(missing) {
            return Err(Error::Page { index, page: table[index], pages });
        }
        let pages = Pages { table: &table[..used], blocks: page_tokens / vectors, first: 0 };
        Ok(Self { vectors, block_size: shape.block_size() / (BLOCK / vectors), pages: Some(pages) })
    }

    /// Vectors of a block: 64, 32 or 16.
    #[inline(always)]
    pub const fn vectors(&self) -> usize {
        self.vectors
    }

    /// Bytes of a block.
    #[inline(always)]
    pub const fn block_size(&self) -> usize {
        self.block_size
    }

    /// The first byte of block `b`.
    #[inline(always)]
    pub fn at(&self, b: usize) -> usize {
        let b = match self.pages {
            None => b,
            Some(Pages { table, blocks, first }) => {
                let b = first + b;
                // Small pages have one block and are many, so they skip the division.
                let (page, b) = if blocks == 1 { (b, 0) } else { (b / blocks, b % blocks) };
                table[page] as usize * blocks + b
            }
        };
        b * self.block_size
    }

    /// The paged layout from block `b` on; `None` if contiguous, where the slice of bytes starts later
    /// instead.
    pub fn skip(self, b: usize) -> Option<Self> {
        let pages = self.pages?;
        Some(Self { pages: Some(Pages { first: pages.first + b, ..pages }), ..self })
    }
}
