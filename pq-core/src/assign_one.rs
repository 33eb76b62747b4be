//! The nearest centroids of a single vector.
//!
//! Lanes are centroids here: with one point there is nothing else to fill them. Distances of a subspace stay
//! in registers where they fit, so that half norms and columns are read sequentially: at 8 bits and 128
//! components a vector reads 144 to 192 KiB from L2, which is fastest in that order.
//!
//! Floor: loads of the codebook alone take 0.93 us for 192 KiB and 0.70 us for 144 KiB on Zen 5, while each
//! of 64 vectors at a time takes 0.49 us at (64, 8) and 0.29 us at (16, 8).

use crate::assign::{Sum, finite, fits_f32, nearest_wide};
use crate::codebook::Subspace;
use crate::simd::{BLOCK, Kernel, Run, Simd};
use crate::{Backend, Codebook, Element};

/// As [`assign`](crate::assign::assign), for all subspaces of one vector: calls `set` with the first of up to
/// 64 subspaces and the indices of their nearest centroids. Returns the squared error.
pub(crate) fn assign_one<E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    vector: &[E],
    set: impl FnMut(usize, &[u32]),
) -> f64 {
    backend.run(AssignOne { codebook, vector, set })
}

struct AssignOne<'a, E, F> {
    codebook: &'a Codebook<'a>,
    vector: &'a [E], // (dim,)
    set: F,
}

/// Consecutive subspaces, and their part of the vector.
#[derive(Clone, Copy)]
struct Part<'a, E> {
    codebook: &'a Codebook<'a>,
    first: usize,
    x: &'a [E],
}

impl<'a, E> Part<'a, E> {
    fn subspaces(self) -> impl Iterator<Item = (Subspace<'a>, &'a [E])> {
        self.codebook.subspaces_from(self.first).zip(self.x.chunks_exact(self.codebook.shape().dsub()))
    }
}

impl<E: Element, F: FnMut(usize, &[u32])> AssignOne<'_, E, F> {
    /// Calls `nearest` for as many subspaces as fit into one call of `set`, or for each alone where distances
    /// may overflow. It writes the index of every subspace's nearest centroid and the distance.
    #[inline(always)]
    fn each(mut self, nearest: impl Fn(Part<'_, E>, &mut [u32], &mut [f32])) -> f64 {
        let (codebook, dsub, m) = (self.codebook, self.codebook.shape().dsub(), self.codebook.shape().m());
        // The sum of squares of the whole vector, computed in several partial sums, proves for nearly all
        // vectors that no distance overflows.
        let mut all_squares = Sum::default();
        for strip in self.vector.chunks(BLOCK) {
            let mut x = [0.0; BLOCK];
            strip.iter().zip(&mut x).for_each(|(&x, out)| *out = finite(x));
            all_squares.add(&x[..strip.len()], |x| x * x);
        }
        let all_squares = all_squares.total();
        let all_fit = fits_f32(codebook.subspace(0), all_squares);
        let mut error = if all_fit { all_squares } else { 0.0 };
        for first in (0..m).step_by(BLOCK) {
            let count = BLOCK.min(m - first);
            let (mut indices, mut distances) = ([0; BLOCK], [0.0; BLOCK]);
            let (indices, distances) = (&mut indices[..count], &mut distances[..count]);
            let part = Part { codebook, first, x: &self.vector[first * dsub..][..count * dsub] };
            if all_fit {
                nearest(part, indices, distances);
                let mut sum = Sum::default();
                sum.add(distances, |distance| distance);
                error += 2.0 * sum.total();
            } else {
                for (i, (subspace, x)) in part.subspaces().enumerate() {
                    let squares = x.iter().map(|&x| f64::from(finite(x)) * f64::from(finite(x))).sum();
                    error += if fits_f32(subspace, squares) {
                        let part = Part { codebook, first: first + i, x };
                        nearest(part, &mut indices[i..=i], &mut distances[i..=i]);
                        squares + 2.0 * f64::from(distances[i])
                    } else {
                        let square;
                        (indices[i], square) = nearest_wide(subspace, x.iter().map(|&x| finite(x)));
                        square
                    };
                }
            }
            (self.set)(first, indices);
        }
        error.max(0.0)
    }

    /// [`each`](Self::each) with `R` registers of centroids at a time; `WHOLE` if those are all centroids.
    #[inline(always)]
    fn lanes<S: Simd, const R: usize, const WHOLE: bool>(self, s: S) -> f64 {
        self.each(
            #[inline(always)]
            |part, indices, distances| nearest_of_part::<E, S, R, WHOLE>(s, part, indices, distances),
        )
    }
}

