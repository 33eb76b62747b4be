//! The calibration of a layer against that of its heads one by one, against attention in f64, and against an
//! exhaustive search of ranks.

use half::{bf16, f16};
use svd_core::*;

use super::support::random;

const HEADS: usize = 2;
const GROUP: usize = 3;
const DIM: usize = 6;
const DIM_V: usize = 4;
const HIDDEN: usize = 10;

/// A tensor (n, heads, dim) whose components have decaying scales, different in each head.
fn tensor<E: Element>(seed: u64, [n, heads, dim]: [usize; 3], decay: f32) -> Vec<E> {
    let scale = |i: usize| decay.powi((i % dim * (1 + i / dim % heads)) as i32);
    let rows = random::<f32>(seed, n * heads * dim);
    rows.into_iter().enumerate().map(|(i, x)| E::from_f32(x * scale(i))).collect()
}

/// The same with heads first.
fn heads_first<E: Element>(tensor: &[E], heads: usize, dim: usize) -> Vec<E> {
    let rows = Rows::contiguous(tensor, heads * dim).unwrap();
    (0..heads).flat_map(|h| rows.columns(h * dim, dim).unwrap().iter().flatten()).copied().collect()
}

struct Layer<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    w_o: Vec<E>,
}

impl<E: Element> Layer<E> {
    fn new(seed: u64, n: usize) -> Self {
        Self {
            q: tensor(seed, [n, HEADS * GROUP, DIM], 0.8),
            k: tensor(seed + 1, [n, HEADS, DIM], 0.6),
            // All values share a mean, which errors of keys do not move.
            v: tensor::<f32>(seed + 2, [n, HEADS, DIM_V], 0.7).iter().map(|x| E::from_f32(x + 0.5)).collect(),
            w_o: random(seed + 3, HIDDEN * HEADS * GROUP * DIM_V),
        }
    }

    fn rows(&self) -> [Rows<'_, E>; 3] {
        let sides = [(&self.q, HEADS * GROUP * DIM), (&self.k, HEADS * DIM), (&self.v, HEADS * DIM_V)];
        sides.map(|(rows, len)| Rows::contiguous(rows, len).unwrap())
    }

    fn w_o(&self) -> Rows<'_, E> {
        Rows::contiguous(&self.w_o, HEADS * GROUP * DIM_V).unwrap()
    }

    fn calibrated(&self) -> LayerCalibration {
        let mut calibration = LayerCalibration::new(HEADS, GROUP, [DIM, DIM_V]).unwrap();
        let [q, k, v] = self.rows();
        calibration.add(q, k, v).unwrap();
        calibration.set_output(self.w_o()).unwrap();
        calibration
    }
}

fn same_as_head_by_head<E: Element>() {
    let layer = Layer::<E>::new(1, 200);
    let calibration = layer.calibrated();
    let rotations = calibration.rotations().unwrap();
    let [q, k, v] = layer.rows();
    for (h, [keys, values]) in rotations.heads().iter().enumerate() {
        let gram = |rows: Rows<'_, E>, heads: std::ops::Range<usize>, dim: usize| {
            let mut gram = Gram::<PostRope>::new(dim).unwrap();
            heads.for_each(|head| gram.add_rows(rows.columns(head * dim, dim).unwrap()).unwrap());
            gram
        };
        let group = h * GROUP..(h + 1) * GROUP;
        let (k, q) = (gram(k, h..h + 1, DIM), gram(q, group.clone(), DIM));
        assert_eq!(*keys, Rotation::score_optimal(&k, &q).unwrap());
        let (v, o) = (gram(v, h..h + 1, DIM_V), gram(layer.w_o(), group, DIM_V));
        assert_eq!(*values, Rotation::score_optimal(&v, &o).unwrap());
    }
    // Heads first, and with gaps between the rows.
    let mut other = LayerCalibration::new(HEADS, GROUP, [DIM, DIM_V]).unwrap();
    let hnd = [(&layer.q, HEADS * GROUP, DIM), (&layer.k, HEADS, DIM), (&layer.v, HEADS, DIM_V)];
    let gapped = hnd.map(|(rows, heads, dim)| {
        let rows = heads_first(rows, heads, dim);
        rows.chunks_exact(dim).flat_map(|row| row.iter().copied().chain([E::from_f32(9.0)])).collect()
    });
    let [q, k, v]: [Vec<E>; 3] = gapped;
    let rows = |rows, dim| Rows::contiguous(rows, dim + 1).unwrap().columns(0, dim).unwrap();
    other.add_heads(rows(&q, DIM), rows(&k, DIM), rows(&v, DIM_V)).unwrap();
    other.set_output(layer.w_o()).unwrap();
    assert_eq!(other, calibration);
    // From moments, and merged with an empty calibration.
    let grams = calibration.grams().to_vec();
    let mut other = LayerCalibration::from_grams(grams, GROUP).unwrap();
    other.merge(&LayerCalibration::new(HEADS, GROUP, [DIM, DIM_V]).unwrap()).unwrap();
    assert_eq!(other, calibration);
}

