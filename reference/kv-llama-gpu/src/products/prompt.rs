//! The products of prompts, by their number of tokens and the layout of the weights.

use kv_device::Buffer;
use kv_gpu::DevicePtr;

use super::Context;
use super::append::Qkv;
use super::fused::{FusedLayers, gemv};
use super::rows::{LayerRows, RowLayers};
use super::unpacked::Unpacked;
use crate::Result;
use crate::gemv::{Gemv, Input, MOST_COLUMNS, Output};
use crate::weights::WeightLayout;

/// Columns of the smallest kernels for few tokens: those of a tile.
const FEWEST_COLUMNS: usize = 8;

/// The products of up to a number of tokens.
pub(crate) enum PromptProducts {
    /// Few tokens, with packed weights.
    Fused { layers: FusedLayers, qkv: Gemv, rows: Buffer<u16> }, // rows (columns, rows of q, k and v)
    /// Any tokens, with rows of weights.
    Rows { layers: RowLayers, unpacked: Option<Unpacked> },
}

impl PromptProducts {
    /// The columns of the kernels that run `tokens` tokens in all with packed weights as they are; none if
    /// they run with rows.
    pub const fn columns(layout: WeightLayout, tokens: usize) -> Option<usize> {
        match layout {
            WeightLayout::Packed if tokens <= FEWEST_COLUMNS => Some(FEWEST_COLUMNS),
            WeightLayout::Packed if tokens <= MOST_COLUMNS => Some(tokens.next_power_of_two()),
            _ => None,
        }
    }

    /// Those of a number of [`Self::columns`].
    pub fn fused(context: &Context<'_>, columns: usize) -> Result<Self> {
        let config = &context.weights.config;
        let (hidden, rows) = (config.hidden_size, config.q_dim() + 2 * config.kv_dim());
        Ok(Self::Fused {
            layers: FusedLayers::new(context, columns, 0)?,
            qkv: gemv(context, hidden, (columns, 0), (Input::Residual, Output::Heads))?,
            rows: Buffer::zeros(context.gpu, columns * rows)?,
        })
    }

    /// Those with rows, of up to `tokens` tokens at a time.
    pub fn rows(context: &Context<'_>, tokens: usize) -> Result<Self> {
        let unpacked = match context.weights.layout {
            WeightLayout::Packed => Some(Unpacked::new(context)?),
            WeightLayout::Rows => None,
        };
        Ok(Self::Rows { layers: RowLayers::new(context, tokens)?, unpacked })
    }

    /// Prepares the first layer of tokens that have been embedded.
    pub fn begin(&self, context: &Context<'_>, residual: DevicePtr<f32>, count: usize) -> Result<()> {
        match (self, context.weights.layers.first()) {
            (Self::Fused { layers, .. }, Some(first)) => {
                layers.prepare(context, &first.attention_norm, residual, count)
            }
            _ => Ok(()),
        }
    }

    /// Prepares layer `l` for all tokens that run through it.
    pub fn begin_layer(&self, context: &Context<'_>, l: usize) -> Result<()> {
        match self {
            Self::Rows { unpacked: Some(unpacked), .. } => unpacked.unpack(context, l),
            _ => Ok(()),
        }
    }

    /// Queries, keys and values of layer `l`.
    pub fn qkv(
        &self,
        context: &Context<'_>,
        l: usize,
        residual: DevicePtr<f32>,
        count: usize,
    ) -> Result<Qkv> {
        match self {
            Self::Fused { layers, qkv, rows } => {
                let elements = rows.pointer();
                let matrix = &context.weights.layers[l].qkv;
                layers.normed(context, qkv, matrix, count, |a| a.out = Some(elements))?;
                Ok(Qkv { elements, bias: None }) // it has been added
            }
            Self::Rows { layers, unpacked } => {
                layers.qkv(context, l, &rows_of(context, unpacked.as_ref(), l), residual, count)
            }
        }
    }

    /// The part of layer `l` after attention.
    pub fn after_attention(
        &self,
        context: &Context<'_>,
        l: usize,
        (residual, attended): (DevicePtr<f32>, DevicePtr<u16>),
        count: usize,
    ) -> Result<()> {
        match self {
            Self::Fused { layers, .. } => layers.after_attention(context, l, residual, attended, count),
            Self::Rows { layers, unpacked } => {
                let rows = rows_of(context, unpacked.as_ref(), l);
                layers.after_attention(context, l, &rows, (residual, attended), count)
            }
        }
    }
}

/// The matrices of layer `l`, which has been unpacked if it must be.
fn rows_of(context: &Context<'_>, unpacked: Option<&Unpacked>, l: usize) -> LayerRows {
    unpacked.map_or_else(|| LayerRows::of(&context.weights.layers[l]), Unpacked::rows)
}
