//! The owned caches of scalar codes: attention is that of the rows that went in, up to what the bits lose,
//! and nothing depends on how tokens were divided among appends, or on having been saved.

use std::sync::Arc;

use pq_core::sq::{HeadTransform, LayerCache, Shape, TransformParts};
use pq_core::*;
use proptest::prelude::*;

const HEADS: usize = 2;
const GROUP: usize = 3;
const DIM: usize = 32;
const DIM_V: usize = 16;
const FREQUENCIES: [f32; DIM / 2] =
    [1.0, 0.6, 0.4, 0.25, 0.15, 0.1, 0.06, 0.04, 0.025, 0.015, 0.01, 0.006, 0.004, 0.0025, 0.0015, 0.001];

fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn mean_key(h: usize) -> Vec<f32> {
    random(77 + h as u64, DIM).iter().map(|x| 3.0 * x).collect()
}

/// A basis that is not orthogonal, `I + u v^T`, and its dual, `I - v u^T / (1 + u^T v)`.
fn maps(h: usize) -> [Vec<f32>; 2] {
    let (u, v) = (random(h as u64, DIM), random(h as u64 ^ 5, DIM));
    let scale = 0.2 / (1.0 + 0.2 * u.iter().zip(&v).map(|(u, v)| u * v).sum::<f32>());
    let entry = |f: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..DIM * DIM).map(|i| f32::from(i / DIM == i % DIM) + f(i / DIM, i % DIM)).collect()
    };
    [entry(&|i, j| 0.2 * u[i] * v[j]), entry(&|i, j| -scale * v[i] * u[j])]
}

fn transforms(bits: u32, block: usize, mean_error: bool) -> Vec<Arc<HeadTransform>> {
    let transform = |h: usize| {
        let [basis, dual] = maps(h);
        let (keys, values) = (Shape::uniform(DIM, bits).unwrap(), Shape::uniform(DIM_V, bits).unwrap());
        let (frequencies, mean) = (&FREQUENCIES[..], &mean_key(h)[..]);
        let parts =
            TransformParts { frequencies, mean, basis: &basis, dual: &dual, keys, values, block, mean_error };
        Arc::new(HeadTransform::new(&parts).unwrap())
    };
    (0..HEADS).map(transform).collect()
}

/// Keys after RoPE and values of `n` tokens of all heads.
fn tokens(seed: u64, n: usize) -> (Vec<f32>, Vec<f32>) {
    let mut keys = random(seed, n * HEADS * DIM);
    for (t, row) in keys.chunks_exact_mut(HEADS * DIM).enumerate() {
        for (h, key) in row.chunks_exact_mut(DIM).enumerate() {
            key.iter_mut().zip(mean_key(h)).for_each(|(x, mean)| *x += mean);
            sq::rotate_by(&FREQUENCIES, t as i64, key).unwrap();
        }
    }
    (keys, random(seed ^ 1, n * HEADS * DIM_V))
}

fn append(cache: &mut LayerCache<f32>, (keys, values): &(Vec<f32>, Vec<f32>), from: usize, to: usize) {
    let part = |rows: &[f32], dim: usize| rows[from * HEADS * dim..to * HEADS * dim].to_vec();
    let (keys, values) = (part(keys, DIM), part(values, DIM_V));
    let keys = Rows::contiguous(&keys, HEADS * DIM).unwrap();
    cache.append(keys, Rows::contiguous(&values, HEADS * DIM_V).unwrap()).unwrap();
}

fn attend(cache: &LayerCache<f32>, attention: &Attention, queries: &[f32]) -> Vec<f32> {
    let rows = Rows::contiguous(queries, HEADS * GROUP * DIM).unwrap();
    let mut out = vec![f32::NAN; rows.rows() * HEADS * GROUP * DIM_V];
    cache.attend_into(attention, rows, &mut Workspace::default(), &mut out).unwrap();
    out
}

