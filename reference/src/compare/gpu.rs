//! Methods on a GPU.

use std::sync::Arc;

use kv_gpu::Element;
use kv_llama::FetchedPerStep;
use kv_llama_gpu::{Decoder, WeightLayout, Weights};
use kv_methods::{Method, Profile};
use kv_model::{Config, Model};

use super::run::{Measured, Progress, Run};
use super::{OnGpu, QUESTION_ROOM};
use crate::Result;
use crate::device::{self, answer_questions, method_cache, score_text};
use crate::eval::RetrievalTask;

/// Tokens of the cache created to test support for a method.
const PROBE: usize = 256;

/// The method fitted to the model on the GPU, if a cache of it can be created there: this device, or its
/// libraries, may lack what a method needs.
pub(super) fn fitted(on: &OnGpu, config: &Config, method: &Method) -> Result<Method> {
    let method = device::fitted(method, config)?;
    kv_llama_gpu::check_cublas()?;
    method_cache(&on.gpu, &method, config, method.device_element()?, None, 1, PROBE)?;
    Ok(method)
}

/// Models on the GPU: the unchanged weights, one copy per element type in use, and the weights of the last
/// method that folds maps into them.
pub(super) struct Models<'a> {
    on: &'a OnGpu,
    plain: Vec<Arc<Weights>>,
    folded: Option<(usize, Arc<Weights>)>, // by method
}

impl<'a> Models<'a> {
    pub const fn new(on: &'a OnGpu) -> Self {
        Self { on, plain: vec![], folded: None }
    }

    fn plain(&mut self, model: &Model, element: Element) -> Result<Arc<Weights>> {
        if let Some(weights) = self.plain.iter().find(|weights| weights.element == element) {
            return Ok(weights.clone());
        }
        let weights = Arc::new(Weights::of(&self.on.gpu, model, element, WeightLayout::of_batch(1))?);
        self.plain.push(weights.clone());
        Ok(weights)
    }

    /// The weights that a method runs on.
    fn of(&mut self, run: &Run<'_>, index: usize) -> Result<Arc<Weights>> {
        if let Some((_, weights)) = self.folded.as_ref().filter(|(of, _)| *of == index) {
            return Ok(weights.clone());
        }
        let (method, model) = (&run.methods[index], run.model);
        let (folded, element) = (method.device_model(model, &run.profile)?, method.device_element()?);
        if Arc::ptr_eq(&folded, model) {
            return self.plain(model, element);
        }
        self.folded = None; // first, to free its memory
        let weights = Arc::new(Weights::of(&self.on.gpu, &folded, element, WeightLayout::of_batch(1))?);
        self.folded = Some((index, weights.clone()));
        Ok(weights)
    }

    /// A decoder of a method with an empty cache for `tokens` tokens.
    fn decoder(
        &self,
        profile: &Profile,
        method: &Method,
        weights: Arc<Weights>,
        capacity: usize,
    ) -> Result<Decoder> {
        let (gpu, element) = (&self.on.gpu, weights.element);
        let cache = method_cache(gpu, method, &weights.config, element, Some(profile), 1, capacity)?;
        Ok(Decoder::new(gpu.clone(), weights, cache, 1)?)
    }
}

/// The scores of methods on a text, by index. Logits are compared with those of the dense cache of the same
/// 16-bit type.
pub(super) fn score(
    run: &Run<'_>,
    models: &mut Models<'_>,
    methods: &[usize],
    (prompt, decoded): (&[u32], &[u32]),
    progress: &dyn Progress,
) -> Result<Vec<(usize, Measured)>> {
    let (tokens, steps) = (prompt.len() + decoded.len() - 1, decoded.len() - 1);
    let text = (prompt, models.on.chunk);
    let mut references: Vec<(Element, Vec<Vec<f32>>)> = vec![]; // logits at every decoded position
    let mut measured = vec![];
    for &index in methods {
        let method = &run.methods[index];
        let element = method.device_element()?;
        if references.iter().all(|(of, _)| *of != element) {
            progress.message("dense reference");
            let dense = match element {
                Element::F16 => "dense:dtype=f16",
                Element::Bf16 => "dense:dtype=bf16",
            };
            let weights = models.plain(run.model, element)?;
            let mut decoder = models.decoder(&run.profile, &dense.parse()?, weights, tokens)?;
            references.push((element, score_text(&mut decoder, text, decoded, None)?.logits));
        }
        let reference = references.iter().find(|(of, _)| *of == element).map(|(_, logits)| logits.as_slice());
        progress.message(&method.spec());
        let weights = models.of(run, index)?;
        let mut decoder = models.decoder(&run.profile, method, weights, tokens)?;
        let scores = score_text(&mut decoder, text, decoded, reference)?;
        let fetched = decoder.fetched_rows()? as f64 / steps as f64; // over all heads
        let chosen = decoder.selected_rows()?.map_or(fetched, |rows| rows as f64 / steps as f64);
        progress.advance();
        let config = &run.model.config;
        let fetched = FetchedPerStep {
            rows: chosen / (config.n_layers * config.n_kv_heads) as f64,
            bytes: fetched * decoder.cache().fetched_row_bytes() as f64,
            ..FetchedPerStep::default()
        };
        let footprint = decoder.cache().footprint(tokens);
        measured.push((index, Measured { scores, tokens, footprint, fetched, fits: vec![] }));
    }
    Ok(measured)
}

/// The number of a task's questions that each method answers, by index.
pub(super) fn find(
    run: &Run<'_>,
    models: &mut Models<'_>,
    methods: &[usize],
    task: &RetrievalTask,
    progress: &dyn Progress,
) -> Result<Vec<(usize, usize)>> {
    let found = methods.iter().map(|&index| {
        let method = &run.methods[index];
        progress.message(&method.spec());
        let weights = models.of(run, index)?;
        let capacity = task.prompt.len() + QUESTION_ROOM;
        let mut decoder = models.decoder(&run.profile, method, weights, capacity)?;
        let hits = answer_questions(&mut decoder, models.on.chunk, task)?;
        progress.advance();
        Ok((index, hits))
    });
    found.collect()
}
