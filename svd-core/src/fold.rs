//! Folds a rotation into the weights on both sides of the cache, so that decode steps do not compute it.
//!
//! `W_V` and `W_O` can always be folded, `W_K` and `W_Q` only in models without RoPE. Fold the whole rotation
//! once and truncate at run time, or fold at the final rank.

use alloc::vec;
use alloc::vec::Vec;

use crate::error::check_len;
use crate::{Element, Error, Rotation, Rows};

impl Rotation {
    /// `A^T W`: folds the basis into the projection of stored rows, `W_V` or `W_K`.
    ///
    /// # Shapes
    /// `weight` (dim, columns), the rows of one KV head; a bias is a weight with one column. Returns (rank,
    /// columns).
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`] or [`Error::Length`].
    /// # Cost
    /// dim * rank * columns multiply-adds in `f64`.
    /// # Source
    /// ZACK, 5.1.
    /// # Examples
    /// ```
    /// use svd_core::{Rotation, Rows};
    /// let turn = vec![0.6, -0.8, 0.8, 0.6];
    /// let rotation = Rotation::from_parts(turn.clone(), turn, vec![2.0, 1.0])?;
    /// let weight = Rows::contiguous(&[5.0_f32, 0.0, 0.0, 5.0], 2)?; // (dim, columns)
    /// assert_eq!(rotation.fold_basis(weight, 1)?, [3.0, 4.0]);
    /// # Ok::<(), svd_core::Error>(())
    /// ```
    pub fn fold_basis<E: Element>(&self, weight: Rows<'_, E>, rank: usize) -> Result<Vec<f32>, Error> {
        self.fold_input(self.basis(), weight, rank)
    }

    /// `B^T W`: folds the dual into the projection of queries, `W_Q`.
    ///
    /// # Shapes
    /// `weight` (dim, columns), the rows of one query head; a bias is a weight with one column. Returns
    /// (rank, columns).
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`] or [`Error::Length`].
    /// # Cost
    /// dim * rank * columns multiply-adds in `f64`.
    /// # Source
    /// ZACK, 5.1, QK compression, for models without a rotary embedding.
    pub fn fold_dual<E: Element>(&self, weight: Rows<'_, E>, rank: usize) -> Result<Vec<f32>, Error> {
        self.fold_input(self.dual(), weight, rank)
    }

    /// `W B`: folds the reconstruction into the projection of outputs, `W_O`.
    ///
    /// # Shapes
    /// `weight` (rows, dim), the columns of one query head. Returns (rows, rank).
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`] or [`Error::Length`].
    /// # Cost
    /// rows * dim * rank multiply-adds in `f64`.
    /// # Source
    /// ZACK, 5.1, V compression.
    pub fn fold_output<E: Element>(&self, weight: Rows<'_, E>, rank: usize) -> Result<Vec<f32>, Error> {
        let dim = self.dim();
        self.check_rank(rank)?;
        check_len("row of the weight", weight.components(), dim)?;
        let mut out = vec![0.0; weight.rows() * rank];
        for (row, out) in weight.iter().zip(out.chunks_exact_mut(rank)) {
            let mut sums = vec![0.0; rank];
            for (&w, map) in row.iter().zip(self.dual().chunks_exact(dim)) {
                let w = f64::from(w.to_f32());
                sums.iter_mut().zip(map).for_each(|(sum, m)| *sum += w * m);
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum as f32);
        }
        Ok(out)
    }

    fn fold_input<E: Element>(
        &self,
        map: &[f64],
        weight: Rows<'_, E>,
        rank: usize,
    ) -> Result<Vec<f32>, Error> {
        let dim = self.dim();
        self.check_rank(rank)?;
        check_len("rows of the weight", weight.rows(), dim)?;
        let columns = weight.components();
        let mut out = Vec::with_capacity(rank * columns);
        let mut sums = vec![0.0; columns];
        for c in 0..rank {
            sums.fill(0.0);
            for (d, row) in weight.iter().enumerate() {
                let m = map[d * dim + c];
                sums.iter_mut().zip(row).for_each(|(sum, &w)| *sum += m * f64::from(w.to_f32()));
            }
            out.extend(sums.iter().map(|&sum| sum as f32));
        }
        Ok(out)
    }
}
