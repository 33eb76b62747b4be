//! Attention of a cache with bases is that of the plain rows that went in, up to what the bits lose, whatever
//! the element type, the group, and the way in which tokens were divided among appends.

#![allow(clippy::unwrap_used)] // helpers of tests, too

use std::sync::Arc;

use half::{bf16, f16};
use kv_attend::{Attention, Element, ElementType, Rows, Window, Workspace};
use kv_owners::sq::{AnyLayerCache, Basis, Bits, Head, LayerCache, Samples};

const HEADS: usize = 2;
const DIM: usize = 32;
const DIM_V: usize = 16;
const WINDOW: Window = Window { sinks: 2, recent: 8, batch: 32 };

fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| 2.0 * rng.f32() - 1.0).collect()
}

fn frequencies() -> Vec<f32> {
    (0..DIM / 2).map(|i| 0.001_f32.powf(2.0 * i as f32 / DIM as f32)).collect()
}

/// The mean of a component of a row (heads, dim).
fn offset(component: usize) -> f32 {
    (component as f32).sin()
}

/// Rows (n, heads, dim) whose components have deviations and means of their own.
fn rows<E: Element>(seed: u64, n: usize, heads: usize, dim: usize) -> Vec<E> {
    let scale = |i: usize| 0.9_f32.powi((i % dim) as i32);
    let row = random(seed, n * heads * dim).into_iter().enumerate();
    row.map(|(i, x)| E::from_f32(x * scale(i) + offset(i % (heads * dim)))).collect()
}

/// Rows of several heads, rotated to their positions.
fn rotated(rows: &[f32], heads: usize, first: usize) -> Vec<f32> {
    let mut rows = rows.to_vec();
    for (t, row) in rows.chunks_exact_mut(heads * DIM).enumerate() {
        pq_core::sq::rotate_by(&frequencies(), (first + t) as i64, row).unwrap();
    }
    rows
}

fn samples<'a, E: Element>(keys: &'a [E], queries: &'a [E], values: &'a [E], f: &'a [f32]) -> Samples<'a, E> {
    Samples {
        keys: Rows::contiguous(keys, HEADS * DIM).unwrap(),
        queries: Rows::contiguous(queries, HEADS * 3 * DIM).unwrap(),
        values: Rows::contiguous(values, HEADS * DIM_V).unwrap(),
        frequencies: f,
        rotated_from: None,
    }
}

fn bases() -> Vec<Basis> {
    let (keys, queries) = (rows::<f32>(1, 400, HEADS, DIM), rows::<f32>(2, 400, HEADS * 3, DIM));
    let values = rows::<f32>(3, 400, HEADS, DIM_V);
    Basis::fit_layer(&samples(&keys, &queries, &values, &frequencies()), HEADS, 32).unwrap()
}

fn heads(bits: u32) -> Vec<Arc<Head>> {
    bases().iter().map(|basis| basis.head(&frequencies(), &Bits::uniform(bits)).unwrap()).collect()
}

/// Attention in f64 of all query heads of the last token.
fn exact<E: Element>(keys: &[E], values: &[E], queries: &[f32], scale: f64) -> Vec<f64> {
    let group = queries.len() / (HEADS * DIM);
    let query_heads = queries.chunks_exact(DIM).enumerate();
    let attend = |(q, query): (usize, &[f32])| {
        let head = q / group;
        let score = |key: &[E]| {
            let key = &key[head * DIM..][..DIM];
            scale * key.iter().zip(query).map(|(k, q)| f64::from(k.to_f32() * q)).sum::<f64>()
        };
        let weights: Vec<f64> = keys.chunks_exact(HEADS * DIM).map(|key| score(key).exp()).collect();
        let (values, sum) = (values.chunks_exact(HEADS * DIM_V), weights.iter().sum::<f64>());
        let mut out = vec![0.0; DIM_V];
        for (weight, value) in weights.iter().zip(values) {
            let value = value[head * DIM_V..][..DIM_V].iter();
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight / sum * f64::from(v.to_f32()));
        }
        out
    };
    query_heads.flat_map(attend).collect()
}