/// Attention in f64 of query token `i` of the last `of` tokens.
fn exact(
    (keys, values): &(Vec<f32>, Vec<f32>),
    attention: &Attention,
    queries: &[f32],
    n: usize,
) -> Vec<f64> {
    let of = queries.len() / (HEADS * GROUP * DIM);
    let mut all = vec![];
    for i in 0..of {
        let end = n - of + i + 1;
        let start = attention.window.map_or(0, |window| end.saturating_sub(window));
        for query_head in 0..HEADS * GROUP {
            let query = &queries[(i * HEADS * GROUP + query_head) * DIM..][..DIM];
            let h = query_head / GROUP;
            let score = |t: usize| {
                let key = &keys[(t * HEADS + h) * DIM..][..DIM];
                let x: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                let x = x * f64::from(attention.scale);
                attention.softcap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()).exp()
            };
            let weights: Vec<f64> = (start..end).map(score).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..DIM_V {
                let value = |t: usize| f64::from(values[(t * HEADS + h) * DIM_V + d]);
                let sum: f64 = (start..end).zip(&weights).map(|(t, weight)| weight * value(t)).sum();
                all.push(sum / total);
            }
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn attention_is_that_of_the_rows(
        seed: u64, n in 1_usize..400, of in 1_usize..4, small: bool, window in prop_oneof![Just(None), Just(Some(150))],
        softcap in prop_oneof![Just(None), Just(Some(3.0))],
    ) {
        let (rows, of) = (tokens(seed, n), of.min(n));
        let attention = Attention { window, softcap, ..Attention::scaled(0.2) };
        let queries = random(seed ^ 2, of * HEADS * GROUP * DIM);
        let block = if small { 32 } else { 64 };
        let mut cache = LayerCache::<f32>::new(
            &transforms(8, block, small), Window { sinks: 3, recent: 8, batch: 1 }).unwrap();
        append(&mut cache, &rows, 0, n);
        prop_assert_eq!(cache.len(), n);
        prop_assert_eq!(cache.heads()[0].coded(), (n.saturating_sub(11)) / block * block);
        let out = attend(&cache, &attention, &queries);
        for (x, y) in out.iter().zip(exact(&rows, &attention, &queries, n)) {
            prop_assert!((f64::from(*x) - y).abs() < 0.02, "{x} {y}");
        }

        // Other parts of the prompt, the same bytes; saved and restored, the same results.
        let mut other = LayerCache::<f32>::new(
            &transforms(8, block, small), Window { sinks: 3, recent: 8, batch: 1 }).unwrap();
        for from in (0..n).step_by(37) {
            append(&mut other, &rows, from, n.min(from + 37));
        }
        prop_assert_eq!(cache.to_bytes(), other.to_bytes());
        let restored = LayerCache::<f32>::from_bytes(&cache.to_bytes(), &transforms(8, block, small)).unwrap();
        prop_assert_eq!(&attend(&restored, &attention, &queries), &out);

        // Rejected tokens go, and the cache goes on.
        let kept = n * 2 / 3;
        other.truncate(kept);
        prop_assert_eq!(other.len(), kept);
        append(&mut other, &rows, kept, n);
        let again = attend(&other, &attention, &queries);
        for (x, y) in again.iter().zip(&out) {
            prop_assert!((x - y).abs() < 0.03, "{x} {y}");
        }
    }

    #[test]
    fn bytes_that_were_cut_or_changed_are_errors_or_other_tokens(n in 60_usize..90, at: prop::sample::Index, to: u8) {
        let (transforms, rows) = (transforms(2, 32, true), tokens(1, n));
        let mut cache = LayerCache::<f32>::new(&transforms, Window { sinks: 1, recent: 2, batch: 1 }).unwrap();
        append(&mut cache, &rows, 0, n);
        let mut bytes = cache.to_bytes();
        let at = at.index(bytes.len());
        prop_assert!(LayerCache::<f32>::from_bytes(&bytes[..at], &transforms).is_err());
        bytes[at] = to;
        if let Ok(cache) = LayerCache::<f32>::from_bytes(&bytes, &transforms) {
            attend(&cache, &Attention::default(), &random(3, HEADS * GROUP * DIM));
        }
    }
}

/// Fewer bits lose more, and the mean of the error gives some of it back where all values share an error.
#[test]
fn the_mean_of_the_error_helps_values_of_few_bits() {
    let (n, attention) = (300, Attention::scaled(0.02));
    let mut rows = tokens(4, n);
    // All values point the same way, as far as a quantizer of 1 bit is concerned.
    rows.1.iter_mut().enumerate().for_each(|(i, x)| *x = 0.3 * *x + [0.2, 0.9, 1.7][i % DIM_V % 3]);
    let queries = random(5, HEADS * GROUP * DIM);
    let exact = exact(&rows, &attention, &queries, n);
    let loss = |bits: u32, mean_error: bool| {
        let mut cache = LayerCache::<f32>::new(
            &transforms(bits, 64, mean_error),
            Window { sinks: 1, recent: 2, batch: 1 },
        )
        .unwrap();
        append(&mut cache, &rows, 0, n);
        let out = attend(&cache, &attention, &queries);
        out.iter().zip(&exact).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum::<f64>()
    };
    assert!(loss(1, true) < 0.1 * loss(1, false), "{} {}", loss(1, true), loss(1, false));
    assert!(loss(4, false) < 0.1 * loss(2, false));
}

#[test]
fn wrong_parts_are_errors() {
    let (keys, values) = (Shape::uniform(16, 4).unwrap(), Shape::uniform(16, 4).unwrap());
    let square = [0.0; 256];
    let parts = TransformParts {
        frequencies: &[0.0; 8],
        mean: &[0.0; 16],
        basis: &square,
        dual: &square,
        keys,
        values,
        block: 64,
        mean_error: false,
    };
    assert!(HeadTransform::new(&parts).is_ok());
    let uneven = Shape::new(32, &[1, 1, 1, 1, 2, 2, 2, 2]).unwrap();
    for (wrong, error) in [
        (TransformParts { block: 0, ..parts }, Error::Zero { what: "tokens of a block" }),
        (TransformParts { block: 288, ..parts }, Error::TooLarge),
        (
            TransformParts { block: 48, ..parts },
            Error::Unaligned { what: "tokens of a block", at: 48, multiple: 32 },
        ),
        (TransformParts { values: uneven, ..parts }, Error::ShapeMismatch),
        (
            TransformParts { basis: &square[1..], ..parts },
            Error::Length { what: "basis", expected: 256, actual: 255 },
        ),
        (
            TransformParts { frequencies: &[0.0; 9], ..parts },
            Error::Length { what: "frequencies", expected: 8, actual: 9 },
        ),
        (TransformParts { dual: &[f32::NAN; 256], ..parts }, Error::NotFinite { what: "dual", index: 0 }),
    ] {
        assert_eq!(HeadTransform::new(&wrong).err(), Some(error));
    }
}
