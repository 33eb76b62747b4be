//! Lloyd's k-means on the points of one subspace.

use alloc::vec;
use alloc::vec::Vec;

use crate::assign::{Nearest, Tile, Vectors, assign, assign_from, fill_tile};
use crate::codebook::{Subspace, arrange, largest};
use crate::pack::pack_run;
use crate::rng::SplitMix64;
use crate::simd::BLOCK;
use crate::{Backend, Element};

/// The points of one subspace in the tiles of 64 that [`assign`] reads.
pub(crate) struct Points {
    tiles: Vec<f32>, // (n / 64 rounded up, dsub, 64)
    dsub: usize,
    n: usize,
    squares: Vec<f64>, // (n / 64 rounded up,): sums of squares
}

/// When the iterations of [`Points::cluster`] end.
pub(crate) struct Limits<'a> {
    pub iterations: usize,
    /// Stops when the error falls by no more than this fraction of itself.
    pub tolerance: f64,
    /// Called before every iteration but the first; `true` stops.
    pub time_is_up: Option<&'a (dyn Fn() -> bool + Sync)>,
}

/// What [`Points::cluster`] returns.
pub(crate) struct Clusters {
    pub centroids: Vec<f32>, // (k, dsub)
    pub error: f64,          // summed squared error of the last assignment
    pub iterations: usize,
}

/// Centroids arranged for [`assign`].
struct Arranged {
    columns: Vec<f32>,
    half_norms: Vec<f32>,
    largest: f32,
}

impl Arranged {
    fn new(centroids: &[f32], dsub: usize) -> Self {
        let (mut columns, mut half_norms) = (vec![0.0; centroids.len()], vec![0.0; centroids.len() / dsub]);
        arrange(centroids, dsub, &mut columns, &mut half_norms);
        let largest = largest(&half_norms);
        Self { columns, half_norms, largest }
    }

    fn subspace(&self) -> Subspace<'_> {
        Subspace { columns: &self.columns, half_norms: &self.half_norms, largest: self.largest }
    }
}

impl Points {
    /// Components `first..first + dsub` of vectors.
    pub fn of_subspace<E: Element>(
        backend: Backend,
        vectors: Vectors<'_, E>,
        first: usize,
        dsub: usize,
    ) -> Self {
        let n = vectors.len();
        let (mut tiles, mut squares) =
            (vec![0.0; n.div_ceil(BLOCK) * BLOCK * dsub], vec![0.0; n.div_ceil(BLOCK)]);
        let each = tiles.chunks_exact_mut(BLOCK * dsub).zip(&mut squares);
        for (at, (tile, squares)) in (0..n).step_by(BLOCK).zip(each) {
            *squares = fill_tile(backend, vectors, at..n.min(at + BLOCK), first, tile);
        }
        Self { tiles, dsub, n, squares }
    }

