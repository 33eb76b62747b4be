use std::sync::Arc;

use svd_core::{Rotation, attend_into, project_into};

use crate::Result;
use crate::cache::accumulate::Accumulator;
use crate::cache::exact::Numbers;
use crate::cache::{ElementType, Footprint, Geometry, Store};
use crate::model::Rope;

/// The rotation of a head's queries and keys, and how many dimensions of keys and values are left.
pub(crate) struct HeadRotation {
    pub keys: Rotation,
    pub key_rank: usize,
    pub value_rank: usize,
}

/// ZACK: rotated keys and values cut to each head's rank; attention in the rotated space.
///
/// Queries and keys are rotated here, after RoPE (paper 5.1). Values arrive rotated and leave rotated: their maps are
/// folded into the model's `W_V` and `W_O`, so a cut value is its first components and the rest counts as zero.
#[derive(Clone)]
pub(crate) struct ZackStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    heads: Arc<Vec<HeadRotation>>, // (n_kv_heads,)
    element: ElementType,
    rows: Vec<[Numbers; 2]>, // per head: keys (len, key_rank) and values (len, value_rank)
    len: usize,
}

impl ZackStore {
    pub fn new(
        geometry: Geometry,
        rope: Arc<Rope>,
        heads: Arc<Vec<HeadRotation>>,
        element: ElementType,
    ) -> Self {
        let rows = (0..geometry.n_kv_heads).map(|_| [Numbers::new(element), Numbers::new(element)]).collect();
        Self { geometry, rope, heads, element, rows, len: 0 }
    }
}

impl Store for ZackStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let Geometry { head_dim, .. } = self.geometry;
        let kv_dim = self.geometry.kv_dim();
        let rotated = self.rope.rotated(k, kv_dim, pos);
        for (h, (head, [keys, values])) in self.heads.iter().zip(&mut self.rows).enumerate() {
            let mut key = vec![0.0; head.key_rank];
            for (k, v) in rotated.chunks_exact(kv_dim).zip(v.chunks_exact(kv_dim)) {
                project_into(head.keys.store(), &k[h * head_dim..][..head_dim], &mut key)?;
                keys.push(&key);
                values.push(&v[h * head_dim..][..head.value_rank]);
            }
        }
        self.len += k.len() / kv_dim;
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        for (head, [keys, values]) in self.heads.iter().zip(&mut self.rows) {
            keys.truncate(len * head.key_rank);
            values.truncate(len * head.value_rank);
        }
        self.len = len;
        Ok(())
    }

    fn attend(&self, head: usize, q: &[f32], group: &mut [Accumulator]) -> Result<()> {
        let (rotation, [keys, values]) = (&self.heads[head], &self.rows[head]);
        let (mut k, mut v) = (vec![0.0; keys.len()], vec![0.0; values.len()]);
        keys.read(0, &mut k);
        values.read(0, &mut v);
        let (mut projected, mut out) = (vec![0.0; rotation.key_rank], vec![0.0; rotation.value_rank]);
        let mut scores = vec![0.0; self.len];
        for (q, accumulator) in q.chunks_exact(self.geometry.head_dim).zip(group) {
            project_into(rotation.keys.probe(), q, &mut projected)?;
            let stats = attend_into(&projected, &k, &v, &mut scores, &mut out)?;
            accumulator.merge(stats.max, stats.sum, &out);
        }
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        let rows: usize = self.rows.iter().flatten().map(Numbers::len).sum();
        let maps = self.heads.len() * 2 * self.geometry.head_dim * self.geometry.head_dim;
        Footprint { kept: rows * self.element.size(), shared: 4 * maps, ..Footprint::default() }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
