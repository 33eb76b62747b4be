//! A decode step of PQCache: trains a codebook on the keys of a prompt, scores all keys against a group of
//! queries by table lookup, and retrieves the tenth of the tokens with the highest combined weights.

use pq_core::{
    CodebookBuf, Codes, GroupRule, PqShape, Search, SearchScratch, SoftmaxStats, TrainOptions, lut_into,
    search_into, train,
};

fn main() -> Result<(), pq_core::Error> {
    let (n, dim, group) = (4096, 64, 4);
    let keys: Vec<f32> =
        (0..n * dim).map(|i| ((i as f32) * 0.618).sin() * (1.0 + (i % dim) as f32 / 16.0)).collect();

    let shape = PqShape::new(dim, 16, 8)?;
    let trained = train(shape, &keys, &TrainOptions { iterations: 10, encode: true, ..Default::default() })?;
    let codebook = CodebookBuf::new(shape, &trained.centroids)?;
    let codes = Codes::new(shape, n, &trained.codes)?;

    let mut tables = vec![0.0; group * shape.lut_len()];
    let luts = lut_into(&codebook.view(), &keys[..group * dim], &mut tables)?; // the queries are the first keys
    let search = Search { k: n / 10, sinks: 4, recent: 64, rule: GroupRule::SumOfSoftmax };
    let mut floats = vec![0.0; SearchScratch::len(group, n)];
    let mut stats = vec![SoftmaxStats::EMPTY; group];
    let mut scratch = SearchScratch::new(n, &mut floats, &mut stats)?;
    let mut tokens = vec![0; search.found(n)];
    search_into(&luts, &codes, &search, &mut scratch, &mut tokens)?;

    // The fraction of each query's attention that the selected tokens hold, by the approximate scores.
    for (stats, scores) in scratch.stats().iter().zip(scratch.scores().chunks_exact(n)) {
        let fraction: f32 = tokens.iter().map(|&t| (scores[t as usize] - stats.log_sum_exp()).exp()).sum();
        println!("{} of {n} tokens hold {:.1} % of the attention", tokens.len(), 100.0 * fraction);
    }
    println!("{} bytes of keys, {} bytes of codes", keys.len() * 4, trained.codes.len());
    Ok(())
}
