//! Every element exact: what all others are compared with.

use std::sync::Arc;

use super::kind::{Entry, Kind, Site};
use crate::Result;
use crate::cache::{ElementType, Store};

pub(super) const DENSE: Entry = Entry {
    names: &["dense"],
    help: "\
  dense             every element exact                                   dtype=f32|f16|bf16
",
    parse: |s| Ok(Arc::new(Dense(s.own("dtype", ElementType::F32)?))),
};

#[derive(Debug)]
struct Dense(ElementType);

impl Kind for Dense {
    fn dense(&self) -> Option<ElementType> {
        Some(self.0)
    }

    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>> {
        site.layers(|l| Ok(site.dense(l)))
    }
}