/// The relative error of attention with `bits`, for groups of `group` query heads.
fn error<E: Element>(bits: u32, group: usize) -> f64 {
    let n = 300;
    let keys: Vec<E> =
        rotated(&rows::<f32>(5, n, HEADS, DIM), HEADS, 0).iter().map(|&x| E::from_f32(x)).collect();
    let values = rows::<E>(6, n, HEADS, DIM_V);
    let (k, v) =
        (Rows::contiguous(&keys, HEADS * DIM).unwrap(), Rows::contiguous(&values, HEADS * DIM_V).unwrap());
    let mut cache = LayerCache::new(&heads(bits), WINDOW).unwrap();
    for range in [0..17, 17..200, 200..n] {
        cache.append(k.slice(range.clone()).unwrap(), v.slice(range).unwrap()).unwrap();
    }
    assert!(cache.heads()[0].compressed() > 250);
    let queries = rotated(&random(7, HEADS * group * DIM), HEADS * group, n - 1);
    let mut out = vec![0.0; HEADS * group * DIM_V];
    let attention = Attention::scaled(0.4);
    cache.attend_into(&attention, Rows::from(&queries[..]), &mut Workspace::default(), &mut out).unwrap();
    let expected = exact(&keys, &values, &queries, 0.4);
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut out.iter().zip(&expected).map(|(&a, b)| f64::from(a) - b));
    (difference / squares(&mut expected.iter().copied())).sqrt()
}

#[test]
fn attention_is_that_of_the_rows_up_to_the_bits() {
    for (bits, least) in [(8, 0.002), (4, 0.03), (2, 0.12)] {
        for group in [1, 3, 20] {
            let errors = [error::<f32>(bits, group), error::<f16>(bits, group), error::<bf16>(bits, group)];
            assert!(errors.iter().all(|&error| error < least), "{bits} bits, group {group}: {errors:?}");
        }
    }
}

/// Windows from none to beyond the text, texts from one token on, groups of 1 to 16: every token is exact or
/// coded.
#[test]
fn windows_and_texts_of_any_length() {
    let heads = heads(8);
    for (sinks, recent) in
        [(0, 0), (0, 1), (1, 0), (4096, 0), (0, 4096), (usize::MAX, 0), (0, usize::MAX / 2)]
    {
        let window = Window { sinks, recent, batch: 1 };
        for (n, group) in [(1, 1), (1, 16), (2, 3), (31, 1), (33, 16), (70, 5)] {
            let case = format!("{n} tokens, groups of {group}, {window:?}");
            let (keys, values) =
                (rotated(&rows(5, n, HEADS, DIM), HEADS, 0), rows::<f32>(6, n, HEADS, DIM_V));
            let mut cache = LayerCache::new(&heads, window).unwrap();
            let parts = (Rows::contiguous(&keys, HEADS * DIM), Rows::contiguous(&values, HEADS * DIM_V));
            cache.append(parts.0.unwrap(), parts.1.unwrap()).unwrap();
            let queries = rotated(&random(7, HEADS * group * DIM), HEADS * group, n - 1);
            let mut out = vec![f32::NAN; HEADS * group * DIM_V];
            let attention = Attention::scaled(0.4);
            cache
                .attend_into(&attention, Rows::from(&queries[..]), &mut Workspace::default(), &mut out)
                .unwrap();
            let most = if n <= sinks.saturating_add(recent) { 1e-5 } else { 0.02 };
            let expected = exact(&keys, &values, &queries, 0.4);
            let worst = out.iter().zip(&expected).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < most, "{case}: {worst}");
        }
    }
}

