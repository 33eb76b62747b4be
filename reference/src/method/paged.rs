//! Settings of a paged cache on a device.

use super::settings::Settings;
use crate::{Error, Result};

/// Paged memory for the tokens of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PagedMemory {
    /// Tokens per page.
    pub page: usize,
    /// Tokens of all sequences together; `None` for the sum of their maximum lengths.
    pub pool: Option<usize>,
}

impl PagedMemory {
    /// Reads `pages`, a multiple of `step` tokens, and `pool`.
    pub(super) fn take(s: &mut Settings<'_>, step: usize) -> Result<Option<Self>> {
        let (page, pool) = (s.tokens("pages", 0)?, s.tokens("pool", 0)?);
        let name = s.name;
        match (page, pool) {
            (0, 0) => Ok(None),
            (0, _) => Err(Error::Argument(format!("method {name}: `pool` has no effect without pages=N"))),
            (page, _) if !page.is_multiple_of(step) => Err(Error::Argument(format!(
                "method {name}: pages={page}: must be a multiple of {step} tokens"
            ))),
            (page, pool) => Ok(Some(Self { page, pool: (pool > 0).then_some(pool) })),
        }
    }
}
