//! Caches as plain data: [`Plan::build`] builds them.
//!
//! What a calibration holds is `None` without one: the cache then has hashed numbers, to time it.

use std::ops::Range;

use codec_core::{ModelKind, PlaneBuf};
use kv_attend::owner::Pair;
use pq_core::{CodebookBuf, PqShape, TokenBudget, sq};

use crate::{Error, Result};

/// One of every layer and head.
pub type Heads<T> = Vec<Vec<T>>;

/// A cache on a device.
#[derive(Clone, Debug)]
pub enum Plan {
    /// Exact rows of all tokens; without pages each sequence has memory for its maximum length.
    Dense(Option<PagedMemory>),
    /// Attention on codes of all tokens (MILLION).
    Codes {
        /// The quantizers of keys and of values.
        quantizers: Pair<PqShape>,
        /// The rows that are coded.
        rows: CodedRows,
        /// The memory of the codes; without pages each sequence has memory for its maximum length.
        pages: Option<PagedMemory>,
    },
    /// Codes of all tokens and exact rows of a few, in one softmax.
    Hybrid(HybridPlan, Option<Heads<TransformedHead>>),
    /// Exact rows that codes of their keys select (PQCache).
    Retrieval(Retrieval, Option<Heads<CodebookBuf>>),
    /// Rows of reduced rank (ZACK).
    Cuts(DeviceCuts, Option<Heads<CutHead>>),
    /// Rows as a bitstream (CacheGen), with the planes of every layer.
    Bitstream(Bitstream, Option<Vec<Pair<PlaneBuf>>>),
    /// Scalar codes of whole blocks, all bits without a codebook.
    Scalar(ScalarPlan, Option<Heads<ScalarHead>>),
    /// Uniform codes: 4-bit keys per channel over 64 tokens, 4-bit values per token over 64 channels.
    Int4,
}

impl Plan {
    /// The cache of some heads of every layer: that of a rank of a model in parts.
    ///
    /// # Errors
    /// [`Error::Argument`] for heads that the data lack, and for the planes of a bitstream, which are of all
    /// heads.
    pub fn of_heads(mut self, heads: Range<usize>) -> Result<Self> {
        match &mut self {
            Self::Dense(_) | Self::Int4 | Self::Bitstream(_, None) => {}
            Self::Codes { rows: CodedRows::Plain(data), .. } => take_heads(data, &heads)?,
            Self::Codes { rows: CodedRows::Transformed(_, data), .. } | Self::Hybrid(_, data) => {
                take_heads(data, &heads)?;
            }
            Self::Retrieval(_, data) => take_heads(data, &heads)?,
            Self::Cuts(_, data) => take_heads(data, &heads)?,
            Self::Scalar(_, data) => take_heads(data, &heads)?,
            Self::Bitstream(_, Some(_)) => {
                return Err(Error::argument(
                    "the planes of a bitstream are of all heads: no rank has a part of one",
                ));
            }
        }
        Ok(self)
    }
}

/// Keeps the data of some heads of every layer.
fn take_heads<T>(data: &mut Option<Heads<T>>, heads: &Range<usize>) -> Result<()> {
    for layer in data.iter_mut().flatten() {
        if heads.start > heads.end || heads.end > layer.len() {
            let (start, end, len) = (heads.start, heads.end, layer.len());
            return Err(Error::Argument(format!("heads {start} to {end} of data of {len} heads")));
        }
        layer.truncate(heads.end);
        layer.drain(..heads.start);
    }
    Ok(())
}

/// Paged memory for the tokens of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedMemory {
    /// Tokens per page: a multiple of 16 for rows, of 32 for codes.
    pub page: usize,
    /// Tokens of all sequences together; `None` for the sum of their maximum lengths.
    pub pool: Option<usize>,
}

/// The rows that are coded.
#[derive(Clone, Debug)]
pub enum CodedRows {
    /// Those of the model.
    Plain(Option<Heads<Pair<CodebookBuf>>>),
    /// Rows in another basis.
    Transformed(RowForm, Option<Heads<TransformedHead>>),
}

/// The form of transformed rows that is coded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowForm {
    /// Whether the rotated mean is subtracted from keys.
    pub rotated_mean: bool,
    /// The factor of rows that are then divided by their norms, which are stored; none if they are not. Above
    /// 1 it makes up for codes that shorten rows ([`pq_core::gaussian_gain`]).
    pub norms: Pair<Option<f32>>,
}

/// One head's codes of transformed rows.
#[derive(Clone, Debug)]
pub struct TransformedHead {
    /// Codebooks of the rows in their bases.
    pub codebooks: Pair<CodebookBuf>,
    /// The bases.
    pub maps: HeadMaps,
    /// Mean of the keys before RoPE, (head_dim,).
    pub key_mean: Vec<f32>,
    /// Mean of the values in their basis, (head_dim,), which the folded model subtracts.
    pub value_mean: Vec<f32>,
    /// Mean squared error of each component of the coded keys, (head_dim,).
    pub key_errors: Vec<f32>,
    /// Mean squared error of the coded values relative to their variance.
    pub value_error: f32,
}

impl TransformedHead {
    /// Codes of rows in the model's own basis, of `head_dim` components. Errors of the codes count as zero: a
    /// cache that weighs them selects by the codes alone.
    #[must_use]
    pub fn untransformed(codebooks: Pair<CodebookBuf>, head_dim: usize) -> Self {
        let zeros = vec![0.0; head_dim];
        Self {
            codebooks,
            maps: HeadMaps::identity(head_dim),
            key_mean: zeros.clone(),
            value_mean: zeros.clone(),
            key_errors: zeros,
            value_error: 0.0,
        }
    }
}

