//! Settings of a paged cache on a device.

use super::settings::Settings;
use crate::{Error, Result};

/// Paged memory for the tokens of a batch on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Paging {
    page: usize,         // tokens
    pool: Option<usize>, // tokens of all sequences together
}

impl Paging {
    /// Reads `pages`, a multiple of `step` tokens, and `pool`.
    pub(super) fn take(s: &mut Settings<'_>, step: usize) -> Result<Option<Self>> {
        let (page, pool) = (s.given_tokens("pages")?, s.given_tokens("pool")?);
        let refused = |what: String| Err(Error::Argument(format!("method {}: {what}", s.name)));
        match (page, pool) {
            (None, None) => Ok(None),
            (None, Some(_)) => refused("`pool` has no effect without pages=N".into()),
            (Some(page), _) if page == 0 || !page.is_multiple_of(step) => {
                refused(format!("pages={page}: must be a multiple of {step} tokens, at least one"))
            }
            (_, Some(0)) => refused("pool=0 holds no tokens".into()),
            (Some(page), pool) => Ok(Some(Self { page, pool })),
        }
    }

    /// The memory of the cache.
    #[cfg(feature = "cuda")]
    pub(super) const fn memory(self) -> kv_device::plan::PagedMemory {
        kv_device::plan::PagedMemory { page: self.page, pool: self.pool }
    }
}
