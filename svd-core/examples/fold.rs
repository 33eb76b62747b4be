//! Folds a rotation into `W_V` and `W_O`: values then arrive rotated, and their last components can be
//! dropped.

use svd_core::{Gram, NoRope, Rotation};

fn main() -> Result<(), svd_core::Error> {
    let (hidden, dim) = (8, 4);
    let weight =
        |seed: usize| -> Vec<f32> { (0..hidden * dim).map(|i| ((i * 7 + seed) as f32).sin()).collect() };
    let (w_v, w_o) = (weight(1), weight(2)); // (dim, hidden) and (hidden, dim): one head
    let apply = |weight: &[f32], x: &[f32]| -> Vec<f32> {
        weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };

    let (mut values, mut outputs) = (Gram::<NoRope>::new(dim)?, Gram::new(dim)?);
    for i in 0..256 {
        let x: Vec<f32> = (0..hidden).map(|d| ((i * hidden + d) as f32 * 1.7).sin()).collect();
        values.add_rows(&apply(&w_v, &x))?;
    }
    outputs.add_rows(&w_o)?; // what meets a value are the rows of W_O

    let rotation = Rotation::score_optimal(&values, &outputs)?;
    let x: Vec<f32> = (0..hidden).map(|d| d as f32 - 3.0).collect();
    println!("as it was  {:.3?}", apply(&w_o, &apply(&w_v, &x)));
    for rank in [4, 3, 2] {
        let (w_v, w_o) = (rotation.fold_basis(&w_v, rank)?, rotation.fold_output(&w_o, rank)?);
        println!("at rank {rank}  {:.3?}", apply(&w_o, &apply(&w_v, &x)));
    }
    Ok(())
}
