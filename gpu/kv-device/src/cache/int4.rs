//! Uniform 4-bit codes on a device: `kernels/int4.cu`.

use kv_attend::owner::Footprint;
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use super::window::{Window, WindowShape};
use super::{ChunkCache, StepCache};
use crate::Result;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_CODES, fill_codes};
use crate::memory::Buffer;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;

/// `encode`, `decode`, `attend` and `merge`.
pub(crate) fn program(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("int4.cu", include_str!("../kernels/int4.cu"), &[], &defines)
}

/// Tokens of a block, and threads of the kernels.
const BLOCK: usize = 64;
const THREADS: u32 = 128;

/// Parts of the tokens per multiprocessor: enough blocks to hide latency.
const PARTS: usize = 8;

/// KIVI at 4 bits: keys quantized by channel, values by token, in blocks of 64 tokens that leave the window
/// at once, as on the CPU; sinks, the window and up to 63 more tokens are exact. The baseline for product
/// codes: a straightforward kernel (`kernels/int4.cu`) on CUDA cores.
///
/// A block is encoded before the step whose token evicts it, on the stream of the steps. The ring has room
/// for the window and one block.
pub(crate) struct Int4Cache {
    encode: Kernel,
    decode: Kernel,
    attend: Kernel,
    merge: Kernel,
    element: Element,
    window: Window,
    recent: usize,
    blocks: Buffer<u8>,    // (layer, batch, heads, blocks of a head, bytes of a block)
    partials: Buffer<f32>, // (batch, heads, parts, group, head_dim + 2)
    parts: usize,
    group: usize,
}

/// `Window` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Recent {
    sinks: u32,
    recent: u32,
    ring: u32,
    capacity: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct EncodeArguments {
    rows: DevicePtr<AnyElement>,
    blocks: DevicePtr<u8>,
    positions: Option<DevicePtr<u32>>,
    rows_side: u64,
    blocks_of_head: u32,
    heads: u32,
    first: u32,
    window: Recent,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeArguments {
    blocks: DevicePtr<u8>,
    keys: DevicePtr<u16>,
    values: DevicePtr<u16>,
    blocks_of_head: u32,
    capacity: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AttendArguments {
    blocks: DevicePtr<u8>,
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    queries: DevicePtr<AnyElement>,
    positions: DevicePtr<u32>,
    partials: DevicePtr<f32>,
    blocks_of_head: u32,
    heads: u32,
    scale: f32,
    window: Recent,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MergeArguments {
    partials: DevicePtr<f32>,
    out: DevicePtr<AnyElement>,
    parts: u32,
}

const _: () = assert!(size_of::<EncodeArguments>() == 64 && size_of::<DecodeArguments>() == 32);
const _: () = assert!(size_of::<AttendArguments>() == 80 && size_of::<MergeArguments>() == 24);

impl Int4Cache {
    /// An empty cache. Tokens leave the window in blocks of 64.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, sizes: &CacheShape) -> Result<Self> {
        let &CacheShape { layers, heads, group, head_dim, element, window, batch, capacity, .. } = sizes;
        let shape = WindowShape { ring: window.recent + BLOCK, ..WindowShape::new(sizes) };
        let program = program(element, head_dim, group);
        let kernel = |name| gpu.device.kernel(&program, name, 0);
        let most_parts = capacity.div_ceil(BLOCK).max(1);
        let parts = (PARTS * gpu.device.sm_count() / (heads * batch)).clamp(1, most_parts);
        let blocks = layers * batch * heads * capacity.div_ceil(BLOCK);
        let cache = Self {
            encode: kernel("encode")?,
            decode: kernel("decode")?,
            attend: kernel("attend")?,
            merge: kernel("merge")?,
            element,
            window: Window::new(gpu, shape)?,
            recent: window.recent,
            blocks: Buffer::zeros(gpu, blocks * block_len(head_dim))?,
            partials: Buffer::zeros(gpu, batch * heads * parts * group * (head_dim + 2))?,
            parts,
            group,
        };
        gpu.synchronize()?;
        Ok(cache)
    }

    /// Coded tokens after the sinks in a sequence of `tokens`.
    const fn coded(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.window.shape.sinks + self.recent) / BLOCK * BLOCK
    }

    const fn blocks_of_head(&self) -> usize {
        self.window.shape.capacity.div_ceil(BLOCK)
    }

    /// Blocks of a layer from a sequence on.
    fn blocks(&self, layer: usize, sequence: usize) -> DevicePtr<u8> {
        let WindowShape { batch, heads, head_dim, .. } = self.window.shape;
        let block = (layer * batch + sequence) * heads * self.blocks_of_head();
        self.blocks.pointer().offset(block * block_len(head_dim))
    }

    /// The window in a ring of `ring` rows, of `capacity` rows.
    const fn recent(&self, ring: usize, capacity: usize) -> Recent {
        Recent {
            sinks: self.window.shape.sinks as u32,
            recent: self.recent as u32,
            ring: ring as u32,
            capacity: capacity as u32,
        }
    }

    /// The window of the exact rows.
    const fn ring_of_rows(&self) -> Recent {
        let WindowShape { sinks, ring, .. } = self.window.shape;
        self.recent(ring, sinks + ring)
    }
}

/// Bytes of a block of a head: codes and scales, `CodeBlock` of the kernels.
const fn block_len(head_dim: usize) -> usize {
    2 * (BLOCK * head_dim / 2) + 4 * head_dim + 4 * BLOCK * (head_dim / 64)
}

impl StepCache for Int4Cache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn slot_mapping(&self) -> SlotMapping {
        self.window.shape.slot_mapping()
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let WindowShape { batch, heads, head_dim, .. } = self.window.shape;
        let Rows { keys, values, .. } = self.window.rows(layer);
        let attend = AttendArguments {
            blocks: self.blocks(layer, 0),
            keys,
            values,
            queries,
            positions: sequences.positions,
            partials: self.partials.pointer(),
            blocks_of_head: self.blocks_of_head() as u32,
            heads: heads as u32,
            scale: std::f32::consts::LOG2_E / (head_dim as f32).sqrt(),
            window: self.ring_of_rows(),
        };
        let merge = MergeArguments { partials: attend.partials, out, parts: self.parts as u32 };
        let (parts, group) = (Grid::new([self.parts, heads, batch])?, Grid::new([heads, self.group, batch])?);
        // Without PDL: its small blocks would crowd multiprocessors that the previous product frees first.
        // SAFETY: the structures are the kernels' arguments, and the buffers have the lengths of `new`; the
        // caller keeps positions within the capacity.
        unsafe {
            self.attend.launch(gpu.stream(), parts, THREADS, false, &attend)?;
            self.merge.launch(gpu.stream(), group, head_dim as u32, true, &merge)?;
        }
        Ok(())
    }

    fn clear(&mut self, _gpu: &Gpu) -> Result<()> {
        Ok(())
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let WindowShape { n_layers, batch, heads, sinks, ring, .. } = self.window.shape;
        let arguments = EncodeArguments {
            rows: self.window.rows(0).keys,
            blocks: self.blocks(0, 0),
            positions: Some(sequences.positions),
            rows_side: self.window.shape.side_len(sinks + ring) as u64,
            blocks_of_head: self.blocks_of_head() as u32,
            heads: heads as u32,
            first: 0,
            window: self.ring_of_rows(),
        };
        let grid = Grid::new([heads, batch, n_layers])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The
        // tokens of the block are in the ring, which has room for the window and a block.
        Ok(unsafe { self.encode.launch(gpu.stream(), grid, THREADS, false, &arguments) }?)
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let WindowShape { n_layers, batch, heads, head_dim, .. } = self.window.shape;
        let coded = self.coded(tokens);
        let exact = 2 * size_of::<u16>() * head_dim * (tokens - coded);
        let codes = coded / BLOCK * block_len(head_dim);
        Footprint { kept: n_layers * batch * heads * (codes + exact), ..Footprint::default() }
    }

    fn bytes(&self) -> usize {
        self.window.bytes() + self.blocks.bytes()
    }
}

