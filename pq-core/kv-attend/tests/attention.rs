//! Exact attention on every backend against the formula in `f64`, over layouts, masks and options.

#![allow(clippy::unwrap_used)] // helpers of tests, too

use half::{bf16, f16};
use kv_attend::*;
use proptest::prelude::*;

/// Largest relative error of a sum of `n` terms in `f32`, with room for the backends' different orders.
fn tolerance(n: usize) -> f64 {
    1e-6 * (4.0 + (n as f64).sqrt())
}

fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| backend.is_available())
}

/// Elements from -1 to 1.
fn noise<E: Element>(n: usize, seed: u64) -> Vec<E> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| E::from_f32(2.0 * rng.f32() - 1.0)).collect()
}

/// The formula: `out` of one query over the tokens that it sees.
fn formula<E: Element>(
    attention: &Attention,
    query: &[f32],
    keys: &Rows<'_, E>,
    values: &Rows<'_, E>,
    seen: &[usize],
) -> Vec<f64> {
    let scores: Vec<f64> = seen
        .iter()
        .map(|&t| {
            let ip: f64 =
                query.iter().zip(keys.row(t)).map(|(q, k)| f64::from(*q) * f64::from(k.to_f32())).sum();
            let score = ip * f64::from(attention.scale);
            attention.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let mut out = vec![0.0; values.components()];
    for (&t, score) in seen.iter().zip(&scores) {
        let weight = (score - max).exp() / sum;
        out.iter_mut().zip(values.row(t)).for_each(|(out, x)| *out += weight * f64::from(x.to_f32()));
    }
    out
}

/// Added to one `f32` one after another, a million similar weights have an error of 1e-3.
#[test]
fn many_similar_tokens_are_summed_accurately() {
    let (dim_k, dim_v) = (8, 37);
    // The first key has a score of 0, the second one of -0.35.
    let keys: Vec<f32> = [vec![0.0; dim_k], vec![-0.35 / dim_k as f32; dim_k]].concat();
    let values = vec![1.0; 2 * dim_v];
    let mut list = vec![1; 1 << 20];
    list[0] = 0;
    let tokens = ExactTokens::contiguous(&keys, dim_k, &values, dim_v).unwrap().chosen(&list).unwrap();
    for backend in backends() {
        for group in [1, 4] {
            let queries = vec![1.0; group * dim_k];
            let (mut out, mut stats) = (vec![0.0; group * dim_v], vec![SoftmaxStats::EMPTY; group]);
            let mut scratch = vec![0.0; attend_exact_scratch_len(group, dim_k)];
            let queries = Rows::contiguous(&queries, group * dim_k).unwrap();
            let attention = Attention::default();
            attend_exact_into_with(backend, &attention, queries, &tokens, &mut scratch, &mut out, &mut stats)
                .unwrap();
            normalize_all(&stats, &mut out).unwrap();
            let error = out.iter().map(|x| (x - 1.0).abs()).fold(0.0, f32::max);
            assert!(error < 1e-4, "{backend:?}, {group} queries: {error:e}");
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    n: usize,
    dim_k: usize,
    dim_v: usize,
    gaps: [usize; 3], // elements between rows of keys, of values, of queries
    heads: usize,
    group: usize,
    query_tokens: usize,
    attention: Attention,
    first_query: Option<usize>,
    start: usize, // position of row 0
    list: Option<Vec<usize>>,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (0_usize..200, 1_usize..80, 1_usize..140, 1_usize..10, 1_usize..6);
    let heads = prop_oneof![2 => Just(1_usize), 1 => 2_usize..10];
    let start = prop_oneof![Just(0_usize), 1_usize..100];
    let gaps =
        prop_oneof![Just([0; 3]), (0_usize..40, 0_usize..40, 0_usize..9).prop_map(|(a, b, c)| [a, b, c])];
    let options = (
        0.1_f32..1.5,
        proptest::option::of(0.5_f32..20.0),
        proptest::option::of(1_usize..150),
        proptest::option::of(0_usize..250),
        proptest::option::of(proptest::collection::vec(any::<prop::sample::Index>(), 0..150)),
    );
    (sizes, heads, gaps, options, start, any::<u64>()).prop_map(
        |(sizes, heads, gaps, options, start, seed)| {
            let (n, dim_k, dim_v, group, query_tokens) = sizes;
            let (scale, softcap, window, first_query, list) = options;
            Case {
                n,
                dim_k,
                dim_v,
                gaps,
                heads,
                group,
                query_tokens: if first_query.is_none() { query_tokens.min(n.max(1)) } else { query_tokens },
                attention: Attention { scale, softcap, window },
                first_query,
                start,
                list: list.filter(|_| n > 0).map(|list| list.iter().map(|i| i.index(n)).collect()),
                seed,
            }
        },
    )
}

fn check<Q: Element, E: Element>(case: &Case) {
    let &Case { n, dim_k, dim_v, gaps, heads, group, query_tokens, .. } = case;
    let Case { attention, first_query, start, list, seed, .. } = case;
    let rows = |components: usize, gap: usize| (components, components + gap);
    let (of_keys, of_values) = (rows(heads * dim_k, gaps[0]), rows(heads * dim_v, gaps[1]));
    let of_queries = rows(heads * group * dim_k, gaps[2]);
    let keys = noise::<E>(n * of_keys.1, seed ^ 1);
    let values = noise::<E>(n * of_values.1, seed ^ 2);
    let queries = noise::<Q>(query_tokens * of_queries.1, *seed);
    let keys = Rows::new(&keys, n, of_keys.0, of_keys.1).unwrap();
    let values = Rows::new(&values, n, of_values.0, of_values.1).unwrap();
    let queries = Rows::new(&queries, query_tokens, of_queries.0, of_queries.1).unwrap();
    let mut tokens = ExactTokens::new(keys, values).unwrap().heads(heads).unwrap().starting_at(*start);
    if let Some(position) = first_query {
        tokens = tokens.first_query(*position);
    }
    let chosen: Option<Vec<u32>> = list.as_ref().map(|list| list.iter().map(|&t| t as u32).collect());
    if let Some(chosen) = &chosen {
        tokens = tokens.chosen(chosen).unwrap();
    }
    let all: Vec<usize> = list.clone().unwrap_or_else(|| (0..n).collect());
    for backend in backends() {
        let mut stats = vec![SoftmaxStats::EMPTY; query_tokens * heads * group];
        let mut out = vec![0.0; stats.len() * dim_v];
        let mut scratch = vec![f32::NAN; attend_exact_scratch_len(stats.len(), dim_k) + 3];
        attend_exact_into_with(backend, attention, queries, &tokens, &mut scratch, &mut out, &mut stats)
            .unwrap();
        normalize_all(&stats, &mut out).unwrap();
        for (q, out) in out.chunks(dim_v).enumerate() {
            let (i, of_token) = (q / (heads * group), q % (heads * group));
            let head = of_token / group;
            let first = first_query.map_or(n as i64 - query_tokens as i64, |at| at as i64 - *start as i64);
            let position = first + i as i64; // as a row
            let seen: Vec<usize> = all
                .iter()
                .copied()
                .filter(|&t| {
                    t as i64 <= position && attention.window.is_none_or(|w| position - (t as i64) < w as i64)
                })
                .collect();
            let query: Vec<f32> =
                queries.row(i)[of_token * dim_k..][..dim_k].iter().map(|x| x.to_f32()).collect();
            let (keys, values) =
                (keys.columns(head * dim_k, dim_k).unwrap(), values.columns(head * dim_v, dim_v).unwrap());
            let exact = formula(attention, &query, &keys, &values, &seen);
            for (&x, exact) in out.iter().zip(exact) {
                let exact = if seen.is_empty() { 0.0 } else { exact };
                let bound = 3.0 * tolerance(dim_k) * (dim_k as f64).sqrt() + tolerance(n);
                assert!((exact - f64::from(x)).abs() < bound, "{backend:?} {exact} {x}");
            }
        }
    }
}

#[test]
fn rows_at_the_last_positions_are_seen() {
    let (keys, values) = ([0.0_f32; 3], [1.0_f32, 2.0, 3.0]);
    for start in [0, usize::MAX - 3, usize::MAX - 2, usize::MAX] {
        let tokens = ExactTokens::contiguous(&keys, 1, &values, 1).unwrap().starting_at(start);
        let (mut out, mut stats) = ([0.0], [SoftmaxStats::EMPTY]);
        let (query, attention) = (Rows::from(&[1.0_f32][..]), Attention::default());
        attend_exact_into(&attention, query, &tokens, &mut [0.0], &mut out, &mut stats).unwrap();
        normalize_all(&stats, &mut out).unwrap();
        assert_eq!(out, [2.0], "from {start}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn attention_equals_the_formula(case in cases()) {
        check::<f32, f32>(&case);
        check::<f32, f16>(&case);
        check::<bf16, bf16>(&case);
        check::<f16, f32>(&case);
    }

    #[test]
    fn layouts_have_the_same_bits(
        n in 1_usize..150, dim in 1_usize..70, group in 1_usize..6, seed in any::<u64>(),
    ) {
        let rows = noise::<f16>(n * dim * 3, seed);
        let queries = noise::<f32>(group * dim, seed ^ 1);
        let head = Rows::contiguous(&rows, 3 * dim).unwrap().columns(dim, dim).unwrap();
        let copy: Vec<f16> = head.iter().flatten().copied().collect();
        let list: Vec<u32> = (0..n as u32).collect();
        let copied = Rows::contiguous(&copy, dim).unwrap();
        for backend in backends() {
            let attend = |tokens: ExactTokens<'_, f16>| {
                let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
                let (queries, mut scratch) = (Rows::from(&queries[..]), vec![0.0; group * dim]);
                attend_exact_into_with(
                    backend, &Attention::default(), queries, &tokens, &mut scratch, &mut out, &mut stats,
                ).unwrap();
                (out, stats)
            };
            let dense = attend(ExactTokens::new(copied, copied).unwrap());
            let strided = ExactTokens::new(head, head).unwrap();
            prop_assert_eq!(&attend(strided), &dense);
            prop_assert_eq!(&attend(strided.chosen(&list).unwrap()), &dense);
            prop_assert_eq!(&attend(strided.first_query(n - 1)), &dense);
        }
    }
}

/// One head of one component, one query.
fn attend_one(attention: &Attention, keys: &[f32], values: &[f32]) -> (f32, SoftmaxStats) {
    let tokens = ExactTokens::contiguous(keys, 1, values, 1).unwrap();
    let (mut out, mut stats, mut scratch) = ([0.0], [SoftmaxStats::EMPTY], [0.0]);
    attend_exact_into(attention, Rows::from(&[1.0_f32][..]), &tokens, &mut scratch, &mut out, &mut stats)
        .unwrap();
    (out[0], stats[0])
}

#[test]
fn special_scores() {
    let attend = |keys: &[f32], values: &[f32]| {
        let (out, stats) = attend_one(&Attention::default(), keys, values);
        let mut out = [out];
        stats.normalize(&mut out);
        out[0]
    };
    assert_eq!(attend(&[], &[]), 0.0);
    assert_eq!(attend(&[f32::NEG_INFINITY, 2.0], &[1.0, 3.0]), 3.0);
    assert_eq!(attend(&[-1e30, 1e30], &[1.0, 3.0]), 3.0);
    assert!(attend(&[f32::NAN, 2.0], &[1.0, 3.0]).is_nan());
    let capped = Attention { softcap: Some(2.0), ..Attention::default() };
    assert_eq!(attend_one(&capped, &[f32::INFINITY, -1e30], &[1.0, 1.0]).1.max, 2.0);
    assert!(attend_one(&capped, &[f32::NAN], &[1.0]).1.sum.is_nan());
}

#[test]
fn rows_that_no_query_sees_may_hold_anything() {
    let keys = [f32::NAN, 0.0, 0.0, f32::NAN];
    let values = [f32::NAN, 1.0, 3.0, f32::INFINITY];
    let attention = Attention { window: Some(2), ..Attention::default() };
    for chosen in [None, Some(&[2_u32, 0, 3, 1][..])] {
        for backend in backends() {
            let mut tokens = ExactTokens::contiguous(&keys, 1, &values, 1).unwrap().first_query(1);
            if let Some(chosen) = chosen {
                tokens = tokens.chosen(chosen).unwrap();
            }
            let attention =
                if chosen.is_some() { attention } else { Attention { window: Some(1), ..attention } };
            let (mut out, mut stats, mut scratch) = ([0.0; 2], [SoftmaxStats::EMPTY; 2], [0.0; 2]);
            let queries = Rows::contiguous(&[1.0_f32, 1.0], 1).unwrap();
            let tokens = if chosen.is_some() { tokens.first_query(2) } else { tokens };
            let queries = if chosen.is_some() { queries.slice(0..1).unwrap() } else { queries };
            let n = queries.rows();
            attend_exact_into_with(
                backend,
                &attention,
                queries,
                &tokens,
                &mut scratch,
                &mut out[..n],
                &mut stats[..n],
            )
            .unwrap();
            normalize_all(&stats[..n], &mut out[..n]).unwrap();
            assert_eq!(&out[..n], if chosen.is_some() { &[2.0][..] } else { &[1.0, 3.0] }, "{backend:?}");
        }
    }
}

#[test]
fn every_half_is_widened_exactly() {
    // One token of weight 1, whose value fills a register: every lane is tested.
    for backend in backends() {
        for first in (0..=u16::MAX - 15).step_by(16) {
            let bits = first..=first + 15;
            fn check<E: Element>(backend: Backend, values: &[E]) {
                let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
                let key = [E::default()];
                let tokens = ExactTokens::contiguous(&key, 1, values, 16).unwrap();
                let query = Rows::from(&[0.0_f32][..]);
                let attention = Attention::default();
                attend_exact_into_with(backend, &attention, query, &tokens, &mut [0.0], &mut out, &mut stats)
                    .unwrap();
                for (x, value) in out.iter().zip(values) {
                    let y = value.to_f32();
                    assert!(*x == y || x.is_nan() && y.is_nan(), "{backend:?}: {x} {y}");
                }
            }
            check(backend, &bits.clone().map(f16::from_bits).collect::<Vec<_>>());
            check(backend, &bits.map(bf16::from_bits).collect::<Vec<_>>());
        }
    }
}

#[test]
fn parts_of_a_sequence_merge_to_the_whole() {
    let (keys, values) = (noise::<f32>(100, 1), noise::<f32>(300, 2));
    let attend = |range: core::ops::Range<usize>| {
        let (mut out, mut stats) = ([0.0; 3], [SoftmaxStats::EMPTY]);
        let values = &values[3 * range.start..3 * range.end];
        let tokens = ExactTokens::contiguous(&keys[range], 1, values, 3).unwrap();
        let query = Rows::from(&[4.0_f32][..]);
        attend_exact_into(&Attention::default(), query, &tokens, &mut [0.0], &mut out, &mut stats).unwrap();
        (out, stats[0])
    };
    let (mut whole, stats) = attend(0..100);
    stats.normalize(&mut whole);
    // Split tasks merge in any order; a part without tokens changes nothing.
    let (mut out, mut stats) = attend(60..100);
    for tokens in [0..0, 0..13, 13..60] {
        let (part, part_stats) = attend(tokens);
        stats.merge(&mut out, part_stats, &part).unwrap();
    }
    stats.normalize(&mut out);
    assert!(whole.iter().zip(&out).all(|(a, b)| (a - b).abs() < 1e-6), "{whole:?} {out:?}");
    assert!(stats.merge(&mut out, stats, &[0.0; 2]).is_err());
}

#[test]
fn bad_arguments_are_errors_and_leave_everything_as_it_was() {
    let mut out = [7.0; 4];
    let mut stats = [SoftmaxStats::EMPTY; 2];
    let mut attend =
        |attention: Attention, queries: Rows<'_, f32>, scratch: usize, group: usize, out_len: usize| {
            let (keys, values) = ([1.0_f32; 4], [1.0; 4]);
            let tokens = ExactTokens::contiguous(&keys, 2, &values, 2).unwrap();
            let mut scratch = vec![0.0; scratch];
            attend_exact_into(
                &attention,
                queries,
                &tokens,
                &mut scratch,
                &mut out[..out_len],
                &mut stats[..group],
            )
        };
    let (plain, q) = (Attention::default(), [1.0; 6]);
    let row = |n: usize| Rows::from(&q[..n]);
    assert_eq!(attend(plain, row(4), 4, 0, 4), Err(Error::Zero { what: "number of queries" }));
    assert_eq!(attend(plain, row(0), 4, 2, 4), Err(Error::Zero { what: "number of queries" }));
    assert!(matches!(attend(plain, row(3), 4, 2, 4), Err(Error::PartialRow { .. })));
    assert!(matches!(attend(plain, row(2), 4, 2, 4), Err(Error::Length { what: "stats", .. })));
    assert!(matches!(attend(plain, row(4), 4, 2, 3), Err(Error::Length { what: "out", .. })));
    assert!(matches!(attend(plain, row(4), 3, 2, 4), Err(Error::TooShort { what: "scratch", .. })));
    let (keys, values) = (Rows::contiguous(&q, 6).unwrap(), Rows::contiguous(&q[..4], 4).unwrap());
    let of_heads = |heads| ExactTokens::new(keys, values).unwrap().heads(heads).map(|tokens| tokens.n());
    assert_eq!(of_heads(0), Err(Error::Zero { what: "heads" }));
    assert!(matches!(of_heads(4), Err(Error::PartialRow { what: "a row of keys", .. })));
    assert!(matches!(of_heads(3), Err(Error::PartialRow { what: "a row of values", .. })));
    assert_eq!(of_heads(2), Ok(1));
    let three = Rows::contiguous(&q, 2).unwrap();
    assert_eq!(attend(plain, three, 6, 2, 4), Err(Error::Causal { queries: 3, tokens: 2 }));
    for what in ["scale", "softcap"] {
        for x in [f32::NAN, f32::INFINITY] {
            let attention = match what {
                "scale" => Attention::scaled(x),
                _ => Attention { softcap: Some(x), ..plain },
            };
            assert_eq!(attend(attention, row(4), 4, 2, 4), Err(Error::Attention { what }));
        }
    }
    assert!(attend(Attention { softcap: Some(0.0), ..plain }, row(4), 4, 2, 4).is_err());
    assert!(attend(Attention { window: Some(0), ..plain }, row(4), 4, 2, 4).is_err());
    assert_eq!((out, stats), ([7.0; 4], [SoftmaxStats::EMPTY; 2]));

    let keys = [1.0_f32; 6];
    let rows = |components, stride| Rows::new(&keys, 3, components, stride);
    assert_eq!(rows(0, 2).err(), Some(Error::Zero { what: "components of a row" }));
    assert_eq!(rows(3, 2).err(), Some(Error::Stride { row_stride: 2, components: 3 }));
    assert_eq!(rows(3, 3).err(), Some(Error::TooShort { what: "rows", needed: 9, actual: 6 }));
    assert_eq!(rows(1, usize::MAX).err(), Some(Error::TooLarge));
    assert!(Rows::contiguous(&keys, 4).is_err() && Rows::contiguous(&keys, 0).is_err());
    assert!(rows(2, 2).unwrap().columns(1, 2).is_err() && rows(2, 2).unwrap().columns(0, 0).is_err());
    assert!(rows(2, 2).unwrap().columns(usize::MAX, 2).is_err() && rows(2, 2).unwrap().slice(2..4).is_err());
    #[allow(clippy::reversed_empty_ranges)] // what a caller may compute
    let reversed = rows(2, 2).unwrap().slice(2..1).map(|rows| rows.rows());
    assert_eq!(reversed, Err(Error::TooShort { what: "the range up to its end", needed: 2, actual: 1 }));
    let tokens = ExactTokens::new(rows(2, 2).unwrap(), rows(1, 2).unwrap()).unwrap();
    assert_eq!(tokens.chosen(&[0, 3]).err(), Some(Error::Token { index: 1, token: 3, rows: 3 }));
    assert!(ExactTokens::contiguous(&keys, 2, &keys, 3).is_err());
    assert!(normalize_all(&[], &mut [1.0]).is_err());
    assert!(normalize_all(&[SoftmaxStats::EMPTY; 2], &mut [1.0]).is_err());
}

#[test]
fn a_single_row_has_any_stride() {
    let row = [0.5_f32; 8];
    let rows = Rows::new(&row, 1, 8, usize::MAX).unwrap();
    let tokens = ExactTokens::new(rows, rows).unwrap().heads(2).unwrap();
    for backend in backends() {
        let (mut scratch, mut out, mut stats) = ([0.0; 8], [0.0; 8], [SoftmaxStats::EMPTY; 2]);
        let (attention, queries) = (Attention::default(), Rows::from(&row[..]));
        attend_exact_into_with(backend, &attention, queries, &tokens, &mut scratch, &mut out, &mut stats)
            .unwrap();
        normalize_all(&stats, &mut out).unwrap();
        assert_eq!(out, row, "{backend:?}");
    }
}

#[test]
fn the_log_of_a_nan_is_not_that_of_no_tokens() {
    assert_eq!(SoftmaxStats::EMPTY.log_sum_exp(), f32::NEG_INFINITY);
    assert!(SoftmaxStats { max: 1.0, sum: f32::NAN }.log_sum_exp().is_nan());
}