/// Columns of a head's maps (head_dim, head_dim): of keys and queries to a basis that preserves scores, and
/// of values to theirs. The model has the maps of values folded into its weights.
#[derive(Clone, Debug)]
pub struct HeadMaps {
    /// Of keys.
    pub keys: Vec<f32>,
    /// Of queries.
    pub queries: Vec<f32>,
    /// Of values.
    pub values: Vec<f32>,
}

impl HeadMaps {
    /// The model's own basis.
    #[must_use]
    pub fn identity(head_dim: usize) -> Self {
        let mut map = vec![0.0; head_dim * head_dim];
        map.iter_mut().step_by(head_dim + 1).for_each(|x| *x = 1.0);
        Self { keys: map.clone(), queries: map.clone(), values: map }
    }
}

/// Hybrid attention.
#[derive(Clone, Copy, Debug)]
pub struct HybridPlan {
    /// The quantizers of keys and of values.
    pub quantizers: Pair<PqShape>,
    /// The form of the coded rows.
    pub form: RowForm,
    /// Whether the mean of what codes of values lose is kept for every block of tokens, and added
    /// ([`kv_gpu::pq::MeanErrors`]). The last block, which is not whole, has the mean of whole parts of 16
    /// tokens.
    pub mean_errors: bool,
    /// The rows per step, or their maximum.
    pub budget: TokenBudget,
    /// The error bound that sets the number of rows per head, if there is one.
    pub bound: Option<f32>,
    /// Where exact rows are.
    pub home: RowHome,
    /// Rows per head that stay resident on the device, if a step selects fewer.
    pub resident: usize,
}

/// Attention over exact rows retrieved by codes of their keys.
#[derive(Clone, Copy, Debug)]
pub struct Retrieval {
    /// The quantizer of keys.
    pub quantizer: PqShape,
    /// The rows per step.
    pub budget: TokenBudget,
    /// How codebooks are trained on each prompt; `None` for those of the plan.
    pub training: Option<Training>,
    /// Where exact rows are: not on the device.
    pub home: RowHome,
    /// Rows per head that stay resident on the device, if a step selects fewer.
    pub resident: usize,
}

/// The training of codebooks on a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Training {
    /// Iterations of k-means.
    pub iterations: usize,
    /// Maximum keys per head to train on, at least one: of more, every n-th one is taken.
    pub max_keys: usize,
}

impl Training {
    /// The stride at which `keys` keys are sampled.
    #[must_use]
    pub const fn step(&self, keys: usize) -> usize {
        if keys == 0 || self.max_keys == 0 { 1 } else { keys.div_ceil(self.max_keys) }
    }
}

/// Location and format of exact rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowHome {
    /// Device memory.
    Device,
    /// Host memory.
    Host,
    /// Host memory, 8 bits.
    HostInt8,
}

/// Attention to rows of reduced rank.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCuts {
    /// Fractions of the dimensions to keep, where ranks are not given.
    pub fractions: Pair<f64>,
    /// Whether prompt tokens also attend to truncated rows.
    pub cuts_prompts: bool,
}

impl DeviceCuts {
    /// Ranks are multiples of it: kernels read 16 bytes at a time.
    pub const MULTIPLE: usize = 8;
}

/// A head with truncated rows: the first components, up to the rank, in the basis of the maps (keys) or of
/// the folded weights (values).
#[derive(Clone, Debug)]
pub struct CutHead {
    /// The bases.
    pub maps: HeadMaps,
    /// Components that are kept, multiples of [`DeviceCuts::MULTIPLE`].
    pub ranks: Pair<usize>,
}

/// Rows stored as a bitstream.
#[derive(Clone, Copy, Debug)]
pub struct Bitstream {
    /// Whether hashed planes have a transform.
    pub has_transform: bool,
    /// The kind of their models.
    pub models: ModelKind,
}

/// Scalar codes of keys and values. Whole blocks leave the exact rows: the window's batch is the block.
#[derive(Clone, Debug)]
pub struct ScalarPlan {
    /// Slots of the keys' codes ([`Shape::slots`](sq::Shape::slots)): each is a bit for every sixteenth
    /// component.
    pub key_slots: usize,
    /// Bits of a value's component, 1 to 4.
    pub value_bits: usize,
    /// Whether a block keeps the mean error of its values.
    pub mean_errors: bool,
    /// Multiplies values, (head_dim, head_dim), once they are in units of their head's scale: the Hadamard
    /// transform that the model has folded into its weights, with the scales.
    pub value_map: Vec<f32>,
}

/// One head's scalar codes.
#[derive(Clone, Debug)]
pub struct ScalarHead {
    /// The codes of its keys.
    pub keys: sq::Shape,
    /// Mean of the keys before RoPE, (head_dim,).
    pub key_mean: Vec<f32>,
    /// Multiplies keys, (head_dim, head_dim): columns in the order of the codes.
    pub basis: Vec<f32>,
    /// Multiplies queries, the same.
    pub dual: Vec<f32>,
    /// Mean of the values, (head_dim,), which the folded model subtracts before their transform.
    pub value_mean: Vec<f32>,
    /// The unit of the values: the folded model divides them by it before their transform.
    pub value_scale: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_the_data_of_its_heads() {
        let all = || Some(vec![vec![0, 1, 2, 3], vec![10, 11, 12, 13]]);
        let mut data = all();
        take_heads(&mut data, &(2..4)).unwrap();
        assert_eq!(data.unwrap(), [[2, 3], [12, 13]]);
        for heads in [2..5, 5..6] {
            assert!(take_heads(&mut all(), &heads).is_err(), "{heads:?}");
        }
        assert!(Plan::Int4.of_heads(1..2).is_ok(), "a plan without data is of any heads");
    }
}
