//! The weights of a model on the device, in the order in which products read them.

mod parts;
mod random;
mod store;

use kv_device::{Allocating, Buffer, Gpu};
use kv_gpu::pq::Prefetch;
use kv_gpu::{DevicePtr, Element, Program};
use kv_model::{Config, LayerAttention, Model};

use crate::gemv::MOST_COLUMNS;
use crate::ranks::Shard;
use crate::{Error, Result};
use parts::{LayerParts, Part};
pub use random::{RANDOM_MODELS, random_config};
use store::Store;

/// `pack` and `unpack`.
pub(super) fn program(element: Element) -> Program {
    Program::own("weights.cu", include_str!("kernels/weights.cu"), &[], &[("ELEMENT", element as usize)])
}

/// How the matrices of a model lie on a device. There is one copy of them, in the order that one kind of
/// product reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// As fragments of tensor cores, for a step of up to 32 sequences, whose products are fused with the
    /// operations between them. Prompts of more than 32 tokens in all unpack a layer at a time.
    Packed,
    /// Row by row, for the GEMMs of cuBLASLt: steps of up to 512 sequences, and prompts.
    Rows,
}

impl WeightLayout {
    /// The faster layout for steps of a batch: on an H200 steps of 16 sequences take as long with either.
    #[must_use]
    pub const fn of_batch(batch: usize) -> Self {
        if batch <= 16 { Self::Packed } else { Self::Rows }
    }

    /// Maximum sequences of a step.
    #[must_use]
    pub const fn most_sequences(self) -> usize {
        match self {
            Self::Packed => MOST_COLUMNS,
            Self::Rows => 512,
        }
    }
}

/// How the rows of a packed matrix are paired: `order` of `kernels/weights.cu`.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    Rows = 0,
    GateUp = 1,
    Heads = 2,
}

/// A matrix (rows, n_in), in the layout of the model's weights.
pub(crate) struct DeviceMatrix {
    pub weight: Buffer<u16>,
    pub bias: Option<Buffer<f32>>, // (rows,)
    pub rows: usize,
    pub n_in: usize,
    pub order: Order, // if packed
}

impl DeviceMatrix {
    fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// The range that its product reads.
    pub fn read(&self) -> Prefetch {
        Prefetch { bytes: self.weight.pointer().cast(), len: self.bytes() }
    }

    pub fn bias(&self) -> Option<DevicePtr<f32>> {
        self.bias.as_ref().map(Buffer::pointer)
    }
}

pub(crate) struct LayerWeights {
    pub attention_norm: Buffer<f32>,
    pub qkv: DeviceMatrix,
    pub o: DeviceMatrix,
    pub feed_forward_norm: Buffer<f32>,
    pub gate_up: DeviceMatrix,
    pub down: DeviceMatrix,
}

/// A model on the device, or a rank's part of one, in 16 bits.
pub struct Weights {
    /// Its name.
    pub name: String,
    /// Its shape: that of the part.
    pub config: Config,
    /// The part.
    pub shard: Shard,
    /// Type of weights and activations.
    pub element: Element,
    /// The order of its matrices.
    pub layout: WeightLayout,
    pub(crate) embedding: Buffer<u16>, // (vocab_size, hidden_size)
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) norm: Buffer<f32>,
    pub(crate) output: DeviceMatrix, // the rank's rows
}

