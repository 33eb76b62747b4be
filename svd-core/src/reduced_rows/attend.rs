//! Attention to a head's tokens at lower rank, for one or several query tokens.

use kv_attend::owner::{Queries, Store};

use super::ReducedRows;
use crate::{Backend, Element, Error, ExactTokens, HeadMaps, Rows, SoftmaxStats, attend_exact_into_with};

/// Maximum queries per pass over the rows, of one query token or several.
pub(super) const QUERIES: usize = 64;

/// Elements of the scratch of [`attend_into`].
pub(super) fn scratch_len(maps: &HeadMaps, queries: usize) -> usize {
    let row = 2 * maps.keys().rank() + maps.values().rank() + maps.dims()[1];
    queries.min(QUERIES).saturating_mul(row)
}

/// See [`Store::attend_into`].
///
/// # Cost
/// T * group * (rank of the keys + rank of the values) multiply-adds per token; for the queries, T * group *
/// dim
/// * rank for each side that is not folded. Rows are read from memory once per 64 queries.
pub(super) fn attend_into<E: Element>(
    store: &ReducedRows<E>,
    backend: Backend,
    queries: &Queries<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    if store.is_empty() {
        return Ok(());
    }
    // A group of more than `QUERIES` heads, which has one query token, is split.
    let [dim, dim_v] = store.maps.dims();
    let scaled = queries.scaled().chunks(QUERIES * dim);
    let outs = out.chunks_mut(QUERIES * dim_v).zip(stats.chunks_mut(QUERIES));
    scaled.zip(outs).try_for_each(|(scaled, (out, stats))| {
        Part { store, backend, queries, scaled }.add(scratch, out, stats)
    })
}

/// At most `QUERIES` queries, of heads of one token or of whole tokens.
struct Part<'a, E> {
    store: &'a ReducedRows<E>,
    backend: Backend,
    queries: &'a Queries<'a>,
    scaled: &'a [f32],
}

impl<E: Element> Part<'_, E> {
    fn add(&self, scratch: &mut [f32], out: &mut [f32], stats: &mut [SoftmaxStats]) -> Result<(), Error> {
        let Self { store, backend, queries, scaled } = *self;
        let ([dim, dim_v], [keys, values]) = (store.maps.dims(), store.rows());
        let [key_rank, value_rank] = store.maps.sides().map(|map| map.rank());
        let (projected, scratch) = scratch.split_at_mut(stats.len() * key_rank);
        let (sums, scratch) = scratch.split_at_mut(stats.len() * value_rank);
        let (full, scratch) = scratch.split_at_mut(stats.len() * dim_v);
        store.maps.keys().project_queries(backend, Rows::contiguous(scaled, dim)?, projected)?;
        sums.fill(0.0);
        let mut sums_stats = [SoftmaxStats::EMPTY; QUERIES];
        let sums_stats = &mut sums_stats[..stats.len()];
        let tokens = ExactTokens::contiguous(keys, key_rank, values, value_rank)?;
        let tokens = tokens.starting_at(queries.start()).first_query(queries.first());
        let projected = Rows::contiguous(projected, projected.len() / queries.tokens())?;
        let attention = queries.attention();
        attend_exact_into_with(backend, attention, projected, &tokens, scratch, sums, sums_stats)?;
        let parts = store.maps.values().reconstruct(backend, sums, full)?;
        let rows = out.chunks_exact_mut(dim_v).zip(stats).zip(parts.iter().zip(sums_stats));
        for ((out, stats), (part, part_stats)) in rows {
            let scale = stats.absorb(*part_stats, out);
            out.iter_mut().zip(part).for_each(|(out, x)| *out += scale * x);
        }
        Ok(())
    }
}
