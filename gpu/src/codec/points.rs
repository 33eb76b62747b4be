//! The inverse transform of a decoder: reconstruction points of coefficients become rows.

use codec_core::FrameInfo;
use cudarc::driver::sys::CUstream;

use super::rope::KernelRope;
use super::transform::Rows;
use super::{CodecShape, KernelPlace, PlanesAt};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error};

/// `TOKENS` of the kernel.
const TOKENS: usize = 512;

const OPERATION: Operation = Operation("codec transform");

/// Turns reconstruction points of coefficients into rows.
pub(super) struct PointsToRows {
    kernel: Kernel,
    shape: CodecShape,
}

/// `Points` of the kernels.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Points {
    nearest: Option<DevicePtr<u16>>,
    rest: Option<DevicePtr<u16>>,
    wide: Option<DevicePtr<u8>>,
}

const _: () = assert!(size_of::<Points>() == 24);

impl Points {
    /// Bytes of the points of `planes` planes with `tokens` tokens in `blocks` blocks.
    pub(super) const fn len(shape: &CodecShape, planes: usize, tokens: usize, blocks: usize) -> usize {
        let elements = planes.saturating_mul(tokens).saturating_mul(shape.channels());
        let tiles = planes.saturating_mul(blocks).saturating_mul(shape.tiles());
        elements.saturating_mul(4).saturating_add(tiles)
    }

    /// The points at the start of a workspace.
    pub(super) fn at(workspace: DevicePtr<u8>, shape: &CodecShape, planes: usize, tokens: usize) -> Self {
        let bytes = 2 * planes * tokens * shape.channels();
        let at = |offset| Some(workspace.offset(offset));
        Self {
            nearest: at(0).map(DevicePtr::cast),
            rest: at(bytes).map(DevicePtr::cast),
            wide: at(2 * bytes),
        }
    }
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    planes: DevicePtr<u32>,
    maps: DevicePtr<f32>,
    points: Points,
    rows: PlanesAt,
    place: KernelPlace,
    first_plane: u32,
    first_token: u32,
    tokens: u32,
    block_tokens: u32,
    rope: KernelRope,
}

const _: () = assert!(size_of::<KernelArguments>() == 136);

impl PointsToRows {
    /// Compiles the kernel, which also rotates keys if it `rotates`; `None` for a shape whose coefficients
    /// are decoded to `f32`.
    pub(super) fn new(device: &Device, shape: CodecShape, rotates: bool) -> Result<Option<Self>, Error> {
        let Some(program) = shape.points_program() else { return Ok(None) };
        let kernel = device.kernel(&program.define_if(rotates, "ROPE"), "codec_points_to_rows", 0)?;
        Ok(Some(Self { kernel, shape }))
    }

    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds for the pointers and the stream; the first token
    /// is the first of a block.
    pub(super) unsafe fn launch(
        &self,
        stream: CUstream,
        info: &FrameInfo,
        planes: DevicePtr<u32>,
        points: Points,
        rows: &Rows,
    ) -> Result<(), Error> {
        let map_dim = self.shape.map_dim();
        // `ACROSS` and `DOWN` of the kernel.
        let across = map_dim / 16;
        let down = if across > 4 { 1 } else { 8 / across };
        let blocks = rows.tokens.div_ceil(TOKENS);
        let heads = self.shape.channels() / map_dim;
        let grid =
            OPERATION.grid(&[("blocks of tokens", blocks), ("heads", heads), ("planes", rows.planes)])?;
        let arguments = KernelArguments {
            planes,
            maps: rows.maps,
            points,
            rows: PlanesAt::each(rows.pointers),
            place: rows.place,
            first_plane: rows.first_plane as u32,
            first_token: rows.first_token as u32,
            tokens: rows.tokens as u32,
            block_tokens: info.block_tokens as u32,
            rope: rows.rope,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, (32 * across * down) as u32, false, &arguments) }
    }
}