impl Timed for Int4Cache {
    fn fill_random(&mut self, gpu: &Gpu, _tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        // Scales are hashed, too: their values do not change the time of a step.
        fill_codes(gpu, &self.blocks, RANDOM_CODES)?;
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.footprint(tokens).kept
    }
}

impl ChunkCache for Int4Cache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        let rows = self.window.open(gpu, layer, chunk)?;
        let WindowShape { heads, head_dim, sinks, .. } = self.window.shape;
        let coded = self.coded(chunk.position);
        if coded == 0 {
            return Ok(rows);
        }
        let arguments = DecodeArguments {
            blocks: self.blocks(layer, chunk.sequence),
            keys: rows.keys.cast().offset(sinks * head_dim),
            values: rows.values.cast().offset(sinks * head_dim),
            blocks_of_head: self.blocks_of_head() as u32,
            capacity: rows.capacity as u32,
        };
        let grid = Grid::new([coded / BLOCK, heads, 1])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`; rows
        // have room for all tokens of a sequence.
        unsafe { self.decode.launch(gpu.stream(), grid, THREADS, false, &arguments) }?;
        Ok(rows)
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let [first, end] = [chunk.position, chunk.end()].map(|tokens| self.coded(tokens) / BLOCK);
        if first == end {
            return Ok(());
        }
        let Rows { keys, capacity, .. } = self.window.prefix()?;
        let arguments = EncodeArguments {
            rows: keys,
            blocks: self.blocks(layer, chunk.sequence),
            positions: None,
            rows_side: self.window.shape.past_side_len() as u64,
            blocks_of_head: self.blocks_of_head() as u32,
            heads: self.window.shape.heads as u32,
            first: first as u32,
            window: self.recent(capacity, capacity), // rows of all tokens, not a ring
        };
        let grid = Grid::new([self.window.shape.heads, 1, end - first])?;
        // SAFETY: as above, with the rows of one sequence up to the chunk's end. Those before the chunk that
        // are encoded now were in the ring, so they are exact.
        Ok(unsafe { self.encode.launch(gpu.stream(), grid, THREADS, false, &arguments) }?)
    }

    fn set_lengths(&mut self, _gpu: &Gpu, _lengths: &[usize]) -> Result<()> {
        Ok(())
    }

    fn set_length(&mut self, _gpu: &Gpu, _sequence: usize, _length: usize) -> Result<()> {
        Ok(())
    }
}
