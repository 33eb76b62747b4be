//! The settings of hybrid attention on a device.

use pq_core::PqShape;

use super::{HybridKind, Rows as RowCount};
use crate::Result;
use crate::method::budget::Budget;
use crate::method::offload::RowHome;
use crate::side::Pair;

/// The settings of hybrid attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HybridPlan {
    pub quantizers: Pair<PqShape>,
    /// The rows of a step, or the most of them.
    pub budget: Budget,
    /// What decides how many each head reads, if anything does.
    pub bound: Option<f32>,
    pub home: RowHome,
    /// Rows of a head that stay on the device, if a step selects fewer.
    pub held: usize,
}

impl HybridKind {
    pub(super) fn device_plan(&self, head_dim: usize) -> Result<HybridPlan> {
        let quantizers = self.codes.tables_only(head_dim)?;
        let home = self.offload.home(self.home)?;
        let held = self.offload.held();
        let (share, bound) = match self.rows {
            RowCount::Share(share) => (share.into(), None),
            RowCount::Auto => (self.most, Some(self.bound)),
        };
        Ok(HybridPlan { quantizers, budget: Budget::Share(share), bound, home, held })
    }
}
