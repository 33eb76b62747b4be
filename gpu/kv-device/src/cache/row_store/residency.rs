//! Rows that stay resident on the device between steps: `kernels/residency.cu`.

use kv_gpu::{DevicePtr, Grid, Kernel, Program};

use super::StoreShape;
use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;

/// `residency`, for short lists or for any.
pub(crate) fn program(short: bool) -> Program {
    Program::own("residency.cu", include_str!("../../kernels/residency.cu"), &[], &[])
        .define_if(short, "SHORT")
}

/// Threads of a block: `THREADS` of the kernel.
const THREADS: u32 = 1024;

/// Entries of a list that a block takes at once: `AT_ONCE` of the kernel.
const AT_ONCE: usize = 4 * THREADS as usize;

/// Most blocks that share a head's lists, as many as every device with clusters runs together.
const MOST_BLOCKS: usize = 8;

/// Tokens whose bits and indices take 64 KiB of shared memory. Longer sequences are looked up in several
/// spans.
const MOST_SPAN: usize = 1 << 18;

/// A cache of the rows that recent steps have chosen, of those that have been chosen last (LRU).
///
/// PQCache (arXiv 2407.12820, 3.4) keeps blocks of tokens, since its host looks them up and copies each at
/// once. Here a kernel looks up single rows, and at equal memory single rows take half of the bytes that
/// blocks take over the link (`gpu/src/kernels/PERFORMANCE.md`).
pub(super) struct Residency {
    kernel: Kernel,
    entries: Buffer<[u32; 2]>, // (layer, parity of the step, heads of sequences, held): tokens and slots
    steps: Buffer<u32>,        // (layer, heads of sequences): so far; none makes all slots empty
    found_at: Option<Buffer<u32>>, // (heads of sequences, held), of long lists
    slots: Buffer<u32>,        // (heads of sequences, most), as the lists below
    misses: Buffer<u32>,
    indices: Option<Buffer<u32>>, // of long lists
    places: Buffer<u32>,
    missing: Buffer<u32>, // (heads of sequences, most / 32, rounded up): a bit for every token
    miss_counts: Buffer<u32>, // (heads of sequences,)
    fetched: Buffer<u64>, // (1,)
    forced: f32,          // part of the tokens that misses; negative where the slots say it
    heads: usize,
    most: usize,
    held: usize,
    span: usize,
    blocks: usize, // of a head
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ReuseArguments {
    tokens: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    entries: DevicePtr<[u32; 2]>,
    steps: DevicePtr<u32>,
    slots: DevicePtr<u32>,
    missing: DevicePtr<u32>,
    misses: DevicePtr<u32>,
    indices: Option<DevicePtr<u32>>,
    places: DevicePtr<u32>,
    miss_counts: DevicePtr<u32>,
    fetched: DevicePtr<u64>,
    found_at: Option<DevicePtr<u32>>,
    most: u32,
    held: u32,
    span: u32,
    forced: f32,
}

const _: () = assert!(size_of::<ReuseArguments>() == 112);

impl Residency {
    /// Empty slots for `held` rows of each head of every sequence, in every layer.
    pub fn new(gpu: &Gpu, shape: &StoreShape, held: usize) -> Result<Self> {
        let &StoreShape { n_layers, batch, heads, stored, most, .. } = shape;
        let words = |n| Buffer::<u32>::zeros(gpu, n);
        let (heads, held) = (batch * heads, held.max(most));
        let span = stored.min(MOST_SPAN).next_multiple_of(128);
        let short = held <= AT_ONCE;
        let lists = if short { 2 * most } else { 0 };
        let shared = (2 * span / 32 + most.div_ceil(32) + lists) * size_of::<u32>();
        let of_long = |n| if short { Ok(None) } else { words(n).map(Some) };
        // As many as take the lists at once, if those of all heads run at the same time.
        let all_at_once = 1 << (gpu.device.sm_count() / heads.max(1)).clamp(1, MOST_BLOCKS).ilog2();
        let blocks = match gpu.device.capability() >= (9, 0) {
            true => held.div_ceil(AT_ONCE).next_power_of_two().min(all_at_once),
            false => 1,
        };
        Ok(Self {
            kernel: gpu.device.kernel(&program(short), "residency", shared)?.prefer_shared()?,
            entries: Buffer::zeros(gpu, 2 * n_layers * heads * held)?,
            steps: words(n_layers * heads)?,
            found_at: of_long(heads * held)?,
            slots: words(heads * most)?,
            misses: words(heads * most)?,
            indices: of_long(heads * most)?,
            places: words(heads * most)?,
            missing: words(heads * most.div_ceil(32))?,
            miss_counts: words(heads)?,
            fetched: Buffer::zeros(gpu, 1)?,
            forced: -1.0,
            heads,
            most,
            held,
            span,
            blocks,
        })
    }

