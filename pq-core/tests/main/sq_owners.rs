//! The owned caches of scalar codes: attention is that of the rows that went in, up to what the bits lose,
//! and nothing depends on how tokens were divided among appends, or on having been saved.

use std::sync::Arc;

use pq_core::sq::{HeadTransform, LayerCache, Shape, TransformParts};
use pq_core::*;
use proptest::prelude::*;

use super::support::random;

const HEADS: usize = 2;
const GROUP: usize = 3;
/// Components of keys and values.
const DIMS: [usize; 2] = [32, 16];

/// From 1 to 0.001 radians per position.
fn frequencies(dim: usize) -> Vec<f32> {
    (0..dim / 2).map(|i| 0.001_f32.powf(2.0 * i as f32 / dim as f32)).collect()
}

fn mean_key(h: usize, dim: usize) -> Vec<f32> {
    random::<f32>(77 + h as u64, dim).iter().map(|x| 3.0 * x).collect()
}

/// A basis that is not orthogonal, `I + u v^T`, and its dual, `I - v u^T / (1 + u^T v)`.
fn maps(h: usize, dim: usize) -> [Vec<f32>; 2] {
    let (u, v) = (random::<f32>(h as u64, dim), random::<f32>(h as u64 ^ 5, dim));
    let scale = 2.0 / dim as f32;
    let dual_scale = scale / (1.0 + scale * u.iter().zip(&v).map(|(u, v)| u * v).sum::<f32>());
    let entry = |f: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..dim * dim).map(|i| f32::from(i / dim == i % dim) + f(i / dim, i % dim)).collect()
    };
    [entry(&|i, j| scale * u[i] * v[j]), entry(&|i, j| -dual_scale * v[i] * u[j])]
}

fn transforms(dims: [usize; 2], bits: u32, block: usize, mean_error: bool) -> Vec<Arc<HeadTransform>> {
    let transform = |h: usize| {
        let [basis, dual] = maps(h, dims[0]);
        let [keys, values] = dims.map(|dim| Shape::uniform(dim, bits).unwrap());
        let (frequencies, mean) = (&frequencies(dims[0])[..], &mean_key(h, dims[0])[..]);
        let parts =
            TransformParts { frequencies, mean, basis: &basis, dual: &dual, keys, values, block, mean_error };
        Arc::new(HeadTransform::new(&parts).unwrap())
    };
    (0..HEADS).map(transform).collect()
}

/// Keys after RoPE and values of all heads, (n, heads, dim).
struct Tokens {
    dims: [usize; 2],
    rows: [Vec<f32>; 2],
}

impl Tokens {
    fn random(dims: [usize; 2], seed: u64, n: usize) -> Self {
        let mut rows = dims.map(|dim| random::<f32>(seed ^ dim as u64, n * HEADS * dim));
        for (t, row) in rows[0].chunks_exact_mut(HEADS * dims[0]).enumerate() {
            for (h, key) in row.chunks_exact_mut(dims[0]).enumerate() {
                key.iter_mut().zip(mean_key(h, dims[0])).for_each(|(x, mean)| *x += mean);
                sq::rotate_by(&frequencies(dims[0]), t as i64, key).unwrap();
            }
        }
        Self { dims, rows }
    }

    /// Row of a side, token and head.
    fn row(&self, side: usize, t: usize, h: usize) -> &[f32] {
        &self.rows[side][(t * HEADS + h) * self.dims[side]..][..self.dims[side]]
    }

    fn append(&self, cache: &mut LayerCache<f32>, from: usize, to: usize) -> Evicted {
        let part = |side: usize| {
            let row = HEADS * self.dims[side];
            Rows::contiguous(&self.rows[side][from * row..to * row], row).unwrap()
        };
        cache.append(part(0), part(1)).unwrap()
    }

    /// Queries of `of` tokens.
    fn queries(&self, seed: u64, of: usize) -> Vec<f32> {
        random::<f32>(seed, of * HEADS * GROUP * self.dims[0])
    }

