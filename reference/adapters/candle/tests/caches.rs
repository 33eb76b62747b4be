//! A cache of tensors is the cache of the rows in them: of any element type, layout and batch.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use half::{bf16, f16};
use kv_attend::{Attention, ElementType, Rows, Window, Workspace};
use kv_candle::{Dense, Error, Kv, KvCache, PqCache, Recorder, Result, SqCache};
use kv_owners::sq::{AnyLayerCache, Bits, Head};
use pq_core::{PqShape, TrainOptions};

const HEADS: usize = 2;
const GROUP: usize = 3;
const DIM: usize = 16;
const WINDOW: Window = Window { sinks: 2, recent: 8, batch: 32 };

fn frequencies() -> Vec<f32> {
    (0..DIM / 2).map(|i| 0.01_f32.powf(2.0 * i as f32 / DIM as f32)).collect()
}

/// (batch, heads, tokens, DIM), contiguous.
fn tensor(seed: u32, batch: usize, heads: usize, tokens: usize) -> Tensor {
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8e6 - 1.0
    };
    let rows: Vec<f32> =
        (0..batch * heads * tokens * DIM).map(|i| noise() + (i % DIM) as f32 / 16.0).collect();
    Tensor::from_vec(rows, (batch, heads, tokens, DIM), &Device::Cpu).unwrap()
}

fn recorder() -> Recorder {
    let mut recorder = Recorder::default();
    for (seed, n) in [(1, 100), (5, 60)] {
        let (q, k, v) =
            (tensor(seed, 1, HEADS * GROUP, n), tensor(seed + 1, 1, HEADS, n), tensor(seed + 2, 1, HEADS, n));
        recorder.attend_new(&q, &k, &v).unwrap();
    }
    recorder
}

fn heads(bits: u32) -> Vec<Arc<Head>> {
    let bases = recorder().bases(&frequencies(), 32).unwrap();
    bases.iter().map(|basis| basis.head(&frequencies(), &Bits::uniform(bits)).unwrap()).collect()
}

