//! Transformed rows prepared for the encoders, and rows restored from decoded ones: `kernels/coded_rows.cu`.

use cudarc::driver::CudaStream;
use half::f16;
use kv_attend::owner::{Pair, Side};
use kv_gpu::pq::{Norms, TILE};
use kv_gpu::{DevicePtr, Element, Grid, Kernel, Program};

use super::{TokenCodes, WindowShape};
use crate::Result;
use crate::bases::Bases;
use crate::cache::eviction::Evictions;
use crate::cache::key_means::KeyMeans;
use crate::cache::transformed::TransformedCodes;
use crate::gpu::Gpu;
use crate::ledger::Allocating;
use crate::memory::Buffer;
use crate::rows::{Chunk, Rows};
use crate::shape::CacheShape;

/// Tokens of a tile of the kernels.
const TOKENS: usize = 16;

/// `prepare` and `restore` of rows in another basis: keys with or without subtraction of their rotated mean,
/// rows with or without division by their norms.
pub(crate) fn program(element: Element, head_dim: usize, mean: bool, norms: bool) -> Program {
    let defines = [
        ("ELEMENT", element as usize),
        ("HEAD_DIM", head_dim),
        ("MEAN", mean.into()),
        ("NORMS", norms.into()),
    ];
    Program::own("coded_rows.cu", include_str!("../../kernels/coded_rows.cu"), &[], &defines)
}

/// Maximum blocks per head.
const BLOCKS: usize = 64;

/// The basis in which rows are coded, and the parts removed before coding.
pub(crate) struct Transform {
    pub bases: Bases,
    pub means: Option<KeyMeans>,
    pub norms: Pair<Option<f32>>, // whether rows are divided by their norms, and their factor before
}

impl Transform {
    /// The transform of a method's codes.
    pub fn new(gpu: &Gpu, shape: &CacheShape, codes: &TransformedCodes) -> Result<Self> {
        let means = || KeyMeans::new(gpu, shape, &codes.key_means);
        Ok(Self {
            bases: Bases::new(gpu, shape, &codes.maps)?,
            means: codes.form.rotated_mean.then(means).transpose()?,
            norms: codes.form.norms,
        })
    }

    /// Bytes of maps and means.
    pub(super) fn bytes(&self) -> usize {
        self.bases.bytes() + self.means.as_ref().map_or(0, KeyMeans::shared_bytes)
    }

    /// The kernels of a side; none if nothing is removed before coding.
    pub(super) fn kernels(
        &self,
        gpu: &Gpu,
        element: Element,
        head_dim: usize,
        side: Side,
    ) -> Result<Option<RowKernels>> {
        let mean = side == Side::Keys && self.means.is_some();
        let norms = self.norms[side].is_some();
        if !mean && !norms {
            return Ok(None);
        }
        let program = program(element, head_dim, mean, norms);
        let kernel = |name| gpu.device.kernel(&program, name, 0);
        Ok(Some(RowKernels { prepare: kernel("prepare")?, restore: kernel("restore")? }))
    }
}

/// The kernels of keys or of values.
pub(super) struct RowKernels {
    prepare: Kernel,
    restore: Kernel,
}

/// Rows of consecutive tokens of one sequence or of several.
struct CodedRows {
    sequences: usize,
    sequence: usize,      // the first one
    from: DevicePtr<u16>, // (sequences, heads, from_capacity, head_dim)
    to: DevicePtr<u16>,   // (sequences, heads, to_capacity, head_dim)
    capacities: [usize; 2],
    tokens: Tokens,
}

/// A selection of tokens after the sinks.
#[derive(Clone, Copy)]
enum Tokens {
    /// The tokens of an eviction, `u32` (sequences,) each, and their maximum number.
    Evicted { firsts: DevicePtr<u32>, counts: DevicePtr<u32>, most: usize },
    /// Tokens of one sequence.
    Span { first: usize, count: usize },
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    from: DevicePtr<u16>,
    to: DevicePtr<u16>,
    maps: Option<DevicePtr<u16>>,
    means: Option<DevicePtr<f32>>,
    frequencies: Option<DevicePtr<f32>>,
    norms: Option<DevicePtr<f16>>,
    pages: Option<DevicePtr<u32>>,
    firsts: Option<DevicePtr<u32>>,
    counts: Option<DevicePtr<u32>>,
    first: u32,
    count: u32,
    heads: u32,
    from_capacity: u32,
    to_capacity: u32,
    sinks: u32,
    tiles: u32,
    max_pages: u32,
    gain: f32,
}

const _: () = assert!(size_of::<Arguments>() == 112);

impl TokenCodes {
    /// Prepares the evicted tokens of a layer in place, where they are staged.
    pub(super) fn prepare_evicted(
        &self,
        stream: &CudaStream,
        (side, layer): (Side, usize),
        staged: DevicePtr<u16>,
        evictions: &Evictions,
    ) -> Result<()> {
        let Some(RowKernels { prepare, .. }) = &self.kernels[side] else { return Ok(()) };
        let WindowShape { batch, ring, .. } = self.shape;
        let (firsts, counts) = (evictions.firsts(layer), evictions.counts(layer));
        let rows = CodedRows {
            sequences: batch,
            sequence: 0,
            from: staged,
            to: staged,
            capacities: [ring; 2],
            tokens: Tokens::Evicted { firsts, counts, most: ring },
        };
        self.launch(prepare, stream, (side, layer), &rows)
    }

