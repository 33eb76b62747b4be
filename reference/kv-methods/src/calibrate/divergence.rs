//! What the errors of each layer's keys and values cost the model.

use kv_attend::owner::{Pair, Side};
use kv_llama::ops::log_softmax;
use kv_llama::{logits, prefill};

use super::{Calibration, SINKS};
use crate::Result;

/// Tokens of the calibration text that the model runs over once for each side of each layer.
const TOKENS: usize = 512;
/// The last tokens are compared, and as many before them stay exact, as a window has them: at most so many,
/// and a quarter of a short text.
const RECENT: usize = 64;

impl Calibration<'_> {
    /// The mean divergence of the next token, in nats, that `code` causes in the keys or the values of one
    /// layer alone, in the tokens between sinks and window: what a model loses by errors that the metric of a
    /// layer, which sees the next product alone, takes for equal.
    ///
    /// `code` gets layer, side and rows (n, n_kv_heads * head_dim), keys before RoPE, and replaces them by
    /// what is decoded. As in a cache after an exact prompt, the rows of the other layers are those of the
    /// exact model: with rows that follow from the coded ones the errors of a layer seemed ten times as
    /// large, and those of a layer's neighbouring tokens the most costly.
    ///
    /// There are at least [`Self::check_tokens`] tokens.
    ///
    /// # Cost
    /// The model over 512 tokens, twice for each layer.
    pub(crate) fn divergences(
        &self,
        code: impl Fn(usize, Side, &mut [f32]) -> Result<()>,
    ) -> Result<Vec<Pair<f64>>> {
        let Self { model, rope, tokens, .. } = self;
        let tokens = &tokens[..tokens.len().min(TOKENS)];
        let kv_dim = model.config.kv_dim();
        let recent = RECENT.min(tokens.len() / 4);
        let coded = SINKS * kv_dim..(tokens.len() - 2 * recent) * kv_dim;
        let compared = (tokens.len() - recent) * model.config.hidden_size;
        let predicted = |hidden: Vec<f32>| -> Result<Vec<Vec<f64>>> {
            let logits = logits(model, &hidden[compared..])?;
            Ok(logits.chunks_exact(model.config.vocab_size).map(log_softmax).collect())
        };
        let mut exact_rows: Vec<Pair<Vec<f32>>> = vec![];
        let exact = predicted(prefill(model, rope, tokens, &mut |_, activations| {
            let rows = |rows: &[f32]| rows[coded.clone()].to_vec();
            exact_rows.push(Pair::new(rows(activations.k), rows(activations.v)));
            Ok(())
        })?)?;
        let divergence = |layer: usize, side: Side| -> Result<f64> {
            let hidden = prefill(model, rope, tokens, &mut |l, activations| {
                let (k, v) = (&mut activations.k[coded.clone()], &mut activations.v[coded.clone()]);
                k.copy_from_slice(&exact_rows[l].keys);
                v.copy_from_slice(&exact_rows[l].values);
                if l == layer {
                    code(l, side, if side == Side::Keys { k } else { v })?;
                }
                Ok(())
            })?;
            let divergence = |(exact, coded): (&Vec<f64>, &Vec<f64>)| -> f64 {
                exact.iter().zip(coded).map(|(p, q)| p.exp() * (p - q)).sum()
            };
            let sum: f64 = exact.iter().zip(&predicted(hidden)?).map(divergence).sum();
            Ok(sum / exact.len() as f64)
        };
        (0..model.config.n_layers).map(|l| Pair::try_of(|side| divergence(l, side))).collect()
    }
}
