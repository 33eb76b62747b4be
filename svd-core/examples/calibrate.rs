//! Calibrates one head on its queries and keys, then stores a key and scores a query on it at half the rank.

use svd_core::{Gram, PostRope, Rotation, Rows, RowsMut};

fn main() -> Result<(), svd_core::Error> {
    let (dim, group) = (64, 4);
    // Batches of a model's attention, after the rotary embedding: keys (n, dim), queries (n, group, dim).
    let component = |i: usize, d: usize| ((i * 64 + d) as f32 * 0.73).sin() * 0.9_f32.powi(d as i32);
    let rows = |n: usize, seed: usize| -> Vec<f32> {
        (0..n).flat_map(|i| (0..dim).map(move |d| component(i + seed, d))).collect()
    };
    let (mut keys, mut queries) = (Gram::<PostRope>::new(dim)?, Gram::new(dim)?);
    for batch in 0..8 {
        keys.add_rows(&rows(512, 512 * batch))?;
        let batch_queries = rows(512 * group, 7000 + 2048 * batch);
        for head in 0..group {
            queries.add_columns(&batch_queries, group * dim, head * dim)?; // every query head of the group
        }
    }

    let rotation = Rotation::score_optimal(&keys, &queries)?;
    let rank = dim / 2;
    let (key_map, query_map) = (rotation.basis_map(rank)?, rotation.dual_map(rank)?);
    let (key, query) = (rows(1, 3), rows(1, 7001));
    let (mut stored, mut projected) = (vec![0.0; rank], vec![0.0; rank]);
    key_map.view().project_into(Rows::from(&key[..]), RowsMut::from(&mut stored[..]))?;
    query_map.view().project_into(Rows::from(&query[..]), RowsMut::from(&mut projected[..]))?;
    let exact: f32 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
    let score: f32 = projected.iter().zip(&stored).map(|(q, k)| q * k).sum();
    println!("score {exact:.4}, at rank {rank} of {dim} {score:.4}");
    println!("error of all scores: {:.4}", rotation.score_error(&keys, &queries, rank)?);
    Ok(())
}
