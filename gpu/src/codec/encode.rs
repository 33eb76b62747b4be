//! Encoding of rows: transform or quantization, coding of each tile, and joining of the tiles, a launch each.

use std::ops::Range;

use codec_core::{FrameInfo, LANES};
use cudarc::driver::sys::CUstream;

use super::quantize::{self, Quantize};
use super::rope::KernelRope;
use super::transform::{self, Transform, coefficients_at};
use super::{CodecShape, KernelPlace, Place, Planes, PlanesAt};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error, Program};

/// `WARPS` of the kernel.
const WARPS: usize = 4;
/// Resident thread blocks per SM, by the launch bounds of the kernel.
const RESIDENT: usize = 5;
/// Rows of a lane that are adjacent in memory: `GROUP` of the kernels.
const GROUP: usize = 8;
/// The join kernel: threads of a block, maximum tiles of a block (`COUNT` of the kernel), and warps of a
/// block, each of which copies one tile at a time.
const JOIN_THREADS: usize = 256;
const MOST_JOINED: usize = 64;
const JOIN_WARPS: usize = JOIN_THREADS / LANES;

const OPERATION: Operation = Operation("codec::Encode");

/// Pointers and ranges of one launch of [`Encode`].
#[derive(Clone, Debug)]
pub struct EncodeArguments {
    /// [`Planes::words`].
    pub planes: DevicePtr<u32>,
    /// The layers to encode.
    pub layers: Range<usize>,
    /// Pointers (layers of the launch, 2) to the rows of keys, then values, of each layer.
    pub rows: DevicePtr<DevicePtr<AnyElement>>,
    /// Where the tokens of the frame are in these rows.
    pub place: Place,
    /// Bytes ([`Encode::slots_len`],), overwritten.
    pub slots: DevicePtr<u8>,
    /// Bytes ([`Encode::workspace_len`],), overwritten; aligned to 16.
    pub workspace: DevicePtr<u8>,
    /// `u16` (layers of the launch, 2, blocks, tiles), written: the length of each tile in units of two
    /// bytes.
    pub lengths: DevicePtr<u16>,
    /// Bytes (`capacity`,), written: the tiles in order, without gaps, if they fit.
    pub payload: DevicePtr<u8>,
    /// Capacity of the payload in bytes; [`Encode::slots_len`] always suffices.
    pub capacity: usize,
    /// One `u64`, written unless there are no tiles: the size of the payload in bytes.
    pub payload_bytes: DevicePtr<u64>,
    /// One `u32`, 0 before the launch. Afterwards it is 1 + the index in the launch of a tile with an element
    /// that is not finite or out of range for the step of its channel, or 0. A launch never lowers it.
    pub failed: DevicePtr<u32>,
}

/// `Arguments` of `codec_encode`.
#[derive(Clone, Copy)]
#[repr(C)]
struct EncodeKernelArguments {
    planes: DevicePtr<u32>,
    slots: DevicePtr<u8>,
    lengths: DevicePtr<u16>,
    workspace: DevicePtr<u16>,
    failed: DevicePtr<u32>,
    bins: DevicePtr<u16>, // `bins` and `maps`: with `Quantize`
    maps: DevicePtr<f32>,
    rows: PlanesAt,
    place: KernelPlace,
    planes_here: u32,
    first_plane: u32,
    tokens: u32,
    block_tokens: u32,
    slot_bytes: u32,
}

const _: () = assert!(size_of::<EncodeKernelArguments>() == 144);

/// `Arguments` of `codec_join`.
#[derive(Clone, Copy)]
#[repr(C)]
struct JoinKernelArguments {
    slots: DevicePtr<u8>,
    lengths: DevicePtr<u16>,
    payload: DevicePtr<u8>,
    payload_bytes: DevicePtr<u64>,
    capacity: u64,
    tiles: u32,
    slot_bytes: u32,
    count: u32,
}

const _: () = assert!(size_of::<JoinKernelArguments>() == 56);

