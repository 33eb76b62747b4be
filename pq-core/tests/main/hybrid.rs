//! Compares hybrid attention with its formula in f64, on random tokens and at the ends of the types.

use pq_core::*;
use proptest::prelude::*;

use super::support::{backends, scaled};

/// One KV head: coded tokens with their exact rows, and a group of queries.
struct Case {
    group: usize,
    n: usize,
    keys: CodebookBuf,
    values: CodebookBuf,
    key_codes: Vec<u8>,
    value_codes: Vec<u8>,
    key_scales: Vec<f32>,
    value_scales: Vec<f32>,
    bias: Vec<f32>, // (group, n)
    variances: Vec<f32>,
    queries: Vec<f32>,   // (group, dim)
    rows: [Vec<f32>; 2], // exact keys and values (n, dim)
}

/// The result of a decode step.
struct Attended {
    selected: Vec<u32>,
    out: Vec<f32>, // (group, dim), normalized
}

impl Case {
    fn new(key_shape: PqShape, value_shape: PqShape, group: usize, n: usize, seed: u64, spread: f32) -> Self {
        let dim = key_shape.dim();
        let keys = CodebookBuf::new(key_shape, &scaled(seed, key_shape.codebook_len(), 1.0)).unwrap();
        let values =
            CodebookBuf::new(value_shape, &scaled(seed ^ 1, value_shape.codebook_len(), 1.0)).unwrap();
        let bytes = |seed, len| scaled(seed, len, 1.0).iter().map(|x| (x * 1e6) as i64 as u8).collect();
        Self {
            group,
            n,
            keys,
            values,
            key_codes: bytes(seed ^ 2, key_shape.codes_len(n)),
            value_codes: bytes(seed ^ 3, value_shape.codes_len(n)),
            key_scales: scaled(seed ^ 4, n, 1.0),
            value_scales: scaled(seed ^ 5, n, 1.0),
            bias: scaled(seed ^ 6, group * n, 1.0),
            variances: scaled(seed ^ 7, group, 1.0).iter().map(|x| x.abs()).collect(),
            queries: scaled(seed ^ 8, group * dim, spread),
            rows: [scaled(seed ^ 9, n * dim, 1.0), scaled(seed ^ 10, n * dim, 1.0)],
        }
    }

