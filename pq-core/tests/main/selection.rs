//! Compares the tokens that a group of query heads selects with the definition in f64: for scores of any
//! spread, and with NaN and infinite scores.

use fastrand::Rng;
use pq_core::*;

/// Deviations of the scores. With the large ones the weights of all but a few tokens underflow.
const SPREADS: [f32; 9] = [0.1, 1.0, 10.0, 60.0, 300.0, 1e3, 1e4, 1e5, 1e6];
const RULES: [GroupRule; 2] = [GroupRule::SumOfSoftmax, GroupRule::MaxOfSoftmax];

/// Roughly normal, with about this deviation.
fn value(random: &mut Rng, scale: f32) -> f32 {
    let sum: f32 = (0..4).map(|_| random.f32()).sum();
    (sum - 2.0) * 1.7 * scale
}

fn values(random: &mut Rng, len: usize, scale: f32) -> Vec<f32> {
    (0..len).map(|_| value(random, scale)).collect()
}

/// The value of a score in the group's softmaxes.
fn clean(score: f32) -> f64 {
    if score.is_nan() { f64::NEG_INFINITY } else { f64::from(score.min(f32::MAX)) }
}

fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = values.clone().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY { max } else { max + values.map(|x| (x - max).exp()).sum::<f64>().ln() }
}

/// The logarithm of every token's combined weight.
fn combined(scores: &[f32], n: usize, rule: GroupRule) -> Vec<f64> {
    let weights: Vec<f64> = scores
        .chunks_exact(n)
        .flat_map(|scores| {
            let max = scores.iter().map(|&s| clean(s)).fold(f64::NEG_INFINITY, f64::max);
            let total = log_sum_exp(scores.iter().map(|&s| clean(s) - max));
            let nothing = max == f64::NEG_INFINITY;
            scores.iter().map(move |&s| if nothing { max } else { clean(s) - max - total })
        })
        .collect();
    (0..n)
        .map(|t| {
            let weights = weights.iter().skip(t).step_by(n).copied();
            match rule {
                GroupRule::SumOfSoftmax => log_sum_exp(weights),
                GroupRule::MaxOfSoftmax => weights.fold(f64::NEG_INFINITY, f64::max),
            }
        })
        .collect()
}

/// No token left out has a clearly higher weight than a chosen one.
fn assert_best(weights: &[f64], chosen: &[u32], context: &str) {
    let is_in = |t: usize| chosen.binary_search(&(t as u32)).is_ok();
    let worst_in = (0..weights.len()).filter(|&t| is_in(t)).map(|t| weights[t]).fold(f64::INFINITY, f64::min);
    let best_out =
        (0..weights.len()).filter(|&t| !is_in(t)).map(|t| weights[t]).fold(f64::NEG_INFINITY, f64::max);
    let tolerance = if worst_in.is_finite() { 2e-5 + 5e-7 * worst_in.abs() } else { 0.0 };
    assert!(best_out <= worst_in + tolerance, "{context}: {best_out} is out, {worst_in} is in");
}

/// The `k` highest scores of one head, the lower index first among equals, in ascending order.
fn sorted_best(scores: &[f32], k: usize) -> Vec<u32> {
    let rank = |t: u32| if scores[t as usize].is_nan() { f32::NEG_INFINITY } else { scores[t as usize] };
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| rank(b).partial_cmp(&rank(a)).unwrap().then(a.cmp(&b)));
    order.truncate(k);
    order.sort_unstable();
    order
}

