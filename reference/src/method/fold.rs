use std::sync::Arc;

use svd_core::{Rotation, fold_input, fold_output};

use crate::model::{AttentionWeights, Layer, Linear, Model};
use crate::{Error, Result};

/// The model whose values come out of `W_V` rotated and are turned back by `W_O` (ZACK 5.1): same function, same shapes.
///
/// `rotations` (n_layers, n_kv_heads).
pub(crate) fn fold_values(model: &Model, rotations: &[Vec<Rotation>]) -> Result<Model> {
    let layers = model.layers.iter().zip(rotations).map(|(layer, heads)| fold_layer(model, layer, heads));
    Ok(Model { layers: layers.collect::<Result<_>>()?, ..model.clone() })
}

fn fold_layer(model: &Model, layer: &Layer, heads: &[Rotation]) -> Result<Layer> {
    let config = &model.config;
    let (head_dim, hidden, q_dim) = (config.head_dim, config.hidden_size, config.q_dim());
    let AttentionWeights { norm, q, k, v, o } = &*layer.attention;
    let mut weight = Vec::with_capacity(v.weight.len());
    let mut bias = v.bias.as_ref().map(|_| vec![]);
    for (head, rotation) in heads.iter().enumerate() {
        let rows = head * head_dim..(head + 1) * head_dim;
        weight.extend(fold_input(
            rotation.store(),
            &v.weight[rows.start * hidden..rows.end * hidden],
            head_dim,
        )?);
        if let (Some(folded), Some(bias)) = (&mut bias, &v.bias) {
            folded.extend(fold_input(rotation.store(), &bias[rows], head_dim)?);
        }
    }
    let mut output = o.weight.clone();
    for head in 0..config.n_heads {
        let rotation = heads
            .get(head / config.gqa_group())
            .ok_or_else(|| Error::Profile("a rotation is missing".into()))?;
        let columns = head * head_dim..(head + 1) * head_dim;
        let block: Vec<f32> =
            o.weight.chunks_exact(q_dim).flat_map(|row| &row[columns.clone()]).copied().collect();
        let folded = fold_output(rotation.probe(), &block, head_dim)?;
        for (row, folded) in output.chunks_exact_mut(q_dim).zip(folded.chunks_exact(head_dim)) {
            row[columns.clone()].copy_from_slice(folded);
        }
    }
    let attention = AttentionWeights {
        norm: norm.clone(),
        q: q.clone(),
        k: k.clone(),
        v: Linear { weight, bias, ..*v },
        o: Linear { weight: output, bias: o.bias.clone(), ..*o },
    };
    Ok(Layer { attention: Arc::new(attention), feed_forward: layer.feed_forward.clone() })
}
