//! Copies of listed rows, from the device or over the link, into contiguous memory.

use cudarc::driver::sys::CUstream;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, Program};

/// Blocks per multiprocessor, over all heads and both sides.
const BLOCKS: usize = 2;
/// Bytes of a row that a thread of the bulk copies has in flight, at most.
const PIECE: usize = 512;

const OPERATION: Operation = Operation("pq::Gather");

/// Pointers and sizes of one launch of [`Gather`].
#[derive(Clone, Copy, Debug)]
pub struct GatherArguments {
    /// Number of KV heads.
    pub heads: usize,
    /// Bytes (heads, `head_rows`, row): keys, either all of them in pinned or managed host memory, or a block
    /// cache on the device.
    pub keys: DevicePtr<u8>,
    /// Bytes (heads, `head_rows`, row): values.
    pub values: DevicePtr<u8>,
    /// Number of rows of a head in `keys` and `values`.
    pub head_rows: usize,
    /// `u32` (heads, `list_len`): the rows to collect, such as the tokens of a search, the misses of a
    /// [`BlockCache`](pq_core::BlockCache), or the rows of its hits.
    pub rows: DevicePtr<u32>,
    /// `u32` (heads, `list_len`): the output row of each entry; by default its index in the list.
    pub places: Option<DevicePtr<u32>>,
    /// `u32` (heads,): the number of entries of each list; by default `list_len`.
    pub counts: Option<DevicePtr<u32>>,
    /// Capacity of a list in entries.
    pub list_len: usize,
    /// Bytes (heads, `out_len`, row), written at `places`.
    pub keys_out: DevicePtr<u8>,
    /// Bytes (heads, `out_len`, row), written at `places`.
    pub values_out: DevicePtr<u8>,
    /// Capacity of the outputs of a head in rows.
    pub out_len: usize,
    /// Memory to prefetch into L2 for later kernels.
    pub prefetch: Option<Prefetch>,
}

/// Device memory that later kernels read, such as the weights of the next matrix product, to prefetch into L2
/// while rows cross the link.
#[derive(Clone, Copy, Debug)]
pub struct Prefetch {
    /// Bytes (`len`,).
    pub bytes: DevicePtr<u8>,
    /// Size in bytes, at most what fits L2.
    pub len: usize,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    keys: DevicePtr<u8>,
    values: DevicePtr<u8>,
    rows: DevicePtr<u32>,
    places: Option<DevicePtr<u32>>,
    counts: Option<DevicePtr<u32>>,
    keys_out: DevicePtr<u8>,
    values_out: DevicePtr<u8>,
    head_rows: u64,
    list_len: u64,
    out_len: u64,
    prefetch: Option<DevicePtr<u8>>,
    prefetch_len: u64,
}

const _: () = assert!(size_of::<KernelArguments>() == 96);

/// Collects the keys and values of selected tokens.
///
/// The hits and the misses of a [`BlockCache`](pq_core::BlockCache) take one launch each into the same
/// output, with `places` for both. Attention that does not need contiguous rows reads them itself
/// ([`GatherAttend`](super::GatherAttend)).
///
/// On sm_90, a launch with programmatic dependent launch (PDL) may follow at once: it starts while rows are
/// in flight, and must wait (`griddepcontrol.wait`) before it reads them.
///
/// # Cost
/// Every row of the lists is read and written once. From host memory, PCIe bandwidth is the limit.
/// # Source
/// PQCache (arXiv 2407.12820), 3.4.
pub struct Gather {
    kernel: Kernel,
    row_pieces: usize, // pieces of a row, one per thread and step
    threads: usize,
    blocks: usize, // of all heads and both sides
}

/// Whether rows are bulk copies (`gather_sm90.cu`).
const fn has_bulk_copies(capability: (i32, i32)) -> bool {
    capability.0 >= 9
}

impl Gather {
    /// The kernel for rows of `row_bytes` bytes and a compute capability.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(row_bytes: usize, capability: (i32, i32)) -> Result<Program, Error> {
        if row_bytes == 0 || !row_bytes.is_multiple_of(16) || row_bytes > 1 << 16 {
            let operation = format!("gather rows of {row_bytes} bytes");
            return Err(Error::Unsupported { operation, supported: "multiples of 16 up to 65,536" });
        }
        let row = ("ROW_BYTES", row_bytes);
        Ok(if has_bulk_copies(capability) {
            Program::new(source!("gather_sm90.cu"), &[row, ("PIECE", row_bytes.min(PIECE))])
        } else {
            Program::new(source!("gather.cu"), &[row])
        })
    }

    /// Compiles the kernel for rows of `row_bytes` bytes: `dim` times the size of an element.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, row_bytes: usize) -> Result<Self, Error> {
        let capability = device.capability();
        // With the carve-out of the next kernel, blocks of both fit on one multiprocessor.
        let kernel = device.kernel(&Self::program(row_bytes, capability)?, "gather", 0)?.prefer_shared()?;
        let bulk = has_bulk_copies(capability);
        let (threads, piece) = if bulk { (32, row_bytes.min(PIECE)) } else { (128, 16) };
        let blocks = BLOCKS * device.sm_count();
        Ok(Self { kernel, row_pieces: row_bytes.div_ceil(piece), threads, blocks })
    }

    /// Launches the collection on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes; `keys`
    /// and `values` may be pinned or managed host memory. Rows are below `head_rows`, places below `out_len`,
    /// no place occurs twice in a list, and counts do not exceed `list_len`: the kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &GatherArguments) -> Result<(), Error> {
        let a = arguments;
        if a.heads == 0 || a.list_len == 0 {
            return Ok(());
        }
        let pieces = a.list_len.saturating_mul(self.row_pieces);
        let blocks = pieces.div_ceil(self.threads).min((self.blocks / 2 / a.heads).max(1));
        let grid = OPERATION.grid(&[("blocks", blocks), ("heads", a.heads), ("sides", 2)])?;
        let kernel_arguments = KernelArguments {
            keys: a.keys,
            values: a.values,
            rows: a.rows,
            places: a.places,
            counts: a.counts,
            keys_out: a.keys_out,
            values_out: a.values_out,
            head_rows: a.head_rows as u64,
            list_len: a.list_len as u64,
            out_len: a.out_len as u64,
            prefetch: a.prefetch.map(|prefetch| prefetch.bytes),
            prefetch_len: a.prefetch.map_or(0, |prefetch| prefetch.len as u64),
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, self.threads as u32, true, &kernel_arguments) }
    }
}
