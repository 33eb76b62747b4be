//! A model in memory: shape, weights, tokenizer. `family` lists the model families and their
//! differences.

use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::tensors::{Tensors, Tracked};
use crate::{Checkpoint, Config, Error, Matrix, Result, Rope, Tokenizer};

/// A matrix that multiplies a vector from the left, with an optional bias.
#[derive(Clone, Debug)]
pub struct Linear {
    /// (n_out, n_in)
    pub weight: Matrix,
    /// (n_out,)
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Length of the input.
    #[must_use]
    pub const fn n_in(&self) -> usize {
        self.weight.n_in()
    }

    /// Length of the output.
    #[must_use]
    pub const fn n_out(&self) -> usize {
        self.weight.n_out()
    }
}

/// The attention weights of a layer.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// (hidden_size,)
    pub norm: Vec<f32>,
    /// hidden_size -> n_heads * head_dim
    pub q: Linear,
    /// hidden_size -> n_kv_heads * head_dim
    pub k: Linear,
    /// hidden_size -> n_kv_heads * head_dim
    pub v: Linear,
    /// n_heads * head_dim -> hidden_size
    pub o: Linear,
    /// (head_dim,): the RMS norm of every query head, in families that have one.
    pub q_norm: Option<Vec<f32>>,
    /// (head_dim,): that of every key head.
    pub k_norm: Option<Vec<f32>>,
}

impl AttentionWeights {
    /// Multiplies all queries before RoPE, and with them the scores.
    fn scale_queries(&mut self, factor: f32) {
        if factor == 1.0 {
            return;
        }
        let Linear { weight, bias } = &mut self.q;
        let scaled: [&mut [f32]; 2] = match &mut self.q_norm {
            // The norm would cancel any factor of the projection.
            Some(norm) => [norm, &mut []],
            None => [weight.f32_mut(), bias.as_deref_mut().unwrap_or_default()],
        };
        scaled.into_iter().flatten().for_each(|x| *x *= factor);
    }
}

/// The feed-forward weights of a layer.
#[derive(Clone, Debug)]
pub struct FeedForwardWeights {
    /// (hidden_size,)
    pub norm: Vec<f32>,
    /// hidden_size -> intermediate_size
    pub gate: Linear,
    /// hidden_size -> intermediate_size
    pub up: Linear,
    /// intermediate_size -> hidden_size
    pub down: Linear,
}

/// One layer. The halves are shared between models that differ only in the other.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Attention.
    pub attention: Arc<AttentionWeights>,
    /// Feed-forward.
    pub feed_forward: Arc<FeedForwardWeights>,
}

/// A model that is ready to run.
#[derive(Clone)]
pub struct Model {
    /// Its name: the file's or folder's.
    pub name: String,
    /// SHA-256 over what keys and values depend on, in hexadecimal, by which a profile and a store identify their
    /// model: the weights, in any order and files, and the parts of the configuration that change attention.
    /// Ends of a text, the length of the context, the tokenizer and the output are not among them.
    pub hash: String,
    /// Its shape.
    pub config: Config,
    /// Its tokenizer, if there is one with the weights.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// (vocab_size, hidden_size)
    pub embedding: Arc<Matrix>,
    /// One per layer.
    pub layers: Vec<Layer>,
    /// (hidden_size,)
    pub norm: Arc<Vec<f32>>,
    /// (vocab_size, hidden_size); the embedding itself if they are tied.
    pub output: Arc<Matrix>,
}

impl Model {
    /// Loads a Hugging Face folder or a GGUF file.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::File`], naming the file and what is wrong with it.
    pub fn load(path: &Path) -> Result<Self> {
        Checkpoint::open(path)?.load()
    }

