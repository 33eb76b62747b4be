//! Folds a rotation into `W_V` and `W_O`: values are then rotated, and their last components can be dropped.

use svd_core::{Gram, NoRope, Rotation, Rows};

fn main() -> Result<(), svd_core::Error> {
    let (hidden, dim, tokens) = (64, 16, 1000);
    // Weights whose directions differ in strength, as a trained head's do.
    let weight = |seed: usize, decay: f32| -> Vec<f32> {
        (0..hidden * dim).map(|i| noise(i + seed) * decay.powi((i / hidden) as i32)).collect()
    };
    let (w_v, w_o) = (weight(1, 0.8), weight(9001, 1.0)); // (dim, hidden) and (hidden, dim): one head
    let apply = |weight: &[f32], x: &[f32]| -> Vec<f32> {
        weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    let state = |t: usize| -> Vec<f32> { (0..hidden).map(|d| noise(20_000 + t * hidden + d)).collect() };

    let (mut values, mut outputs) = (Gram::<NoRope>::new(dim)?, Gram::new(dim)?);
    for t in 0..tokens {
        values.add_rows(Rows::from(&apply(&w_v, &state(t))[..]))?;
    }
    let (v_rows, o_rows) = (Rows::contiguous(&w_v, hidden)?, Rows::contiguous(&w_o, dim)?);
    outputs.add_rows(o_rows)?; // values are multiplied by the rows of W_O

    let rotation = Rotation::score_optimal(&values, &outputs)?;
    let x = state(tokens + 1); // not a calibration token
    let exact = apply(&w_o, &apply(&w_v, &x));
    for rank in [16, 12, 8, 4] {
        let (w_v, w_o) = (rotation.fold_basis(v_rows, rank)?, rotation.fold_output(o_rows, rank)?);
        let out = apply(&w_o, &apply(&w_v, &x));
        let error: f32 = out.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum();
        let size: f32 = exact.iter().map(|x| x * x).sum();
        println!("rank {rank:2} of {dim}: relative error {:.4}", (error / size).sqrt());
    }
    Ok(())
}

/// A hash as a number in -1..1.
fn noise(i: usize) -> f32 {
    let x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 23) as f32 - 1.0
}
