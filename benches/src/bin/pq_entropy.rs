//! Entropy of product-quantizer codes of transformed keys and values (method `pqklt` of `kv`): the potential
//! of lossless coding of the codes.
//!
//! Every table is counted on the calibration text, so a rate is a cross-entropy: the rate of a coder with
//! fixed tables on the test text. Rates are bits per code. Prints one JSON object; `peers/codec.py` makes the
//! table.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

use std::path::PathBuf;

use kv_llama::prefill;
use kv_model::{Model, Rope};
use pq_core::{CodebookBuf, CodesBuf, PqShape, RopeMeanBuf, TrainOptions, divide_by_norms, train};
use rayon::prelude::*;
use serde_json::{Value, json};
use svd_core::{Gram, NoRope, PostRope, RopeSide, Rotation, Rows, RowsMut, balanced_order};

/// Leading tokens, which every method keeps exact.
const SINKS: usize = 4;

/// The prior weight of a context-free table in a table with context, in codes.
const PRIOR: f64 = 32.0;

/// Classes of the previous token's code: centroids sorted by their first component, in equal parts.
const CLASSES: usize = 4;

/// One layer of a text without its sinks.
struct Layer {
    queries: Vec<f32>, // (n, n_heads, head_dim), rotated to positions across the context
    keys: Vec<f32>,    // before RoPE
    values: Vec<f32>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, text, calibration, length, codes] = &arguments[..] else {
        eprintln!("usage: pq_entropy MODEL TEXT CALIBRATION_TOKENS TEST_TOKENS SUBSPACESxBITS,...");
        return;
    };
    let model = Model::load(&PathBuf::from(model)).unwrap();
    let tokens = model.tokenizer().unwrap().encode(&std::fs::read_to_string(text).unwrap()).unwrap();
    let (calibration, length): (usize, usize) = (calibration.parse().unwrap(), length.parse().unwrap());
    let rope = Rope::new(&model.config, calibration.max(length));
    let seen = layers(&model, &rope, &tokens[..calibration]);
    let unseen = layers(&model, &rope, &tokens[calibration..][..length]);
    let rows: Vec<Value> = codes.split(',').map(|code| row(&model, &rope, code, &seen, &unseen)).collect();
    println!(
        "{}",
        json!({ "model": model.name, "calibration": calibration, "length": length, "rows": rows })
    );
}

fn layers(model: &Model, rope: &Rope, tokens: &[u32]) -> Vec<Layer> {
    let (q_dim, kv_dim) = (model.config.q_dim(), model.config.kv_dim());
    let mut layers = vec![];
    prefill(model, rope, tokens, &mut |l, activations| {
        let (q, k) = (&activations.q[SINKS * q_dim..], &activations.k[SINKS * kv_dim..]);
        layers.push(Layer {
            queries: rope.layer(l).spread(q, q_dim, SINKS, 1),
            keys: k.to_vec(),
            values: activations.v[SINKS * kv_dim..].to_vec(),
        });
        Ok(())
    })
    .unwrap();
    layers
}

/// Rates of all heads' codes of a shape, keys and values.
fn row(model: &Model, rope: &Rope, code: &str, seen: &[Layer], unseen: &[Layer]) -> Value {
    let (m, nbits) = code.split_once('x').unwrap();
    let shape = PqShape::new(model.config.head_dim, m.parse().unwrap(), nbits.parse().unwrap()).unwrap();
    let heads: Vec<(usize, usize)> = (0..model.config.n_layers)
        .flat_map(|l| (0..model.config.n_kv_heads).map(move |head| (l, head)))
        .collect();
    let rates: Vec<[Rates; 2]> = heads
        .par_iter()
        .map(|&(l, head)| {
            let mut keys = [head_rows(model, &seen[l].keys, head), head_rows(model, &unseen[l].keys, head)];
            let mean = mean(&keys[0], shape.dim());
            let rotated_mean = RopeMeanBuf::new(&mean, rope.layer(l).frequencies()).unwrap();
            for rows in &mut keys {
                rope.layer(l).rotate_rows(rows, shape.dim(), SINKS);
                rotated_mean.view().subtract(SINKS, rows).unwrap();
            }
            let mut values = [&seen[l], &unseen[l]].map(|text| head_rows(model, &text.values, head));
            let mean = self::mean(&values[0], shape.dim());
            for row in values.iter_mut().flat_map(|rows| rows.chunks_exact_mut(mean.len())) {
                row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
            }
            let group = model.config.gqa_group();
            let query_heads = head * group..(head + 1) * group;
            let queries: Gram<PostRope> =
                gram(&seen[l].queries, model.config.q_dim(), query_heads.clone(), &shape);
            let outputs: Gram<NoRope> =
                gram(&model.layers[l].attention.o.weight.to_f32(), model.config.q_dim(), query_heads, &shape);
            [rates(&shape, &queries, keys), rates(&shape, &outputs, values)]
        })
        .collect();
    // A token's values in the first layer depend on the token alone.
    let groups = [
        ("all", 0..2, 0..=usize::MAX),
        ("keys", 0..1, 0..=usize::MAX),
        ("values, first layer", 1..2, 0..=0),
        ("values, other layers", 1..2, 1..=usize::MAX),
    ];
    let groups = groups.map(|(name, sides, layers)| {
        let mut sum = Rates::default();
        let heads = heads.iter().zip(&rates).filter(|((l, _), _)| layers.contains(l));
        heads.flat_map(|(_, head)| &head[sides.clone()]).for_each(|rates| sum.add(rates));
        json!({
            "name": name, "static": sum.alone / sum.codes, "adaptive": sum.adaptive / sum.codes,
            "previous": sum.previous / sum.codes, "class": sum.class / sum.codes,
            "neighbour": sum.neighbour / sum.codes, "window": sum.window / sum.codes,
        })
    });
    json!({ "code": code, "groups": groups })
}

