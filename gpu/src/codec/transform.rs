//! The transform of rows to coefficients in memory, and back.

use cudarc::driver::sys::CUstream;

use super::rope::KernelRope;
use super::{CodecShape, KernelPlace, PlanesAt};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error};

const OPERATION: Operation = Operation("codec transform");

/// The columns of a block of `codec/transform.cu` for heads of up to 64 elements and for larger ones.
const COLUMNS: [usize; 2] = [64, 128];

/// Transforms rows to coefficients, or back.
pub(super) struct Transform {
    tiled: Tiled,
    shape: CodecShape,
}

/// A kernel whose blocks process `tokens` tokens and a range of columns of a head.
struct Tiled {
    kernel: Kernel,
    tokens: usize, // `TOKENS` of the kernel
    threads: u32,
    columns: usize,
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
    rope: KernelRope,
}

const _: () = assert!(size_of::<KernelArguments>() == 112);

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
    /// That of the keys, for the inverse transform.
    pub rope: KernelRope,
}

impl Transform {
    /// Compiles the kernel that transforms rows to coefficients; `None` for a shape without a transform.
    pub(super) fn forward(device: &Device, shape: CodecShape) -> Result<Option<Self>, Error> {
        Self::scalar(device, shape, "codec_rows_to_coefficients", false)
    }

    /// The same for the kernel of the inverse transform, which also rotates keys if it `rotates`.
    pub(super) fn inverse(device: &Device, shape: CodecShape, rotates: bool) -> Result<Option<Self>, Error> {
        let name = "codec_coefficients_to_rows";
        let most = device.shared_memory();
        let Some((program, (warps, shared))) =
            shape.tensor_core_program(most).zip(shape.tensor_core_block(most))
        else {
            return Self::scalar(device, shape, name, rotates);
        };
        let kernel = device.kernel(&program.define_if(rotates, "ROPE"), name, shared)?;
        let tiled = Tiled { kernel, tokens: 512, threads: 32 * warps as u32, columns: shape.map_dim() };
        Ok(Some(Self { tiled, shape }))
    }

    fn scalar(
        device: &Device,
        shape: CodecShape,
        name: &'static str,
        rotates: bool,
    ) -> Result<Option<Self>, Error> {
        let Some(program) = shape.transform_program() else { return Ok(None) };
        let kernel = device.kernel(&program.define_if(rotates, "ROPE"), name, 0)?;
        let columns = COLUMNS[usize::from(shape.map_dim() > COLUMNS[0])];
        Ok(Some(Self { tiled: Tiled { kernel, tokens: 64, threads: 128, columns }, shape }))
    }

    /// Bytes of the coefficients of `planes` planes of `tokens` tokens.
    pub(super) const fn coefficients_len(shape: &CodecShape, planes: usize, tokens: usize) -> usize {
        let elements = if shape.has_transform() { planes.saturating_mul(tokens) } else { 0 };
        elements.saturating_mul(4 * shape.channels())
    }

    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds for the pointers and the stream.
    pub(super) unsafe fn launch(&self, stream: CUstream, rows: &Rows) -> Result<(), Error> {
        let tiled = &self.tiled;
        let map_dim = self.shape.map_dim();
        let heads = self.shape.channels() / map_dim * map_dim.div_ceil(tiled.columns);
        let blocks = rows.tokens.div_ceil(tiled.tokens);
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
            rope: rows.rope,
        };
        // SAFETY: the structure is the kernels' argument; the caller upholds the contract of its pointers.
        unsafe { tiled.kernel.launch(stream, grid, tiled.threads, false, &arguments) }
    }
}

/// The coefficients as rows of the tile kernels: contiguous planes of the tokens from `first_token` on.
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
