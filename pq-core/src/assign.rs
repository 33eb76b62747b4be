//! The nearest centroid of each of 64 points, the inner loop of training and encoding.
//!
//! A tile holds 64 points of one subspace component by component, (dsub, 64), so that a register holds one
//! component of several points and the minimum over centroids is kept lane by lane: no reduction across lanes
//! at any `dsub`. A block of centroids is multiplied against four registers of points at a time. Floor: `64 *
//! ksub * dsub` fused multiply-adds, plus three operations per distance to keep the minimum.

use crate::codebook::Subspace;
use crate::pack::BLOCK;
use crate::simd::{Kernel, Simd};
use crate::{Backend, Element};

/// The result of [`assign`] for each point of a tile.
pub(crate) struct Nearest {
    /// Index of the centroid.
    pub index: [u32; BLOCK],
    /// `|centroid|^2 / 2 - <point, centroid>`; half the squared distance less half of `|point|^2`.
    pub distance: [f32; BLOCK],
}

impl Nearest {
    pub const NONE: Self = Self { index: [0; BLOCK], distance: [f32::INFINITY; BLOCK] };
}

/// Fills `tile` (dsub, 64) with component `first` and on of up to 64 rows of `dim` components; a NaN or an
/// infinity becomes 0, and so do missing rows. Returns the sum of squares.
pub(crate) fn fill_tile<E: Element>(rows: &[E], dim: usize, first: usize, tile: &mut [f32]) -> f64 {
    let n = rows.len() / dim;
    let mut squares = 0.0;
    for (i, row) in rows.chunks_exact(dim).enumerate() {
        for (d, column) in tile.chunks_exact_mut(BLOCK).enumerate() {
            let x = finite(row[first + d]);
            column[i] = x;
            squares += f64::from(x) * f64::from(x);
        }
    }
    for column in tile.chunks_exact_mut(BLOCK) {
        column[n..].fill(0.0);
    }
    squares
}

/// The points of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub values: &'a [f32], // (dsub, 64), every element finite
    pub points: usize,     // of the 64, the first
    pub squares: f64,      // the sum of all squares
}

/// Finds the nearest centroid of each point of a tile: the first minimum of `|c|^2 / 2 - <x, c>`, where the
/// products are subtracted in ascending component order, or of the squared distance in `f64` where they may
/// overflow. Returns the summed squared error.
pub(crate) fn assign(backend: Backend, subspace: Subspace<'_>, tile: Tile<'_>, nearest: &mut Nearest) -> f64 {
    if !fits_f32(subspace, tile.squares) {
        return assign_wide(subspace, tile, &mut nearest.index);
    }
    *nearest = Nearest::NONE;
    backend.run(Assign { subspace, tile: tile.values, nearest });
    summed_error(tile, nearest)
}

/// As [`assign`], where `nearest.index` holds a guess, such as the centroid of the previous iteration. A good
/// guess saves most of the updates of the minimum in codebooks with many centroids. The guess wins ties.
#[cfg(feature = "alloc")]
pub(crate) fn assign_from(
    backend: Backend,
    subspace: Subspace<'_>,
    tile: Tile<'_>,
    nearest: &mut Nearest,
) -> f64 {
    if subspace.ksub() < RARE || !fits_f32(subspace, tile.squares) {
        return assign(backend, subspace, tile, nearest);
    }
    for (i, (distance, index)) in nearest.distance.iter_mut().zip(&mut nearest.index).enumerate() {
        *distance = subspace.half_norms[*index as usize];
        for (d, column) in tile.values.chunks_exact(BLOCK).enumerate() {
            *distance -= column[i] * subspace.column(d)[*index as usize];
        }
    }
    backend.run(Assign { subspace, tile: tile.values, nearest });
    summed_error(tile, nearest)
}

fn summed_error(tile: Tile<'_>, nearest: &Nearest) -> f64 {
    tile.squares + nearest.distance[..tile.points].iter().map(|&x| 2.0 * f64::from(x)).sum::<f64>()
}

/// Whether no term or sum of a distance can overflow `f32`: `|<x, c>|` is at most `|x| |c|`, also for a
/// subset of the components.
fn fits_f32(subspace: Subspace<'_>, squares: f64) -> bool {
    const LIMIT: f64 = f32::MAX as f64 / 4.0;
    let largest = f64::from(subspace.largest);
    largest < LIMIT && 2.0 * largest * squares < LIMIT * LIMIT
}

/// [`assign`] by squared distances in `f64`, which cannot overflow for `f32` components.
fn assign_wide(subspace: Subspace<'_>, tile: Tile<'_>, index: &mut [u32; BLOCK]) -> f64 {
    let mut error = 0.0;
    for (i, index) in index.iter_mut().enumerate() {
        let x = tile.values[i..].iter().step_by(BLOCK).copied();
        let (nearest, square) = nearest_wide(subspace, x);
        *index = nearest;
        error += if i < tile.points { square } else { 0.0 };
    }
    error
}

