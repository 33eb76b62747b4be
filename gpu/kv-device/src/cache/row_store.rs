//! Exact rows of all tokens in host or device memory, of which a step reads a few.

pub(crate) mod int8;
pub(crate) mod residency;

use cudarc::driver::CudaStream;
use kv_attend::owner::{Pair, Side};
use kv_gpu::pq::{Gather, GatherArguments, MissingRows, Prefetch};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};
use rayon::prelude::*;

use super::eviction::Evictions;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_ROWS, fill_rows};
use crate::host_memory::{HostBuffer, check_available};
use crate::memory::Buffer;
use crate::plan::RowHome;
use crate::rows::{Chunk, Rows};
use crate::{Error, Result};
use int8::Int8Rows;
use residency::Residency;

/// `tabulate`, `budget`, `evict` and `copy`: of caches that retrieve rows.
pub(crate) fn program() -> Program {
    Program::own("retrieval.cu", include_str!("../kernels/retrieval.cu"), &[], &[])
}

/// Sizes of a [`RowStore`].
#[derive(Clone, Copy)]
pub(super) struct StoreShape {
    pub n_layers: usize,
    pub batch: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub sinks: usize,
    pub ring: usize,
    pub stored: usize,       // tokens of a sequence that the store has room for
    pub most: usize,         // tokens of a sequence that a step chooses at most
    pub staged_sides: usize, // that are quantized: 1 for keys, 2 for keys and values
}

impl StoreShape {
    /// Elements of a layer's keys of `rows` rows a head.
    pub const fn side_len(&self, rows: usize) -> usize {
        self.batch * self.heads * rows * self.head_dim
    }
}

/// Exact rows of all tokens behind the sinks, in device memory or in memory of the host.
///
/// A token's rows are written when it is encoded, up to a ring and at least half a ring before a step can
/// choose it ([`Evictions`]). Rows on the host are read over PCIe, unless recent steps have chosen them
/// ([`Residency`], `pq::Gather`, `pq::GatherAttend`). The decoder's stream writes them, so its order is the
/// fence between these stores and the loads.
pub(super) struct RowStore {
    pub shape: StoreShape,
    evict: Kernel,
    copy: Kernel,
    rows: Memory,        // (layer, keys and values, batch, heads, stored, head_dim)
    staged: Buffer<u16>, // (layer, sides, batch, heads, ring, head_dim)
}

/// Where a step has its chosen rows.
pub(super) struct Found {
    pub slots: DevicePtr<u32>, // (batch, heads, most)
    pub missing: Option<MissingRows>,
}

enum Memory {
    Device(Buffer<u16>),
    Host(Box<HostRows>),
}

struct HostRows {
    layers: Vec<HostBuffer<u16>>, // as on the device, or records
    residency: Residency,
    form: HostForm,
    prefetch_next: Vec<Prefetch>, // of each layer: what the next product reads, as far as L2 takes it
}

enum HostForm {
    Exact(Gather),
    Int8(Int8Rows),
}

#[derive(Clone, Copy)]
#[repr(C)]
struct EvictArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    stored_keys: Option<DevicePtr<u16>>,
    stored_values: Option<DevicePtr<u16>>,
    staged: DevicePtr<u16>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    heads: u32,
    sinks: u32,
    ring: u32,
    capacity: u32,
    stored: u32,
    chunks: u32,
    staged_sides: u32,
}

const _: () = assert!(size_of::<EvictArguments>() == 88);

