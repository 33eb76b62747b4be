//! Codes of transformed rows as a device computes them.
//!
//! Keys are coded after RoPE, so that a score is a sum of table entries, plus a term of the position if the
//! rotated mean was subtracted. Values enter and leave in the basis of their codes, since the device's model
//! has both maps folded into its weights, as with ZACK's rotations (5.1). Their mean is folded into the
//! biases: softmax weights sum to one, so that an output lacks exactly one mean.

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
use kv_device::plan::{CodedRows, HeadMaps, Heads, Plan, RowForm, TransformedHead};
use kv_model::{Config, Model};
use pq_core::{PqShape, Window};
use svd_core::MapBuf;

use super::PqKlt;
use super::store::{HeadCode, KeySpace, TransformedPlan};
use crate::method::fold_values::{ValueFold, fold_values, projected};
use crate::method::on_device::{DeviceKind, Limit};
use crate::method::paged::Paging;
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
        let fold = |codes: Pair<HeadCode>| {
            let HeadCode { mean, basis, dual, .. } = codes.values;
            ValueFold { mean, basis, dual }
        };
        let layer = |l| Ok(self.plan(&model.config, profile, l)?.heads.into_iter().map(fold).collect());
        fold_values(model, layer)
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