fn floats(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The same elements with tokens first in memory, as a projection has them.
fn tokens_first(x: &Tensor) -> Tensor {
    x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap()
}

/// The same elements with gaps between rows.
fn wide(x: &Tensor) -> Tensor {
    Tensor::cat(&[x, x], D::Minus1).unwrap().narrow(D::Minus1, 0, DIM).unwrap()
}

#[test]
fn tensors_are_the_rows_in_them() {
    let heads = heads(4);
    for (dtype, element) in
        [(DType::F32, ElementType::F32), (DType::F16, ElementType::F16), (DType::BF16, ElementType::Bf16)]
    {
        let (batch, n) = (2, 70);
        let (k, v) = (tensor(11, batch, HEADS, n), tensor(12, batch, HEADS, n));
        let [k, v] = [k, v].map(|x| x.to_dtype(dtype).unwrap());
        let q = tensor(13, batch, HEADS * GROUP, 3).to_dtype(dtype).unwrap();

        // The owner of one sequence at a time, from rows (tokens, heads * dim).
        let mut expected = vec![];
        for b in 0..batch {
            let rows = |x: &Tensor| {
                floats(&x.narrow(0, b, 1).unwrap().transpose(1, 2).unwrap().contiguous().unwrap())
            };
            let mut cache = AnyLayerCache::new(element, &heads, WINDOW).unwrap();
            let row = HEADS * DIM;
            match element {
                ElementType::F32 => {
                    let [k, v] = [rows(&k), rows(&v)];
                    cache.append(
                        Rows::contiguous(&k, row).unwrap().into(),
                        Rows::contiguous(&v, row).unwrap().into(),
                    )
                }
                ElementType::F16 => {
                    let [k, v] =
                        [rows(&k), rows(&v)].map(|x| x.into_iter().map(f16::from_f32).collect::<Vec<_>>());
                    cache.append(
                        Rows::contiguous(&k, row).unwrap().into(),
                        Rows::contiguous(&v, row).unwrap().into(),
                    )
                }
                ElementType::Bf16 => {
                    let [k, v] =
                        [rows(&k), rows(&v)].map(|x| x.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
                    cache.append(
                        Rows::contiguous(&k, row).unwrap().into(),
                        Rows::contiguous(&v, row).unwrap().into(),
                    )
                }
            }
            .unwrap();
            let (queries, mut out) = (rows(&q), vec![0.0; 3 * HEADS * GROUP * DIM]);
            let by = Attention::scaled(0.25);
            let queries = Rows::contiguous(&queries, HEADS * GROUP * DIM).unwrap();
            cache.attend_into(&by, queries.into(), &mut Workspace::default(), &mut out).unwrap();
            expected.push((cache.to_bytes(), out));
        }

        let layouts: [fn(&Tensor) -> Tensor; 3] = [Tensor::clone, tokens_first, wide];
        for (i, keys_in) in layouts.iter().enumerate() {
            for (j, values_in) in layouts.iter().enumerate() {
                let mut cache = SqCache::new(&heads, WINDOW);
                let (k, v) = (keys_in(&k), values_in(&v));
                for (first, tokens) in [(0, 50), (50, 1), (51, 19)] {
                    let part = |x: &Tensor| x.narrow(2, first, tokens).unwrap();
                    cache.append(&part(&k), &part(&v)).unwrap();
                }
                let out = cache.attend(&keys_in(&q)).unwrap();
                assert_eq!((out.dims(), out.dtype()), (q.dims(), dtype));
                for (b, (bytes, expected)) in expected.iter().enumerate() {
                    assert_eq!(&cache.sequences()[b].to_bytes(), bytes, "{dtype:?}: layouts {i} and {j}");
                    let expected =
                        Tensor::from_vec(expected.clone(), (1, 3, HEADS * GROUP, DIM), &Device::Cpu).unwrap();
                    let expected = expected.transpose(1, 2).unwrap().to_dtype(dtype).unwrap();
                    assert_eq!(floats(&out.narrow(0, b, 1).unwrap()), floats(&expected));
                }
            }
        }
    }
}

/// Relative distance of two tensors.
fn distance(a: &Tensor, b: &Tensor) -> f32 {
    let norm = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
    let (a, b) = (floats(a), floats(b));
    norm(&a.iter().zip(&b).map(|(a, b)| a - b).collect::<Vec<_>>()) / norm(&b)
}

#[test]
fn attention_is_candles_up_to_the_bits() {
    fn check<S: kv_attend::owner::AnyStore + Clone>(mut cache: KvCache<S>, least: f32)
    where
        KvCache<S>: Kv,
        <S as kv_attend::owner::Store<f32>>::Error: Into<kv_owners::Error>,
    {
        let mut dense = Dense::default();
        for (seed, tokens) in [(20, 90), (30, 1), (40, 5), (50, 1)] {
            let (q, k) = (tensor(seed, 2, HEADS * GROUP, tokens), tensor(seed + 1, 2, HEADS, tokens));
            let v = tokens_first(&tensor(seed + 2, 2, HEADS, tokens));
            let (ours, theirs) =
                (cache.attend_new(&q, &k, &v).unwrap(), dense.attend_new(&q, &k, &v).unwrap());
            let error = distance(&ours, &theirs);
            // A prompt attends exactly.
            assert!(
                if seed == 20 { error == 0.0 } else { error > 0.0 && error < least },
                "{tokens}: {error}"
            );
        }
        assert_eq!(cache.len(), 97);
        let copy = cache.clone();
        cache.truncate(60);
        assert_eq!((cache.len(), copy.len()), (60, 97));
        assert!(cache.size() < copy.size());
    }
    check(SqCache::new(&heads(8), WINDOW), 0.005);
    check(SqCache::new(&heads(4), WINDOW), 0.05);
    let books = recorder().books([PqShape::new(DIM, DIM, 6).unwrap(); 2], &TrainOptions::default()).unwrap();
    check(PqCache::new(&books, WINDOW), 0.1);
}

#[test]
fn tensors_that_do_not_fit_are_errors() {
    let shape = |result: Result<()>| match result {
        Err(Error::Shape { what, dimension, .. }) => (what, dimension),
        other => panic!("{other:?}"),
    };
    let mut cache = SqCache::new(&heads(4), WINDOW);
    let (k, q) = (tensor(1, 2, HEADS, 9), tensor(2, 2, HEADS * GROUP, 1));
    assert!(matches!(cache.attend(&q), Err(Error::Empty)));
    assert!(matches!(cache.append(&k.flatten_all().unwrap(), &k), Err(Error::Candle(_))));
    let double = k.to_dtype(DType::F64).unwrap();
    assert!(matches!(cache.append(&double, &double), Err(Error::DType(DType::F64))));
    assert_eq!(shape(cache.append(&tensor(1, 2, 3, 9), &k)), ("keys", "heads"));
    assert_eq!(shape(cache.append(&k, &tensor(1, 1, HEADS, 9))), ("values", "sequences"));
    assert_eq!(shape(cache.append(&k, &tensor(1, 2, HEADS, 8))), ("values", "tokens"));
    assert_eq!(cache.len(), 0);
    cache.append(&k, &k).unwrap();
    assert_eq!(shape(cache.append(&tensor(1, 3, HEADS, 9), &tensor(1, 3, HEADS, 9))), ("keys", "sequences"));
    let narrow = k.narrow(D::Minus1, 0, 8).unwrap();
    assert_eq!(shape(cache.append(&narrow, &k)), ("keys", "components"));
    assert_eq!(shape(cache.append(&k, &narrow)), ("values", "components"));
    let half = k.to_dtype(DType::F16).unwrap();
    let refused = cache.append(&half, &half).unwrap_err();
    assert!(matches!(refused, Error::Codes(error) if error.code() == 105), "{refused}");
    assert_eq!(shape(cache.attend(&tensor(2, 2, 5, 1)).map(drop)), ("queries", "heads"));
    assert_eq!(shape(cache.attend(&tensor(2, 1, HEADS, 1)).map(drop)), ("queries", "sequences"));
    assert!(matches!(cache.attend(&q.to_dtype(DType::F64).unwrap()), Err(Error::DType(DType::F64))));
    let refused = cache.attend(&tensor(2, 2, HEADS, 10)).unwrap_err();
    assert!(matches!(refused, Error::Codes(error) if error.code() == 102), "{refused}");
    assert_eq!(cache.len(), 9);
    cache.append(&k.narrow(2, 0, 0).unwrap(), &k.narrow(2, 0, 0).unwrap()).unwrap();
    assert_eq!((cache.len(), Recorder::default().bases(&frequencies(), 32).is_err()), (9, true));
}