/// Rows of consecutive tokens of one sequence.
#[derive(Clone, Copy)]
struct HeadRows {
    sides: Pair<DevicePtr<u16>>, // the first row of the first head
    stride: usize,               // rows from head to head
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CopyArguments {
    keys: DevicePtr<u16>,
    values: DevicePtr<u16>,
    to_keys: DevicePtr<u16>,
    to_values: DevicePtr<u16>,
    chunks: u64,
    from_stride: u64,
    to_stride: u64,
    heads: u32,
}

const _: () = assert!(size_of::<CopyArguments>() == 64);

/// The grid and the threads of a copy.
type CopyLaunch = ([usize; 3], u32);

/// The copy of a chunk to the host, next to the model's kernels. A block keeps a multiprocessor from products
/// for as long as the link takes, so they are few; two saturate it. With 256 blocks a prefill took as long as
/// if the copies had run alone (`gpu/src/kernels/PERFORMANCE.md`).
const TO_HOST: CopyLaunch = ([1, 1, 2], 512);

/// Blocks of each head, and threads, of copies within device memory and of those from the host, for which the
/// stream waits.
const COPY: (usize, u32) = (16, 256);

/// The part of L2 that what is prefetched may take: rows and the queries of attention need little.
const L2_SHARE: (usize, usize) = (2, 3);

impl RowStore {
    /// An empty store; `held` rows of a head stay on the device, at least as many as a step chooses.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the host has no room for the rows; [`Error::Gpu`].
    pub fn new(gpu: &Gpu, element: Element, shape: StoreShape, home: RowHome, held: usize) -> Result<Self> {
        let StoreShape { n_layers, batch, heads, head_dim, ring, stored, .. } = shape;
        let row_bytes = size_of::<u16>() * head_dim;
        let pair_bytes =
            if home == RowHome::HostInt8 { Int8Rows::record_len(head_dim) } else { 2 * row_bytes };
        let pairs = [n_layers, batch, heads, stored];
        let bytes = pairs.iter().try_fold(pair_bytes, |all, &n| all.checked_mul(n)).unwrap_or(usize::MAX);
        let rows = if home == RowHome::Device {
            Memory::Device(Buffer::zeros(gpu, bytes / size_of::<u16>())?)
        } else {
            check_available(bytes)?;
            let len = bytes / size_of::<u16>() / n_layers.max(1);
            let layers = (0..n_layers).into_par_iter().map(|_| HostBuffer::for_scattered_reads(gpu, len));
            Memory::Host(Box::new(HostRows {
                layers: layers.collect::<Result<_>>()?,
                residency: Residency::new(gpu, &shape, held)?,
                form: match home {
                    RowHome::HostInt8 => HostForm::Int8(Int8Rows::new(gpu, element, shape)?),
                    _ => HostForm::Exact(Gather::new(&gpu.device, row_bytes)?),
                },
                prefetch_next: vec![],
            }))
        };
        Ok(Self {
            evict: gpu.device.kernel(&program(), "evict", 0)?,
            copy: gpu.device.kernel(&program(), "copy", 0)?,
            rows,
            staged: Buffer::zeros(gpu, n_layers * shape.staged_sides * shape.side_len(ring))?,
            shape,
        })
    }

    /// The rows in 8 bits, and their records of a layer from a sequence on; none for exact rows.
    fn int8(&self, layer: usize, sequence: usize) -> Option<(&Int8Rows, DevicePtr<u16>)> {
        let StoreShape { heads, head_dim, stored, .. } = self.shape;
        match &self.rows {
            Memory::Host(host) => match &host.form {
                HostForm::Int8(int8) => {
                    let of_sequence = heads * stored * Int8Rows::record_len(head_dim) / size_of::<u16>();
                    Some((int8, host.layers[layer].pointer().offset(sequence * of_sequence)))
                }
                HostForm::Exact(_) => None,
            },
            Memory::Device(_) => None,
        }
    }

    /// Exact rows of a layer: keys, or values (batch, heads, stored, head_dim).
    pub fn rows(&self, side: Side, layer: usize) -> DevicePtr<u16> {
        let len = self.shape.side_len(self.shape.stored);
        match &self.rows {
            Memory::Device(rows) => rows.pointer().offset((2 * layer + side as usize) * len),
            Memory::Host(host) => host.layers[layer].pointer().offset(side as usize * len),
        }
    }

