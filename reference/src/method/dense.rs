//! Every element exact: the baseline of all comparisons.

use std::sync::Arc;

use super::kind::{Entry, Kind, Site};
use super::paged::PagedMemory;
#[cfg(feature = "cuda")]
use super::plan::Plan;
use crate::Result;
use crate::cache::{ElementType, Store};
#[cfg(feature = "cuda")]
use crate::{Profile, model::Config};

pub(super) const DENSE: Entry = Entry {
    names: &["dense"],
    help: "\
  dense             every element exact                                   dtype=f32|f16|bf16
                      on a device: pages of N tokens, of a pool of M      pages=N pool=M
",
    parse: |s| {
        let element = s.own("dtype", ElementType::F32)?;
        Ok(Arc::new(Dense { element, pages: PagedMemory::take(s, TILE)? }))
    },
};

/// Tokens per tile of attention on a device; a tile lies in one page.
const TILE: usize = 16;

#[derive(Debug)]
struct Dense {
    element: ElementType,
    pages: Option<PagedMemory>,
}

impl Kind for Dense {
    fn dense(&self) -> Option<ElementType> {
        Some(self.element)
    }

    fn device_setting(&self) -> Option<&'static str> {
        self.pages.map(|_| "pages")
    }

    #[cfg(feature = "cuda")]
    fn device_plan(&self, _: &Config, _: Option<&Profile>) -> Result<Option<Plan>> {
        Ok(Some(Plan::Dense(self.pages)))
    }

    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>> {
        site.layers(|l| Ok(site.dense(l)))
    }
}