/// Combines scores (group, n) and takes the best `k`, which must be the same on every backend.
fn choose(scores: &[f32], n: usize, rule: GroupRule, k: usize) -> (Vec<u32>, Vec<SoftmaxStats>) {
    let (mut stats, mut out) = (vec![SoftmaxStats::EMPTY; scores.len() / n], vec![f32::NAN; n]);
    combine_group_into_with(Backend::Scalar, scores, rule, &mut stats, &mut out).unwrap();
    assert!(out.iter().all(|x| !x.is_nan()));
    let mut tokens = vec![0; k.min(n)];
    top_k_into(&out, k, &mut tokens).unwrap();
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let mut again = vec![0; k.min(n)];
        top_k_into_with(backend, &out, k, &mut again).unwrap();
        assert_eq!(again, tokens, "{backend:?}");
    }
    (tokens, stats)
}

/// Corrupts some scores of some heads, as broken rows do.
fn spoil(random: &mut Rng, scores: &mut [f32], n: usize) {
    for scores in scores.chunks_exact_mut(n) {
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN][random.usize(..5)];
        match random.usize(..4) {
            0 => scores.fill(bad),
            1 => scores[random.usize(..n)] = bad,
            2 => (0..n).for_each(|_| scores[random.usize(..n)] = bad),
            _ => {}
        }
    }
}

#[test]
fn a_single_head_keeps_the_order_of_its_scores() {
    let mut random = Rng::with_seed(1);
    for spread in SPREADS {
        for _ in 0..60 {
            let n = [1, 15, 64, 65, 333][random.usize(..5)];
            let k = random.usize(..n + 2);
            let mut scores = values(&mut random, n, spread);
            if random.usize(..3) == 0 {
                scores.iter_mut().for_each(|s| *s = (*s / spread * 4.0).round() * spread); // ties
            }
            if random.usize(..3) == 0 {
                spoil(&mut random, &mut scores, n);
            }
            for rule in RULES {
                let (tokens, _) = choose(&scores, n, rule, k);
                assert_eq!(tokens, sorted_best(&scores, k), "spread {spread}, n {n}, k {k}: {scores:?}");
            }
        }
    }
}

