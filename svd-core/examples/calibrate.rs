//! Calibrates one head on its queries and keys, then stores keys and scores a query against them at lower
//! ranks.

use svd_core::{Gram, PostRope, Rotation, Rows, RowsMut};

const DIM: usize = 64;
const GROUP: usize = 4;

fn main() -> Result<(), svd_core::Error> {
    let (mut keys, mut queries) = (Gram::<PostRope>::new(DIM)?, Gram::new(DIM)?);
    for batch in 0..8 {
        // A model's attention after RoPE: keys (n, dim), queries (n, group, dim).
        let (batch_keys, batch_queries) = (rows(512, 512 * batch), rows(512 * GROUP, 10_000 + 2048 * batch));
        keys.add_rows(Rows::contiguous(&batch_keys, DIM)?)?;
        let batch_queries = Rows::contiguous(&batch_queries, GROUP * DIM)?;
        for head in 0..GROUP {
            queries.add_rows(batch_queries.columns(head * DIM, DIM)?)?; // every query head of the group
        }
    }
    let rotation = Rotation::score_optimal(&keys, &queries)?;
    let (key, query) = (rows(1, 5000), rows(1, 20_000)); // unseen
    let exact: f32 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
    println!("score {exact:.4}");
    for rank in [64, 48, 32, 16] {
        let (key_map, query_map) = (rotation.basis_map(rank)?, rotation.dual_map(rank)?);
        let (mut stored, mut projected) = (vec![0.0; rank], vec![0.0; rank]);
        key_map.view().project_into(Rows::from(&key[..]), RowsMut::from(&mut stored[..]))?;
        query_map.view().project_into(Rows::from(&query[..]), RowsMut::from(&mut projected[..]))?;
        let score: f32 = projected.iter().zip(&stored).map(|(q, k)| q * k).sum();
        let error = rotation.score_error(&keys, &queries, rank)?;
        println!("rank {rank:2} of {DIM}: score {score:.4}; relative error of all scores {error:.4}");
    }
    Ok(())
}

/// Rows of random components of decaying scale, mixed so that no component is small by itself.
fn rows(n: usize, seed: usize) -> Vec<f32> {
    let row = |i: usize| -> Vec<f32> {
        (0..DIM).map(|d| noise((i + seed) * DIM + d) * 0.95_f32.powi(d as i32)).collect()
    };
    let mix = |row: Vec<f32>| (0..DIM).map(move |d| row[d] + 0.5 * row[(d * 7 + 3) % DIM]);
    (0..n).flat_map(|i| mix(row(i))).collect()
}

/// A hash as a number in -1..1.
fn noise(i: usize) -> f32 {
    let x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 23) as f32 - 1.0
}