/// `codec_core::encode_frame` for planes with one step per channel, with the same bytes, except for header,
/// index and checksums, which the host adds ([`codec_core::assemble_frame`]).
///
/// # Cost
/// Two kernels. Elements are read once, and again for fixed-width tiles; bins are written to the workspace
/// and read back. With a transform, a third kernel runs first. Per element, with
/// [`CodecShape::quantize_program`], it does three multiply-adds on tensor cores for each element of the head
/// and writes 2 bytes; the few bins that are too close to a boundary, and tiles whose values exceed 2^13
/// steps, are recomputed in the CPU's order. Otherwise it does one multiplication and addition for each
/// element of the head and writes 4 bytes.
/// # Source
/// CacheGen (SIGCOMM 2024), 5.2; the bitstream is codec-core's `FORMAT.md`.
pub struct Encode {
    before: Before,
    tiles: Kernel,
    join: Kernel,
    shape: CodecShape,
    blocks: usize,
}

/// The pass over the rows before the tile kernel.
enum Before {
    Nothing,
    /// Planes with a transform: f32 (planes, tokens, channels) in the workspace.
    Coefficients(Transform),
    /// The same on tensor cores: `u16` (planes, blocks, tiles, rows of a tile) in the workspace.
    Bins(Quantize),
}

