//! Layouts of rows in memory: strides and pages.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;
use core::ops::Range;

use crate::simd::Kernel;
use crate::{Error, FrameInfo};

/// The layout of a plane's rows in memory: elements (tokens, heads, head_dim) with strides, so that tokens or
/// heads may come first, with or without pages. `kv-gpu` has the same type for device memory.
///
/// Lengths are checked when rows are read or written. Overlaps are not: if tokens overlap, or a page occurs
/// twice in the table, the last write wins.
///
/// # Examples
/// Pages of 16 tokens, (page, token, head, component), as in vLLM:
///
/// ```
/// use codec_core::{Place, TokenPages};
/// let (heads, head_dim, page_tokens) = (8, 128, 16);
/// let table = [7, 3, 12]; // pages of the sequence, in the order of its tokens
/// let pages = TokenPages { table: &table, page_tokens, stride: page_tokens * heads * head_dim };
/// let place = Place { first_token: 20, pages: Some(pages), ..Place::nhd(heads, head_dim) };
/// # let _ = place;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// Stride of tokens in elements, within a page if there are pages.
    pub token_stride: usize,
    /// Stride of heads in elements.
    pub head_stride: usize,
    /// The position of the frame's first token in these rows.
    pub first_token: usize,
    /// The page table, if rows are paged.
    pub pages: Option<TokenPages<'a>>,
}

/// The page table of a sequence of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPages<'a> {
    /// (pages,): page numbers in the order of the tokens.
    pub table: &'a [u32],
    /// Capacity of a page in tokens.
    pub page_tokens: usize,
    /// Stride of pages in elements.
    pub stride: usize,
}

impl<'a> Place<'a> {
    /// Contiguous (tokens, heads, head_dim), from token 0.
    #[must_use]
    pub const fn nhd(heads: usize, head_dim: usize) -> Self {
        let token_stride = heads.saturating_mul(head_dim);
        Self { token_stride, head_stride: head_dim, first_token: 0, pages: None }
    }

    /// (heads, tokens, head_dim) with room for `capacity` tokens per head (and page), from token 0.
    #[must_use]
    pub const fn hnd(capacity: usize, head_dim: usize) -> Self {
        let head_stride = capacity.saturating_mul(head_dim);
        Self { token_stride: head_dim, head_stride, first_token: 0, pages: None }
    }

    /// Checks that rows of `len` elements hold all tokens.
    pub(crate) fn check(
        &self,
        what: &'static str,
        len: usize,
        info: &FrameInfo,
        tokens: Range<usize>,
    ) -> Result<(), Error> {
        if tokens.is_empty() {
            return Ok(());
        }
        let end = self.first_token.checked_add(tokens.end).ok_or(Error::TooLarge)?;
        if let Some(pages) = self.pages {
            if pages.page_tokens == 0 {
                return Err(Error::Zero { what: "page_tokens" });
            }
            let needed = end.div_ceil(pages.page_tokens);
            if pages.table.len() < needed {
                return Err(Error::TooShort { what: "page table", needed, actual: pages.table.len() });
            }
        }
        let row = (info.heads - 1).saturating_mul(self.head_stride).saturating_add(info.head_dim);
        let segments = self.segments(tokens);
        let ends = segments.map(|(at, n)| at.saturating_add((n - 1).saturating_mul(self.token_stride)));
        let needed = ends.max().unwrap_or(0).saturating_add(row);
        if needed <= len { Ok(()) } else { Err(Error::TooShort { what, needed, actual: len }) }
    }

    /// Runs of tokens at `token_stride`: the offset of the first one, and the number of tokens.
    fn segments(&self, tokens: Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<'a> {
        let Self { token_stride, first_token, pages, .. } = *self;
        let (mut position, end) = (first_token + tokens.start, first_token + tokens.end);
        core::iter::from_fn(move || {
            let left = end - position;
            if left == 0 {
                return None;
            }
            let (page, slot, n) = match pages {
                None => (0, position, left),
                Some(TokenPages { table, page_tokens, stride }) => {
                    let slot = position % page_tokens;
                    let page = (table[position / page_tokens] as usize).saturating_mul(stride);
                    (page, slot, left.min(page_tokens - slot))
                }
            };
            position += n;
            Some((page.saturating_add(slot.saturating_mul(token_stride)), n))
        })
    }

    /// The elements of the tokens in order of token, head and component, as contiguous runs: the offset and
    /// length of each. [`Self::check`] has passed.
    fn runs(&self, info: &FrameInfo, tokens: Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<'a> {
        let Self { token_stride, head_stride, .. } = *self;
        // Adjacent heads, and then adjacent tokens, form one run.
        let joined = info.heads == 1 || head_stride == info.head_dim;
        let (heads, len) = if joined { (1, info.channels()) } else { (info.heads, info.head_dim) };
        self.segments(tokens).flat_map(move |(at, n)| {
            let (n, len) = if joined && token_stride == len { (1, n * len) } else { (n, len) };
            (0..n).flat_map(move |t| (0..heads).map(move |h| (at + t * token_stride + h * head_stride, len)))
        })
    }
}

impl Place<'_> {
    /// The elements of the tokens, if they are contiguous in order of token, head and component.
    /// [`Self::check`] has passed.
    #[cfg(feature = "alloc")]
    pub(crate) fn contiguous(&self, info: &FrameInfo, tokens: Range<usize>) -> Option<Range<usize>> {
        let mut runs = self.runs(info, tokens);
        let (at, len) = runs.next()?;
        runs.next().is_none().then(|| at..at + len)
    }
}

/// Appends the tokens' elements to `out` as (tokens, heads, head_dim), converted by `convert`.
#[cfg(feature = "alloc")]
pub(crate) struct Gather<'a, T, U, F> {
    pub place: &'a Place<'a>,
    pub info: &'a FrameInfo,
    pub tokens: Range<usize>,
    pub rows: &'a [T],
    pub convert: F,
    pub out: &'a mut Vec<U>,
}

#[cfg(feature = "alloc")]
impl<T: Copy, U, F: Fn(T) -> U> Kernel for Gather<'_, T, U, F> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { place, info, tokens, rows, convert, out } = self;
        out.reserve(tokens.len() * info.channels());
        for (at, len) in place.runs(info, tokens) {
            out.extend(rows[at..][..len].iter().map(|&x| convert(x)));
        }
    }
}

/// Copies (tokens, heads, head_dim) to the tokens' place, converted by `convert`.
pub(crate) struct Scatter<'a, T, U, F> {
    pub place: &'a Place<'a>,
    pub info: &'a FrameInfo,
    pub tokens: Range<usize>,
    pub rows: &'a [T],
    pub convert: F,
    pub out: &'a mut [U],
}

impl<T: Copy, U, F: Fn(T) -> U> Kernel for Scatter<'_, T, U, F> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { place, info, tokens, mut rows, convert, out } = self;
        for (at, len) in place.runs(info, tokens) {
            let (from, rest) = rows.split_at(len);
            out[at..][..len].iter_mut().zip(from).for_each(|(to, &x)| *to = convert(x));
            rows = rest;
        }
    }
}
