//! The forward pass: a prompt at once, layer by layer, or one token over a cache.

use std::sync::Arc;

use crate::cache::KvCache;
use crate::model::{Config, Layer, Linear, Model, Rope};
use crate::ops::{add, causal_attention, linear, matmul, rms_norm, swiglu};
use crate::{Error, Result};

/// Rows that pass through the feed-forward block at once.
const ROWS: usize = 512;

/// What one layer's attention computed for a prompt, before RoPE. Attention then sees what the observer
/// leaves of keys and values.
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

/// Runs a prompt from position 0 with exact attention and shows each layer's activations to `observe`, which
/// fills a cache or gathers statistics. Returns the final hidden states, normalized: (n, hidden_size).
///
/// # Errors
/// [`Error::Argument`] for no tokens, tokens outside the vocabulary, or more of them than `rope` has
/// positions; for weights or a `rope` of other shapes than the model's configuration; whatever `observe`
/// returns.
pub fn prefill(
    model: &Model,
    rope: &Rope,
    tokens: &[u32],
    observe: &mut dyn FnMut(usize, Activations<'_>) -> Result<()>,
) -> Result<Vec<f32>> {
    let config = &model.config;
    check_shapes(model, rope)?;
    model.check_tokens(tokens)?;
    if tokens.is_empty() {
        return Err(Error::argument("a prompt needs at least one token"));
    }
    if tokens.len() > rope.len() {
        return Err(Error::Argument(format!("{} tokens for {} positions", tokens.len(), rope.len())));
    }
    let (n, q_dim, kv_dim) = (tokens.len(), config.q_dim(), config.kv_dim());
    let mut x: Vec<f32> = tokens.iter().flat_map(|&token| embedding(model, token)).copied().collect(); // (n, hidden)
    let mut buffers = Buffers::new(config, n);
    for (l, weights) in model.layers.iter().enumerate() {
        layer(config, weights, &mut x, &mut buffers, |residual, Heads { q, k, v, attended }| {
            observe(l, Activations { residual, q, k, v })?;
            rope.rotate_rows(q, q_dim, 0);
            rope.rotate_rows(k, kv_dim, 0);
            causal_attention(q, k, v, config.n_heads, config.n_kv_heads, config.head_dim, attended)
        })?;
    }
    let mut normed = buffers.normed;
    rms_norm(&x, &model.norm, config.rms_norm_eps, &mut normed);
    Ok(normed)
}

/// What a layer computes from rows of the residual stream.
struct Buffers {
    normed: Vec<f32>, // (n, hidden_size)
    heads: Heads<Vec<f32>>,
    gate: Vec<f32>, // (rows, intermediate_size)
    up: Vec<f32>,   // (rows, intermediate_size)
}

/// A layer's queries, keys and values before RoPE, and where the attention over them goes.
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

/// Runs rows of the residual stream `x` (n, hidden_size) through one layer, in place. `attention` sees the
/// rows as they came and fills `attended`.
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

/// Refuses a model whose weights do not have the shapes of its configuration: both are public, so either may
/// have been changed.
fn check_shapes(model: &Model, rope: &Rope) -> Result<()> {
    let config = model.config.clone().validated().map_err(Error::Argument)?;
    let (hidden, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab_size);
    let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
    let linear = |layer: &Linear, n_in: usize, n_out: usize| {
        (layer.n_in, layer.n_out, layer.weight.len()) == (n_in, n_out, n_in * n_out)
            && layer.bias.as_ref().is_none_or(|bias| bias.len() == n_out)
    };
    let tables = [&model.embedding, &model.output].iter().all(|table| table.len() == vocab * hidden);
    let layers = model.layers.iter().all(|layer| {
        let (a, f) = (&layer.attention, &layer.feed_forward);
        (a.norm.len(), f.norm.len()) == (hidden, hidden)
            && linear(&a.q, hidden, q_dim)
            && linear(&a.k, hidden, kv_dim)
            && linear(&a.v, hidden, kv_dim)
            && linear(&a.o, q_dim, hidden)
            && linear(&f.gate, hidden, inner)
            && linear(&f.up, hidden, inner)
            && linear(&f.down, inner, hidden)
    });
    let fits = tables && layers && model.layers.len() == config.n_layers && model.norm.len() == hidden;
    match fits && 2 * rope.frequencies().len() == config.head_dim {
        true => Ok(()),
        false => Err(Error::Argument(format!("the weights of {} do not fit its configuration", model.name))),
    }
}

/// Logits (n, vocab_size) of normalized hidden states (n, hidden_size).
#[must_use]
pub fn logits(model: &Model, hidden: &[f32]) -> Vec<f32> {
    let n = hidden.len() / model.config.hidden_size;
    let mut out = vec![0.0; n * model.config.vocab_size];
    matmul(&model.output, hidden, &mut out, model.config.hidden_size);
    out
}

fn embedding(model: &Model, token: u32) -> &[f32] {
    let hidden = model.config.hidden_size;
    &model.embedding[token as usize * hidden..][..hidden]
}

/// Runs one token after the other over a cache. Its buffers are allocated once.
pub struct Decoder {
    model: Arc<Model>,
    rope: Arc<Rope>,
    x: Vec<f32>, // (hidden_size,) residual stream
    buffers: Buffers,
    logits: Vec<f32>, // (vocab_size,)
}

impl Decoder {
    /// A decoder for `model` with positions from `rope`.
    #[must_use]
    pub fn new(model: Arc<Model>, rope: Arc<Rope>) -> Self {
        let config = &model.config;
        let x = vec![0.0; config.hidden_size];
        let (buffers, logits) = (Buffers::new(config, 1), vec![0.0; config.vocab_size]);
        Self { model, rope, x, buffers, logits }
    }

    /// Appends `token` to the cache and returns the logits (vocab_size,) of what follows it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a token outside the vocabulary or a cache that is full up to the last
    /// position; whatever the cache returns.
    pub fn step(&mut self, token: u32, cache: &mut dyn KvCache) -> Result<&[f32]> {
        let model = &*self.model;
        let config = &model.config;
        model.check_tokens(&[token])?;
        let pos = cache.seq_len();
        if pos >= self.rope.len() {
            return Err(Error::Argument(format!("the context of {} tokens is full", self.rope.len())));
        }
        self.x.copy_from_slice(embedding(model, token));
        for (l, weights) in model.layers.iter().enumerate() {
            layer(config, weights, &mut self.x, &mut self.buffers, |_, Heads { q, k, v, attended }| {
                self.rope.rotate(q, pos);
                cache.append(l, pos, k, v)?;
                cache.attend(l, q, attended)
            })?;
        }
        let normed = &mut self.buffers.normed;
        rms_norm(&self.x, &model.norm, config.rms_norm_eps, normed);
        matmul(&model.output, normed, &mut self.logits, config.hidden_size);
        Ok(&self.logits)
    }
}