#[test]
fn a_layer_is_calibrated_as_its_heads_are() {
    same_as_head_by_head::<f32>();
    same_as_head_by_head::<f16>();
    same_as_head_by_head::<bf16>();
}

/// Tokens per sequence: a layer has many short sequences, since errors are compared in expectation.
const SEQUENCE: usize = 16;

/// Squared error of the layer's output, summed over the query heads of a head, when its keys and values are
/// truncated to `ranks`: mean over queries of `|W_g (o' - o)|^2`, and the mean of the sum of squared weights.
fn output_error(
    layer: &Layer<f32>,
    rotations: &LayerRotations,
    h: usize,
    ranks: [usize; 2],
    scale: f64,
) -> [f64; 2] {
    let [q, k, v] = layer.rows();
    let wide = |row: &[f32]| -> Vec<f64> { row.iter().map(|&x| x.into()).collect() };
    // x A_r B_r^T
    let cut = |rotation: &Rotation, x: &[f32], rank: usize| -> Vec<f64> {
        let dim = rotation.dim();
        let (a, b) = (rotation.basis(), rotation.dual());
        let low: Vec<f64> = (0..rank)
            .map(|c| x.iter().zip(a.chunks_exact(dim)).map(|(&x, a)| f64::from(x) * a[c]).sum())
            .collect();
        b.chunks_exact(dim).map(|b| low.iter().zip(b).map(|(x, b)| x * b).sum()).collect()
    };
    let [key_rotation, value_rotation] = &rotations.heads()[h];
    let rows = |rows: Rows<'_, f32>, dim: usize| -> Vec<Vec<f32>> {
        rows.columns(h * dim, dim).unwrap().iter().map(<[f32]>::to_vec).collect()
    };
    let (k, v) = (rows(k, DIM), rows(v, DIM_V));
    let cut_k: Vec<Vec<f64>> = k.iter().map(|k| cut(key_rotation, k, ranks[0])).collect();
    let cut_v: Vec<Vec<f64>> = v.iter().map(|v| cut(value_rotation, v, ranks[1])).collect();
    let attend = |q: &[f32], k: &[Vec<f64>], v: &[Vec<f64>]| -> (Vec<f64>, f64) {
        let score = |k: &Vec<f64>| scale * k.iter().zip(q).map(|(k, &q)| k * f64::from(q)).sum::<f64>();
        let weights: Vec<f64> = k.iter().map(|k| score(k).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let out = |d: usize| weights.iter().zip(v).map(|(w, v)| w / sum * v[d]).sum::<f64>();
        ((0..DIM_V).map(out).collect(), weights.iter().map(|w| (w / sum).powi(2)).sum())
    };
    let (k, v): (Vec<_>, Vec<_>) = (k.iter().map(|k| wide(k)).collect(), v.iter().map(|v| wide(v)).collect());
    let (mut error, mut spread, mut n) = (0.0, 0.0, 0.0);
    for head in h * GROUP..(h + 1) * GROUP {
        let w_g = layer.w_o().columns(head * DIM_V, DIM_V).unwrap();
        for (t, q) in q.columns(head * DIM, DIM).unwrap().iter().enumerate().step_by(5) {
            let first = t / SEQUENCE * SEQUENCE;
            let sequence = first..first + SEQUENCE;
            let (out, squares) = attend(q, &k[sequence.clone()], &v[sequence.clone()]);
            let (cut_out, _) = attend(q, &cut_k[sequence.clone()], &cut_v[sequence]);
            let squared = |row: &[f32]| {
                let moved =
                    row.iter().zip(out.iter().zip(&cut_out)).map(|(&w, (a, b))| f64::from(w) * (a - b));
                moved.sum::<f64>().powi(2)
            };
            error += w_g.iter().map(squared).sum::<f64>();
            spread += squares;
            n += 1.0;
        }
    }
    [error / n * GROUP as f64, spread / n]
}

/// The rotations of the layer, calibrated with the effective tokens of each head.
fn rotations_at(layer: &Layer<f32>, scale: f64) -> LayerRotations {
    let mut calibration = layer.calibrated();
    let plain = calibration.rotations().unwrap();
    let tokens: Vec<f32> = (0..HEADS)
        .map(|h| {
            let [_, spread] = output_error(layer, &plain, h, [DIM, DIM_V], scale);
            spread.recip() as f32
        })
        .collect();
    calibration.set_effective_tokens(&tokens).unwrap();
    calibration.rotations().unwrap()
}

