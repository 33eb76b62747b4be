//! The device's view of a method: its element type and its plan.

use pq_core::Window;

use super::{Method, Plan};
use crate::cache::ElementType;
use crate::model::Config;
use crate::{Error, Profile, Result};

impl Method {
    /// The element type of the model and of exact rows on a device: that of the method's exact rows.
    ///
    /// # Errors
    /// [`Error::Argument`] for 32 bits.
    pub fn device_element(&self) -> Result<kv_gpu::Element> {
        match self.exact {
            ElementType::F16 => Ok(kv_gpu::Element::F16),
            ElementType::Bf16 => Ok(kv_gpu::Element::Bf16),
            ElementType::F32 => Err(Error::Argument(format!(
                "{} keeps rows in 32 bits, and the device has 16: pass dtype or exact as f16 or bf16, or --device cpu",
                self.spec()
            ))),
        }
    }

    /// The tokens that stay exact.
    pub(crate) const fn window(&self) -> Window {
        self.window
    }

    /// The cache of the method on a device, whose data is the profile's; `None` for a method that no device
    /// has.
    ///
    /// # Errors
    /// [`Error::Argument`] for settings that a device does not support; [`Error::Profile`].
    pub(crate) fn device_plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Option<Plan>> {
        if !self.exact_layers.is_empty() && self.kind.dense().is_none() {
            return Ok(None);
        }
        self.kind.device_plan(config, profile).map_err(|e| self.named(e))
    }
}