    /// Allocates rows for the tokens stored at a chunk's end.
    pub(super) fn open_prepared(&mut self, gpu: &Gpu, chunk: &Chunk) -> Result<()> {
        let WindowShape { heads, head_dim, .. } = self.shape;
        let len = heads * self.shape.stored_by(chunk).1 * head_dim;
        if self.kernels.iter().any(Option::is_some)
            && self.prepared.as_ref().is_none_or(|old| old.len() < len)
        {
            let _purpose = Allocating::new("prompts");
            self.prepared = None; // freed before the next allocation
            self.prepared = Some(Buffer::zeros(gpu, len)?);
        }
        Ok(())
    }

    /// Prepares the tokens of a layer stored at a chunk's end for the encoder. Returns the rows of the first
    /// head, and the number of rows per head.
    pub(super) fn prepare_chunk(
        &self,
        stream: &CudaStream,
        (side, layer): (Side, usize),
        chunk: &Chunk,
        all: Rows,
    ) -> Result<(DevicePtr<u16>, usize)> {
        let WindowShape { head_dim, sinks, .. } = self.shape;
        let (first, count) = self.shape.stored_by(chunk);
        let from = all.side(side).cast::<u16>().offset((sinks + first) * head_dim);
        let (Some(RowKernels { prepare, .. }), Some(prepared)) = (&self.kernels[side], &self.prepared) else {
            return Ok((from, all.capacity));
        };
        let rows = CodedRows {
            sequences: 1,
            sequence: chunk.sequence,
            from,
            to: prepared.pointer(),
            capacities: [all.capacity, count],
            tokens: Tokens::Span { first, count },
        };
        self.launch(prepare, stream, (side, layer), &rows)?;
        Ok((prepared.pointer(), count))
    }

    /// Restores rows in place from the decoded codes of the first `count` tokens after the sinks. `rows`
    /// starts at the first of these tokens; a head has `capacity` rows.
    pub fn restore(
        &self,
        gpu: &Gpu,
        (side, layer): (Side, usize),
        sequence: usize,
        count: usize,
        (rows, capacity): (DevicePtr<u16>, usize),
    ) -> Result<()> {
        let Some(RowKernels { restore, .. }) = &self.kernels[side] else { return Ok(()) };
        let rows = CodedRows {
            sequences: 1,
            sequence,
            from: rows,
            to: rows,
            capacities: [capacity; 2],
            tokens: Tokens::Span { first: 0, count },
        };
        self.launch(restore, &gpu.stream, (side, layer), &rows)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        stream: &CudaStream,
        (side, layer): (Side, usize),
        rows: &CodedRows,
    ) -> Result<()> {
        let WindowShape { heads, head_dim, sinks, .. } = self.shape;
        let (firsts, counts, (first, count), most) = match rows.tokens {
            Tokens::Evicted { firsts, counts, most } => (Some(firsts), Some(counts), (0, 0), most),
            Tokens::Span { first, count } => (None, None, (first, count), count),
        };
        let blocks = most.div_ceil(TOKENS).min(BLOCKS);
        if blocks == 0 {
            return Ok(());
        }
        let means = self.means();
        let pages = self.page_table(rows.sequence);
        let arguments = Arguments {
            from: rows.from,
            to: rows.to,
            maps: self.row_transform().map(|transform| transform.bases.key_maps(layer)),
            means: means.map(|means| means.of(layer)),
            frequencies: means.map(KeyMeans::frequencies),
            norms: self.norms_of(side, layer, rows.sequence),
            pages: pages.map(|pages| pages.table),
            firsts,
            counts,
            first: first as u32,
            count: count as u32,
            heads: heads as u32,
            from_capacity: rows.capacities[0] as u32,
            to_capacity: rows.capacities[1] as u32,
            sinks: sinks as u32,
            tiles: self.tiles as u32,
            max_pages: pages.map_or(0, |pages| pages.max_pages as u32),
            gain: self.gain(side),
        };
        let (grid, threads) = (Grid::new([heads, blocks, rows.sequences])?, 2 * head_dim as u32);
        // SAFETY: the structure is the kernel's argument. The rows have as many tokens of every head, and the
        // norms of these tokens fit since their codes do.
        Ok(unsafe { kernel.launch(stream.cu_stream(), grid, threads, false, &arguments) }?)
    }

    /// Norms of a layer, if keys and values are divided by them.
    pub fn norms(&self, layer: usize) -> Option<Norms> {
        let of = |side| self.norms_of(side, layer, 0);
        of(Side::Keys).zip(of(Side::Values)).map(|(keys, values)| Norms { keys, values })
    }

    /// Norms of a side of a layer from a sequence on, or of all pages, as their codes lie.
    pub fn norms_of(&self, side: Side, layer: usize, sequence: usize) -> Option<DevicePtr<f16>> {
        let len = self.shape.heads * self.tiles * TILE;
        self.norms[side].as_ref().map(|norms| norms.pointer().offset(self.place(layer, sequence) * len))
    }
}
