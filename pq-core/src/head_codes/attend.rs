//! Attention to a head's codes, for one or several query tokens.

use core::ops::Range;

use kv_attend::owner::Queries;

use super::HeadCodes;
use crate::{
    BLOCK, Backend, CodedTokens, Error, HeadBooks, SoftmaxStats, attend_into_with, attend_scratch_len,
    lut_into_with,
};

/// Elements of the scratch of [`attend_into`].
pub(super) fn scratch_len(books: &HeadBooks, queries: usize) -> usize {
    queries
        .saturating_mul(books.keys().shape().lut_len() + BLOCK)
        .saturating_add(attend_scratch_len(books.values().shape(), queries))
}

/// See [`Store::attend_into`](kv_attend::owner::Store::attend_into).
pub(super) fn attend_into(
    codes: &HeadCodes,
    backend: Backend,
    queries: &Queries<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    let (tokens, group, len) = (queries.tokens(), queries.group(), codes.len());
    let (row, row_v) = (queries.scaled().len() / tokens, out.len() / tokens);
    let mut i = 0;
    while i < tokens {
        // Query tokens that see the same codes go together.
        let range = queries.visible(i, len);
        let end = i + (i..tokens).take_while(|&other| queries.visible(other, len) == range).count();
        if !range.is_empty() {
            let part = Part { codes, backend, softcap: queries.attention().softcap, range };
            let (out, stats) = (&mut out[i * row_v..end * row_v], &mut stats[i * group..end * group]);
            part.add(&queries.scaled()[i * row..end * row], scratch, out, stats)?;
        }
        i = end;
    }
    Ok(())
}

/// A range of the codes, not empty, seen by several query tokens.
pub(super) struct Part<'a> {
    pub codes: &'a HeadCodes,
    pub backend: Backend,
    pub softcap: Option<f32>,
    pub range: Range<usize>,
}

impl Part<'_> {
    /// Adds the range to `out` and `stats`.
    pub fn add(
        &self,
        scaled: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let Self { backend, ref range, .. } = *self;
        let books = self.codes.books();
        let (tables, scratch) = scratch.split_at_mut(stats.len() * books.keys().shape().lut_len());
        let luts = lut_into_with(backend, &books.keys(), scaled, tables)?;
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
            let tokens = self.tokens(first..whole)?.with_bias(&*mask);
            attend_into_with(backend, &luts, &tokens, scratch, out, stats)?;
        }
        if whole < range.end {
            attend_into_with(backend, &luts, &self.tokens(whole..range.end)?, scratch, out, stats)?;
        }
        Ok(())
    }

    fn tokens(&self, range: Range<usize>) -> Result<CodedTokens<'_>, Error> {
        let (keys, values) = (self.codes.keys().slice(range.clone())?, self.codes.values().slice(range)?);
        CodedTokens::new(keys, values, self.codes.books.values())?.with_softcap(self.softcap)
    }
}
