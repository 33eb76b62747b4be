//! Rows in the bases of their codes: `kernels/sq.cu`.

use kv_attend::owner::{Pair, Side};
use kv_gpu::{DevicePtr, Grid, Kernel};
use pq_core::sq::{Shape, allot};

use super::{program, window_shape};
use crate::Result;
use crate::cache::key_means::KeyMeans;
use crate::cache::window::WindowShape;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_MEANS, RANDOM_SCALAR_MAPS, hashed};
use crate::memory::Buffer;
use crate::plan::{Heads, ScalarHead, ScalarPlan};
use crate::rows::{Chunk, Rows};
use crate::shape::CacheShape;

/// Rows that a block of threads multiplies together: `TILE` of the kernels.
const TILE: usize = 8;

/// Blocks of threads that a multiprocessor has registers for, each of which holds a map.
const MAPS_PER_SM: usize = 2;

/// Tokens of a prompt that are transformed together, at most, unless a batch of blocks has more.
const TOGETHER: usize = 1024;

/// The transforms of all heads: (layer, heads, ...) each.
pub(super) struct HeadData {
    key_means: Vec<f32>,    // head_dim, before RoPE
    value_means: Vec<f32>,  // head_dim
    value_scales: Vec<f32>, // one
    bases: Vec<f32>,        // head_dim, head_dim: columns in the order of the codes
    pub duals: Vec<f32>,    // head_dim, head_dim
    pub shapes: Vec<Shape>, // of the codes of keys
}

impl HeadData {
    /// Those of these heads, or hashed ones with components of the same variance.
    pub fn new(sizes: &CacheShape, plan: &ScalarPlan, heads: Option<&Heads<ScalarHead>>) -> Result<Self> {
        let Some(heads) = heads else {
            let (dim, heads) = (sizes.head_dim, sizes.layers * sizes.heads);
            let shape = allot(&vec![1.0; dim], plan.key_slots, &mut vec![0; dim])?;
            let map = |i| hashed(RANDOM_SCALAR_MAPS, i, (3.0 / dim as f32).sqrt());
            let maps: Vec<f32> = (0..(heads * dim * dim) as u64).map(map).collect();
            return Ok(Self {
                key_means: (0..(heads * dim) as u64).map(|i| hashed(RANDOM_MEANS, i, 1.0)).collect(),
                value_means: vec![0.0; heads * dim],
                value_scales: vec![1.0; heads],
                bases: maps.clone(),
                duals: maps,
                shapes: vec![shape; heads],
            });
        };
        let all = |part: fn(&ScalarHead) -> &[f32]| heads.iter().flatten().flat_map(part).copied().collect();
        Ok(Self {
            key_means: all(|head| &head.key_mean),
            value_means: all(|head| &head.value_mean),
            value_scales: heads.iter().flatten().map(|head| head.value_scale).collect(),
            bases: all(|head| &head.basis),
            duals: all(|head| &head.dual),
            shapes: heads.iter().flatten().map(|head| head.keys).collect(),
        })
    }
}

/// The kernels between rows and their form in the bases of the codes, and that form of some rows.
pub(super) struct Transform {
    pub means: KeyMeans,
    prepare: Kernel,
    restore: Kernel,
    map_values: Kernel,
    value_means: Buffer<f32>,       // (layer, heads, head_dim)
    value_scales: Buffer<f32>,      // (layer, heads)
    bases: Buffer<f32>,             // (layer, heads, head_dim, head_dim)
    duals: Buffer<f32>,             // (layer, heads, head_dim, head_dim)
    value_map: Buffer<f32>,         // (head_dim, head_dim)
    transformed: Pair<Buffer<f32>>, // (sequences, heads, tokens, head_dim): of one layer after the other
    firsts: Buffer<u32>,            // (batch,): the block that each sequence's rows begin
    counts: Buffer<u32>,            // (batch,): rows
    /// Tokens of a sequence that are transformed together, at most.
    pub together: usize,
    shape: WindowShape,
    sm_count: usize,
}

