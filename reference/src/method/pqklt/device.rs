//! Codes of transformed rows as a device computes them.
//!
//! Keys are coded after RoPE, so that a score is a sum of table entries, plus a term of the position if the
//! rotated mean was subtracted. Values enter and leave in the basis of their codes, since the device's model
//! has both maps folded into its weights, as with ZACK's rotations (5.1). Their mean is folded into the
//! biases: softmax weights sum to one, so that an output lacks exactly one mean.

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
use kv_device::plan::{CodedRows, HeadMaps, Heads, Plan, RowForm, TransformedHead};
use pq_core::{PqShape, Window};
use svd_core::{Map, MapBuf, Rows, RowsMut};

use super::PqKlt;
use super::store::{HeadCode, KeySpace, TransformedPlan};
use crate::method::on_device::{DeviceKind, Limit};
use crate::method::paged::Paging;
use crate::model::{AttentionWeights, Config, Layer, Model};
use crate::ops::dot;
use crate::{Profile, Result};

impl PqKlt {
    /// The settings of transformed rows that no device supports.
    pub fn limits_of_rows(&self) -> [Limit; 2] {
        [
            Limit::new(
                self.space == KeySpace::BeforeRope,
                "keys=rope",
                "a device codes keys after RoPE",
                "keys=mean or keys=rotated",
            ),
            Limit::new(self.refine != 0, "refine=1", "a device has the codebooks of the profile", "refine=0"),
        ]
    }

    /// The quantizers, and the form of the rows that they code.
    pub fn device_form(&self, head_dim: usize) -> Result<(Pair<PqShape>, RowForm)> {
        let rotated_mean = self.space == KeySpace::RotatedMean;
        let form = RowForm { rotated_mean, norms: Pair::try_of(|side| self.norms(side, head_dim))? };
        Ok((Pair::try_of(|side| self.codes[side].shape(head_dim))?, form))
    }

    /// The codes of every layer and head.
    pub fn device_heads(&self, config: &Config, profile: &Profile) -> Result<Heads<TransformedHead>> {
        let layer = |l| {
            let TransformedPlan { heads, .. } = self.plan(config, profile, l)?;
            heads.into_iter().map(transformed_head).collect()
        };
        (0..config.n_layers).map(layer).collect()
    }

    /// The model whose `W_V` yields values in the basis of their codes, minus their mean; `W_O` undoes both.
    pub fn fold_values(&self, model: &Model, profile: &Profile) -> Result<Model> {
        let fold = |(l, layer): (usize, &Layer)| -> Result<Layer> {
            let plan = self.plan(&model.config, profile, l)?;
            let mut attention = (*layer.attention).clone();
            fold_layer(&mut attention, &plan, &model.config)?;
            Ok(Layer { attention: Arc::new(attention), feed_forward: layer.feed_forward.clone() })
        };
        let layers = model.layers.iter().enumerate().map(fold);
        Ok(Model { layers: layers.collect::<Result<_>>()?, ..model.clone() })
    }
}

impl DeviceKind for PqKlt {
    fn limits(&self, window: Window) -> Vec<Limit> {
        let mut limits = Limit::of_rings(window);
        limits.extend(self.limits_of_rows());
        limits.push(Limit::new(
            self.has_norms(Side::Keys) != self.has_norms(Side::Values),
            "norms=off",
            "a device's attention has norms of keys and values, or none",
            "norms=on or values=trained",
        ));
        limits
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let (quantizers, form) = self.device_form(config.head_dim)?;
        let heads = profile.map(|profile| self.device_heads(config, profile)).transpose()?;
        let rows = CodedRows::Transformed(form, heads);
        Ok(Plan::Codes { quantizers, rows, pages: self.pages.map(Paging::memory) })
    }

    fn fold(&self, model: &Model, profile: &Profile) -> Result<Option<Model>> {
        self.fold_values(model, profile).map(Some)
    }
}

/// A head's codes as a device has them.
fn transformed_head(codes: Pair<HeadCode>) -> Result<TransformedHead> {
    let Pair { keys, values } = codes;
    Ok(TransformedHead {
        maps: HeadMaps {
            keys: columns(&keys.basis)?,
            queries: columns(&keys.dual)?,
            values: columns(&values.basis)?,
        },
        key_mean: keys.mean,
        value_mean: projected(values.basis.view(), &values.mean)?,
        codebooks: Pair::new(Arc::unwrap_or_clone(keys.codebook), Arc::unwrap_or_clone(values.codebook)),
        key_errors: keys.errors,
        value_error: values.error,
    })
}

/// The columns of a map, as the image of the identity.
fn columns(map: &MapBuf) -> Result<Vec<f32>> {
    let dim = map.view().dim();
    let mut identity = vec![0.0; dim * dim];
    identity.iter_mut().step_by(dim + 1).for_each(|x| *x = 1.0);
    projected(map.view(), &identity)
}

fn projected(map: Map<'_>, rows: &[f32]) -> Result<Vec<f32>> {
    let mut out = vec![0.0; rows.len()];
    map.project_into(Rows::contiguous(rows, map.dim())?, RowsMut::contiguous(&mut out, map.rank())?)?;
    Ok(out)
}

fn fold_layer(weights: &mut AttentionWeights, plan: &TransformedPlan, config: &Config) -> Result<()> {
    let (dim, group) = (config.head_dim, config.gqa_group());
    let AttentionWeights { v, o, .. } = weights;
    let value_bias = v.bias.get_or_insert_with(|| vec![0.0; v.n_out]);
    let output_bias = o.bias.get_or_insert_with(|| vec![0.0; o.n_out]);
    for (head, codes) in plan.heads.iter().enumerate() {
        let HeadCode { mean, basis, dual, .. } = &codes.values;
        let rows = &mut v.weight[head * dim * v.n_in..][..dim * v.n_in];
        let columns = transposed(rows, v.n_in);
        rows.copy_from_slice(&transposed(&projected(basis.view(), &columns)?, dim));
        let bias = &mut value_bias[head * dim..][..dim];
        HeadCode::subtract_mean(mean, bias);
        let folded = projected(basis.view(), bias)?;
        bias.copy_from_slice(&folded);
        for query_head in head * group..(head + 1) * group {
            for (row, bias) in o.weight.chunks_exact_mut(o.n_in).zip(output_bias.iter_mut()) {
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
    use std::path::Path;

    use super::*;
    use crate::forward::{logits, prefill};
    use crate::method::Method;
    use crate::model::Rope;

    #[test]
    fn the_folded_model_is_the_same_function() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/fixtures/gqa");
        let model = Arc::new(Model::load(&path).unwrap());
        let tokens: Vec<u32> = (0..200_u32).map(|i| (i * i + 7 * i) % 96).collect();
        let rope = Arc::new(Rope::new(&model.config, tokens.len()));
        let method: Method = "hybrid".parse().unwrap();
        let method = method.fitted(&model.config).unwrap();
        let profile =
            crate::compare::calibrated(&model, &rope, &tokens, std::slice::from_ref(&method)).unwrap();
        let folded = method.device_model(&model, &profile).unwrap();
        assert_ne!(folded.layers[0].attention.v.weight, model.layers[0].attention.v.weight);
        let run = |model: &Model| {
            logits(model, &prefill(model, &rope, &tokens, &mut |_, _| Ok(())).unwrap()).unwrap()
        };
        let (plain, folded) = (run(&model), run(&folded));
        let largest = plain.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let difference = plain.iter().zip(&folded).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(difference <= 1e-3 * largest, "{difference} of {largest}");
    }
}
