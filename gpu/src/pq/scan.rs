//! The scores of all codes by table lookup, every score written to memory.

use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, Program};

/// Tokens and threads of a block: `CHUNK` and `THREADS` of the kernel.
pub(super) const CHUNK: usize = 8192;
const THREADS: u32 = 512;

/// Bytes of a block's shared memory that tables may take. The rest holds histograms and sums. An A100 or H100
/// has at least 163 KiB, other devices have 99.
const fn most_tables(shared_memory: usize) -> usize {
    if shared_memory >= 160 << 10 { 128 << 10 } else { 64 << 10 }
}

/// Compile-time shape of [`Scan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Query heads per KV head.
    pub group: usize,
}

impl ScanShape {
    /// Queries that one lookup serves, and copies of each table entry. Copies keep lanes in different banks.
    fn entry(&self, shared_memory: usize) -> (usize, usize) {
        let at_once = [1, 2, 4, 4][self.group.clamp(1, 4) - 1];
        let most = most_tables(shared_memory);
        let fits = |copies: &usize| self.quantizer.lut_len().saturating_mul(4 * at_once * copies) <= most;
        (
            at_once,
            [32, 16, 8, 4, 2, 1].into_iter().filter(|copies| copies * at_once <= 32).find(fits).unwrap_or(0),
        )
    }

    /// Bytes of the tables in a block of up to `shared_memory` bytes.
    pub(super) fn shared_bytes(&self, shared_memory: usize) -> usize {
        let (at_once, copies) = self.entry(shared_memory);
        self.quantizer.lut_len().saturating_mul(4 * at_once * copies)
    }

    /// The preprocessor symbols of both scans and searches.
    pub(super) fn defines(&self, shared_memory: usize) -> Result<[(&'static str, usize); 5], Error> {
        let (at_once, copies) = self.entry(shared_memory);
        if self.group == 0 || self.group > 16 || self.quantizer.nbits() > 8 || copies == 0 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "up to 8 bits, 1 to 16 query heads per key/value head, and tables of four of them \
                            in 128 KiB, or 64 on devices with less than 160 of shared memory",
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

    /// The kernel for blocks of up to `shared_memory` bytes ([`Device::shared_memory`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self, shared_memory: usize) -> Result<Program, Error> {
        Ok(Program::new(source!("pq_search/scan.cu"), &self.defines(shared_memory)?))
    }
}

const OPERATION: Operation = Operation("pq::Scan");

/// Pointers and sizes of one launch of [`Scan`].
#[derive(Clone, Copy, Debug)]
pub struct ScanArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Capacity of a sequence in tokens.
    pub capacity: usize,
    /// `f32` (batch, heads, group, m, ksub): lookup tables, by [`Lut`](super::Lut).
    pub luts: DevicePtr<f32>,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), in the layout of
    /// [`Codes`](pq_core::Codes).
    pub codes: DevicePtr<u8>,
    /// `u32` (batch,): the length of each sequence in tokens.
    pub lengths: DevicePtr<u32>,
    /// `f32` (batch, heads, group, capacity), written up to the length of each sequence.
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

/// `pq_core::scan_into` for all query heads over codes in the layout of `pq-core`, with the same bits.
///
/// # Cost
/// n * m lookups and one pass over the codes for every four queries; every score is written once.
pub struct Scan {
    kernel: Kernel,
    shape: ScanShape,
}

impl Scan {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: ScanShape) -> Result<Self, Error> {
        let most = device.shared_memory();
        let kernel = device.kernel(&shape.program(most)?, "pq_scan", shape.shared_bytes(most))?;
        Ok(Self { kernel, shape })
    }

    /// Launches the scan on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with codes aligned to 4 bytes. Lengths do not
    /// exceed the capacity: the kernel does not clamp them.
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
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, THREADS, false, &kernel_arguments) }
    }
}
