//! The interface of a method: a store of the tokens between sinks and window; and helpers shared by all
//! stores.

use kv_attend::owner::Pair;
use kv_llama::{Fetched, Footprint, HeadFit, PromptRows};
use kv_model::Config;
use svd_core::{Rows, SoftmaxStats};

use crate::Result;
use crate::cache::DenseStore;

/// The tokens between the sinks and the window of one layer.
pub(crate) trait Store: CloneStore + Send + Sync {
    /// Passes the rotated queries, (n, n_heads * head_dim), of the tokens from position `pos` on, before any
    /// of these is pushed: the last ones of a prompt, or those that [`KvCache::watches_all`] says. They
    /// replace all that was passed of positions from `pos` on; of a prompt alone, all that was passed before.
    ///
    /// [`KvCache::watches_all`]: kv_llama::KvCache::watches_all
    fn watch(&mut self, _pos: usize, _queries: &[f32]) {}
    /// See [`KvCache::watches_all`](kv_llama::KvCache::watches_all).
    fn watches_all(&self) -> bool {
        false
    }
    /// See [`KvCache::prompt_rows`](kv_llama::KvCache::prompt_rows).
    fn prompt_rows(&self, _keys: &[f32], _values: &[f32]) -> Result<Option<PromptRows>> {
        Ok(None)
    }
    /// Appends `n` tokens: keys before RoPE and values, (n, n_kv_heads * head_dim) each; the first at `pos`.
    /// After a system error, such as a full disk, the contents are unchanged.
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()>;
    /// Codes what this store and those of the layers before it have pushed, if it is the last of a group of
    /// layers that are coded together. `before`: the stores of all layers before, in order.
    fn code_group(&mut self, _before: &mut [&mut dyn Store]) -> Result<()> {
        Ok(())
    }
    /// Its rows, for the last store of its group.
    fn grouped(&mut self) -> Option<&mut Grouped> {
        None
    }
    /// Number of tokens.
    fn len(&self) -> usize;
    /// Whether [`Self::truncate`] to `len` tokens leaves what a cache of that length holds: its window begins
    /// at index `window`, at most `len`, of this store, and its tokens are attended to.
    fn can_truncate(&self, _len: usize, _window: usize) -> bool {
        true
    }
    /// Drops all tokens from index `len` on; `len` is at most [`Self::len`]. What was trained on tokens of
    /// which none is left is forgotten.
    fn truncate(&mut self, len: usize) -> Result<()>;
    /// Adds the attention of one KV head's query heads over the tokens from index `first` on, at most
    /// [`Self::len`]. Sinks and window have already been added. `q` (group, head_dim) is rotated and scaled
    /// by `1 / sqrt(head_dim)`.
    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()>;
    /// Byte counts by purpose.
    fn footprint(&self) -> Footprint;
    /// Counts of the rows that attention has fetched.
    fn fetched(&self) -> Fetched {
        Fetched::default()
    }
    /// See [`KvCache::fits`](kv_llama::KvCache::fits); this is the store of layer `layer`.
    fn fits(&self, _layer: usize) -> Vec<HeadFit> {
        vec![]
    }
}

/// An independent copy of a store, for each that is `Clone`.
pub(crate) trait CloneStore {
    fn clone_box(&self) -> Box<dyn Store>;
}

impl<S: Store + Clone + 'static> CloneStore for S {
    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}

/// Rows of a layer that is coded together with others: the last tokens are exact until the group's last layer
/// has them, too.
#[derive(Clone)]
pub(crate) struct Grouped {
    /// Position of the first exact row.
    pub pos: usize,
    /// Coded rows, then the exact ones.
    pub rows: DenseStore,
    /// The exact rows: keys before RoPE, and values, (n, n_kv_heads * head_dim) each.
    pub exact: Pair<Vec<f32>>,
}

/// A store that can take keys already rotated, to any positions.
pub(crate) trait RotatedStore: Store {
    /// As [`Store::push`].
    fn push_rotated(&mut self, k: &[f32], v: &[f32]) -> Result<()>;
}

/// The attention of a KV head's query heads so far, to which [`svd_core::attend_exact_into`] adds.
pub(crate) struct Sums<'a> {
    pub out: &'a mut [f32],            // (group, head_dim)
    pub stats: &'a mut [SoftmaxStats], // (group,)
}

/// Merges attention in another basis or at a lower rank, `part` (group, rank) with `part_stats` (group,).
///
/// `back` maps a row of `part`, given its sum of softmax weights, to the basis of `sums`; its output starts
/// as zeros.
pub(crate) fn merge_part(
    (part, part_stats): (&[f32], &[SoftmaxStats]),
    Sums { out, stats }: &mut Sums<'_>,
    mut back: impl FnMut(&[f32], f32, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let (rank, head_dim) = (part.len() / part_stats.len(), out.len() / stats.len());
    let mut row = vec![0.0; head_dim];
    let parts = part.chunks_exact(rank).zip(part_stats);
    for ((part, part_stats), (out, stats)) in parts.zip(out.chunks_exact_mut(head_dim).zip(stats.iter_mut()))
    {
        row.fill(0.0);
        back(part, part_stats.sum, &mut row)?;
        stats.merge(out, *part_stats, &row)?;
    }
    Ok(())
}

/// The model dimensions that every store needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

impl Geometry {
    pub fn of(config: &Config) -> Self {
        Self { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim }
    }

    pub fn q_dim(self) -> usize {
        self.n_heads * self.head_dim
    }

    pub fn kv_dim(self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// The columns of one head in rows (n, n_kv_heads * head_dim).
    pub fn head(self, head: usize, rows: &[f32]) -> Result<Rows<'_, f32>> {
        Ok(Rows::contiguous(rows, self.kv_dim())?.columns(head * self.head_dim, self.head_dim)?)
    }

    /// Copies the columns of one head to contiguous rows: (n, head_dim).
    pub fn head_rows(self, head: usize, rows: &[f32]) -> Vec<f32> {
        let columns = head * self.head_dim..(head + 1) * self.head_dim;
        rows.chunks_exact(self.kv_dim()).flat_map(|row| &row[columns.clone()]).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_lower_rank_merges_as_if_the_rest_were_zeros() {
        let stats = |max, sum| SoftmaxStats { max, sum };
        let (mut out, mut all) = (vec![1.0, 2.0, 3.0, 4.0], [stats(0.0, 1.0), SoftmaxStats::EMPTY]);
        out[2..].fill(0.0);
        let part = [stats(2.0_f32.ln(), 1.0), stats(5.0, 0.5)];
        let back = |part: &[f32], sum: f32, row: &mut [f32]| {
            row[0] = part[0] + sum;
            Ok(())
        };
        let mut sums = Sums { out: &mut out, stats: &mut all };
        merge_part((&[3.0, 7.0], &part), &mut sums, back).unwrap();
        for (x, expected) in out.iter().zip([0.5 * 1.0 + 4.0, 0.5 * 2.0, 7.5, 0.0]) {
            assert!((x - expected).abs() < 1e-6, "{out:?}");
        }
        assert!((all[0].sum - 1.5).abs() < 1e-6 && all[1] == part[1]);
    }
}
