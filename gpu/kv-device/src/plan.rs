//! A method's cache on a device, as plain data: `device::method_cache` builds it.
//!
//! What a profile holds is `None` without one: the cache then has hashed numbers, for timing.

use codec_core::{ModelKind, PlaneBuf};
use pq_core::{CodebookBuf, PqShape};

use super::budget::Budget;
use super::paged::PagedMemory;
use crate::side::Pair;

/// One of every layer and head.
pub(crate) type Heads<T> = Vec<Vec<T>>;

/// A cache on a device.
pub(crate) enum Plan {
    /// Exact rows of all tokens; without pages each sequence has memory for its maximum length.
    Dense(Option<PagedMemory>),
    /// Attention on codes of all tokens.
    Codes { quantizers: Pair<PqShape>, rows: CodedRows, pages: Option<PagedMemory> },
    /// Codes of all tokens and exact rows of a few, in one softmax.
    Hybrid(HybridPlan, Option<Heads<TransformedHead>>),
    /// Exact rows that codes of their keys select.
    Retrieval(Retrieval, Option<Heads<CodebookBuf>>),
    /// Rows of reduced rank.
    Cuts(DeviceCuts, Option<Heads<CutHead>>),
    /// Rows as a bitstream, with the planes of every layer.
    Bitstream(Bitstream, Option<Vec<Pair<PlaneBuf>>>),
    /// Uniform codes: 4-bit keys per channel over 64 tokens, 4-bit values per token over 64 channels.
    Int4,
}

/// The rows that are coded.
pub(crate) enum CodedRows {
    /// Those of the model.
    Plain(Option<Heads<Pair<CodebookBuf>>>),
    /// Rows in another basis.
    Transformed(RowForm, Option<Heads<TransformedHead>>),
}

/// The form of transformed rows that is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowForm {
    /// Whether the rotated mean is subtracted from keys.
    pub rotated_mean: bool,
    /// Whether keys and values are divided by their norms, which are stored.
    pub norms: bool,
}

/// One head's codes of transformed rows.
pub(crate) struct TransformedHead {
    pub codebooks: Pair<CodebookBuf>,
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

/// Columns of a head's maps (head_dim, head_dim): of keys and queries to a basis that preserves scores, and
/// of values to theirs.
pub(crate) struct HeadMaps {
    pub keys: Vec<f32>,
    pub queries: Vec<f32>,
    pub values: Vec<f32>,
}

/// Hybrid attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HybridPlan {
    pub quantizers: Pair<PqShape>,
    pub form: RowForm,
    /// The rows per step, or their maximum.
    pub budget: Budget,
    /// The error bound that sets the number of rows per head, if there is one.
    pub bound: Option<f32>,
    pub home: RowHome,
    /// Rows per head that stay resident on the device, if a step selects fewer.
    pub held: usize,
}

/// Attention over exact rows retrieved by codes of their keys.
#[derive(Clone, Debug)]
pub(crate) struct Retrieval {
    pub quantizer: PqShape,
    pub budget: Budget,
    /// Iterations for codebooks trained on the prompt; `None` for the profile's codebooks.
    pub training: Option<usize>,
    pub home: RowHome,
    /// Rows per head that stay resident on the device, if a step selects fewer.
    pub held: usize,
}

/// Location and format of exact rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowHome {
    Device,
    Host,
    /// Host memory, 8 bits.
    HostInt8,
}

/// Attention to rows of reduced rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceCuts {
    /// Fractions of the dimensions to keep.
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
pub(crate) struct CutHead {
    pub maps: HeadMaps,
    pub ranks: Pair<usize>,
}

/// Rows stored as a bitstream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bitstream {
    /// Whether planes have a transform.
    pub has_transform: bool,
    /// The kind of their models.
    pub models: ModelKind,
}
