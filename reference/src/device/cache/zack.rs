mod launch;

use std::sync::Arc;

use kv_gpu::svd::{Attend, AttendShape};
use kv_gpu::{AnyElement, DevicePtr, Element, Kernel};
use svd_core::MapBuf;

use super::dense::{RANDOM_ROWS, fill_rows};
use super::project_queries::ProjectQueries;
use super::span::Span;
use super::turns::Turns;
use super::window::{Window, WindowShape};
use super::{Chunk, ChunkCache, DeviceCache, Room, Rows, Sequences};
use crate::cache::Footprint;
use crate::device::memory::Buffer;
use crate::device::{Gpu, hashed, programs};
use crate::method::HeadCut;
use crate::model::Config;
use crate::side::{Pair, Side};
use crate::{Error, Result};

/// The number of the hashed tensor that fills the maps of a layer's keys; the queries' is the next.
const RANDOM_MAPS: u32 = 4 << 16;

/// Ranks are multiples of it: `svd::Attend` reads 16 bytes at a time.
const MULTIPLE: usize = 8;

/// ZACK: sinks and a ring of recent tokens exact, all tokens behind them as rows of each head's ranks:
/// `svd::Attend` over both parts, whose results are merged.
///
/// Values arrive rotated and leave so, since the model has the rotations folded into its weights. Queries are
/// projected in every step, and keys when they leave the ring: every half ring a layer takes the tokens that
/// will be overwritten within a ring (`Turns`). It reads them in the ring, in the order of the steps, which
/// needs no copy and no second stream.
pub struct ZackCache {
    kernels: Kernels,
    element: Element,
    window: Window,
    turns: Turns,
    layers: Vec<Layer>,
    stored: Pair<Buffer<u16>>,  // (layer, batch, heads, capacity, rank of the head)
    maps: Pair<Buffer<f32>>,    // (layer, heads, head_dim, head_dim) of keys, and of queries
    ranks: Pair<Buffer<u32>>,   // (layer, heads)
    offsets: Pair<Buffer<u64>>, // (layer, heads): sums of the ranks of the heads before
    full: Full,
    scratch: Scratch,
    span: Span, // that a chunk stores
    group: usize,
}

struct Kernels {
    attend: Attend,
    project: ProjectQueries,
    cut: Kernel,
    restore: Kernel,
    merge: Kernel,
}

/// Ranks and offsets of the exact rows. (heads,)
struct Full {
    ranks: Buffer<u32>,
    offsets: Buffer<u64>,
}

/// Where a layer's rows are.
#[derive(Clone, Copy)]
struct Layer {
    rank_sums: Pair<usize>, // over the heads
    offsets: Pair<usize>,   // into `stored`
}

/// What one layer after the other uses within a step.
struct Scratch {
    queries: Buffer<u16>,           // (batch, heads, group, head_dim): projected
    out: Buffer<u16>,               // as the queries: attention to the stored rows
    log_sum_exps: [Buffer<f32>; 2], // (batch, heads, group): of the exact tokens, and of the stored ones
    workspace: Buffer<u8>,
}

impl ZackCache {
    /// An empty cache; `cuts` per layer and head.
    ///
    /// # Errors
    /// [`Error::Argument`] for a window of an odd number of tokens, or none, and for ranks that are no
    /// multiples of 8; [`Error::Device`].
    pub(crate) fn new(
        gpu: &Gpu,
        config: &Config,
        element: Element,
        cuts: &[Arc<Vec<HeadCut>>],
        window: pq_core::Window,
        batch: usize,
        capacity: usize,
    ) -> Result<Self> {
        let ranks =
            cuts.iter().flat_map(|layer| layer.iter().flat_map(|cut| [cut.key_rank(), cut.value_rank]));
        if let Some(rank) = ranks.clone().find(|rank| !rank.is_multiple_of(MULTIPLE)) {
            return Err(Error::Argument(format!(
                "a rank of {rank}: the device takes multiples of {MULTIPLE}: pass multiple={MULTIPLE}"
            )));
        }
        let (heads, group, head_dim) = (config.n_kv_heads, config.gqa_group(), config.head_dim);
        let turns = Turns::new(gpu, config.n_layers, batch, window)?;
        let kernels = Kernels::new(gpu, element, head_dim, group)?;
        let rank = |cut: &HeadCut, side| if side == Side::Keys { cut.key_rank() } else { cut.value_rank };
        let mut lens = Pair::of(|_| 0);
        let layers = cuts.iter().map(|cuts| {
            let rank_sums = Pair::of(|side| cuts.iter().map(|cut| rank(cut, side)).sum::<usize>());
            let offsets = Pair::of(|side| lens[side]);
            lens = Pair::of(|side| offsets[side] + batch * capacity * rank_sums[side]);
            Layer { rank_sums, offsets }
        });
        let layers = layers.collect();
        let offsets = |side| {
            let of_layer = |cuts: &Arc<Vec<HeadCut>>| {
                let sums = cuts.iter().scan(0, |sum, cut| {
                    let offset = *sum;
                    *sum += rank(cut, side) as u64;
                    Some(offset)
                });
                sums.collect::<Vec<u64>>()
            };
            Buffer::of(gpu, &cuts.iter().flat_map(of_layer).collect::<Vec<u64>>())
        };
        let all = || cuts.iter().flat_map(|layer| layer.iter());
        let queries = batch * config.q_dim();
        let workspace = kernels.attend.workspace_len(batch, heads, group);
        let cache = Self {
            window: Window::new(gpu, WindowShape::new(config, window, batch, capacity))?,
            turns,
            stored: Pair::try_of(|side| Buffer::zeros(gpu, lens[side]))?,
            maps: Pair::try_of(|side| {
                let maps = all().map(|cut| padded(cut, side, head_dim)).collect::<Result<Vec<_>>>()?;
                Buffer::of(gpu, &maps.concat())
            })?,
            ranks: Pair::try_of(|side| {
                Buffer::of(gpu, &all().map(|cut| rank(cut, side) as u32).collect::<Vec<u32>>())
            })?,
            offsets: Pair::try_of(offsets)?,
            full: Full {
                ranks: Buffer::of(gpu, &vec![head_dim as u32; heads])?,
                offsets: Buffer::of(
                    gpu,
                    &(0..heads).map(|head| (head * head_dim) as u64).collect::<Vec<_>>(),
                )?,
            },
            scratch: Scratch {
                queries: Buffer::zeros(gpu, queries)?,
                out: Buffer::zeros(gpu, queries)?,
                log_sum_exps: [
                    Buffer::zeros(gpu, batch * config.n_heads)?,
                    Buffer::zeros(gpu, batch * config.n_heads)?,
                ],
                workspace: Buffer::zeros(gpu, workspace)?,
            },
            span: Span::new(gpu)?,
            layers,
            kernels,
            element,
            group,
        };
        gpu.synchronize()?; // maps and ranks are copied
        Ok(cache)
    }
}