/// The first of the nearest centroids to `x`, in `f64`, and the squared distance.
fn nearest_wide(subspace: Subspace<'_>, x: impl Iterator<Item = f32> + Clone) -> (u32, f64) {
    let mut best = (0, f64::INFINITY);
    for c in 0..subspace.ksub() {
        let components = x.clone().enumerate();
        let square = components
            .map(|(d, x)| {
                let difference = f64::from(x) - f64::from(subspace.column(d)[c]);
                difference * difference
            })
            .sum();
        best = if square < best.1 { (c as u32, square) } else { best };
    }
    best
}

/// The minimum number of centroids at which a branch on whether any point of a register found a nearer
/// centroid pays off. At 4,096 centroids it saves a tenth of the time, with a guess a fifth. At 256 and below
/// it costs more than it saves.
const RARE: usize = 1024;

/// Updates `nearest` where a centroid is nearer.
struct Assign<'a> {
    subspace: Subspace<'a>,
    tile: &'a [f32], // (dsub, 64)
    nearest: &'a mut Nearest,
}

impl Kernel for Assign<'_> {
    type Output = ();

    fn scalar(self) {
        let ksub = self.subspace.ksub();
        for c in 0..ksub {
            let mut distances = [self.subspace.half_norms[c]; BLOCK];
            for (d, x) in self.tile.chunks_exact(BLOCK).enumerate() {
                let y = self.subspace.columns[d * ksub + c];
                for (distance, x) in distances.iter_mut().zip(x) {
                    *distance -= x * y;
                }
            }
            for (i, &distance) in distances.iter().enumerate() {
                if distance < self.nearest.distance[i] {
                    self.nearest.distance[i] = distance;
                    self.nearest.index[i] = c as u32;
                }
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        match (self.subspace.ksub() >= RARE, S::WIDE && self.subspace.ksub() >= 4) {
            (true, true) => self.of_dsub::<S, 4, true>(s),
            (true, false) => self.of_dsub::<S, 2, true>(s),
            (false, true) => self.of_dsub::<S, 4, false>(s),
            (false, false) => self.of_dsub::<S, 2, false>(s),
        }
    }
}

impl Assign<'_> {
    /// A known dsub keeps the points of small subspaces in registers.
    #[inline(always)]
    fn of_dsub<S: Simd, const C: usize, const SKIP: bool>(self, s: S) {
        match self.tile.len() / BLOCK {
            1 => self.blocked::<S, C, 1, SKIP>(s),
            2 => self.blocked::<S, C, 2, SKIP>(s),
            4 => self.blocked::<S, C, 4, SKIP>(s),
            _ => self.blocked::<S, C, 0, SKIP>(s),
        }
    }

    /// `C` centroids at a time, which divides ksub; `D` is dsub, or 0 where it is not known. With `SKIP`, a
    /// block of centroids none of which is nearest to any of a register's points costs `C` minima and a
    /// comparison instead of `3 C` operations.
    #[inline(always)]
    fn blocked<S: Simd, const C: usize, const D: usize, const SKIP: bool>(self, s: S) {
        const POINTS: usize = 4; // registers of points at a time
        let ksub = self.subspace.ksub();
        let dsub = if D > 0 { D } else { self.tile.len() / BLOCK };
        let half_norms = self.subspace.half_norms.as_ptr();
        let columns = self.subspace.columns.as_ptr();
        for first in (0..BLOCK).step_by(POINTS * S::LANES) {
            let mut best = [(s.splat(0.0), s.splat_u32(0)); POINTS];
            for (v, (distance, index)) in best.iter_mut().enumerate() {
                let at = first + v * S::LANES;
                // SAFETY: at + LANES <= 64, the length of both arrays.
                unsafe {
                    *distance = s.load(self.nearest.distance.as_ptr().add(at));
                    *index = s.load_u32(self.nearest.index.as_ptr().add(at));
                }
            }
            for c in (0..ksub).step_by(C) {
                // SAFETY: C divides ksub (both are powers of two), so c + C <= ksub; `columns` is (dsub,
                // ksub), `tile` (dsub, 64), and first + POINTS * LANES <= 64 since LANES divides 16.
                unsafe {
                    let mut distances = [[s.splat(0.0); POINTS]; C];
                    for (i, distances) in distances.iter_mut().enumerate() {
                        *distances = [s.splat(*half_norms.add(c + i)); POINTS];
                    }
                    for d in 0..dsub {
                        let points = self.tile.as_ptr().add(d * BLOCK + first);
                        let centroids = columns.add(d * ksub + c);
                        for (i, distances) in distances.iter_mut().enumerate() {
                            let y = s.splat(*centroids.add(i));
                            for (v, distance) in distances.iter_mut().enumerate() {
                                *distance = s.neg_mul_add(s.load(points.add(v * S::LANES)), y, *distance);
                            }
                        }
                    }
                    for (v, best) in best.iter_mut().enumerate() {
                        if SKIP {
                            let mut least = best.0;
                            for distances in &distances {
                                least = s.min(distances[v], least);
                            }
                            if !s.any_less(least, best.0) {
                                continue;
                            }
                        }
                        for (i, distances) in distances.iter().enumerate() {
                            *best = s.keep_smaller(*best, distances[v], s.splat_u32((c + i) as u32));
                        }
                    }
                }
            }
            for (v, (distance, index)) in best.into_iter().enumerate() {
                let at = first + v * S::LANES;
                // SAFETY: at + LANES <= 64, the length of both arrays.
                unsafe {
                    s.store(self.nearest.distance.as_mut_ptr().add(at), distance);
                    s.store_u32(self.nearest.index.as_mut_ptr().add(at), index);
                }
            }
        }
    }
}

