//! The index of a frame, built on the device, so that encoded rows can be decoded without the host.

use codec_core::{FrameInfo, LANES};
use cudarc::driver::sys::CUstream;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, Program};

/// `THREADS` of the kernel.
const THREADS: u32 = 256;

const OPERATION: Operation = Operation("codec::Index");

/// Pointers of one launch of [`Index`].
#[derive(Clone, Copy, Debug)]
pub struct IndexArguments {
    /// `u16` (layers, 2, blocks, tiles): the length of each tile in units of two bytes, as
    /// [`Encode`](super::Encode) writes them.
    pub lengths: DevicePtr<u16>,
    /// Bytes ([`FrameInfo::head_len`],) in front of the payload. Only the ends of blocks and the lengths of
    /// tiles are written.
    pub frame: DevicePtr<u8>,
    /// One `u64`, to which the length of the frame in bytes is added.
    pub frame_bytes: DevicePtr<u64>,
}

/// Writes the index of a frame encoded by [`Encode`](super::Encode), for
/// [`Decode::launch_indexed`](super::Decode::launch_indexed): rows go through a lossy round trip without
/// synchronizing with the host.
///
/// Header, plane ids and checksums are left out, so the bytes are not a valid frame;
/// [`codec_core::assemble_frame`] makes one.
pub struct Index {
    kernel: Kernel,
}

impl Index {
    /// The kernel, which is the same for all shapes, for [`compile`](crate::compile) without a device.
    #[must_use]
    pub fn program() -> Program {
        Program::new(source!("codec/index.cu"), &[])
    }

    /// Compiles the kernel.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { kernel: device.kernel(&Self::program(), "codec_index", 0)? })
    }

    /// Launches it on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds; the frame may begin at any byte.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        info: &FrameInfo,
        arguments: &IndexArguments,
    ) -> Result<(), Error> {
        let kernel_arguments = KernelArguments {
            lengths: arguments.lengths,
            frame: arguments.frame,
            frame_bytes: arguments.frame_bytes,
            planes: OPERATION.in_32_bits("planes", info.layers.saturating_mul(2))?,
            entries: OPERATION.in_32_bits("blocks", info.layers.saturating_mul(2 * info.blocks()))?,
            tiles: OPERATION.in_32_bits("tiles of a block", info.channels().div_ceil(LANES))?,
        };
        let grid = OPERATION.grid(&[("blocks", 1)])?;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, THREADS, false, &kernel_arguments) }
    }
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    lengths: DevicePtr<u16>,
    frame: DevicePtr<u8>,
    frame_bytes: DevicePtr<u64>,
    planes: u32,
    entries: u32,
    tiles: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 40);
