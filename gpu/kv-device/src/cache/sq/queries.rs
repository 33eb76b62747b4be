//! The queries of a step in the dual bases of all blocks.

use kv_attend::owner::Side;
use kv_gpu::sq::{AttendShape, DualTable, IntegerQueries, Queries, QueriesArguments};
use kv_gpu::{AnyElement, DevicePtr};

use super::codes::Codes;
use crate::Result;
use crate::cache::window::WindowShape;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::rows::Sequences;
use crate::shape::CacheShape;

/// Transformed queries of one layer after the other.
pub(super) struct BlockQueries {
    operation: Queries,
    duals: Buffer<f32>, // (layer, heads, table_len)
    words: Buffer<u32>, // (batch, heads, blocks, group, words_len)
    units: Buffer<f32>, // (batch, heads, blocks, group, 2)
    blocks: usize,
    layers: usize,
}

impl BlockQueries {
    /// Room for the queries of up to `blocks` blocks of each sequence; dual bases (layer, heads, head_dim,
    /// head_dim).
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(
        gpu: &Gpu,
        sizes: &CacheShape,
        shape: AttendShape,
        duals: &[f32],
        blocks: usize,
    ) -> Result<Self> {
        let &CacheShape { heads, group, head_dim, batch, layers, .. } = sizes;
        let (table, rows) = (DualTable::new(head_dim), batch * heads * blocks * group);
        let mut tables = vec![0.0; layers * heads * table.table_len()];
        let of_heads =
            tables.chunks_exact_mut(table.table_len()).zip(duals.chunks_exact(head_dim * head_dim));
        for (table_of_head, dual) in of_heads {
            table.table_into(dual, table_of_head)?;
        }
        Ok(Self {
            operation: Queries::new(&gpu.device, shape)?,
            duals: Buffer::of(gpu, &tables)?,
            words: Buffer::zeros(gpu, rows * IntegerQueries::words_len(head_dim))?,
            units: Buffer::zeros(gpu, rows * 2)?,
            blocks,
            layers,
        })
    }

    /// What the launch writes.
    pub fn integers(&self) -> IntegerQueries {
        IntegerQueries { words: self.words.pointer(), units: self.units.pointer(), blocks: self.blocks }
    }

    /// Bytes of what steps write.
    pub fn working_bytes(&self) -> usize {
        self.words.bytes() + self.units.bytes()
    }

    /// Bytes of the dual bases.
    pub fn shared_bytes(&self) -> usize {
        self.duals.bytes()
    }

    /// Launches the transform of a step's queries to the dual bases of all blocks.
    ///
    /// # Safety
    /// As [`DeviceCache::attend`](crate::DeviceCache::attend).
    pub unsafe fn launch(
        &self,
        gpu: &Gpu,
        layer: usize,
        codes: &Codes,
        shape: &WindowShape,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let &WindowShape { batch, heads, head_dim, sinks, .. } = shape;
        let arguments = QueriesArguments {
            batch,
            heads,
            queries,
            duals: self.duals.pointer().offset(layer * self.duals.len() / self.layers),
            frequencies: codes.transform.means.frequencies(),
            first: sinks,
            steps: codes.scales(Side::Keys, layer, 0),
            key_tables: codes.tables(layer),
            lengths: sequences.coded_lengths,
            blocks: codes.blocks,
            pages: None,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out: self.integers(),
            pdl: true,
        };
        // SAFETY: the buffers have the lengths of `new`. `RopeMeanScores`, which runs before, writes addends
        // alone, neither tables nor lengths; the caller's contract.
        Ok(unsafe { self.operation.launch(gpu.stream(), &arguments) }?)
    }
}
