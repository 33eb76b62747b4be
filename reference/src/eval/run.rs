//! Running caches over prompts.

use std::sync::Arc;
use std::time::Instant;

use kv_llama::ops::{argmax, linear, log_softmax, rms_norm};
use kv_llama::{Decoder, KvCache, WATCHED, logits, prefill};
use kv_methods::{Method, Prepared, Profile};
use kv_model::{Config, Layer, Model, Rope};
use rayon::prelude::*;

use crate::eval::{Divergence, RetrievalTask};
use crate::{Error, Result};

/// The activations of a prompt: all layers' keys (before RoPE) and values. Any cache can be filled from it.
pub struct Prompt {
    // The last queries, rotated (n, n_heads * head_dim): WATCHED, or all where a method watches them; keys
    // and values (n, n_kv_heads * head_dim).
    layers: Vec<[Vec<f32>; 3]>,
    /// Logits (vocab_size,) after the prompt; prefill is exact, so they are the same for every cache.
    pub logits: Vec<f32>,
}

impl Prompt {
    /// Runs the prompt.
    ///
    /// # Errors
    /// Errors of [`prefill`] and [`logits`].
    pub fn run(model: &Model, rope: &Rope, tokens: &[u32]) -> Result<Self> {
        Self::run_observed(model, rope, tokens, WATCHED, |_| {})
    }

    /// As [`Self::run`], with the last `watched` queries; `observe` gets the residual stream (n, hidden_size)
    /// before each layer.
    fn run_observed(
        model: &Model,
        rope: &Rope,
        tokens: &[u32],
        watched: usize,
        mut observe: impl FnMut(&[f32]),
    ) -> Result<Self> {
        let mut layers = vec![];
        let hidden = prefill(model, rope, tokens, &mut |l, activations| {
            let first = tokens.len().saturating_sub(watched);
            let q_dim = model.config.q_dim();
            let queries = rope.layer(l).rotated(&activations.q[first * q_dim..], q_dim, first);
            layers.push([queries, activations.k.to_vec(), activations.v.to_vec()]);
            observe(activations.residual);
            Ok(())
        })?;
        let last = &hidden[hidden.len() - model.config.hidden_size..];
        Ok(Self { layers, logits: logits(model, last)? })
    }

    /// Fills an empty cache.
    ///
    /// # Errors
    /// Errors of the cache.
    pub fn fill(&self, cache: &mut dyn KvCache) -> Result<()> {
        self.layers.iter().enumerate().try_for_each(|(l, [queries, k, v])| {
            cache.watch(l, queries);
            Ok(cache.prefill(l, 0, k, v)?)
        })
    }
}

/// A prompt's tokens and its activations in the original model, from which caches of all methods are filled.
pub struct SharedPrompt {
    tokens: Vec<u32>,
    run: Prompt,
    residuals: Vec<Vec<f32>>, // of every layer (n, hidden_size), where methods fold weights
}

impl SharedPrompt {
    /// Runs the prompt on the original model, for caches of `methods`.
    ///
    /// # Errors
    /// Errors of [`prefill`] and [`logits`].
    pub fn run<'a>(
        model: &Model,
        rope: &Rope,
        tokens: &[u32],
        methods: impl IntoIterator<Item = &'a Method>,
    ) -> Result<Self> {
        let (mut folds, mut watched) = (false, WATCHED);
        for method in methods {
            folds |= method.changes_weights();
            if method.watches_all() {
                watched = tokens.len();
            }
        }
        let mut residuals = vec![];
        let run = Prompt::run_observed(model, rope, tokens, watched, |residual| {
            if folds {
                residuals.push(residual.to_vec());
            }
        })?;
        Ok(Self { tokens: tokens.to_vec(), run, residuals })
    }

    /// A cache of `method` that holds the prompt. A method that folds weights changes the values, which are
    /// then projected again. One that cuts the rows of a prompt, too, changes all layers but the first, so
    /// its model runs the prompt again.
    ///
    /// # Errors
    /// Errors of preparing, running and filling.
    pub fn fill(
        &self,
        method: &Method,
        model: &Arc<Model>,
        rope: &Arc<Rope>,
        profile: &Profile,
    ) -> Result<Prepared> {
        let mut prepared = method.prepare(model, rope, profile)?;
        let cache = prepared.cache.as_mut();
        if Arc::ptr_eq(&prepared.model, model) {
            self.run.fill(cache)?;
        } else if self.residuals.is_empty() || cache.prompt_rows(0, &[], &[])?.is_some() {
            Decoder::new(prepared.model.clone(), rope.clone()).prefill(&self.tokens, cache)?;
        } else {
            self.fill_folded(&prepared.model, cache)?;
        }
        Ok(prepared)
    }

    /// Fills an empty cache with the values of a model that differs from the original one in the projections
    /// of values and of the output alone.
    fn fill_folded(&self, model: &Model, cache: &mut dyn KvCache) -> Result<()> {
        let Config { hidden_size, rms_norm_eps, .. } = model.config;
        let mut normed = vec![0.0; self.tokens.len() * hidden_size];
        let mut values = vec![0.0; self.tokens.len() * model.config.kv_dim()];
        let layers = model.layers.iter().zip(&self.run.layers).zip(&self.residuals);
        for (l, ((Layer { attention, .. }, [queries, keys, _]), residual)) in layers.enumerate() {
            rms_norm(residual, &attention.norm, rms_norm_eps, &mut normed);
            linear(&attention.v, &normed, &mut values);
            cache.watch(l, queries);
            cache.prefill(l, 0, keys, &values)?;
        }
        Ok(())
    }
}

