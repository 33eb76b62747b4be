//! The paper's ablation, not its method: the elements that are farthest from their channel's centre are kept
//! exact next to the codes. Attention decodes the rows and puts these elements back.

use kv_attend::owner::{Pair, Side};
use kv_attend::{Backend, Rows};
use kv_llama::{Footprint, HeadFit};
use pq_core::{Outlier, SoftmaxStats, decode_into, extract_outliers, restore_outliers};

use super::MillionStore;
use crate::Result;
use crate::cache::{Store, attend_rows};
use crate::calibrate::mean_row;

/// Codes of rows whose outliers are replaced by the centre of their channel, and the outliers.
#[derive(Clone)]
pub(super) struct OutlierStore {
    coded: MillionStore,
    percent: usize, // of the elements
    kept: Vec<Pair<Kept>>,
}

/// What one head's keys or values keep exact.
#[derive(Clone, Default)]
struct Kept {
    centre: Vec<f32>,       // (head_dim,), the mean of the first rows; empty without rows
    outliers: Vec<Outlier>, // of all rows
}

impl OutlierStore {
    pub fn new(coded: MillionStore, percent: usize) -> Self {
        Self { kept: vec![Pair::default(); coded.heads.len()], coded, percent }
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
    /// Moves the outliers of rows, which follow `start` elements, to `self`.
    fn take_from(&mut self, rows: &mut [f32], dim: usize, start: usize, percent: usize) -> Result<()> {
        if self.centre.is_empty() {
            self.centre = mean_row(rows, dim);
        }
        let found = take(rows, &self.centre, percent)?;
        self.outliers.extend(found.iter().map(|x| Outlier { index: start as u32 + x.index, ..*x }));
        Ok(())
    }
}

/// Replaces the `percent` of elements farthest from their channel's centre by that centre, and returns them.
pub(super) fn take(rows: &mut [f32], centre: &[f32], percent: usize) -> Result<Vec<Outlier>> {
    let count = (rows.len() * percent).div_ceil(100);
    let (mut distances, mut indices) = (vec![0.0; rows.len()], vec![0; count]);
    let mut outliers = vec![Outlier::default(); count];
    extract_outliers(rows, centre, &mut distances, &mut indices, &mut outliers)?;
    Ok(outliers)
}

impl Store for OutlierStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let MillionStore { geometry, rope, heads } = &mut self.coded;
        let (dim, rotated) = (geometry.head_dim, rope.rotated(k, geometry.kv_dim(), pos));
        for (head, (codes, kept)) in heads.iter_mut().zip(&mut self.kept).enumerate() {
            let mut rows = Pair::new(geometry.head_rows(head, &rotated), geometry.head_rows(head, v));
            for side in Side::ALL {
                kept[side].take_from(&mut rows[side], dim, codes.len() * dim, self.percent)?;
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
            if len == 0 {
                kept.centre.clear();
            }
        }
        self.coded.truncate(len)
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let rows = Pair::try_of(|side| self.decoded(head, side))?;
        let start = first * self.coded.geometry.head_dim;
        attend_rows(q, &rows.keys[start..], &rows.values[start..], out, stats)
    }

    fn footprint(&self) -> Footprint {
        let size = |kept: &Kept| size_of_val(&kept.outliers[..]) + size_of_val(&kept.centre[..]);
        let mut footprint = self.coded.footprint();
        footprint.kept += self.kept.iter().flat_map(Pair::iter).map(size).sum::<usize>();
        footprint
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        self.coded.fits(layer)
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
