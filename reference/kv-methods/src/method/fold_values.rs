//! Folds the basis and the mean of coded values into the weights of a model.

use std::sync::Arc;

use kv_llama::ops::dot;
use kv_model::{AttentionWeights, Config, Layer, Model};
use svd_core::{Map, MapBuf, Rows, RowsMut};

use crate::Result;

/// The basis of a head's values, and the mean that is subtracted before.
pub(super) struct ValueFold {
    pub mean: Vec<f32>, // (head_dim,)
    pub basis: MapBuf,
    pub dual: MapBuf,
}

/// The model whose `W_V` yields values in their basis, minus their mean; `W_O` undoes both. `heads` are those
/// of a layer, (n_kv_heads,).
///
/// # Errors
/// Those of `heads`.
pub(super) fn fold_values(model: &Model, heads: impl Fn(usize) -> Result<Vec<ValueFold>>) -> Result<Model> {
    let fold = |(l, layer): (usize, &Layer)| -> Result<Layer> {
        let mut attention = (*layer.attention).clone();
        fold_layer(&mut attention, &heads(l)?, &model.config)?;
        Ok(Layer { attention: Arc::new(attention), feed_forward: layer.feed_forward.clone() })
    };
    let layers = model.layers.iter().enumerate().map(fold);
    Ok(Model { layers: layers.collect::<Result<_>>()?, ..model.clone() })
}

/// Rows of a map's dimension, mapped.
pub(super) fn projected(map: Map<'_>, rows: &[f32]) -> Result<Vec<f32>> {
    let mut out = vec![0.0; rows.len()];
    map.project_into(Rows::contiguous(rows, map.dim())?, RowsMut::contiguous(&mut out, map.rank())?)?;
    Ok(out)
}

fn fold_layer(weights: &mut AttentionWeights, heads: &[ValueFold], config: &Config) -> Result<()> {
    let (dim, group) = (config.head_dim, config.gqa_group());
    let AttentionWeights { v, o, .. } = weights;
    let value_bias = v.bias.get_or_insert_with(|| vec![0.0; v.weight.n_out()]);
    let output_bias = o.bias.get_or_insert_with(|| vec![0.0; o.weight.n_out()]);
    let [n_in, q_dim] = [v.weight.n_in(), o.weight.n_in()];
    let (weight, output) = (v.weight.f32_mut(), o.weight.f32_mut());
    for (head, ValueFold { mean, basis, dual }) in heads.iter().enumerate() {
        let rows = &mut weight[head * dim * n_in..][..dim * n_in];
        let columns = transposed(rows, n_in);
        rows.copy_from_slice(&transposed(&projected(basis.view(), &columns)?, dim));
        let bias = &mut value_bias[head * dim..][..dim];
        bias.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        let folded = projected(basis.view(), bias)?;
        bias.copy_from_slice(&folded);
        for query_head in head * group..(head + 1) * group {
            for (row, bias) in output.chunks_exact_mut(q_dim).zip(output_bias.iter_mut()) {
                let row = &mut row[query_head * dim..][..dim];
                *bias += dot(row, mean);
                let folded = projected(dual.view(), row)?;
                row.copy_from_slice(&folded);
            }
        }
    }
    Ok(())
}

/// Transposes a matrix with rows of `n` elements.
fn transposed(matrix: &[f32], n: usize) -> Vec<f32> {
    (0..n).flat_map(|column| matrix.iter().skip(column).step_by(n).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::Method;
    use kv_llama::{logits, prefill};
    use kv_model::Rope;

    #[test]
    fn the_folded_model_is_the_same_function() {
        let model = Arc::new(crate::fixture::model());
        let tokens: Vec<u32> = (0..200_u32).map(|i| (i * i + 7 * i) % 96).collect();
        let rope = Arc::new(Rope::new(&model.config, tokens.len()));
        let run = |model: &Model| {
            logits(model, &prefill(model, &rope, &tokens, &mut |_, _| Ok(())).unwrap()).unwrap()
        };
        let plain = run(&model);
        for spec in ["hybrid", "sq"] {
            let method = spec.parse::<Method>().unwrap().fitted(&model.config).unwrap();
            let profile = crate::calibrated(&model, &rope, &tokens, std::slice::from_ref(&method)).unwrap();
            let folded = method.device_model(&model, &profile).unwrap();
            assert_ne!(folded.layers[0].attention.v.weight, model.layers[0].attention.v.weight);
            let largest = plain.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
            let differences = plain.iter().zip(run(&folded)).map(|(a, b)| (a - b).abs());
            let difference = differences.fold(0.0_f32, f32::max);
            assert!(difference <= 1e-3 * largest, "{spec}: {difference} of {largest}");
        }
    }
}
