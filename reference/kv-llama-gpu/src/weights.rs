//! The weights of a model on the device, packed for the products of a decode step.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use kv_device::{Allocating, Buffer, Gpu, fill_hashed};
use kv_gpu::pq::Prefetch;
use kv_gpu::{DevicePtr, Element, Grid, Kernel, Program};
use kv_model::{Config, LayerAttention, Linear, Matrix, Model, RopeScaling};
use rayon::prelude::*;

use crate::{Error, Result};

/// Models that are shapes only; their weights are hashes of their index and need no storage.
pub const RANDOM_MODELS: [&str; 3] = ["llama-2-7b", "llama-3.1-8b", "llama-3.1-70b/8"];

/// Amplitude of hashed weights: a standard deviation of 0.02.
const AMPLITUDE: f32 = 0.034_641_016;

/// `pack` and `unpack`.
pub(super) fn program(element: Element) -> Program {
    Program::own("weights.cu", include_str!("kernels/weights.cu"), &[], &[("ELEMENT", element as usize)])
}

/// How the rows of a matrix are paired: `order` of `kernels/weights.cu`.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    Rows = 0,
    GateUp = 1,
    Heads = 2,
}

/// A matrix (rows, n_in) in the order in which `kernels/gemv.cu` reads it.
pub(crate) struct Packed {
    pub weight: Buffer<u16>,
    pub bias: Option<Buffer<f32>>, // (rows,)
    pub rows: usize,
    pub n_in: usize,
    pub order: Order,
}

impl Packed {
    fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// The range that its product reads.
    pub fn read(&self) -> Prefetch {
        Prefetch { bytes: self.weight.pointer().cast(), len: self.bytes() }
    }
}

pub(crate) struct LayerWeights {
    pub attention_norm: Buffer<f32>,
    pub qkv: Packed,
    pub o: Packed,
    pub feed_forward_norm: Buffer<f32>,
    pub gate_up: Packed,
    pub down: Packed,
}

/// A model on the device, in 16 bits.
pub struct Weights {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub config: Config,
    /// Type of weights and activations.
    pub element: Element,
    pub(crate) embedding: Buffer<u16>, // (vocab_size, hidden_size)
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) norm: Buffer<f32>,
    pub(crate) output: Packed,
}

/// The source of a matrix's elements.
enum Source<'a> {
    Rows(&'a [f32]),
    Hashed(u32),
}

/// The kernel that packs.
struct Packer<'a> {
    gpu: &'a Gpu,
    element: Element,
    pack: Kernel,
    head_dim: usize,
}

/// Numbers that a thread decodes at a time.
const DECODED: usize = 1 << 16;

/// Rows of a matrix that a thread decodes at a time.
fn rows_at_once(matrix: &Matrix) -> usize {
    (DECODED / matrix.n_in()).max(1)
}

