use std::sync::Arc;

use indicatif::ProgressBar;

use super::{Measured, OnGpu, Place, QUESTION_ROOM, Shared};
use crate::Result;
use crate::cache::FetchedPerStep;
use crate::device::{Decoder, Element, Weights, answer_questions, method_cache, score_text, unsupported};
use crate::method::Method;

/// Tokens of a cache that is made to see whether there is one.
const PROBE: usize = 256;

/// Where a method runs: the GPU takes those of which it makes a cache.
pub(super) fn place(on: &OnGpu, shared: &Shared<'_>, method: &Method) -> Result<Place> {
    let config = shared.config();
    let made = Weights::check(config).and_then(|()| {
        let element = method.device_element()?;
        method_cache(&on.gpu, method, config, element, Some(&shared.profile), 1, PROBE)
    });
    match made {
        Ok(_) => Ok(Place::Cuda),
        Err(e) if on.others_on_cpu && unsupported(&e) => Ok(Place::Cpu),
        Err(e) => Err(e),
    }
}

/// The model on the GPU, and the dense cache's logits.
pub(super) struct Bench<'a> {
    on: &'a OnGpu,
    shared: &'a Shared<'a>,
    dense: Vec<Dense>, // one for each element type that some method has
}

/// What methods with one element type share.
struct Dense {
    element: Element,
    weights: Arc<Weights>,
    reference: Vec<Vec<f32>>, // logits at every decoded position
}

impl<'a> Bench<'a> {
    pub const fn new(on: &'a OnGpu, shared: &'a Shared<'a>) -> Self {
        Self { on, shared, dense: vec![] }
    }

    pub fn measure(&mut self, method: &Method, progress: &ProgressBar) -> Result<Measured> {
        let Shared { model, profile, prompt, decoded, needles, .. } = self.shared;
        let element = method.device_element()?;
        let known = self.dense.iter().position(|dense| dense.element == element);
        if known.is_none() {
            progress.set_message("dense reference");
            self.dense.push(self.dense(element)?);
        }
        let dense = &self.dense[known.unwrap_or(self.dense.len() - 1)];
        progress.set_message(method.spec());
        let folded = method.device_model(model, profile)?;
        let weights = match Arc::ptr_eq(&folded, model) {
            true => dense.weights.clone(),
            false => Arc::new(Weights::of(&self.on.gpu, &folded, element)?),
        };
        let mut decoder = self.decoder(method, weights)?;
        let prompt = (*prompt, self.on.chunk);
        let scores = score_text(&mut decoder, prompt, decoded, Some(&dense.reference))?;
        let (tokens, steps) = (prompt.0.len() + decoded.len() - 1, decoded.len() - 1);
        let fetched = decoder.fetched_rows()? as f64 / steps as f64; // by all heads
        progress.inc(1);
        let found = needles.as_ref().map(|task| answer_questions(&mut decoder, self.on.chunk, task));
        let found = found.transpose()?;
        progress.inc(1);
        let config = self.shared.config();
        Ok(Measured {
            place: Place::Cuda,
            scores,
            tokens,
            footprint: decoder.cache().footprint(tokens),
            fetched: FetchedPerStep {
                rows: fetched / (config.n_layers * config.n_kv_heads) as f64,
                bytes: fetched * (2 * size_of::<u16>() * config.head_dim) as f64,
                ..FetchedPerStep::default()
            },
            found,
        })
    }

    /// Runs the dense cache.
    fn dense(&self, element: Element) -> Result<Dense> {
        let Shared { model, prompt, decoded, .. } = self.shared;
        let weights = Arc::new(Weights::of(&self.on.gpu, model, element)?);
        let method = match element {
            Element::F16 => "dense:dtype=f16",
            Element::Bf16 => "dense:dtype=bf16",
        };
        let mut decoder = self.decoder(&method.parse()?, weights.clone())?;
        let reference = score_text(&mut decoder, (prompt, self.on.chunk), decoded, None)?.logits;
        Ok(Dense { element, weights, reference })
    }

    /// A decoder with an empty cache that has room for the prompt and what follows.
    fn decoder(&self, method: &Method, weights: Arc<Weights>) -> Result<Decoder> {
        let (gpu, config) = (&self.on.gpu, self.shared.config());
        let Shared { prompt, decoded, .. } = self.shared;
        let capacity = prompt.len() + (decoded.len() - 1).max(QUESTION_ROOM);
        let profile = Some(&self.shared.profile);
        let cache = method_cache(gpu, method, config, weights.element, profile, 1, capacity)?;
        Decoder::new(gpu.clone(), weights, cache, 1)
    }
}
