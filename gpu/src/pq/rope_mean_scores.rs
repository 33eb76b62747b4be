//! The scores of the mean that was subtracted from keys before RoPE, as addends of attention.

use cudarc::driver::sys::CUstream;
use half::f16;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Element, Error, Program};

/// `WARPS` of the kernel.
const WARPS: usize = 8;
/// Queries and tiles of a warp's unit of work: `UNIT_ROWS` and `UNIT_SPANS * SPAN_TILES` of the kernel.
const UNIT: (usize, usize) = (8, 16);

/// Compile-time shape of [`RopeMeanScores`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeMeanScoresShape {
    /// Components of a key: 64 or 128.
    pub dim: usize,
    /// Query heads per KV head: 1 to 16.
    pub group: usize,
    /// Element type of the queries.
    pub element: Element,
}

impl RopeMeanScoresShape {
    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        if !matches!(self.dim, 64 | 128) || self.group == 0 || self.group > 16 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "dim 64 or 128, and 1 to 16 query heads per key/value head",
            });
        }
        let defines = [("HEAD_DIM", self.dim), ("GROUP", self.group), ("ELEMENT", self.element as usize)];
        Ok(Program::new(source!("pq_rope_mean_scores.cu"), &defines))
    }
}

const OPERATION: Operation = Operation("pq::RopeMeanScores");

/// Pointers and sizes of one launch of [`RopeMeanScores`].
#[derive(Clone, Copy, Debug)]
pub struct RopeMeanScoresArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Capacity of a sequence in tiles of [`TILE`](super::TILE) tokens.
    pub tiles: usize,
    /// `f32` (heads, dim): means of the keys before RoPE.
    pub means: DevicePtr<f32>,
    /// `f32` (dim / 2,): radians per position of the pair of components `i` and `i + dim / 2`.
    pub frequencies: DevicePtr<f32>,
    /// Position of the first coded token of every sequence. The others follow it one by one.
    pub first: usize,
    /// Elements (batch, heads, group, dim): queries after RoPE, in the basis of the means.
    pub queries: DevicePtr<AnyElement>,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernel reads them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// Factor of the scores: `1 / sqrt(dim)`.
    pub scale: f32,
    /// `f16` (batch, heads, tiles, group, [`TILE`](super::TILE)), written in whole tiles up to the length:
    /// [`Addends`](super::Addends).
    pub addends: DevicePtr<f16>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read means, frequencies and lengths *before* they wait for it
    /// (`griddepcontrol.wait`), so that kernel must not write these. They read the queries after the wait.
    pub pdl: bool,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    means: DevicePtr<f32>,
    frequencies: DevicePtr<f32>,
    queries: DevicePtr<AnyElement>,
    lengths: DevicePtr<u32>,
    addends: DevicePtr<f16>,
    first: u64,
    batch: u32,
    heads: u32,
    tiles: u32,
    scale: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 64);

/// The part of the scores that comes from a mean of the keys before RoPE, `pq_core::RopeMean::scores_into`:
/// `<query, R(position) mean> * scale` for every coded token, as [`Addends`](super::Addends).
///
/// A launch allocates nothing and does not synchronize, and a captured graph stays valid. The same inputs
/// give the same bytes. A query with a component that is not finite has addends that are not finite.
///
/// An addend is rounded to `f16`. Its error is up to 2^-9 of the root of the sum of its pairs' squared
/// amplitudes, since cosines, sines and coefficients are `f16`.
///
/// # Cost
/// dim / 2 multiply-adds per addend, on tensor cores in f16 with sums in f32. The mean's pairs are rotated in
/// `f32`, from angles that are exact to 2^-32 of a turn at any position.
/// # Source
/// Su et al., RoFormer (arXiv 2104.09864), 3.2.
pub struct RopeMeanScores {
    kernel: Kernel,
    shape: RopeMeanScoresShape,
    sm_count: usize,
}

impl RopeMeanScores {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: RopeMeanScoresShape) -> Result<Self, Error> {
        let kernel = device.kernel(&shape.program()?, "pq_rope_mean_scores", 0)?;
        Ok(Self { kernel, shape, sm_count: device.sm_count() })
    }

    /// Launches the computation of the addends on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the tokens that a sequence has room for: the kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &RopeMeanScoresArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.tiles == 0 {
            return Ok(());
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        let group_heads = a.heads.saturating_mul(self.shape.group);
        in_32_bits("tiles of queries", a.batch.saturating_mul(group_heads).saturating_mul(a.tiles))?;
        // Every block has work for at least one warp.
        let units = a.batch * group_heads.div_ceil(UNIT.0) * a.tiles.div_ceil(UNIT.1);
        let grid = OPERATION.grid(&[("blocks", self.sm_count.min(units))])?;
        let kernel_arguments = KernelArguments {
            means: a.means,
            frequencies: a.frequencies,
            queries: a.queries,
            lengths: a.lengths,
            addends: a.addends,
            first: a.first as u64,
            batch: a.batch as u32,
            heads: a.heads as u32,
            tiles: a.tiles as u32,
            scale: a.scale,
        };
        let threads = WARPS as u32 * 32;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, threads, a.pdl, &kernel_arguments) }
    }
}