/// The cost of truncating head `h` to `ranks`, as predicted by the weights.
fn predicted(rotations: &LayerRotations, h: usize, ranks: [usize; 2], scale: f32) -> f64 {
    let (spectra, weights) = (rotations.spectra(), rotations.weights(scale));
    let side = |s: usize| {
        let sigma = &spectra[2 * h + s][ranks[s]..];
        weights[2 * h + s] * sigma.iter().map(|x| x * x).sum::<f64>()
    };
    side(0) + side(1)
}

/// The weights predict the cost of truncating keys and values on one scale, although the values have a mean,
/// up to second-order terms.
#[test]
fn costs_of_keys_and_values_are_those_of_attention_in_f64() {
    let scale = 0.8;
    let mut ratios = vec![];
    for seed in 0..4 {
        let layer = Layer::new(100 * seed, 1600);
        let rotations = rotations_at(&layer, scale);
        for h in 0..HEADS {
            for ranks in [[2, DIM_V], [3, DIM_V], [4, DIM_V], [DIM, 1], [DIM, 2], [DIM, 3]] {
                let [error, _] = output_error(&layer, &rotations, h, ranks, scale);
                let ratio = error / predicted(&rotations, h, ranks, scale as f32);
                ratios.push((ratio, seed, h, ranks));
            }
        }
    }
    for (ratio, seed, h, ranks) in ratios {
        assert!((0.66..1.5).contains(&ratio), "layer {seed}, head {h}, ranks {ranks:?}: {ratio}");
    }
}

/// The chosen ranks lose little more than the best ranks of the same budget, by attention in f64.
#[test]
fn ranks_are_close_to_the_best_of_all() {
    let scale = 0.8;
    for seed in 0..4 {
        let layer = Layer::new(7 + 100 * seed, 800);
        let rotations = rotations_at(&layer, scale);
        let error = |h: usize, ranks| output_error(&layer, &rotations, h, ranks, scale)[0];
        let errors: Vec<Vec<f64>> = (0..HEADS)
            .map(|h| (0..DIM * DIM_V).map(|i| error(h, [i / DIM_V + 1, i % DIM_V + 1])).collect())
            .collect();
        let of = |ranks: &[[usize; 2]]| -> f64 {
            ranks.iter().zip(&errors).map(|([k, v], errors)| errors[(k - 1) * DIM_V + v - 1]).sum()
        };
        let all = (0..DIM * DIM_V).map(|i| [i / DIM_V + 1, i % DIM_V + 1]);
        for components in [6, 8, 10, 13, 16] {
            let budget = Budget::Bytes { per_token: 2 * components, per_component: 2 };
            let ranks = rotations.ranks(scale as f32, budget, 1).unwrap();
            assert_eq!(ranks.as_flattened().iter().sum::<usize>(), components);
            let pairs = all.clone().flat_map(|a| all.clone().map(move |b| [a, b]));
            let fits = pairs.filter(|ranks| ranks.as_flattened().iter().sum::<usize>() == components);
            let best = fits.map(|ranks| of(&ranks)).fold(f64::INFINITY, f64::min);
            assert!(of(&ranks) < 1.5 * best, "layer {seed}, {components} components: {} {best}", of(&ranks));
        }
    }
}

