//! Decoding of a range of layers and blocks of a frame: entropy decoding, then the inverse transform.

use std::ops::Range;

use codec_core::{Frame, FrameInfo, LANES, Side};
use cudarc::driver::sys::CUstream;

use super::points::{Points, PointsToRows};
use super::rope::KernelRope;
use super::transform::{Rows, Transform, coefficients_at};
use super::{CodecShape, KernelPlace, Place, Planes, PlanesAt, Rope};
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error};

/// Most blocks of tokens that a thread block decodes, one per warp: `MAX_WARPS` of the kernel.
const MAX_WARPS: usize = 8;

const OPERATION: Operation = Operation("codec::Decode");

/// Pointers and ranges of one launch of [`Decode`].
#[derive(Clone, Debug)]
pub struct DecodeArguments {
    /// The bytes of the frame, followed by at least three readable bytes. Blocks that this launch does not
    /// decode need not have arrived yet.
    pub frame: DevicePtr<u8>,
    /// [`Planes::words`].
    pub planes: DevicePtr<u32>,
    /// The layers to decode.
    pub layers: Range<usize>,
    /// The blocks of tokens to decode.
    pub blocks: Range<usize>,
    /// Pointers (layers of the launch, 2) to the rows of keys, then values, of each layer, aligned to their
    /// element.
    pub out: DevicePtr<DevicePtr<AnyElement>>,
    /// Where the tokens of the frame go in these rows.
    pub place: Place,
    /// RoPE of the frame's tokens, given if and only if the decoder is [`rotating`](Decode::rotating).
    pub rope: Option<Rope>,
    /// Bytes ([`Decode::workspace_len`],), overwritten; aligned to 16.
    pub workspace: DevicePtr<u8>,
    /// One `u32`, 0 before the launch. Afterwards it is 1 + the index in the frame of a malformed tile, or 0
    /// if there is none. The elements written for such a tile are meaningless. A launch never lowers it.
    pub failed: DevicePtr<u32>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    frame: DevicePtr<u8>,
    planes: DevicePtr<u32>,
    failed: DevicePtr<u32>,
    out: PlanesAt,
    place: KernelPlace,
    points: Points,
    frame_planes: u32,
    frame_blocks: u32,
    tokens: u32,
    block_tokens: u32,
    first_plane: u32,
    first_block: u32,
    blocks: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 144);

/// `codec_core::Frame::decode_block_into` for many blocks of many planes: decodes tiles, dequantizes them,
/// rounds to the element type of the cache, and stores into the cache. In single precision the bits are those
/// of the CPU. Keys of planes with a transform are also rotated to their positions, if they are stored before
/// RoPE ([`rotating`](Self::rotating)): in `f32`, before they are rounded.
///
/// Checksums are compared by [`Check`](super::Check), or by the host ([`Frame::check_block`]). Bytes that no
/// encoder wrote are detected or decode to meaningless elements. Even then the kernel reads nothing outside
/// the frame, except up to three bytes after it, as part of its last word.
///
/// # Cost
/// One pass over the stream and one over the elements; a warp decodes 32 elements at a time, one channel per
/// lane. With a transform, a second kernel runs. Per element, with [`CodecShape::points_program`], 2 bytes
/// are written and read back, and tensor cores do two multiply-adds for each element of the head; with
/// [`CodecShape::tensor_core_program`], 4 bytes and three multiply-adds; otherwise 4 bytes and one
/// multiplication and addition, not on tensor cores. RoPE adds reading 4 bytes of cosines and sines per
/// element of the keys, which are common to all layers and heads.
/// # Source
/// CacheGen (SIGCOMM 2024), 6; the bitstream is codec-core's `FORMAT.md`.
pub struct Decode {
    tiles: Kernel,
    inverse: Option<Inverse>,
    shape: CodecShape,
    rotates: bool,
}

/// The second kernel, which turns coefficients into rows.
enum Inverse {
    Points(PointsToRows),
    Coefficients(Transform),
}