/// The result of a teacher-forced run.
pub struct TextScores {
    /// Relative to the reference.
    pub divergence: Divergence,
    /// Logits of every position (n, vocab_size), for use as a reference.
    pub logits: Vec<Vec<f32>>,
    /// Wall time of a decode step, in milliseconds.
    pub ms_per_token: f64,
}

/// Teacher-forces `tokens` one by one and scores each prediction against `reference` logits or, without any,
/// against itself. The last token is only predicted.
///
/// # Errors
/// Errors of the decoder.
pub fn score_text(
    decoder: &mut Decoder,
    cache: &mut dyn KvCache,
    tokens: &[u32],
    reference: Option<&[Vec<f32>]>,
) -> Result<TextScores> {
    let mut divergence = Divergence::default();
    let mut all = vec![];
    let mut seconds = 0.0;
    for (i, pair) in tokens.windows(2).enumerate() {
        let start = Instant::now();
        let logits = decoder.step(pair[0], cache)?;
        seconds += start.elapsed().as_secs_f64();
        divergence.add(logits, reference.map_or(logits, |reference| &reference[i]), pair[1]);
        if reference.is_none() {
            all.push(logits.to_vec());
        }
    }
    let steps = tokens.len().saturating_sub(1).max(1);
    Ok(TextScores { divergence, logits: all, ms_per_token: 1000.0 * seconds / steps as f64 })
}

/// Perplexity of exact attention over the first `windows` non-overlapping windows of `length` tokens, with
/// every prediction inside a window scored, as in published tables.
///
/// # Errors
/// [`Error::Argument`] for a text shorter than one window of two tokens; errors of [`prefill`] and
/// [`logits`].
pub fn window_perplexity(
    model: &Model,
    rope: &Rope,
    tokens: &[u32],
    length: usize,
    windows: usize,
) -> Result<f64> {
    const ROWS: usize = 256; // rows of logits held at a time
    if length < 2 || tokens.len() < length || windows == 0 {
        let n = tokens.len();
        return Err(Error::Argument(format!("no window of {length} tokens, at least 2, in a text of {n}")));
    }
    let (mut nll, mut n) = (0.0, 0);
    for window in tokens.chunks_exact(length).take(windows) {
        let hidden = prefill(model, rope, window, &mut |_, _| Ok(()))?;
        let (row, vocab) = (model.config.hidden_size, model.config.vocab_size);
        for (hidden, next) in hidden[..(length - 1) * row].chunks(ROWS * row).zip(window[1..].chunks(ROWS)) {
            let logits = logits(model, hidden)?;
            nll += logits
                .par_chunks(vocab)
                .zip(next)
                .map(|(x, &next)| -log_softmax(x)[next as usize])
                .sum::<f64>();
            n += next.len();
        }
    }
    Ok((nll / n as f64).exp())
}

/// The number of questions that the cache, filled with the task's prompt, answers exactly, each from its own
/// clone. The common prefix of the questions is run once.
///
/// # Errors
/// Errors of the decoder.
pub fn answer_questions(decoder: &mut Decoder, cache: &dyn KvCache, task: &RetrievalTask) -> Result<usize> {
    let Some((first, rest)) = task.questions.split_first() else { return Ok(0) };
    let common = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let shared = rest.iter().map(|question| common(&first.ask, &question.ask)).min().unwrap_or(0);
    let mut begun = cache.clone_box();
    for &token in &first.ask[..shared] {
        decoder.step(token, begun.as_mut())?;
    }
    let shared = begun.seq_len() - cache.seq_len();
    let mut hits = 0;
    for question in &task.questions {
        hits += usize::from(answers(decoder, begun.clone_box(), &question.ask[shared..], &question.answer)?);
    }
    Ok(hits)
}

/// Whether the greedy continuation of `ask` is `answer`.
fn answers(decoder: &mut Decoder, mut cache: Box<dyn KvCache>, ask: &[u32], answer: &[u32]) -> Result<bool> {
    let mut predicted = None;
    for &token in ask {
        predicted = Some(argmax(decoder.step(token, cache.as_mut())?) as u32);
    }
    for (i, &token) in answer.iter().enumerate() {
        if predicted != Some(token) {
            return Ok(false);
        }
        if i + 1 < answer.len() {
            predicted = Some(argmax(decoder.step(token, cache.as_mut())?) as u32);
        }
    }
    Ok(true)
}