    fn tokens(&self) -> CodedTokens<'_> {
        let (keys, values) = (self.keys.view().shape(), self.values.view().shape());
        let keys = Codes::new(keys, self.n, &self.key_codes).unwrap();
        let values = Codes::new(values, self.n, &self.value_codes).unwrap();
        CodedTokens::new(keys, values, self.values.view())
            .unwrap()
            .with_key_scales(&self.key_scales[..])
            .unwrap()
            .with_value_scales(&self.value_scales[..])
            .unwrap()
            .with_bias(&self.bias[..])
    }

    fn hybrid(&self, rows: RowBudget) -> Hybrid<'_> {
        Hybrid { rows, score_variances: &self.variances, ..Hybrid::default() }
    }

    /// Selects, attends to the codes, adds the exact rows.
    fn run(&self, backend: Backend, hybrid: &Hybrid<'_>) -> Attended {
        let (dim, shape) = (self.keys.view().shape().dim(), self.values.view().shape());
        let mut tables = vec![0.0; self.group * self.keys.view().shape().lut_len()];
        let luts = lut_into(&self.keys.view(), &self.queries, &mut tables).unwrap();
        let mut floats = vec![0.0; HybridScratch::len(shape, self.group, self.n)];
        let mut scratch_stats = vec![SoftmaxStats::EMPTY; self.group];
        let mut scratch = HybridScratch::new(shape, self.n, &mut floats, &mut scratch_stats).unwrap();
        let mut selected = vec![u32::MAX; hybrid.rows.most(self.n)];
        let found =
            hybrid_select_into_with(backend, &luts, &self.tokens(), hybrid, &mut scratch, &mut selected);
        selected.truncate(found.unwrap());
        let (mut out, mut stats) = (vec![0.0; self.group * dim], vec![SoftmaxStats::EMPTY; self.group]);
        hybrid_attend_into_with(backend, &self.tokens(), &selected, &mut scratch, &mut out, &mut stats)
            .unwrap();
        let rows = ExactTokens::contiguous(&self.rows[0], dim, &self.rows[1], dim).unwrap();
        let rows = rows.chosen(&selected).unwrap();
        let (attention, queries) = (Attention::default(), Rows::from(&self.queries[..]));
        let mut scratch = vec![0.0; self.queries.len()];
        attend_exact_into_with(backend, &attention, queries, &rows, &mut scratch, &mut out, &mut stats)
            .unwrap();
        normalize_all(&stats, &mut out).unwrap();
        Attended { selected, out }
    }

    /// The coded scores of query `g` in f64.
    fn coded_scores(&self, g: usize) -> Vec<f64> {
        let dim = self.keys.view().shape().dim();
        let tokens = Codes::new(self.keys.view().shape(), self.n, &self.key_codes).unwrap();
        let mut keys = vec![0.0; self.n * dim];
        decode_into(&self.keys.view(), &tokens, 0, &mut keys).unwrap();
        let query = &self.queries[g * dim..][..dim];
        (0..self.n)
            .map(|t| {
                let score = ip(query, &keys[t * dim..][..dim]) * f64::from(self.key_scales[t]);
                score + f64::from(self.bias[g * self.n + t]) + 0.5 * f64::from(self.variances[g])
            })
            .collect()
    }

    /// One softmax over exact rows for the selected tokens and codes for the others, in f64.
    fn expected(&self, g: usize, selected: &[u32]) -> Vec<f64> {
        let dim = self.keys.view().shape().dim();
        let codes = Codes::new(self.values.view().shape(), self.n, &self.value_codes).unwrap();
        let mut values = vec![0.0; self.n * dim];
        decode_into(&self.values.view(), &codes, 0, &mut values).unwrap();
        let mut scores = self.coded_scores(g);
        let mut rows: Vec<Vec<f64>> = (0..self.n)
            .map(|t| {
                let scale = f64::from(self.value_scales[t]);
                values[t * dim..][..dim].iter().map(|&x| scale * f64::from(x)).collect()
            })
            .collect();
        for &t in selected {
            let t = t as usize;
            scores[t] = ip(&self.queries[g * dim..][..dim], &self.rows[0][t * dim..][..dim]);
            rows[t] = self.rows[1][t * dim..][..dim].iter().map(|&x| f64::from(x)).collect();
        }
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut out = vec![0.0; dim];
        for (score, row) in scores.iter().zip(&rows) {
            // A masked token's value may be anything.
            let weight = (score - max).exp() / sum;
            out.iter_mut().zip(row).for_each(|(out, x)| *out += if weight > 0.0 { weight * x } else { 0.0 });
        }
        out
    }

    fn check(&self, hybrid: &Hybrid<'_>) -> Vec<u32> {
        let dim = self.keys.view().shape().dim();
        let definition = self.run(Backend::Scalar, hybrid);
        for backend in backends() {
            let attended = self.run(backend, hybrid);
            assert_eq!(attended.selected.len(), definition.selected.len(), "{backend:?}");
            for (g, out) in attended.out.chunks_exact(dim).enumerate() {
                let expected = self.expected(g, &attended.selected);
                for (&x, y) in out.iter().zip(expected) {
                    assert!((f64::from(x) - y).abs() <= 2e-4, "{backend:?}, query {g}: {x} for {y}");
                }
            }
        }
        definition.selected
    }
}

fn ip(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn shapes() -> impl Strategy<Value = (PqShape, PqShape)> {
    let m = || prop_oneof![Just(1_usize), Just(2), Just(3), Just(6)];
    (1_usize..6, m(), m(), 1_u32..=9, 1_u32..=9).prop_map(|(d, mk, mv, bk, bv)| {
        (PqShape::new(6 * d, mk, bk).unwrap(), PqShape::new(6 * d, mv, bv).unwrap())
    })
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0_usize), Just(1), Just(63), Just(64), Just(65), Just(1024), Just(1025), 2_usize..400]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_step_is_the_formula(
        (keys, values) in shapes(), group in 1_usize..=9, n in lengths(), share in 0.0_f32..=1.0,
        spread in prop_oneof![Just(0.1_f32), Just(1.0), Just(8.0)], seed: u64,
    ) {
        let case = Case::new(keys, values, group, n, seed, spread);
        for rows in [RowBudget::Count(0), RowBudget::Count(3), RowBudget::Share(share), RowBudget::Count(n)] {
            let selected = case.check(&case.hybrid(rows));
            prop_assert_eq!(selected.len(), rows.most(n));
        }
    }

    #[test]
    fn the_estimated_error_keeps_its_bound(
        group in 1_usize..=8, n in lengths(), spread in prop_oneof![Just(0.1_f32), Just(1.0), Just(8.0)],
        bound in 0.0_f32..0.75, seed: u64,
    ) {
        let shape = PqShape::new(12, 3, 5).unwrap();
        let case = Case::new(shape, shape, group, n, seed, spread);
        let value_error = 0.25;
        let rows = RowBudget::Error { bound, value_error, most: n };
        let selected = case.check(&case.hybrid(rows));
        let mut largest = 0.0_f64;
        for g in 0..group {
            let scores = case.coded_scores(g);
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let left = (0..n).filter(|&t| selected.binary_search(&(t as u32)).is_err());
            let squares: f64 = left.map(|t| ((scores[t] - max).exp() / sum).powi(2)).sum();
            let factor = f64::from(case.variances[g]).exp_m1() + f64::from(value_error);
            largest = largest.max((factor * squares).sqrt());
        }
        // The histogram gives the squared weights to an eighth.
        prop_assert!(2.5 * largest <= f64::from(bound) * 1.0625 + 1e-9, "{} for {}", largest, bound);
        let loose = RowBudget::Error { bound: 100.0, value_error, most: n };
        prop_assert!(case.check(&case.hybrid(loose)).is_empty());
    }
}

