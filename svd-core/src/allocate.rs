use alloc::vec;
use alloc::vec::Vec;

use crate::Error;

/// Which components go to which of `m` subspaces of a product quantizer, so that the products of their variances are as equal as
/// a greedy choice makes them: each component, largest first, joins the subspace with the smallest product that has room.
///
/// Returns the order of the components, subspace after subspace, for [`Rotation::reordered`](crate::Rotation::reordered).
///
/// # Errors
/// [`Error::Zero`] for no subspace or no component, [`Error::Length`] when `m` does not divide the components.
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
    crate::error::check_len("components", sigma.len(), sigma.len() / m * m)?;
    let room = sigma.len() / m;
    let mut largest_first: Vec<usize> = (0..sigma.len()).collect();
    largest_first.sort_by(|&a, &b| sigma[b].total_cmp(&sigma[a]));
    // A component that never varies must not make its subspace look empty for ever.
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
