use std::sync::Arc;

use svd_core::{Rotation, Rows};

use crate::model::{AttentionWeights, Layer, Linear, Model};
use crate::{Error, Result};

/// The model whose values come out of `W_V` rotated and are turned back by `W_O` (ZACK 5.1): same function,
/// same shapes.
///
/// `rotations` (n_layers, n_kv_heads).
pub(crate) fn fold_values(model: &Model, rotations: &[Vec<Rotation>]) -> Result<Model> {
    let layers = model.layers.iter().zip(rotations).map(|(layer, heads)| fold_layer(model, layer, heads));
    Ok(Model { layers: layers.collect::<Result<_>>()?, ..model.clone() })
}

fn fold_layer(model: &Model, layer: &Layer, heads: &[Rotation]) -> Result<Layer> {
    let config = &model.config;
    let (head_dim, hidden, q_dim) = (config.head_dim, config.hidden_size, config.q_dim());
    let AttentionWeights { v, o, .. } = &*layer.attention;
    let mut weight = Vec::with_capacity(v.weight.len());
    let mut bias = v.bias.as_ref().map(|_| vec![]);
    for (head, rotation) in heads.iter().enumerate() {
        let rows = head * head_dim..(head + 1) * head_dim;
        let head_rows = Rows::contiguous(&v.weight, hidden)?.slice(rows.clone())?;
        weight.extend(rotation.fold_basis(head_rows, head_dim)?);
        if let (Some(folded), Some(bias)) = (&mut bias, &v.bias) {
            folded.extend(rotation.fold_basis(Rows::contiguous(&bias[rows], 1)?, head_dim)?);
        }
    }
    let mut output = o.weight.clone();
    for head in 0..config.n_heads {
        let rotation = heads
            .get(head / config.gqa_group())
            .ok_or_else(|| Error::Profile("a rotation is missing".into()))?;
        let columns = head * head_dim..(head + 1) * head_dim;
        let block = Rows::contiguous(&o.weight, q_dim)?.columns(columns.start, head_dim)?;
        let folded = rotation.fold_output(block, head_dim)?;
        for (row, folded) in output.chunks_exact_mut(q_dim).zip(folded.chunks_exact(head_dim)) {
            row[columns.clone()].copy_from_slice(folded);
        }
    }
    let attention = AttentionWeights {
        v: Linear { weight, bias, ..*v },
        o: Linear { weight: output, bias: o.bias.clone(), ..*o },
        ..(*layer.attention).clone()
    };
    Ok(Layer { attention: Arc::new(attention), feed_forward: layer.feed_forward.clone() })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::calibrate::Calibration;
    use crate::forward::{logits, prefill};
    use crate::model::{Rope, RopeScaling};

    /// Without a rotary embedding `W_Q` and `W_K` can take a rotation too, and the model stays what it was.
    #[test]
    fn queries_and_keys_fold_where_there_is_no_rope() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/fixtures/gqa");
        let mut model = Model::load(&path).unwrap();
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
                let key_rows = &mut weights.k.weight[rows(head)];
                key_rows.copy_from_slice(
                    &rotation.fold_basis(Rows::contiguous(key_rows, hidden).unwrap(), dim).unwrap(),
                );
                for query_head in head * group..(head + 1) * group {
                    let query_rows = &mut weights.q.weight[rows(query_head)];
                    query_rows.copy_from_slice(
                        &rotation.fold_dual(Rows::contiguous(query_rows, hidden).unwrap(), dim).unwrap(),
                    );
                }
            }
        }
        let run =
            |model: &Model| logits(model, &prefill(model, &rope, &tokens[..64], &mut |_, _| Ok(())).unwrap());
        let (plain, folded) = (run(&model), run(&folded));
        let largest = plain.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let difference = plain.iter().zip(&folded).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(difference < 1e-4 * largest, "{difference} of {largest}");
    }
}
