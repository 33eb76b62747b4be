//! What runs on the CPU and on a GPU alike: the methods with their model, and what a run measures.

use std::sync::Arc;

use kv_llama::{FetchedPerStep, Footprint, HeadFit};
use kv_methods::{Method, Profile};
use kv_model::{Model, Rope};

use crate::eval::TextScores;

/// Hears how far a run is.
pub trait Progress {
    /// The number of steps of the whole run.
    fn begin(&self, _steps: usize) {}

    /// What is running now.
    fn message(&self, _what: &str) {}

    /// A step is done.
    fn advance(&self) {}
}

/// Nobody listens.
impl Progress for () {}

/// Methods, and the model that they run on.
pub(super) struct Run<'a> {
    pub model: &'a Arc<Model>,
    pub rope: Arc<Rope>,
    pub profile: Arc<Profile>,
    pub methods: Vec<Method>,
}

/// Scores of one method on a text.
pub(super) struct Measured {
    pub scores: TextScores,
    pub tokens: usize, // in the cache at the end
    pub footprint: Footprint,
    pub fetched: FetchedPerStep,
    pub fits: Vec<HeadFit>,
}
