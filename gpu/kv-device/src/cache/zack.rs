//! ZACK on a device: rows of reduced rank, with ranks of their own for each head.

mod launch;

use kv_attend::owner::{Footprint, Pair, Side};
use kv_gpu::svd::{Attend, AttendShape};
use kv_gpu::{AnyElement, DevicePtr, Element, Kernel, Program};

use super::eviction::Evictions;
use super::full_rank::FullRank;
use super::merge::Merge;
use super::row_transform::RowTransform;
use super::span::Span;
use super::window::{Window, WindowShape};
use super::{ChunkCache, StepCache};
use crate::Result;
use crate::bases::Bases;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_ROWS, fill_rows};
use crate::memory::Buffer;
use crate::plan::DeviceCuts;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;

/// `cut` and `restore`.
pub(crate) fn program(head_dim: usize) -> Program {
    Program::own("zack.cu", include_str!("../kernels/zack.cu"), &[], &[("HEAD_DIM", head_dim)])
}

/// ZACK: sinks and a ring of recent tokens are exact, all other tokens are rows truncated to each head's
/// ranks. `svd::Attend` runs over both parts, and the results are merged.
///
/// Values arrive and leave rotated, since the rotations are folded into the model's weights; queries and keys
/// are rotated after RoPE (`Bases`), to a basis whose first components are kept. Truncating a token is thus a
/// copy: every half ring a layer stores the tokens that will be overwritten within a ring (`Evictions`), on
/// the stream of the steps, so that no second stream is needed.
///
/// N.B. The model keeps the columns of `W_V` and the rows of `W_O` beyond the ranks: the exact tokens need
/// them. With half of the values' dimensions the KL is .0055, and .101 if sinks and window are cut, too (12 M
/// model).
pub(crate) struct ZackCache {
    kernels: Kernels,
    element: Element,
    window: Window,
    evictions: Evictions,
    layers: Vec<Layer>,
    bases: Bases,
    cuts_prompts: bool,
    stored: Pair<Buffer<u16>>,  // (layer, batch, heads, capacity, rank of the head)
    ranks: Pair<Buffer<u32>>,   // (layer, heads)
    offsets: Pair<Buffer<u64>>, // (layer, heads): prefix sums of the ranks
    exact: FullRank,
    scratch: Scratch,
    span: Span, // that a chunk stores
    group: usize,
}

/// The truncation of keys and values.
pub(crate) struct Cuts {
    /// Bases of queries and keys.
    pub bases: Bases,
    /// By layer and head.
    pub ranks: Vec<Vec<Pair<usize>>>,
    /// Whether the tokens of a prompt attend to truncated rows, too.
    pub cuts_prompts: bool,
}

struct Kernels {
    attend: Attend,
    cut: Kernel,
    restore: Kernel,
    merge: Merge,
}

/// The location of a layer's rows.
#[derive(Clone, Copy)]
struct Layer {
    rank_sums: Pair<usize>, // over the heads
    offsets: Pair<usize>,   // into `stored`
}

/// Scratch memory of a step, shared by all layers.
struct Scratch {
    out: Buffer<u16>, // (batch, heads, group, head_dim): attention to the stored rows
    log_sum_exps: [Buffer<f32>; 2], // (batch, heads, group): of the exact tokens, and of the stored ones
    workspace: Buffer<u8>,
}

impl ZackCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, shape: &CacheShape, cuts: Cuts) -> Result<Self> {
        let Cuts { bases, ranks, cuts_prompts } = cuts;
        let &CacheShape { heads, group, head_dim, element, window, batch, capacity, .. } = shape;
        let evictions = Evictions::new(gpu, shape.layers, batch, window)?;
        let kernels = Kernels::new(gpu, element, head_dim, group)?;
        let mut lens = Pair::of(|_| 0);
        let layers = ranks.iter().map(|heads| {
            let rank_sums = Pair::of(|side| heads.iter().map(|ranks| ranks[side]).sum::<usize>());
            let offsets = Pair::of(|side| lens[side]);
            lens = Pair::of(|side| offsets[side] + batch * capacity * rank_sums[side]);
            Layer { rank_sums, offsets }
        });
        let layers = layers.collect();
        let offsets = |side| {
            let of_layer = |heads: &Vec<Pair<usize>>| {
                let sums = heads.iter().scan(0, |sum, ranks| {
                    let offset = *sum;
                    *sum += ranks[side] as u64;
                    Some(offset)
                });
                sums.collect::<Vec<u64>>()
            };
            Buffer::of(gpu, &ranks.iter().flat_map(of_layer).collect::<Vec<u64>>())
        };
        let ranks_of = |side| ranks.iter().flatten().map(|ranks| ranks[side] as u32).collect::<Vec<u32>>();
        let workspace = kernels.attend.workspace_len(batch, heads, group);
        let cache = Self {
            window: Window::new(gpu, WindowShape::new(shape))?,
            evictions,
            stored: Pair::try_of(|side| Buffer::zeros(gpu, lens[side]))?,
            ranks: Pair::try_of(|side| Buffer::of(gpu, &ranks_of(side)))?,
            offsets: Pair::try_of(offsets)?,
            exact: FullRank::new(gpu, shape, false)?,
            scratch: Scratch {
                out: Buffer::zeros(gpu, batch * heads * group * head_dim)?,
                log_sum_exps: [
                    Buffer::zeros(gpu, batch * heads * group)?,
                    Buffer::zeros(gpu, batch * heads * group)?,
                ],
                workspace: Buffer::zeros(gpu, workspace)?,
            },
            span: Span::new(gpu)?,
            bases,
            cuts_prompts,
            layers,
            kernels,
            element,
            group,
        };
        gpu.synchronize()?; // ranks are copied
        Ok(cache)
    }
}