/// Sums over codes, in bits.
#[derive(Default)]
struct Rates {
    codes: f64,
    alone: f64,     // a table per head and subspace
    adaptive: f64,  // that table, adapted to the test text
    previous: f64,  // given the previous token's code
    class: f64,     // given the class of the previous token's code
    neighbour: f64, // given the same token's code in the previous subspace
    window: f64,    // entropy of the test text's own counts, a bound for context-free coders
}

impl Rates {
    fn add(&mut self, other: &Self) {
        self.codes += other.codes;
        self.alone += other.alone;
        self.adaptive += other.adaptive;
        self.previous += other.previous;
        self.class += other.class;
        self.neighbour += other.neighbour;
        self.window += other.window;
    }
}

/// Fits the transform and the codebooks to the first rows, codes both, and measures the codes of the second
/// rows.
fn rates<S: RopeSide>(shape: &PqShape, metric: &Gram<S>, rows: [Vec<f32>; 2]) -> Rates {
    let dim = shape.dim();
    let mut covariance = Gram::new(dim).unwrap();
    covariance.add_rows(Rows::contiguous(&rows[0], dim).unwrap()).unwrap();
    let rotation = Rotation::query_metric(&covariance, metric).unwrap();
    let rotation = rotation.reordered(&balanced_order(rotation.sigma(), shape.m()).unwrap()).unwrap();
    let basis = rotation.basis_map(dim).unwrap();
    let rows = rows.map(|rows| {
        let mut transformed = vec![0.0; rows.len()];
        let out = RowsMut::contiguous(&mut transformed, dim).unwrap();
        basis.view().project_into(Rows::contiguous(&rows, dim).unwrap(), out).unwrap();
        divide_by_norms(&mut transformed, dim, &mut vec![0; rows.len() / dim]).unwrap();
        transformed
    });
    let options = TrainOptions { iterations: 8, ..TrainOptions::default() };
    let codebook = CodebookBuf::new(*shape, &train(*shape, &rows[0], &options).unwrap().centroids).unwrap();
    let codes = rows.map(|rows| {
        let mut codes = CodesBuf::new(*shape);
        codes.append(&codebook.view(), &rows).unwrap();
        let codes = codes.view();
        (0..codes.n()).map(|i| codes.iter_vector(i).collect()).collect::<Vec<Vec<usize>>>()
    });
    let centroids = codebook.centroids();
    let mut sum = Rates::default();
    for j in 0..shape.m() {
        let column = |i: usize, j: usize| codes[i].iter().map(|codes| codes[j]).collect::<Vec<_>>();
        let [seen, unseen] = [0, 1].map(|i| column(i, j));
        let classes =
            classes(&centroids[j * shape.ksub() * shape.dsub()..][..shape.ksub() * shape.dsub()], shape);
        let class = |codes: &[usize]| codes.iter().map(|&code| classes[code]).collect::<Vec<_>>();
        let alone = table(&counts(&seen, shape.ksub()), &vec![1.0 / shape.ksub() as f64; shape.ksub()]);
        sum.codes += unseen.len() as f64;
        sum.alone += unseen.iter().map(|&code| -alone[code].log2()).sum::<f64>();
        sum.adaptive += adaptive(&counts(&seen, shape.ksub()), &unseen);
        sum.previous += given(&alone, (&seen, &seen), (&unseen, &unseen), shape.ksub(), 1);
        sum.class += given(&alone, (&seen, &class(&seen)), (&unseen, &class(&unseen)), CLASSES, 1);
        let before = j.checked_sub(1).map(|j| [0, 1].map(|i| column(i, j)));
        let [seen_before, unseen_before] =
            before.unwrap_or_else(|| [vec![0; seen.len()], vec![0; unseen.len()]]);
        sum.neighbour += given(&alone, (&seen, &seen_before), (&unseen, &unseen_before), shape.ksub(), 0);
        let own = counts(&unseen, shape.ksub());
        let n = unseen.len() as f64;
        sum.window +=
            own.iter().filter(|&&count| count > 0.0).map(|count| count * (n / count).log2()).sum::<f64>();
    }
    sum
}