/// What is saved does not depend on how tokens were divided among appends.
#[test]
fn tokens_are_appended_in_any_parts() {
    let (n, heads) = (400, heads(3));
    let (keys, values) = (rotated(&rows(5, n, HEADS, DIM), HEADS, 0), rows::<f32>(6, n, HEADS, DIM_V));
    let (k, v) =
        (Rows::contiguous(&keys, HEADS * DIM).unwrap(), Rows::contiguous(&values, HEADS * DIM_V).unwrap());
    let saved = |part: usize| {
        let mut cache = LayerCache::new(&heads, WINDOW).unwrap();
        for start in (0..n).step_by(part) {
            let range = start..n.min(start + part);
            cache.append(k.slice(range.clone()).unwrap(), v.slice(range).unwrap()).unwrap();
        }
        cache.to_bytes()
    };
    assert!([1, 7, 32, 100].into_iter().all(|part| saved(part) == saved(n)));
}

#[test]
fn samples_after_rope_give_the_basis_of_those_before() {
    let (keys, queries) = (rows::<f32>(1, 400, HEADS, DIM), rows::<f32>(2, 400, HEADS * 3, DIM));
    let (values, f) = (rows::<f32>(3, 400, HEADS, DIM_V), frequencies());
    let (keys, queries) = (rotated(&keys, HEADS, 7), rotated(&queries, HEADS * 3, 7));
    let samples = Samples { rotated_from: Some(7), ..samples(&keys, &queries, &values, &f) };
    for (a, b) in Basis::fit_layer(&samples, HEADS, 32).unwrap().iter().zip(bases()) {
        assert!(a.mean.iter().zip(&b.mean).all(|(a, b)| (a - b).abs() < 1e-5));
        assert!(a.sigma.iter().zip(&b.sigma).all(|(a, b)| (a - b).abs() < 1e-4 * b));
        assert_eq!((&a.value_mean, a.value_scale), (&b.value_mean, b.value_scale));
    }
}

#[test]
fn what_is_saved_continues_bit_for_bit() {
    let basis = &bases()[0];
    assert_eq!(&Basis::from_bytes(&basis.to_bytes()).unwrap(), basis);
    let heads = heads(3);
    let restored: Vec<_> = heads.iter().map(|head| Head::from_bytes(&head.to_bytes()).unwrap()).collect();
    let (keys, values) = (rows::<bf16>(8, 100, HEADS, DIM), rows::<bf16>(9, 100, HEADS, DIM_V));
    let mut cache = AnyLayerCache::new(ElementType::Bf16, &heads, WINDOW).unwrap();
    let (k, v) =
        (Rows::contiguous(&keys, HEADS * DIM).unwrap(), Rows::contiguous(&values, HEADS * DIM_V).unwrap());
    cache.append(k.into(), v.into()).unwrap();
    let mut other = AnyLayerCache::from_bytes(&cache.to_bytes_checked(), &restored).unwrap();
    cache.append(k.into(), v.into()).unwrap();
    other.append(k.into(), v.into()).unwrap();
    assert_eq!(cache.to_bytes(), other.to_bytes());

    let swapped = [heads[1].clone(), heads[0].clone()];
    let refused = AnyLayerCache::from_bytes(&cache.to_bytes(), &swapped).map(drop).unwrap_err();
    assert_eq!(refused.code(), 12, "{refused}");
    let mut forged = basis.clone();
    forged.value_mean[0] += 1.0;
    for forged in [forged, Basis { value_scale: 2.0 * basis.value_scale, ..basis.clone() }] {
        let forged = forged.head(&frequencies(), &Bits::uniform(3)).unwrap();
        let refused = AnyLayerCache::from_bytes(&cache.to_bytes(), &[forged, heads[1].clone()]).map(drop);
        assert_eq!(refused.unwrap_err().code(), 12);
    }
    for bytes in [basis.to_bytes(), heads[0].to_bytes()] {
        for cut in 0..bytes.len().min(60) {
            assert!(Basis::from_bytes(&bytes[..cut]).is_err() && Head::from_bytes(&bytes[..cut]).is_err());
        }
    }
}

