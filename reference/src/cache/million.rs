use std::sync::Arc;

use pq_core::{Codebook, Codes, Lut, PqShape, attend_into, lut_into};

use crate::Result;
use crate::cache::accumulate::Accumulator;
use crate::cache::codes::append_codes;
use crate::cache::{Footprint, Geometry, Store};
use crate::model::Rope;

/// Offline codebooks of one key/value head, shared by all sequences.
pub(crate) struct HeadCodebooks {
    pub keys: (PqShape, Vec<f32>),
    pub values: (PqShape, Vec<f32>),
}

/// MILLION: keys (rotated) and values are product-quantized; attention runs on the codes.
#[derive(Clone)]
pub(crate) struct MillionStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    codebooks: Arc<Vec<HeadCodebooks>>, // (n_kv_heads,)
    codes: Vec<[Vec<u8>; 2]>,           // per head: keys and values
    len: usize,
}

impl MillionStore {
    pub fn new(geometry: Geometry, rope: Arc<Rope>, codebooks: Arc<Vec<HeadCodebooks>>) -> Self {
        Self { geometry, rope, codebooks, codes: vec![[vec![], vec![]]; geometry.n_kv_heads], len: 0 }
    }
}

impl Store for MillionStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let rotated = self.rope.rotated(k, kv_dim, pos);
        for (head, (books, codes)) in self.codebooks.iter().zip(&mut self.codes).enumerate() {
            for (((shape, centroids), rows), codes) in
                [(&books.keys, &rotated[..]), (&books.values, v)].into_iter().zip(codes)
            {
                append_codes(
                    &Codebook::new(*shape, centroids)?,
                    &self.geometry.head_rows(head, rows),
                    codes,
                )?;
            }
        }
        self.len += k.len() / kv_dim;
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        for (books, codes) in self.codebooks.iter().zip(&mut self.codes) {
            codes[0].truncate(len * books.keys.0.code_size());
            codes[1].truncate(len * books.values.0.code_size());
        }
        self.len = len;
        Ok(())
    }

    fn attend(&self, head: usize, q: &[f32], group: &mut [Accumulator]) -> Result<()> {
        let books = &self.codebooks[head];
        let (key_shape, value_shape) = (books.keys.0, books.values.0);
        let key_codes = Codes::new(key_shape, &self.codes[head][0])?;
        let value_codes = Codes::new(value_shape, &self.codes[head][1])?;
        let (keys, values) =
            (Codebook::new(key_shape, &books.keys.1)?, Codebook::new(value_shape, &books.values.1)?);
        let (mut table, mut weights) = (vec![0.0; key_shape.lut_len()], vec![0.0; value_shape.lut_len()]);
        let (mut scores, mut out) = (vec![0.0; self.len], vec![0.0; self.geometry.head_dim]);
        for (q, accumulator) in q.chunks_exact(self.geometry.head_dim).zip(group) {
            lut_into(&keys, q, &mut table)?;
            let lut = Lut::new(key_shape, &table)?;
            let stats =
                attend_into(&lut, &key_codes, &values, &value_codes, &mut scores, &mut weights, &mut out)?;
            accumulator.merge(stats.max, stats.sum, &out);
        }
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.codes.iter().flatten().map(Vec::len).sum(),
            shared: self.codebooks.iter().map(|books| 4 * (books.keys.1.len() + books.values.1.len())).sum(),
            ..Footprint::default()
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