impl Weights {
    /// Rejects the shape of a model that the device does not support.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check(config: &Config) -> Result<()> {
        checked(config.clone()).map(drop)
    }

    /// Copies a model to the device, with the biases of the feed-forward block and of attention.
    ///
    /// # Errors
    /// [`Error::Argument`] for heads that no device cache supports; [`Error::Device`].
    pub fn of(gpu: &Gpu, model: &Model, element: Element, layout: WeightLayout) -> Result<Self> {
        Self::shard_of(gpu, model, element, layout, Shard::WHOLE)
    }

    /// Copies a rank's part of a model to its device: the rows of queries, keys, values, gate, up and of the
    /// output that are its own, the columns of `W_O` and `W_down`, and all of the embedding. Ranks that share
    /// a KV head all hold its rows of keys and values.
    ///
    /// # Errors
    /// As [`Self::of`], and [`Error::Argument`] for a model that cannot be divided ([`Shard::config`]).
    pub fn shard_of(
        gpu: &Gpu,
        model: &Model,
        element: Element,
        layout: WeightLayout,
        shard: Shard,
    ) -> Result<Self> {
        let _purpose = Allocating::new("weights");
        let config = checked(shard.config(&model.config)?)?;
        let store = Store::new(gpu, element, layout, config.head_dim)?;
        let mut rows = vec![]; // of a matrix at a time
        let layers = model.layers.iter().map(|layer| {
            let (attention, feed_forward) = (&layer.attention, &layer.feed_forward);
            let LayerParts { qkv, o, gate_up, down } = LayerParts::of(layer, &model.config, shard);
            Ok(LayerWeights {
                attention_norm: Buffer::of(gpu, &attention.norm)?,
                qkv: store.parts(&qkv, Order::Heads, &mut rows)?,
                o: store.parts(&[o], Order::Rows, &mut rows)?,
                feed_forward_norm: Buffer::of(gpu, &feed_forward.norm)?,
                gate_up: store.parts(&gate_up, Order::GateUp, &mut rows)?,
                down: store.parts(&[down], Order::Rows, &mut rows)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let output = Part::of(&model.output, shard.of(config.vocab_size));
        let output = store.parts(&[output], Order::Rows, &mut rows)?;
        Ok(Self {
            name: model.name.clone(),
            shard,
            element,
            layout,
            embedding: store.table(&model.embedding, &mut rows)?,
            layers,
            norm: Buffer::of(gpu, &model.norm)?,
            output,
            config,
        })
    }

    /// A model of one of [`RANDOM_MODELS`], whose weights are [hashed](kv_device::hashed): tensor 0 is the
    /// embedding, 1 the output projection; layer `l` has 2 + 4 l (rows of q, k and v), 3 + 4 l (o), 4 + 4 l
    /// (gate and up) and 5 + 4 l (down). Elements are counted row by row. Norms are ones. `llama-3.1-70b/8`
    /// is one of eight shards of tensor parallelism, without their communication.
    ///
    /// # Errors
    /// [`Error::Argument`] for another name; [`Error::Device`].
    pub fn random(gpu: &Gpu, name: &str, element: Element, layout: WeightLayout) -> Result<Self> {
        Self::random_shard(gpu, name, element, layout, Shard::WHOLE)
    }

    /// As [`Self::random`], of the shape of a rank's part, to time it: all ranks have the same numbers.
    ///
    /// # Errors
    /// As [`Self::random`], and [`Error::Argument`] for a model that cannot be divided ([`Shard::config`]).
    pub fn random_shard(
        gpu: &Gpu,
        name: &str,
        element: Element,
        layout: WeightLayout,
        shard: Shard,
    ) -> Result<Self> {
        let _purpose = Allocating::new("weights");
        let config = checked(shard.config(&random_config(name)?)?)?;
        let store = Store::new(gpu, element, layout, config.head_dim)?;
        let (hidden, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab_size);
        let ones = || Buffer::of(gpu, &vec![1.0; hidden]);
        let layers = (0..config.n_layers as u32).map(|l| {
            Ok(LayerWeights {
                attention_norm: ones()?,
                qkv: store.hashed(2 + 4 * l, Order::Heads, config.q_dim() + 2 * config.kv_dim(), hidden)?,
                o: store.hashed(3 + 4 * l, Order::Rows, hidden, config.q_dim())?,
                feed_forward_norm: ones()?,
                gate_up: store.hashed(4 + 4 * l, Order::GateUp, 2 * inner, hidden)?,
                down: store.hashed(5 + 4 * l, Order::Rows, hidden, inner)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self {
            name: name.to_owned(),
            shard,
            element,
            layout,
            embedding: store.hashed_table(0, vocab * hidden)?,
            layers,
            norm: ones()?,
            output: store.hashed(1, Order::Rows, shard.of(vocab).len(), hidden)?,
            config,
        })
    }

    /// Bytes that a step reads: all matrices but the embedding.
    #[must_use]
    pub fn step_bytes(&self) -> usize {
        let layer = |layer: &LayerWeights| {
            [&layer.qkv, &layer.o, &layer.gate_up, &layer.down].map(DeviceMatrix::bytes)
        };
        self.layers.iter().flat_map(layer).sum::<usize>() + self.output.bytes()
    }
}

/// Rejects shapes that the kernels do not support.
fn checked(config: Config) -> Result<Config> {
    let config = config.validated().map_err(Error::Argument)?;
    let sizes = [config.hidden_size, config.intermediate_size, config.q_dim()];
    if !matches!(config.head_dim, 64 | 128) || config.gqa_group() > 16 || sizes.iter().any(|n| n % 8 != 0) {
        return Err(Error::Argument(format!(
            "heads of {} components in groups of {}, and {sizes:?} inputs: the device takes heads of 64 or 128 in \
             groups of at most 16, and multiples of 8 (--device cpu takes all)",
            config.head_dim,
            config.gqa_group()
        )));
    }
    if config.qk_norm || config.attention.iter().any(|layer| *layer != LayerAttention::FULL) {
        return Err(Error::Argument(format!(
            "{} normalizes queries and keys, or has layers with a window or without RoPE: the device has neither \
             (--device cpu takes all)",
            config.family
        )));
    }
    Ok(config)
}
