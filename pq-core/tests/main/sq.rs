//! Scalar codes: the definitions against plain formulas in f64, every backend against the scalar one.

use half::f16;
use pq_core::sq::*;
use pq_core::{Backend, Error, SoftmaxStats, decode_norm, normalize_all};
use proptest::prelude::*;

use super::support::{backends, scaled};

/// Rows of components whose deviations fall from 4 to 0.1.
fn keys_of(seed: u64, n: usize, dim: usize) -> Vec<f32> {
    let rows = scaled(seed, n * dim, 7.0);
    rows.iter().enumerate().map(|(i, x)| x * 0.025_f32.powf((i % dim) as f32 / dim as f32)).collect()
}

/// Multiples of 16, the heads of models that are none, and any other.
fn dims() -> impl Strategy<Value = usize> {
    let groups = (1_usize..=16).prop_map(|groups| 16 * groups);
    prop_oneof![4 => groups, 2 => prop::sample::select(vec![1, 8, 10, 15, 17, 40, 72, 100]), 1 => 1_usize..=256]
}

fn shapes() -> impl Strategy<Value = Shape> {
    (dims(), 0.3_f32..7.5, any::<bool>()).prop_map(|(dim, bits, embedded)| {
        let slots = ((bits * dim.div_ceil(16) as f32) as usize).max(1);
        let sigma: Vec<f32> = (0..dim).map(|i| 0.025_f32.powf(i as f32 / dim as f32)).collect();
        let mut order = vec![0; dim];
        let shape = allot(&sigma, slots, &mut order).unwrap();
        if !embedded || slots < 8 {
            return shape;
        }
        // The leading bits of the first quads, up to 8 slots a column.
        let quads = shape.widths().len();
        let mut prefix = vec![0; quads];
        for c in 0..4 {
            let mut left = 8;
            for q in (c..quads).step_by(4) {
                prefix[q] = shape.widths()[q].min(left);
                left -= prefix[q];
            }
        }
        shape.embedded(&prefix).unwrap()
    })
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), Just(31), Just(32), Just(33), Just(64), Just(256), 1_usize..256]
}

struct Coded {
    shape: Shape,
    n: usize,
    scales: Vec<u8>, // steps or norms
    words: Vec<u32>,
}

impl Coded {
    fn keys(backend: Backend, shape: Shape, rows: &[f32]) -> Self {
        let n = rows.len() / shape.dim();
        let (mut scales, mut words) = (vec![7; shape.dim()], vec![7; shape.words_len(n)]);
        encode_keys_into_with(backend, &shape, rows, &mut scales, &mut words).unwrap();
        Self { shape, n, scales, words }
    }
    fn values(backend: Backend, shape: Shape, rows: &[f32]) -> Self {
        let n = rows.len() / shape.dim();
        let (mut scales, mut words) = (vec![7; n], vec![7; shape.words_len(n)]);
        encode_values_into_with(backend, &shape, rows, &mut scales, &mut words).unwrap();
        Self { shape, n, scales, words }
    }
    fn as_keys(&self) -> Keys<'_> {
        Keys::new(self.shape, self.n, &self.scales, &self.words).unwrap()
    }
    fn as_values(&self) -> Values<'_> {
        Values::new(self.shape, &self.scales, &self.words).unwrap()
    }
    fn decoded_keys(&self) -> Vec<f32> {
        decoded_keys(&self.as_keys())
    }
    fn decoded_values(&self) -> Vec<f32> {
        let mut rows = vec![0.0; self.n * self.shape.dim()];
        decode_values_into(&self.as_values(), &mut rows).unwrap();
        rows
    }
}

fn decoded_keys(keys: &Keys<'_>) -> Vec<f32> {
    let mut rows = vec![0.0; keys.n() * keys.shape().dim()];
    decode_keys_into(keys, &mut rows).unwrap();
    rows
}