/// Exact rows of tokens that begin a block: elements (sequences, heads, capacity, head_dim).
pub(super) struct BlockRows {
    pub sequence: usize, // the first one
    pub sequences: usize,
    pub rows: Pair<DevicePtr<u16>>,
    pub capacity: usize,
}

impl BlockRows {
    /// From a later token on.
    pub fn skip(&self, tokens: usize, head_dim: usize) -> Self {
        Self { rows: Pair::of(|side| self.rows[side].offset(tokens * head_dim)), ..*self }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RowsArguments {
    keys: DevicePtr<u16>,
    values: DevicePtr<u16>,
    transformed_keys: DevicePtr<f32>,
    transformed_values: DevicePtr<f32>,
    maps: DevicePtr<f32>,
    means: DevicePtr<f32>,
    frequencies: DevicePtr<f32>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    heads: u32,
    capacity: u32,
    most: u32,
    sinks: u32,
    block: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct StoredValuesArguments {
    values: DevicePtr<u16>,
    map: DevicePtr<f32>,
    means: DevicePtr<f32>,
    scales: DevicePtr<f32>,
    count: u32,
    capacity: u32,
}

const _: () = assert!(size_of::<RowsArguments>() == 96 && size_of::<StoredValuesArguments>() == 40);

impl Transform {
    /// The transform of sequences of up to `blocks` blocks.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(
        gpu: &Gpu,
        sizes: &CacheShape,
        plan: &ScalarPlan,
        heads: &HeadData,
        blocks: usize,
    ) -> Result<Self> {
        let shape = window_shape(sizes);
        let WindowShape { batch, head_dim, leaving: block, .. } = shape;
        let together = (TOGETHER / block).min(blocks).max(batch) * block;
        let transformed = || Buffer::zeros(gpu, shape.heads * together * head_dim);
        let program = program(sizes.element, head_dim);
        let kernel = |name| gpu.device.kernel(&program, name, 0);
        Ok(Self {
            means: KeyMeans::new(gpu, sizes, &heads.key_means)?,
            prepare: kernel("prepare")?,
            restore: kernel("restore")?,
            map_values: kernel("map_values")?,
            value_means: Buffer::of(gpu, &heads.value_means)?,
            value_scales: Buffer::of(gpu, &heads.value_scales)?,
            bases: Buffer::of(gpu, &heads.bases)?,
            duals: Buffer::of(gpu, &heads.duals)?,
            value_map: Buffer::of(gpu, &plan.value_map)?,
            transformed: Pair::new(transformed()?, transformed()?),
            firsts: Buffer::zeros(gpu, batch)?,
            counts: Buffer::zeros(gpu, batch)?,
            together,
            shape,
            sm_count: gpu.device.sm_count(),
        })
    }

    /// The transformed rows of a side.
    pub fn transformed(&self, side: Side) -> DevicePtr<f32> {
        self.transformed[side].pointer()
    }

    /// The block that each sequence's rows begin.
    pub fn firsts(&self) -> DevicePtr<u32> {
        self.firsts.pointer()
    }

    /// Maps (heads, head_dim, head_dim) of a layer.
    fn maps(&self, all: &Buffer<f32>, layer: usize) -> DevicePtr<f32> {
        all.pointer().offset(layer * self.shape.heads * self.shape.head_dim * self.shape.head_dim)
    }

    /// The rows of each sequence.
    pub fn counts(&self) -> DevicePtr<u32> {
        self.counts.pointer()
    }

    /// Sets the rows of each sequence that are transformed next: the first one's index after the sinks, and how
    /// many.
    pub fn set_spans(&self, gpu: &Gpu, spans: impl Iterator<Item = (usize, usize)>) -> Result<()> {
        let block = self.shape.leaving;
        let (firsts, counts): (Vec<u32>, Vec<u32>) =
            spans.map(|(first, count)| ((first / block) as u32, count as u32)).unzip();
        self.firsts.write_first(gpu, &firsts)?;
        self.counts.write_first(gpu, &counts)
    }

    /// Transforms rows of a layer, up to `most` of each sequence.
    pub fn prepare(&self, gpu: &Gpu, layer: usize, rows: &BlockRows, most: usize) -> Result<()> {
        self.launch(gpu, &self.prepare, self.maps(&self.bases, layer), layer, rows, most)
    }

    /// Writes rows of a layer from transformed ones.
    pub fn restore(&self, gpu: &Gpu, layer: usize, rows: &BlockRows, most: usize) -> Result<()> {
        self.launch(gpu, &self.restore, self.maps(&self.duals, layer), layer, rows, most)
    }

    /// Launches `prepare` or `restore` between rows and `transformed`.
    fn launch(
        &self,
        gpu: &Gpu,
        kernel: &Kernel,
        maps: DevicePtr<f32>,
        layer: usize,
        rows: &BlockRows,
        most: usize,
    ) -> Result<()> {
        let WindowShape { heads, head_dim, sinks, leaving: block, .. } = self.shape;
        let arguments = RowsArguments {
            keys: rows.rows.keys,
            values: rows.rows.values,
            transformed_keys: self.transformed.keys.pointer(),
            transformed_values: self.transformed.values.pointer(),
            maps,
            means: self.means.of(layer),
            frequencies: self.means.frequencies(),
            firsts: self.firsts.pointer(),
            counts: self.counts.pointer(),
            heads: heads as u32,
            capacity: rows.capacity as u32,
            most: most as u32,
            sinks: sinks as u32,
            block: block as u32,
        };
        let grid = Grid::new([self.tiles(most, heads * rows.sequences), heads, 2 * rows.sequences])?;
        // SAFETY: the structure is the kernel's argument; `transformed` has room for the tokens, which all
        // sequences have in their rows.
        Ok(unsafe { kernel.launch(gpu.stream(), grid, head_dim as u32, false, &arguments) }?)
    }

    /// Blocks of threads for up to `rows` rows of each of `heads` heads. Each loads a map, so there are no more
    /// than run at once, and all take as many tiles.
    pub fn tiles(&self, rows: usize, heads: usize) -> usize {
        let (tiles, most) = (rows.div_ceil(TILE).max(1), (MAPS_PER_SM * self.sm_count).div_ceil(heads));
        tiles.div_ceil(tiles.div_ceil(most))
    }

    /// Maps the values of a chunk, computed by a model without folded maps, as a folded model has them.
    ///
    /// # Safety
    /// As [`DeviceCache::turn_stored`](crate::DeviceCache::turn_stored).
    pub unsafe fn map_values(&self, gpu: &Gpu, layer: usize, chunk: &Chunk, rows: &Rows) -> Result<()> {
        let WindowShape { heads, head_dim, .. } = self.shape;
        let arguments = StoredValuesArguments {
            values: rows.values.cast::<u16>().offset(chunk.position * head_dim),
            map: self.value_map.pointer(),
            means: self.value_means.pointer().offset(layer * heads * head_dim),
            scales: self.value_scales.pointer().offset(layer * heads),
            count: chunk.count as u32,
            capacity: rows.capacity as u32,
        };
        let grid = Grid::new([self.tiles(chunk.count, heads), heads, 1])?;
        // SAFETY: the structure is the kernel's argument; the caller's contract.
        Ok(unsafe { self.map_values.launch(gpu.stream(), grid, head_dim as u32, false, &arguments) }?)
    }

    /// Bytes of scratch memory.
    pub fn working_bytes(&self) -> usize {
        self.means.working_bytes() + self.transformed.iter().map(Buffer::bytes).sum::<usize>()
    }

    /// Bytes of maps, means and scales.
    pub fn shared_bytes(&self) -> usize {
        let maps = self.bases.bytes() + self.duals.bytes() + self.value_map.bytes();
        maps + self.means.shared_bytes() + self.value_means.bytes() + self.value_scales.bytes()
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.working_bytes() + self.shared_bytes()
    }
}
