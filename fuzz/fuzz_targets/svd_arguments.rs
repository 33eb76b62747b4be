//! Any rows and ranks: an error or a result, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use svd_core::{Gram, Rotation, attend_into, fold_input, project_into, rank_for_removal, removal_for_keep};

fuzz_target!(|input: (u8, Vec<f32>, Vec<f32>, f64)| {
    let (dim, stored, probes, part) = input;
    let dim = usize::from(dim % 24);
    let (Ok(mut a), Ok(mut b)) = (Gram::new(dim), Gram::new(dim)) else { return };
    let _ = a.add_rows(&stored);
    let _ = b.add_rows(&probes);
    for rotation in [Rotation::score_optimal(&a, &b), Rotation::stacked(&a, &b)].into_iter().flatten() {
        let Ok(rank) = rank_for_removal(rotation.sigma(), part) else { continue };
        assert!((1..=dim).contains(&rank));
        let _ = removal_for_keep(&[rotation.sigma()], part);
        let _ = fold_input(rotation.store(), &probes, dim);
        if stored.len() >= dim {
            project_into(rotation.probe(), &stored[..dim], &mut vec![0.0; rank]).unwrap();
        }
    }
    let n = stored.len() / dim;
    let mut out = vec![0.0; dim];
    let _ = attend_into(
        &stored[..dim.min(stored.len())],
        &stored[..n * dim],
        &stored[..n * dim],
        &mut vec![0.0; n],
        &mut out,
    );
});
