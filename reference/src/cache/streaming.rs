use svd_core::SoftmaxStats;

use crate::cache::{Footprint, Geometry, Store};
use crate::{Error, Result};

/// StreamingLLM (arXiv 2309.17453): what leaves the window is dropped; sinks and window alone are attended to.
///
/// Tokens keep their positions; the paper moves them together, which matters only beyond the trained context.
#[derive(Clone)]
pub(crate) struct StreamingStore {
    dropped: usize,
    kv_dim: usize,
}

impl StreamingStore {
    pub fn new(geometry: Geometry) -> Self {
        Self { dropped: 0, kv_dim: geometry.kv_dim() }
    }
}

impl Store for StreamingStore {
    fn push(&mut self, _pos: usize, k: &[f32], _v: &[f32]) -> Result<()> {
        self.dropped += k.len() / self.kv_dim;
        Ok(())
    }

    fn len(&self) -> usize {
        self.dropped
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if len < self.dropped {
            let what = "cannot truncate into tokens it has dropped".into();
            return Err(Error::Cache { method: "streaming", what });
        }
        Ok(())
    }

    fn attend(&self, _: usize, _: &[f32], _: &mut [f32], _: &mut [SoftmaxStats]) -> Result<()> {
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        Footprint::default()
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
