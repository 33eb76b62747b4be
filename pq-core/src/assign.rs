//! The nearest centroid of each of 64 points, the inner loop of training and encoding.
//!
//! A tile holds 64 points of one subspace component by component, (dsub, 64), so that a register holds one
//! component of several points and the minimum over centroids is kept lane by lane: there is no reduction
//! across lanes at any `dsub`. A block of centroids is multiplied against four registers of points at a time.
//! Floor: `64 * ksub * dsub` fused multiply-adds, plus three operations per distance to keep the minimum.

use core::ops::Range;

use crate::codebook::Subspace;
use crate::simd::{BLOCK, Kernel, Run, Simd, transpose_rows};
use crate::{Backend, Element, Rows};

/// The result of [`assign`] for each point of a tile.
pub(crate) struct Nearest {
    /// Index of the centroid.
    pub index: [u32; BLOCK],
    /// `|centroid|^2 / 2 - <point, centroid>`; half the squared distance minus half of `|point|^2`.
    pub distance: [f32; BLOCK],
}

impl Nearest {
    pub const NONE: Self = Self { index: [0; BLOCK], distance: [f32::INFINITY; BLOCK] };
}

/// Rows in order, or those of a list.
#[derive(Clone, Copy)]
pub(crate) struct Vectors<'a, E> {
    pub rows: Rows<'a, E>,
    pub chosen: Option<&'a [usize]>,
}

impl<'a, E> Vectors<'a, E> {
    /// Number of vectors.
    #[cfg(feature = "alloc")]
    pub fn len(&self) -> usize {
        self.chosen.map_or(self.rows.rows(), <[usize]>::len)
    }

    #[inline(always)]
    fn row(&self, i: usize) -> &'a [E] {
        self.rows.row(self.chosen.map_or(i, |chosen| chosen[i]))
    }
}

/// Fills `tile` (components, 64) with the components from `first` on of the vectors `range`, 1 to 64; a NaN
/// or an infinity becomes 0. The columns of missing points keep their values or get those of the last one.
/// Returns the sum of all squares.
pub(crate) fn fill_tile<E: Element>(
    backend: Backend,
    vectors: Vectors<'_, E>,
    range: Range<usize>,
    first: usize,
    tile: &mut [f32],
) -> f64 {
    backend.run(FillTile { vectors, range, first, tile })
}

struct FillTile<'a, 't, E> {
    vectors: Vectors<'a, E>,
    range: Range<usize>,
    first: usize,
    tile: &'t mut [f32],
}

/// Rows transposed at a time.
const AT_ONCE: usize = 4;

impl<E: Element> Kernel for FillTile<'_, '_, E> {
    type Output = f64;

    fn scalar(self) -> f64 {
        self.fill(|rows, tile| transpose_rows(rows, 0, tile))
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f64 {
        self.fill(
            #[inline(always)]
            |rows, tile| s.transpose_rows(rows, tile),
        )
    }
}

impl<E: Element> FillTile<'_, '_, E> {
    /// Fills the tile, four rows and some components at a time: `transpose` writes component `i` of the rows
    /// from `BLOCK * i` on.
    #[inline(always)]
    fn fill(self, transpose: impl Fn([&[f32]; AT_ONCE], &mut [f32])) -> f64 {
        let Self { vectors, range, first, tile } = self;
        let mut four = [[0.0; BLOCK]; AT_ONCE];
        for (i, tile) in tile.chunks_mut(BLOCK * BLOCK).enumerate() {
            let (first, components) = (first + i * BLOCK, tile.len() / BLOCK);
            for point in (0..range.len()).step_by(AT_ONCE) {
                for (i, out) in four.iter_mut().enumerate() {
                    let at = (range.start + point + i).min(range.end - 1);
                    let row = &vectors.row(at)[first..][..components];
                    row.iter().zip(out).for_each(|(&x, out)| *out = finite(x));
                }
                transpose(four.each_ref().map(|row| &row[..components]), &mut tile[point..]);
            }
        }
        squares_of(tile, range.len())
    }
}

/// The sum of the squares of the first points of a tile.
#[inline(always)]
pub(crate) fn squares_of(tile: &[f32], points: usize) -> f64 {
    let mut sum = Sum::default();
    for column in tile.chunks_exact(BLOCK) {
        sum.add(&column[..points], |x| x * x);
    }
    sum.total()
}

/// The sum of a function of values, in several partial sums: a single one would be bound by the latency of
/// its additions.
#[derive(Default)]
pub(crate) struct Sum {
    sums: [f64; 16],
    last: f64,
}

impl Sum {
    #[inline(always)]
    pub fn add(&mut self, values: &[f32], of: impl Fn(f64) -> f64) {
        let (whole, rest) = values.as_chunks::<16>();
        for values in whole {
            for (sum, &x) in self.sums.iter_mut().zip(values) {
                *sum += of(x.into());
            }
        }
        self.last += rest.iter().map(|&x| of(x.into())).sum::<f64>();
    }

