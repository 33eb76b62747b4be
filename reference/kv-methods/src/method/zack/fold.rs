//! Folds value rotations into the weights of a model.

use std::sync::Arc;

use kv_model::{AttentionWeights, Layer, Model};
use svd_core::{LayerRotations, RowsMut};

use crate::Result;

/// The model whose `W_V` yields rotated values and whose `W_O` rotates them back (ZACK 5.1): same function,
/// same shapes.
///
/// `rotations` (n_layers,).
pub(crate) fn fold_values(model: &Model, rotations: &[LayerRotations]) -> Result<Model> {
    let fold = |(layer, rotations): (&Layer, &LayerRotations)| -> Result<Layer> {
        let mut attention = (*layer.attention).clone();
        let AttentionWeights { v, o, .. } = &mut attention;
        let [hidden, q_dim] = [v.n_in(), o.n_in()];
        let w_v = RowsMut::contiguous(v.weight.f32_mut(), hidden)?;
        rotations.fold_values(w_v, RowsMut::contiguous(o.weight.f32_mut(), q_dim)?)?;
        if let Some(bias) = &mut v.bias {
            rotations.fold_value_bias(bias)?;
        }
        Ok(Layer { attention: Arc::new(attention), feed_forward: layer.feed_forward.clone() })
    };
    let layers = model.layers.iter().zip(rotations).map(fold);
    Ok(Model { layers: layers.collect::<Result<_>>()?, ..model.clone() })
}

#[cfg(test)]
mod tests {
    use svd_core::{Rotation, Rows};

    use super::*;
    use crate::calibrate::Calibration;
    use kv_llama::{logits, prefill};
    use kv_model::{Rope, RopeScaling};

    /// Without RoPE, a rotation can be folded into `W_Q` and `W_K` as well, and the model's function does not
    /// change.
    #[test]
    fn queries_and_keys_fold_where_there_is_no_rope() {
        let mut model = crate::fixture::model();
        model.config.rope_scaling = RopeScaling::Linear { factor: 1e300 }; // no angle at any position
        let tokens: Vec<u32> = (0..200_u32).map(|i| (i * i + 7 * i) % 96).collect();
        let rope = Rope::new(&model.config, tokens.len());
        let samples = Calibration::gather(&model, &rope, &tokens).unwrap();
        let (dim, hidden, group) =
            (model.config.head_dim, model.config.hidden_size, model.config.gqa_group());
        let mut folded = model.clone();
        for (layer, samples) in folded.layers.iter_mut().zip(&samples.layers) {
            let weights = Arc::make_mut(&mut layer.attention);
            for (head, (keys, queries)) in samples.key_grams.iter().zip(&samples.query_grams).enumerate() {
                let rotation = Rotation::score_optimal(keys, queries).unwrap();
                let rows = |head: usize| head * dim * hidden..(head + 1) * dim * hidden;
                let key_rows = &mut weights.k.weight.f32_mut()[rows(head)];
                key_rows.copy_from_slice(
                    &rotation.fold_basis(Rows::contiguous(key_rows, hidden).unwrap(), dim).unwrap(),
                );
                for query_head in head * group..(head + 1) * group {
                    let query_rows = &mut weights.q.weight.f32_mut()[rows(query_head)];
                    query_rows.copy_from_slice(
                        &rotation.fold_dual(Rows::contiguous(query_rows, hidden).unwrap(), dim).unwrap(),
                    );
                }
            }
        }
        let run = |model: &Model| {
            logits(model, &prefill(model, &rope, &tokens[..64], &mut |_, _| Ok(())).unwrap()).unwrap()
        };
        let (plain, folded) = (run(&model), run(&folded));
        let largest = plain.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let difference = plain.iter().zip(&folded).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(difference < 1e-4 * largest, "{difference} of {largest}");
    }
}
