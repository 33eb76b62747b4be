//! Lloyd's k-means on the points of one subspace.

use alloc::vec;
use alloc::vec::Vec;

use crate::rng::SplitMix64;

/// `k` centroids (k, dsub) after at most `iterations` of Lloyd, and the sum of squared errors of the last assignment.
///
/// Starts from a random sample without repetition (the points in turn when there are no more than `k`). A centroid that
/// lost its points takes half of the largest cluster: it becomes a copy of that centroid moved by a thousandth, as in
/// faiss. Stops early when the error no longer falls.
pub(crate) fn kmeans(points: &[f32], dsub: usize, k: usize, iterations: usize, seed: u64) -> (Vec<f32>, f64) {
    let n = points.len() / dsub;
    let mut centroids = sample(points, dsub, k, &mut SplitMix64(seed));
    let mut error = f64::INFINITY;
    for _ in 0..iterations {
        let mut sums = vec![0.0_f64; k * dsub];
        let mut counts = vec![0_usize; k];
        let total = assign(points, dsub, &centroids, |c, x| {
            counts[c] += 1;
            for (sum, &x) in sums[c * dsub..][..dsub].iter_mut().zip(x) {
                *sum += f64::from(x);
            }
        });
        for (c, &count) in counts.iter().enumerate().filter(|&(_, &count)| count > 0) {
            for (y, sum) in centroids[c * dsub..][..dsub].iter_mut().zip(&sums[c * dsub..]) {
                *y = (sum / count as f64) as f32;
            }
        }
        if n > k {
            split_into_empty(&mut centroids, dsub, &mut counts);
        }
        let converged = total >= error;
        error = total.min(error);
        if converged {
            break;
        }
    }
    (centroids, error)
}

/// Calls `visit(centroid, point)` for every point with its nearest centroid, in order; returns the summed squared error.
///
/// Distances of one point to all centroids are computed component by component over a transposed table, so that the
/// inner loop runs over centroids and vectorizes at every `dsub`.
fn assign(points: &[f32], dsub: usize, centroids: &[f32], mut visit: impl FnMut(usize, &[f32])) -> f64 {
    let k = centroids.len() / dsub;
    let mut transposed = vec![0.0_f32; k * dsub]; // (dsub, k)
    let mut half_norms = vec![0.0_f32; k];
    for (c, centroid) in centroids.chunks_exact(dsub).enumerate() {
        for (d, &y) in centroid.iter().enumerate() {
            transposed[d * k + c] = y;
            half_norms[c] += 0.5 * y * y;
        }
    }
    let mut distances = vec![0.0_f32; k];
    let mut total = 0.0_f64;
    for x in points.chunks_exact(dsub) {
        distances.copy_from_slice(&half_norms);
        for (&x, row) in x.iter().zip(transposed.chunks_exact(k)) {
            for (distance, &y) in distances.iter_mut().zip(row) {
                *distance -= x * y;
            }
        }
        let best = first_minimum(&distances);
        let norm: f32 = x.iter().map(|x| x * x).sum();
        total += f64::from((norm + 2.0 * distances[best]).max(0.0));
        visit(best, x);
    }
    total
}

/// Index of the first minimum. Eight running minima keep the first pass free of a serial dependency.
fn first_minimum(values: &[f32]) -> usize {
    let mut lanes = [f32::INFINITY; 8];
    let (chunks, tail) = values.as_chunks::<8>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x < *lane { x } else { *lane };
        }
    }
    let min = lanes.iter().chain(tail).copied().fold(f32::INFINITY, f32::min);
    values.iter().position(|&x| x == min).unwrap_or(0)
}

fn sample(points: &[f32], dsub: usize, k: usize, rng: &mut SplitMix64) -> Vec<f32> {
    let n = points.len() / dsub;
    let mut order: Vec<usize> = (0..n).collect();
    let chosen = k.min(n);
    if n > k {
        for i in 0..k {
            order.swap(i, i + rng.below(n - i));
        }
    }
    (0..k).flat_map(|c| points[order[c % chosen] * dsub..][..dsub].iter().copied()).collect()
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
            centroids[c * dsub + d] = y * (1.0 + sign * NUDGE);
            centroids[largest * dsub + d] = y * (1.0 - sign * NUDGE);
        }
        counts[c] = counts[largest] / 2;
        counts[largest] -= counts[c];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separated_clusters_are_found() {
        let points: Vec<f32> = (0..300).map(|i| (i % 3) as f32 * 100.0 + (i / 3) as f32 * 0.01).collect();
        let (mut centroids, error) = kmeans(&points, 1, 4, 20, 7);
        centroids.sort_by(f32::total_cmp);
        assert!(centroids[0] < 1.0 && centroids[3] > 200.0, "{centroids:?}");
        assert!(error < 100.0 * 3.0 * 0.09, "{error}");
    }

    #[test]
    fn fewer_points_than_centroids_cost_nothing() {
        let (_, error) = kmeans(&[1.0, 2.0, 3.0], 1, 8, 5, 0);
        assert!(error < 1e-10);
    }

    #[test]
    fn equal_points_leave_no_nan() {
        let (centroids, error) = kmeans(&[0.0; 64], 2, 4, 5, 0);
        assert!(error == 0.0 && centroids.iter().all(|y| y.is_finite()));
    }
}
