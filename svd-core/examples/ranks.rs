//! Calibrates one head from rows, then prints the rank that each removal rate leaves.

use svd_core::{Gram, Rotation, rank_for_removal};

fn main() -> Result<(), svd_core::Error> {
    let dim = 64;
    let row = |i: usize| (0..dim).map(move |d| ((i * dim + d) as f32 * 0.73).sin() * 0.9_f32.powi(d as i32));
    let (mut keys, mut queries) = (Gram::new(dim)?, Gram::new(dim)?);
    for i in 0..2048 {
        keys.add_rows(&row(i).collect::<Vec<_>>())?;
        queries.add_rows(&row(i + 5000).collect::<Vec<_>>())?;
    }
    let rotation = Rotation::score_optimal(&keys, &queries)?;
    for removal in [0.0, 0.01, 0.02, 0.05, 0.1, 0.2] {
        println!("removal rate {removal:4}: rank {} of {dim}", rank_for_removal(rotation.sigma(), removal)?);
    }
    Ok(())
}