    #[inline(always)]
    pub fn total(&self) -> f64 {
        let halves: [f64; 8] = core::array::from_fn(|i| self.sums[i] + self.sums[8 + i]);
        let [a, b, c, d, e, f, g, h] = halves;
        ((a + e) + (c + g)) + ((b + f) + (d + h)) + self.last
    }
}

/// The points of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub values: &'a [f32], // (dsub, 64), every element finite
    pub points: usize,     // number of valid columns, 1 to 64
    pub squares: f64,      // the sum of all squares
}

/// Finds the nearest centroid of each point of a tile: the first minimum of `|c|^2 / 2 - <x, c>`, where the
/// products are subtracted in ascending component order, or of the squared distance in `f64` where they may
/// overflow. Returns the summed squared error. A point's centroid does not depend on the other points.
#[cfg(feature = "alloc")]
#[inline(always)]
pub(crate) fn assign(on: impl Run, subspace: Subspace<'_>, tile: Tile<'_>, nearest: &mut Nearest) -> f64 {
    assign_fitting(on, subspace, tile, nearest);
    summed_error(subspace, tile, nearest)
}

/// [`assign`] where [`fits_f32`], without the error.
#[inline(always)]
pub(crate) fn assign_fitting(on: impl Run, subspace: Subspace<'_>, tile: Tile<'_>, nearest: &mut Nearest) {
    *nearest = Nearest::NONE;
    on.run(Assign { subspace, tile, nearest });
}

/// As [`assign`], where `nearest.index` holds a guess, such as the centroid of the previous iteration. With
/// many centroids, a good guess saves most updates of the minimum. The guess wins ties.
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
    backend.run(Assign { subspace, tile, nearest });
    summed_error(subspace, tile, nearest)
}

/// The summed squared error of an assignment. Vectors whose distances may have overflowed are assigned again,
/// in `f64`.
#[inline(never)]
pub(crate) fn summed_error(subspace: Subspace<'_>, tile: Tile<'_>, nearest: &mut Nearest) -> f64 {
    if fits_f32(subspace, tile.squares) {
        let mut distances = Sum::default();
        distances.add(&nearest.distance[..tile.points], |distance| distance);
        return tile.squares + 2.0 * distances.total();
    }
    let mut error = 0.0;
    for i in 0..tile.points {
        let x = tile.values[i..].iter().step_by(BLOCK).copied();
        let squares = x.clone().map(|x| f64::from(x) * f64::from(x)).sum();
        if fits_f32(subspace, squares) {
            error += (squares + 2.0 * f64::from(nearest.distance[i])).max(0.0);
        } else {
            let (index, square) = nearest_wide(subspace, x);
            nearest.index[i] = index;
            error += square;
        }
    }
    error
}

/// Whether no term or sum of a distance can overflow `f32`: `|<x, c>|` is at most `|x| |c|`, also for a
/// subset of the components.
pub(crate) fn fits_f32(subspace: Subspace<'_>, squares: f64) -> bool {
    const LIMIT: f64 = f32::MAX as f64 / 4.0;
    let largest = f64::from(subspace.largest);
    largest < LIMIT && 2.0 * largest * squares < LIMIT * LIMIT
}