    /// Launches the choice of slots for the tokens (heads of sequences, most) of a layer, of which each head
    /// has `counts`.
    pub fn launch(
        &self,
        gpu: &Gpu,
        layer: usize,
        tokens: DevicePtr<u32>,
        counts: DevicePtr<u32>,
    ) -> Result<()> {
        let Self { heads, most, held, span, blocks, .. } = *self;
        let arguments = ReuseArguments {
            tokens,
            counts,
            entries: self.entries.pointer().offset(2 * layer * heads * held),
            steps: self.steps.pointer().offset(layer * heads),
            slots: self.slots.pointer(),
            missing: self.missing.pointer(),
            misses: self.misses.pointer(),
            indices: self.indices.as_ref().map(Buffer::pointer),
            places: self.places.pointer(),
            miss_counts: self.miss_counts.pointer(),
            fetched: self.fetched.pointer(),
            found_at: self.found_at.as_ref().map(Buffer::pointer),
            most: most as u32,
            held: held as u32,
            span: span as u32,
            forced: self.forced,
        };
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. Counts
        // are at most `most`, and the tokens of a head ascend.
        Ok(unsafe {
            let grid = Grid::new([blocks, heads, 1])?;
            self.kernel.launch_in_clusters(gpu.stream(), grid, blocks as u32, THREADS, true, &arguments)
        }?)
    }

    /// The slot of every chosen token: (heads of sequences, most).
    pub fn slots(&self) -> DevicePtr<u32> {
        self.slots.pointer()
    }

    /// Tokens whose rows are to be fetched: (heads of sequences, most).
    pub fn misses(&self) -> DevicePtr<u32> {
        self.misses.pointer()
    }

    /// The slot of each of them.
    pub fn places(&self) -> DevicePtr<u32> {
        self.places.pointer()
    }

    /// How many each head has.
    pub fn miss_counts(&self) -> DevicePtr<u32> {
        self.miss_counts.pointer()
    }

    /// For every chosen token a bit, whether it is one of them: (heads of sequences, most / 32, rounded up).
    pub fn missing(&self) -> DevicePtr<u32> {
        self.missing.pointer()
    }

    /// Rows that have been fetched so far.
    pub fn fetched(&self, gpu: &Gpu) -> Result<u64> {
        let mut fetched = [0];
        self.fetched.read_into(gpu, &mut fetched)?;
        Ok(fetched[0])
    }

    /// Empties all slots: their rows are of other sequences.
    pub fn invalidate(&self, gpu: &Gpu) -> Result<()> {
        self.steps.fill(gpu, 0)
    }

    /// Empties the slots of `count` heads of sequences.
    pub fn invalidate_one(&self, gpu: &Gpu, first: usize, count: usize) -> Result<()> {
        let mut layers = (0..self.steps.len()).step_by(self.heads);
        layers.try_for_each(|layer| self.steps.write_at(gpu, layer + first, &vec![0; count]))
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let lists = [&self.slots, &self.misses, &self.places, &self.missing, &self.miss_counts, &self.steps];
        let of_long = [&self.indices, &self.found_at].into_iter().flatten();
        self.entries.bytes() + lists.into_iter().chain(of_long).map(Buffer::bytes).sum::<usize>()
    }

    /// Makes this part of the tokens count as held, whatever their slots have, with the same work.
    pub const fn force_hits(&mut self, share: f32) {
        self.forced = (1.0 - share).clamp(0.0, 1.0);
    }
}