    /// Attention in f64 of the last tokens, of which there are queries, up to token `n`.
    fn exact(&self, attention: &Attention, queries: &[f32], n: usize) -> Vec<f64> {
        let of = queries.len() / (HEADS * GROUP * self.dims[0]);
        let mut all = vec![];
        for (i, query) in queries.chunks_exact(self.dims[0]).enumerate() {
            let (end, h) = (n - of + i / (HEADS * GROUP) + 1, i % (HEADS * GROUP) / GROUP);
            let start = attention.window.map_or(0, |window| end.saturating_sub(window));
            let score = |t: usize| {
                let x: f64 =
                    query.iter().zip(self.row(0, t, h)).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                let x = x * f64::from(attention.scale);
                attention.softcap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()).exp()
            };
            let weights: Vec<f64> = (start..end).map(score).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..self.dims[1] {
                let value = |t: usize| f64::from(self.row(1, t, h)[d]);
                let sum: f64 = (start..end).zip(&weights).map(|(t, weight)| weight * value(t)).sum();
                all.push(sum / total);
            }
        }
        all
    }
}

fn attend(cache: &LayerCache<f32>, attention: &Attention, queries: &[f32]) -> Vec<f32> {
    let transform = cache.heads()[0].store().transform();
    let (dim, dim_v) = (transform.keys().dim(), transform.values().dim());
    let rows = Rows::contiguous(queries, HEADS * GROUP * dim).unwrap();
    let mut out = vec![f32::NAN; rows.rows() * HEADS * GROUP * dim_v];
    cache.attend_into(attention, rows, &mut Workspace::default(), &mut out).unwrap();
    out
}

/// Heads of models, multiples of 16 and others.
fn dims() -> impl Strategy<Value = [usize; 2]> {
    let dim = || prop::sample::select(vec![2, 8, 10, 16, 24, 32, 80, 96, 100, 112, 256]);
    prop_oneof![Just(DIMS), (dim(), dim()).prop_map(|(dim, dim_v)| [dim, dim_v])]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn attention_is_that_of_the_rows(
        dims in dims(), seed: u64, n in 1_usize..400, of in 1_usize..4, small: bool,
        window in prop_oneof![Just(None), Just(Some(150))],
        softcap in prop_oneof![Just(None), Just(Some(3.0))],
    ) {
        let (tokens, of) = (Tokens::random(dims, seed, n), of.min(n));
        let attention = Attention { window, softcap, ..Attention::scaled(0.2) };
        let queries = tokens.queries(seed ^ 2, of);
        let block = if small { 32 } else { 64 };
        let mut cache = LayerCache::<f32>::new(
            &transforms(dims, 8, block, small), Window { sinks: 3, recent: 8, batch: 1 }).unwrap();
        tokens.append(&mut cache, 0, n);
        prop_assert_eq!(cache.len(), n);
        prop_assert_eq!(cache.heads()[0].compressed(), (n.saturating_sub(11)) / block * block);
        let out = attend(&cache, &attention, &queries);
        for (x, y) in out.iter().zip(tokens.exact(&attention, &queries, n)) {
            prop_assert!((f64::from(*x) - y).abs() < 0.02, "{x} {y}");
        }

        // Other parts of the prompt, the same bytes; saved and restored, the same results.
        let mut other = LayerCache::<f32>::new(
            &transforms(dims, 8, block, small), Window { sinks: 3, recent: 8, batch: 1 }).unwrap();
        for from in (0..n).step_by(37) {
            tokens.append(&mut other, from, n.min(from + 37));
        }
        prop_assert_eq!(cache.to_bytes(), other.to_bytes());
        let restored = LayerCache::<f32>::from_bytes(&cache.to_bytes(), &transforms(dims, 8, block, small)).unwrap();
        prop_assert_eq!(&attend(&restored, &attention, &queries), &out);

        // Rejected tokens go, and the cache goes on.
        let kept = n * 2 / 3;
        other.truncate(kept);
        prop_assert_eq!(other.len(), kept);
        tokens.append(&mut other, kept, n);
        let again = attend(&other, &attention, &queries);
        for (x, y) in again.iter().zip(&out) {
            prop_assert!((x - y).abs() < 0.03, "{x} {y}");
        }
    }

    #[test]
    fn bytes_that_were_cut_or_changed_are_errors_or_other_tokens(n in 60_usize..90, at: prop::sample::Index, to: u8) {
        let (transforms, tokens) = (transforms(DIMS, 2, 32, true), Tokens::random(DIMS, 1, n));
        let mut cache = LayerCache::<f32>::new(&transforms, Window { sinks: 1, recent: 2, batch: 1 }).unwrap();
        tokens.append(&mut cache, 0, n);
        let mut bytes = cache.to_bytes();
        let at = at.index(bytes.len());
        prop_assert!(LayerCache::<f32>::from_bytes(&bytes[..at], &transforms).is_err());
        bytes[at] = to;
        if let Ok(cache) = LayerCache::<f32>::from_bytes(&bytes, &transforms) {
            attend(&cache, &Attention::default(), &tokens.queries(3, 1));
        }
    }
}