impl Kernels {
    fn new(gpu: &Gpu, element: Element, head_dim: usize, group: usize) -> Result<Self> {
        let kernel = |name| gpu.device.kernel(&programs::zack(element, head_dim, group), name, 0);
        Ok(Self {
            attend: Attend::new(&gpu.device, AttendShape { dim: head_dim, element })?,
            project: ProjectQueries::new(gpu, element, head_dim, group)?,
            cut: kernel("cut")?,
            restore: kernel("restore")?,
            merge: kernel("merge")?,
        })
    }
}

/// The map of a head's keys, or of its queries, with columns of zeros behind its rank: (dim, dim).
fn padded(cut: &HeadCut, side: Side, dim: usize) -> Result<Vec<f32>> {
    let mut rows = vec![0.0; dim * dim]; // of the identity, which the map takes to its rows
    rows.iter_mut().step_by(dim + 1).for_each(|x| *x = 1.0);
    let map = if side == Side::Keys { cut.project_keys(&rows) } else { cut.project_queries(&rows) }?;
    rows.fill(0.0);
    for (padded, row) in rows.chunks_exact_mut(dim).zip(map.chunks_exact(cut.key_rank())) {
        padded[..row.len()].copy_from_slice(row);
    }
    Ok(rows)
}

/// Cuts for timing: hashed maps, and one rank for all heads, that leaves these parts of the dimensions.
///
/// # Errors
/// [`Error::Svd`].
pub(super) fn random_cuts(config: &Config, parts: Pair<f64>) -> Result<Vec<Arc<Vec<HeadCut>>>> {
    let dim = config.head_dim;
    let rank = |side| ((parts[side] * dim as f64) as usize).next_multiple_of(MULTIPLE).min(dim);
    let layer = |layer: usize| -> Result<_> {
        let map = |of: u32| {
            let tensor = RANDOM_MAPS + 2 * layer as u32 + of;
            let amplitude = (3.0 / dim as f32).sqrt();
            let columns = (0..(dim * rank(Side::Keys)) as u64).map(|i| hashed(tensor, i, amplitude));
            MapBuf::new(columns.collect(), dim, rank(Side::Keys))
        };
        let head = |_| -> Result<_> {
            Ok(HeadCut { keys: map(0)?, queries: map(1)?, value_rank: rank(Side::Values) })
        };
        Ok(Arc::new((0..config.n_kv_heads).map(head).collect::<Result<Vec<_>>>()?))
    };
    (0..config.n_layers).map(layer).collect()
}

impl DeviceCache for ZackCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn room(&self) -> Room {
        self.window.shape.room()
    }

    fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        self.launch_project(gpu, layer, queries)?;
        self.launch_exact(gpu, layer, sequences, (queries, out))?;
        self.launch_stored(gpu, layer, sequences)?;
        self.launch_merge(gpu, layer, out)
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.turns.restart_at(gpu, 0)
    }

    fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Some(turn) = self.turns.begin(gpu, sequences)? else { return Ok(()) };
        turn.layers().try_for_each(|layer| self.launch_cut_of_turn(gpu, layer))
    }

    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        for side in Side::ALL {
            let (rows, tensor) = (&self.stored[side], RANDOM_ROWS + side as u32);
            fill_rows(gpu, self.element, rows.pointer(), rows.len(), tensor)?;
        }
        self.turns.restart_at(gpu, tokens)?;
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.footprint(tokens).kept + self.maps.values.bytes()
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let shape = self.window.shape;
        let ranks: usize = self.layers.iter().map(|layer| layer.rank_sums.iter().sum::<usize>()).sum();
        Footprint {
            kept: shape.exact_bytes(tokens) + 2 * shape.batch * shape.stored(tokens) * ranks,
            shared: self.maps.iter().map(Buffer::bytes).sum(),
            ..Footprint::default()
        }
    }

    fn bytes(&self) -> usize {
        let (stored, maps) = (&self.stored, &self.maps);
        let maps: usize = maps.iter().map(Buffer::bytes).sum();
        self.window.bytes() + stored.iter().map(Buffer::bytes).sum::<usize>() + maps
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

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        self.launch_cut_of_chunk(gpu, layer, chunk)
    }

    fn settle(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        let sinks = self.window.shape.sinks;
        let stored = lengths.iter().map(|length| length.saturating_sub(sinks));
        self.turns.restart(gpu, &stored.collect::<Vec<_>>())
    }
}
