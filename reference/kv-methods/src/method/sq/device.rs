//! Scalar codes as a device computes them: values enter and leave in their Hadamard basis, in units of their
//! scale.

use kv_device::plan::{Plan, ScalarHead, ScalarPlan};
use kv_model::{Config, Model};
use kv_owners::sq::{Basis, CodedKeys};
use pq_core::Window;
use svd_core::Hadamard;

use super::Sq;
use crate::calibrate::{scaled, single};
use crate::method::fold_values::{ValueFold, fold_values};
use crate::method::on_device::{DeviceKind, Limit};
use crate::method::settings::Switch;
use crate::{Profile, Result};

impl DeviceKind for Sq {
    fn limits(&self, window: Window) -> Vec<Limit> {
        vec![
            Limit::new(self.values > 4, "v=5", "values on a device have at most 4 bits", "v=4"),
            Limit::new(
                window.batch != self.bases.block,
                "batch=32",
                "on a device one block leaves the window at once",
                "no batch=",
            ),
            Limit::of_last_token(window),
            Limit::new(
                self.widen == Some(Switch::On),
                "widen=on",
                "on a device all sequences have the same bits",
                "no widen=",
            ),
        ]
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let slots = self.bits().key_slots(config.head_dim)?;
        let plan = ScalarPlan {
            key_slots: slots,
            value_bits: self.values as usize,
            mean_errors: self.mean_error,
            value_map: single(Hadamard::new(config.head_dim)?.rotation()?.basis()),
        };
        let head = |Basis { mean, value_mean, value_scale, .. }, coded| {
            let CodedKeys { shape, basis, dual, .. } = coded;
            ScalarHead { keys: shape, key_mean: mean, basis, dual, value_mean, value_scale }
        };
        let layer = |profile, l| -> Result<Vec<ScalarHead>> {
            let coded = |basis: Basis| Ok(head(basis.clone(), basis.coded_keys(slots)?));
            self.bases.of_layer(config, profile, l)?.into_iter().map(coded).collect()
        };
        let layers = |profile| (0..config.n_layers).map(|l| layer(profile, l)).collect::<Result<Vec<_>>>();
        Ok(Plan::Scalar(plan, profile.map(layers).transpose()?))
    }

    fn fold(&self, model: &Model, profile: &Profile) -> Result<Option<Model>> {
        let dim = model.config.head_dim;
        let rotation = Hadamard::new(dim)?.rotation()?;
        let fold = |Basis { value_mean: mean, value_scale: scale, .. }| -> Result<ValueFold> {
            let (basis, dual) =
                (scaled(rotation.basis(), scale.recip(), dim)?, scaled(rotation.dual(), scale, dim)?);
            Ok(ValueFold { mean, basis, dual })
        };
        let layer = |l| self.bases.of_layer(&model.config, profile, l)?.into_iter().map(fold).collect();
        fold_values(model, layer).map(Some)
    }
}
