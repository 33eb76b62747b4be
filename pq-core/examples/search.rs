//! Trains a codebook on keys, scores all of them against a query by table look-up and retrieves the top ten.

use pq_core::{
    Codebook, Codes, Lut, PqShape, TrainOptions, encode_into, lut_into, scan_into, top_k_into, train,
};

fn main() -> Result<(), pq_core::Error> {
    let (n, dim) = (4096, 64);
    let keys: Vec<f32> =
        (0..n * dim).map(|i| ((i as f32) * 0.618).sin() * (1.0 + (i % dim) as f32 / 16.0)).collect();

    let shape = PqShape::new(dim, 16, 8)?;
    let trained = train(shape, &keys, &TrainOptions { iterations: 10, seed: 0 })?;
    let codebook = Codebook::new(shape, &trained.centroids)?;
    let mut codes = vec![0; n * shape.code_size()];
    encode_into(&codebook, &keys, &mut codes)?;

    let mut table = vec![0.0; shape.lut_len()];
    lut_into(&codebook, &keys[..dim], &mut table)?; // the query is the first key
    let mut scores = vec![0.0; n];
    scan_into(&Lut::new(shape, &table)?, &Codes::new(shape, &codes)?, &mut scores)?;
    let mut indices = vec![0; n];
    let k = top_k_into(&scores, 10, &mut indices)?;

    println!(
        "{} bytes of keys as {} bytes of codes; top tokens {:?}",
        n * dim * 4,
        codes.len(),
        &indices[..k]
    );
    Ok(())
}
