//! The settings of hybrid attention on a device.

use pq_core::PqShape;

use super::{HybridKind, Rows as RowCount};
use crate::method::budget::Budget;
use crate::method::offload::RowHome;
use crate::side::Pair;
use crate::{Error, Result};

/// The settings of hybrid attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HybridPlan {
    pub quantizers: Pair<PqShape>,
    pub budget: Budget,
    pub home: RowHome,
    /// Rows of a head that stay on the device, if a step selects fewer.
    pub held: usize,
}

impl HybridKind {
    pub(super) fn device_plan(&self, head_dim: usize) -> Result<HybridPlan> {
        let RowCount::Share(share) = self.rows else {
            return Err(Error::argument(
                "rows=auto needs the CPU: pass a share of the tokens, or --device cpu",
            ));
        };
        let quantizers = self.codes.tables_only(head_dim)?;
        let home = self.offload.home(self.home)?;
        let (budget, held) = (Budget::Share(share.into()), self.offload.held());
        Ok(HybridPlan { quantizers, budget, home, held })
    }
}
