//! Methods on a GPU.

use std::sync::Arc;

use kv_gpu::Element;
use kv_llama::{FetchedPerStep, Footprint};
use kv_llama_gpu::ranks::{Lockstep, Rank};
use kv_llama_gpu::{Decoder, WeightLayout, Weights};
use kv_methods::Method;
use kv_model::{Config, Model};

use super::run::{Measured, Progress, Run};
use super::{OnGpu, QUESTION_ROOM};
use crate::device::{self, answer_questions, rank_cache, score_text};
use crate::eval::RetrievalTask;
use crate::{Error, Result};

/// Tokens of the cache created to test support for a method.
const PROBE: usize = 256;

/// The method fitted to the model on the GPU, if a cache of it can be created there: this device, or its
/// libraries, may lack what a method needs.
pub(super) fn fitted(on: &OnGpu, config: &Config, method: &Method) -> Result<Method> {
    let Some(first) = on.ranks.first() else { return Err(Error::argument("no GPU")) };
    let fitted = device::fitted(method, config, first.shard())?;
    kv_llama_gpu::check_cublas()?;
    let element = fitted.device_element()?;
    for rank in &on.ranks {
        rank_cache(&rank.gpu, &fitted, (config, rank.shard()), element, None, 1, PROBE)?;
    }
    Ok(fitted)
}

/// The weights of every rank, in their order.
type RankWeights = Arc<[Arc<Weights>]>;

/// Models on the GPU: the unchanged weights, one copy per element type in use, and the weights of the last
/// method that folds maps into them.
pub(super) struct Models<'a> {
    on: &'a OnGpu,
    plain: Vec<(Element, RankWeights)>,
    folded: Option<(usize, RankWeights)>, // by method
}

impl<'a> Models<'a> {
    pub const fn new(on: &'a OnGpu) -> Self {
        Self { on, plain: vec![], folded: None }
    }

    fn load(&self, model: &Arc<Model>, element: Element) -> Result<RankWeights> {
        let (model, layout) = (model.clone(), WeightLayout::of_batch(1));
        let weights = move |rank: &Rank| {
            Result::Ok(Arc::new(Weights::shard_of(&rank.gpu, &model, element, layout, rank.shard())?))
        };
        let weights =
            Lockstep::start(self.on.ranks.clone(), weights)?.each(|weights| Result::Ok(weights.clone()))?;
        Ok(weights.into())
    }

    fn plain(&mut self, model: &Arc<Model>, element: Element) -> Result<RankWeights> {
        if let Some((_, weights)) = self.plain.iter().find(|(of, _)| *of == element) {
            return Ok(weights.clone());
        }
        let weights = self.load(model, element)?;
        self.plain.push((element, weights.clone()));
        Ok(weights)
    }

    /// The weights that a method runs on.
    fn of(&mut self, run: &Run<'_>, index: usize) -> Result<RankWeights> {
        if let Some((_, weights)) = self.folded.as_ref().filter(|(of, _)| *of == index) {
            return Ok(weights.clone());
        }
        let (method, model) = (&run.methods[index], run.model);
        let (folded, element) = (method.device_model(model, &run.profile)?, method.device_element()?);
        if Arc::ptr_eq(&folded, model) {
            return self.plain(model, element);
        }
        self.folded = None; // first, to free its memory
        let weights = self.load(&folded, element)?;
        self.folded = Some((index, weights.clone()));
        Ok(weights)
    }

    /// A decoder of a method with an empty cache for `tokens` tokens.
    fn decoder(
        &self,
        run: &Run<'_>,
        method: &Method,
        weights: RankWeights,
        capacity: usize,
    ) -> Result<Lockstep<Decoder>> {
        let (method, config, profile) = (method.clone(), run.model.config.clone(), run.profile.clone());
        Lockstep::start(self.on.ranks.clone(), move |rank| {
            let shard = rank.shard();
            let weights = weights[shard.rank()].clone();
            let (of, element) = ((&config, shard), weights.element);
            let cache = rank_cache(&rank.gpu, &method, of, element, Some(&profile), 1, capacity)?;
            Ok(Decoder::of_rank(rank, weights, cache, 1)?)
        })
    }
}

/// The rows that each of `steps` steps has read, and the memory of a cache of `tokens` tokens, of all ranks
/// together. A head that several ranks hold counts for each.
fn counted(
    decoder: &mut Lockstep<Decoder>,
    config: &Config,
    (tokens, steps): (usize, usize),
) -> Result<(FetchedPerStep, Footprint)> {
    let each = decoder.each(move |decoder| {
        let (fetched, cache) = (decoder.fetched_rows()?, decoder.cache());
        let chosen = decoder.selected_rows()?.unwrap_or(fetched);
        Result::Ok((chosen, fetched * cache.fetched_row_bytes() as u64, cache.footprint(tokens)))
    })?;
    let heads = config.n_layers * config.n_kv_heads.max(each.len());
    let (mut rows, mut bytes, mut footprint) = (0, 0, Footprint::default());
    for (chosen, fetched, of_rank) in each {
        rows += chosen;
        bytes += fetched;
        footprint += of_rank;
    }
    let fetched = FetchedPerStep {
        rows: rows as f64 / (steps * heads) as f64,
        bytes: bytes as f64 / steps as f64,
        ..FetchedPerStep::default()
    };
    Ok((fetched, footprint))
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
            let mut decoder = models.decoder(run, &dense.parse()?, weights, tokens)?;
            references.push((element, score_text(&mut decoder, text, decoded, None)?.logits));
        }
        let reference = references.iter().find(|(of, _)| *of == element).map(|(_, logits)| logits.as_slice());
        progress.message(&method.spec());
        let weights = models.of(run, index)?;
        let mut decoder = models.decoder(run, method, weights, tokens)?;
        let scores = score_text(&mut decoder, text, decoded, reference)?;
        let (fetched, footprint) = counted(&mut decoder, &run.model.config, (tokens, steps))?;
        progress.advance();
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
        let mut decoder = models.decoder(run, method, weights, capacity)?;
        let hits = answer_questions(&mut decoder, models.on.chunk, task)?;
        progress.advance();
        Ok((index, hits))
    });
    found.collect()
}