/// Replaces `rows` by those of matrices, one matrix after the other.
fn decode(matrices: &[&Matrix], rows: &mut Vec<f32>) {
    let len = |matrix: &Matrix| matrix.n_out() * matrix.n_in();
    rows.resize(matrices.iter().map(|matrix| len(matrix)).sum(), 0.0);
    let mut rest = rows.as_mut_slice();
    for matrix in matrices {
        let (rows, others) = rest.split_at_mut(len(matrix));
        let some = rows_at_once(matrix);
        let parts = rows.par_chunks_mut(some * matrix.n_in()).enumerate();
        parts.for_each(|(i, rows)| matrix.rows_into(i * some, rows));
        rest = others;
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PackArguments {
    rows: Option<DevicePtr<f32>>,
    out: DevicePtr<u16>,
    n_rows: u32,
    n_in: u32,
    order: u32,
    head_dim: u32,
    tensor: u32,
    amplitude: f32,
}

const _: () = assert!(size_of::<PackArguments>() == 40);

impl<'a> Packer<'a> {
    fn new(gpu: &'a Gpu, element: Element, head_dim: usize) -> Result<Self> {
        Ok(Self { gpu, element, pack: gpu.device().kernel(&program(element), "pack", 0)?, head_dim })
    }

    fn pack(&self, source: &Source<'_>, order: Order, rows: usize, n_in: usize) -> Result<Packed> {
        let (tiles, chunks) = (rows.div_ceil(16), n_in.div_ceil(64));
        let weight = Buffer::zeros(self.gpu, tiles * chunks * 1024)?;
        let (given, tensor) = match source {
            Source::Rows(rows) => (Some(Buffer::of(self.gpu, rows)?), 0),
            Source::Hashed(tensor) => (None, *tensor),
        };
        let arguments = PackArguments {
            rows: given.as_ref().map(Buffer::pointer),
            out: weight.pointer(),
            n_rows: rows as u32,
            n_in: n_in as u32,
            order: order as u32,
            head_dim: self.head_dim as u32,
            tensor,
            amplitude: AMPLITUDE,
        };
        // SAFETY: the kernel writes tiles * chunks * 1024 elements, which `weight` has, and reads rows *
        // n_in, which are given.
        unsafe {
            self.pack.launch(self.gpu.stream(), Grid::new([chunks, tiles, 1])?, 256, false, &arguments)
        }?;
        self.gpu.synchronize()?; // before the rows are dropped
        Ok(Packed { weight, bias: None, rows, n_in, order })
    }

    /// Linear layers stacked into one matrix, of which `rows` has the numbers afterwards.
    fn linears(&self, linears: &[&Linear], order: Order, rows: &mut Vec<f32>) -> Result<Packed> {
        decode(&linears.iter().map(|linear| &linear.weight).collect::<Vec<_>>(), rows);
        let n_out = linears.iter().map(|linear| linear.n_out()).sum();
        let packed = self.pack(&Source::Rows(rows), order, n_out, linears[0].n_in())?;
        let biases = linears.iter().any(|linear| linear.bias.is_some()).then(|| {
            let bias = |linear: &&Linear| linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.n_out()]);
            linears.iter().flat_map(bias).collect::<Vec<f32>>()
        });
        let bias = biases.map(|bias| Buffer::of(self.gpu, &bias)).transpose()?;
        Ok(Packed { bias, ..packed })
    }

    fn hashed_table(&self, tensor: u32, len: usize) -> Result<Buffer<u16>> {
        let table = Buffer::zeros(self.gpu, len)?;
        fill_hashed(self.gpu, self.element, &table, tensor, AMPLITUDE)?;
        Ok(table)
    }

    /// A matrix in 16 bits, row by row.
    fn table(&self, matrix: &Matrix) -> Result<Buffer<u16>> {
        let mut bits = vec![0_u16; matrix.n_out() * matrix.n_in()];
        let some = rows_at_once(matrix);
        let parts = bits.par_chunks_mut(some * matrix.n_in()).enumerate();
        parts.for_each_init(Vec::new, |rows, (i, bits)| {
            rows.resize(bits.len(), 0.0);
            matrix.rows_into(i * some, rows);
            match self.element {
                Element::F16 => bits.reinterpret_cast_mut::<f16>().convert_from_f32_slice(rows),
                Element::Bf16 => bits.reinterpret_cast_mut::<bf16>().convert_from_f32_slice(rows),
            }
        });
        let table = Buffer::of(self.gpu, &bits)?;
        self.gpu.synchronize()?;
        Ok(table)
    }
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
    pub fn of(gpu: &Gpu, model: &Model, element: Element) -> Result<Self> {
        let _purpose = Allocating::new("weights");
        let config = checked(model.config.clone())?;
        let packer = Packer::new(gpu, element, config.head_dim)?;
        let mut rows = vec![]; // of a matrix at a time
        let layers = model.layers.iter().map(|layer| {
            let (attention, feed_forward) = (&layer.attention, &layer.feed_forward);
            Ok(LayerWeights {
                attention_norm: Buffer::of(gpu, &attention.norm)?,
                qkv: packer.linears(&[&attention.q, &attention.k, &attention.v], Order::Heads, &mut rows)?,
                o: packer.linears(&[&attention.o], Order::Rows, &mut rows)?,
                feed_forward_norm: Buffer::of(gpu, &feed_forward.norm)?,
                gate_up: packer.linears(&[&feed_forward.gate, &feed_forward.up], Order::GateUp, &mut rows)?,
                down: packer.linears(&[&feed_forward.down], Order::Rows, &mut rows)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        decode(&[&model.output], &mut rows);
        let output = packer.pack(&Source::Rows(&rows), Order::Rows, config.vocab_size, config.hidden_size)?;
        Ok(Self {
            name: model.name.clone(),
            element,
            embedding: packer.table(&model.embedding)?,
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
    pub fn random(gpu: &Gpu, name: &str, element: Element) -> Result<Self> {
        Self::hashed(gpu, name, random_config(name)?, element)
    }

    /// A model of this shape whose weights are hashed, without biases.
    pub(super) fn hashed(gpu: &Gpu, name: &str, config: Config, element: Element) -> Result<Self> {
        let _purpose = Allocating::new("weights");
        let config = checked(config)?;
        let packer = Packer::new(gpu, element, config.head_dim)?;
        let (hidden, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab_size);
        let pack = |tensor, order, rows, n_in| packer.pack(&Source::Hashed(tensor), order, rows, n_in);
        let ones = || Buffer::of(gpu, &vec![1.0; hidden]);
        let layers = (0..config.n_layers as u32).map(|l| {
            Ok(LayerWeights {
                attention_norm: ones()?,
                qkv: pack(2 + 4 * l, Order::Heads, config.q_dim() + 2 * config.kv_dim(), hidden)?,
                o: pack(3 + 4 * l, Order::Rows, hidden, config.q_dim())?,
                feed_forward_norm: ones()?,
                gate_up: pack(4 + 4 * l, Order::GateUp, 2 * inner, hidden)?,
                down: pack(5 + 4 * l, Order::Rows, hidden, inner)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self {
            name: name.to_owned(),
            element,
            embedding: packer.hashed_table(0, vocab * hidden)?,
            layers,
            norm: ones()?,
            output: pack(1, Order::Rows, vocab, hidden)?,
            config,
        })
    }

    /// Bytes that a step reads: all matrices but the embedding.
    #[must_use]
    pub fn step_bytes(&self) -> usize {
        let layer =
            |layer: &LayerWeights| [&layer.qkv, &layer.o, &layer.gate_up, &layer.down].map(Packed::bytes);
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

fn random_config(name: &str) -> Result<Config> {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_seq_len: 8192.0,
    };
    // hidden, intermediate, layers, heads, key/value heads, vocabulary
    let (sizes, rope_theta, rope_scaling) = match name {
        "llama-2-7b" => ([4096, 11008, 32, 32, 32, 32000], 10_000.0, RopeScaling::None),
        "llama-3.1-8b" => ([4096, 14336, 32, 32, 8, 128_256], 500_000.0, llama3),
        "llama-3.1-70b/8" => ([8192, 3584, 80, 8, 1, 16032], 500_000.0, llama3),
        _ => {
            return Err(Error::Argument(format!(
                "no random model `{name}`, only {}",
                RANDOM_MODELS.join(", ")
            )));
        }
    };
    let [hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, vocab_size] = sizes;
    Ok(Config {
        family: "llama",
        vocab_size,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim: 128,
        max_seq_len: 1 << 21,
        rms_norm_eps: 1e-5,
        rope_theta,
        rope_scaling,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        tie_word_embeddings: false,
        qk_norm: false,
        attention: vec![LayerAttention::FULL; n_layers],
        eos_tokens: vec![],
    })
}
