//! Attention over all parts of a head's cache.

use core::ops::Range;

use kv_attend::owner::check_queries;

use super::HeadCache;
use crate::error::check_at_least;
use crate::{
    Attention, BLOCK, Backend, CodedTokens, Element, Error, Rows, SoftmaxStats, attend_exact_into_with,
    attend_exact_scratch_len, attend_into_with, attend_scratch_len, lut_into_with,
};

/// Floats per cache line: loads that straddle two lines cost up to a tenth of the time.
const ALIGNMENT: usize = 16;

/// Maximum queries processed together, so that the scratch does not grow with the number of query tokens.
const TOGETHER: usize = 16;

/// Query tokens that are processed together.
fn step(query_tokens: usize, group: usize) -> usize {
    (TOGETHER / group.max(1)).clamp(1, query_tokens.max(1))
}

impl<E: Element> HeadCache<E> {
    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        let queries = step(query_tokens, group).saturating_mul(group);
        let (keys, values) = (self.books.keys().shape(), self.books.values().shape());
        let exact = attend_exact_scratch_len(queries, keys.dim());
        let of_a_query = keys.dim() + keys.lut_len() + BLOCK;
        (queries.saturating_mul(of_a_query))
            .saturating_add(attend_scratch_len(values, queries).max(exact))
            .saturating_add(ALIGNMENT)
    }

    /// Attention of a group of query heads over all tokens, for one or several query tokens.
    ///
    /// Query token i of T is at the position of the cache's token `len - T + i`, since a step appends its
    /// tokens first. It sees the tokens up to its own position, at most the last [`Attention::window`] of
    /// them, be they sinks, codes or recent rows.
    ///
    /// Adds the tokens to `out` and `stats`, as [`attend_into`](crate::attend_into) does: start from zeros
    /// and [`SoftmaxStats::EMPTY`], and finish with [`normalize_all`](crate::normalize_all).
    ///
    /// # Shapes
    /// `queries` (T, group * dim): a decode step passes `Rows::from(slice)`; `scratch` at least
    /// [`scratch_len`](Self::scratch_len); `out` (T, group, dim of the values); `stats` (T, group).
    /// # Errors
    /// [`Error::PartialRow`], [`Error::Length`], [`Error::TooShort`]; [`Error::Attend`] for more query tokens
    /// than there are tokens, and the error of [`Attention::check`]. `out` and `stats` are then untouched.
    /// # Cost
    /// One [`attend_into`](crate::attend_into) per 16 queries and per change of the visible coded tokens
    /// between query tokens, and exact attention on sinks and recent rows; no allocation.
    pub fn attend_into<Q: Element>(
        &self,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        self.attend_into_with(Backend::detect(), attention, queries, scratch, out, stats)
    }

    /// [`attend_into`](Self::attend_into) on a given backend.
    ///
    /// # Errors
    /// As [`attend_into`](Self::attend_into), and [`Error::BackendUnavailable`].
    pub fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        backend.check()?;
        let ([dim, dim_v], query_tokens) = (self.exact.dims(), queries.rows());
        let group = check_queries(attention, queries, self.len(), [dim, dim_v], out, stats)?;
        if stats.is_empty() {
            return Ok(());
        }
        check_at_least("scratch", scratch.len(), self.scratch_len(query_tokens, group))?;
        if self.is_empty() {
            return Ok(());
        }
        let unaligned = scratch.as_ptr().align_offset(ALIGNMENT * size_of::<f32>());
        let scratch = &mut scratch[unaligned.min(ALIGNMENT)..];
        let step = step(query_tokens, group);
        let outs = out.chunks_mut(step * group * dim_v).zip(stats.chunks_mut(step * group));
        for (first, (out, stats)) in (0..query_tokens).step_by(step).zip(outs) {
            let queries = queries.slice(first..query_tokens.min(first + step))?;
            let at = self.len() - query_tokens + first;
            Part { cache: self, backend, attention, at, group }.add(queries, scratch, out, stats)?;
        }
        Ok(())
    }
}

/// Query tokens that are processed together.
struct Part<'a, E> {
    cache: &'a HeadCache<E>,
    backend: Backend,
    attention: &'a Attention,
    at: usize, // position of the first one
    group: usize,
}

impl<E: Element> Part<'_, E> {
    fn add<Q: Element>(
        &self,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let Self { cache, backend, attention, at, group } = *self;
        let (n, row, row_v) = (queries.rows(), group * cache.exact.dims()[0], group * cache.exact.dims()[1]);
        let (tables, scratch) = scratch.split_at_mut(n * group * cache.books.keys().shape().lut_len());
        let (scratch, scaled) = scratch.split_at_mut(scratch.len() - n * row);
        for (scaled, query) in scaled.chunks_exact_mut(row).zip(queries.iter()) {
            scaled.iter_mut().zip(query).for_each(|(scaled, q)| *scaled = attention.scale * q.to_f32());
        }
        let mut i = 0;
        while i < n {
            let range = self.coded(i);
            let end = i + (i..n).take_while(|&other| self.coded(other) == range).count();
            if !range.is_empty() {
                let (scaled, tables) = (&scaled[i * row..end * row], &mut *tables);
                let (out, stats) = (&mut out[i * row_v..end * row_v], &mut stats[i * group..end * group]);
                self.add_codes(range, scaled, tables, scratch, out, stats)?;
            }
            i = end;
        }
        let exact = Attention { scale: 1.0, ..*attention };
        let queries = Rows::contiguous(scaled, row)?;
        for tokens in cache.exact.tokens(cache.coded(), at)? {
            attend_exact_into_with(backend, &exact, queries, &tokens, scratch, out, stats)?;
        }
        Ok(())
    }

    /// The coded tokens that query token `i` sees.
    fn coded(&self, i: usize) -> Range<usize> {
        let end = self.at + i + 1;
        let start = self.attention.window.map_or(0, |window| end.saturating_sub(window));
        let (sinks, coded) = (self.cache.sinks(), self.cache.coded());
        start.saturating_sub(sinks).min(coded)..end.saturating_sub(sinks).min(coded)
    }

    /// Adds a range of the coded tokens.
    fn add_codes(
        &self,
        range: Range<usize>,
        scaled: &[f32],
        tables: &mut [f32],
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let (books, (keys, values)) = (self.cache.books(), self.cache.codes());
        let tables = &mut tables[..stats.len() * keys.shape().lut_len()];
        let luts = lut_into_with(self.backend, &books.keys(), scaled, tables)?;
        let tokens = |range: Range<usize>| {
            let (keys, values) = (keys.slice(range.clone())?, values.slice(range)?);
            CodedTokens::new(keys, values, books.values())?.with_softcap(self.attention.softcap)
        };
        // Codes start at a block boundary: tokens of the first block that precede the range are masked.
        let whole = range.start.next_multiple_of(BLOCK).min(range.end);
        if range.start < whole {
            let first = range.start / BLOCK * BLOCK;
            let (scratch, mask) = scratch.split_at_mut(scratch.len() - stats.len() * (whole - first));
            for mask in mask.chunks_exact_mut(whole - first) {
                let (before, seen) = mask.split_at_mut(range.start - first);
                before.fill(f32::NEG_INFINITY);
                seen.fill(0.0);
            }
            let tokens = tokens(first..whole)?.with_bias(&*mask);
            attend_into_with(self.backend, &luts, &tokens, scratch, out, stats)?;
        }
        if whole < range.end {
            attend_into_with(self.backend, &luts, &tokens(whole..range.end)?, scratch, out, stats)?;
        }
        Ok(())
    }
}
