//! Attention to a head's tokens at lower rank, for one or several query tokens.

use crate::{
    Attention, Backend, Element, Error, ExactTokens, HeadMaps, Rows, SoftmaxStats, attend_exact_into_with,
};

/// Maximum queries per pass over the rows, of one query token or several.
pub(super) const QUERIES: usize = 64;

/// Elements of the scratch of [`Step::add`].
pub(super) fn scratch_len(maps: &HeadMaps, queries: usize) -> usize {
    let row = 2 * maps.keys().rank() + maps.values().rank() + maps.dims()[1];
    queries.min(QUERIES).saturating_mul(row)
}

/// The reduced tokens that queries attend to.
pub(super) struct Step<'a, E> {
    pub maps: &'a HeadMaps,
    pub backend: Backend,
    pub attention: &'a Attention,   // of scale 1
    pub tokens: ExactTokens<'a, E>, // at least one
    pub causal: usize,              // query tokens: 1, or as many as have at most `QUERIES` queries
}

impl<E: Element> Step<'_, E> {
    /// Adds the tokens to `out` and `stats`.
    pub fn add(
        &self,
        scaled: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let [dim, dim_v] = self.maps.dims();
        let scaled = scaled.chunks(QUERIES * dim);
        let mut outs = scaled.zip(out.chunks_mut(QUERIES * dim_v).zip(stats.chunks_mut(QUERIES)));
        outs.try_for_each(|(scaled, (out, stats))| self.add_part(scaled, scratch, out, stats))
    }

    /// At most `QUERIES` queries, of heads of one token or of whole tokens.
    fn add_part(
        &self,
        scaled: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let Self { maps, backend, attention, ref tokens, causal } = *self;
        let ([dim, dim_v], [key_rank, value_rank]) = (maps.dims(), maps.sides().map(|map| map.rank()));
        let (projected, scratch) = scratch.split_at_mut(stats.len() * key_rank);
        let (sums, scratch) = scratch.split_at_mut(stats.len() * value_rank);
        let (full, scratch) = scratch.split_at_mut(stats.len() * dim_v);
        maps.keys().project_queries(backend, Rows::contiguous(scaled, dim)?, projected)?;
        sums.fill(0.0);
        let mut sums_stats = [SoftmaxStats::EMPTY; QUERIES];
        let sums_stats = &mut sums_stats[..stats.len()];
        let projected = Rows::contiguous(projected, projected.len() / causal)?;
        attend_exact_into_with(backend, attention, projected, tokens, scratch, sums, sums_stats)?;
        let parts = maps.values().reconstruct(backend, sums, full)?;
        let rows = out.chunks_exact_mut(dim_v).zip(stats).zip(parts.iter().zip(sums_stats));
        for ((out, stats), (part, part_stats)) in rows {
            let scale = stats.absorb(*part_stats, out);
            out.iter_mut().zip(part).for_each(|(out, x)| *out += scale * x);
        }
        Ok(())
    }
}