    /// Copies of the rows of the layer's last eviction: (batch, heads, ring, head_dim).
    pub fn staged(&self, side: Side, layer: usize) -> DevicePtr<u16> {
        let StoreShape { ring, staged_sides, .. } = self.shape;
        self.staged.pointer().offset((staged_sides * layer + side as usize) * self.shape.side_len(ring))
    }

    /// Evicts the layer's due tokens: copies their rows to the store and to the staging buffer.
    pub fn evict(&self, gpu: &Gpu, layer: usize, exact: Rows, evictions: &Evictions) -> Result<()> {
        let StoreShape { batch, heads, head_dim, sinks, ring, stored, staged_sides, .. } = self.shape;
        let int8 = self.int8(layer, 0);
        let of_side = |side| int8.is_none().then(|| self.rows(side, layer));
        let arguments = EvictArguments {
            keys: exact.keys,
            values: exact.values,
            stored_keys: of_side(Side::Keys),
            stored_values: of_side(Side::Values),
            staged: self.staged(Side::Keys, layer),
            firsts: evictions.firsts(layer),
            counts: evictions.counts(layer),
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            capacity: exact.capacity as u32,
            stored: stored as u32,
            chunks: (head_dim / 8) as u32,
            staged_sides: staged_sides as u32,
        };
        let grid = Grid::new([heads, batch, 2])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The plan
        // counts at most a ring of tokens, which come before tokens that fit. The background stream no longer
        // reads what is staged: the event of the layer's last eviction has been waited for.
        unsafe { self.evict.launch(gpu.stream(), grid, 256, false, &arguments) }?;
        int8.map_or(Ok(()), |(int8, records)| int8.evict(gpu, layer, records, exact, evictions))
    }

    /// Brings the rows of the chosen tokens (batch, heads, most), of which each head has `counts`, to their
    /// [slots](Self::slots) in `out`, and reads those from the host that are not there since earlier steps.
    pub fn fetch(
        &self,
        gpu: &Gpu,
        layer: usize,
        (tokens, counts): (DevicePtr<u32>, DevicePtr<u32>),
        out: Rows,
    ) -> Result<()> {
        let Memory::Host(host) = &self.rows else { return Ok(()) };
        let HostRows { residency, form, prefetch_next, .. } = &**host;
        let prefetch = prefetch_next.get(layer).copied();
        residency.launch(gpu, layer, tokens, counts)?;
        let gather = match form {
            HostForm::Exact(gather) => gather,
            HostForm::Int8(int8) => {
                return int8.fetch(gpu, host.layers[layer].pointer(), residency, out, prefetch);
            }
        };
        let arguments = GatherArguments {
            heads: self.shape.batch * self.shape.heads,
            keys: self.rows(Side::Keys, layer).cast(),
            values: self.rows(Side::Values, layer).cast(),
            head_rows: self.shape.stored,
            rows: residency.misses(),
            places: Some(residency.places()),
            counts: Some(residency.miss_counts()),
            list_len: self.shape.most,
            keys_out: out.keys.cast(),
            values_out: out.values.cast(),
            out_len: out.capacity,
            prefetch,
        };
        // SAFETY: the buffers have the lengths of `new`; slots are below the number of rows that stay, and
        // differ. Tokens are below `stored`, and this stream has written their rows to the host.
        Ok(unsafe { gather.launch(gpu.stream(), &arguments) }?)
    }

