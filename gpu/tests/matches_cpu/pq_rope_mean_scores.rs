//! The part of the scores that comes from a rotated mean agrees with `pq_core::RopeMean::scores_into`, and
//! with the formula in `f64`.

use half::f16;
use kv_gpu::pq::{RopeMeanScores, RopeMeanScoresArguments, RopeMeanScoresShape, TILE};
use kv_gpu::{Device, Element, Error};
use pq_core::RopeMeanBuf;

use crate::common::{Buffer, Random, device, from_element, launch, to_element};

/// Maximum error relative to the addend: it is rounded to `f16`.
const ROUNDING: f64 = 1.0 / 2048.0;
/// Maximum error relative to the root of the sum of the pairs' squared amplitudes: coefficients, cosines and
/// sines are rounded to `f16`.
const PRODUCTS: f64 = 1.0 / 512.0;
/// Bits of an addend that is not written.
const UNTOUCHED: u16 = 0xabcd;

struct Case {
    shape: RopeMeanScoresShape,
    heads: usize,
    tiles: usize,
    first: usize,
    lengths: Vec<u32>,
    base: f64,      // of RoPE's frequencies
    mean_norm: f32, // typical norm of a mean
}

/// Adjacent pairs of components `i` and `i + dim / 2`.
fn pairs(x: &[f32]) -> impl Iterator<Item = (f64, f64)> {
    let (low, high) = x.split_at(x.len() / 2);
    low.iter().zip(high).map(|(&x, &y)| (f64::from(x), f64::from(y)))
}

impl Case {
    fn random(random: &mut Random) -> Self {
        let (dim, group) = (random.pick(&[64, 128]), 1 + random.below(16));
        let shape = RopeMeanScoresShape { dim, group, element: random.pick(&[Element::F16, Element::Bf16]) };
        let batch = random.pick(&[1, 1, 2, 5, 33, 70]);
        let tiles = if batch > 5 { 1 + random.below(5) } else { random.pick(&[1, 2, 4, 5, 16, 17, 40]) };
        let most = tiles * TILE;
        let length = |random: &mut Random| match random.below(4) {
            0 => random.pick(&[0, 1, most]) as u32,
            _ => random.below(most + 1) as u32,
        };
        Self {
            shape,
            heads: 1 + random.below(5),
            tiles,
            first: random.pick(&[0, 1, 4, 37, 131_072, 1_000_000]),
            lengths: (0..batch).map(|_| length(random)).collect(),
            base: random.pick(&[1e4, 5e5]),
            mean_norm: random.pick(&[0.0, 1.0, 20.0]),
        }
    }