#[test]
fn a_batch_gives_the_bits_of_its_sequences() {
    let (transforms, attention) = (transforms(DIMS, 3, 32, false), Attention::scaled(0.7));
    let caches = [0, 1, 70, 200].map(|n| {
        let mut cache =
            LayerCache::<f32>::new(&transforms, Window { sinks: 2, recent: 8, batch: 4 }).unwrap();
        Tokens::random(DIMS, n as u64, n).append(&mut cache, 0, n);
        cache
    });
    let row = HEADS * GROUP * DIMS[0];
    let queries = random::<f32>(3, caches.len() * row);
    let singles: Vec<f32> = caches
        .iter()
        .zip(queries.chunks(row))
        .flat_map(|(cache, queries)| attend(cache, &attention, queries))
        .collect();
    let mut out = vec![f32::NAN; singles.len()];
    let (batch, rows) = (caches.each_ref(), Rows::contiguous(&queries, row).unwrap());
    attend_batch_into(&batch, &attention, rows, &mut Workspace::default(), &mut out).unwrap();
    assert_eq!(out, singles);
}

/// With a checksum every turned bit is found; without one most are read as other codes.
#[test]
fn turned_bits_of_checked_bytes_are_errors() {
    let (transforms, tokens) = (transforms(DIMS, 2, 32, true), Tokens::random(DIMS, 1, 40));
    let mut cache = LayerCache::<f32>::new(&transforms, Window { sinks: 1, recent: 2, batch: 1 }).unwrap();
    tokens.append(&mut cache, 0, 40);
    let (plain, checked) = (cache.to_bytes(), cache.to_bytes_checked());
    let read = |bytes: &[u8]| LayerCache::<f32>::from_bytes(bytes, &transforms).map(|cache| cache.to_bytes());
    assert_eq!((read(&plain).as_ref(), read(&checked).as_ref()), (Ok(&plain), Ok(&plain)));
    for bit in (0..8 * checked.len()).filter(|bit| *bit < 256 || bit % 13 == 0) {
        let mut changed = checked.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&changed).is_err(), "bit {bit} of {}", 8 * checked.len());
    }
    assert!((0..checked.len()).all(|len| read(&checked[..len]).is_err()));
    for transform in &transforms {
        let (plain, checked) = (transform.to_bytes(), transform.to_bytes_checked());
        let read = |bytes: &[u8]| HeadTransform::from_bytes(bytes).map(|transform| transform.to_bytes());
        assert_eq!((read(&plain).as_ref(), read(&checked).as_ref()), (Ok(&plain), Ok(&plain)));
        for byte in (0..checked.len()).filter(|byte| *byte < 128 || byte % 13 == 0) {
            let mut changed = checked.clone();
            changed[byte] ^= 1 << (byte % 8);
            assert!(read(&changed).is_err(), "byte {byte} of {}", checked.len());
        }
        assert!((0..checked.len()).all(|len| read(&checked[..len]).is_err()));
    }
    // A cache is restored under its own transform, also a saved one, and under no other.
    let saved = transforms.iter().map(|transform| HeadTransform::from_bytes(&transform.to_bytes()).unwrap());
    let saved: Vec<Arc<HeadTransform>> = saved.map(Arc::new).collect();
    let restored = LayerCache::<f32>::from_bytes(&plain, &saved).unwrap();
    let queries = tokens.queries(2, 1);
    let attention = Attention::scaled(0.2);
    assert_eq!(attend(&restored, &attention, &queries), attend(&cache, &attention, &queries));
    let others = self::transforms(DIMS, 2, 64, true);
    assert!(LayerCache::<f32>::from_bytes(&plain, &others).is_err());
}

