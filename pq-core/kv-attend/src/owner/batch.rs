//! Attention of whole layers: one sequence, or a batch of them.

use alloc::vec::Vec;

use super::store::{check_causal, check_dims, count};
use super::{Layer, Store, Workspace};
use crate::error::check_len;
use crate::{Attention, Backend, Element, Rows, SoftmaxStats, normalize_all};

impl<S: Store<E>, E: Element> Layer<S, E> {
    /// Attention of all query heads over all tokens, for one or several query tokens.
    ///
    /// Query token i of T is at the position of the cache's token `len - T + i`, since a step appends its
    /// tokens first. It sees the tokens up to its own position, at most the last [`Attention::window`] of
    /// them, exact and compressed alike. One call can thus verify drafts or run a chunk of the prefill.
    ///
    /// # Shapes
    /// `queries` (T, heads * group * dim): query heads in order; a decode step passes `Rows::from(slice)`.
    /// `out` (T, heads, group, dim of the values), fully written.
    /// # Errors
    /// Those of [`Attention::check`], [`Error`](crate::Error)`::PartialRow`, `Length`, and `Causal` for more
    /// query tokens than there are tokens. `out` is then untouched.
    /// # Cost
    /// That of the attention of each head. The workspace allocates when it has to grow.
    pub fn attend_into<Q: Element>(
        &self,
        attention: &Attention,
        queries: Rows<'_, Q>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), S::Error> {
        attend_batch_into(&[self], attention, queries, workspace, out)
    }
}

/// [`Layer::attend_into`] for a batch of sequences, of any lengths, in one call.
///
/// # Shapes
/// `queries` (sequences * T, heads * group * dim): the T query tokens of the first sequence, then those of
/// the next; `out` (sequences, T, heads, group, dim of the values), fully written.
/// # Errors
/// As [`Layer::attend_into`]; [`Error::Length`](crate::Error::Length) also when the caches differ in heads or
/// dimensions. `out` is then untouched.
/// # Examples
/// See `LayerCache` in pq-core.
pub fn attend_batch_into<S: Store<E>, E: Element, Q: Element>(
    caches: &[&Layer<S, E>],
    attention: &Attention,
    queries: Rows<'_, Q>,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<(), S::Error> {
    attend_batch_into_with(Backend::detect(), caches, attention, queries, workspace, out)
}

/// [`attend_batch_into`] on a given backend.
///
/// # Errors
/// As [`attend_batch_into`], and [`Error::BackendUnavailable`](crate::Error::BackendUnavailable).
pub fn attend_batch_into_with<S: Store<E>, E: Element, Q: Element>(
    backend: Backend,
    caches: &[&Layer<S, E>],
    attention: &Attention,
    queries: Rows<'_, Q>,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<(), S::Error> {
    backend.check()?;
    attention.check()?;
    let Some(first) = caches.first() else {
        check_len("queries", queries.rows() * queries.components(), 0)?;
        return Ok(check_len("out", out.len(), 0)?);
    };
    let ([dim, dim_v], heads) = (first.heads()[0].dims(), first.heads().len());
    for cache in caches {
        check_len("heads of a cache", cache.heads().len(), heads)?;
        check_dims(cache.heads()[0].dims(), [dim, dim_v])?;
    }
    let query_tokens = count("query tokens", queries.rows(), caches.len())?;
    let group = count("queries", queries.components(), heads.saturating_mul(dim))?;
    let row = group.saturating_mul(dim_v); // of a head and query token
    check_len("out", out.len(), (queries.rows() * heads).saturating_mul(row))?;
    caches.iter().try_for_each(|cache| check_causal(query_tokens, cache.len()))?;
    if out.is_empty() {
        return Ok(());
    }
    let batch = Batch { backend, caches, attention, queries, query_tokens, group };
    let Workspace { scratch, stats, rows } = workspace;
    if query_tokens == 1 {
        return batch.attend(scratch, stats, out);
    }
    // Heads are computed independently, and `out` interleaves them by query token.
    let by_heads = at_least(rows, out.len(), 0.0);
    batch.attend(scratch, stats, by_heads)?;
    for (i, out) in out.chunks_exact_mut(row).enumerate() {
        let (sequence, t, h) = (i / heads / query_tokens, i / heads % query_tokens, i % heads);
        out.copy_from_slice(&by_heads[((sequence * heads + h) * query_tokens + t) * row..][..row]);
    }
    Ok(())
}