    /// Looks the chosen tokens up as [`Self::fetch`] does, but leaves exact rows that are not in their slots
    /// to attention, which reads them as they arrive and keeps them there.
    ///
    /// # Errors
    /// [`Error::Argument`] when the store is in device memory; [`Error::Gpu`].
    pub fn find(
        &self,
        gpu: &Gpu,
        layer: usize,
        (tokens, counts): (DevicePtr<u32>, DevicePtr<u32>),
        slots: Rows,
    ) -> Result<Found> {
        let Memory::Host(host) = &self.rows else {
            return Err(Error::argument("rows in device memory have no slots"));
        };
        let missing = match host.form {
            HostForm::Exact(_) => {
                host.residency.launch(gpu, layer, tokens, counts)?;
                Some(MissingRows {
                    keys: self.rows(Side::Keys, layer).cast(),
                    values: self.rows(Side::Values, layer).cast(),
                    head_rows: self.shape.stored,
                    tokens,
                    bits: host.residency.missing(),
                    prefetch: host.prefetch_next.get(layer).copied(),
                })
            }
            HostForm::Int8(_) => {
                self.fetch(gpu, layer, (tokens, counts), slots)?;
                None
            }
        };
        Ok(Found { slots: host.residency.slots(), missing })
    }

    /// Sets the weights that each layer reads after attention. They are prefetched into L2 while rows arrive.
    pub fn prefetch_next(&mut self, gpu: &Gpu, reads: &[Prefetch]) {
        let Memory::Host(host) = &mut self.rows else { return };
        let most = gpu.device.l2_bytes() * L2_SHARE.0 / L2_SHARE.1;
        let at_most = |&Prefetch { bytes, len }: &Prefetch| Prefetch { bytes, len: len.min(most) };
        host.prefetch_next = reads.iter().map(at_most).collect();
    }

    /// The slot of every token that was fetched last, (batch, heads, most); none where rows are read in the
    /// store.
    pub fn slots(&self) -> Option<DevicePtr<u32>> {
        match &self.rows {
            Memory::Device(_) => None,
            Memory::Host(host) => Some(host.residency.slots()),
        }
    }

    /// Copies the first `count` tokens behind the sinks of a sequence to rows of all its tokens.
    pub fn restore(&self, gpu: &Gpu, layer: usize, sequence: usize, count: usize, rows: Rows) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        if let Some((int8, records)) = self.int8(layer, sequence) {
            return int8.restore(gpu, records, count, rows);
        }
        let (stored, rows) = self.spans(layer, sequence, (0, count), rows)?;
        self.launch_copy(&gpu.stream, rows, stored, count, self.copy_of_all_heads())
    }

    /// Takes the tokens that a chunk's end stores, (first, count) behind the sinks, from rows of all tokens.
    pub fn take_chunk(
        &self,
        stream: &CudaStream,
        layer: usize,
        chunk: &Chunk,
        tokens: (usize, usize),
        rows: Rows,
    ) -> Result<()> {
        if tokens.1 == 0 {
            return Ok(());
        }
        if let Some((int8, records)) = self.int8(layer, chunk.sequence) {
            return int8.take_chunk(stream, records, tokens, rows);
        }
        let (stored, rows) = self.spans(layer, chunk.sequence, tokens, rows)?;
        let launch = match self.rows {
            Memory::Device(_) => self.copy_of_all_heads(),
            Memory::Host(_) => TO_HOST,
        };
        self.launch_copy(stream, stored, rows, tokens.1, launch)
    }

    const fn copy_of_all_heads(&self) -> CopyLaunch {
        ([COPY.0, self.shape.heads, 2], COPY.1)
    }

    /// Where tokens of one sequence, (first, count) behind the sinks, are in the store and in rows of all its
    /// tokens.
    fn spans(
        &self,
        layer: usize,
        sequence: usize,
        (first, count): (usize, usize),
        rows: Rows,
    ) -> Result<(HeadRows, HeadRows)> {
        let StoreShape { heads, head_dim, sinks, stored, .. } = self.shape;
        if first + count > stored || sinks + first + count > rows.capacity {
            return Err(Error::argument("more tokens than there are rows"));
        }
        let of_store = |side| self.rows(side, layer).offset((sequence * heads * stored + first) * head_dim);
        let of_rows = |rows: DevicePtr<AnyElement>| rows.cast::<u16>().offset((sinks + first) * head_dim);
        let sides = Pair { keys: of_store(Side::Keys), values: of_store(Side::Values) };
        let in_store = HeadRows { sides, stride: stored };
        let sides = Pair { keys: of_rows(rows.keys), values: of_rows(rows.values) };
        Ok((in_store, HeadRows { sides, stride: rows.capacity }))
    }

