use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use crate::device::Kernel;
use crate::{Device, Error, KERNELS, Program};

/// Tokens of a block of threads, and its threads: `CHUNK` and `THREADS` of the kernel.
pub(super) const CHUNK: usize = 8192;
const THREADS: u32 = 512;

/// Bytes of shared memory that tables may take on every architecture, with room for what else is there.
const MOST_TABLES: usize = 128 << 10;

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
    fn entry(&self) -> (usize, usize) {
        let at_once = [1, 2, 4, 4][self.group.clamp(1, 4) - 1];
        let fits = |copies: &usize| self.quantizer.lut_len() * at_once * 4 * copies <= MOST_TABLES;
        (
            at_once,
            [32, 16, 8, 4, 2, 1].into_iter().filter(|copies| copies * at_once <= 32).find(fits).unwrap_or(0),
        )
    }

    /// Bytes of shared memory.
    pub(super) fn shared_bytes(&self) -> usize {
        let (at_once, copies) = self.entry();
        self.quantizer.lut_len() * at_once * 4 * copies
    }

    /// The symbols that both scans and searches are compiled for.
    pub(super) fn defines(&self) -> Result<[(&'static str, usize); 5], Error> {
        let (at_once, copies) = self.entry();
        if self.group == 0 || self.group > 16 || self.quantizer.nbits() > 8 || copies == 0 {
            return Err(Error::Unsupported {
                operation: format!("{self:?}"),
                supported: "up to 8 bits, 1 to 16 query heads a key/value head, and tables of four of them in 128 KiB",
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

    /// The program.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        Ok(Program::new("pq_scan", KERNELS.pq_scan, &self.defines()?))
    }
}

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
    pub luts: u64,
    /// Bytes (batch, heads, [`PqShape::codes_len`] of the capacity), as [`Codes`](pq_core::Codes) has them.
    pub codes: u64,
    /// `u32` (batch,): tokens of each sequence.
    pub lengths: u64,
    /// f32 (batch, heads, group, capacity), of which a sequence's tokens are written.
    pub scores: u64,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    luts: u64,
    codes: u64,
    lengths: u64,
    scores: u64,
    code_stride: u64,
    capacity: u64,
}

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
        Ok(Self { kernel: device.kernel(&shape.program()?, "pq_scan", shape.shared_bytes())?, shape })
    }

    /// Puts the scan on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// Every pointer must be to device memory of the device, aligned to its element, codes to 4 bytes, with as many elements as its
    /// shape says, and stay so, unwritten by others, until the launch has run; lengths must not exceed the capacity; `stream` must be of
    /// the device.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &ScanArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 || a.capacity == 0 {
            return Ok(());
        }
        let chunks = a.capacity.div_ceil(CHUNK);
        if a.batch > 65_535 || a.heads > 65_535 || u32::try_from(chunks.saturating_mul(CHUNK)).is_err() {
            let problem = "more than 65,535 sequences or heads, or tokens than 32 bits count".into();
            return Err(Error::Argument { operation: "pq::Scan", problem });
        }
        let kernel_arguments = KernelArguments {
            luts: a.luts,
            codes: a.codes,
            lengths: a.lengths,
            scores: a.scores,
            code_stride: self.shape.quantizer.codes_len(a.capacity) as u64,
            capacity: a.capacity as u64,
        };
        let grid = (chunks as u32, a.heads as u32, a.batch as u32);
        // SAFETY: the structure is the kernel's argument; the caller vouches for what its pointers lead to.
        unsafe { self.kernel.launch(stream, grid, THREADS, false, &kernel_arguments) }
    }
}
