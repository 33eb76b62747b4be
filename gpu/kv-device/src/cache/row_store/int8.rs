//! Rows in 8 bits per component: `kernels/int8_rows.cu` and `kernels/int8_load_sm90.cu`.

use cudarc::driver::CudaStream;
use kv_gpu::pq::Prefetch;
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use super::StoreShape;
use super::residency::Residency;
use crate::Result;
use crate::cache::eviction::Evictions;
use crate::gpu::Gpu;
use crate::rows::Rows;

const HEADERS: &[(&str, &str)] = &[("int8_rows.cuh", include_str!("../../kernels/int8_rows.cuh"))];

/// `store` and `load`.
pub(crate) fn program(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("int8_rows.cu", include_str!("../../kernels/int8_rows.cu"), HEADERS, &defines)
}

/// `load` by bulk copies, for compute capability 9.0 and later.
pub(crate) fn program_sm90(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("int8_load_sm90.cu", include_str!("../../kernels/int8_load_sm90.cu"), HEADERS, &defines)
}

/// Threads of a block: `THREADS` of int8_rows.cu.
const THREADS: u32 = 256;

/// Blocks of each head that store a chunk next to the model's kernels, few for the reason of `TO_HOST`.
const STORE_BLOCKS: usize = 2;

/// Threads of a block of `load`, and blocks per multiprocessor, as bulk copies and as loads.
const BULK: (u32, usize) = (32, 2);
const LOADS: (u32, usize) = (THREADS, 1);

/// Transfers of rows to host memory in 8 bits, and back: half the bytes of 16.
///
/// A token's key and value of one head are one record, in the format of the CPU (`RowFormat::Int8`).
pub(super) struct Int8Rows {
    store: Kernel,
    load: Kernel,
    load_launch: (u32, usize), // threads of a block, and blocks
    sm_count: usize,
    shape: StoreShape,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct StoreArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    records: DevicePtr<u16>,
    firsts: Option<DevicePtr<u32>>,
    counts: Option<DevicePtr<u32>>,
    first: u32,
    count: u32,
    heads: u32,
    sinks: u32,
    ring: u32,
    capacity: u32,
    stored: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LoadArguments {
    records: DevicePtr<u16>,
    tokens: Option<DevicePtr<u32>>,
    places: Option<DevicePtr<u32>>,
    counts: Option<DevicePtr<u32>>,
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    prefetch: Option<DevicePtr<u8>>,
    prefetch_len: u64,
    stored: u32,
    list_len: u32,
    count: u32,
    first_place: u32,
    capacity: u32,
}

const _: () = assert!(size_of::<StoreArguments>() == 72 && size_of::<LoadArguments>() == 88);

impl Int8Rows {
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, element: Element, shape: StoreShape) -> Result<Self> {
        let program = program(element, shape.head_dim);
        let (load, (threads, blocks)) = match gpu.device.capability().0 {
            9.. => (program_sm90(element, shape.head_dim), BULK),
            _ => (program.clone(), LOADS),
        };
        let sm_count = gpu.device.sm_count();
        Ok(Self {
            store: gpu.device.kernel(&program, "store", 0)?,
            load: gpu.device.kernel(&load, "load", 0)?.prefer_shared()?,
            load_launch: (threads, blocks * sm_count),
            sm_count,
            shape,
        })
    }

    /// Bytes of a record, of heads with `dim` components.
    pub const fn record_len(dim: usize) -> usize {
        2 * dim
    }

    /// Quantizes the rows of the evicted tokens of a layer.
    pub fn evict(
        &self,
        gpu: &Gpu,
        layer: usize,
        records: DevicePtr<u16>,
        exact: Rows,
        evictions: &Evictions,
    ) -> Result<()> {
        let StoreShape { batch, ring, .. } = self.shape;
        let arguments = StoreArguments {
            firsts: Some(evictions.firsts(layer)),
            counts: Some(evictions.counts(layer)),
            ..self.store_arguments(records, exact, ring)
        };
        self.launch_store(&gpu.stream, [batch, ring.div_ceil(32)], arguments)
    }