#[test]
fn a_folded_layer_computes_the_same_function() {
    let layer = Layer::<f32>::new(3, 300);
    let rotations = layer.calibrated().rotations().unwrap();
    let (kv, q_dim) = (HEADS * DIM_V, HEADS * GROUP * DIM_V);
    // W_V inside a fused projection whose rows are longer than the hidden size.
    let stride = HIDDEN + 3;
    let fused: Vec<f32> = random(11, (kv + 5) * stride);
    let bias: Vec<f32> = random(12, kv);
    let (mut folded, mut folded_bias, mut folded_o) = (fused.clone(), bias.clone(), layer.w_o.clone());
    let w_v = RowsMut::new(&mut folded[5 * stride..], kv, HIDDEN, stride).unwrap();
    rotations.fold_values(w_v, RowsMut::contiguous(&mut folded_o, q_dim).unwrap()).unwrap();
    rotations.fold_value_bias(&mut folded_bias).unwrap();
    let outside = |w: &[f32]| -> Vec<f32> {
        let gaps = w[5 * stride..].chunks(stride).flat_map(|row| &row[HIDDEN..]);
        w[..5 * stride].iter().chain(gaps).copied().collect()
    };
    assert_eq!(outside(&folded), outside(&fused));
    // A token's values pass to the output as if attention saw no other token.
    let x: Vec<f32> = random(13, HIDDEN);
    let run = |w: &[f32], bias: &[f32], w_o: &[f32]| -> Vec<f32> {
        let v: Vec<f32> = w[5 * stride..]
            .chunks(stride)
            .zip(bias)
            .map(|(row, bias)| bias + row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>())
            .collect();
        let head = |g: usize| &v[g / GROUP * DIM_V..][..DIM_V];
        let all: Vec<f32> = (0..HEADS * GROUP).flat_map(head).copied().collect();
        w_o.chunks(q_dim).map(|row| row.iter().zip(&all).map(|(w, v)| w * v).sum()).collect()
    };
    let (plain, turned) = (run(&fused, &bias, &layer.w_o), run(&folded, &folded_bias, &folded_o));
    for (a, b) in plain.iter().zip(&turned) {
        assert!((a - b).abs() < 1e-4 * (1.0 + a.abs()), "{a} {b}");
    }
    // The same as head by head.
    let rotation = &rotations.heads()[1][1];
    let rows = Rows::new(&fused[5 * stride..], kv, HIDDEN, stride).unwrap().slice(DIM_V..2 * DIM_V).unwrap();
    let expected = rotation.fold_basis(rows, DIM_V).unwrap();
    assert_eq!(folded[(5 + DIM_V) * stride..][..HIDDEN], expected[..HIDDEN]);
}

#[test]
fn bad_input_changes_nothing() {
    let calibration = || LayerCalibration::new(HEADS, GROUP, [DIM, DIM_V]).unwrap();
    assert!(LayerCalibration::new(0, 1, [4, 4]).is_err() && LayerCalibration::new(1, 0, [4, 4]).is_err());
    assert!(LayerCalibration::new(1, 1, [0, 4]).is_err() && LayerCalibration::new(1, 1, [4, 0]).is_err());
    assert_eq!(LayerCalibration::new(usize::MAX, 2, [4, 4]), Err(Error::TooLarge));
    assert_eq!(calibration().rotations(), Err(Error::Zero { what: "number of tokens" }));
    let mut layer = Layer::<f32>::new(5, 20);
    let mut held = layer.calibrated();
    let before = held.clone();
    let [q, k, v] = layer.rows();
    assert!(matches!(held.add(k, q, v), Err(Error::Length { .. })));
    assert!(matches!(held.add(q, k, v.slice(0..19).unwrap()), Err(Error::Length { .. })));
    assert!(matches!(held.add_heads(q, k, v), Err(Error::Length { .. })));
    assert!(held.set_output(layer.w_o().slice(0..0).unwrap()).is_err());
    assert!(held.set_effective_tokens(&[2.0]).is_err());
    for tokens in [0.5, f32::NAN, f32::INFINITY] {
        assert_eq!(
            held.set_effective_tokens(&[2.0, tokens]),
            Err(Error::NotFinite { what: "effective tokens" })
        );
    }
    assert!(held.merge(&LayerCalibration::new(HEADS, GROUP + 1, [DIM, DIM_V]).unwrap()).is_err());
    layer.v[HEADS * DIM_V - 1] = f32::NAN; // in the last head
    let [q, k, v] = layer.rows();
    assert_eq!(held.add(q, k, v), Err(Error::NotFinite { what: "rows" }));
    assert_eq!(held, before);
    let rotations = held.rotations().unwrap();
    assert!(rotations.maps(&[[1, 1]]).is_err() && rotations.maps(&[[1, 1], [1, DIM_V + 1]]).is_err());
    assert!(rotations.folded_maps(&[[1, 0], [1, 1]]).is_err());
    assert!(rotations.ranks(f32::NAN, Budget::Fraction(0.5), 1).is_err());
    let (mut w_v, mut w_o) = (vec![1.0_f32; HEADS * DIM_V * 2], layer.w_o.clone());
    let narrow = RowsMut::contiguous(&mut w_o, GROUP * DIM_V).unwrap();
    assert!(rotations.fold_values(RowsMut::contiguous(&mut w_v, 2).unwrap(), narrow).is_err());
    assert!(w_v.iter().all(|&x| x == 1.0) && w_o == layer.w_o);
    assert!(rotations.fold_value_bias(&mut [1.0_f32]).is_err());
    assert!(LayerRotations::new(vec![], 1, vec![]).is_err());
    assert!(LayerRotations::new(rotations.heads().to_vec(), 1, vec![[-1.0, 1.0]; HEADS]).is_err());
}
