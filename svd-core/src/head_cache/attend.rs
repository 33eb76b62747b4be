//! Attention over all parts of a head's cache.

use kv_attend::owner::check_queries;

use super::LowRankHeadCache;
use crate::error::check_at_least;
use crate::{Attention, Backend, Element, Error, ExactTokens, Rows, SoftmaxStats, attend_exact_into_with};

/// Maximum queries per pass over the rows, of one query token or several.
const QUERIES: usize = 64;

/// Query tokens processed together.
fn step(query_tokens: usize, group: usize) -> usize {
    (QUERIES / group.max(1)).clamp(1, query_tokens.max(1))
}

impl<E: Element> LowRankHeadCache<E> {
    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        let [dim, dim_v] = self.maps.dims();
        let queries = step(query_tokens, group).saturating_mul(group).min(QUERIES);
        queries * (dim + self.maps.keys().rank() + self.maps.values().rank() + dim_v)
    }

    /// Attention of a group of query heads over all tokens, for one or several query tokens.
    ///
    /// Query token i of T is at the position of the cache's token `len - T + i`, since a step appends its
    /// tokens first. It sees the tokens up to its own position, at most the last [`Attention::window`] of
    /// them, be they sinks, rows of lower rank or recent rows.
    ///
    /// Adds the tokens to `out` and `stats`, as [`attend_exact_into`](crate::attend_exact_into) does: start
    /// from zeros and [`SoftmaxStats::EMPTY`], and finish with [`normalize_all`](crate::normalize_all).
    ///
    /// # Shapes
    /// `queries` (T, group * dim): a decode step passes `Rows::from(slice)`; `scratch` at least
    /// [`scratch_len`](Self::scratch_len); `out` (T, group, dim of the values), rotated if the values'
    /// rotation is folded; `stats` (T, group).
    /// # Errors
    /// [`Error::PartialRow`], [`Error::Length`], [`Error::TooShort`]; [`Error::Attend`] for more query tokens
    /// than there are tokens, and the error of [`Attention::check`]. `out` and `stats` are then untouched.
    /// # Cost
    /// T * group * (rank of the keys + rank of the values) multiply-adds per token at lower rank; for the
    /// queries, T * group * dim * rank for each side that is not folded. Rows are read from memory once per
    /// 64 queries. No allocation.
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
        let ([dim, dim_v], query_tokens) = (self.maps.dims(), queries.rows());
        let group = check_queries(attention, queries, self.len(), [dim, dim_v], out, stats)?;
        if stats.is_empty() {
            return Ok(());
        }
        check_at_least("scratch", scratch.len(), self.scratch_len(query_tokens, group))?;
        if self.is_empty() {
            return Ok(());
        }
        let step = step(query_tokens, group);
        let outs = out.chunks_mut(step * group * dim_v).zip(stats.chunks_mut(step * group));
        for (first, (out, stats)) in (0..query_tokens).step_by(step).zip(outs) {
            let queries = queries.slice(first..query_tokens.min(first + step))?;
            let part = Part { cache: self, backend, attention, at: self.len() - query_tokens + first };
            // A group of more than `QUERIES` is split; it then has one query token per step.
            let outs = out.chunks_mut(QUERIES * dim_v).zip(stats.chunks_mut(QUERIES));
            for (first, (out, stats)) in (0..group).step_by(QUERIES).zip(outs) {
                let queries = queries.columns(first * dim, QUERIES.min(group - first) * dim)?;
                part.add(queries, scratch, out, stats)?;
            }
        }
        Ok(())
    }
}

/// Query tokens processed together.
struct Part<'a, E> {
    cache: &'a LowRankHeadCache<E>,
    backend: Backend,
    attention: &'a Attention,
    at: usize, // position of the first one
}

impl<E: Element> Part<'_, E> {
    /// Adds all tokens to at most `QUERIES` queries.
    fn add<Q: Element>(
        &self,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let Self { cache, backend, attention, at } = *self;
        for tokens in cache.exact.tokens(cache.reduced(), at)? {
            attend_exact_into_with(backend, attention, queries, &tokens, scratch, out, stats)?;
        }
        self.add_reduced(queries, scratch, out, stats)
    }

    /// Adds the tokens at lower rank.
    fn add_reduced<Q: Element>(
        &self,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let Self { cache, backend, attention, at } = *self;
        if cache.reduced() == 0 {
            return Ok(());
        }
        let [dim, dim_v] = cache.maps.dims();
        let [key_rank, value_rank] = cache.maps.sides().map(|map| map.rank());
        let row = queries.components() / dim * key_rank; // of a projected query token
        let (projected, scratch) = scratch.split_at_mut(queries.rows() * row);
        let (sums, scratch) = scratch.split_at_mut(stats.len() * value_rank);
        let (full, scratch) = scratch.split_at_mut(stats.len() * dim_v);
        for (query, projected) in queries.iter().zip(projected.chunks_exact_mut(row)) {
            let heads = Rows::contiguous(query, dim)?;
            cache.maps.keys().project_queries(backend, heads, projected)?;
        }
        sums.fill(0.0);
        let mut sums_stats = [SoftmaxStats::EMPTY; QUERIES];
        let sums_stats = &mut sums_stats[..stats.len()];
        let [keys, values] = cache.reduced_rows();
        let tokens = ExactTokens::contiguous(keys, key_rank, values, value_rank)?;
        let tokens = tokens.starting_at(cache.sinks()).first_query(at);
        let projected = Rows::contiguous(projected, row)?;
        attend_exact_into_with(backend, attention, projected, &tokens, scratch, sums, sums_stats)?;
        let parts = cache.maps.values().reconstruct(backend, sums, full)?;
        let rows = out.chunks_exact_mut(dim_v).zip(stats).zip(parts.iter().zip(sums_stats));
        for ((out, stats), (part, part_stats)) in rows {
            let scale = stats.absorb(*part_stats, out);
            out.iter_mut().zip(part).for_each(|(out, x)| *out += scale * x);
        }
        Ok(())
    }
}
