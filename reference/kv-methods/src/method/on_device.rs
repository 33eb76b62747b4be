//! Methods on a device: the settings that it supports, the element type, and the cache as plain data.

use std::fmt;
use std::sync::Arc;

use kv_attend::ElementType;
use kv_device::Plan;
use kv_model::{Config, Model};
use pq_core::Window;

use super::{Method, Place};
use crate::{Error, Profile, Result};

/// A method's form on a device.
pub(super) trait DeviceKind {
    /// The settings that no device supports. `window` are the tokens that stay exact.
    fn limits(&self, window: Window) -> Vec<Limit>;

    /// Its cache, with the data of the profile, for settings within the limits.
    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan>;

    /// The model with the maps that it folds into the weights there, if it folds any.
    fn fold(&self, _model: &Model, _profile: &Profile) -> Result<Option<Model>> {
        Ok(None)
    }
}

/// A setting that no device supports: the one list from which methods are refused and which is shown.
pub(super) struct Limit {
    /// Whether the method has the setting.
    pub found: bool,
    /// An example of it; empty if the method has it whatever is passed.
    pub setting: &'static str,
    reason: &'static str,
    instead: &'static str, // empty if only the CPU has an alternative
}

impl Limit {
    /// `instead` is what to pass on a device.
    pub const fn new(
        found: bool,
        setting: &'static str,
        reason: &'static str,
        instead: &'static str,
    ) -> Self {
        Self { found, setting, reason, instead }
    }

    /// Of a method that no device has; `instead` is the nearest that one has, if there is one.
    pub const fn without_kernels(instead: &'static str) -> Self {
        Self::new(true, "", "a device has no kernels for it", instead)
    }

    /// The error of a method that has the setting, which it names.
    fn refuse(&self, method: &Method) -> Error {
        let keys: Vec<_> = self.setting.split(':').filter_map(|setting| setting.split('=').next()).collect();
        let (spec, keys) = (method.spec(), keys.join(", "));
        let keys = if keys.is_empty() { keys } else { format!("{keys}: ") };
        let or = if self.instead.is_empty() { ": pass" } else { ", or" };
        Error::Argument(format!("method {spec}: {keys}{self}{or} --device cpu"))
    }

    /// Of methods whose exact rows are in a ring, half of which leaves at a time.
    pub fn of_rings(window: Window) -> Vec<Self> {
        let Window { recent, batch, .. } = window;
        vec![
            Self::new(
                recent < 2 || !recent.is_multiple_of(2),
                "window=63",
                "on a device a window has an even number of tokens, at least two",
                "an even window",
            ),
            Self::new(batch > 1, "batch=2", "on a device tokens leave the window one by one", "batch=1"),
        ]
    }

    /// Of methods whose last token cannot leave the window with its own step.
    pub const fn of_last_token(window: Window) -> Self {
        Self::new(
            window.recent == 0,
            "window=0",
            "on a device the last token stays exact until the next one",
            "window=1 or more",
        )
    }

    /// Of methods with a window: its element type, and the layers that are all exact.
    pub fn of_windowed(method: &Method) -> Vec<Self> {
        vec![
            Self::new(
                method.exact == ElementType::F32,
                "exact=f32",
                "rows on a device have 16 bits",
                "exact=f16 or exact=bf16",
            ),
            Self::new(
                !method.exact_layers.is_empty(),
                "exact-layers=0",
                "a device has no exact layers",
                "no exact-layers",
            ),
        ]
    }
}

/// The reason, and what to pass on a device.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.instead {
            "" => f.write_str(self.reason),
            instead => write!(f, "{}: pass {instead}", self.reason),
        }
    }
}

impl Method {
    /// The same method for a model on a device, where defaults are those that a device supports.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model, or is not supported by any device: what
    /// to pass instead. Whether the kernels support the shape of the codes is up to the caller:
    /// `kv_reference::device::fitted`.
    pub fn on_device(&self, config: &Config) -> Result<Self> {
        let method = Self::parse(&self.given, config.head_dim, Place::Cuda)?;
        method.check(config)?;
        match method.limits().into_iter().find(|limit| limit.found) {
            Some(limit) => Err(limit.refuse(&method)),
            None => Ok(method),
        }
    }

    /// The settings of this method that no device supports.
    pub(super) fn own_limits(&self) -> Vec<Limit> {
        match self.kind.on_device() {
            Ok(kind) => kind.limits(self.window),
            Err(limit) => vec![limit],
        }
    }

    /// The same, with those that all methods with a window share.
    fn limits(&self) -> Vec<Limit> {
        let mut limits = self.own_limits();
        if self.kind.dense().is_none() {
            limits.extend(Limit::of_windowed(self));
        }
        limits
    }

    /// The element type of the model and of exact rows on a device: that of the method's exact rows.
    ///
    /// # Errors
    /// [`Error::Argument`] for 32 bits, the default of `dense` until it is
    /// fitted to a device.
    pub fn device_element(&self) -> Result<kv_gpu::Element> {
        match self.exact {
            ElementType::F16 => Ok(kv_gpu::Element::F16),
            ElementType::Bf16 => Ok(kv_gpu::Element::Bf16),
            ElementType::F32 => {
                let spec = self.spec();
                Err(Error::Argument(format!(
                    "method {spec}: rows on a device have 16 bits: pass f16 or bf16"
                )))
            }
        }
    }

    fn device_kind(&self) -> Result<&dyn DeviceKind> {
        self.kind.on_device().map_err(|limit| limit.refuse(self))
    }

    /// The tokens that stay exact.
    #[must_use]
    pub const fn window(&self) -> Window {
        self.window
    }

    /// The cache of the method, which is [`Self::on_device`], with the data of the profile.
    ///
    /// # Errors
    /// [`Error::Profile`].
    pub fn device_plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        self.device_kind()?.plan(config, profile).map_err(|e| self.named(e))
    }

    /// The model for the method on a device, which may have more folded into its weights than on the CPU.
    ///
    /// # Errors
    /// [`Error::Argument`] for a method that no device has; [`Error::Profile`] when the profile lacks an
    /// entry or has an invalid one.
    pub fn device_model(&self, model: &Arc<Model>, profile: &Profile) -> Result<Arc<Model>> {
        let method = self.fitted(&model.config)?;
        let folded = method.device_kind()?.fold(model, profile).map_err(|e| self.named(e))?;
        Ok(folded.map_or_else(|| model.clone(), Arc::new))
    }
}
