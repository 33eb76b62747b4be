//! The rows of a block of tokens, contiguous or strided, and the lines to prefetch while they are read.

use crate::Element;

/// The keys or values of a block of at most 64 tokens.
///
/// # Safety
/// [`row`](Self::row) gives `dim` readable elements for every index below `n`.
pub(super) unsafe trait BlockRows<E>: Copy {
    /// Whether each row lies in its own page and cache sets: few passes over the rows then matter more than
    /// register use.
    const APART: bool;
    fn n(self) -> usize;
    /// Components of a row.
    fn dim(self) -> usize;
    /// Row `t`, which must be below `n`.
    fn row(self, t: usize) -> *const E;
    /// Start of the prefetch that accompanies row `t` of a tile starting at row `first`. It advances column
    /// by column with the row if the rows are [`APART`](Self::APART), else register by register in tile
    /// order.
    fn ahead(self, first: usize, t: usize) -> *const E;
}

/// Contiguous rows.
///
/// N.B. The hardware prefetcher stops where the loop changes from keys to values. Each block therefore
/// prefetches the cache lines of the next block, one by one and in order. Without that, `f32` rows take 1.7
/// times as long. Slower alternatives: prefetching all lines at once, interleaving rows, prefetching into L1,
/// and tiles of four tokens by four queries.
#[derive(Clone, Copy)]
pub(super) struct Dense<'a, E> {
    pub rows: &'a [E], // (n, dim)
    pub dim: usize,
}

// SAFETY: `rows` holds n rows of `dim`.
unsafe impl<E: Element> BlockRows<E> for Dense<'_, E> {
    const APART: bool = false;
    #[inline(always)]
    fn n(self) -> usize {
        self.rows.len() / self.dim
    }
    #[inline(always)]
    fn dim(self) -> usize {
        self.dim
    }
    #[inline(always)]
    fn row(self, t: usize) -> *const E {
        self.rows.as_ptr().wrapping_add(t * self.dim)
    }
    #[inline(always)]
    fn ahead(self, first: usize, _: usize) -> *const E {
        self.row(first).wrapping_add(self.rows.len())
    }
}

/// A head's columns of strided or listed rows.
///
/// N.B. Copying into a contiguous buffer takes 1.2 to 1.7 times as long with AVX-512 as reading the rows in
/// place.
///
/// N.B. One of 8 heads of 128 components, 512 tokens, takes about twice as long as contiguous rows in `f32`,
/// 1.5 times in `f16` (Zen 3, AVX2, on a shared machine). At a stride of 4 KiB all `f32` rows of a head map
/// to an eighth of the sets of L1 and L2: with 9 heads they take 1.4 to 1.8 times as long, in `f16` 1.3 to
/// 1.4. Every row needs its own TLB entry: huge pages save a tenth of the time in `f32`. Loads alone, without
/// arithmetic, take 1.1 to 1.9 times as long, however far ahead they are prefetched (Zen 5). Therefore all
/// heads of a block of tokens are read before the next block, whose lines are prefetched in order: 1.0 to 1.4
/// times. No gain: prefetching rows into L1 some rows ahead, blocks of 4 tokens.
#[derive(Clone, Copy)]
pub(super) struct Listed<'a, E> {
    rows: &'a [usize],
    first: *const E, // of row 0
    stride: usize,
    dim: usize,
    ahead: &'a [usize], // what to prefetch with each row
    ahead_first: *const E,
    ahead_stride: usize,
}

/// The next block, to prefetch.
#[derive(Clone, Copy)]
pub(super) enum Next<'a> {
    /// The same number of rows.
    Rows(&'a [usize]),
    /// A head's share of rows that hold several heads, as pieces of `dim` elements numbered from the start of
    /// row 0. The pieces need not belong to that head, so that memory is read in order.
    Pieces(&'a [usize]),
}

impl<'a, E> Listed<'a, E> {
    /// A head's part of the given rows, all of which exist.
    #[inline(always)]
    pub fn new(
        of: crate::Rows<'a, E>,
        (heads, head): (usize, usize),
        rows: &'a [usize],
        next: Next<'a>,
    ) -> Self {
        assert!(head < heads && rows.iter().all(|&row| row < of.rows()));
        let (dim, stride) = (of.components() / heads, of.row_stride());
        let all = of.data().as_ptr();
        let first = all.wrapping_add(head * dim);
        let (ahead, ahead_first, ahead_stride) = match next {
            Next::Rows(next) => (next, first, stride),
            Next::Pieces(pieces) => (pieces, all, stride / heads),
        };
        assert!(rows.len() <= ahead.len());
        Self { rows, first, stride, dim, ahead, ahead_first, ahead_stride }
    }
}

// SAFETY: `new` has checked that the rows exist, and `Rows` that those end within its memory.
unsafe impl<E: Element> BlockRows<E> for Listed<'_, E> {
    const APART: bool = true;
    #[inline(always)]
    fn n(self) -> usize {
        self.rows.len()
    }
    #[inline(always)]
    fn dim(self) -> usize {
        self.dim
    }
    #[inline(always)]
    fn row(self, t: usize) -> *const E {
        self.first.wrapping_add(self.rows[t] * self.stride)
    }
    #[inline(always)]
    fn ahead(self, _: usize, t: usize) -> *const E {
        // Wrapping: the pointer may lie outside the rows, and a single row may have any stride.
        self.ahead_first.wrapping_add(self.ahead[t].wrapping_mul(self.ahead_stride))
    }
}
