//! The forward pass: exact prefill of a whole prompt, layer by layer, or tokens over a cache, one or many at
//! a time.

use std::sync::Arc;

use kv_attend::SoftmaxStats;
use kv_model::{Config, Layer, Linear, Model, Rope};

use crate::KvCache;
use crate::ops::{
    AttentionShape, add, causal_attention, linear, matmul, rms_norm, rms_norm_in_place, swiglu,
};
use crate::{Error, Result};

/// Rows per pass through the feed-forward block.
const ROWS: usize = 512;

/// Number of last prompt queries passed to caches that do not watch all: SnapKV's observation window.
pub const WATCHED: usize = 32;

/// One layer's activations for a prompt, before RoPE. The observer may change keys and values before
/// attention.
#[derive(Debug)]
pub struct Activations<'a> {
    /// The residual stream before the layer: (n, hidden_size)
    pub residual: &'a [f32],
    /// (n, n_heads * head_dim)
    pub q: &'a [f32],
    /// (n, n_kv_heads * head_dim)
    pub k: &'a mut [f32],
    /// (n, n_kv_heads * head_dim)
    pub v: &'a mut [f32],
}

/// Runs a prompt from position 0 with exact attention and passes each layer's activations to `observe`, which
/// fills a cache or gathers statistics. Returns the final hidden states, normalized: (n, hidden_size).
///
/// # Errors
/// [`Error::Argument`] for no tokens, tokens outside the vocabulary, or more of them than `rope` has
/// positions; for weights or a `rope` that do not match the model's configuration; errors of `observe`.
pub fn prefill(
    model: &Model,
    rope: &Rope,
    tokens: &[u32],
    observe: &mut dyn FnMut(usize, Activations<'_>) -> Result<()>,
) -> Result<Vec<f32>> {
    let config = &model.config;
    check_shapes(model, rope)?;
    let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
    let mut stats = vec![SoftmaxStats::EMPTY; tokens.len() * config.n_heads];
    run(model, rope, 0, tokens, |l, residual, Heads { q, k, v, attended }| {
        observe(l, Activations { residual, q, k, v })?;
        rope.layer(l).rotate_rows(q, q_dim, 0);
        rope.layer(l).rotate_rows(k, kv_dim, 0);
        causal_attention(shape(config, l), q, k, v, attended, &mut stats)
    })
}

/// Runs tokens, the first at position `pos`, through all layers; `attention` fills `attended` in each.
/// Returns the final hidden states, normalized: (n, hidden_size).
fn run(
    model: &Model,
    rope: &Rope,
    pos: usize,
    tokens: &[u32],
    mut attention: impl FnMut(usize, &[f32], Heads<&mut [f32]>) -> Result<()>,
) -> Result<Vec<f32>> {
    let config = &model.config;
    model.check_tokens(tokens)?;
    if tokens.is_empty() {
        return Err(Error::Argument("a prompt needs at least one token".into()));
    }
    let needed = pos.saturating_add(tokens.len());
    if needed > rope.len() {
        return Err(Error::Argument(format!("{needed} tokens for {} positions", rope.len())));
    }
    // (n, hidden_size)
    let mut x = vec![0.0; tokens.len() * config.hidden_size];
    for (x, &token) in x.chunks_exact_mut(config.hidden_size).zip(tokens) {
        model.embedding.rows_into(token as usize, x);
    }
    let mut buffers = Buffers::new(config, tokens.len());
    for (l, weights) in model.layers.iter().enumerate() {
        layer(config, weights, &mut x, &mut buffers, |residual, heads| attention(l, residual, heads))?;
    }
    let mut normed = buffers.normed;
    rms_norm(&x, &model.norm, config.rms_norm_eps, &mut normed);
    Ok(normed)
}

/// The shape of layer `l`'s attention.
fn shape(config: &Config, l: usize) -> AttentionShape {
    let &Config { n_heads, n_kv_heads, head_dim, .. } = config;
    AttentionShape { n_heads, n_kv_heads, head_dim, window: config.attention[l].window }
}

/// Scratch of a layer.
struct Buffers {
    normed: Vec<f32>, // (n, hidden_size)
    heads: Heads<Vec<f32>>,
    gate: Vec<f32>, // (rows, intermediate_size)
    up: Vec<f32>,   // (rows, intermediate_size)
}

/// A layer's queries, keys and values before RoPE, and its attention output.
struct Heads<T> {
    q: T,        // (n, n_heads, head_dim)
    k: T,        // (n, n_kv_heads, head_dim)
    v: T,        // (n, n_kv_heads, head_dim)
    attended: T, // (n, n_heads, head_dim)
}

impl Buffers {
    /// Buffers of `n` rows.
    fn new(config: &Config, n: usize) -> Self {
        let zeros = |row: usize| vec![0.0; n * row];
        let inner = || vec![0.0; config.intermediate_size * n.min(ROWS)];
        let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
        Self {
            normed: zeros(config.hidden_size),
            heads: Heads { q: zeros(q_dim), k: zeros(kv_dim), v: zeros(kv_dim), attended: zeros(q_dim) },
            gate: inner(),
            up: inner(),
        }
    }
}

/// Runs rows of the residual stream `x` (n, hidden_size) through one layer, in place. `attention` gets the
/// input rows and fills `attended`.
fn layer(
    config: &Config,
    weights: &Layer,
    x: &mut [f32],
    Buffers { normed, heads: Heads { q, k, v, attended }, gate, up }: &mut Buffers,
    attention: impl FnOnce(&[f32], Heads<&mut [f32]>) -> Result<()>,
) -> Result<()> {
    let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
    let w = &weights.attention;
    rms_norm(x, &w.norm, eps, normed);
    linear(&w.q, normed, q);
    linear(&w.k, normed, k);
    linear(&w.v, normed, v);
    for (norm, rows) in [(&w.q_norm, &mut *q), (&w.k_norm, k)] {
        if let Some(norm) = norm {
            rms_norm_in_place(rows, norm, eps);
        }
    }
    attention(x, Heads { q, k, v, attended: attended.as_mut_slice() })?;
    linear(&w.o, attended, normed);
    add(x, normed);

    let w = &weights.feed_forward;
    rms_norm(x, &w.norm, eps, normed);
    for (x, normed) in x.chunks_mut(ROWS * hidden).zip(normed.chunks_mut(ROWS * hidden)) {
        let inner = x.len() / hidden * config.intermediate_size;
        let (gate, up) = (&mut gate[..inner], &mut up[..inner]);
        linear(&w.gate, normed, gate);
        linear(&w.up, normed, up);
        swiglu(gate, up);
        linear(&w.down, gate, normed);
        add(x, normed);
    }
    Ok(())
}

/// Rejects a model whose weights do not match its configuration: both are public, so either may have been
/// changed.
fn check_shapes(model: &Model, rope: &Rope) -> Result<()> {
    let config = model.config.clone().validated().map_err(Error::Argument)?;
    let (hidden, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab_size);
    let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
    let linear = |layer: &Linear, n_in: usize, n_out: usize| {
        (layer.n_in(), layer.n_out()) == (n_in, n_out)
            && layer.bias.as_ref().is_none_or(|bias| bias.len() == n_out)
    };
    let tables = [&model.embedding, &model.output]
        .iter()
        .all(|table| (table.n_out(), table.n_in()) == (vocab, hidden));
    let layers = model.layers.iter().all(|layer| {
        let (a, f) = (&layer.attention, &layer.feed_forward);
        (a.norm.len(), f.norm.len()) == (hidden, hidden)
            && linear(&a.q, hidden, q_dim)
            && linear(&a.k, hidden, kv_dim)
            && linear(&a.v, hidden, kv_dim)
            && linear(&a.o, q_dim, hidden)
            && [&a.q_norm, &a.k_norm]
                .iter()
                .all(|norm| norm.as_ref().map(Vec::len) == config.qk_norm.then_some(config.head_dim))
            && linear(&f.gate, hidden, inner)
            && linear(&f.up, hidden, inner)
            && linear(&f.down, inner, hidden)
    });
    let fits = tables && layers && model.layers.len() == config.n_layers && model.norm.len() == hidden;
    match fits && rope.fits(&config) {
        true => Ok(()),
        false => Err(Error::Argument(format!("the weights of {} do not fit its configuration", model.name))),
    }
}

/// Logits (n, vocab_size) of normalized hidden states (n, hidden_size).
///
/// # Errors
/// [`Error::Logits`] for a NaN or an infinity among them.
pub fn logits(model: &Model, hidden: &[f32]) -> Result<Vec<f32>> {
    let n = hidden.len() / model.config.hidden_size;
    let mut out = vec![0.0; n * model.config.vocab_size];
    logits_into(model, hidden, &mut out)?;
    Ok(out)
}

/// As [`logits`]. Finite weights may overflow, and no comparison of logits would notice a NaN.
fn logits_into(model: &Model, hidden: &[f32], out: &mut [f32]) -> Result<()> {
    matmul(&model.output, hidden, out);
    match out.iter().all(|x| x.is_finite()) {
        true => Ok(()),
        false => Err(Error::Logits { model: model.name.clone() }),
    }
}

/// Runs tokens over a cache, from its current length on: a decode step, or a prefill chunk.
pub struct Decoder {
    model: Arc<Model>,
    rope: Arc<Rope>,
    step: Option<Step>, // allocated by the first step
    logits: Vec<f32>,   // (vocab_size,)
}

/// Buffers of a decode step, allocated once.
struct Step {
    x: Vec<f32>, // (hidden_size,) residual stream
    buffers: Buffers,
}

impl Decoder {
    /// A decoder for `model` with positions from `rope`.
    #[must_use]
    pub fn new(model: Arc<Model>, rope: Arc<Rope>) -> Self {
        Self { model, rope, step: None, logits: vec![] }
    }

    /// Appends `token` to the cache and returns the logits (vocab_size,) of the next token.
    ///
    /// # Errors
    /// [`Error::Argument`] for a token outside the vocabulary, for a cache filled up to the last position,
    /// and for weights or positions that do not match the model's configuration; errors of the cache;
    /// [`Error::Logits`], after which the cache holds the token.
    pub fn step(&mut self, token: u32, cache: &mut dyn KvCache) -> Result<&[f32]> {
        // Inside the pool: from outside, each of the many products of a step would wait for a thread to wake.
        rayon::scope(|_| self.step_inside(token, cache))?;
        Ok(&self.logits)
    }

    fn step_inside(&mut self, token: u32, cache: &mut dyn KvCache) -> Result<()> {
        let model = &*self.model;
        let config = &model.config;
        model.check_tokens(&[token])?;
        let Step { x, buffers } = match &mut self.step {
            Some(step) => step,
            None => {
                check_shapes(model, &self.rope)?;
                let x = vec![0.0; config.hidden_size];
                self.step.insert(Step { x, buffers: Buffers::new(config, 1) })
            }
        };
        let pos = cache.seq_len();
        if pos >= self.rope.len() {
            return Err(Error::Argument(format!("the context of {} tokens is full", self.rope.len())));
        }
        model.embedding.rows_into(token as usize, x);
        for (l, weights) in model.layers.iter().enumerate() {
            layer(config, weights, x, buffers, |_, Heads { q, k, v, attended }| {
                self.rope.layer(l).rotate(q, pos);
                if cache.watches_all() {
                    cache.watch(l, q);
                }
                cache.append(l, pos, k, v)?;
                cache.attend(l, q, attended)
            })?;
        }
        rms_norm(x, &model.norm, config.rms_norm_eps, &mut buffers.normed);
        self.logits.resize(config.vocab_size, 0.0);
        logits_into(model, &buffers.normed, &mut self.logits)
    }

    /// Appends `tokens` to the cache, all through one layer after the other, and returns the logits
    /// (vocab_size,) of the next token.
    ///
    /// The tokens attend to each other exactly, or as [`KvCache::prompt_rows`] specifies, and to the cached
    /// tokens by the cache's method; the cache then takes them as a prompt, with their last queries to watch.
    /// In an exact cache, chunked prefill gives the logits of a whole prefill. Otherwise later chunks see
    /// earlier ones compressed, and a method that trains on the prompt or selects tokens by its last queries
    /// does so for every chunk.
    ///
    /// # Errors
    /// As [`Self::step`], and for no tokens. After an error some layers may hold the tokens: truncate the
    /// cache.
    pub fn prefill(&mut self, tokens: &[u32], cache: &mut dyn KvCache) -> Result<&[f32]> {
        let (model, rope) = (&*self.model, &*self.rope);
        let config = &model.config;
        check_shapes(model, rope)?;
        let (pos, n, q_dim, kv_dim) = (cache.seq_len(), tokens.len(), config.q_dim(), config.kv_dim());
        let mut stats = vec![SoftmaxStats::EMPTY; n * config.n_heads];
        let hidden = run(model, rope, pos, tokens, |l, _, Heads { q, k, v, attended }| {
            rope.layer(l).rotate_rows(q, q_dim, pos);
            let rotated = rope.layer(l).rotated(k, kv_dim, pos);
            match cache.prompt_rows(l, &rotated, v)? {
                None => causal_attention(shape(config, l), q, &rotated, v, attended, &mut stats)?,
                Some((keys, values)) => {
                    causal_attention(shape(config, l), q, &keys, &values, attended, &mut stats)?;
                }
            }
            if pos > 0 {
                for (out, stats) in attended.chunks_exact_mut(config.head_dim).zip(&stats) {
                    out.iter_mut().for_each(|x| *x *= stats.sum);
                }
                cache.attend_into(l, pos, q, attended, &mut stats)?;
                for (out, stats) in attended.chunks_exact_mut(config.head_dim).zip(&stats) {
                    stats.normalize(out);
                }
            }
            let unwatched = if cache.watches_all() { 0 } else { n.saturating_sub(WATCHED) };
            cache.watch(l, &q[unwatched * q_dim..]);
            cache.prefill(l, pos, k, v)
        })?;
        self.logits.resize(config.vocab_size, 0.0);
        logits_into(model, &hidden[(n - 1) * config.hidden_size..], &mut self.logits)?;
        Ok(&self.logits)
    }
}