impl Kernels {
    fn new(gpu: &Gpu, element: Element, head_dim: usize, group: usize) -> Result<Self> {
        let kernel = |name| gpu.device.kernel(&program(head_dim), name, 0);
        Ok(Self {
            attend: Attend::new(&gpu.device, AttendShape { dim: head_dim, element })?,
            cut: kernel("cut")?,
            restore: kernel("restore")?,
            merge: Merge::new(gpu, element, head_dim, group)?,
        })
    }
}

/// One rank for all heads, as a fraction of the dimensions, for timing.
pub(crate) fn uniform_ranks(shape: &CacheShape, parts: Pair<f64>) -> Vec<Vec<Pair<usize>>> {
    let dim = shape.head_dim;
    let rank = |side| ((parts[side] * dim as f64) as usize).next_multiple_of(DeviceCuts::MULTIPLE).min(dim);
    vec![vec![Pair::of(rank); shape.heads]; shape.layers]
}

impl StepCache for ZackCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn slot_mapping(&self) -> SlotMapping {
        self.window.shape.slot_mapping()
    }

    fn transform(&self) -> Option<RowTransform<'_>> {
        Some(RowTransform { bases: &self.bases, means: None })
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let (rows, lengths) = ((self.rows(layer), None), sequences.exact_lengths);
        let log_sum_exp = Some(self.scratch.log_sum_exps[0].pointer());
        // SAFETY: exact rows are at most those of the window. This kernel reads lengths, ranks
        // and offsets before its PDL wait: the change of basis, which runs before it, writes none of them, and
        // has waited for the kernels that write queries and rows; the caller's contract.
        unsafe {
            self.exact.launch(gpu, rows, lengths, queries, out, log_sum_exp)?;
            self.launch_stored(gpu, layer, sequences, queries)?;
            self.launch_merge(gpu, layer, out)
        }
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.evictions.reset(gpu, 0)
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Some(eviction) = self.evictions.begin(gpu, sequences)? else { return Ok(()) };
        eviction.layers().try_for_each(|layer| self.launch_cut_of_evicted(gpu, layer))
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let shape = self.window.shape;
        let ranks: usize = self.layers.iter().map(|layer| layer.rank_sums.iter().sum::<usize>()).sum();
        Footprint {
            kept: shape.exact_bytes(tokens) + 2 * shape.batch * shape.stored(tokens) * ranks,
            shared: self.bases.bytes(),
            ..Footprint::default()
        }
    }

    fn bytes(&self) -> usize {
        self.window.bytes() + self.stored.iter().map(Buffer::bytes).sum::<usize>() + self.bases.bytes()
    }
}

impl Timed for ZackCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        for side in Side::ALL {
            let (rows, tensor) = (&self.stored[side], RANDOM_ROWS + side as u32);
            fill_rows(gpu, self.element, rows.pointer(), rows.len(), tensor)?;
        }
        self.evictions.reset(gpu, tokens)?;
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.footprint(tokens).kept + self.bases.bytes()
    }
}

impl ChunkCache for ZackCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        let rows = self.window.open(gpu, layer, chunk)?;
        let (first, count) = self.window.shape.stored_by(chunk);
        self.span.write(gpu, first, count)?;
        self.launch_restore(gpu, layer, chunk, &rows)?;
        Ok(rows)
    }

    fn chunk_ranks(&self, layer: usize) -> Option<[DevicePtr<u32>; 2]> {
        self.cuts_prompts.then(|| Side::ALL.map(|side| self.of_heads(&self.ranks[side], layer)))
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        self.launch_cut_of_chunk(gpu, layer, chunk)
    }

    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.evictions.set_lengths(gpu, lengths)
    }

    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.evictions.set_length(gpu, sequence, length)
    }
}