    /// Quantizes tokens of a sequence after the sinks, (first, count), from the rows of all tokens; `records`
    /// are the sequence's.
    pub fn take_chunk(
        &self,
        stream: &CudaStream,
        records: DevicePtr<u16>,
        (first, count): (usize, usize),
        rows: Rows,
    ) -> Result<()> {
        let arguments = StoreArguments {
            first: first as u32,
            count: count as u32,
            ..self.store_arguments(records, rows, rows.capacity)
        };
        self.launch_store(stream, [1, STORE_BLOCKS], arguments)
    }

    /// Quantizes the rows of a layer's ring, repeated, as those of all tokens.
    pub fn fill(&self, gpu: &Gpu, records: DevicePtr<u16>, exact: Rows) -> Result<()> {
        let StoreShape { batch, heads, ring, stored, .. } = self.shape;
        let arguments = StoreArguments { count: stored as u32, ..self.store_arguments(records, exact, ring) };
        self.launch_store(&gpu.stream, [batch, (4 * self.sm_count).div_ceil(batch * heads)], arguments)
    }

    fn store_arguments(&self, records: DevicePtr<u16>, rows: Rows, ring: usize) -> StoreArguments {
        let StoreShape { heads, sinks, stored, .. } = self.shape;
        StoreArguments {
            keys: rows.keys,
            values: rows.values,
            records,
            firsts: None,
            counts: None,
            first: 0,
            count: 0,
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            capacity: rows.capacity as u32,
            stored: stored as u32,
        }
    }

    /// Launches with (sequences, blocks of a head).
    fn launch_store(
        &self,
        stream: &CudaStream,
        [sequences, blocks]: [usize; 2],
        arguments: StoreArguments,
    ) -> Result<()> {
        let grid = Grid::new([self.shape.heads, sequences, blocks])?;
        // SAFETY: the structure is the kernel's argument. Tokens are after the sinks of rows that exist, and
        // below `stored`, for which the records have room.
        Ok(unsafe { self.store.launch(stream.cu_stream(), grid, THREADS, false, &arguments) }?)
    }

    /// Dequantizes the tokens of all sequences that `residency` misses: see `RowStore::fetch`.
    pub fn fetch(
        &self,
        gpu: &Gpu,
        records: DevicePtr<u16>,
        residency: &Residency,
        out: Rows,
        prefetch: Option<Prefetch>,
    ) -> Result<()> {
        let StoreShape { batch, heads, most, .. } = self.shape;
        let arguments = LoadArguments {
            tokens: Some(residency.misses()),
            places: Some(residency.places()),
            counts: Some(residency.miss_counts()),
            list_len: most as u32,
            prefetch: prefetch.map(|prefetch| prefetch.bytes),
            prefetch_len: prefetch.map_or(0, |prefetch| prefetch.len as u64),
            ..self.load_arguments(records, out)
        };
        self.launch_load(gpu, batch * heads, arguments)
    }

    /// Dequantizes the first `count` tokens of a sequence after the sinks to the rows of all its tokens;
    /// `records` are the sequence's.
    pub fn restore(&self, gpu: &Gpu, records: DevicePtr<u16>, count: usize, rows: Rows) -> Result<()> {
        let StoreShape { heads, sinks, .. } = self.shape;
        let arguments = LoadArguments {
            count: count as u32,
            first_place: sinks as u32,
            ..self.load_arguments(records, rows)
        };
        self.launch_load(gpu, heads, arguments)
    }

    fn load_arguments(&self, records: DevicePtr<u16>, out: Rows) -> LoadArguments {
        LoadArguments {
            records,
            tokens: None,
            places: None,
            counts: None,
            keys: out.keys,
            values: out.values,
            prefetch: None,
            prefetch_len: 0,
            stored: self.shape.stored as u32,
            list_len: 0,
            count: 0,
            first_place: 0,
            capacity: out.capacity as u32,
        }
    }

    fn launch_load(&self, gpu: &Gpu, heads: usize, arguments: LoadArguments) -> Result<()> {
        let (threads, blocks) = self.load_launch;
        let grid = Grid::new([(blocks / heads).max(1), heads, 1])?;
        // SAFETY: the structure is the kernel's argument. Tokens are below `stored`, and places are rows that
        // exist.
        Ok(unsafe { self.load.launch(gpu.stream(), grid, threads, true, &arguments) }?)
    }
}
