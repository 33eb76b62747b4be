//! Hybrid attention: one softmax over coarse codes of 4,096 tokens, with exact rows for the 1 % of them with
//! the largest weights. Its error is compared with those of the codes alone and of these rows alone.

use pq_core::*;

fn main() -> Result<(), Error> {
    let (n, dim) = (4096, 64);
    // Pseudorandom keys and values with a decaying spectrum, and a query that resembles the first key.
    let noise = |i: usize| ((12.9898 * i as f64).sin() * 43_758.545).fract() as f32;
    let component = |i: usize| noise(i) / (1.0 + (i % dim) as f32).powf(0.25);
    let keys: Vec<f32> = (0..n * dim).map(component).collect();
    let values: Vec<f32> = (n * dim..2 * n * dim).map(component).collect();
    let query: Vec<f32> = keys[..dim].iter().map(|x| 4.0 * x).collect();

    let shape = PqShape::new(dim, 8, 8)?; // 8 codes of 8 bits a row: 1 bit per component
    let options = TrainOptions { encode: true, ..Default::default() };
    let [k, v] = [train(shape, &keys, &options)?, train(shape, &values, &options)?];
    let (k_book, v_book) = (CodebookBuf::new(shape, &k.centroids)?, CodebookBuf::new(shape, &v.centroids)?);
    let (k_codes, v_codes) = (Codes::new(shape, n, &k.codes)?, Codes::new(shape, n, &v.codes)?);
    let tokens = CodedTokens::new(k_codes, v_codes, v_book.view())?;
    let rows = ExactTokens::contiguous(&keys, dim, &values, dim)?;
    let (mut table, mut floats) = (vec![0.0; shape.lut_len()], vec![0.0; HybridScratch::len(shape, 1, n)]);
    let luts = lut_into(&k_book.view(), &query, &mut table)?;

    // Attends to the exact rows of a share of the tokens and, if `coded`, to the codes of all others.
    let mut attend = |share: f32, coded: bool| -> Result<Vec<f32>, Error> {
        let mut scored = [SoftmaxStats::EMPTY];
        let mut scratch = HybridScratch::new(shape, n, &mut floats, &mut scored)?;
        let hybrid = Hybrid { rows: RowBudget::Share(share), ..Hybrid::default() };
        let mut selected = vec![0; hybrid.rows.most(n)];
        let found = hybrid_select_into(&luts, &tokens, &hybrid, &mut scratch, &mut selected)?;
        selected.truncate(found);
        let (mut out, mut stats) = (vec![0.0; dim], [SoftmaxStats::EMPTY]);
        if coded {
            // An engine with offloaded rows fetches the selected ones meanwhile.
            hybrid_attend_into(&tokens, &selected, &mut scratch, &mut out, &mut stats)?;
        }
        let (query, rows) = (Rows::from(&query[..]), rows.chosen(&selected)?);
        attend_exact_into(&Attention::default(), query, &rows, &mut floats, &mut out, &mut stats)?;
        normalize_all(&stats, &mut out)?;
        Ok(out)
    };
    let exact = attend(1.0, false)?;
    let error = |out: Vec<f32>| out.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
    let [codes, rows, both] = [attend(0.0, true)?, attend(0.01, false)?, attend(0.01, true)?].map(error);
    println!("error of the output: codes alone {codes:.3}, 1 % of the rows alone {rows:.3}, both {both:.3}");
    assert!(2.0 * both < codes && 2.0 * both < rows);
    Ok(())
}