    fn run(&self, device: &Device, random: &mut Random, spoil: impl Fn(&mut [f32])) {
        let Self { shape, heads, tiles, first, .. } = *self;
        let RopeMeanScoresShape { dim, group, element } = shape;
        let (batch, scale) = (self.lengths.len(), 1.0 / (dim as f32).sqrt());
        let frequencies: Vec<f32> =
            (0..dim / 2).map(|i| self.base.powf(-2.0 * i as f64 / dim as f64) as f32).collect();
        let normals = |random: &mut Random, n: usize, norm: f32| -> Vec<f32> {
            random.normals(n).iter().map(|x| x * norm * scale).collect()
        };
        let means = normals(random, heads * dim, self.mean_norm);
        let mut queries = normals(random, batch * heads * group * dim, 20.0);
        queries.iter_mut().for_each(|x| *x = from_element(element, to_element(element, *x)));
        spoil(&mut queries);
        let pdl = random.below(2) == 1;

        let elements: Vec<u16> = queries.iter().map(|&x| to_element(element, x)).collect();
        let (means_there, elements) = (Buffer::new(device, &means), Buffer::new(device, &elements));
        let frequencies_there = Buffer::new(device, &frequencies);
        let lengths = Buffer::new(device, &self.lengths);
        let scores = RopeMeanScores::new(device, shape).unwrap();
        let launch = || {
            let addends = Buffer::new(device, &vec![UNTOUCHED; batch * heads * tiles * group * TILE]);
            let arguments = RopeMeanScoresArguments {
                batch,
                heads,
                tiles,
                means: means_there.pointer(),
                frequencies: frequencies_there.pointer(),
                first,
                queries: elements.pointer().cast(),
                lengths: lengths.pointer(),
                scale,
                addends: addends.pointer().cast(),
                pdl,
            };
            launch!(device, scores, &arguments);
            addends.read()
        };
        let addends = launch();
        assert!(launch() == addends, "two runs differ");

        // Sines and cosines (token, dim / 2).
        let most = self.lengths.iter().copied().max().unwrap_or_default() as usize;
        let wave = |token: usize, frequency: f32| ((first + token) as f64 * f64::from(frequency)).sin_cos();
        let waves: Vec<(f64, f64)> = (0..most)
            .flat_map(|token| frequencies.iter().map(move |&frequency| wave(token, frequency)))
            .collect();
        let buffers: Vec<RopeMeanBuf> =
            means.chunks_exact(dim).map(|mean| RopeMeanBuf::new(mean, &frequencies).unwrap()).collect();
        for (i, query) in queries.chunks_exact(dim).enumerate() {
            let (sequence, head, place) = (i / group / heads, i / group % heads, i % group);
            let (mean, n) = (&means[head * dim..][..dim], self.lengths[sequence] as usize);
            let mut of_cpu = vec![0.0; n];
            buffers[head].view().scores_into(query, first, &mut of_cpu).unwrap();
            let scale = f64::from(scale);
            let products = || pairs(query).zip(pairs(mean));
            let amplitudes = products().map(|((x, y), (a, b))| (x * x + y * y) * (a * a + b * b));
            let size = amplitudes.sum::<f64>().sqrt() * scale;
            for token in 0..tiles * TILE {
                let tile = (i / group * tiles + token / TILE) * group + place;
                let bits = addends[tile * TILE + token % TILE];
                let got = f64::from(f16::from_bits(bits).to_f32());
                let told = format!("{shape:?} lengths {:?}, {i}, token {token}: {got}", self.lengths);
                if token >= n {
                    assert!(token < n.next_multiple_of(TILE) || bits == UNTOUCHED, "{told}, which is none");
                    continue;
                }
                if query.iter().any(|x| !x.is_finite()) {
                    assert!(!got.is_finite(), "{told} of a query that is not finite");
                    continue;
                }
                let rotated = products()
                    .zip(&waves[token * dim / 2..])
                    .map(|(((x, y), (a, b)), &(s, c))| x * (c * a - s * b) + y * (s * a + c * b));
                for want in [rotated.sum::<f64>() * scale, f64::from(of_cpu[token]) * scale] {
                    let most = ROUNDING * want.abs() + PRODUCTS * size;
                    assert!((got - want).abs() <= most, "{told} for {want}, {most} allowed");
                }
            }
        }
    }
}

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..40 {
        let mut random = Random(seed);
        Case::random(&mut random).run(&device, &mut random, |_| ());
    }
}

#[test]
fn every_group_agrees() {
    let Some(device) = device("every_group_agrees") else { return };
    for (dim, group) in (1..=16).flat_map(|group| [(64, group), (128, group)]) {
        let shape = RopeMeanScoresShape { dim, group, element: Element::F16 };
        let (lengths, first, base, mean_norm) = (vec![1000, 31, 0, 513], 4, 5e5, 20.0);
        let case = Case { shape, heads: 2, tiles: 32, first, lengths, base, mean_norm };
        case.run(&device, &mut Random(1000 + group as u64), |_| ());
    }
}

/// Enough tokens for several units of work per warp.
#[test]
fn many_tokens_agree() {
    let Some(device) = device("many_tokens_agree") else { return };
    let shape = RopeMeanScoresShape { dim: 64, group: 16, element: Element::Bf16 };
    let (lengths, first, base, mean_norm) = (vec![40_001, 700, 31_000], 64, 5e5, 20.0);
    let case = Case { shape, heads: 4, tiles: 1251, first, lengths, base, mean_norm };
    case.run(&device, &mut Random(2000), |_| ());
}

#[test]
fn numbers_that_are_none_stay_with_their_query() {
    let Some(device) = device("numbers_that_are_none_stay_with_their_query") else { return };
    for (seed, spoiler) in (3000..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(2)) {
        let mut random = Random(seed);
        Case::random(&mut random).run(&device, &mut random, |queries| queries[5] = spoiler);
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    for (dim, group) in [(64, 0), (128, 17), (96, 4), (0, 1)] {
        let shape = RopeMeanScoresShape { dim, group, element: Element::F16 };
        assert!(matches!(shape.program(), Err(Error::Unsupported { .. })), "{shape:?}");
    }
}
