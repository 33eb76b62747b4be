//! The settings of hybrid attention on a device.

use pq_core::PqShape;

use super::{HybridKind, Rows as RowCount};
use crate::method::budget::Budget;
use crate::method::offload::RowHome;
use crate::method::pqklt::RowForm;
use crate::side::Pair;
use crate::{Error, Result};

/// The settings of hybrid attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HybridPlan {
    pub quantizers: Pair<PqShape>,
    pub form: RowForm,
    /// The rows per step, or their maximum.
    pub budget: Budget,
    /// The error bound that sets the number of rows per head, if there is one.
    pub bound: Option<f32>,
    pub home: RowHome,
    /// Rows per head that stay resident on the device, if a step selects fewer.
    pub held: usize,
}

impl HybridKind {
    pub(super) fn device_plan(&self, head_dim: usize) -> Result<HybridPlan> {
        let (quantizers, form) = self.codes.device_form(head_dim)?;
        if form.norms {
            return Err(Error::argument("norms=on: a device has norms=off only: pass it, or --device cpu"));
        }
        let home = self.offload.home(self.home)?;
        let held = self.offload.held();
        let (share, bound) = match self.rows {
            RowCount::Share(share) => (share, None),
            RowCount::Auto => (self.most, Some(self.bound)),
        };
        Ok(HybridPlan { quantizers, form, budget: Budget::Share(share), bound, home, held })
    }
}
