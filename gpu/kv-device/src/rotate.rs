//! RoPE of decoded keys: by the decoder, if their planes have a transform, else in place, in the rows of a
//! cache. Also its inverse, for keys that are to be encoded.

use std::ops::Range;

use cudarc::driver::sys::CUstream;
use kv_gpu::codec::{CodecShape, Decode};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use crate::Result;
use crate::gpu::Gpu;

/// Threads per block, and maximum blocks per layer.
const THREADS: u32 = 256;
const BLOCKS: usize = 1024;

/// `rotate`.
pub(crate) fn program(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("rotate.cu", include_str!("kernels/rotate.cu"), &[], &defines)
}

/// A decoder of keys that are stored before RoPE. It rotates them itself if it can: without a transform the
/// halves of a head are decoded by different thread blocks, and [`Rotate`] follows.
pub(crate) fn decoder(gpu: &Gpu, shape: CodecShape) -> Result<Decode> {
    let compile = if shape.supports_rope() { Decode::rotating } else { Decode::new };
    Ok(compile(&gpu.device, shape)?)
}

/// Rotates keys of several layers.
pub(crate) struct Rotate {
    kernel: Kernel,
    heads: usize,
    head_dim: usize,
}

/// Rotates keys to their positions, or undoes it.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    Forward,
    Back,
}

/// Keys of consecutive tokens of one sequence.
pub(crate) struct KeyRows {
    /// Pointers (layers, 2) to the rows (heads, capacity, head_dim) of keys, then values, of each layer.
    pub rows: DevicePtr<DevicePtr<AnyElement>>,
    /// Number of layers.
    pub layers: usize,
    /// Rows of a head.
    pub capacity: usize,
    /// Positions of the tokens.
    pub tokens: Range<usize>,
    /// The row of the first one; the others follow.
    pub first_row: usize,
    /// Cosines and sines (position, head_dim / 2).
    pub angles: [DevicePtr<f32>; 2],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    rows: DevicePtr<DevicePtr<AnyElement>>,
    cos: DevicePtr<f32>,
    sin: DevicePtr<f32>,
    tokens: u32,
    position: u32,
    heads: u32,
    capacity: u32,
    first_row: u32,
    sign: f32,
}

const _: () = assert!(size_of::<Arguments>() == 48);

impl Rotate {
    /// Compiles the kernel.
    pub fn new(gpu: &Gpu, element: Element, heads: usize, head_dim: usize) -> Result<Self> {
        let kernel = gpu.device.kernel(&program(element, head_dim), "rotate", 0)?;
        Ok(Self { kernel, heads, head_dim })
    }

    /// Launches the rotation on a stream.
    ///
    /// # Safety
    /// The rows and the angles of these tokens exist, and nothing else uses the rows at the same time.
    pub unsafe fn launch(&self, stream: CUstream, direction: Direction, keys: &KeyRows) -> Result<()> {
        let [cos, sin] = keys.angles;
        let arguments = Arguments {
            rows: keys.rows,
            cos,
            sin,
            tokens: keys.tokens.len() as u32,
            position: keys.tokens.start as u32,
            heads: self.heads as u32,
            capacity: keys.capacity as u32,
            first_row: keys.first_row as u32,
            sign: match direction {
                Direction::Forward => 1.0,
                Direction::Back => -1.0,
            },
        };
        let threads = keys.tokens.len() * self.heads * (self.head_dim / 16); // of 16 components each
        let grid = Grid::new([threads.div_ceil(THREADS as usize).clamp(1, BLOCKS), keys.layers, 1])?;
        // SAFETY: the structure is the kernel's argument; the caller's contract.
        Ok(unsafe { self.kernel.launch(stream, grid, THREADS, false, &arguments) }?)
    }
}