impl<E: Element, F: FnMut(usize, &[u32])> Kernel for AssignOne<'_, E, F> {
    type Output = f64;

    fn scalar(self) -> f64 {
        self.each(|part, indices, distances| {
            for (((subspace, x), index), least) in part.subspaces().zip(indices).zip(distances) {
                (*index, *least) = (0, f32::INFINITY);
                for (c, &half_norm) in subspace.half_norms.iter().enumerate() {
                    let mut distance = half_norm;
                    for (d, &x) in x.iter().enumerate() {
                        distance -= finite(x) * subspace.column(d)[c];
                    }
                    if distance < *least {
                        (*index, *least) = (c as u32, distance);
                    }
                }
            }
        })
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f64 {
        match (self.codebook.shape().ksub() / S::LANES, S::WIDE) {
            (0, _) => self.each(
                #[inline(always)]
                |part, indices, distances| {
                    for (((subspace, x), index), distance) in part.subspaces().zip(indices).zip(distances) {
                        (*index, *distance) = nearest_lane_by_lane(s, subspace, x);
                    }
                },
            ),
            (1, _) => self.lanes::<S, 1, true>(s),
            (2, _) => self.lanes::<S, 2, true>(s),
            (4, _) => self.lanes::<S, 4, true>(s),
            (8, true) => self.lanes::<S, 8, true>(s),
            (16, true) => self.lanes::<S, 16, true>(s),
            _ => self.lanes::<S, 4, false>(s),
        }
    }
}

/// Maximum lanes of an instruction set.
const MOST_LANES: usize = 16;

/// Subspaces whose minima across lanes are reduced together.
const FOUR: usize = 4;

/// Maximum components of [`FOUR`] subspaces.
const STRIP: usize = 64;

/// The nearest centroids in all subspaces of a part, by the lanes of `R` registers.
#[inline(always)]
fn nearest_of_part<E: Element, S: Simd, const R: usize, const WHOLE: bool>(
    s: S,
    part: Part<'_, E>,
    indices: &mut [u32],
    distances: &mut [f32],
) {
    let dsub = part.codebook.shape().dsub();
    let mut done = 0;
    // The distances of four subspaces take half of the registers.
    if WHOLE && FOUR * R <= (if S::WIDE { 16 } else { 8 }) && FOUR * dsub <= STRIP {
        let whole = STRIP / (FOUR * dsub) * FOUR;
        let strips =
            part.x.chunks(whole * dsub).zip(indices.chunks_mut(whole)).zip(distances.chunks_mut(whole));
        for ((strip, indices), distances) in strips {
            let mut x = [0.0; STRIP];
            strip.iter().zip(&mut x).for_each(|(&x, out)| *out = finite(x));
            let fours = x[..strip.len()].chunks_exact(FOUR * dsub).zip(indices.as_chunks_mut().0);
            for ((x, indices), distances) in fours.zip(distances.as_chunks_mut().0) {
                nearest_of_four::<S, R>(s, part.codebook, part.first + done, x, indices, distances);
                done += FOUR;
            }
        }
    }
    let rest = Part { first: part.first + done, x: &part.x[done * dsub..], ..part };
    for (((subspace, x), index), distance) in
        rest.subspaces().zip(&mut indices[done..]).zip(&mut distances[done..])
    {
        (*index, *distance) = nearest_of_lanes::<E, S, R, WHOLE>(s, subspace, x);
    }
}

/// The nearest centroids in four subspaces from `first` on, each of `R * LANES` centroids.
#[allow(clippy::needless_range_loop)] // iterators kept the registers in memory: four times as long
#[inline(always)]
fn nearest_of_four<S: Simd, const R: usize>(
    s: S,
    codebook: &Codebook<'_>,
    first: usize,
    x: &[f32], // (FOUR, dsub)
    indices: &mut [u32; FOUR],
    distances: &mut [f32; FOUR],
) {
    let dsub = x.len() / FOUR;
    let mut all = [[s.splat(0.0); R]; FOUR];
    let mut least = [s.splat(0.0); FOUR];
    for i in 0..FOUR {
        let x = &x[i * dsub..][..dsub];
        all[i] = distances_of::<S, R>(
            s,
            codebook.subspace(first + i),
            0,
            dsub,
            #[inline(always)]
            |d| x[d],
        );
        least[i] = all[i][0];
        for v in 1..R {
            least[i] = s.min(all[i][v], least[i]);
        }
    }
    let least = s.min_lanes(least, distances);
    for i in 0..FOUR {
        indices[i] = first_equal::<S, R>(s, &all[i], least[i]);
    }
}

