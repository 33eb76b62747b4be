//! The product of rows with a truncated basis: from the dimension of a head to a rank.

// One index counts registers and the rows or columns that they hold.
#![allow(clippy::needless_range_loop)]

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use kv_attend::simd::{Kernel, Run, Simd, dot};

use crate::error::{check_len, count_rows};
use crate::{Backend, Element, Error, Rows, RowsMut};

/// The first columns of a rotation's basis or dual in `f32`, for the decode path: `y = x map`, (dim, rank)
/// row-major.
///
/// # Examples
/// ```
/// use svd_core::{Map, Rows, RowsMut};
/// let map = Map::new(&[1.0, 2.0], 2, 1)?; // two dimensions, rank 1
/// let mut y = [0.0];
/// map.project_into(Rows::from(&[3.0_f32, 4.0][..]), RowsMut::from(&mut y[..]))?;
/// assert_eq!(y, [11.0]);
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Map<'a> {
    columns: &'a [f32],
    dim: usize,
    rank: usize,
}

impl<'a> Map<'a> {
    /// A map of `dim` dimensions to `rank` components.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`] for a rank above the dimension, [`Error::Length`].
    pub fn new(columns: &'a [f32], dim: usize, rank: usize) -> Result<Self, Error> {
        if rank == 0 {
            return Err(Error::Zero { what: "rank" });
        }
        if rank > dim {
            return Err(Error::Rank { rank, dim });
        }
        check_len("map", columns.len(), dim.checked_mul(rank).ok_or(Error::TooLarge)?)?;
        Ok(Self { columns, dim, rank })
    }

    /// Components of an input row.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Components of an output row.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Projects rows: `out[i, c] = sum over d of rows[i, d] * map[d, c]`, added in `f32` in ascending `d` and
    /// then rounded to the element type of `out`: a sum beyond its range (65,504 in `f16`) becomes infinite.
    ///
    /// # Shapes
    /// `rows` (n, dim) and `out` (n, rank), each in any layout; `out` is fully written.
    /// # Errors
    /// [`Error::Length`]. `out` is then unchanged.
    /// # Cost
    /// n * dim * rank multiply-adds, no allocation.
    /// # Examples
    /// ```
    /// use half::f16;
    /// use svd_core::{Map, Rows, RowsMut};
    /// let map = Map::new(&[0.5, 0.5], 2, 1)?; // the mean of two components
    /// let token = [f16::ONE; 6]; // three heads
    /// let mut cache = [f16::ZERO; 8]; // rows of 4; the next free row is row 1
    /// let out = RowsMut::from(&mut cache[4..5]);
    /// map.project_into(Rows::from(&token[2..4]), out)?; // head 1
    /// assert_eq!(cache[4], f16::ONE);
    /// # Ok::<(), svd_core::Error>(())
    /// ```
    pub fn project_into<E: Element, O: Element>(
        &self,
        rows: Rows<'_, E>,
        out: RowsMut<'_, O>,
    ) -> Result<(), Error> {
        self.project_into_with(Backend::detect(), rows, out)
    }

    /// [`project_into`](Self::project_into) on a given backend.
    ///
    /// # Errors
    /// As for [`project_into`](Self::project_into), and [`Error::BackendUnavailable`].
    pub fn project_into_with<E: Element, O: Element>(
        &self,
        backend: Backend,
        rows: Rows<'_, E>,
        out: RowsMut<'_, O>,
    ) -> Result<(), Error> {
        backend.check()?;
        check_len("components of the rows", rows.components(), self.dim)?;
        check_len("components of out", out.components(), self.rank)?;
        check_len("rows of out", out.rows(), rows.rows())?;
        backend.run(Project { map: *self, rows, out });
        Ok(())
    }

    /// Reconstructs rows: `out[i, d] = sum over c of rows[i, c] * map[d, c]`, added in `f32` in sixteen
    /// partial sums. A rotation's `dual_map` reconstructs the rows that its `basis_map` projected, exactly at
    /// full rank.
    ///
    /// # Shapes
    /// `rows` (n, rank); `out` (n, dim), fully written.
    /// # Errors
    /// [`Error::PartialRow`] if `out` does not consist of whole rows, [`Error::Length`]. `out` is then
    /// unchanged.
    /// # Cost
    /// n * dim * rank multiply-adds, no allocation.
    pub fn reconstruct_into(&self, rows: &[f32], out: &mut [f32]) -> Result<(), Error> {
        self.reconstruct_into_with(Backend::detect(), rows, out)
    }

