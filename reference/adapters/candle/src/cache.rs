//! Caches of codes.

use std::fmt;
use std::sync::Arc;

use candle_core::Tensor;
use kv_attend::owner::{AnyLayer, AnyStore, Store};
use kv_attend::{Attention, Window, Workspace};
use kv_owners::sq;

use crate::view::{Order, Sizes, View, element, has_tokens_first};
use crate::{Error, Kv, Result, dense};

/// The keys and values of a layer of a batch of sequences: the first and the most recent tokens as exact rows, all
/// others as the codes of `S`. All sequences have the same number of tokens, and the position of a token is its
/// index.
///
/// A clone shares the codebooks or bases.
#[derive(Clone)]
pub struct KvCache<S: AnyStore> {
    shared: Vec<Arc<<S as Store<f32>>::Shared>>, // per KV head
    window: Window,
    attention: Option<Attention>,
    sequences: Vec<AnyLayer<S>>, // of the first append on
    workspace: Workspace,
}

/// A cache of scalar codes: 1 to 8 bits, no codebooks. The usual choice.
pub type SqCache = KvCache<sq::Codes>;

/// A cache of product codes (MILLION).
pub type PqCache = KvCache<pq_core::HeadCodes>;

impl<S: AnyStore> KvCache<S>
where
    <S as Store<f32>>::Error: Into<kv_owners::Error>,
{
    /// An empty cache with a KV head for each element of `shared`: [`sq::Basis::head`] or
    /// [`pq_core::HeadBooks::train_layer`] make them, and [`Recorder`](crate::Recorder) calls both. The first append
    /// decides the element type and the number of sequences.
    #[must_use]
    pub fn new(shared: &[Arc<<S as Store<f32>>::Shared>], window: Window) -> Self {
        let (sequences, workspace) = (vec![], Workspace::default());
        Self { shared: shared.to_vec(), window, attention: None, sequences, workspace }
    }

    /// Attends with another scale than `1 / sqrt(dim)`, a softcap, or a sliding window.
    #[must_use]
    pub fn with_attention(self, attention: Attention) -> Self {
        Self { attention: Some(attention), ..self }
    }

    /// Number of tokens of each sequence.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sequences.first().map_or(0, AnyLayer::len)
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all sequences, without what they share.
    #[must_use]
    pub fn size(&self) -> usize {
        self.sequences.iter().map(AnyLayer::size).sum()
    }

    /// The sequences, such as to save them.
    #[must_use]
    pub fn sequences(&self) -> &[AnyLayer<S>] {
        &self.sequences
    }

    /// Appends the keys, after RoPE, and the values of new tokens, and codes those that leave the window.
    ///
    /// Rows of any strides are taken; no copy is made of contiguous tensors and of projections that are transposed
    /// to heads, if keys and values are alike, or of a single token.
    ///
    /// # Shapes
    /// `k` (batch, KV heads, tokens, dim), `v` (batch, KV heads, tokens, dim of the values).
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Device`]; the cache is then unchanged.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let (keys, values) = (Sizes::of(k)?, Sizes::of(v)?);
        check("keys", "heads", self.shared.len(), keys.heads)?;
        for (dimension, expected, actual) in [
            ("sequences", keys.batch, values.batch),
            ("heads", keys.heads, values.heads),
            ("tokens", keys.tokens, values.tokens),
        ] {
            check("values", dimension, expected, actual)?;
        }
        if v.dtype() != k.dtype() {
            return Err(Error::DType(v.dtype()));
        }
        let fresh: Vec<AnyLayer<S>> = match self.sequences.len() {
            0 => {
                let element = element(k.dtype())?;
                let new = |_| AnyLayer::new(element, &self.shared, self.window).map_err(codes);
                (0..keys.batch).map(new).collect::<Result<_>>()?
            }
            _ => vec![],
        };
        let sequences = if fresh.is_empty() { &self.sequences } else { &fresh };
        check("keys", "sequences", sequences.len(), keys.batch)?;
        let [dim, dim_v] = sequences.first().map_or([keys.dim, values.dim], AnyLayer::dims);
        check("keys", "components", dim, keys.dim)?;
        check("values", "components", dim_v, values.dim)?;
        if !fresh.is_empty() {
            self.sequences = fresh;
        }
        if keys.tokens == 0 {
            return Ok(());
        }
        let (k, v, order) = match has_tokens_first(k)? && has_tokens_first(v)? {
            true => (k.clone(), v.clone(), Order::Tokens),
            false => (k.contiguous()?, v.contiguous()?, Order::Heads),
        };
        let (keys, values) = (View::new(&k)?, View::new(&v)?);
        // All sequences are alike: what one refuses, the first one refuses before any has changed.
        for (i, sequence) in self.sequences.iter_mut().enumerate() {
            let (keys, values) = (keys.rows(order, i)?, values.rows(order, i)?);
            match order {
                Order::Tokens => sequence.append(keys, values),
                Order::Heads => sequence.append_heads(keys, values),
            }
            .map_err(codes)?;
        }
        Ok(())
    }

    /// Attention of all query heads of the last tokens, which have been appended, each to the tokens up to its own:
    /// (batch, heads, tokens, dim of the values), of the type of `q`.
    ///
    /// # Shapes
    /// `q` (batch, heads, tokens, dim), after RoPE, of any of the three types.
    /// # Errors
    /// [`Error::Empty`], [`Error::Shape`], [`Error::DType`], [`Error::Device`]; [`Error::Codes`] for more query
    /// tokens than tokens.
    pub fn attend(&mut self, q: &Tensor) -> Result<Tensor> {
        let Sizes { batch, heads, tokens, dim } = Sizes::of(q)?;
        let [key_dim, dim_v] = self.sequences.first().ok_or(Error::Empty)?.dims();
        check("queries", "sequences", self.sequences.len(), batch)?;
        check("queries", "components", key_dim, dim)?;
        let kv_heads = self.shared.len();
        check("queries", "heads", heads.next_multiple_of(kv_heads), heads)?;
        element(q.dtype())?;
        // Rows of a query token hold all its heads.
        let rows = match has_tokens_first(q)? {
            true => q.clone(),
            false => q.transpose(1, 2)?.contiguous()?.transpose(1, 2)?,
        };
        let attention = self.attention.unwrap_or(Attention::scaled(1.0 / (dim as f32).sqrt()));
        let mut out = vec![0.0; batch * tokens * heads * dim_v];
        let each = tokens * heads * dim_v;
        let rows = View::new(&rows)?;
        for (i, (sequence, out)) in self.sequences.iter().zip(out.chunks_exact_mut(each.max(1))).enumerate() {
            let queries = rows.rows(Order::Tokens, i)?;
            sequence.attend_into(&attention, queries, &mut self.workspace, out).map_err(codes)?;
        }
        let out = Tensor::from_vec(out, (batch, tokens, heads, dim_v), q.device())?;
        Ok(out.transpose(1, 2)?.to_dtype(q.dtype())?)
    }

    /// Keeps the first `len` tokens, to drop rejected drafts or to share a prefix with another sequence. Coded
    /// tokens stay coded.
    pub fn truncate(&mut self, len: usize) {
        self.sequences.iter_mut().for_each(|sequence| sequence.truncate(len));
    }
}

impl<S: AnyStore> fmt::Debug for KvCache<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = self.sequences.first().map_or(0, AnyLayer::len);
        f.debug_struct("KvCache").field("sequences", &self.sequences.len()).field("tokens", &tokens).finish()
    }
}

/// Tokens of a prompt attend to each other exactly, and are then coded; later ones attend to codes.
impl<S: AnyStore> Kv for KvCache<S>
where
    <S as Store<f32>>::Error: Into<kv_owners::Error>,
{
    fn attend_new(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let is_prompt = self.is_empty();
        self.append(k, v)?;
        if is_prompt && self.attention.is_none() { dense::attention(q, k, v) } else { Ok(self.attend(q)?) }
    }
}

fn codes(error: impl Into<kv_owners::Error>) -> Error {
    Error::Codes(error.into())
}

fn check(what: &'static str, dimension: &'static str, expected: usize, actual: usize) -> Result<()> {
    if actual == expected { Ok(()) } else { Err(Error::Shape { what, dimension, expected, actual }) }
}