/// Saved bytes without their checksum.
fn unchecked(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - 4);
    bytes[7] &= 0x7f; // the version's bit that announces it
    bytes
}

/// Reads what was saved and uses it.
type Serves<'a> = &'a dyn Fn(&[u8]) -> Result<(), kv_owners::Error>;

/// Every bit of what is saved turned, with a checksum and without: an error, or parts that serve without a
/// panic.
#[test]
fn turned_bits_are_errors_or_serve() {
    let (frequencies, window) = ([0.5], Window { sinks: 1, recent: 2, batch: 32 });
    let (keys, values) = (random(1, 40 * 2), random(2, 40 * 3));
    let samples = Samples {
        keys: Rows::contiguous(&keys, 2).unwrap(),
        queries: Rows::contiguous(&keys, 2).unwrap(),
        values: Rows::contiguous(&values, 3).unwrap(),
        frequencies: &frequencies,
        rotated_from: None,
    };
    let filled = |head: &Arc<Head>| -> Result<LayerCache<f32>, kv_owners::Error> {
        let mut cache = LayerCache::new(std::slice::from_ref(head), window)?;
        cache.append(samples.keys, samples.values)?;
        Ok(cache)
    };
    let serve = |cache: &mut LayerCache<f32>| -> Result<(), kv_owners::Error> {
        let mut out = [0.0; 3];
        let attention = Attention::scaled(0.5);
        cache.attend_into(&attention, Rows::from(&keys[..2]), &mut Workspace::default(), &mut out)?;
        cache.append(samples.keys, samples.values)?;
        cache.truncate(20);
        Ok(())
    };
    let basis = Basis::fit_layer(&samples, 1, 32).unwrap().remove(0);
    let head = basis.head(&frequencies, &Bits { mean_error: true, ..Bits::default() }).unwrap();
    let cache = filled(&head).unwrap();
    let basis_serves = |bytes: &[u8]| {
        let head = Basis::from_bytes(bytes)?.head(&frequencies, &Bits { widen: true, ..Bits::default() })?;
        serve(&mut filled(&head)?)
    };
    let head_serves = |bytes: &[u8]| serve(&mut filled(&Head::from_bytes(bytes)?)?);
    let cache_serves = |bytes: &[u8]| {
        LayerCache::from_bytes(bytes, std::slice::from_ref(&head)).and_then(|mut cache| serve(&mut cache))
    };
    let cases: [(_, Serves<'_>); 3] = [
        (basis.to_bytes(), &basis_serves),
        (head.to_bytes(), &head_serves),
        (cache.to_bytes_checked(), &cache_serves),
    ];
    for (checked, serves) in cases {
        assert_eq!(serves(&checked), Ok(()));
        for (is_checked, mut bytes) in [(true, checked.clone()), (false, unchecked(checked))] {
            assert_eq!(serves(&bytes), Ok(()));
            for bit in 0..8 * bytes.len() {
                bytes[bit / 8] ^= 1 << (bit % 8);
                let served = serves(&bytes);
                assert!(!is_checked || served.is_err(), "bit {bit}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
}

/// Keys of three times the deviation are misfits: with `widen` the head gets more bits, and keeps them when
/// the cache is saved; an empty cache has the head's bits again.
#[test]
fn keys_that_do_not_fit_get_more_bits() {
    let n = 300;
    let (keys, means) = (rows::<f32>(5, n, HEADS, DIM), (0..HEADS * DIM).map(offset).cycle());
    let keys: Vec<f32> = keys.iter().zip(means).map(|(x, mean)| 3.0 * (x - mean) + mean).collect();
    let (keys, values) = (rotated(&keys, HEADS, 0), rows::<f32>(6, n, HEADS, DIM_V));
    let filled = |widen| {
        let bits = Bits { widen, ..Bits::uniform(3) };
        let heads: Vec<_> = bases().iter().map(|basis| basis.head(&frequencies(), &bits).unwrap()).collect();
        let mut cache = LayerCache::new(&heads, WINDOW).unwrap();
        let (k, v) = (Rows::contiguous(&keys, HEADS * DIM), Rows::contiguous(&values, HEADS * DIM_V));
        cache.append(k.unwrap(), v.unwrap()).unwrap();
        (heads, cache)
    };
    let fits = |cache: &LayerCache<f32>| {
        cache.heads().iter().map(|head| head.store().fits().keys).collect::<Vec<_>>()
    };
    let ((_, narrow), (heads, mut wide)) = (filled(false), filled(true));
    for (before, after) in fits(&narrow).iter().zip(fits(&wide)) {
        assert!(before.is_misfit() && before.added_bits == 0.0, "{before:?}");
        assert!(!after.is_misfit() && after.added_bits > 0.0, "{after:?}");
        assert_eq!((before.expected, before.tokens), (after.expected, after.tokens));
    }
    assert!(wide.size() > narrow.size());

    let heads: Vec<_> = heads.iter().map(|head| Head::from_bytes(&head.to_bytes()).unwrap()).collect();
    let restored = LayerCache::<f32>::from_bytes(&wide.to_bytes(), &heads).unwrap();
    assert_eq!((restored.to_bytes(), fits(&restored)), (wide.to_bytes(), fits(&wide)));
    wide.truncate(WINDOW.sinks);
    assert!(fits(&wide).iter().all(|fit| fit.tokens == 0 && fit.added_bits == 0.0));
}

/// Values of every length, of calibration and of text, `size` times those of the other tests: the output is
/// the scaled one, bit for bit where the size is a power of two.
#[test]
fn values_of_every_length_keep_their_bits() {
    let n = 200;
    let (keys, queries) = (rows::<f32>(1, 400, HEADS, DIM), rows::<f32>(2, 400, HEADS * 3, DIM));
    let (text, f) = (rotated(&rows::<f32>(5, n, HEADS, DIM), HEADS, 0), frequencies());
    let query = rotated(&random(7, HEADS * DIM), HEADS, n - 1);
    let sized = |seed, n, size: f32| -> Vec<f32> {
        rows::<f32>(seed, n, HEADS, DIM_V).iter().map(|x| x * size).collect()
    };
    let attend = |fitted: f32, size: f32| {
        let calibration = sized(3, 400, fitted);
        let bases = Basis::fit_layer(&samples(&keys, &queries, &calibration, &f), HEADS, 32).unwrap();
        let head = |basis: &Basis| basis.head(&f, &Bits::uniform(4)).unwrap();
        let mut cache = LayerCache::<f32>::new(&bases.iter().map(head).collect::<Vec<_>>(), WINDOW).unwrap();
        let values = sized(6, n, size);
        let (k, v) = (Rows::contiguous(&text, HEADS * DIM), Rows::contiguous(&values, HEADS * DIM_V));
        let lost = cache.append(k.unwrap(), v.unwrap()).unwrap();
        let mut out = vec![0.0; HEADS * DIM_V];
        let attention = Attention::scaled(0.4);
        cache.attend_into(&attention, Rows::from(&query[..]), &mut Workspace::default(), &mut out).unwrap();
        let expected = exact(&text, &values, &query, 0.4);
        let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
        let difference = squares(&mut out.iter().zip(&expected).map(|(&a, b)| f64::from(a) - b));
        let error = (difference / squares(&mut expected.into_iter())).sqrt();
        let misfit = cache.heads().iter().any(|head| head.store().fits().values.is_misfit());
        (out, error, misfit, lost.value_error / f64::from(size) / f64::from(size))
    };
    let (plain, error, misfit, lost) = attend(1.0, 1.0);
    assert!(error < 0.03 && !misfit && lost > 0.0, "{error}, {lost}");
    for exponent in [-100, -60, -20, 20, 60, 100] {
        let size = 2.0_f32.powi(exponent);
        let scaled: Vec<f32> = plain.iter().map(|x| x * size).collect();
        assert_eq!(attend(size, size), (scaled, error, misfit, lost), "2^{exponent}");
    }
    for size in [1e-6, 1e-4, 0.01, 100.0, 1e4, 1e6] {
        let (_, error, misfit, _) = attend(size, size);
        assert!(error < 0.03 && !misfit, "{size}: {error}");
    }
    // A text unlike the calibration: values that are too long are noticed, short ones lose no more than those
    // of the calibration.
    for (fitted, size, most) in [(1.0, 60.0, 0.03), (1.0, 1e6, f64::INFINITY), (1e-6, 1.0, f64::INFINITY)] {
        let (_, error, misfit, _) = attend(fitted, size);
        assert!(error < most && misfit == most.is_infinite(), "{size} after {fitted}: {error}");
    }
    for (fitted, size) in [(1e6, 1.0), (1.0, 1e-6)] {
        let (_, error, misfit, _) = attend(fitted, size);
        assert!(error * f64::from(size / fitted) < 0.15 && !misfit, "{size} after {fitted}: {error}");
    }
}

#[test]
fn arguments_that_do_not_fit_are_errors() {
    let (keys, queries) = (rows::<f32>(1, 40, HEADS, DIM), rows::<f32>(2, 40, HEADS * 3, DIM));
    let (values, f) = (rows::<f32>(3, 40, HEADS, DIM_V), frequencies());
    let good = samples(&keys, &queries, &values, &f);
    let code = |samples: &Samples<'_, f32>, heads, block| {
        Basis::fit_layer(samples, heads, block).map(drop).map_err(|error| error.code())
    };
    assert_eq!(code(&good, HEADS, 32), Ok(()));
    assert_eq!([code(&good, 0, 32), code(&good, HEADS, 0)], [Err(1); 2]);
    assert_eq!([code(&good, HEADS, 288), code(&good, HEADS, 33)], [Err(5), Err(208)]);
    assert_eq!(code(&good, 3, 32), Err(4));
    assert_eq!(code(&Samples { frequencies: &f[1..], ..good }, HEADS, 32), Err(2));
    assert_eq!(code(&Samples { keys: good.keys.slice(0..0).unwrap(), ..good }, HEADS, 32), Err(1));
    for first in [usize::MAX, usize::MAX - 39, i64::MAX as usize, i64::MAX as usize - 39] {
        assert_eq!(code(&Samples { rotated_from: Some(first), ..good }, HEADS, 32), Err(5));
    }
    assert_eq!(code(&Samples { rotated_from: Some(i64::MAX as usize - 40), ..good }, HEADS, 32), Ok(()));
    let mut infinite = keys.clone();
    infinite[5] = f32::INFINITY;
    let keys = Rows::contiguous(&infinite, HEADS * DIM).unwrap();
    assert_eq!(code(&Samples { keys, ..good }, HEADS, 32), Err(7));
    let mut infinite = values.clone();
    infinite[5] = f32::NAN;
    let values = Rows::contiguous(&infinite, HEADS * DIM_V).unwrap();
    assert_eq!(code(&Samples { values, ..good }, HEADS, 32), Err(7));

    let basis = &bases()[0];
    let head = |basis: &Basis, bits: Bits| basis.head(&f, &bits).map(drop).map_err(|error| error.code());
    for keys in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, 0.2, 8.125, 9.0, f32::MAX] {
        assert_eq!(head(basis, Bits { keys, ..Bits::default() }), Err(601));
    }
    for (values, error) in [(0, 1), (9, 202), (u32::MAX, 202)] {
        assert_eq!(head(basis, Bits { values, ..Bits::default() }), Err(error));
    }
    let least = f32::MIN_POSITIVE;
    for value_scale in [0.0, -1.0, 3.0, least / 2.0, 2.0_f32.powi(127), f32::INFINITY, f32::NAN] {
        let basis = Basis { value_scale, ..basis.clone() };
        assert_eq!(head(&basis, Bits::default()), Err(602), "{value_scale}");
    }
    for value_scale in [least, 2.0_f32.powi(126)] {
        assert_eq!(head(&Basis { value_scale, ..basis.clone() }, Bits::default()), Ok(()));
    }
    let cut = |part: fn(&mut Basis) -> &mut Vec<f32>| {
        let mut basis = basis.clone();
        part(&mut basis).pop();
        head(&basis, Bits::default())
    };
    assert_eq!([cut(|b| &mut b.mean), cut(|b| &mut b.basis), cut(|b| &mut b.dual)], [Err(2); 3]);
}

#[test]
fn saved_bases_without_components_make_no_head() {
    let none = Basis { sigma: vec![], mean: vec![], basis: vec![], dual: vec![], ..bases()[0].clone() };
    let no_values = Basis { value_mean: vec![], ..bases()[0].clone() };
    for basis in [none, no_values] {
        let read = Basis::from_bytes(&basis.to_bytes()).unwrap();
        let frequencies = &frequencies()[..read.mean.len() / 2];
        assert_eq!(read.head(frequencies, &Bits::default()).map(drop).map_err(|error| error.code()), Err(1));
    }
}

/// Bases fitted to rows of which nothing can be learnt serve rows like them, for heads of every length; what
/// cannot be fitted is an error.
#[test]
fn degenerate_samples_make_bases_that_serve_or_errors() {
    let attention = Attention::scaled(0.2);
    for [dim, dim_v, group] in [[2, 1, 1], [2, 24, 3], [24, 2, 20], [80, 80, 2], [256, 256, 1]] {
        let frequencies: Vec<f32> = (0..dim / 2).map(|i| 0.01_f32.powi(i as i32)).collect();
        for (what, size, noise) in [
            ("zeros", 0.0, 0.0),
            ("equal", 1.5, 0.0),
            ("tiny", 1e-40, 1e-40),
            ("small", 0.01, 0.01),
            ("plain", 1.0, 1.0),
        ] {
            let rows = |seed: u64, n: usize, components: usize| -> Vec<f32> {
                random(seed, n * components).iter().map(|x| size + noise * x).collect()
            };
            for n in [1, 90] {
                let (keys, values) = (rows(1, n, dim), rows(3, n, dim_v));
                let queries = rows(2, n, group * dim);
                let samples = Samples {
                    keys: Rows::contiguous(&keys, dim).unwrap(),
                    queries: Rows::contiguous(&queries, group * dim).unwrap(),
                    values: Rows::contiguous(&values, dim_v).unwrap(),
                    frequencies: &frequencies,
                    rotated_from: None,
                };
                let case = format!("{what}, {n} rows of {dim} and {dim_v}");
                let bases = Basis::fit_layer(&samples, 1, 32).unwrap();
                let head = bases[0].head(&frequencies, &Bits::uniform(8)).unwrap();
                let mut cache = LayerCache::<f32>::new(&[head], WINDOW).unwrap();
                let mut rotated = rows(5, 90, dim);
                for (t, key) in rotated.chunks_exact_mut(dim).enumerate() {
                    pq_core::sq::rotate_by(&frequencies, t as i64, key).unwrap();
                }
                let values = rows(6, 90, dim_v);
                let parts =
                    [(&rotated, dim), (&values, dim_v)].map(|(x, row)| Rows::contiguous(x, row).unwrap());
                cache.append(parts[0], parts[1]).unwrap();
                let queries = rows(7, 1, group * dim);
                let mut out = vec![f32::NAN; group * dim_v];
                let queries = Rows::from(&queries[..]);
                cache.attend_into(&attention, queries, &mut Workspace::default(), &mut out).unwrap();
                // Values are near their mean.
                let most = (2.0 * noise + 0.01 * size).max(1e-3);
                assert!(out.iter().all(|x| (x - size).abs() <= most), "{case}: {out:?}");
            }
        }
    }
}
