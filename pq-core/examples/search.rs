//! PQCache's step: trains a codebook on the keys of a prompt, scores all of them against a group of queries by table look-up,
//! and retrieves the tenth of the tokens that the group needs most.

use pq_core::{
    CodebookBuf, Codes, GroupRule, PqShape, Search, SoftmaxStats, TrainOptions, lut_into, search_into, train,
};

fn main() -> Result<(), pq_core::Error> {
    let (n, dim, group) = (4096, 64, 4);
    let keys: Vec<f32> =
        (0..n * dim).map(|i| ((i as f32) * 0.618).sin() * (1.0 + (i % dim) as f32 / 16.0)).collect();

    let shape = PqShape::new(dim, 16, 8)?;
    let trained = train(shape, &keys, &TrainOptions { iterations: 10, encode: true, ..Default::default() })?;
    let codebook = CodebookBuf::new(shape, &trained.centroids)?;
    let codes = Codes::new(shape, n, &trained.codes)?;

    let mut luts = vec![0.0; group * shape.lut_len()];
    lut_into(&codebook.view(), &keys[..group * dim], &mut luts)?; // the queries are the first keys
    let search = Search { k: n / 10, sinks: 4, recent: 64, rule: GroupRule::SumOfSoftmax };
    let (mut scores, mut combined) = (vec![0.0; group * n], vec![0.0; n]);
    let mut stats = vec![SoftmaxStats::EMPTY; group];
    let mut tokens = vec![0; search.found(n)];
    search_into(&luts, &codes, &search, &mut scores, &mut combined, &mut stats, &mut tokens)?;

    // How much of each query's attention the found tokens carry, by the approximate scores.
    for (stats, scores) in stats.iter().zip(scores.chunks_exact(n)) {
        let carried: f32 = tokens.iter().map(|&t| (scores[t as usize] - stats.log_sum_exp()).exp()).sum();
        println!("{} of {n} tokens carry {:.1} % of the attention", tokens.len(), 100.0 * carried);
    }
    println!("{} bytes of keys as {} bytes of codes", keys.len() * 4, trained.codes.len());
    Ok(())
}