    /// [`reconstruct_into`](Self::reconstruct_into) on a given backend.
    ///
    /// # Errors
    /// As for [`reconstruct_into`](Self::reconstruct_into), and [`Error::BackendUnavailable`].
    pub fn reconstruct_into_with(
        &self,
        backend: Backend,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error> {
        backend.check()?;
        let n = count_rows("out", out.len(), self.dim)?;
        check_len("rows", rows.len(), n * self.rank)?;
        backend.run(Reconstruct { map: *self, rows, out });
        Ok(())
    }
}

/// A [`Map`] that owns its columns.
#[cfg(feature = "alloc")]
#[derive(Clone, Debug, PartialEq)]
pub struct MapBuf {
    columns: Vec<f32>,
    dim: usize,
    rank: usize,
}

#[cfg(feature = "alloc")]
impl MapBuf {
    /// A map that owns `columns`; see [`Map::new`].
    ///
    /// # Errors
    /// As for [`Map::new`].
    pub fn new(columns: Vec<f32>, dim: usize, rank: usize) -> Result<Self, Error> {
        Map::new(&columns, dim, rank)?;
        Ok(Self { columns, dim, rank })
    }

    /// All columns, (dim, rank) row-major.
    pub(crate) fn columns(&self) -> &[f32] {
        &self.columns
    }

    /// Borrows the map for the decode path.
    #[must_use]
    pub fn view(&self) -> Map<'_> {
        Map { columns: &self.columns, dim: self.dim, rank: self.rank }
    }
}

struct Project<'a, 'b, E, O> {
    map: Map<'a>,
    rows: Rows<'a, E>,
    out: RowsMut<'b, O>,
}

impl<E: Element, O: Element> Kernel for Project<'_, '_, E, O> {
    type Output = ();

    fn scalar(mut self) {
        for (i, row) in self.rows.iter().enumerate() {
            project_columns(self.map, row, 0, self.out.row_mut(i));
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(mut self, s: S) {
        let whole = self.rows.rows() / 4 * 4;
        for first in (0..whole).step_by(4) {
            self.rows::<S, 4>(s, first);
        }
        for first in whole..self.rows.rows() {
            self.rows::<S, 1>(s, first);
        }
    }
}

impl<E: Element, O: Element> Project<'_, '_, E, O> {
    /// Projects `N` rows at a time, so that each load of the map serves all of them.
    #[inline(always)]
    fn rows<S: Simd, const N: usize>(&mut self, s: S, first: usize) {
        let Map { columns, dim, rank } = self.map;
        let rows: [&[E]; N] = core::array::from_fn(|i| self.rows.row(first + i));
        let out: [*mut O; N] = core::array::from_fn(|i| self.out.row_mut(first + i).as_mut_ptr());
        assert!(
            columns.len() == dim * rank && self.rows.components() == dim && self.out.components() == rank
        );
        let wide = rank / (2 * S::LANES) * 2 * S::LANES;
        for c in (0..wide).step_by(2 * S::LANES) {
            let mut sums = [[s.splat(0.0); 2]; N];
            for d in 0..dim {
                // SAFETY: c + 2 LANES is at most rank, d below dim.
                let map = unsafe {
                    let map = columns.as_ptr().add(d * rank + c);
                    [s.load(map), s.load(map.add(S::LANES))]
                };
                for i in 0..N {
                    // SAFETY: a row has dim elements. A checked index costs 5 %.
                    let x = s.splat(unsafe { *rows[i].as_ptr().add(d) }.to_f32());
                    sums[i] = [s.mul_add(x, map[0], sums[i][0]), s.mul_add(x, map[1], sums[i][1])];
                }
            }
            for i in 0..N {
                // SAFETY: a row has rank elements, and c + 2 LANES is at most that.
                unsafe {
                    O::store(s, out[i].add(c), sums[i][0]);
                    O::store(s, out[i].add(c + S::LANES), sums[i][1]);
                }
            }
        }
        if wide < rank {
            for (i, row) in rows.into_iter().enumerate() {
                project_columns(self.map, row, wide, &mut self.out.row_mut(first + i)[wide..]);
            }
        }
    }
}

/// Projects a row to components `first..first + out.len()`.
#[inline(always)]
fn project_columns<E: Element, O: Element>(map: Map<'_>, row: &[E], first: usize, out: &mut [O]) {
    for (chunk, out) in out.chunks_mut(COLUMNS).enumerate() {
        let mut sums = [0.0; COLUMNS];
        let sums = &mut sums[..out.len()];
        for (x, map) in row.iter().zip(map.columns.chunks_exact(map.rank)) {
            let x = x.to_f32();
            sums.iter_mut().zip(&map[first + chunk * COLUMNS..]).for_each(|(sum, m)| *sum += x * m);
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = O::from_f32(*sum));
    }
}

/// Components summed at a time.
const COLUMNS: usize = 64;

struct Reconstruct<'a, 'b> {
    map: Map<'a>,
    rows: &'a [f32],
    out: &'b mut [f32],
}

impl Kernel for Reconstruct<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Map { columns, dim, rank } = self.map;
        for (row, out) in self.rows.chunks_exact(rank).zip(self.out.chunks_exact_mut(dim)) {
            for (map, out) in columns.chunks_exact(rank).zip(out) {
                *out = dot(row, map);
            }
        }
    }

    /// The scalar code, which the compiler vectorizes for the instruction set.
    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.scalar();
    }
}
