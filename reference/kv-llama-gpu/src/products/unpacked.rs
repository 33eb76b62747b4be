//! Packed weights as rows, a layer at a time: `unpack` of `kernels/weights.cu`.

use kv_device::{Buffer, Gpu};
use kv_gpu::{DevicePtr, Grid, Kernel};

use super::Context;
use super::rows::{LayerRows, THREADS};
use crate::Result;
use crate::weights::{self, DeviceMatrix, LayerWeights};

/// Chunks of the weights that a block takes: `UNPACKED` of the kernel.
const UNPACKED: usize = 8;

/// Room for the largest matrices of all layers.
pub(crate) struct Unpacked {
    unpack: Kernel,
    qkv: Buffer<u16>,
    o: Buffer<u16>,
    gate_up: Buffer<u16>,
    down: Buffer<u16>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    packed: DevicePtr<u16>,
    rows: DevicePtr<u16>,
    n_rows: u32,
    n_in: u32,
    order: u32,
    head_dim: u32,
}

const _: () = assert!(size_of::<Arguments>() == 32);

impl Unpacked {
    pub fn new(context: &Context<'_>) -> Result<Self> {
        let Context { gpu, weights, .. } = context;
        Ok(Self {
            unpack: gpu.device().kernel(&weights::program(weights.element), "unpack", 0)?,
            qkv: room(gpu, &weights.layers, |layer| &layer.qkv)?,
            o: room(gpu, &weights.layers, |layer| &layer.o)?,
            gate_up: room(gpu, &weights.layers, |layer| &layer.gate_up)?,
            down: room(gpu, &weights.layers, |layer| &layer.down)?,
        })
    }

    /// The rows of the layer that has been unpacked last.
    pub fn rows(&self) -> LayerRows {
        let [qkv, o, gate_up, down] = [&self.qkv, &self.o, &self.gate_up, &self.down].map(Buffer::pointer);
        LayerRows { qkv, o, gate_up, down }
    }

    /// Unpacks layer `l`.
    pub fn unpack(&self, context: &Context<'_>, l: usize) -> Result<()> {
        let LayerWeights { qkv, o, gate_up, down, .. } = &context.weights.layers[l];
        let rows = self.rows();
        for (matrix, rows) in [(qkv, rows.qkv), (o, rows.o), (gate_up, rows.gate_up), (down, rows.down)] {
            let &DeviceMatrix { rows: n_out, n_in, order, ref weight, .. } = matrix;
            let arguments = Arguments {
                packed: weight.pointer(),
                rows,
                n_rows: n_out as u32,
                n_in: n_in as u32,
                order: order as u32,
                head_dim: context.weights.config.head_dim as u32,
            };
            let (chunks, tiles) = (n_in.div_ceil(64), n_out.div_ceil(16));
            let grid = Grid::new([chunks.div_ceil(UNPACKED), tiles, 1])?;
            // SAFETY: the structure is the kernel's argument, and the rows have as many elements as the
            // largest of these matrices.
            unsafe { self.unpack.launch(context.gpu.stream(), grid, THREADS, false, &arguments) }?;
        }
        Ok(())
    }
}

fn room(gpu: &Gpu, layers: &[LayerWeights], of: fn(&LayerWeights) -> &DeviceMatrix) -> Result<Buffer<u16>> {
    let len = |layer| of(layer).rows * of(layer).n_in;
    Ok(Buffer::zeros(gpu, layers.iter().map(len).max().unwrap_or(0))?)
}