impl Encode {
    /// The kernel that joins tiles, which is the same for all shapes.
    #[must_use]
    pub fn join_program() -> Program {
        Program::new(source!("codec/join.cu"), &[])
    }

    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: CodecShape) -> Result<Self, Error> {
        let before = match Quantize::new(device, shape)? {
            Some(quantize) => Before::Bins(quantize),
            None => Transform::forward(device, shape)?.map_or(Before::Nothing, Before::Coefficients),
        };
        let tiles = device.kernel(&shape.encode_program(), "codec_encode", 0)?;
        let join = device.kernel(&Self::join_program(), "codec_join", 0)?;
        Ok(Self { before, tiles, join, shape, blocks: RESIDENT * device.sm_count() })
    }

    /// Upper bound of the bytes of all tiles of `layers` layers.
    #[must_use]
    pub fn slots_len(info: &FrameInfo, layers: usize) -> usize {
        tiles(info, layers).saturating_mul(slot_bytes(info))
    }

    /// Bytes of workspace for launches of `layers` layers.
    #[must_use]
    pub fn workspace_len(&self, info: &FrameInfo, layers: usize) -> usize {
        let before = match self.before {
            Before::Nothing => 0,
            Before::Coefficients(_) => {
                Transform::coefficients_len(&self.shape, layers.saturating_mul(2), info.tokens)
            }
            Before::Bins(_) => tiles(info, layers).saturating_mul(bins_of_tile(info)),
        };
        self.warps_len(info).saturating_add(before)
    }

    /// Bytes of the workspaces of all resident warps: bins, twice as many words, and escapes.
    const fn warps_len(&self, info: &FrameInfo) -> usize {
        self.blocks.saturating_mul(WARPS).saturating_mul(bins_of_tile(info)).saturating_mul(4)
    }

    /// Launches the encoding on a stream. `info` describes the frame and is the same in all launches of a
    /// frame.
    ///
    /// # Errors
    /// [`Error::Argument`] for planes, a frame or ranges that do not match, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer, those to rows included,
    /// aligned to 8 bytes. The words at `arguments.planes` are those of `planes`, and every page number
    /// refers to an existing page.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        info: &FrameInfo,
        planes: &Planes,
        arguments: &EncodeArguments,
    ) -> Result<(), Error> {
        let a = arguments;
        if planes.shape(self.shape.element, self.shape.paged) != self.shape {
            return Err(OPERATION.error("planes of another shape than it was compiled for"));
        }
        if planes.scaled_by_token() {
            return Err(OPERATION.error("a plane with steps for each token"));
        }
        if info.lossless || info.channels() != self.shape.channels() {
            return Err(OPERATION.error("a frame without loss, or of another number of channels"));
        }
        if a.layers.end > info.layers || planes.ids().len() != 2 * info.layers {
            return Err(OPERATION.error("layers that the frame or the planes do not have"));
        }
        if !(1..=codec_core::MAX_BLOCK_TOKENS).contains(&info.block_tokens) {
            return Err(OPERATION.error("blocks of no tokens, or of too many"));
        }
        let tiles = tiles(info, a.layers.len());
        let count = OPERATION.in_32_bits("tiles", tiles)?;
        if count == 0 {
            return Ok(());
        }
        let slot_bytes = slot_bytes(info) as u32;
        let place = a.place.for_kernel(OPERATION, &self.shape, info.tokens)?;
        let (first_plane, planes_here) = (2 * a.layers.start, 2 * a.layers.len());
        let maps: DevicePtr<f32> = a.planes.offset(planes.maps_at()).cast();
        let before = a.workspace.offset(self.warps_len(info));
        let (bins, coefficients) = (before.cast::<u16>(), before.cast::<f32>());
        let (rows, tiles_place) = match self.before {
            Before::Coefficients(_) => coefficients_at(&self.shape, coefficients, 0, info.tokens),
            _ => (PlanesAt::each(a.rows), place),
        };
        let encode_arguments = EncodeKernelArguments {
            planes: a.planes,
            slots: a.slots,
            lengths: a.lengths,
            workspace: a.workspace.cast(),
            failed: a.failed,
            bins,
            maps,
            rows,
            place: tiles_place,
            planes_here: planes_here as u32,
            first_plane: first_plane as u32,
            tokens: info.tokens as u32,
            block_tokens: info.block_tokens as u32,
            slot_bytes,
        };
        // As many blocks as encode concurrently, if that leaves each a tile for every warp.
        let joined = tiles.div_ceil(self.blocks).clamp(JOIN_WARPS, MOST_JOINED);
        let join_arguments = JoinKernelArguments {
            slots: a.slots,
            lengths: a.lengths,
            payload: a.payload,
            payload_bytes: a.payload_bytes,
            capacity: a.capacity as u64,
            tiles: count,
            slot_bytes,
            count: joined as u32,
        };
        let units = tiles / info.blocks() * info.blocks().div_ceil(WARPS);
        let tiles_grid = OPERATION.grid(&[("blocks", self.blocks.min(units))])?;
        let join_grid = OPERATION.grid(&[("blocks", tiles.div_ceil(joined))])?;
        // SAFETY: the structures are the kernels' arguments; the caller upholds the contract of their
        // pointers.
        unsafe {
            match &self.before {
                Before::Nothing => {}
                Before::Coefficients(transform) => {
                    let rows = transform::Rows {
                        pointers: a.rows,
                        place,
                        first_plane,
                        planes: planes_here,
                        first_token: 0,
                        tokens: info.tokens,
                        coefficients,
                        maps,
                        rope: KernelRope::default(),
                    };
                    transform.launch(stream, &rows)?;
                }
                Before::Bins(quantize) => {
                    let (tokens, block_tokens) = (info.tokens, info.block_tokens);
                    let rows = quantize::Rows {
                        planes: a.planes,
                        maps,
                        bins,
                        rows,
                        place,
                        first_plane,
                        planes_here,
                        tokens,
                        block_tokens,
                    };
                    quantize.launch(stream, &rows)?;
                }
            }
            self.tiles.launch(stream, tiles_grid, (WARPS * LANES) as u32, false, &encode_arguments)?;
            self.join.launch(stream, join_grid, JOIN_THREADS as u32, false, &join_arguments)
        }
    }
}

fn tiles(info: &FrameInfo, layers: usize) -> usize {
    let planes = layers.saturating_mul(2).saturating_mul(info.blocks());
    planes.saturating_mul(info.channels().div_ceil(LANES))
}

/// Bytes of the bins of a tile.
const fn bins_of_tile(info: &FrameInfo) -> usize {
    info.block_tokens.div_ceil(GROUP).saturating_mul(2 * LANES * GROUP)
}

/// Maximum bytes of a tile: 16 bits per element.
const fn slot_bytes(info: &FrameInfo) -> usize {
    info.block_tokens.saturating_mul(2 * LANES).saturating_add(4)
}