/// The first of the nearest centroids to `x`, in `f64`, and the squared distance.
#[cold]
pub(crate) fn nearest_wide(subspace: Subspace<'_>, x: impl Iterator<Item = f32> + Clone) -> (u32, f64) {
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
    tile: Tile<'a>,
    nearest: &'a mut Nearest,
}

impl Kernel for Assign<'_> {
    type Output = ();

    fn scalar(self) {
        let ksub = self.subspace.ksub();
        for c in 0..ksub {
            let mut distances = [self.subspace.half_norms[c]; BLOCK];
            let distances = &mut distances[..self.tile.points];
            for (d, x) in self.tile.values.chunks_exact(BLOCK).enumerate() {
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
    fn vector<S: Simd>(mut self, s: S) {
        if self.subspace.ksub() >= RARE {
            // A call takes nothing here, and all kernels share the function.
            s.call(
                #[inline(always)]
                || {
                    if const { S::WIDE } {
                        self.of_dsub::<S, 4, true>(s);
                    } else {
                        self.of_dsub::<S, 2, true>(s);
                    }
                },
            );
        } else if const { !S::WIDE } {
            self.of_dsub::<S, 2, false>(s);
        } else if self.subspace.ksub() < 4 {
            for first in (0..self.tile.points).step_by(S::LANES) {
                blocked::<S, 1, 1, 2, 0, false>(s, self.subspace, self.tile.values, first, self.nearest);
            }
        } else {
            self.of_dsub::<S, 4, false>(s);
        }
    }
}

/// Minima of a single register of points, each over a part of the centroids: a single minimum would be bound
/// by the latency of its comparisons (16 keys at (64, 8) with AVX-512: 0.89 us a key instead of 0.59).
pub(crate) const CHAINS: usize = 4;

impl Assign<'_> {
    /// Processes several registers of points at a time: the largest number whose distances and minima stay in
    /// registers, then two and one for the rest. A known dsub keeps the points of small subspaces in
    /// registers.
    #[inline(always)]
    fn of_dsub<S: Simd, const C: usize, const SKIP: bool>(&mut self, s: S) {
        let Self { subspace, tile: Tile { values, points, .. }, ref mut nearest } = *self;
        let dsub = values.len() / BLOCK;
        // With 16 registers four at a time are 30 % slower than two at dsub 2, and 10 % faster at 8.
        let most = if S::WIDE || dsub > 4 { 4 } else { 2 };
        let in_chains = subspace.ksub() >= CHAINS * C;
        let mut first = 0;
        while first < points {
            let registers = (points - first).div_ceil(S::LANES).min(most);
            match (registers, dsub) {
                (1, 2) if const { S::WIDE } && in_chains => {
                    blocked::<S, 1, CHAINS, C, 2, SKIP>(s, subspace, values, first, nearest)
                }
                (1, _) if in_chains => {
                    blocked::<S, 1, CHAINS, C, 0, SKIP>(s, subspace, values, first, nearest)
                }
                (1, _) => blocked::<S, 1, 1, C, 0, SKIP>(s, subspace, values, first, nearest),
                (2 | 3, 1) if const { !S::WIDE } => {
                    blocked::<S, 2, 1, C, 1, SKIP>(s, subspace, values, first, nearest)
                }
                (2 | 3, 2) if const { !S::WIDE } => {
                    blocked::<S, 2, 1, C, 2, SKIP>(s, subspace, values, first, nearest)
                }
                // Inlined here, it took 1.5 times as long at (32, 8) in one of two programs.
                (2 | 3, _) => s.call(
                    #[inline(always)]
                    || blocked::<S, 2, 1, C, 0, SKIP>(s, subspace, values, first, nearest),
                ),
                (_, 1) if const { S::WIDE } => {
                    blocked::<S, 4, 1, C, 1, SKIP>(s, subspace, values, first, nearest)
                }
                (_, 2) if const { S::WIDE } => {
                    blocked::<S, 4, 1, C, 2, SKIP>(s, subspace, values, first, nearest)
                }
                (_, 4) if const { S::WIDE } => {
                    blocked::<S, 4, 1, C, 4, SKIP>(s, subspace, values, first, nearest)
                }
                _ => blocked::<S, 4, 1, C, 0, SKIP>(s, subspace, values, first, nearest),
            }
            first += S::LANES * if registers == 3 { 2 } else { registers };
        }
    }
}

/// Assigns `POINTS` registers of points, from column `first` of the tile `values` (dsub, 64) on, as
/// [`nearest_of_registers`].
#[inline(always)]
fn blocked<
    S: Simd,
    const POINTS: usize,
    const CHAINS: usize,
    const C: usize,
    const D: usize,
    const SKIP: bool,
>(
    s: S,
    subspace: Subspace<'_>,
    values: &[f32],
    first: usize,
    nearest: &mut Nearest,
) {
    assert!(first + POINTS * S::LANES <= BLOCK);
    let mut best = [(s.splat(f32::INFINITY), s.splat_u32(0)); POINTS];
    for (v, (distance, index)) in best.iter_mut().enumerate() {
        let at = first + v * S::LANES;
        // SAFETY: at + LANES <= 64, the length of both arrays.
        unsafe {
            *distance = s.load(nearest.distance.as_ptr().add(at));
            *index = s.load_u32(nearest.index.as_ptr().add(at));
        }
    }
    let best = nearest_of_registers::<S, POINTS, CHAINS, C, D, SKIP>(s, subspace, values, first, best);
    for (v, (distance, index)) in best.into_iter().enumerate() {
        let at = first + v * S::LANES;
        // SAFETY: at + LANES <= 64, the length of both arrays.
        unsafe {
            s.store(nearest.distance.as_mut_ptr().add(at), distance);
            s.store_u32(nearest.index.as_mut_ptr().add(at), index);
        }
    }
}

/// Replaces the distances and indices of `POINTS` registers of points by those of nearer centroids. `CHAINS`
/// minima of each point are over equal parts of the centroids, of which `C` at a time are compared; so
/// `CHAINS * C` divides ksub. `D` is dsub, or 0 where it is not known. With `SKIP`, a block of centroids
/// none of which is nearest to any of a register's points costs `C` minima and a comparison instead of `3 C`
/// operations.
#[inline(always)]
pub(crate) fn nearest_of_registers<
    S: Simd,
    const POINTS: usize,
    const CHAINS: usize,
    const C: usize,
    const D: usize,
    const SKIP: bool,
>(
    s: S,
    subspace: Subspace<'_>,
    values: &[f32],
    first: usize,
    start: [(S::F32, S::U32); POINTS],
) -> [(S::F32, S::U32); POINTS] {
    let ksub = subspace.ksub();
    let dsub = if D > 0 { D } else { values.len() / BLOCK };
    assert!(first + POINTS * S::LANES <= BLOCK && values.len() == dsub * BLOCK);
    let half_norms = subspace.half_norms.as_ptr();
    let columns = subspace.columns.as_ptr();
    let tile = values.as_ptr();
    let part = ksub / CHAINS;
    let mut best = [[(s.splat(f32::INFINITY), s.splat_u32(0)); POINTS]; CHAINS];
    best[0] = start;
    for c in (0..part).step_by(C) {
        for (chain, best) in best.iter_mut().enumerate() {
            let c = chain * part + c;
            // SAFETY: C divides the part (both are powers of two), so c + C <= ksub; `columns` is (dsub,
            // ksub), the tile (dsub, 64), and first + POINTS * LANES <= 64.
            unsafe {
                let mut distances = [[s.splat(0.0); POINTS]; C];
                for (i, distances) in distances.iter_mut().enumerate() {
                    *distances = [s.splat(*half_norms.add(c + i)); POINTS];
                }
                for d in 0..dsub {
                    let points = tile.add(d * BLOCK + first);
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
    }
    // Indices ascend from part to part, so the first of equal distances is kept.
    let mut nearest_of_all = best[0];
    for chain in &best[1..] {
        for (nearest, &(distance, index)) in nearest_of_all.iter_mut().zip(chain) {
            *nearest = s.keep_smaller(*nearest, distance, index);
        }
    }
    nearest_of_all
}

/// A NaN or an infinity becomes 0.
#[inline(always)]
pub(crate) fn finite<E: Element>(x: E) -> f32 {
    let x = x.to_f32();
    if x.is_finite() { x } else { 0.0 }
}
