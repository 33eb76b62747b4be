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
    set: &mut dyn FnMut(usize, &[u32]),
) -> f64 {
    match codebook.shape() {
        shape if shape.dim() <= FEW_COMPONENTS => {
            assign_staged::<E, FEW_COMPONENTS>(backend, codebook, vector, set)
        }
        shape if shape.dsub() <= STAGED => assign_staged::<E, STAGED>(backend, codebook, vector, set),
        _ => assign_long(codebook, vector, set),
    }
}

/// Maximum components that are staged.
const STAGED: usize = 1024;

/// Maximum components of a vector for which less is staged, since clearing the rest takes a tenth of the
/// time.
const FEW_COMPONENTS: usize = 256;

/// [`assign_one`] with up to `N` components at a time, at least a subspace, staged as `f32` and finite, so
/// that the loops are not compiled for every type of element.
fn assign_staged<E: Element, const N: usize>(
    backend: Backend,
    codebook: &Codebook<'_>,
    vector: &[E],
    set: &mut dyn FnMut(usize, &[u32]),
) -> f64 {
    let (dsub, m) = (codebook.shape().dsub(), codebook.shape().m());
    let mut x = [0.0; N];
    let most = N / dsub;
    let most = if most < BLOCK { most } else { most / BLOCK * BLOCK };
    let mut error = 0.0;
    for first in (0..m).step_by(most) {
        let x = &mut x[..most.min(m - first) * dsub];
        backend.run(Widen { from: &vector[first * dsub..], to: x });
        error += backend.run(AssignOne { codebook, first, x, set });
    }
    error
}

/// [`assign_one`] where a subspace has more than [`STAGED`] components, beyond any head: the portable form.
#[cold]
fn assign_long<E: Element>(codebook: &Codebook<'_>, vector: &[E], set: &mut dyn FnMut(usize, &[u32])) -> f64 {
    let dsub = codebook.shape().dsub();
    let mut error = 0.0;
    for (j, (subspace, x)) in codebook.subspaces().zip(vector.chunks_exact(dsub)).enumerate() {
        let x = x.iter().map(|&x| finite(x));
        let (mut index, mut distance) = nearest(subspace, x.clone());
        error += settle(subspace, x, &mut index, &mut distance);
        set(j, &[index]);
    }
    error.max(0.0)
}

/// Converts the leading elements; a NaN or an infinity becomes 0.
struct Widen<'a, 'b, E> {
    from: &'a [E],
    to: &'b mut [f32],
}

impl<E: Element> Kernel for Widen<'_, '_, E> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        self.from.iter().zip(self.to).for_each(|(&x, out)| *out = finite(x));
    }
}

struct AssignOne<'a, 'b> {
    codebook: &'a Codebook<'a>,
    first: usize,
    x: &'a [f32], // of the subspaces from `first` on, every element finite
    set: &'b mut dyn FnMut(usize, &[u32]),
}

/// Consecutive subspaces, and their part of the vector.
#[derive(Clone, Copy)]
struct Part<'a> {
    codebook: &'a Codebook<'a>,
    first: usize,
    x: &'a [f32],
}

impl<'a> Part<'a> {
    fn subspaces(self) -> impl Iterator<Item = (Subspace<'a>, &'a [f32])> {
        self.codebook.subspaces_from(self.first).zip(self.x.chunks_exact(self.codebook.shape().dsub()))
    }
}

impl AssignOne<'_, '_> {
    /// Calls `nearest` for as many subspaces as fit into one call of `set`. It writes the index of every
    /// subspace's nearest centroid and the distance, which are settled where distances may have overflowed.
    #[inline(always)]
    fn each(self, nearest: impl Fn(Part<'_>, &mut [u32], &mut [f32])) -> f64 {
        let Self { codebook, first, x, set } = self;
        let dsub = codebook.shape().dsub();
        // The sum of squares of all subspaces, computed in several partial sums, proves for nearly all
        // vectors that no distance overflows.
        let mut all_squares = Sum::default();
        all_squares.add(x, |x| x * x);
        let all_squares = all_squares.total();
        let all_fit = fits_f32(codebook.subspace(0), all_squares);
        let mut error = if all_fit { all_squares } else { 0.0 };
        for (first, x) in (first..).step_by(BLOCK).zip(x.chunks(BLOCK * dsub)) {
            let (mut indices, mut distances) = ([0; BLOCK], [0.0; BLOCK]);
            let count = x.len() / dsub;
            let (indices, distances) = (&mut indices[..count], &mut distances[..count]);
            let part = Part { codebook, first, x };
            nearest(part, indices, distances);
            if all_fit {
                let mut sum = Sum::default();
                sum.add(distances, |distance| distance);
                error += 2.0 * sum.total();
            } else {
                let each = part.subspaces().zip(indices.iter_mut().zip(distances));
                error += each
                    .map(|((subspace, x), (index, distance))| {
                        settle(subspace, x.iter().copied(), index, distance)
                    })
                    .sum::<f64>();
            }
            set(first, indices);
        }
        error.max(0.0)
    }
}

/// The squared error of a subspace. Its nearest centroid is found again, in `f64`, if distances may have
/// overflowed.
#[cold]
fn settle(
    subspace: Subspace<'_>,
    x: impl Iterator<Item = f32> + Clone,
    index: &mut u32,
    distance: &mut f32,
) -> f64 {
    let squares = x.clone().map(|x| f64::from(x) * f64::from(x)).sum();
    if fits_f32(subspace, squares) {
        return squares + 2.0 * f64::from(*distance);
    }
    let square;
    (*index, square) = nearest_wide(subspace, x);
    square
}

/// The definition of the nearest centroid, and its distance.
fn nearest(subspace: Subspace<'_>, x: impl Iterator<Item = f32> + Clone) -> (u32, f32) {
    let mut best = (0, f32::INFINITY);
    for (c, &half_norm) in subspace.half_norms.iter().enumerate() {
        let mut distance = half_norm;
        for (d, x) in x.clone().enumerate() {
            distance -= x * subspace.column(d)[c];
        }
        best = if distance < best.1 { (c as u32, distance) } else { best };
    }
    best
}

impl Kernel for AssignOne<'_, '_> {
    type Output = f64;

