//! The products of a step, by the layout of the weights.

use kv_device::Rows;
use kv_gpu::DevicePtr;

use super::Context;
use super::append::Append;
use super::fused::{FusedLayers, gemv};
use super::rows::{LayerRows, RowLayers};
use crate::Result;
use crate::gemv::{Gemv, Input, Output};
use crate::weights::WeightLayout;

/// Where a step's queries, keys and values go. Positions are below the capacity of the tables of angles, and
/// slots are rows of the cache.
pub(crate) struct StepRows {
    pub queries: DevicePtr<u16>,     // (batch, n_heads, head_dim)
    pub rows: Rows,                  // of the layer
    pub angles: [DevicePtr<f32>; 2], // cosines and sines (capacity, head_dim / 2)
    pub positions: DevicePtr<u32>,   // (batch,)
    pub slots: DevicePtr<u32>,       // (batch,)
}

/// The products of a batch's steps.
pub(crate) enum StepProducts {
    /// With packed weights.
    Fused { layers: Box<FusedLayers>, qkv: Gemv, output: Gemv },
    /// With rows.
    Rows { layers: Box<RowLayers>, append: Append },
}

impl StepProducts {
    /// `reserved` bytes of a multiprocessor's shared memory stay free for other kernels. The buffers are
    /// zeros, as a product's first launch needs them.
    pub fn new(
        context: &Context<'_>,
        batch: usize,
        reserved: usize,
        (residual, attended): (DevicePtr<f32>, DevicePtr<u16>),
        logits: DevicePtr<f32>,
    ) -> Result<Self> {
        let hidden = context.weights.config.hidden_size;
        let gemv = |output| gemv(context, hidden, (batch, reserved), (Input::Residual, output));
        match context.weights.layout {
            WeightLayout::Packed => Ok(Self::Fused {
                layers: Box::new(FusedLayers::new(context, batch, reserved)?),
                qkv: gemv(Output::Rope)?,
                output: gemv(Output::Store)?,
            }),
            WeightLayout::Rows => {
                let layers = Box::new(RowLayers::new(context, batch)?);
                layers.warm_up(context, residual, attended, logits, batch)?;
                Ok(Self::Rows { layers, append: Append::new(context)? })
            }
        }
    }

    /// The buffers in which the step's first kernel prepares the first norm; none if that is a kernel of its
    /// own.
    pub fn prepared(&self) -> Option<(DevicePtr<u16>, DevicePtr<f32>)> {
        match self {
            Self::Fused { layers, .. } => Some((layers.scaled.pointer(), layers.squares.pointer())),
            Self::Rows { .. } => None,
        }
    }

    /// Queries, rotated, and the rows of keys and values of layer `l`.
    pub fn qkv(
        &self,
        context: &Context<'_>,
        l: usize,
        residual: DevicePtr<f32>,
        to: &StepRows,
        batch: usize,
    ) -> Result<()> {
        let (layer, config) = (&context.weights.layers[l], &context.weights.config);
        match self {
            Self::Fused { layers, qkv, .. } => layers.normed(context, qkv, &layer.qkv, batch, |a| {
                a.out = Some(to.queries);
                (a.keys, a.values) = (Some(to.rows.keys), Some(to.rows.values));
                let [cos, sin] = to.angles;
                (a.cos, a.sin) = (Some(cos), Some(sin));
                (a.positions, a.slots) = (Some(to.positions), Some(to.slots));
                (a.query_heads, a.heads) = (config.n_heads as u32, config.n_kv_heads as u32);
                a.capacity = to.rows.capacity as u32;
            }),
            Self::Rows { layers, append } => {
                let qkv = layers.qkv(context, l, &LayerRows::of(layer), residual, batch)?;
                // SAFETY: the sequences are those of the batch, within the capacity of their cache.
                unsafe { append.step(context, qkv, to, batch) }
            }
        }
    }

    /// The part of layer `l` after attention.
    pub fn after_attention(
        &self,
        context: &Context<'_>,
        l: usize,
        (residual, attended): (DevicePtr<f32>, DevicePtr<u16>),
        batch: usize,
    ) -> Result<()> {
        match self {
            Self::Fused { layers, .. } => layers.after_attention(context, l, residual, attended, batch),
            Self::Rows { layers, .. } => {
                let rows = LayerRows::of(&context.weights.layers[l]);
                layers.after_attention(context, l, &rows, (residual, attended), batch)
            }
        }
    }

    /// Logits (batch, vocab_size) of the residual stream.
    pub fn logits(
        &self,
        context: &Context<'_>,
        residual: DevicePtr<f32>,
        logits: DevicePtr<f32>,
        batch: usize,
    ) -> Result<()> {
        let (weights, vocab) = (context.weights, context.weights.config.vocab_size);
        match self {
            Self::Fused { layers, output, .. } => {
                layers.normed(context, output, &weights.output, batch, |a| {
                    a.residual = Some(logits.offset(weights.shard.of(vocab).start));
                    a.stride = vocab as u32;
                })
            }
            Self::Rows { layers, .. } => layers.logits(context, residual, logits, batch),
        }?;
        context.gather(logits, batch)
    }
}
