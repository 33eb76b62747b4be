//! Runs each method where it belongs, and makes the rows of the table.

use std::sync::Arc;

use kv_llama::Footprint;
use kv_methods::{Method, Place, Profile};
use kv_model::{Model, Rope};

use super::run::{Measured, Progress, Run};
use super::{OnGpu, Placed, Row, cpu};
use crate::Result;
use crate::eval::{RetrievalTask, TextScores};

/// The methods that run there, by index.
fn at(methods: &[Method], place: Place) -> Vec<usize> {
    (0..methods.len()).filter(|&index| methods[index].place() == place).collect()
}

/// Runs methods over texts and questions, each on the GPU or the CPU.
pub struct Runner<'a> {
    run: Run<'a>,
    #[cfg(feature = "cuda")]
    models: Option<super::gpu::Models<'a>>,
}

impl<'a> Runner<'a> {
    /// A runner of methods that are placed for the model. `rope` covers the longest run, and the profile has
    /// the entries that the methods need.
    #[must_use]
    pub fn new(
        model: &'a Arc<Model>,
        rope: Arc<Rope>,
        profile: Profile,
        placed: &Placed,
        gpu: Option<&'a OnGpu>,
    ) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = gpu;
        Self {
            run: Run { model, rope, profile: Arc::new(profile), methods: placed.methods.clone() },
            #[cfg(feature = "cuda")]
            models: gpu.map(super::gpu::Models::new),
        }
    }

    /// A row for every method: `decoded` after the prompt, relative to the dense cache on the same device.
    ///
    /// # Errors
    /// Errors of the run.
    pub fn score(&mut self, prompt: &[u32], decoded: &[u32], progress: &dyn Progress) -> Result<Vec<Row>> {
        let text = (prompt, decoded);
        let on_cpu = at(&self.run.methods, Place::Cpu);
        let mut rows = cpu::score(&self.run, &on_cpu, text, progress)?;
        #[cfg(feature = "cuda")]
        if let Some(models) = &mut self.models {
            let on_gpu = at(&self.run.methods, Place::Cuda);
            rows.extend(super::gpu::score(&self.run, models, &on_gpu, text, progress)?);
        }
        rows.sort_by_key(|(index, _)| *index);
        let row = |(index, measured): (usize, Measured)| self.row(index, measured);
        Ok(rows.into_iter().map(row).collect())
    }

    /// The number of a task's questions that each method answers.
    ///
    /// # Errors
    /// Errors of the run.
    pub fn find(&mut self, task: &RetrievalTask, progress: &dyn Progress) -> Result<Vec<usize>> {
        let on_cpu = at(&self.run.methods, Place::Cpu);
        let mut found = cpu::find(&self.run, &on_cpu, task, progress)?;
        #[cfg(feature = "cuda")]
        if let Some(models) = &mut self.models {
            let on_gpu = at(&self.run.methods, Place::Cuda);
            found.extend(super::gpu::find(&self.run, models, &on_gpu, task, progress)?);
        }
        found.sort_unstable_by_key(|(index, _)| *index);
        Ok(found.into_iter().map(|(_, hits)| hits).collect())
    }

    fn row(&self, index: usize, measured: Measured) -> Row {
        let method = &self.run.methods[index];
        let Measured { scores, tokens, footprint, fetched, fits } = measured;
        let Footprint { kept, offloaded, working, shared } = footprint;
        let TextScores { divergence, ms_per_token, .. } = scores;
        let tokens = tokens as f64;
        let values = tokens * self.run.model.config.kv_values_per_token() as f64;
        Row {
            name: method.name.to_owned(),
            setting: method.setting.clone(),
            device: method.place(),
            bits_per_value: 8.0 * kept as f64 / values,
            kv_bytes_per_token: kept as f64 / tokens,
            ratio: 2.0 * values / kept as f64,
            perplexity: divergence.perplexity(),
            kl: divergence.kl(),
            top1: divergence.top1(),
            needle: None,
            needle_trials: 0,
            ms_per_token,
            offloaded_bytes_per_token: offloaded as f64 / tokens,
            fetched,
            working_bytes_per_token: working as f64 / tokens,
            shared_bytes: shared,
            kl_by_position: divergence.kl_by_position().to_vec(),
            fits,
        }
    }
}