/// Distances of `R` registers of centroids from `c` on, all of which exist.
#[inline(always)]
fn distances_of<S: Simd, const R: usize>(
    s: S,
    subspace: Subspace<'_>,
    c: usize,
    dsub: usize,
    x: impl Fn(usize) -> f32,
) -> [S::F32; R] {
    let ksub = subspace.half_norms.len();
    assert!(c + R * S::LANES <= ksub && subspace.columns.len() == dsub * ksub);
    let mut distances = [s.splat(0.0); R];
    // SAFETY: R * LANES centroids from c on exist, in `half_norms` and in every column.
    unsafe {
        for (v, distance) in distances.iter_mut().enumerate() {
            *distance = s.load(subspace.half_norms.as_ptr().add(c + v * S::LANES));
        }
        for d in 0..dsub {
            let (x, column) = (s.splat(x(d)), subspace.columns.as_ptr().add(d * ksub + c));
            for (v, distance) in distances.iter_mut().enumerate() {
                *distance = s.neg_mul_add(x, s.load(column.add(v * S::LANES)), *distance);
            }
        }
    }
    distances
}

/// The index of the first lane, over `R` registers, that equals `least`; at least one does.
#[inline(always)]
fn first_equal<S: Simd, const R: usize>(s: S, all: &[S::F32; R], least: S::F32) -> u32 {
    let mut at = 0;
    // N.B. From the last to the first, so that there is no branch.
    for group in (0..R).step_by(64 / S::LANES).rev() {
        let mut equal = 0_u64;
        for (v, &distance) in all[group..].iter().take(64 / S::LANES).enumerate() {
            equal |= u64::from(s.equal(distance, least)) << (v * S::LANES);
        }
        let first = (group * S::LANES) as u32 + equal.trailing_zeros();
        at = if equal == 0 { at } else { first };
    }
    at
}

/// The nearest centroid to one point, and its distance, for fewer centroids than lanes: all lanes compute the
/// same value, so that products are rounded as in all other forms.
#[inline(always)]
fn nearest_lane_by_lane<E: Element, S: Simd>(s: S, subspace: Subspace<'_>, x: &[E]) -> (u32, f32) {
    let mut best = (0, f32::INFINITY);
    for (c, &half_norm) in subspace.half_norms.iter().enumerate() {
        let mut distance = s.splat(half_norm);
        for (d, &x) in x.iter().enumerate() {
            distance = s.neg_mul_add(s.splat(finite(x)), s.splat(subspace.column(d)[c]), distance);
        }
        let mut lanes = [0.0; MOST_LANES];
        // SAFETY: no set has more lanes.
        unsafe { s.store(lanes.as_mut_ptr(), distance) };
        let distance = lanes[0];
        best = if distance < best.1 { (c as u32, distance) } else { best };
    }
    best
}

/// The same with one centroid per lane, `R` registers at a time: `R * LANES` divides ksub, and is ksub if
/// `WHOLE`.
#[inline(always)]
fn nearest_of_lanes<E: Element, S: Simd, const R: usize, const WHOLE: bool>(
    s: S,
    subspace: Subspace<'_>,
    x: &[E],
) -> (u32, f32) {
    let mut best = [(s.splat(f32::INFINITY), s.splat_u32(0)); R];
    let mut c = 0;
    while c < subspace.ksub() {
        let distances = distances_of::<S, R>(
            s,
            subspace,
            c,
            x.len(),
            #[inline(always)]
            |d| finite(x[d]),
        );
        for (best, distance) in best.iter_mut().zip(distances) {
            *best = if WHOLE {
                (distance, best.1)
            } else {
                s.keep_smaller(*best, distance, s.splat_u32(c as u32))
            };
        }
        if WHOLE {
            break;
        }
        c += R * S::LANES;
    }
    let mut distances = [s.splat(0.0); R];
    for (distance, best) in distances.iter_mut().zip(&best) {
        *distance = best.0;
    }
    let mut least = distances[0];
    for &distance in &distances[1..] {
        least = s.min(distance, least);
    }
    let least = s.min_lane(least);
    if WHOLE {
        return (first_equal::<S, R>(s, &distances, s.splat(least)), least);
    }
    let mut equal = 0_u64;
    for (v, &distance) in distances.iter().enumerate() {
        equal |= u64::from(s.equal(distance, s.splat(least))) << (v * S::LANES);
    }
    // Of equal distances the lowest index wins; ties are rare.
    let mut firsts = [0; 4 * MOST_LANES];
    for (v, (_, first)) in best.into_iter().enumerate() {
        // SAFETY: R is 4.
        unsafe { s.store_u32(firsts.as_mut_ptr().add(v * S::LANES), first) };
    }
    let mut index = u32::MAX;
    while equal != 0 {
        let at = equal.trailing_zeros();
        index = index.min(firsts[at as usize] + at);
        equal &= equal - 1;
    }
    (index, least)
}
