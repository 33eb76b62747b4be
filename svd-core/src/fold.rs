//! Absorbing a rotation into the weights around the cache, so that a decode step pays nothing for it.
//!
//! `W_V` and `W_O` always can take it; `W_K` and `W_Q` where no rotary embedding stands between them and the scores. Fold the
//! whole rotation once and cut columns at run time, or fold at the rank that is kept.

use alloc::vec;
use alloc::vec::Vec;

use crate::error::check_len;
use crate::{Error, Rotation};

impl Rotation {
    /// `A^T W`: the projection that makes stored vectors, as `W_V` or `W_K`, with the rotation in it.
    ///
    /// # Shapes
    /// `weight` (dim, columns), the rows of one key/value head; a bias is a weight of one column. Returns (rank, columns).
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`] or [`Error::Length`].
    /// # Cost
    /// dim * rank * columns multiply-adds in `f64`.
    /// # Source
    /// ZACK, 5.1.
    pub fn fold_store(&self, weight: &[f32], rank: usize) -> Result<Vec<f32>, Error> {
        self.fold_input(self.store(), weight, rank)
    }

    /// `B^T W`: the projection that makes what meets the stored vectors, `W_Q`, with the rotation in it.
    ///
    /// # Shapes
    /// `weight` (dim, columns), the rows of one query head; a bias is a weight of one column. Returns (rank, columns).
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`] or [`Error::Length`].
    /// # Cost
    /// dim * rank * columns multiply-adds in `f64`.
    /// # Source
    /// ZACK, 5.1, QK compression: for models without a rotary embedding.
    pub fn fold_probe(&self, weight: &[f32], rank: usize) -> Result<Vec<f32>, Error> {
        self.fold_input(self.probe(), weight, rank)
    }

    /// `W B`: the projection that reads what was stored, `W_O`, with the way back in it.
    ///
    /// # Shapes
    /// `weight` (rows, dim), the columns of one query head. Returns (rows, rank).
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`] or [`Error::Length`].
    /// # Cost
    /// rows * dim * rank multiply-adds in `f64`.
    /// # Source
    /// ZACK, 5.1, V compression.
    pub fn fold_output(&self, weight: &[f32], rank: usize) -> Result<Vec<f32>, Error> {
        let dim = self.dim();
        self.check_rank(rank)?;
        check_len("weight", weight.len(), weight.len() / dim * dim)?;
        let mut out = vec![0.0; weight.len() / dim * rank];
        for (row, out) in weight.chunks_exact(dim).zip(out.chunks_exact_mut(rank)) {
            let mut sums = vec![0.0; rank];
            for (&w, map) in row.iter().zip(self.probe().chunks_exact(dim)) {
                sums.iter_mut().zip(map).for_each(|(sum, m)| *sum += f64::from(w) * m);
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum as f32);
        }
        Ok(out)
    }

    fn fold_input(&self, map: &[f64], weight: &[f32], rank: usize) -> Result<Vec<f32>, Error> {
        let dim = self.dim();
        self.check_rank(rank)?;
        let columns = weight.len() / dim;
        check_len("weight", weight.len(), columns * dim)?;
        let mut out = Vec::with_capacity(rank * columns);
        let mut sums = vec![0.0; columns];
        for c in 0..rank {
            sums.fill(0.0);
            for (d, row) in weight.chunks_exact(columns.max(1)).enumerate() {
                let m = map[d * dim + c];
                sums.iter_mut().zip(row).for_each(|(sum, &w)| *sum += m * f64::from(w));
            }
            out.extend(sums.iter().map(|&sum| sum as f32));
        }
        Ok(out)
    }
}
