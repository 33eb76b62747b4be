//! The parts of a model's matrices that a rank holds.

use std::ops::Range;

use kv_model::{Config, Layer, Linear, Matrix};
use rayon::prelude::*;

use crate::ranks::Shard;

/// Numbers that a thread decodes or rounds at a time.
pub(super) const DECODED: usize = 1 << 16;

/// Rows of a matrix that a thread decodes at a time.
fn rows_at_once(matrix: &Matrix) -> usize {
    (DECODED / matrix.n_in()).max(1)
}

/// Rows and columns of a matrix, and the bias of the rows.
pub(super) struct Part<'a> {
    matrix: &'a Matrix,
    bias: Option<&'a [f32]>,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// The parts of a layer's matrices, of which those in a list are stacked.
pub(super) struct LayerParts<'a> {
    pub qkv: [Part<'a>; 3],
    pub o: Part<'a>,
    pub gate_up: [Part<'a>; 2],
    pub down: Part<'a>,
}

impl<'a> LayerParts<'a> {
    /// Those of a rank, of a layer of a model of this shape.
    pub fn of(layer: &'a Layer, config: &Config, shard: Shard) -> Self {
        let (attention, feed_forward) = (&layer.attention, &layer.feed_forward);
        let heads = |heads: Range<usize>| heads.start * config.head_dim..heads.end * config.head_dim;
        let (queries, kv) = (heads(shard.of(config.n_heads)), heads(shard.kv_heads(config.n_kv_heads)));
        let inner = shard.of(config.intermediate_size);
        Self {
            qkv: [
                Part::rows(&attention.q, queries.clone()),
                Part::rows(&attention.k, kv.clone()),
                Part::rows(&attention.v, kv),
            ],
            o: Part::columns(&attention.o, queries),
            gate_up: [&feed_forward.gate, &feed_forward.up].map(|linear| Part::rows(linear, inner.clone())),
            down: Part::columns(&feed_forward.down, inner),
        }
    }
}

impl<'a> Part<'a> {
    /// Rows of a matrix without a bias.
    pub const fn of(matrix: &'a Matrix, rows: Range<usize>) -> Self {
        Self { matrix, bias: None, rows, columns: 0..matrix.n_in() }
    }

    /// Rows: outputs, each with its bias.
    fn rows(Linear { weight, bias }: &'a Linear, rows: Range<usize>) -> Self {
        Self { bias: bias.as_deref().map(|bias| &bias[rows.clone()]), ..Self::of(weight, rows) }
    }

    /// Columns: inputs. The product is a part of a sum, to which the bias is added once.
    fn columns(Linear { weight, bias }: &'a Linear, columns: Range<usize>) -> Self {
        Self { bias: bias.as_deref(), columns, ..Self::of(weight, 0..weight.n_out()) }
    }

    /// Number of rows.
    pub fn n_out(&self) -> usize {
        self.rows.len()
    }

    /// Number of columns.
    pub fn n_in(&self) -> usize {
        self.columns.len()
    }

    fn len(&self) -> usize {
        self.n_out() * self.n_in()
    }

    /// Rows from the `first` of the part on, as many as `out` has.
    fn rows_into(&self, first: usize, whole: &mut Vec<f32>, out: &mut [f32]) {
        let (first, n_in) = (self.rows.start + first, self.matrix.n_in());
        if self.n_in() == n_in {
            return self.matrix.rows_into(first, out);
        }
        whole.resize(out.len() / self.n_in() * n_in, 0.0);
        self.matrix.rows_into(first, whole);
        for (out, row) in out.chunks_exact_mut(self.n_in()).zip(whole.chunks_exact(n_in)) {
            out.copy_from_slice(&row[self.columns.clone()]);
        }
    }
}

/// Replaces `rows` by those of parts, one part after the other.
pub(super) fn decode(parts: &[Part], rows: &mut Vec<f32>) {
    rows.resize(parts.iter().map(Part::len).sum(), 0.0);
    let mut rest = rows.as_mut_slice();
    for part in parts {
        let (rows, others) = rest.split_at_mut(part.len());
        let some = rows_at_once(part.matrix);
        let chunks = rows.par_chunks_mut(some * part.n_in()).enumerate();
        chunks.for_each_init(Vec::new, |whole, (i, rows)| part.rows_into(i * some, whole, rows));
        rest = others;
    }
}

/// The biases of parts, one part after the other, with zeros where a part has none; none if all have none.
pub(super) fn biases(parts: &[Part]) -> Option<Vec<f32>> {
    let bias = |part: &Part| part.bias.map_or_else(|| vec![0.0; part.n_out()], <[f32]>::to_vec);
    parts.iter().any(|part| part.bias.is_some()).then(|| parts.iter().flat_map(bias).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kv_model::{AttentionWeights, FeedForwardWeights, LayerAttention, RopeScaling};

    use super::*;

    const HEAD_DIM: usize = 2;
    const HIDDEN: usize = 3;

    fn config(n_heads: usize, n_kv_heads: usize, intermediate_size: usize) -> Config {
        Config {
            family: "llama",
            vocab_size: 16,
            hidden_size: HIDDEN,
            intermediate_size,
            n_layers: 1,
            n_heads,
            n_kv_heads,
            head_dim: HEAD_DIM,
            max_seq_len: 16,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: RopeScaling::None,
            attention_bias: true,
            output_bias: true,
            mlp_bias: false,
            tie_word_embeddings: false,
            qk_norm: false,
            attention: vec![LayerAttention::FULL],
            eos_tokens: vec![],
        }
    }

    /// A layer whose matrices, and biases, have numbers of their own.
    fn layer(config: &Config) -> Layer {
        let mut next = 0;
        let mut numbers = |n: usize| {
            next += n;
            (next - n..next).map(|x| x as f32).collect::<Vec<f32>>()
        };
        let mut linear = |n_in: usize, n_out: usize, bias: bool| Linear {
            weight: Matrix::new(numbers(n_in * n_out), n_in),
            bias: bias.then(|| numbers(n_out)),
        };
        let (q_dim, kv_dim, inner) = (config.q_dim(), config.kv_dim(), config.intermediate_size);
        Layer {
            attention: Arc::new(AttentionWeights {
                norm: vec![1.0; HIDDEN],
                q: linear(HIDDEN, q_dim, true),
                k: linear(HIDDEN, kv_dim, true),
                v: linear(HIDDEN, kv_dim, true),
                o: linear(q_dim, HIDDEN, true),
                q_norm: None,
                k_norm: None,
            }),
            feed_forward: Arc::new(FeedForwardWeights {
                norm: vec![1.0; HIDDEN],
                gate: linear(HIDDEN, inner, false),
                up: linear(HIDDEN, inner, false),
                down: linear(inner, HIDDEN, false),
            }),
        }
    }

    /// Elements (rows, columns) of a matrix, and the biases of the rows.
    fn elements(
        linear: &Linear,
        rows: impl Iterator<Item = usize>,
        columns: Range<usize>,
    ) -> (Vec<f32>, Vec<f32>) {
        let (mut all, n_in) = (vec![0.0; linear.n_in() * linear.n_out()], linear.n_in());
        linear.weight.rows_into(0, &mut all);
        let rows: Vec<usize> = rows.collect();
        let bias = linear.bias.iter().flat_map(|bias| rows.iter().map(|&row| bias[row])).collect();
        (rows.iter().flat_map(|row| all[row * n_in..][columns.clone()].to_vec()).collect(), bias)
    }

    /// Every query head is held by one rank, with its columns of `W_O` and the KV head that it attends to;
    /// every row of gate and up by one, with its column of `W_down`; every row of the output by one.
    #[test]
    fn ranks_hold_the_rows_and_columns_of_their_heads() {
        // Query heads, KV heads, components of the feed-forward block.
        for (heads, kv_heads, inner) in
            [(32, 8, 64), (64, 8, 112), (16, 16, 32), (16, 2, 16), (32, 1, 48), (48, 4, 16)]
        {
            let config = config(heads, kv_heads, inner);
            let (layer, group) = (layer(&config), heads / kv_heads);
            let (attention, feed_forward) = (&layer.attention, &layer.feed_forward);
            for ranks in [1, 2, 4, 8, 16] {
                let mut holders = vec![vec![]; kv_heads];
                for rank in 0..ranks {
                    let shard = Shard::new(rank, ranks).unwrap();
                    let part = shard.config(&config).unwrap();
                    let parts = LayerParts::of(&layer, &config, shard);
                    let (own, inner) = (heads / ranks, inner / ranks);
                    let queries: Vec<usize> = (rank * own..(rank + 1) * own).collect();
                    let mut kv: Vec<usize> = queries.iter().map(|head| head / group).collect();
                    kv.dedup();
                    kv.iter().for_each(|&head| holders[head].push(rank));
                    assert_eq!((part.n_heads, part.n_kv_heads), (queries.len(), kv.len()));
                    assert_eq!(part.intermediate_size, inner);
                    let rows_of = |heads: &[usize]| {
                        let rows = |&head: &usize| head * HEAD_DIM..(head + 1) * HEAD_DIM;
                        heads.iter().flat_map(rows).collect::<Vec<_>>()
                    };
                    let components = rank * inner..(rank + 1) * inner;
                    let check = |parts: &[Part], expected: &[(Vec<f32>, Vec<f32>)]| {
                        let mut rows = vec![];
                        decode(parts, &mut rows);
                        let all = expected.iter().flat_map(|(rows, _)| rows.clone());
                        assert_eq!(rows, all.collect::<Vec<_>>(), "{shard:?} of {heads}, {kv_heads}");
                        let bias: Vec<f32> = expected.iter().flat_map(|(_, bias)| bias.clone()).collect();
                        assert_eq!(biases(parts).unwrap_or_default(), bias);
                    };
                    let rows = |linear, of: &[usize]| elements(linear, of.iter().copied(), 0..HIDDEN);
                    let columns = |linear, of: Range<usize>| elements(linear, 0..HIDDEN, of);
                    let (q, kv) = (rows_of(&queries), rows_of(&kv));
                    check(
                        &parts.qkv,
                        &[rows(&attention.q, &q), rows(&attention.k, &kv), rows(&attention.v, &kv)],
                    );
                    check(&[parts.o], &[columns(&attention.o, q[0]..q[0] + q.len())]);
                    let own: Vec<usize> = components.clone().collect();
                    check(&parts.gate_up, &[rows(&feed_forward.gate, &own), rows(&feed_forward.up, &own)]);
                    check(&[parts.down], &[columns(&feed_forward.down, components)]);
                }
                // As many holders each, and all of them neighbours.
                let each = (ranks / kv_heads).max(1);
                for (head, holders) in holders.iter().enumerate() {
                    let first = head * ranks / kv_heads;
                    let expected: Vec<usize> = (first..first + each).collect();
                    assert_eq!(*holders, expected, "KV head {head} of {kv_heads}, {ranks} ranks");
                }
            }
        }
    }
}
