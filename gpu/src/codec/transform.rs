use cudarc::driver::sys::CUstream;

use super::{CodecShape, KernelPlace, PlanesAt};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error};

const OPERATION: Operation = Operation("codec transform");

/// `TOKENS` and `THREADS` of the kernels, and the columns of a block for heads of up to 64 elements and for
/// larger ones.
const TOKENS: usize = 64;
const THREADS: u32 = 128;
const COLUMNS: [usize; 2] = [64, 128];

/// Transforms rows to coefficients and back, for planes with a transform.
pub(super) struct Transform {
    into: Kernel,
    back: Kernel,
    shape: CodecShape,
}

/// `Arguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    maps: DevicePtr<f32>,
    coefficients: DevicePtr<f32>,
    rows: PlanesAt,
    place: KernelPlace,
    first_plane: u32,
    first_token: u32,
    tokens: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 96);

/// The rows of a launch.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Pointers on the device, one per plane.
    pub pointers: DevicePtr<DevicePtr<AnyElement>>,
    pub place: KernelPlace,
    pub first_plane: usize,
    pub planes: usize,
    pub first_token: usize,
    pub tokens: usize,
    /// f32 (planes, tokens, channels).
    pub coefficients: DevicePtr<f32>,
    /// The maps of all planes, after the `Planes::maps_at` words of their models.
    pub maps: DevicePtr<f32>,
}

impl Transform {
    /// Compiles the kernels; `None` for a shape without a transform.
    pub(super) fn new(device: &Device, shape: CodecShape) -> Result<Option<Self>, Error> {
        let Some(program) = shape.transform_program() else { return Ok(None) };
        let into = device.kernel(&program, "codec_rows_to_coefficients", 0)?;
        Ok(Some(Self { into, back: device.kernel(&program, "codec_coefficients_to_rows", 0)?, shape }))
    }

    /// Bytes of the coefficients of `planes` planes of `tokens` tokens.
    pub(super) const fn coefficients_len(shape: &CodecShape, planes: usize, tokens: usize) -> usize {
        let elements = if shape.has_transform() { planes.saturating_mul(tokens) } else { 0 };
        elements.saturating_mul(4 * shape.channels())
    }

    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds for the pointers and the stream.
    pub(super) unsafe fn rows_to_coefficients(&self, stream: CUstream, rows: &Rows) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of `launch`.
        unsafe { self.launch(&self.into, stream, rows) }
    }

    /// # Safety
    /// As [`Self::rows_to_coefficients`].
    pub(super) unsafe fn coefficients_to_rows(&self, stream: CUstream, rows: &Rows) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of `launch`.
        unsafe { self.launch(&self.back, stream, rows) }
    }

    unsafe fn launch(&self, kernel: &Kernel, stream: CUstream, rows: &Rows) -> Result<(), Error> {
        let map_dim = self.shape.map_dim();
        let columns = COLUMNS[usize::from(map_dim > COLUMNS[0])];
        let heads = self.shape.channels() / map_dim * map_dim.div_ceil(columns);
        let blocks = rows.tokens.div_ceil(TOKENS);
        let grid =
            OPERATION.grid(&[("blocks of tokens", blocks), ("heads", heads), ("planes", rows.planes)])?;
        let arguments = KernelArguments {
            maps: rows.maps,
            coefficients: rows.coefficients,
            rows: PlanesAt::each(rows.pointers),
            place: rows.place,
            first_plane: rows.first_plane as u32,
            first_token: rows.first_token as u32,
            tokens: rows.tokens as u32,
        };
        // SAFETY: the structure is the kernels' argument; the caller upholds the contract of its pointers.
        unsafe { kernel.launch(stream, grid, THREADS, false, &arguments) }
    }
}

/// The coefficients as rows of the kernels for tiles: contiguous planes of the tokens from `first_token` on.
pub(super) fn coefficients_at(
    shape: &CodecShape,
    coefficients: DevicePtr<f32>,
    first_token: usize,
    tokens: usize,
) -> (PlanesAt, KernelPlace) {
    let channels = shape.channels();
    let place = KernelPlace {
        token_stride: channels as u64,
        head_stride: shape.head_dim() as u64,
        page_stride: 0,
        pages: None,
        page_tokens: 1,
        first_token: 0_u32.wrapping_sub(first_token as u32), // token `first_token` has offset 0
    };
    (PlanesAt { each: None, all: Some(coefficients), stride: (tokens * channels) as u64 }, place)
}