/// Bits of `test.0` under a table per context, which is `test.1` of `lag` tokens before.
fn given(
    alone: &[f64],
    sample: (&[usize], &[usize]),
    test: (&[usize], &[usize]),
    contexts: usize,
    lag: usize,
) -> f64 {
    let mut by_context = vec![vec![0.0; alone.len()]; contexts];
    for (&code, &context) in sample.0[lag..].iter().zip(sample.1) {
        by_context[context][code] += 1.0;
    }
    let tables: Vec<Vec<f64>> = by_context.iter().map(|counts| table(counts, alone)).collect();
    let first: f64 = test.0[..lag].iter().map(|&code| -alone[code].log2()).sum();
    first
        + test.0[lag..].iter().zip(test.1).map(|(&code, &context)| -tables[context][code].log2()).sum::<f64>()
}

/// Bits of codes under adaptive counts that start from a sample's, weighted as [`PRIOR`] codes per value.
fn adaptive(sample: &[f64], test: &[usize]) -> f64 {
    let (n, weight) = (sample.iter().sum::<f64>(), PRIOR * sample.len() as f64);
    let mut counts: Vec<f64> =
        sample.iter().map(|count| (count + 0.5) / (n + 0.5 * sample.len() as f64) * weight).collect();
    let mut total = weight;
    let mut bits = 0.0;
    for &code in test {
        bits += (total / counts[code]).log2();
        counts[code] += 1.0;
        total += 1.0;
    }
    bits
}

fn counts(codes: &[usize], ksub: usize) -> Vec<f64> {
    let mut counts = vec![0.0; ksub];
    codes.iter().for_each(|&code| counts[code] += 1.0);
    counts
}

/// Counts as probabilities, with a wider table's as a prior of [`PRIOR`] codes.
fn table(counts: &[f64], wider: &[f64]) -> Vec<f64> {
    let n = counts.iter().sum::<f64>() + PRIOR;
    counts.iter().zip(wider).map(|(count, wider)| (count + PRIOR * wider) / n).collect()
}

/// The class of every centroid of a subspace (ksub, dsub).
fn classes(centroids: &[f32], shape: &PqShape) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shape.ksub()).collect();
    order.sort_by(|&a, &b| centroids[a * shape.dsub()].total_cmp(&centroids[b * shape.dsub()]));
    let mut classes = vec![0; shape.ksub()];
    order.iter().enumerate().for_each(|(rank, &c)| classes[c] = rank * CLASSES / shape.ksub());
    classes
}

/// One head's rows, (n, head_dim).
fn head_rows(model: &Model, rows: &[f32], head: usize) -> Vec<f32> {
    let dim = model.config.head_dim;
    rows.chunks_exact(model.config.kv_dim()).flat_map(|row| &row[head * dim..][..dim]).copied().collect()
}

/// The mean of rows (n, dim).
fn mean(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut mean = vec![0.0; dim];
    let n = (rows.len() / dim) as f32;
    for row in rows.chunks_exact(dim) {
        mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x / n);
    }
    mean
}

/// The second moment of the columns of some heads, summed over `heads`.
fn gram<S: RopeSide>(
    rows: &[f32],
    row_len: usize,
    heads: std::ops::Range<usize>,
    shape: &PqShape,
) -> Gram<S> {
    let mut gram = Gram::new(shape.dim()).unwrap();
    let rows = Rows::contiguous(rows, row_len).unwrap();
    heads.for_each(|head| gram.add_rows(rows.columns(head * shape.dim(), shape.dim()).unwrap()).unwrap());
    gram
}
