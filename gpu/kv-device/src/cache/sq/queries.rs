//! The queries of a step in the dual bases of all blocks: `kernels/sq_queries.cu`.

use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use super::transform::Transform;
use crate::Result;
use crate::cache::window::WindowShape;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::rows::Sequences;
use crate::shape::CacheShape;

/// Columns of a map that a block of threads has registers for.
const COLUMNS: usize = 128;

/// Warps of a block of threads, each of which has a whole number of eight columns.
const fn warps(head_dim: usize) -> usize {
    let eights = if head_dim > COLUMNS { head_dim / 16 } else { head_dim / 8 };
    let mut warps = 8;
    while !eights.is_multiple_of(warps) {
        warps -= 1;
    }
    warps
}

pub(crate) fn program(element: Element, head_dim: usize, group: usize) -> Program {
    let headers = &[("turn.cuh", include_str!("../../kernels/turn.cuh"))];
    let defines =
        [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group), ("WARPS", warps(head_dim))];
    Program::own("sq_queries.cu", include_str!("../../kernels/sq_queries.cu"), headers, &defines)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct QueriesArguments {
    queries: DevicePtr<AnyElement>,
    duals: DevicePtr<f32>,
    frequencies: DevicePtr<f32>,
    lengths: DevicePtr<u32>,
    out: DevicePtr<f32>,
    heads: u32,
    sinks: u32,
    block: u32,
    query_blocks: u32,
}

const _: () = assert!(size_of::<QueriesArguments>() == 56);

/// Transformed queries of one layer after the other.
pub(super) struct BlockQueries {
    kernel: Kernel,
    queries: Buffer<f32>, // (batch, heads, blocks, group, head_dim)
    blocks: usize,
    group: usize,
    shape: WindowShape,
    sm_count: usize,
}

impl BlockQueries {
    /// Room for the queries of up to `blocks` blocks of each sequence.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, sizes: &CacheShape, shape: WindowShape, blocks: usize) -> Result<Self> {
        let &CacheShape { heads, group, head_dim, element, batch, .. } = sizes;
        Ok(Self {
            kernel: gpu.device.kernel(&program(element, head_dim, group), "transform_queries", 0)?,
            queries: Buffer::zeros(gpu, batch * heads * group * blocks * head_dim)?,
            blocks,
            group,
            shape,
            sm_count: gpu.device.sm_count(),
        })
    }

    /// What the launch writes: `f32` (batch, heads, [`blocks`](Self::blocks), group, head_dim).
    pub fn pointer(&self) -> DevicePtr<f32> {
        self.queries.pointer()
    }

    /// Blocks of a sequence, at most.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.queries.bytes()
    }

    /// Launches the transform of a step's queries to the dual bases of all blocks.
    ///
    /// # Safety
    /// As [`DeviceCache::attend`](crate::DeviceCache::attend).
    pub unsafe fn launch(
        &self,
        gpu: &Gpu,
        layer: usize,
        transform: &Transform,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let WindowShape { batch, heads, head_dim, sinks, leaving: block, .. } = self.shape;
        let arguments = QueriesArguments {
            queries,
            duals: transform.duals(layer),
            frequencies: transform.means.frequencies(),
            lengths: sequences.coded_lengths,
            out: self.queries.pointer(),
            heads: heads as u32,
            sinks: sinks as u32,
            block: block as u32,
            query_blocks: self.blocks as u32,
        };
        // As many as run at once, each of which loads its columns of a map; all take as many tiles.
        let (slices, rows, resident) = if head_dim > COLUMNS { (2, 16, 1) } else { (1, 32, 2) };
        let tiles = self.blocks.div_ceil(rows / self.group).max(1);
        let most = (resident * self.sm_count).div_ceil(heads * slices * batch);
        let grid = Grid::new([tiles.div_ceil(tiles.div_ceil(most)), heads * slices, batch])?;
        let threads = 32 * warps(head_dim) as u32;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The
        // kernel before this one writes neither maps nor lengths, and has waited for the one that writes
        // queries; the caller's contract.
        Ok(unsafe { self.kernel.launch(gpu.stream(), grid, threads, true, &arguments) }?)
    }
}