/// As [`assign`], for one point: components `x` of subspace `subspace`. Returns the index, and the squared
/// distance to that centroid.
pub(crate) fn assign_one<E: Element>(backend: Backend, subspace: Subspace<'_>, x: &[E]) -> (u32, f64) {
    let squares: f64 = x.iter().map(|&x| f64::from(finite(x)) * f64::from(finite(x))).sum();
    if !fits_f32(subspace, squares) {
        return nearest_wide(subspace, x.iter().map(|&x| finite(x)));
    }
    let (index, distance) = backend.run(AssignOne { subspace, x });
    (index, (squares + 2.0 * f64::from(distance)).max(0.0))
}

/// A NaN or an infinity becomes 0.
fn finite<E: Element>(x: E) -> f32 {
    let x = x.to_f32();
    if x.is_finite() { x } else { 0.0 }
}

struct AssignOne<'a, E> {
    subspace: Subspace<'a>,
    x: &'a [E], // (dsub,)
}

impl<E: Element> Kernel for AssignOne<'_, E> {
    type Output = (u32, f32);

    fn scalar(self) -> (u32, f32) {
        let mut best = (0, f32::INFINITY);
        for (c, &half_norm) in self.subspace.half_norms.iter().enumerate() {
            let mut distance = half_norm;
            for (d, &x) in self.x.iter().enumerate() {
                distance -= finite(x) * self.subspace.column(d)[c];
            }
            if distance < best.1 {
                best = (c as u32, distance);
            }
        }
        best
    }

    /// Lanes are centroids here: with one point there is nothing else to fill them.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> (u32, f32) {
        const REGISTERS: usize = 4;
        let ksub = self.subspace.ksub();
        if !ksub.is_multiple_of(REGISTERS * S::LANES) {
            return self.scalar();
        }
        let mut best = [(s.splat(f32::INFINITY), s.splat_u32(0)); REGISTERS];
        for c in (0..ksub).step_by(REGISTERS * S::LANES) {
            let half_norms = self.subspace.half_norms[c..].as_ptr();
            // SAFETY: REGISTERS * LANES centroids from c on exist, in `half_norms` and in every column.
            unsafe {
                let mut distances = [s.splat(0.0); REGISTERS];
                for (v, distance) in distances.iter_mut().enumerate() {
                    *distance = s.load(half_norms.add(v * S::LANES));
                }
                for (d, &x) in self.x.iter().enumerate() {
                    let (x, column) = (s.splat(finite(x)), self.subspace.columns[d * ksub + c..].as_ptr());
                    for (v, distance) in distances.iter_mut().enumerate() {
                        *distance = s.neg_mul_add(x, s.load(column.add(v * S::LANES)), *distance);
                    }
                }
                for (best, distance) in best.iter_mut().zip(distances) {
                    *best = s.keep_smaller(*best, distance, s.splat_u32((c / S::LANES) as u32));
                }
            }
        }
        let mut winner = (0, f32::INFINITY);
        for (v, (distance, row)) in best.into_iter().enumerate() {
            let (mut distances, mut rows) = ([f32::INFINITY; 16], [0; 16]);
            // SAFETY: LANES is at most 16.
            unsafe {
                s.store(distances.as_mut_ptr(), distance);
                s.store_u32(rows.as_mut_ptr(), row);
            }
            for (lane, (&distance, &row)) in distances.iter().zip(&rows).enumerate() {
                let c = (row as usize + v) * S::LANES + lane;
                if distance < winner.1 || (distance == winner.1 && c < winner.0) {
                    winner = (c, distance);
                }
            }
        }
        (winner.0 as u32, winner.1)
    }
}
