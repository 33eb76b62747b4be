//! What the errors of each layer's keys and values cost the model.

use kv_attend::owner::{Pair, Side};
use kv_llama::ops::log_softmax;
use kv_llama::{logits, prefill};
use kv_model::{Model, Rope};

use crate::Result;

/// Tokens of the calibration text that the model runs over once for each side of each layer.
const TOKENS: usize = 512;
/// Every fourth token is compared, since the logits of a large vocabulary cost as much as a few layers.
const STRIDE: usize = 4;
/// The mean divergence of the next token, in nats, that `code` causes in the keys or the values of one layer
/// alone: what a model loses by errors that the metric of a layer, which sees the next product alone, takes
/// for equal.
///
/// `code` gets layer, side and rows (n, n_kv_heads * head_dim), keys before RoPE, and replaces them by what
/// is decoded.
///
/// # Cost
/// The model over 512 tokens, twice for each layer.
pub(crate) fn divergences(
    model: &Model,
    rope: &Rope,
    tokens: &[u32],
    code: impl Fn(usize, Side, &mut [f32]) -> Result<()>,
) -> Result<Vec<Pair<f64>>> {
    let tokens = &tokens[..tokens.len().min(TOKENS)];
    let hidden = |coded: Option<(usize, Side)>| -> Result<Vec<f32>> {
        Ok(prefill(model, rope, tokens, &mut |l, activations| {
            match coded {
                Some((layer, Side::Keys)) if layer == l => code(l, Side::Keys, activations.k)?,
                Some((layer, Side::Values)) if layer == l => code(l, Side::Values, activations.v)?,
                _ => {}
            }
            Ok(())
        })?)
    };
    let rows = |hidden: &[f32]| {
        let rows = hidden.chunks_exact(model.config.hidden_size).skip(STRIDE - 1).step_by(STRIDE);
        rows.map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let predicted = |row: &Vec<f32>| Result::Ok(log_softmax(&logits(model, row)?));
    let exact = rows(&hidden(None)?).iter().map(predicted).collect::<Result<Vec<_>>>()?;
    let divergence = |l: usize, side: Side| -> Result<f64> {
        let mut sum = 0.0;
        for (row, exact) in rows(&hidden(Some((l, side)))?).iter().zip(&exact) {
            let coded = predicted(row)?;
            sum += exact.iter().zip(&coded).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        }
        Ok(sum / exact.len() as f64)
    };
    (0..model.config.n_layers).map(|l| Pair::try_of(|side| divergence(l, side))).collect()
}
