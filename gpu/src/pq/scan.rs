use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, KERNELS, Program};

/// Tokens of a block of threads, and its threads: `CHUNK` and `THREADS` of the kernel.
pub(super) const CHUNK: usize = 8192;
const THREADS: u32 = 512;

/// Bytes of a block's shared memory that tables may take, with room for what else is there: an A100 or H100 has 163 KiB and more, other
/// devices have 99.
const fn most_tables(shared_memory: usize) -> usize {
    if shared_memory >= 160 << 10 { 128 << 10 } else { 64 << 10 }
}

/// What scores are looked up in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Query heads per key/value head.
    pub group: usize,
}

impl ScanShape {
    /// Queries that are looked up at once, and how often an entry stands side by side.
    fn entry(&self, shared_memory: usize) -> (usize, usize) {
        let at_once = [1, 2, 4, 4][self.group.clamp(1, 4) - 1];
        let most = most_tables(shared_memory);
        let fits = |copies: &usize| self.quantizer.lut_len() * at_once * 4 * copies <= most;
        (
            at_once,
            [32, 16, 8, 4, 2, 1].into_iter().filter(|copies| copies * at_once <= 32).find(fits).unwrap_or(0),
        )
    }

    /// Bytes of shared memory that a block takes of those that there are.
    pub(super) fn shared_bytes(&self, shared_memory: usize) -> usize {
        let (at_once, copies) = self.entry(shared_memory);
        self.quantizer.lut_len() * at_once * 4 * copies
    }

    /// The symbols that both scans and searches are compiled for.
    pub(super) fn defines(&self, shared_memory: usize) -> Result<[(&'static str, usize); 5], Error> {
        let (at_once, copies) = self.entry(shared_memory);
        if self.group == 0 || self.group > 16 || self.quantizer.nbits() > 8 || copies == 0 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "up to 8 bits, 1 to 16 query heads a key/value head, and tables of four of them in 128 KiB, \
                            or 64 on devices with less than 160 of shared memory",
            });
        }
        Ok([
            ("M", self.quantizer.m()),
            ("NBITS", self.quantizer.nbits() as usize),
            ("GROUP", self.group),
            ("VEC", at_once),
            ("COPIES", copies),
        ])
    }

    /// The program for blocks of up to `shared_memory` bytes ([`Device::shared_memory`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self, shared_memory: usize) -> Result<Program, Error> {
        Ok(Program::new("pq_scan", KERNELS.pq_scan, &self.defines(shared_memory)?))
    }
}

const OPERATION: Operation = Operation("pq::Scan");

/// Device pointers and sizes of one launch.
#[derive(Clone, Copy, Debug)]
pub struct ScanArguments {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Tokens that a sequence has room for.
    pub capacity: usize,
    /// f32 (batch, heads, group, m, ksub): tables, as [`Lut`](super::Lut) makes them.
    pub luts: DevicePtr<f32>,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), as [`Codes`](pq_core::Codes) has them.
    pub codes: DevicePtr<u8>,
    /// `u32` (batch,): tokens of each sequence.
    pub lengths: DevicePtr<u32>,
    /// f32 (batch, heads, group, capacity), of which a sequence's tokens are written.
    pub scores: DevicePtr<f32>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    luts: DevicePtr<f32>,
    codes: DevicePtr<u8>,
    lengths: DevicePtr<u32>,
    scores: DevicePtr<f32>,
    code_stride: u64,
    capacity: u64,
}

const _: () = assert!(size_of::<KernelArguments>() == 48);

/// `pq_core::scan_into` for all query heads, on the codes as `pq-core` keeps them, with the same bits.
///
/// # Cost
/// n * m look-ups for every four queries; codes are read once for as many, scores are written.
pub struct Scan {
    kernel: Kernel,
    shape: ScanShape,
}

impl Scan {
    /// Compiles it for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: ScanShape) -> Result<Self, Error> {
        let most = device.shared_memory();
        let kernel = device.kernel(&shape.program(most)?, "pq_scan", shape.shared_bytes(most))?;
        Ok(Self { kernel, shape })
    }

    /// Puts the scan on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with codes aligned to 4 bytes. Lengths do not exceed the capacity: the kernel
    /// does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &ScanArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.capacity == 0 {
            return Ok(());
        }
        let chunks = a.capacity.div_ceil(CHUNK);
        OPERATION.in_32_bits("tokens of whole chunks", chunks.saturating_mul(CHUNK))?;
        let grid = OPERATION.grid(&[("chunks", chunks), ("heads", a.heads), ("sequences", a.batch)])?;
        let kernel_arguments = KernelArguments {
            luts: a.luts,
            codes: a.codes,
            lengths: a.lengths,
            scores: a.scores,
            code_stride: self.shape.quantizer.codes_len(a.capacity) as u64,
            capacity: a.capacity as u64,
        };
        // SAFETY: the structure is the kernel's argument; the caller vouches for what its pointers lead to.
        unsafe { self.kernel.launch(stream, grid, THREADS, false, &kernel_arguments) }
    }
}
