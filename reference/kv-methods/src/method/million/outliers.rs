//! The paper's ablation (IV, "Outlier-immune study"), not its method: the top percent of the elements "based
//! on data distribution" are kept exact next to the codes. The paper does not say how they are found. Here
//! they are those farthest from their channel's centre, the mean of the calibration's rows. The centre also
//! takes their place in the rows that are coded, as in those that codebooks are trained on. Attention decodes
//! the rows and puts the outliers back.

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
use kv_attend::{Backend, Rows};
use kv_llama::{Footprint, HeadFit};
use pq_core::{HeadCodes, Outlier, decode_into, extract_outliers, restore_outliers};

use crate::Result;
use crate::cache::{HeadStore, Store, Sums, attend_rows};

/// Codes of rows whose outliers are replaced by the centre of their channel, and the outliers.
#[derive(Clone)]
pub(super) struct OutlierStore {
    coded: HeadStore<HeadCodes>,
    percent: usize, // of the elements
    kept: Vec<Pair<Kept>>,
}

/// What one head's keys or values keep exact.
#[derive(Clone)]
pub(super) struct Kept {
    centre: Arc<[f32]>,     // (head_dim,), of the calibration
    outliers: Vec<Outlier>, // of all rows
}

impl OutlierStore {
    /// A store of no rows: `kept` is that of each head.
    pub const fn new(coded: HeadStore<HeadCodes>, kept: Vec<Pair<Kept>>, percent: usize) -> Self {
        Self { coded, percent, kept }
    }

    /// The rows of one head's keys or values.
    fn decoded(&self, head: usize, side: Side) -> Result<Vec<f32>> {
        let store = &self.coded.heads[head];
        let (codebook, codes) = match side {
            Side::Keys => (store.books().keys(), store.keys()),
            Side::Values => (store.books().values(), store.values()),
        };
        let mut rows = vec![0.0; codes.n() * codes.shape().dim()];
        decode_into(&codebook, &codes, 0, &mut rows)?;
        restore_outliers(&mut rows, &self.kept[head][side].outliers)?;
        Ok(rows)
    }
}

impl Kept {
    /// No outliers of rows about `centre` (head_dim,).
    pub fn about(centre: &[f32]) -> Self {
        Self { centre: centre.into(), outliers: vec![] }
    }

    /// Moves the outliers of rows, which follow `start` elements, to `self`.
    fn take_from(&mut self, rows: &mut [f32], start: usize, percent: usize) -> Result<()> {
        let found = take(rows, &self.centre, start, percent)?;
        self.outliers.extend(found.iter().map(|x| Outlier { index: start as u32 + x.index, ..*x }));
        Ok(())
    }
}

/// Replaces the elements farthest from their channel's centre by that centre, and returns them: as many as
/// bring the outliers of all rows, `start` elements before these included, to `percent`.
pub(super) fn take(rows: &mut [f32], centre: &[f32], start: usize, percent: usize) -> Result<Vec<Outlier>> {
    // Rounded for all rows together: rows that come one at a time have no more outliers than rows at once.
    let share = |elements: usize| elements * percent / 100;
    let count = share(start + rows.len()) - share(start);
    let (mut distances, mut indices) = (vec![0.0; rows.len()], vec![0; count]);
    let mut outliers = vec![Outlier::default(); count];
    extract_outliers(rows, centre, &mut distances, &mut indices, &mut outliers)?;
    Ok(outliers)
}

impl Store for OutlierStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let HeadStore { geometry, rope, heads, .. } = &mut self.coded;
        let (dim, rotated) = (geometry.head_dim, rope.rotated(k, geometry.kv_dim(), pos));
        for (head, (codes, kept)) in heads.iter_mut().zip(&mut self.kept).enumerate() {
            let mut rows = Pair::new(geometry.head_rows(head, &rotated), geometry.head_rows(head, v));
            for side in Side::ALL {
                kept[side].take_from(&mut rows[side], codes.len() * dim, self.percent)?;
            }
            let [keys, values] = [&rows.keys, &rows.values].map(|rows| Rows::contiguous(rows, dim));
            codes.append(Backend::detect(), keys?, values?)?;
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.coded.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        let end = len * self.coded.geometry.head_dim;
        for kept in self.kept.iter_mut().flat_map(Pair::iter_mut) {
            kept.outliers.retain(|x| (x.index as usize) < end);
        }
        self.coded.truncate(len)
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let rows = Pair::try_of(|side| self.decoded(head, side))?;
        let start = first * self.coded.geometry.head_dim;
        attend_rows(q, &rows.keys[start..], &rows.values[start..], sums)
    }

    fn footprint(&self) -> Footprint {
        let (mut footprint, kept) = (self.coded.footprint(), || self.kept.iter().flat_map(Pair::iter));
        footprint.kept += kept().map(|kept| size_of_val(&kept.outliers[..])).sum::<usize>();
        footprint.shared += kept().map(|kept| size_of_val(&kept.centre[..])).sum::<usize>();
        footprint
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        self.coded.fits(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outliers_are_a_share_of_all_rows_however_they_come() {
        let (dim, percent, centre) = (24, 3, [0.5; 24]);
        let rows: Vec<f32> = (0..50 * dim).map(|i| (i * i % 101) as f32).collect();
        for tokens in [1, 7, 50] {
            let mut kept = Kept::about(&centre);
            let mut coded = rows.clone();
            for (i, rows) in coded.chunks_mut(tokens * dim).enumerate() {
                kept.take_from(rows, i * tokens * dim, percent).unwrap();
            }
            assert_eq!(kept.outliers.len(), rows.len() * percent / 100, "{tokens} at a time");
            let replaced = coded.iter().zip(&rows).filter(|(coded, row)| coded != row);
            assert!(replaced.clone().count() > 0 && replaced.clone().all(|(&coded, _)| coded == 0.5));
            restore_outliers(&mut coded, &kept.outliers).unwrap();
            assert_eq!(coded, rows);
        }
    }
}
