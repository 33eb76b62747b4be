//! A store of one layer, made of the owners that engines get: one for each KV head.

use std::sync::Arc;

use kv_attend::Backend;
use kv_attend::owner::{self, EvictedRows, Queries};
use kv_llama::{Footprint, HeadFit};
use kv_model::Rope;

use super::{Geometry, Store, Sums, head_fits};
use crate::{Error, Result};

/// Compressed tokens of each head, of rotated keys and of values.
#[derive(Clone)]
pub(crate) struct HeadStore<S> {
    pub geometry: Geometry,
    pub rope: Arc<Rope>,
    pub heads: Vec<S>,
    /// Bytes of a head that all sequences share.
    pub shared_size: fn(&S) -> usize,
}

impl<S: owner::Store<f32, Error: Into<Error>> + Clone + 'static> Store for HeadStore<S> {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let rotated = self.rope.rotated(k, self.geometry.kv_dim(), pos);
        for (head, tokens) in self.heads.iter_mut().enumerate() {
            let [keys, values] = [&rotated[..], v].map(|rows| self.geometry.head(head, rows));
            let rows = EvictedRows::new(pos, [keys?, values?])?;
            tokens.append(Backend::detect(), &rows).map_err(Into::into)?;
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.heads[0].len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().for_each(|tokens| tokens.truncate(len));
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let (tokens, group) = (&self.heads[head], sums.stats.len());
        let queries = Queries::of_token(q, group, tokens.len(), first);
        let mut scratch = vec![0.0; tokens.scratch_len(1, group)];
        tokens
            .attend_into(Backend::detect(), &queries, &mut scratch, sums.out, sums.stats)
            .map_err(Into::into)
    }

    fn footprint(&self) -> Footprint {
        let kept = self.heads.iter().map(owner::Store::size).sum();
        let shared = self.heads.iter().map(self.shared_size).sum();
        Footprint { kept, shared, ..Footprint::default() }
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        head_fits(layer, self.heads.iter().filter_map(owner::Store::fits))
    }
}
