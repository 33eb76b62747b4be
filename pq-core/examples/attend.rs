//! The attention of MILLION: old keys and values are codes, the newest are exact, and both contribute to one
//! softmax. The result is compared with attention on exact rows.

use pq_core::{
    Attention, CodebookBuf, CodedTokens, Codes, ExactTokens, PqShape, Rows, SoftmaxStats, TrainOptions,
    attend_exact_into, attend_into, attend_scratch_len, lut_into, normalize_all, train,
};

fn main() -> Result<(), pq_core::Error> {
    let (n, window, dim, group) = (2048, 128, 64, 4);
    let rows = |seed: f32| -> Vec<f32> {
        (0..n * dim).map(|i| ((i % dim) as f32 * seed + (i / dim) as f32 * 0.05).sin()).collect()
    };
    let (keys, values) = (rows(0.37), rows(0.91));
    let queries: Vec<f32> = (0..group * dim).map(|i| (i as f32 * 0.13).sin() / (dim as f32).sqrt()).collect();

    let shape = PqShape::new(dim, 32, 8)?; // 4 bits per element
    let coded = (n - window) * dim; // elements of the coded tokens
    let options = TrainOptions { iterations: 10, encode: true, ..Default::default() };
    let (k, v) = (train(shape, &keys[..coded], &options)?, train(shape, &values[..coded], &options)?);
    let (key_book, value_book) =
        (CodebookBuf::new(shape, &k.centroids)?, CodebookBuf::new(shape, &v.centroids)?);

    let mut tables = vec![0.0; group * shape.lut_len()];
    let luts = lut_into(&key_book.view(), &queries, &mut tables)?;
    let (key_codes, value_codes) =
        (Codes::new(shape, n - window, &k.codes)?, Codes::new(shape, n - window, &v.codes)?);
    let tokens = CodedTokens::new(key_codes, value_codes, value_book.view())?;
    let mut scratch = vec![0.0; attend_scratch_len(shape, group)];
    let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
    attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats)?;
    let (attention, rows) = (Attention::default(), Rows::from(&queries[..]));
    let recent = ExactTokens::contiguous(&keys[coded..], dim, &values[coded..], dim)?;
    attend_exact_into(&attention, rows, &recent, &mut scratch, &mut out, &mut stats)?;
    normalize_all(&stats, &mut out)?;

    let (mut exact, mut exact_stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
    let all = ExactTokens::contiguous(&keys, dim, &values, dim)?;
    attend_exact_into(&attention, rows, &all, &mut scratch, &mut exact, &mut exact_stats)?;
    normalize_all(&exact_stats, &mut exact)?;
    for g in 0..group {
        let at = g * dim..(g + 1) * dim;
        let error = out[at.clone()].iter().zip(&exact[at]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("query {g}: largest difference {error:.5}");
    }
    Ok(())
}