    pub(crate) fn assemble(
        (name, path): (String, &Path),
        mut config: Config,
        tokenizer: Option<Arc<Tokenizer>>,
        tensors: &dyn Tensors,
    ) -> Result<Self> {
        let tracked = Tracked::new(tensors);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let matrix = |name: &str| tracked.load_matrix(name, [vocab, hidden]).map(Arc::new);
        let [first, last] = ["model.embed_tokens.weight", "lm_head.weight"];
        // Whatever the configuration says, the stored tensors decide: a stored output matrix is used, and tied
        // matrices may be stored as either.
        let has_last = tracked.contains(last);
        let only_last = has_last && config.tie_word_embeddings && !tracked.contains(first);
        let embedding = matrix(if only_last { last } else { first })?;
        let output = (has_last && !only_last).then(|| matrix(last)).transpose()?;
        let output = output.filter(|output| *output != embedding).unwrap_or_else(|| embedding.clone());
        config.tie_word_embeddings = Arc::ptr_eq(&embedding, &output);
        config.eos_tokens.extend(tokenizer.iter().flat_map(|tokenizer| tokenizer.stop_tokens()));
        config.eos_tokens.sort_unstable();
        config.eos_tokens.dedup();
        let layers = (0..config.n_layers).map(|l| load_layer(&config, &tracked, l)).collect::<Result<_>>()?;
        let norm = Arc::new(tracked.load("model.norm.weight", &[hidden])?);
        tracked.finish(path, config.family)?;
        let mut hasher = Sha256::new();
        hasher.update(attention_identity(&config));
        // What comes after the last layer changes no key and no value.
        let after: &[&str] = if only_last { &["model.norm.weight"] } else { &[last, "model.norm.weight"] };
        tracked.digest(after, &mut hasher)?;
        let hash = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { name, hash, config, tokenizer, embedding, layers, norm, output })
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::Argument`] for a model without one, [`Error::Feature`] in a build without the feature
    /// `tokenizers`.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        tokenizer_of(&self.name, self.tokenizer.as_ref())
    }

    /// Rejects tokens outside the vocabulary.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        check_tokens(&self.config, tokens)
    }

    /// Rejects lengths beyond the model's context.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_context(&self, tokens: usize) -> Result<()> {
        check_context(&self.name, &self.config, tokens)
    }
}

/// The name of the model in a file or folder.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// The tokenizer of the model of this name.
pub(crate) fn tokenizer_of<'a>(name: &str, tokenizer: Option<&'a Arc<Tokenizer>>) -> Result<&'a Tokenizer> {
    tokenizer.map(Arc::as_ref).ok_or_else(|| match cfg!(feature = "tokenizers") {
        true => Error::argument(format!("model {name} has no tokenizer.json")),
        false => Error::Feature { what: "a text", feature: "tokenizers" },
    })
}

/// Rejects tokens outside the vocabulary.
pub(crate) fn check_tokens(config: &Config, tokens: &[u32]) -> Result<()> {
    let most = config.vocab_size;
    match tokens.iter().find(|&&token| token as usize >= most) {
        Some(token) => Err(Error::Argument(format!("token {token} is outside the vocabulary of {most}"))),
        None => Ok(()),
    }
}

/// Rejects lengths beyond the context of the model of this name.
pub(crate) fn check_context(name: &str, config: &Config, tokens: usize) -> Result<()> {
    let most = config.max_seq_len;
    match tokens > most {
        true => Err(Error::Argument(format!("{tokens} tokens exceed the context of {most} that {name} has"))),
        false => Ok(()),
    }
}

/// The parts of a configuration that change keys and values, beyond what the names and shapes of the weights
/// say. Two spellings of the same rotary frequencies are the same.
fn attention_identity(config: &Config) -> String {
    let Config { n_layers, n_heads, n_kv_heads, head_dim, rms_norm_eps, attention, rope_scaling, .. } =
        config;
    let (rope, score_factor) = (Rope::new(config, 0), rope_scaling.score_factor());
    let frequencies = rope.frequencies();
    format!(
        "{n_layers} {n_heads} {n_kv_heads} {head_dim} {rms_norm_eps:?} {score_factor:?} {attention:?} {frequencies:?}"
    )
}

fn load_layer(config: &Config, tensors: &Tracked<'_>, l: usize) -> Result<Layer> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let linear = |name: &str, n_in: usize, n_out: usize, bias: bool| -> Result<Linear> {
        let name = format!("model.layers.{l}.{name}");
        let weight = tensors.load_matrix(&format!("{name}.weight"), [n_out, n_in])?;
        let bias = bias.then(|| tensors.load(&format!("{name}.bias"), &[n_out])).transpose()?;
        Ok(Linear { weight, bias })
    };
    let norm = |name: &str, len: usize| tensors.load(&format!("model.layers.{l}.{name}.weight"), &[len]);
    let head_norm = |name: &str| config.qk_norm.then(|| norm(name, config.head_dim)).transpose();
    let bias = config.attention_bias;
    let mut attention = AttentionWeights {
        norm: norm("input_layernorm", hidden)?,
        q: linear("self_attn.q_proj", hidden, config.q_dim(), bias)?,
        k: linear("self_attn.k_proj", hidden, config.kv_dim(), bias)?,
        v: linear("self_attn.v_proj", hidden, config.kv_dim(), bias)?,
        o: linear("self_attn.o_proj", config.q_dim(), hidden, config.output_bias)?,
        q_norm: head_norm("self_attn.q_norm")?,
        k_norm: head_norm("self_attn.k_norm")?,
    };
    if config.attention[l].rope {
        attention.scale_queries(config.rope_scaling.score_factor() as f32);
    }
    let bias = config.mlp_bias;
    let feed_forward = FeedForwardWeights {
        norm: norm("post_attention_layernorm", hidden)?,
        gate: linear("mlp.gate_proj", hidden, inner, bias)?,
        up: linear("mlp.up_proj", hidden, inner, bias)?,
        down: linear("mlp.down_proj", inner, hidden, bias)?,
    };
    Ok(Layer { attention: Arc::new(attention), feed_forward: Arc::new(feed_forward) })
}