#[test]
fn eight_bits_are_the_formula_for_every_group() {
    let shape = PqShape::new(24, 6, 8).unwrap(); // four subspaces at a time and two more
    for group in 1..=9 {
        let case = Case::new(shape, shape, group, 1100, 9, 1.0);
        case.check(&case.hybrid(RowBudget::Share(0.05)));
    }
}

#[test]
fn attention_elsewhere_makes_room_for_coded_tokens() {
    let shape = PqShape::new(12, 3, 5).unwrap();
    let case = Case::new(shape, shape, 2, 500, 3, 2.0);
    let rows = RowBudget::Error { bound: 0.125, value_error: 0.3, most: 500 };
    let alone = case.check(&case.hybrid(rows)).len();
    let others = [SoftmaxStats { max: 30.0, sum: 1.0 }; 2];
    let beside = case.check(&Hybrid { others: &others, ..case.hybrid(rows) }).len();
    assert!(alone > 10 && beside == 0, "{alone} rows alone, {beside} next to tokens with all the weight");
}

#[test]
fn the_rest_is_accurate_where_the_selected_tokens_hold_all_weight() {
    let shape = PqShape::new(8, 2, 4).unwrap();
    let mut case = Case::new(shape, shape, 3, 200, 5, 1.0);
    for g in 0..3 {
        case.bias[g * 200 + 77] = 5000.0; // coded far above all others, exact among them
    }
    let selected = case.check(&case.hybrid(RowBudget::Count(1)));
    assert_eq!(selected, [77]);
}

/// A sum of n similar weights in one `f32` would have an error of up to n / 2^24.
#[test]
fn many_tokens_of_one_centroid_are_summed_accurately() {
    let n = 1 << 20;
    let mut bias = vec![0.7_f32.ln(); n];
    bias[n / 2] = 0.0; // the maximum rises
    for (nbits, tolerance) in [(1, 1e-4), (8, 1e-4), (12, 1e-3)] {
        let shape = PqShape::new(8, 1, nbits).unwrap();
        let book = CodebookBuf::new(shape, &vec![1.0; shape.codebook_len()]).unwrap();
        let bytes = vec![0; shape.codes_len(n)];
        let codes = Codes::new(shape, n, &bytes).unwrap();
        let tokens = CodedTokens::new(codes, codes, book.view()).unwrap().with_bias(&bias[..]);
        let table = vec![0.0; shape.lut_len()];
        let luts = Luts::new(shape, &table).unwrap();
        for backend in backends() {
            let check = |mut out: Vec<f32>, stats: [SoftmaxStats; 1]| {
                normalize_all(&stats, &mut out).unwrap();
                assert!(
                    out.iter().all(|x| (x - 1.0).abs() < tolerance),
                    "{nbits} bits, {backend:?}: {out:?}"
                );
            };
            let (mut out, mut stats) = (vec![0.0; 8], [SoftmaxStats::EMPTY]);
            let mut scratch = vec![0.0; attend_scratch_len(shape, 1)];
            attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
            check(out, stats);
            let mut floats = vec![0.0; HybridScratch::len(shape, 1, n)];
            let mut scored = [SoftmaxStats::EMPTY];
            let mut scratch = HybridScratch::new(shape, n, &mut floats, &mut scored).unwrap();
            let hybrid = Hybrid::default();
            hybrid_select_into_with(backend, &luts, &tokens, &hybrid, &mut scratch, &mut []).unwrap();
            let (mut out, mut stats) = (vec![0.0; 8], [SoftmaxStats::EMPTY]);
            hybrid_attend_into_with(backend, &tokens, &[], &mut scratch, &mut out, &mut stats).unwrap();
            check(out, stats);
        }
    }
}

#[test]
fn masked_tokens_are_not_selected() {
    let shape = PqShape::new(8, 2, 4).unwrap();
    let mut case = Case::new(shape, shape, 2, 130, 6, 1.0);
    for t in (0..130).filter(|t| t % 3 > 0) {
        (case.bias[t], case.bias[130 + t]) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        (case.key_scales[t], case.value_scales[t]) = (0.0, 0.0);
    }
    let selected = case.check(&case.hybrid(RowBudget::Count(100)));
    assert!(selected.iter().copied().eq((0..130).step_by(3)));
}

