// One index counts registers and the rows or columns that they hold.
#![allow(clippy::needless_range_loop)]

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use kv_attend::simd::{Kernel, Run, Simd, dot};

use crate::error::{check_len, count_rows};
use crate::{Backend, Element, Error};

/// The first columns of a rotation's basis or dual in `f32`, for the decode path: `y = x map`, (dim, rank)
/// row-major.
///
/// # Examples
/// ```
/// let map = svd_core::Map::new(&[1.0, 2.0], 2, 1)?; // two dimensions, rank 1
/// let mut y = [0.0];
/// map.project_into(&[3.0_f32, 4.0], &mut y)?;
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

    /// Projects rows: `out[i, c] = sum over d of rows[i, d] * map[d, c]`, added in `f32` in ascending `d`.
    ///
    /// # Shapes
    /// `rows` (n, dim); `out` (n, rank), fully written.
    /// # Errors
    /// [`Error::PartialRow`] if `out` does not consist of whole rows, [`Error::Length`]. `out` is then
    /// unchanged.
    /// # Cost
    /// n * dim * rank multiply-adds, no allocation.
    pub fn project_into<E: Element>(&self, rows: &[E], out: &mut [f32]) -> Result<(), Error> {
        self.project_into_with(Backend::detect(), rows, out)
    }

    /// [`project_into`](Self::project_into) on a given backend.
    ///
    /// # Errors
    /// As for [`project_into`](Self::project_into), and [`Error::BackendUnavailable`].
    pub fn project_into_with<E: Element>(
        &self,
        backend: Backend,
        rows: &[E],
        out: &mut [f32],
    ) -> Result<(), Error> {
        backend.check()?;
        let n = count_rows("out", out.len(), self.rank)?;
        check_len("rows", rows.len(), n.checked_mul(self.dim).ok_or(Error::TooLarge)?)?;
        backend.run(Project { map: *self, rows, out });
        Ok(())
    }

    /// Reconstructs rows: `out[i, d] = sum over c of rows[i, c] * map[d, c]`, added in `f32` in sixteen
    /// partial sums. Rows that a rotation's `basis_map` projected are reconstructed by its `dual_map`,
    /// exactly so at full rank.
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

    /// The borrowed map.
    #[must_use]
    pub fn view(&self) -> Map<'_> {
        Map { columns: &self.columns, dim: self.dim, rank: self.rank }
    }
}

struct Project<'a, 'b, E> {
    map: Map<'a>,
    rows: &'a [E],
    out: &'b mut [f32],
}

impl<E: Element> Kernel for Project<'_, '_, E> {
    type Output = ();

    fn scalar(self) {
        let Map { columns, dim, rank } = self.map;
        for (row, out) in self.rows.chunks_exact(dim).zip(self.out.chunks_exact_mut(rank)) {
            out.fill(0.0);
            for (x, map) in row.iter().zip(columns.chunks_exact(rank)) {
                let x = x.to_f32();
                out.iter_mut().zip(map).for_each(|(out, m)| *out += x * m);
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let Map { dim, rank, .. } = self.map;
        let mut rows = self.rows.chunks_exact(4 * dim);
        let mut out = self.out.chunks_exact_mut(4 * rank);
        for (rows, out) in rows.by_ref().zip(out.by_ref()) {
            project_rows::<S, E, 4>(s, self.map, rows, out);
        }
        let (rows, out) = (rows.remainder().chunks_exact(dim), out.into_remainder().chunks_exact_mut(rank));
        for (row, out) in rows.zip(out) {
            project_rows::<S, E, 1>(s, self.map, row, out);
        }
    }
}

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

/// Projects `N` rows at a time, so that each load of the map serves all of them.
#[inline(always)]
fn project_rows<S: Simd, E: Element, const N: usize>(s: S, map: Map<'_>, rows: &[E], out: &mut [f32]) {
    let Map { columns, dim, rank } = map;
    assert!(columns.len() == dim * rank && rows.len() == N * dim && out.len() == N * rank);
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
                let x = s.splat(rows[i * dim + d].to_f32());
                sums[i] = [s.mul_add(x, map[0], sums[i][0]), s.mul_add(x, map[1], sums[i][1])];
            }
        }
        for i in 0..N {
            // SAFETY: as above; i below N.
            unsafe {
                let out = out.as_mut_ptr().add(i * rank + c);
                s.store(out, sums[i][0]);
                s.store(out.add(S::LANES), sums[i][1]);
            }
        }
    }
    for (row, out) in rows.chunks_exact(dim).zip(out.chunks_exact_mut(rank)) {
        let out = &mut out[wide..];
        out.fill(0.0);
        for (x, map) in row.iter().zip(columns.chunks_exact(rank)) {
            let x = x.to_f32();
            out.iter_mut().zip(&map[wide..]).for_each(|(out, m)| *out += x * m);
        }
    }
}