fn ip(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// The largest error of a score that integer queries of 15 bits allow: half a unit per component and level.
fn score_bound(query: &[f32], keys: &Keys<'_>, scales: &[u8], whole: &Shape) -> f64 {
    let step = |i: usize| {
        let lost = whole.widths()[i / 4] - keys.shape().widths()[i / 4];
        ((f64::from(scales[i]) - 128.0) / 8.0 + f64::from(lost)).exp2()
    };
    let unit =
        query.iter().enumerate().map(|(i, &q)| f64::from(q.abs()) * step(i)).fold(0.0, f64::max) / 16256.0;
    let levels: f64 = keys.shape().widths().iter().map(|&w| 4.0 * 0.5 * (f64::from(1_u32 << w) - 1.0)).sum();
    (0.51 * unit * levels + 1e-6 * unit * 16256.0 * levels) + 1e-9
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Bits, levels and the layout: what is decoded is the nearest level of the row, or the outermost.
    #[test]
    fn decoded_keys_are_the_nearest_levels(shape in shapes(), seed: u64, n in lengths()) {
        let rows = keys_of(seed, n, shape.dim());
        let coded = Coded::keys(Backend::Scalar, shape, &rows);
        let decoded = coded.decoded_keys();
        for (i, (&x, &y)) in rows.iter().zip(&decoded).enumerate() {
            let i = i % shape.dim();
            let width = u32::from(shape.widths()[i / 4]);
            let step = ((f64::from(coded.scales[i]) - 128.0) / 8.0).exp2();
            let levels = (0..1_u32 << width).map(|c| (f64::from(c) + 0.5 - 0.5 * f64::from(1_u32 << width)) * step);
            let nearest = levels.map(|level| (level - f64::from(x)).abs()).fold(f64::INFINITY, f64::min);
            prop_assert!(((f64::from(y) - f64::from(x)).abs() - nearest).abs() < 1e-4 * step, "{x} {y} {step} {width}");
        }
    }

    #[test]
    fn a_prefix_is_the_code_at_fewer_bits(shape in shapes(), seed: u64, n in lengths()) {
        let coded = Coded::keys(Backend::Scalar, shape, &keys_of(seed, n, shape.dim()));
        let keys = coded.as_keys();
        let Some(prefix) = keys.prefix() else { return Ok(()) };
        prop_assert_eq!(prefix.shape().slots(), 8);
        for ((i, whole), part) in coded.decoded_keys().iter().enumerate().zip(decoded_keys(&prefix)) {
            let i = i % shape.dim();
            let (width, kept) = (shape.widths()[i / 4], prefix.shape().widths()[i / 4]);
            let step = ((f32::from(coded.scales[i]) - 128.0) / 8.0).exp2();
            let code = (whole / step - 0.5 + 0.5 * (1_u32 << width) as f32).round() as u32;
            let expected = ((code >> (width - kept)) as f32 + 0.5 - 0.5 * (1_u32 << kept) as f32)
                * step * (1_u32 << (width - kept)) as f32;
            prop_assert!((part - expected).abs() <= 1e-5 * expected.abs(), "{part} {expected}");
        }
    }

    /// The same bytes on every backend, and values of the nearest levels.
    #[test]
    fn every_backend_writes_the_same_codes(shape in shapes(), bits in 1_u32..=8, seed: u64, n in lengths()) {
        let (dim, rows) = (shape.dim(), keys_of(seed, n, shape.dim()));
        let values_shape = Shape::uniform(dim, bits).unwrap();
        let values = Coded::values(Backend::Scalar, values_shape, &rows);
        for ((row, decoded), &norm) in
            rows.chunks_exact(dim).zip(values.decoded_values().chunks_exact(dim)).zip(&values.scales)
        {
            // A row of one component may be shorter than the smallest norm.
            let exact = ip(row, row).sqrt().clamp(decode_norm(0).into(), decode_norm(255).into());
            prop_assert!((f64::from(decode_norm(norm)) / exact - 1.0).abs() < 0.023);
            let largest = row.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
            let step = decode_norm(norm) / (dim as f32).sqrt() * 1.596;
            for (x, y) in row.iter().zip(decoded) {
                prop_assert!((x - y).abs() <= step.max(largest), "{x} {y}");
                prop_assert!(x * y > 0.0 || x.abs() < 1e-6 * step, "{x} {y}");
            }
        }
        for backend in backends() {
            let keys = Coded::keys(backend, shape, &rows);
            let again = Coded::keys(Backend::Scalar, shape, &rows);
            prop_assert!(keys.scales == again.scales && keys.words == again.words, "{backend:?}");
            let again = Coded::values(backend, values_shape, &rows);
            prop_assert!(values.scales == again.scales && values.words == again.words, "{backend:?}");
        }
    }

    #[test]
    fn scores_are_the_dot_products_of_the_levels(shape in shapes(), seed: u64, n in lengths(), group in 0_usize..7) {
        let coded = Coded::keys(Backend::Scalar, shape, &keys_of(seed, n, shape.dim()));
        let queries = scaled(seed ^ 1, group * shape.dim(), 2.0);
        for keys in [Some(coded.as_keys()), coded.as_keys().prefix()].into_iter().flatten() {
            let decoded = decoded_keys(&keys);
            let mut scalar = vec![];
            for backend in backends() {
                let mut scratch = vec![f32::NAN; scores_scratch_len(keys.shape(), n, group)];
                let mut scores = vec![f32::NAN; group * n];
                scores_into_with(backend, &queries, &keys, &mut scratch, &mut scores).unwrap();
                for (query, scores) in queries.chunks_exact(shape.dim()).zip(scores.chunks_exact(n)) {
                    let bound = score_bound(query, &keys, &coded.scales, &shape);
                    for (key, &score) in decoded.chunks_exact(shape.dim()).zip(scores) {
                        let exact = ip(query, key);
                        prop_assert!((f64::from(score) - exact).abs() < bound, "{score} {exact} {bound}");
                    }
                }
                if backend == Backend::Scalar {
                    scalar.clone_from(&scores);
                }
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * (1.0 + a.abs());
                prop_assert!(scalar.is_empty() || scalar.iter().zip(&scores).all(close), "{backend:?}");
            }
        }
    }

    #[test]
    fn attention_agrees_with_f64(
        shape in shapes(), dim_v in dims(), bits in 1_u32..=8, seed: u64, n in lengths(),
        group in 1_usize..6, error: bool, softcap: bool,
    ) {
        let keys = Coded::keys(Backend::Scalar, shape, &keys_of(seed, n, shape.dim()));
        let rows = scaled(seed ^ 2, n * dim_v, 2.0);
        let values = Coded::values(Backend::Scalar, Shape::uniform(dim_v, bits).unwrap(), &rows);
        let mut lost = vec![f16::ZERO; dim_v];
        mean_error_into(&values.as_values(), &rows, &mut lost).unwrap();
        let queries = scaled(seed ^ 3, group * shape.dim(), 0.3);
        let mut bias = scaled(seed ^ 4, group * n, 1.0);
        for bias in bias.chunks_exact_mut(n) {
            bias[..n / 4].fill(f32::NEG_INFINITY);
        }
        let coded = values.as_values();
        let coded = if error { coded.with_error(&lost).unwrap() } else { coded };
        let block = Block::new(keys.as_keys(), coded).unwrap().with_bias(&bias[..]);
        let block = block.with_softcap(softcap.then_some(2.0)).unwrap();

        let (decoded, mut decoded_values) = (keys.decoded_keys(), values.decoded_values());
        let (mean, decoded_mean) = (column_means(&rows, dim_v), column_means(&decoded_values, dim_v));
        for (lost, (mean, decoded)) in lost.iter().zip(mean.iter().zip(&decoded_mean)) {
            prop_assert!((lost.to_f64() - (mean - decoded)).abs() < 1e-3);
        }
        if error {
            for row in decoded_values.chunks_exact_mut(dim_v) {
                row.iter_mut().zip(&lost).for_each(|(x, lost)| *x += lost.to_f32());
            }
        }
        let deviation = (ip(&rows, &rows) / rows.len() as f64).sqrt();
        for backend in backends() {
            let len = attend_scratch_len(&shape, &values.shape, n, group);
            let mut scratch = vec![f32::NAN; len];
            // Another token came before: score 0, value 1.
            let (mut out, mut stats) = (vec![1.0; group * dim_v], vec![SoftmaxStats { max: 0.0, sum: 1.0 }; group]);
            attend_into_with(backend, &queries, &block, &mut scratch, &mut out, &mut stats).unwrap();
            normalize_all(&stats, &mut out).unwrap();
            for (g, (query, out)) in queries.chunks_exact(shape.dim()).zip(out.chunks_exact(dim_v)).enumerate() {
                let score = |t: usize| {
                    let x = ip(query, &decoded[t * shape.dim()..][..shape.dim()]) + f64::from(bias[g * n + t]);
                    if softcap && x.is_finite() { 2.0 * (x / 2.0).tanh() } else { x }
                };
                let weights: Vec<f64> = (0..n).map(|t| score(t).exp()).collect();
                let total: f64 = 1.0 + weights.iter().sum::<f64>();
                let bound = score_bound(query, &keys.as_keys(), &keys.scales, &shape);
                for (i, &out) in out.iter().enumerate() {
                    let sum: f64 = (0..n).map(|t| weights[t] * f64::from(decoded_values[t * dim_v + i])).sum();
                    let exact = (sum + 1.0) / total;
                    let allowed = (3.0 * bound + 2e-3) * (1.0 + 4.0 * deviation);
                    prop_assert!((f64::from(out) - exact).abs() < allowed, "{backend:?} {out} {exact} {allowed}");
                }
            }
        }
    }
}

fn column_means(rows: &[f32], dim: usize) -> Vec<f64> {
    let mut sums = vec![0.0; dim];
    for row in rows.chunks_exact(dim) {
        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    sums.iter().map(|sum| sum / (rows.len() / dim) as f64).collect()
}

/// The layout is that of files and kernels: it never changes.
#[test]
fn the_layout_is_the_documented_one() {
    // Keys of 2 slots a column: unit 2 (q % 4) + h is in vector `unit % 2` (h), 2 (unit / 2) bits up.
    let shape = Shape::new(32, &[2, 1, 2, 0, 0, 1, 0, 2]).unwrap();
    let (token, component) = (21, 4 * 5 + 3); // quad 5 is in column 1, after the bit of quad 1; half 1
    let mut rows = vec![-1.0; 32 * 32];
    rows[token * 32 + component] = 1.0;
    let coded = Coded::keys(Backend::Scalar, shape, &rows);
    let all_low = Coded::keys(Backend::Scalar, shape, &vec![-1.0; 32 * 32]);
    let changed: Vec<usize> =
        (0..coded.words.len()).filter(|&w| coded.words[w] != all_low.words[w]).collect();
    assert_eq!(changed, [16 + token % 16]);
    assert_eq!(coded.words[changed[0]] ^ all_low.words[changed[0]], 1 << (8 * 3 + 2 + 1));

    // Values of 3 bits and 64 components: 12 slots, a row of 8 and a row of 4. The code of group 2 is split:
    // its upper two bits are slots 6 and 7 of the first row, its lowest bit is slot 0 of the second.
    let shape = Shape::uniform(64, 3).unwrap();
    let mut rows = vec![-1.0; 32 * 64];
    let low = Coded::values(Backend::Scalar, shape, &rows);
    rows[22 * 64 + 2 * 16 + 7] = 1.0; // code 5 instead of 2: all bits change; token quad 5, byte 2
    let coded = Coded::values(Backend::Scalar, shape, &rows);
    let changed: Vec<(usize, u32)> =
        low.words.iter().zip(&coded.words).map(|(a, b)| a ^ b).enumerate().collect();
    let changed: Vec<_> = changed.into_iter().filter(|(_, bits)| *bits != 0).collect();
    assert_eq!(changed, [(16 * 5 + 7, 0b1100_0000 << 16), (16 * (8 + 5 % 4) + 7, 0b1_0000 << 16)]);
}

#[test]
fn bits_go_where_the_variance_is_and_columns_are_even() {
    for (dim, slots) in
        [(8, 3), (10, 8), (16, 1), (24, 3), (35, 9), (64, 12), (80, 13), (128, 17), (128, 64), (256, 128)]
    {
        let sigma: Vec<f32> = (0..dim).map(|i| 0.97_f32.powi(((i * 7) % dim) as i32)).collect();
        let mut order = vec![0; dim];
        let shape = allot(&sigma, slots, &mut order).unwrap();
        assert_eq!(shape.slots(), slots);
        let mut seen = order.clone();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..dim));
        let mean = |w: u8| {
            let of: Vec<f32> =
                (0..dim).filter(|i| shape.widths()[i / 4] == w).map(|i| sigma[order[i]]).collect();
            (!of.is_empty()).then(|| of.iter().sum::<f32>() / of.len() as f32)
        };
        let means: Vec<f32> = (0..=8).filter_map(mean).collect();
        assert!(means.is_sorted(), "{dim} {slots}: {means:?}");
    }
    // Equal variances: equal bits.
    let mut order = [0; 64];
    assert_eq!(allot(&[1.0; 64], 12, &mut order).unwrap(), Shape::uniform(64, 3).unwrap());
}