#[test]
fn a_group_chooses_the_highest_weights() {
    let mut random = Rng::with_seed(2);
    for spread in SPREADS {
        for spoiled in [false, true] {
            for _ in 0..60 {
                let (n, group) = ([1, 15, 64, 65, 700][random.usize(..5)], 2 + random.usize(..7));
                let k = random.usize(..n + 2);
                let mut scores = values(&mut random, group * n, spread);
                if random.usize(..3) == 0 {
                    // One head alone has wide scores.
                    scores[n..].iter_mut().for_each(|s| *s /= spread);
                }
                if spoiled {
                    spoil(&mut random, &mut scores, n);
                }
                for rule in RULES {
                    let (tokens, stats) = choose(&scores, n, rule, k);
                    let context =
                        format!("spread {spread}, group {group}, n {n}, k {k}, {rule:?}, {spoiled}");
                    assert_best(&combined(&scores, n, rule), &tokens, &context);
                    for (scores, stats) in scores.chunks_exact(n).zip(stats) {
                        let exact = log_sum_exp(scores.iter().map(|&s| clean(s)));
                        let found = f64::from(stats.log_sum_exp());
                        let close = (found - exact).abs() <= 1e-5 + 1e-6 * exact.abs();
                        assert!(close || found == exact, "{context}: {found} for {exact}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_search_chooses_the_highest_weights() {
    let shape = PqShape::new(8, 4, 6).unwrap();
    let mut random = Rng::with_seed(3);
    for spread in SPREADS {
        for spoiled in [false, true] {
            for _ in 0..30 {
                let (n, group) = (1 + random.usize(..400), 1 + random.usize(..8));
                let rule = RULES[random.usize(..2)];
                let search = Search {
                    k: random.usize(..60),
                    sinks: random.usize(..8),
                    recent: random.usize(..8),
                    rule,
                };
                let mut luts = values(&mut random, group * shape.lut_len(), spread / 2.0);
                if spoiled {
                    let head = random.usize(..group) * shape.lut_len();
                    luts[head + random.usize(..64)] =
                        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][random.usize(..3)];
                }
                let packed: Vec<u8> = (0..shape.codes_len(n)).map(|_| random.u8(..)).collect();
                let codes = Codes::new(shape, n, &packed).unwrap();
                let mut floats = vec![0.0; SearchScratch::len(group, n)];
                let (mut stats, mut tokens) = (vec![SoftmaxStats::EMPTY; group], vec![0; search.found(n)]);
                let luts = Luts::new(shape, &luts).unwrap();
                let mut scratch = SearchScratch::new(n, &mut floats, &mut stats).unwrap();
                search_into(&luts, &codes, &search, &mut scratch, &mut tokens).unwrap();
                let scores = scratch.scores();
                // Tokens that are always selected do not count toward k.
                let sinks = search.sinks.min(n);
                let end = n - search.recent.min(n - sinks);
                let chosen: Vec<u32> = tokens
                    .iter()
                    .filter(|&&t| (sinks..end).contains(&(t as usize)))
                    .map(|&t| t - sinks as u32)
                    .collect();
                if group == 1 {
                    assert_eq!(chosen, sorted_best(&scores[sinks..end], search.k), "spread {spread}");
                }
                let context = format!("spread {spread}, group {group}, {search:?}");
                assert_best(&combined(scores, n, rule)[sinks..end], &chosen, &context);
            }
        }
    }
}

#[test]
fn reranking_keeps_the_highest_weights() {
    const DIM: usize = 12;
    let mut random = Rng::with_seed(4);
    for spread in SPREADS {
        for spoiled in [false, true] {
            for _ in 0..30 {
                let (n, group) = (1 + random.usize(..200), 1 + random.usize(..8));
                let (rule, k) = (RULES[random.usize(..2)], random.usize(..40));
                let mut queries = values(&mut random, group * DIM, spread / 3.0);
                let mut keys = values(&mut random, n * DIM, 1.0);
                if spoiled {
                    let bad = [f32::NAN, f32::INFINITY, 3e38][random.usize(..3)];
                    let rows = if random.usize(..2) == 0 { &mut queries } else { &mut keys };
                    let at = random.usize(..rows.len());
                    rows[at] = bad;
                }
                let mut floats = vec![0.0; SearchScratch::len(group, n)];
                let (mut stats, mut kept) = (vec![SoftmaxStats::EMPTY; group], vec![0; n.min(k)]);
                for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                    let mut scratch = SearchScratch::new(n, &mut floats, &mut stats).unwrap();
                    let rerank = Rerank { k, rule };
                    rerank_into_with(backend, &queries, &keys, &rerank, &mut scratch, &mut kept).unwrap();
                    if group == 1 {
                        assert_eq!(kept, sorted_best(scratch.scores(), k), "{backend:?}, spread {spread}");
                    }
                    let context = format!("{backend:?}, spread {spread}, group {group}, n {n}, k {k}");
                    assert_best(&combined(scratch.scores(), n, rule), &kept, &context);
                }
            }
        }
    }
}

#[test]
fn a_weight_that_vanished_ranks_below_every_other() {
    // Head 0 chooses token 3. Of the rest, head 1 weights tokens 5 and 6, and the logarithm orders the
    // others.
    let scores = [-900.0, -500.0, -700.0, 0.0, -600.0, -800.0, -950.0, -650.0];
    let mut group = scores.to_vec();
    group.extend([-1e4, -1e4, -1e4, -1e4, -1e4, 3.0, 2.0, -1e4]);
    for rule in RULES {
        let (mut stats, mut out) = ([SoftmaxStats::EMPTY; 2], [0.0; 8]);
        combine_group_into(&group, rule, &mut stats, &mut out).unwrap();
        assert!(out.iter().enumerate().all(|(t, &x)| (x > 0.0) == [3, 5, 6].contains(&t)), "{out:?}");
        for t in [0, 1, 2, 4, 7] {
            assert!((out[t] - scores[t]).abs() < 1e-3, "{out:?}");
        }
    }
}
