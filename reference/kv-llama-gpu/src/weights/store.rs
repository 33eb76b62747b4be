//! Matrices on their way to the device: rounded to 16 bits, packed or row by row.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use kv_device::{Buffer, Gpu, fill_hashed};
use kv_gpu::{DevicePtr, Element, Grid, Kernel};
use kv_model::Matrix;
use rayon::prelude::*;

use super::parts::{DECODED, Part, biases, decode};
use super::{DeviceMatrix, Order, WeightLayout, program};
use crate::Result;

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
        let n_out = parts.iter().map(Part::n_out).sum();
        let matrix = self.matrix(&Source::Rows(rows), order, n_out, parts[0].n_in())?;
        let bias = biases(parts).map(|bias| Buffer::of(self.gpu, &bias)).transpose()?;
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
