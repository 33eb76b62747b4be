//! The transform and quantization of an encoder in one kernel, on tensor cores.

use cudarc::driver::sys::CUstream;

use super::{CodecShape, KernelPlace, PlanesAt};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error};

const OPERATION: Operation = Operation("codec quantization");

/// `CHUNK` and `CHUNKS` of the kernel: tokens of a chunk, and chunks of a thread block.
const CHUNK: usize = 32;
const CHUNKS: usize = 16;

/// Transforms rows and quantizes their coefficients on tensor cores.
pub(super) struct Quantize {
    kernel: Kernel,
    shape: CodecShape,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    planes: DevicePtr<u32>,
    maps: DevicePtr<f32>,
    bins: DevicePtr<u16>,
    rows: PlanesAt,
    place: KernelPlace,
    first_plane: u32,
    tokens: u32,
    block_tokens: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 104);

/// The rows of a launch.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub planes: DevicePtr<u32>,
    /// The maps of all planes.
    pub maps: DevicePtr<f32>,
    /// `u16` (planes of the launch, blocks, tiles, `bins_of_tile`), written.
    pub bins: DevicePtr<u16>,
    pub rows: PlanesAt,
    pub place: KernelPlace,
    pub first_plane: usize,
    pub planes_here: usize,
    pub tokens: usize,
    pub block_tokens: usize,
}

impl Quantize {
    /// Compiles the kernel; `None` for a shape without one.
    pub(super) fn new(device: &Device, shape: CodecShape) -> Result<Option<Self>, Error> {
        let program = shape.quantize_program();
        let kernel = program.map(|program| device.kernel(&program, "codec_quantize", 0)).transpose()?;
        Ok(kernel.map(|kernel| Self { kernel, shape }))
    }

    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds for the pointers and the stream.
    pub(super) unsafe fn launch(&self, stream: CUstream, rows: &Rows) -> Result<(), Error> {
        let map_dim = self.shape.map_dim();
        let chunks = rows.tokens.div_ceil(rows.block_tokens) * rows.block_tokens.div_ceil(CHUNK);
        let grid = OPERATION.grid(&[
            ("chunks", chunks.div_ceil(CHUNKS)),
            ("heads", self.shape.channels() / map_dim),
            ("planes", rows.planes_here),
        ])?;
        let arguments = KernelArguments {
            planes: rows.planes,
            maps: rows.maps,
            bins: rows.bins,
            rows: rows.rows,
            place: rows.place,
            first_plane: rows.first_plane as u32,
            tokens: rows.tokens as u32,
            block_tokens: rows.block_tokens as u32,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, 2 * map_dim as u32, false, &arguments) }
    }
}