/// A row is padded to a multiple of 16 components by codes 0: read as a longer row it has their level.
#[test]
fn padding_has_codes_of_zero() {
    let (shape, longer) = (Shape::uniform(10, 3).unwrap(), Shape::uniform(16, 3).unwrap());
    assert_eq!((shape.widths(), shape.slots(), shape.bits()), (&[3; 4][..], 3, 4.8));
    let rows = keys_of(5, 40, 10);
    let (keys, values) =
        (Coded::keys(Backend::Scalar, shape, &rows), Coded::values(Backend::Scalar, shape, &rows));
    let steps = [&keys.scales[..], &[128; 6]].concat(); // 1 in the padding
    let read = decoded_keys(&Keys::new(longer, 40, &steps, &keys.words).unwrap());
    for (row, read) in keys.decoded_keys().chunks_exact(10).zip(read.chunks_exact(16)) {
        assert!(row == &read[..10] && read[10..] == [-3.5; 6], "{row:?} {read:?}");
    }
    let mut read = vec![0.0; 40 * 16];
    decode_values_into(&Values::new(longer, &values.scales, &values.words).unwrap(), &mut read).unwrap();
    for (row, read) in values.decoded_values().chunks_exact(10).zip(read.chunks_exact(16)) {
        let close = |(x, y): (&f32, &f32)| (x * 10_f32.sqrt() - y * 4.0).abs() < 1e-5 * x.abs();
        assert!(row.iter().zip(read).all(close) && read[10..].iter().all(|&y| y < 0.0 && y <= read[0]));
    }

    // A narrow head has quads of padding alone, whose columns must have as many bits as the others; a longer
    // one gives those no bits.
    let shape = allot(&[3.0, 2.0, 1.0, 0.5, 0.1, 0.1, 0.1, 0.1], 4, &mut [0; 8]).unwrap();
    assert_eq!((shape.dim(), shape.widths()), (8, &[4; 4][..]));
    let shape = allot(&[1.0; 24], 5, &mut [0; 24]).unwrap();
    assert_eq!(shape.widths()[6..], [0, 0]);
}

