//! A head with keys and values truncated to lower ranks.

use svd_core::{MapBuf, Rows, RowsMut};

use crate::Result;

/// The truncation of one head: keys are projected; values are already rotated and lose their last components.
#[derive(Debug)]
pub(crate) struct HeadCut {
    pub keys: MapBuf,    // (head_dim, key rank)
    pub queries: MapBuf, // (head_dim, key rank)
    pub value_rank: usize,
}

impl HeadCut {
    pub fn key_rank(&self) -> usize {
        self.keys.view().rank()
    }

    /// Projects keys (n, head_dim).
    pub fn project_keys(&self, rows: &[f32]) -> Result<Vec<f32>> {
        project(&self.keys, rows)
    }

    /// Projects keys (n, head_dim) and reconstructs `head_dim` components: rows whose inner products with all
    /// queries equal those of the projected keys.
    pub fn reconstruct_keys(&self, rows: &[f32]) -> Result<Vec<f32>> {
        let mut out = vec![0.0; rows.len()];
        self.queries.view().reconstruct_into(&self.project_keys(rows)?, &mut out)?;
        Ok(out)
    }

    /// Projects queries (n, head_dim).
    pub fn project_queries(&self, rows: &[f32]) -> Result<Vec<f32>> {
        project(&self.queries, rows)
    }

    /// Truncates values (n, head_dim).
    pub fn cut_values(&self, rows: &[f32]) -> Vec<f32> {
        let dim = self.keys.view().dim();
        rows.chunks_exact(dim).flat_map(|row| &row[..self.value_rank]).copied().collect()
    }

    /// Bytes of the two maps.
    pub fn size(&self) -> usize {
        2 * size_of::<f32>() * self.keys.view().dim() * self.key_rank()
    }
}

fn project(map: &MapBuf, rows: &[f32]) -> Result<Vec<f32>> {
    let map = map.view();
    let mut out = vec![0.0; rows.len() / map.dim() * map.rank()];
    map.project_into(Rows::contiguous(rows, map.dim())?, RowsMut::contiguous(&mut out, map.rank())?)?;
    Ok(out)
}
