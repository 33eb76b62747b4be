//! Hybrid attention: one softmax over coarse codes, with exact rows for the 1 % of the tokens with the
//! largest weights. Compares it with attention on the codes alone and on the exact rows alone.

use pq_core::*;

const N: usize = 4096;
const DIM: usize = 64;
const QUERIES: usize = 16;

/// Keys and values whose components have a decaying spectrum, and queries whose scores deviate by 2.5: their
/// weights span many orders of magnitude, and thousands of small ones hold as much as the few large ones.
fn data() -> [Vec<f32>; 3] {
    let mut state = 1_u64;
    let mut normal = move || -> f32 {
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..12).map(|_| uniform()).sum()
    };
    let deviation = |d: usize| (1.0 + (d % DIM) as f32).powf(-0.6);
    let mut rows = |n: usize| -> Vec<f32> { (0..n * DIM).map(|i| deviation(i) * normal()).collect() };
    let (keys, values, mut queries) = (rows(N), rows(N), rows(QUERIES));
    for query in queries.chunks_exact_mut(DIM) {
        let variance: f32 = query.iter().enumerate().map(|(d, q)| (q * deviation(d)).powi(2)).sum();
        query.iter_mut().for_each(|q| *q *= 2.5 / variance.sqrt());
    }
    [keys, values, queries]
}

fn main() -> Result<(), Error> {
    let [keys, values, queries] = data();
    let shape = PqShape::new(DIM, 8, 8)?; // 1 bit per component
    let options = TrainOptions { encode: true, ..Default::default() };
    let [k, v] = [train(shape, &keys, &options)?, train(shape, &values, &options)?];
    let [key_book, value_book] =
        [CodebookBuf::new(shape, &k.centroids)?, CodebookBuf::new(shape, &v.centroids)?];
    let [key_codes, value_codes] = [Codes::new(shape, N, &k.codes)?, Codes::new(shape, N, &v.codes)?];
    let tokens = CodedTokens::new(key_codes, value_codes, value_book.view())?;
    let mut decoded = vec![0.0; N * DIM];
    decode_into(&key_book.view(), &key_codes, 0, &mut decoded)?;
    let mut errors = [0.0; DIM]; // mean squared error of each component of the coded keys
    for (i, (key, decoded)) in keys.iter().zip(&decoded).enumerate() {
        errors[i % DIM] += (key - decoded).powi(2) / N as f32;
    }

    // The output for a query, from the exact rows of a share of the tokens and, optionally, the codes of the
    // others.
    let attend = |query: &[f32], share: f32, with_codes: bool| -> Result<Vec<f32>, Error> {
        let score_variances = [query.iter().zip(errors).map(|(q, e)| q * q * e).sum()];
        let rows = RowBudget::Share(share);
        let hybrid = Hybrid { rows, score_variances: &score_variances, ..Hybrid::default() };
        let (mut table, mut floats) =
            (vec![0.0; shape.lut_len()], vec![0.0; HybridScratch::len(shape, 1, N)]);
        let luts = lut_into(&key_book.view(), query, &mut table)?;
        let mut coded_stats = [SoftmaxStats::EMPTY];
        let mut scratch = HybridScratch::new(shape, N, &mut floats, &mut coded_stats)?;
        let mut selected = vec![0; rows.most(N)];
        hybrid_select_into(&luts, &tokens, &hybrid, &mut scratch, &mut selected)?;
        // An engine with offloaded rows fetches them here, while it attends to the codes of the others.
        let (mut out, mut stats) = (vec![0.0; DIM], [SoftmaxStats::EMPTY]);
        if with_codes {
            hybrid_attend_into(&tokens, &selected, &mut scratch, &mut out, &mut stats)?;
        }
        let rows = ExactTokens::contiguous(&keys, DIM, &values, DIM)?.chosen(&selected)?;
        let attention = Attention::default();
        attend_exact_into(&attention, Rows::from(query), &rows, &mut floats, &mut out, &mut stats)?;
        normalize_all(&stats, &mut out)?;
        Ok(out)
    };
    let error = |share, with_codes| -> Result<f32, Error> {
        let mut sum = 0.0;
        for query in queries.chunks_exact(DIM) {
            let (out, exact) = (attend(query, share, with_codes)?, attend(query, 1.0, false)?);
            sum += out.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        }
        Ok((sum / QUERIES as f32).sqrt())
    };
    let (codes, rows, hybrid) = (error(0.0, true)?, error(0.01, false)?, error(0.01, true)?);
    println!(
        "error of the output: codes alone {codes:.3}, 1 % of the rows alone {rows:.3}, both {hybrid:.3}"
    );
    assert!(2.0 * hybrid < codes && 2.0 * hybrid < rows);
    Ok(())
}