/// The checked arguments of [`attend_batch_into`].
struct Batch<'a, S, E, Q> {
    backend: Backend,
    caches: &'a [&'a Layer<S, E>], // at least one
    attention: &'a Attention,
    queries: Rows<'a, Q>, // (sequences * query_tokens, heads * group * dim)
    query_tokens: usize,
    group: usize,
}

impl<S: Store<E>, E: Element, Q: Element> Batch<'_, S, E, Q> {
    /// Attends with every head of every sequence to `out` (sequences, heads, query tokens, group, dim of the
    /// values).
    fn attend(
        &self,
        scratch: &mut Vec<f32>,
        stats: &mut Vec<SoftmaxStats>,
        out: &mut [f32],
    ) -> Result<(), S::Error> {
        let Self { caches, query_tokens, group, .. } = *self;
        let heads = caches.iter().flat_map(|cache| cache.heads());
        let scratch_len = heads.map(|head| head.scratch_len(query_tokens, group)).max().unwrap_or(0).max(1);
        let tasks = caches.len() * caches[0].heads().len();
        // Each thread takes consecutive heads with one scratch.
        #[cfg(feature = "rayon")]
        let parts = rayon::current_num_threads().min(tasks);
        #[cfg(not(feature = "rayon"))]
        let parts = 1;
        let each = tasks.div_ceil(parts);
        let scratch = at_least(scratch, parts.saturating_mul(scratch_len), 0.0);
        let stats = at_least(stats, tasks * query_tokens * group, SoftmaxStats::EMPTY);
        stats.fill(SoftmaxStats::EMPTY);
        out.fill(0.0);
        // One thread does without rayon's, as in `Layer::append`.
        #[cfg(feature = "rayon")]
        if parts > 1 {
            use rayon::prelude::*;
            let (out_len, stats_len) = (each * (out.len() / tasks), each * query_tokens * group);
            let parts = scratch.par_chunks_mut(scratch_len).zip(out.par_chunks_mut(out_len));
            let parts = parts.zip(stats.par_chunks_mut(stats_len)).enumerate();
            return parts.try_for_each(|(i, ((scratch, out), stats))| {
                self.attend_from(i * each, scratch, out, stats)
            });
        }
        debug_assert_eq!(each, tasks);
        self.attend_from(0, scratch, out, stats)
    }

    /// Attends with consecutive heads of the batch from `first` on, as many as `out` has room for.
    fn attend_from(
        &self,
        first: usize,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), S::Error> {
        let Self { backend, caches, attention, queries, query_tokens, group } = *self;
        let (heads, [dim, dim_v]) = (caches[0].heads().len(), caches[0].heads()[0].dims());
        let rows = stats
            .chunks_exact_mut(query_tokens * group)
            .zip(out.chunks_exact_mut(query_tokens * group * dim_v));
        for (task, (stats, out)) in (first..).zip(rows) {
            let (sequence, h) = (task / heads, task % heads);
            let queries = queries.slice(sequence * query_tokens..(sequence + 1) * query_tokens)?;
            let queries = queries.columns(h * group * dim, group * dim)?;
            caches[sequence].heads()[h].attend_into_with(backend, attention, queries, scratch, out, stats)?;
            normalize_all(stats, out)?;
        }
        Ok(())
    }
}

/// The first `len` elements of `memory`, which grows if it is shorter.
fn at_least<T: Clone>(memory: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    if memory.len() < len {
        memory.resize(len, fill);
    }
    &mut memory[..len]
}
