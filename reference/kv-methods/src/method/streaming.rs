//! StreamingLLM (arXiv 2309.17453): tokens that leave the window are dropped; only sinks and window are
//! attended to.
//!
//! Tokens keep their positions; the paper makes them contiguous, which matters only beyond the trained
//! context.

use std::sync::Arc;

use kv_llama::Footprint;

use super::kind::{BuildContext, Kind, Registration};
use crate::Result;
use crate::cache::{Geometry, Store, Sums};

pub(super) const STREAMING: Registration = Registration {
    names: &["streaming"],
    help: "\
  streaming         sinks and window only (StreamingLLM)
",
    examples: &["streaming:window=10:exact=f32", "streaming:window=10:batch=8:exact=f32"],
    parse: |_| Ok(Arc::new(Streaming)),
};

#[derive(Debug)]
struct Streaming;

impl Kind for Streaming {
    fn drops(&self) -> bool {
        true
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|_| Ok(StreamingStore::new(context.geometry)))
    }
}

/// Counts the dropped tokens.
#[derive(Clone)]
struct StreamingStore {
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

    fn can_truncate(&self, len: usize, window: usize) -> bool {
        window == len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.dropped = len;
        Ok(())
    }

    fn attend(&self, _: usize, _: usize, _: &[f32], _: &mut Sums<'_>) -> Result<()> {
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        Footprint::default()
    }
}
