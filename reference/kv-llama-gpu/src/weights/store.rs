//! Matrices on their way to the device: rounded to 16 bits, packed or row by row.

use std::ops::Range;

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use kv_device::{Buffer, Gpu, fill_hashed};
use kv_gpu::{DevicePtr, Element, Grid, Kernel};
use kv_model::{Linear, Matrix};
use rayon::prelude::*;

use super::{DeviceMatrix, Order, WeightLayout, program};
use crate::Result;
use crate::ranks::Shard;

/// Amplitude of hashed weights: a standard deviation of 0.02.
const AMPLITUDE: f32 = 0.034_641_016;

/// Stores matrices of one layout on a device.
pub(super) struct Store<'a> {
    gpu: &'a Gpu,
    element: Element,
    layout: WeightLayout,
    pack: Kernel,
    head_dim: usize,
}

/// The source of a matrix's elements.
enum Source<'a> {
    Rows(&'a [f32]),
    Hashed(u32),
}

/// Numbers that a thread decodes or rounds at a time.
const DECODED: usize = 1 << 16;

/// Rows of a matrix that a thread decodes at a time.
fn rows_at_once(matrix: &Matrix) -> usize {
    (DECODED / matrix.n_in()).max(1)
}

/// Rows and columns of a matrix, and the bias of the rows.
pub(super) struct Part<'a> {
    matrix: &'a Matrix,
    bias: Option<&'a [f32]>,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> Part<'a> {
    /// Rows of a matrix without a bias.
    pub fn of(matrix: &'a Matrix, rows: Range<usize>) -> Self {
        Self { matrix, bias: None, rows, columns: 0..matrix.n_in() }
    }

    fn all(linear: &'a Linear) -> Self {
        let Linear { weight: matrix, bias } = linear;
        Self { bias: bias.as_deref(), ..Self::of(matrix, 0..matrix.n_out()) }
    }

    /// The rank's rows: its outputs.
    pub fn rows(linear: &'a Linear, shard: Shard) -> Self {
        let all = Self::all(linear);
        Self { rows: shard.of(all.rows.len()), bias: all.bias.map(|bias| &bias[shard.of(bias.len())]), ..all }
    }

    /// The rank's columns: its inputs. The product is a part of a sum, to which the bias is added once.
    pub fn columns(linear: &'a Linear, shard: Shard) -> Self {
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

impl<'a> Store<'a> {
    pub fn new(gpu: &'a Gpu, element: Element, layout: WeightLayout, head_dim: usize) -> Result<Self> {
        let pack = gpu.device().kernel(&program(element), "pack", 0)?;
        Ok(Self { gpu, element, layout, pack, head_dim })
    }

    /// Parts of linear layers stacked into one matrix, of which `rows` has the numbers afterwards.
    pub fn parts(&self, parts: &[Part], order: Order, rows: &mut Vec<f32>) -> Result<DeviceMatrix> {
        decode(parts, rows);
        let n_out = parts.iter().map(|part| part.rows.len()).sum();
        let matrix = self.matrix(&Source::Rows(rows), order, n_out, parts[0].columns.len())?;
        let biases = parts.iter().any(|part| part.bias.is_some()).then(|| {
            let bias = |part: &Part| part.bias.map_or_else(|| vec![0.0; part.rows.len()], <[f32]>::to_vec);
            parts.iter().flat_map(bias).collect::<Vec<f32>>()
        });
        let bias = biases.map(|bias| Buffer::of(self.gpu, &bias)).transpose()?;
        Ok(DeviceMatrix { bias, ..matrix })
    }

    /// A matrix of hashed elements.
    pub fn hashed(&self, tensor: u32, order: Order, rows: usize, n_in: usize) -> Result<DeviceMatrix> {
        self.matrix(&Source::Hashed(tensor), order, rows, n_in)
    }

    fn matrix(&self, source: &Source<'_>, order: Order, rows: usize, n_in: usize) -> Result<DeviceMatrix> {
        let weight = match (self.layout, source) {
            (WeightLayout::Packed, source) => self.pack(source, order, rows, n_in)?,
            (WeightLayout::Rows, Source::Rows(rows)) => self.round(rows)?,
            (WeightLayout::Rows, &Source::Hashed(tensor)) => self.hashed_table(tensor, rows * n_in)?,
        };
        self.gpu.synchronize()?; // before the source is dropped
        Ok(DeviceMatrix { weight, bias: None, rows, n_in, order })
    }

    fn pack(&self, source: &Source<'_>, order: Order, rows: usize, n_in: usize) -> Result<Buffer<u16>> {
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
        Ok(weight)
    }

    /// Numbers in 16 bits.
    fn round(&self, numbers: &[f32]) -> Result<Buffer<u16>> {
        let mut bits = vec![0_u16; numbers.len()];
        let parts = bits.par_chunks_mut(DECODED).zip(numbers.par_chunks(DECODED));
        parts.for_each(|(bits, numbers)| match self.element {
            Element::F16 => bits.reinterpret_cast_mut::<f16>().convert_from_f32_slice(numbers),
            Element::Bf16 => bits.reinterpret_cast_mut::<bf16>().convert_from_f32_slice(numbers),
        });
        Ok(Buffer::of(self.gpu, &bits)?)
    }

    /// The embedding: rows in any layout, since a step looks them up.
    pub fn table(&self, matrix: &Matrix, rows: &mut Vec<f32>) -> Result<Buffer<u16>> {
        decode(&[Part::of(matrix, 0..matrix.n_out())], rows);
        self.round(rows)
    }

    pub fn hashed_table(&self, tensor: u32, len: usize) -> Result<Buffer<u16>> {
        let table = Buffer::zeros(self.gpu, len)?;
        fill_hashed(self.gpu, self.element, &table, tensor, AMPLITUDE)?;
        Ok(table)
    }
}
