//! Which components share a subspace, so that a product quantizer of rotated rows spends its bits evenly.

use alloc::vec;
use alloc::vec::Vec;

use crate::Error;
use crate::error::count_rows;

/// Assigns components to the `m` subspaces of a product quantizer so that the products of their variances are
/// nearly equal. Greedy: each component, in descending order, joins the subspace with the smallest product
/// among those with room.
///
/// Returns the order of the components, subspace after subspace, for
/// [`Rotation::reordered`](crate::Rotation::reordered).
///
/// # Errors
/// [`Error::Zero`] for no subspace or no component, [`Error::PartialRow`] if `m` does not divide the number
/// of components.
/// # Source
/// Ge, He, Ke, Sun, "Optimized Product Quantization", TPAMI 2014, 3.2 (eigenvalue allocation).
/// # Examples
/// ```
/// // Four components, two subspaces: the largest joins the smallest.
/// assert_eq!(svd_core::balanced_order(&[8.0, 4.0, 2.0, 1.0], 2)?, [0, 3, 1, 2]);
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn balanced_order(sigma: &[f64], m: usize) -> Result<Vec<usize>, Error> {
    if m == 0 || sigma.is_empty() {
        return Err(Error::Zero { what: if m == 0 { "subspaces" } else { "components" } });
    }
    let room = count_rows("components", sigma.len(), m)?;
    let mut largest_first: Vec<usize> = (0..sigma.len()).collect();
    largest_first.sort_by(|&a, &b| sigma[b].total_cmp(&sigma[a]));
    // Without a floor, a constant component would keep its subspace the smallest until it is full.
    let least = largest_first.first().map_or(0.0, |&c| sigma[c]) * 1e-9 + f64::MIN_POSITIVE;
    let mut subspaces: Vec<(f64, Vec<usize>)> = vec![(0.0, vec![]); m];
    for c in largest_first {
        let free = subspaces.iter_mut().filter(|(_, components)| components.len() < room);
        if let Some((log, components)) = free.min_by(|a, b| a.0.total_cmp(&b.0)) {
            *log += libm::log(sigma[c].max(least) / least);
            components.push(c);
        }
    }
    Ok(subspaces.into_iter().flat_map(|(_, components)| components).collect())
}