impl Decode {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: CodecShape) -> Result<Self, Error> {
        Self::compile(device, shape, false)
    }

    /// The same for keys that are stored before RoPE: the kernel of the inverse transform rotates them to the
    /// positions that launches give ([`DecodeArguments::rope`]). Values are those of [`new`](Self::new).
    ///
    /// # Errors
    /// [`Error::Unsupported`] for shapes without [`CodecShape::supports_rope`]; as for [`new`](Self::new).
    pub fn rotating(device: &Device, shape: CodecShape) -> Result<Self, Error> {
        if !shape.supports_rope() {
            return Err(Error::Unsupported {
                operation: format!("RoPE of decoded keys with {shape:?}"),
                supported: "transforms of whole heads of 4 n components; rotate other keys after `Decode`",
            });
        }
        Self::compile(device, shape, true)
    }

    fn compile(device: &Device, shape: CodecShape, rotates: bool) -> Result<Self, Error> {
        let tiles = device.kernel(&shape.decode_program(), "codec_decode", 0)?;
        let inverse = match PointsToRows::new(device, shape, rotates)? {
            Some(points) => Some(Inverse::Points(points)),
            None => Transform::inverse(device, shape, rotates)?.map(Inverse::Coefficients),
        };
        Ok(Self { tiles, inverse, shape, rotates })
    }

    /// Whether it is [`rotating`](Self::rotating).
    #[must_use]
    pub const fn rotates(&self) -> bool {
        self.rotates
    }

    /// Bytes of workspace for launches of `layers` layers and `blocks` blocks of tokens: 0 for planes without
    /// a transform.
    #[must_use]
    pub const fn workspace_len(&self, info: &FrameInfo, layers: usize, blocks: usize) -> usize {
        let tokens = blocks.saturating_mul(info.block_tokens);
        let tokens = if tokens < info.tokens { tokens } else { info.tokens };
        let planes = layers.saturating_mul(2);
        match self.inverse {
            Some(Inverse::Points(_)) => Points::len(&self.shape, planes, tokens, blocks),
            _ => Transform::coefficients_len(&self.shape, planes, tokens),
        }
    }

    /// Launches the decoding on a stream. `frame` is the same frame on the host; only its header and index
    /// are read.
    ///
    /// # Errors
    /// [`Error::Argument`] for planes, a frame or ranges that do not match, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer but those to rows and to the
    /// frame aligned to 8 bytes. The bytes at `arguments.frame` are those that `frame` was parsed from, **and
    /// three bytes after the last one can be read**: the kernel loads words of four bytes. The words at
    /// `arguments.planes` are those of `planes`. The place maps different tokens to different addresses, and
    /// every page number refers to an existing page.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        frame: &Frame<'_>,
        planes: &Planes,
        arguments: &DecodeArguments,
    ) -> Result<(), Error> {
        self.check(frame.info(), planes, arguments)?;
        let layers = arguments.layers.clone();
        for (layer, side) in layers.flat_map(|layer| [(layer, Side::Keys), (layer, Side::Values)]) {
            let id = planes.ids().get(2 * layer + usize::from(side == Side::Values));
            if id.copied() != frame.plane_id(layer, side).ok() {
                return Err(OPERATION.error(format!("layer {layer} was coded under another plane")));
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.launch_kernels(stream, frame.info(), planes, arguments) }
    }

    /// As [`launch`](Self::launch), for a frame encoded by [`Encode`](super::Encode) with these planes and
    /// indexed by [`Index`](super::Index): the host needs only its `info`.
    ///
    /// # Errors
    /// [`Error::Argument`] for planes, a frame or ranges that do not match, [`Error::Driver`].
    /// # Safety
    /// As for [`launch`](Self::launch), with the bytes that `Index` describes.
    pub unsafe fn launch_indexed(
        &self,
        stream: CUstream,
        info: &FrameInfo,
        planes: &Planes,
        arguments: &DecodeArguments,
    ) -> Result<(), Error> {
        self.check(info, planes, arguments)?;
        // SAFETY: the caller's contract.
        unsafe { self.launch_kernels(stream, info, planes, arguments) }
    }

    fn check(&self, info: &FrameInfo, planes: &Planes, a: &DecodeArguments) -> Result<(), Error> {
        if planes.shape(self.shape.element, self.shape.paged) != self.shape {
            return Err(OPERATION.error("planes of another shape than it was compiled for"));
        }
        if info.lossless || info.channels() != self.shape.channels() {
            return Err(OPERATION.error("a frame without loss, or of another number of channels"));
        }
        if self.rotates != a.rope.is_some() {
            return Err(OPERATION.error("RoPE is given exactly when it is compiled to rotate keys"));
        }
        if self.rotates && info.head_dim != self.shape.head_dim() {
            return Err(OPERATION.error("RoPE of a frame whose heads have another size than the planes'"));
        }
        if self.rotates && info.keys_rotated {
            return Err(OPERATION.error("RoPE of keys that are stored after it"));
        }
        if a.layers.end > info.layers || a.blocks.end > info.blocks() {
            return Err(OPERATION.error("layers or blocks that the frame does not have"));
        }
        Ok(())
    }

    /// # Safety
    /// As for [`launch`](Self::launch); the arguments have been checked.
    unsafe fn launch_kernels(
        &self,
        stream: CUstream,
        info: &FrameInfo,
        planes: &Planes,
        a: &DecodeArguments,
    ) -> Result<(), Error> {
        if a.layers.is_empty() || a.blocks.is_empty() {
            return Ok(());
        }
        let place = a.place.for_kernel(OPERATION, &self.shape, info.tokens)?;
        let first_token = a.blocks.start * info.block_tokens;
        let rows = Rows {
            pointers: a.out,
            place,
            first_plane: 2 * a.layers.start,
            planes: 2 * a.layers.len(),
            first_token,
            tokens: (a.blocks.end * info.block_tokens).min(info.tokens) - first_token,
            coefficients: a.workspace.cast(),
            maps: a.planes.offset(planes.maps_at()).cast(),
            rope: KernelRope::from(a.rope),
        };
        let (out, place) = match &self.inverse {
            Some(Inverse::Coefficients(_)) => {
                coefficients_at(&self.shape, rows.coefficients, first_token, rows.tokens)
            }
            _ => (PlanesAt::each(a.out), place),
        };
        let points = match &self.inverse {
            Some(Inverse::Points(_)) => Points::at(a.workspace, &self.shape, rows.planes, rows.tokens),
            _ => Points::default(),
        };
        let kernel_arguments = KernelArguments {
            frame: a.frame,
            planes: a.planes,
            failed: a.failed,
            out,
            place,
            points,
            frame_planes: 2 * info.layers as u32,
            frame_blocks: info.blocks() as u32,
            tokens: info.tokens as u32,
            block_tokens: info.block_tokens as u32,
            first_plane: 2 * a.layers.start as u32,
            first_block: a.blocks.start as u32,
            blocks: a.blocks.len() as u32,
        };
        // Groups are as equal as they can be: a warp without a block would keep its registers from others.
        let groups = a.blocks.len().div_ceil(MAX_WARPS);
        let warps = a.blocks.len().div_ceil(groups);
        let grid = OPERATION.grid(&[
            ("tiles of channels", info.channels().div_ceil(LANES)),
            ("planes", 2 * a.layers.len()),
            ("groups of blocks of tokens", a.blocks.len().div_ceil(warps)),
        ])?;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe {
            self.tiles.launch(stream, grid, (warps * LANES) as u32, false, &kernel_arguments)?;
            match &self.inverse {
                Some(Inverse::Points(inverse)) => inverse.launch(stream, info, a.planes, points, &rows),
                Some(Inverse::Coefficients(inverse)) => inverse.launch(stream, &rows),
                None => Ok(()),
            }
        }
    }
}