#[test]
fn an_infinite_coded_score_is_replaced_and_nan_stays_with_its_query() {
    let shape = PqShape::new(8, 2, 4).unwrap();
    let mut case = Case::new(shape, shape, 2, 100, 7, 1.0);
    case.bias[40] = f32::INFINITY;
    assert_eq!(case.check(&case.hybrid(RowBudget::Count(1))), [40]);
    case.bias[40] = f32::NAN;
    for backend in backends() {
        let attended = case.run(backend, &case.hybrid(RowBudget::Count(2)));
        assert!(!attended.selected.contains(&40));
        assert!(attended.out[0].is_nan() && attended.out[8..].iter().all(|x| x.is_finite()), "{backend:?}");
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let shape = PqShape::new(8, 2, 4).unwrap();
    let case = Case::new(shape, shape, 2, 70, 8, 1.0);
    let (mut tables, mut stats) = (vec![0.0; 2 * shape.lut_len()], [SoftmaxStats::EMPTY; 2]);
    let luts = lut_into(&case.keys.view(), &case.queries, &mut tables).unwrap();
    let mut floats = vec![0.0; HybridScratch::len(shape, 2, 70)];
    let len = floats.len();
    assert!(HybridScratch::new(shape, 70, &mut floats[..len - 1], &mut stats).is_err());
    let mut scratch = HybridScratch::new(shape, 70, &mut floats, &mut stats).unwrap();
    let mut select = |tokens: &CodedTokens<'_>, hybrid: Hybrid<'_>, len: usize| {
        hybrid_select_into(&luts, tokens, &hybrid, &mut scratch, &mut vec![0; len])
    };
    let (tokens, rows) = (case.tokens(), RowBudget::Count(5));
    let hybrid = Hybrid { rows, ..Hybrid::default() };
    assert_eq!(select(&tokens, hybrid, 5), Ok(5));
    assert!(matches!(select(&tokens, hybrid, 4), Err(Error::TooShort { .. })));
    assert!(matches!(
        select(&tokens, Hybrid { score_variances: &[1.0], ..hybrid }, 5),
        Err(Error::Length { .. })
    ));
    let variances = [1.0, f32::NAN];
    let wrong = Hybrid { score_variances: &variances, ..hybrid };
    assert!(matches!(select(&tokens, wrong, 5), Err(Error::NotFinite { .. })));
    // Either would silently select no rows.
    let rows_by_error = RowBudget::Error { bound: 0.1, value_error: 0.1, most: 5 };
    let wrong = Hybrid { rows: rows_by_error, score_variances: &[0.5, -2.0], ..hybrid };
    assert_eq!(select(&tokens, wrong, 5), Err(Error::Budget { what: "score_variances" }));
    let others = [SoftmaxStats::EMPTY, SoftmaxStats { max: 1.0, sum: f32::NAN }];
    let wrong = Hybrid { rows: rows_by_error, others: &others, ..hybrid };
    assert_eq!(select(&tokens, wrong, 5), Err(Error::NotFinite { what: "others", index: 1 }));
    assert!(matches!(select(&tokens.with_bias(&[0.0; 70][..]), hybrid, 5), Err(Error::Length { .. })));
    let bound = RowBudget::Error { bound: f32::INFINITY, value_error: 0.0, most: 5 };
    assert!(matches!(select(&tokens, Hybrid { rows: bound, ..hybrid }, 5), Err(Error::Budget { .. })));
    // A NaN share would silently select no rows.
    for share in [f32::NAN, -1.0, 1.5] {
        let error = select(&tokens, Hybrid { rows: RowBudget::Share(share), ..hybrid }, 5);
        assert!(matches!(error, Err(Error::Budget { what: "share" })), "{share}");
    }
    let value_error = RowBudget::Error { bound: 0.1, value_error: -1.0, most: 5 };
    let error = select(&tokens, Hybrid { rows: value_error, ..hybrid }, 5);
    assert!(matches!(error, Err(Error::Budget { what: "value_error" })));

    let (mut out, mut total) = ([0.0; 16], [SoftmaxStats::EMPTY; 2]);
    let mut attend = |selected: &[u32], out: &mut [f32]| {
        hybrid_attend_into(&tokens, selected, &mut scratch, out, &mut total)
    };
    let expected = Error::TokenOutOfRange { index: 1, token: 70, n: 70 };
    assert_eq!(attend(&[69, 70], &mut out), Err(expected));
    assert!(matches!(attend(&[], &mut out[..15]), Err(Error::Length { .. })));
    assert_eq!(out, [0.0; 16]);
    assert_eq!(attend(&[69], &mut out), Ok(()));
}