    fn scalar(self) -> f64 {
        self.each(|part, indices, distances| {
            for (((subspace, x), index), distance) in part.subspaces().zip(indices).zip(distances) {
                (*index, *distance) = nearest(subspace, x.iter().copied());
            }
        })
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f64 {
        self.each(
            #[inline(always)]
            |part, indices, distances| {
                let registers = part.codebook.shape().ksub() / S::LANES;
                match registers {
                    0 => {
                        for (((subspace, x), index), distance) in part.subspaces().zip(indices).zip(distances)
                        {
                            (*index, *distance) = nearest_lane_by_lane(s, subspace, x);
                        }
                    }
                    1 => nearest_of_part::<S, 1, true>(s, part, indices, distances),
                    2 => nearest_of_part::<S, 2, true>(s, part, indices, distances),
                    4 => nearest_of_part::<S, 4, true>(s, part, indices, distances),
                    _ => {
                        if const { S::WIDE } && registers == 8 {
                            nearest_of_part::<S, 8, true>(s, part, indices, distances);
                        } else if const { S::WIDE } && registers == 16 {
                            nearest_of_part::<S, 16, true>(s, part, indices, distances);
                        } else {
                            nearest_of_part::<S, 4, false>(s, part, indices, distances);
                        }
                    }
                }
            },
        )
    }
}

/// Maximum lanes of an instruction set.
const MOST_LANES: usize = 16;

/// Subspaces whose minima across lanes are reduced together.
const FOUR: usize = 4;

/// The nearest centroids in all subspaces of a part, by the lanes of `R` registers: `R * LANES` divides ksub,
/// and is ksub if `WHOLE`.
#[inline(always)]
fn nearest_of_part<S: Simd, const R: usize, const WHOLE: bool>(
    s: S,
    part: Part<'_>,
    indices: &mut [u32],
    distances: &mut [f32],
) {
    let dsub = part.codebook.shape().dsub();
    let mut done = 0;
    // The distances of four subspaces take half of the registers.
    if const { WHOLE && FOUR * R <= (if S::WIDE { 16 } else { 8 }) } {
        let fours = part.x.chunks_exact(FOUR * dsub).zip(indices.as_chunks_mut().0);
        for ((x, indices), distances) in fours.zip(distances.as_chunks_mut().0) {
            nearest_of_four::<S, R>(s, part.codebook, part.first + done, x, indices, distances);
            done += FOUR;
        }
    }
    let rest = Part { first: part.first + done, x: &part.x[done * dsub..], ..part };
    for (((subspace, x), index), distance) in
        rest.subspaces().zip(&mut indices[done..]).zip(&mut distances[done..])
    {
        (*index, *distance) = nearest_of_lanes::<S, R, WHOLE>(s, subspace, x);
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
        all[i] = distances_of::<S, R>(s, codebook.subspace(first + i), 0, x);
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
fn distances_of<S: Simd, const R: usize>(s: S, subspace: Subspace<'_>, c: usize, x: &[f32]) -> [S::F32; R] {
    let ksub = subspace.half_norms.len();
    assert!(c + R * S::LANES <= ksub && subspace.columns.len() == x.len() * ksub);
    let mut distances = [s.splat(0.0); R];
    // SAFETY: R * LANES centroids from c on exist, in `half_norms` and in every column.
    unsafe {
        for (v, distance) in distances.iter_mut().enumerate() {
            *distance = s.load(subspace.half_norms.as_ptr().add(c + v * S::LANES));
        }
        for (d, &x) in x.iter().enumerate() {
            let (x, column) = (s.splat(x), subspace.columns.as_ptr().add(d * ksub + c));
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
fn nearest_lane_by_lane<S: Simd>(s: S, subspace: Subspace<'_>, x: &[f32]) -> (u32, f32) {
    let mut best = (0, f32::INFINITY);
    for (c, &half_norm) in subspace.half_norms.iter().enumerate() {
        let mut distance = s.splat(half_norm);
        for (d, &x) in x.iter().enumerate() {
            distance = s.neg_mul_add(s.splat(x), s.splat(subspace.column(d)[c]), distance);
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
fn nearest_of_lanes<S: Simd, const R: usize, const WHOLE: bool>(
    s: S,
    subspace: Subspace<'_>,
    x: &[f32],
) -> (u32, f32) {
    let mut best = [(s.splat(f32::INFINITY), s.splat_u32(0)); R];
    let mut c = 0;
    while c < subspace.ksub() {
        let distances = distances_of::<S, R>(s, subspace, c, x);
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
