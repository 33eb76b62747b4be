//! The checksums of a frame's blocks, compared on the device that decodes them.

use std::ops::Range;

use codec_core::{FrameInfo, LANES};
use cudarc::driver::sys::CUstream;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, Program};

/// `THREADS` of the kernel.
const THREADS: u32 = 256;

const OPERATION: Operation = Operation("codec::Check");

/// Pointers and ranges of one launch of [`Check`].
#[derive(Clone, Debug)]
pub struct CheckArguments {
    /// The bytes of the frame, followed by at least three readable bytes. Layers that this launch does not
    /// check need not have arrived yet.
    pub frame: DevicePtr<u8>,
    /// The layers to check.
    pub layers: Range<usize>,
    /// One `u32`, 0 before the launch. Afterwards it is 1 + the index in the frame of a block with a wrong
    /// checksum, or 0 if there is none. A launch never lowers it.
    pub wrong: DevicePtr<u32>,
}

/// `codec_core::Frame::check_block` for all blocks of a range of layers: compares the CRC-32 of their bytes,
/// in the memory that [`Decode`](super::Decode) reads, with the frame's index.
///
/// # Cost
/// One pass over the bytes; a thread block reads one block of tokens of a plane.
/// # Source
/// The bitstream is codec-core's `FORMAT.md`.
pub struct Check {
    kernel: Kernel,
}

impl Check {
    /// The kernel, for [`compile`](crate::compile) without a device. It is the same for all shapes.
    #[must_use]
    pub fn program() -> Program {
        Program::new(source!("codec/check.cu"), &[])
    }

    /// Compiles the kernel.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&Self::program(), "codec_check", 0)? })
    }

    /// Launches it on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for layers that the frame does not have and for a lossless frame,
    /// [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds; the frame may begin at any byte. The header and
    /// index at `arguments.frame` are those of a frame that [`codec_core::Frame`] has parsed, `info` is its
    /// header, **and the three bytes after its last one are readable**.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        info: &FrameInfo,
        arguments: &CheckArguments,
    ) -> Result<(), Error> {
        let CheckArguments { frame, layers, wrong } = arguments;
        if layers.end > info.layers || info.lossless {
            return Err(OPERATION.error("layers that the frame does not have, or a frame without loss"));
        }
        if layers.is_empty() || info.blocks() == 0 {
            return Ok(());
        }
        let kernel_arguments = KernelArguments {
            frame: *frame,
            wrong: *wrong,
            frame_planes: OPERATION.in_32_bits("planes", info.layers.saturating_mul(2))?,
            frame_blocks: OPERATION.in_32_bits("blocks of tokens", info.blocks())?,
            tiles: OPERATION.in_32_bits("tiles of a block", info.channels().div_ceil(LANES))?,
            first_plane: OPERATION.in_32_bits("planes", layers.start.saturating_mul(2))?,
        };
        let grid = OPERATION.grid(&[("blocks of tokens", info.blocks()), ("planes", 2 * layers.len())])?;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, THREADS, false, &kernel_arguments) }
    }
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    frame: DevicePtr<u8>,
    wrong: DevicePtr<u32>,
    frame_planes: u32,
    frame_blocks: u32,
    tiles: u32,
    first_plane: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 32);