    fn point(&self, i: usize) -> impl Iterator<Item = f32> + '_ {
        self.tiles[i / BLOCK * BLOCK * self.dsub..][..BLOCK * self.dsub][i % BLOCK..]
            .iter()
            .step_by(BLOCK)
            .copied()
    }

    /// Assigns every point, a tile at a time; `visit` receives the tile, its number of points and their
    /// centroids. `last` is the previous assignment, or empty, and is replaced by this one. Returns the
    /// summed squared error.
    fn assign(
        &self,
        backend: Backend,
        to: &Arranged,
        last: &mut Vec<[u32; BLOCK]>,
        mut visit: impl FnMut(&[f32], usize, &[u32; BLOCK]),
    ) -> f64 {
        let mut nearest = Nearest::NONE;
        let mut error = 0.0;
        let tiles = self.tiles.chunks_exact(BLOCK * self.dsub).zip(&self.squares);
        for (i, (values, &squares)) in tiles.enumerate() {
            let tile = Tile { values, points: BLOCK.min(self.n - i * BLOCK), squares };
            error += match last.get_mut(i) {
                Some(last) => {
                    nearest.index = *last;
                    let error = assign_from(backend, to.subspace(), tile, &mut nearest);
                    *last = nearest.index;
                    error
                }
                None => {
                    let error = assign(backend, to.subspace(), tile, &mut nearest);
                    last.push(nearest.index);
                    error
                }
            };
            visit(values, tile.points, &nearest.index);
        }
        error.max(0.0)
    }

    /// The points' nearest centroids as packed runs, one per 64 points, and the summed squared error.
    pub fn encode(&self, backend: Backend, centroids: &[f32], nbits: u32) -> (Vec<u8>, f64) {
        let mut runs = vec![0; self.n.div_ceil(BLOCK) * 8 * nbits as usize];
        let mut rest = runs.chunks_exact_mut(8 * nbits as usize);
        let error =
            self.assign(backend, &Arranged::new(centroids, self.dsub), &mut vec![], |_, points, index| {
                let mut codes = index.map(|c| c as u16);
                codes[points..].fill(0);
                if let Some(run) = rest.next() {
                    pack_run(&codes, nbits, run);
                }
            });
        (runs, error)
    }

    /// `k` different points in random order; with fewer than `k` points they repeat.
    pub fn random_start(&self, k: usize, rng: &mut SplitMix64) -> Vec<f32> {
        let order = rng.sample(self.n, k);
        (0..k).flat_map(|c| self.point(order[c % order.len()])).collect()
    }

    /// k-means++ (Arthur, Vassilvitskii, SODA 2007): each next start is drawn with a probability proportional
    /// to its squared distance from the starts drawn so far.
    pub fn plus_plus_start(&self, k: usize, rng: &mut SplitMix64) -> Vec<f32> {
        let mut centroids: Vec<f32> = self.point(rng.below(self.n)).collect();
        let mut distances = vec![f32::MAX; self.n]; // finite, so that the total is
        while centroids.len() < k * self.dsub {
            let last = &centroids[centroids.len() - self.dsub..];
            self.lower_distances(last, &mut distances);
            let total: f64 = distances.iter().map(|&x| f64::from(x)).sum();
            let mut at = rng.unit() * total;
            let drawn = distances.iter().position(|&distance| {
                at -= f64::from(distance);
                at < 0.0
            });
            // All distances are 0: every point coincides with a start.
            let drawn = drawn.unwrap_or_else(|| rng.below(self.n));
            centroids.extend(self.point(drawn));
        }
        centroids
    }

    /// Sets every point's squared distance to the minimum of itself and that to `centroid`.
    fn lower_distances(&self, centroid: &[f32], distances: &mut [f32]) {
        for (tile, distances) in self.tiles.chunks_exact(BLOCK * self.dsub).zip(distances.chunks_mut(BLOCK)) {
            let mut squares = [0.0; BLOCK];
            for (column, y) in tile.chunks_exact(BLOCK).zip(centroid) {
                for (square, x) in squares.iter_mut().zip(column) {
                    *square += (x - y) * (x - y);
                }
            }
            for (distance, square) in distances.iter_mut().zip(squares) {
                *distance = distance.min(square);
            }
        }
    }

    /// Lloyd's iterations from `centroids` (k, dsub).
    ///
    /// A centroid without points splits the largest cluster, as in faiss: it becomes a copy of that centroid,
    /// shifted by a thousandth. That may raise the error, and it never separates points that differ
    /// orthogonally to the shift. Therefore, when the error no longer falls, centroids without points are
    /// moved to the points farthest from their own centroids instead, which always lowers the error, and
    /// training ends when it stops falling again.
    pub fn cluster(&self, backend: Backend, mut centroids: Vec<f32>, limits: &Limits<'_>) -> Clusters {
        let dsub = self.dsub;
        let k = centroids.len() / dsub;
        let mut error = f64::INFINITY;
        let mut last = vec![];
        let mut iterations = 0;
        let (mut split, mut relocating) = (false, false);
        while iterations < limits.iterations {
            if iterations > 0 && limits.time_is_up.is_some_and(|time_is_up| time_is_up()) {
                break;
            }
            iterations += 1;
            let mut sums = vec![0.0_f64; k * dsub];
            let mut counts = vec![0_usize; k];
            let now =
                self.assign(backend, &Arranged::new(&centroids, dsub), &mut last, |tile, points, index| {
                    for (i, &c) in index[..points].iter().enumerate() {
                        let c = c as usize;
                        counts[c] += 1;
                        for (sum, column) in sums[c * dsub..][..dsub].iter_mut().zip(tile.chunks_exact(BLOCK))
                        {
                            *sum += f64::from(column[i]);
                        }
                    }
                });
            for (c, &count) in counts.iter().enumerate().filter(|&(_, &count)| count > 0) {
                for (y, sum) in centroids[c * dsub..][..dsub].iter_mut().zip(&sums[c * dsub..]) {
                    *y = (sum / count as f64) as f32;
                }
            }
            let converged = error - now <= limits.tolerance * now;
            error = now;
            // With fewer points than centroids, the others keep their initial values.
            let empty = self.n > k && counts.contains(&0);
            if converged && (relocating || !(split || empty)) {
                break;
            }
            relocating |= converged;
            split = empty && !relocating;
            if split {
                split_into_empty(&mut centroids, dsub, &mut counts);
            } else if empty {
                self.relocate_empty(&mut centroids, &counts, &last);
            }
        }
        Clusters { centroids, error, iterations }
    }

    /// Moves each centroid without points to the point farthest from its own centroid (`last`) and from the
    /// centroids already moved. Stops at a distance of 0.
    fn relocate_empty(&self, centroids: &mut [f32], counts: &[usize], last: &[[u32; BLOCK]]) {
        let own = last.as_flattened().iter().map(|&c| c as usize * self.dsub).take(self.n).enumerate();
        let mut distances: Vec<f32> = own
            .map(|(i, c)| self.point(i).zip(&centroids[c..]).map(|(x, y)| (x - y) * (x - y)).sum())
            .collect();
        for c in (0..counts.len()).filter(|&c| counts[c] == 0) {
            let farthest = (0..self.n).rev().max_by(|&a, &b| distances[a].total_cmp(&distances[b]));
            let Some(farthest) = farthest.filter(|&i| distances[i] > 0.0) else { break };
            let centroid = &mut centroids[c * self.dsub..][..self.dsub];
            centroid.iter_mut().zip(self.point(farthest)).for_each(|(y, x)| *y = x);
            self.lower_distances(centroid, &mut distances);
        }
    }
}

