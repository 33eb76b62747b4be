//! The scalar codes of one layer.

use std::sync::Arc;

use kv_attend::Backend;
use kv_llama::{Footprint, HeadFit};
use kv_model::Rope;
use kv_owners::sq::{Codes, Head};
use pq_core::SoftmaxStats;

use crate::Result;
use crate::cache::{Geometry, Store, head_fits};

/// A head's codes each.
#[derive(Clone)]
pub(in crate::method) struct SqStore {
    pub geometry: Geometry,
    pub rope: Arc<Rope>,
    pub shared: Vec<Arc<Head>>,
    pub heads: Vec<Codes>,
}

impl Store for SqStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let rotated = self.rope.rotated(k, self.geometry.kv_dim(), pos);
        for (head, codes) in self.heads.iter_mut().enumerate() {
            let [keys, values] = [&rotated[..], v].map(|rows| self.geometry.head_rows(head, rows));
            codes.append(Backend::detect(), pos, &keys, values)?;
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.heads[0].codes().len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().for_each(|codes| codes.truncate(len));
        Ok(())
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let codes = &self.heads[head];
        let mut scratch = vec![0.0; codes.scratch_len(stats.len())];
        Ok(codes.attend_into(Backend::detect(), q, first..self.len(), None, &mut scratch, out, stats)?)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.heads.iter().map(|codes| codes.codes().size()).sum(),
            shared: self.shared.iter().map(|head| head.size()).sum(),
            ..Footprint::default()
        }
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        head_fits(layer, self.heads.iter().map(Codes::fits))
    }
}