/// Fewer bits lose more, and the mean of the error gives some of it back where all values share an error.
#[test]
fn the_mean_of_the_error_helps_values_of_few_bits() {
    let (n, attention) = (300, Attention::scaled(0.02));
    let mut tokens = Tokens::random(DIMS, 4, n);
    // All values point the same way, as far as a quantizer of 1 bit is concerned.
    let values = tokens.rows[1].iter_mut().enumerate();
    values.for_each(|(i, x)| *x = 0.3 * *x + [0.2, 0.9, 1.7][i % DIMS[1] % 3]);
    let queries = tokens.queries(5, 1);
    let exact = tokens.exact(&attention, &queries, n);
    let loss = |bits: u32, mean_error: bool| {
        let mut cache = LayerCache::<f32>::new(
            &transforms(DIMS, bits, 64, mean_error),
            Window { sinks: 1, recent: 2, batch: 1 },
        )
        .unwrap();
        tokens.append(&mut cache, 0, n);
        let out = attend(&cache, &attention, &queries);
        out.iter().zip(&exact).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum::<f64>()
    };
    assert!(loss(1, true) < 0.1 * loss(1, false), "{} {}", loss(1, true), loss(1, false));
    assert!(loss(4, false) < 0.1 * loss(2, false));
}

/// Appends report what coding lost: bits of keys and their order are a head's own.
#[test]
fn more_bits_for_keys_lose_less_of_them() {
    let (n, attention) = (131, Attention::scaled(0.2));
    let tokens = Tokens::random(DIMS, 6, n);
    let queries = tokens.queries(5, 1);
    let order: Vec<usize> = (0..DIMS[0]).map(|i| (5 * i + 3) % DIMS[0]).collect();
    let recoded = |transforms: &[Arc<HeadTransform>], bits: u32| -> Vec<Arc<HeadTransform>> {
        let keys = Shape::uniform(DIMS[0], bits).unwrap();
        transforms.iter().map(|transform| Arc::new(transform.recoded(keys, &order).unwrap())).collect()
    };
    let run = |transforms: &[Arc<HeadTransform>]| {
        let mut cache = LayerCache::<f32>::new(transforms, Window { sinks: 1, recent: 2, batch: 1 }).unwrap();
        let evicted = tokens.append(&mut cache, 0, n);
        assert_eq!(evicted.tokens, 128);
        (evicted, attend(&cache, &attention, &queries), cache.to_bytes())
    };
    let (three, eight) = (transforms(DIMS, 3, 64, false), transforms(DIMS, 8, 64, false));
    let [(few, ..), (more, ..)] = [run(&three), run(&recoded(&three, 8))];
    assert!(more.key_error < few.key_error / 500.0, "{few:?} {more:?}");
    assert!(few.key_error > 0.0 && more.value_error == few.value_error, "{few:?} {more:?}");
    let ((_, out, _), (_, reordered, bytes)) = (run(&eight), run(&recoded(&eight, 8)));
    for (x, y) in out.iter().zip(&reordered) {
        assert!((x - y).abs() < 0.01, "{x} {y}");
    }
    assert!(LayerCache::<f32>::from_bytes(&bytes, &eight).is_err(), "another transform");

    let wrong =
        |keys: u32, order: &[usize]| three[0].recoded(Shape::uniform(keys as usize, 3).unwrap(), order).err();
    assert_eq!(wrong(16, &order), Some(Error::ShapeMismatch));
    assert!(matches!(wrong(32, &order[1..]), Some(Error::Length { .. })));
    assert_eq!(wrong(32, &[7; 32]), Some(Error::BadField { what: "order" }));
    assert_eq!(wrong(32, &[32; 32]), Some(Error::BadField { what: "order" }));
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
    let odd = Shape::uniform(15, 4).unwrap();
    let uneven = Shape::new(32, &[1, 1, 1, 1, 2, 2, 2, 2]).unwrap();
    for (wrong, error) in [
        (TransformParts { block: 0, ..parts }, Error::Zero { what: "tokens of a block" }),
        (TransformParts { block: 288, ..parts }, Error::TooLarge),
        (
            TransformParts { block: 48, ..parts },
            Error::Unaligned { what: "tokens of a block", at: 48, multiple: 32 },
        ),
        (TransformParts { keys: odd, ..parts }, Error::Unaligned { what: "dim", at: 15, multiple: 2 }),
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

/// Attention over rows of edge values: those of a side, from token 10 on and of one head.
fn attended(dims: [usize; 2], change: impl Fn(usize, &mut [f32], &mut [f32])) -> (Vec<f32>, Vec<f64>) {
    let (n, attention) = (131, Attention::scaled(0.2));
    let mut tokens = Tokens::random(dims, 9, n);
    let [keys, values] = &mut tokens.rows;
    let rows = keys.chunks_exact_mut(HEADS * dims[0]).zip(values.chunks_exact_mut(HEADS * dims[1]));
    rows.enumerate().for_each(|(t, (key, value))| change(t, &mut key[..dims[0]], &mut value[..dims[1]]));
    let queries = tokens.queries(5, 1);
    let transforms = transforms(dims, 8, 64, true);
    let mut cache = LayerCache::<f32>::new(&transforms, Window { sinks: 1, recent: 2, batch: 1 }).unwrap();
    let evicted = tokens.append(&mut cache, 0, n);
    assert!(evicted.key_error.is_finite() && evicted.value_error.is_finite(), "{evicted:?}");
    (attend(&cache, &attention, &queries), tokens.exact(&attention, &queries, n))
}

fn distance(out: &[f32], exact: &[f64]) -> f64 {
    let largest = exact.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    let of = |(x, y): (&f32, &f64)| if x.is_nan() { f64::INFINITY } else { (f64::from(*x) - y).abs() };
    out.iter().zip(exact).map(of).fold(0.0, f64::max) / largest.max(1e-30)
}

/// A NaN or an infinity counts as 0: other tokens, also those of its block, have their codes as if it were not
/// there.
#[test]
fn what_is_not_finite_spoils_its_own_token_alone() {
    for dims in [DIMS, [2, 24], [80, 2], [256, 16]] {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let spoilt = attended(dims, |t, key, value| {
                if t == 20 {
                    (key[1], value[dims[1] - 1]) = (wrong, wrong);
                }
            });
            // The key is its mean, as far as the codes say, and the value is short of a component.
            let mended = attended(dims, |t, key, value| {
                if t == 20 {
                    key.copy_from_slice(&mean_key(0, dims[0]));
                    sq::rotate_by(&frequencies(dims[0]), 20, key).unwrap();
                    value[dims[1] - 1] = 0.0;
                }
            });
            assert!(distance(&spoilt.0, &mended.1) < 0.02, "{dims:?}, {wrong}");
        }
    }
}

/// Rows of every size that a byte of a norm or of a step reaches are coded alike, and beyond it attention is
/// finite.
#[test]
fn rows_of_edge_values_are_coded() {
    for dims in [DIMS, [2, 24], [80, 2], [256, 16]] {
        for (size, most) in [
            (0.0, 0.0),
            (1e-40, 1e30),
            (1e-6, 1e30),
            (0.01, 0.02),
            (1.0, 0.02),
            (5.0, 0.02),
            (1e4, 1e30),
            (1e30, 1e30),
        ] {
            let (out, exact) = attended(dims, |_, _, value| value.iter_mut().for_each(|x| *x *= size));
            let head = |x: usize| x < GROUP * dims[1]; // the values of the other are as they were
            let [own, others]: [Vec<usize>; 2] =
                [true, false].map(|own| (0..out.len()).filter(|&i| head(i) == own).collect());
            let pick =
                |at: &[usize]| -> (Vec<f32>, Vec<f64>) { at.iter().map(|&i| (out[i], exact[i])).unzip() };
            let ((out, exact), (other, other_exact)) = (pick(&own), pick(&others));
            assert!(distance(&other, &other_exact) < 0.02, "{dims:?}, {size}");
            assert!(out.iter().all(|x| x.is_finite()), "{dims:?}, {size}");
            match size == 0.0 {
                true => assert!(out.iter().all(|x| x.abs() < 1e-3), "{dims:?}: {out:?}"),
                false => {
                    assert!(distance(&out, &exact) <= most, "{dims:?}, {size}: {}", distance(&out, &exact))
                }
            }
        }
        // All tokens equal, and keys of no length.
        let (out, exact) = attended(dims, |_, key, value| {
            key.fill(0.25);
            value.fill(-0.5);
        });
        assert!(distance(&out, &exact) < 0.02, "{dims:?}");
        let (out, exact) = attended(dims, |_, key, _| key.fill(0.0));
        assert!(distance(&out, &exact) < 0.02, "{dims:?}");
        let (out, _) = attended(dims, |t, key, _| key[0] = if t % 7 == 0 { 1e30 } else { key[0] });
        assert!(out.iter().all(|x| x.is_finite()), "{dims:?}");
    }
}