/// NaN, infinities and zeros are coded without a panic; a NaN in a query makes its sums NaN.
#[test]
fn extreme_rows_and_queries() {
    let shape = Shape::uniform(16, 3).unwrap();
    for backend in backends() {
        for x in [0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-40] {
            let keys = Coded::keys(backend, shape, &[x; 16 * 33]);
            let values = Coded::values(backend, shape, &[x; 16 * 33]);
            assert!(keys.decoded_keys().iter().chain(&values.decoded_values()).all(|x| x.is_finite()));
            let block = Block::new(keys.as_keys(), values.as_values()).unwrap();
            for q in [0.0, f32::NAN, f32::INFINITY, 1e30, 1.0] {
                let mut scratch = vec![0.0; attend_scratch_len(&shape, &shape, 33, 1)];
                let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
                attend_into_with(backend, &[q; 16], &block, &mut scratch, &mut out, &mut stats).unwrap();
                assert_eq!(stats[0].log_sum_exp().is_nan(), !q.is_finite(), "{backend:?} {x} {q}");
                normalize_all(&stats, &mut out).unwrap();
                assert!(out.iter().all(|x| x.is_finite()) || !q.is_finite(), "{backend:?} {x} {q} {out:?}");
            }
        }
    }
}

#[test]
fn wrong_sizes_are_errors() {
    assert_eq!(Shape::uniform(0, 4), Err(Error::Zero { what: "dim" }));
    assert_eq!(Shape::uniform(257, 4), Err(Error::TooLarge));
    assert_eq!(Shape::uniform(16, 9), Err(Error::NbitsOutOfRange { nbits: 9 }));
    assert_eq!(Shape::uniform(16, 300), Err(Error::NbitsOutOfRange { nbits: 300 }));
    assert_eq!(Shape::uniform(16, 0), Err(Error::Zero { what: "bits" }));
    assert_eq!(Shape::new(16, &[1, 2, 1, 1]), Err(Error::ShapeMismatch));
    let shape = Shape::uniform(16, 8).unwrap();
    assert_eq!(
        shape.embedded(&[4; 4]),
        Err(Error::Unaligned { what: "slots of the prefix", at: 4, multiple: 8 })
    );
    assert_eq!(shape.embedded(&[0; 4]), Err(Error::Zero { what: "prefix" }));
    assert_eq!(shape.embedded(&[9; 4]), Err(Error::ShapeMismatch));
    assert_eq!(allot(&[1.0; 16], 9, &mut [0; 16]), Err(Error::NbitsOutOfRange { nbits: 9 }));
    assert_eq!(allot(&[f32::NAN; 16], 2, &mut [0; 16]), Err(Error::NotFinite { what: "sigma", index: 0 }));
    let length = |what, expected, actual| Error::Length { what, expected, actual };
    assert_eq!(allot(&[1.0; 16], 2, &mut [0; 15]), Err(length("order", 16, 15)));

    let words = vec![0; shape.words_len(33)];
    assert_eq!(words.len(), 2 * 16 * 8);
    assert_eq!(Keys::new(shape, 0, &[0; 16], &words).unwrap_err(), Error::Zero { what: "tokens of a block" });
    assert_eq!(Keys::new(shape, 257, &[0; 16], &words).unwrap_err(), Error::TooLarge);
    assert_eq!(Keys::new(shape, 65, &[0; 16], &words).unwrap_err(), length("words", 384, 256));
    assert_eq!(Values::new(shape, &[0; 0], &words).unwrap_err(), Error::Zero { what: "tokens of a block" });
    let uneven = Shape::new(32, &[1, 1, 1, 1, 2, 2, 2, 2]).unwrap();
    assert_eq!(Values::new(uneven, &[0; 4], &words).unwrap_err(), Error::ShapeMismatch);
    let values = Values::new(shape, &[0; 33], &words).unwrap();
    assert_eq!(values.with_error(&[f16::ZERO; 15]).unwrap_err(), length("error", 16, 15));
    let keys = Keys::new(shape, 33, &[0; 16], &words).unwrap();
    assert_eq!(
        Block::new(Keys::new(shape, 64, &[0; 16], &words).unwrap(), values).unwrap_err(),
        length("values", 64, 33)
    );
    let block = Block::new(keys, values).unwrap();
    let (mut scratch, mut out) = (vec![0.0; 999], [0.0; 16]);
    let mut stats = [SoftmaxStats::EMPTY];
    assert!(matches!(
        attend_into(&[0.0; 15], &block, &mut scratch, &mut out, &mut stats),
        Err(Error::PartialRow { what: "queries", .. })
    ));
    assert_eq!(
        attend_into(&[0.0; 16], &block.with_bias(&[0.0; 32][..]), &mut scratch, &mut out, &mut stats),
        Err(length("bias", 33, 32))
    );
    assert!(matches!(
        attend_into(&[0.0; 16], &block, &mut scratch[..3], &mut out, &mut stats),
        Err(Error::TooShort { what: "scratch", .. })
    ));
    assert!(matches!(rotate_by(&[], 0, &mut []), Err(Error::Zero { .. })));
    assert!(matches!(rotate_by(&[1.0], 0, &mut [0.0; 3]), Err(Error::PartialRow { .. })));
}

/// A query at any position has the same score with a key whether both are rotated by their positions or
/// relative to the middle of the block.
#[test]
fn rotation_relative_to_a_block_keeps_scores() {
    let frequencies = [1.0, 0.1, 0.01];
    let (key, query) = (scaled(1, 6, 1.0), scaled(2, 6, 1.0));
    let at = |row: &[f32], position: i64| {
        let mut row = row.to_vec();
        rotate_by(&frequencies, position, &mut row).unwrap();
        row
    };
    let rotated_query = at(&query, 5000);
    let plain = ip(&rotated_query, &at(&key, 4321));
    let relative = ip(&at(&rotated_query, -4300), &at(&key, 4321 - 4300));
    assert!((plain - relative).abs() < 1e-5);
}