    /// Launches a copy of `count` rows of every head.
    fn launch_copy(
        &self,
        stream: &CudaStream,
        to: HeadRows,
        from: HeadRows,
        count: usize,
        (grid, threads): CopyLaunch,
    ) -> Result<()> {
        let StoreShape { heads, head_dim, .. } = self.shape;
        let chunks = |rows: usize| (rows * head_dim / 8) as u64;
        let arguments = CopyArguments {
            keys: from.sides.keys,
            values: from.sides.values,
            to_keys: to.sides.keys,
            to_values: to.sides.values,
            chunks: chunks(count),
            from_stride: chunks(from.stride),
            to_stride: chunks(to.stride),
            heads: heads as u32,
        };
        // SAFETY: the structure is the kernel's argument, and `spans` has checked that the rows exist.
        Ok(unsafe { self.copy.launch(stream.cu_stream(), Grid::new(grid)?, threads, false, &arguments) }?)
    }

    /// Forgets which rows the last steps have fetched: they are of other sequences.
    pub fn invalidate(&mut self, gpu: &Gpu) -> Result<()> {
        match &mut self.rows {
            Memory::Device(_) => Ok(()),
            Memory::Host(host) => host.residency.invalidate(gpu),
        }
    }

    /// The same for one sequence.
    pub fn invalidate_one(&self, gpu: &Gpu, sequence: usize) -> Result<()> {
        match &self.rows {
            Memory::Device(_) => Ok(()),
            Memory::Host(host) => {
                host.residency.invalidate_one(gpu, sequence * self.shape.heads, self.shape.heads)
            }
        }
    }

    /// Fills the store with hashed rows; those in 8 bits are the exact ones of each layer, again and again.
    pub fn fill_random(&self, gpu: &Gpu, element: Element, exact: impl Fn(usize) -> Rows) -> Result<()> {
        let len = self.shape.side_len(self.shape.stored);
        (0..self.shape.n_layers).try_for_each(|layer| {
            if let Some((int8, records)) = self.int8(layer, 0) {
                return int8.fill(gpu, records, exact(layer));
            }
            Side::ALL.into_iter().try_for_each(|side| {
                let tensor = RANDOM_ROWS + (2 * layer + side as usize) as u32;
                fill_rows(gpu, element, self.rows(side, layer), len, tensor)
            })
        })
    }

    /// Bytes of a token's key and value of one head in the store.
    pub const fn pair_bytes(&self) -> usize {
        let dim = self.shape.head_dim;
        match &self.rows {
            Memory::Host(host) if matches!(host.form, HostForm::Int8(_)) => Int8Rows::record_len(dim),
            _ => 2 * size_of::<u16>() * dim,
        }
    }

    /// Rows that have been fetched so far.
    pub fn fetched(&self, gpu: &Gpu) -> Result<u64> {
        match &self.rows {
            Memory::Device(_) => Ok(0),
            Memory::Host(host) => host.residency.fetched(gpu),
        }
    }

    /// Makes this part of the rows that a step would fetch count as held, for timing.
    pub fn force_hits(&mut self, share: f32) {
        if let Memory::Host(host) = &mut self.rows {
            host.residency.force_hits(share);
        }
    }

    /// Bytes of copies for the quantizers.
    pub fn staged_bytes(&self) -> usize {
        self.staged.bytes()
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let rows = match &self.rows {
            Memory::Device(rows) => rows.bytes(),
            Memory::Host(host) => host.residency.bytes(),
        };
        rows + self.staged.bytes()
    }

    /// Bytes of host memory that the device reads.
    pub fn host_bytes(&self) -> usize {
        match &self.rows {
            Memory::Device(_) => 0,
            Memory::Host(host) => host.layers.iter().map(HostBuffer::bytes).sum(),
        }
    }
}
