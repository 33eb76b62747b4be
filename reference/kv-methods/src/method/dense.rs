//! Every element exact: the baseline of all comparisons.

use std::sync::Arc;

use kv_attend::ElementType;
#[cfg(feature = "cuda")]
use kv_device::Plan;
#[cfg(feature = "cuda")]
use kv_model::Config;
#[cfg(feature = "cuda")]
use pq_core::Window;

use super::Place;
use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::paged::Paging;
#[cfg(feature = "cuda")]
use crate::Profile;
use crate::Result;
use crate::cache::Store;

pub(super) const DENSE: Registration = Registration {
    names: &["dense"],
    help: "\
  dense             every element exact                                   dtype=f32|f16|bf16 (on a device f16)
                      on a device: pages of N tokens, of a pool of M      pages=N pool=M
",
    examples: &["dense", "dense:dtype=f16"],
    parse: |s| {
        let default = match s.place {
            Place::Cpu => ElementType::F32,
            Place::Cuda => ElementType::F16,
        };
        let element = s.own("dtype", default)?;
        Ok(Arc::new(Dense { element, pages: Paging::take(s, TILE)? }))
    },
};

/// Tokens per tile of attention on a device; a tile lies in one page.
const TILE: usize = 16;

#[derive(Debug)]
struct Dense {
    element: ElementType,
    pages: Option<Paging>,
}

impl Kind for Dense {
    fn dense(&self) -> Option<ElementType> {
        Some(self.element)
    }

    fn device_setting(&self) -> Option<&'static str> {
        self.pages.map(|_| "pages")
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| Ok(context.dense(l)))
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for Dense {
    fn limits(&self, _: Window) -> Vec<Limit> {
        vec![Limit::new(
            self.element == ElementType::F32,
            "dtype=f32",
            "rows on a device have 16 bits",
            "dtype=f16 or dtype=bf16",
        )]
    }

    fn plan(&self, _: &Config, _: Option<&Profile>) -> Result<Plan> {
        Ok(Plan::Dense(self.pages.map(Paging::memory)))
    }
}