fn split_into_empty(centroids: &mut [f32], dsub: usize, counts: &mut [usize]) {
    const NUDGE: f32 = 1.0 / 1024.0;
    for c in 0..counts.len() {
        if counts[c] > 0 {
            continue;
        }
        let largest = (0..counts.len()).rev().max_by_key(|&c| counts[c]).unwrap_or(0);
        for d in 0..dsub {
            let y = centroids[largest * dsub + d];
            let sign = if d % 2 == 0 { 1.0 } else { -1.0 };
            // The largest values would overflow if shifted away from zero.
            centroids[c * dsub + d] = (y * (1.0 + sign * NUDGE)).clamp(f32::MIN, f32::MAX);
            centroids[largest * dsub + d] = (y * (1.0 - sign * NUDGE)).clamp(f32::MIN, f32::MAX);
        }
        counts[c] = counts[largest] / 2;
        counts[largest] -= counts[c];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(values: &[f32], dsub: usize) -> Points {
        let rows = crate::Rows::contiguous(values, dsub).unwrap();
        Points::of_subspace(Backend::detect(), Vectors { rows, chosen: None }, 0, dsub)
    }

    fn clusters(values: &[f32], dsub: usize, k: usize, iterations: usize) -> Clusters {
        let points = points(values, dsub);
        let start = points.random_start(k, &mut SplitMix64(7));
        points.cluster(Backend::detect(), start, &Limits { iterations, tolerance: 0.0, time_is_up: None })
    }

    #[test]
    fn separated_clusters_are_found() {
        let values: Vec<f32> = (0..300).map(|i| (i % 3) as f32 * 100.0 + (i / 3) as f32 * 0.01).collect();
        let Clusters { mut centroids, error, .. } = clusters(&values, 1, 4, 20);
        centroids.sort_by(f32::total_cmp);
        assert!(centroids[0] < 1.0 && centroids[3] > 200.0, "{centroids:?}");
        assert!(error < 100.0 * 3.0 * 0.09, "{error}");
    }

    #[test]
    fn plus_plus_starts_in_every_cluster() {
        let values: Vec<f32> = (0..300).map(|i| (i % 3) as f32 * 100.0 + (i / 3) as f32 * 0.01).collect();
        let mut start = points(&values, 1).plus_plus_start(3, &mut SplitMix64(3));
        start.sort_by(f32::total_cmp);
        assert!(start[0] < 2.0 && start[1] > 99.0 && start[1] < 102.0 && start[2] > 199.0, "{start:?}");
    }

    #[test]
    fn fewer_points_than_centroids_cost_nothing() {
        assert!(clusters(&[1.0, 2.0, 3.0], 1, 8, 5).error < 1e-10);
        let points = points(&[1.0, 2.0, 3.0], 1);
        assert_eq!(points.plus_plus_start(8, &mut SplitMix64(3)).len(), 8);
    }

    #[test]
    fn equal_points_leave_no_nan() {
        let Clusters { centroids, error, .. } = clusters(&[0.0; 64], 2, 4, 5);
        assert!(error == 0.0 && centroids.iter().all(|y| y.is_finite()));
    }
}
