//! The weights of a model on the device, packed for the products of a decode step.

use std::ops::Range;

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use kv_device::{Allocating, Buffer, Gpu, fill_hashed};
use kv_gpu::pq::Prefetch;
use kv_gpu::{DevicePtr, Element, Grid, Kernel, Program};
use kv_model::{Config, LayerAttention, Linear, Matrix, Model, RopeScaling};
use rayon::prelude::*;

use crate::ranks::Shard;
use crate::{Error, Result};

/// Models that are shapes only; their weights are hashes of their index and need no storage.
pub const RANDOM_MODELS: [&str; 4] = ["llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-70b/8"];

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
    pub(crate) embedding: Buffer<u16>, // (vocab_size, hidden_size)
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) norm: Buffer<f32>,
    pub(crate) output: Packed, // the rank's rows
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

/// Rows and columns of a matrix, and the bias of the rows.
struct Part<'a> {
    matrix: &'a Matrix,
    bias: Option<&'a [f32]>,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> Part<'a> {
    fn all(linear: &'a Linear) -> Self {
        let Linear { weight: matrix, bias } = linear;
        Self { matrix, bias: bias.as_deref(), rows: 0..matrix.n_out(), columns: 0..matrix.n_in() }
    }

    /// The rank's rows: its outputs.
    fn rows(linear: &'a Linear, shard: Shard) -> Self {
        let all = Self::all(linear);
        Self { rows: shard.of(all.rows.len()), bias: all.bias.map(|bias| &bias[shard.of(bias.len())]), ..all }
    }

    /// The rank's columns: its inputs. The product is a part of a sum, to which the bias is added once.
    fn columns(linear: &'a Linear, shard: Shard) -> Self {
        let all = Self::all(linear);
        Self { columns: shard.of(all.columns.len()), ..all }
    }

    fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Rows from the `first` of the part on, as many as `out` has.
    fn rows_into(&self, first: usize, whole: &mut Vec<f32>, out: &mut [f32]) {
        let (first, n_in) = (self.rows.start + first, self.matrix.n_in());
        if self.columns.len() == n_in {
            return self.matrix.rows_into(first, out);
        }
        whole.resize(out.len() / self.columns.len() * n_in, 0.0);
        self.matrix.rows_into(first, whole);
        for (out, row) in out.chunks_exact_mut(self.columns.len()).zip(whole.chunks_exact(n_in)) {
            out.copy_from_slice(&row[self.columns.clone()]);
        }
    }
}

/// Replaces `rows` by those of parts, one part after the other.
fn decode(parts: &[Part], rows: &mut Vec<f32>) {
    rows.resize(parts.iter().map(Part::len).sum(), 0.0);
    let mut rest = rows.as_mut_slice();
    for part in parts {
        let (rows, others) = rest.split_at_mut(part.len());
        let some = rows_at_once(part.matrix);
        let chunks = rows.par_chunks_mut(some * part.columns.len()).enumerate();
        chunks.for_each_init(Vec::new, |whole, (i, rows)| part.rows_into(i * some, whole, rows));
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

    /// Parts of linear layers stacked into one matrix, of which `rows` has the numbers afterwards.
    fn parts(&self, parts: &[Part], order: Order, rows: &mut Vec<f32>) -> Result<Packed> {
        decode(parts, rows);
        let n_out = parts.iter().map(|part| part.rows.len()).sum();
        let packed = self.pack(&Source::Rows(rows), order, n_out, parts[0].columns.len())?;
        let biases = parts.iter().any(|part| part.bias.is_some()).then(|| {
            let bias = |part: &Part| part.bias.map_or_else(|| vec![0.0; part.rows.len()], <[f32]>::to_vec);
            parts.iter().flat_map(bias).collect::<Vec<f32>>()
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
        Self::shard_of(gpu, model, element, Shard::WHOLE)
    }

    /// Copies a rank's part of a model to its device: the rows of queries, keys, values, gate, up and of the
    /// output that are its own, the columns of `W_O` and `W_down`, and all of the embedding.
    ///
    /// # Errors
    /// As [`Self::of`], and [`Error::Argument`] for a model that cannot be divided ([`Shard::config`]).
    pub fn shard_of(gpu: &Gpu, model: &Model, element: Element, shard: Shard) -> Result<Self> {
        let _purpose = Allocating::new("weights");
        let config = checked(shard.config(&model.config)?)?;
        let packer = Packer::new(gpu, element, config.head_dim)?;
        let mut rows = vec![]; // of a matrix at a time
        let layers = model.layers.iter().map(|layer| {
            let (attention, feed_forward) = (&layer.attention, &layer.feed_forward);
            let qkv = [&attention.q, &attention.k, &attention.v].map(|linear| Part::rows(linear, shard));
            let gate_up = [&feed_forward.gate, &feed_forward.up].map(|linear| Part::rows(linear, shard));
            let columns =
                |linear, rows: &mut _| packer.parts(&[Part::columns(linear, shard)], Order::Rows, rows);
            Ok(LayerWeights {
                attention_norm: Buffer::of(gpu, &attention.norm)?,
                qkv: packer.parts(&qkv, Order::Heads, &mut rows)?,
                o: columns(&attention.o, &mut rows)?,
                feed_forward_norm: Buffer::of(gpu, &feed_forward.norm)?,
                gate_up: packer.parts(&gate_up, Order::GateUp, &mut rows)?,
                down: columns(&feed_forward.down, &mut rows)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let (matrix, columns) = (&model.output, 0..config.hidden_size);
        let output = Part { matrix, bias: None, rows: shard.of(config.vocab_size), columns };
        let output = packer.parts(&[output], Order::Rows, &mut rows)?;
        Ok(Self {
            name: model.name.clone(),
            shard,
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
        Self::random_shard(gpu, name, element, Shard::WHOLE)
    }

    /// As [`Self::random`], of the shape of a rank's part, to time it: all ranks have the same numbers.
    ///
    /// # Errors
    /// As [`Self::random`], and [`Error::Argument`] for a model that cannot be divided ([`Shard::config`]).
    pub fn random_shard(gpu: &Gpu, name: &str, element: Element, shard: Shard) -> Result<Self> {
        let _purpose = Allocating::new("weights");
        let config = checked(shard.config(&random_config(name)?)?)?;
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
            shard,
            element,
            embedding: packer.hashed_table(0, vocab * hidden)?,
            layers,
            norm: ones()?,
            output: pack(1, Order::Rows, shard.of(vocab).len(), hidden)?,
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
        "llama-3.1-70b" => ([8192, 28672, 80, 64, 8, 128_256], 500_000.0, llama3),
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
