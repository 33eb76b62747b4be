//! Attention to exact rows.

use kv_gpu::pq::Pages;
use kv_gpu::svd::{Attend, AttendArguments, AttendShape};
use kv_gpu::{AnyElement, DevicePtr};

use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::rows::Rows;
use crate::shape::CacheShape;

/// Attention of a step to exact rows: `svd::Attend` at full rank.
pub(super) struct FullRank {
    attend: Attend,
    ranks: Buffer<u32>,
    offsets: Buffer<u64>,
    workspace: Buffer<u8>,
    batch: usize,
    heads: usize,
    group: usize,
    head_dim: usize,
}

impl FullRank {
    /// Compiles the kernel, for rows in pages or not.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, shape: &CacheShape, is_paged: bool) -> Result<Self> {
        let &CacheShape { heads, group, head_dim, element, batch, .. } = shape;
        let kernel = AttendShape { dim: head_dim, element };
        let attend =
            if is_paged { Attend::paged(&gpu.device, kernel) } else { Attend::new(&gpu.device, kernel) }?;
        let offsets: Vec<u64> = (0..heads).map(|head| (head * head_dim) as u64).collect();
        Ok(Self {
            ranks: Buffer::of(gpu, &vec![head_dim as u32; heads])?,
            offsets: Buffer::of(gpu, &offsets)?,
            workspace: Buffer::zeros(gpu, attend.workspace_len(batch, heads, group))?,
            attend,
            batch,
            heads,
            group,
            head_dim,
        })
    }

    /// Launches attention of (batch, n_heads, head_dim) queries, with PDL. The log-sum-exp of the scores,
    /// (batch, n_heads), are to merge the result with attention over other tokens.
    ///
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. The rows, or those of the pages, have as many
    /// tokens as the lengths say, and the preceding kernel on the stream does not write the lengths.
    pub unsafe fn launch(
        &self,
        gpu: &Gpu,
        (rows, pages): (Rows, Option<Pages>),
        lengths: DevicePtr<u32>,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
        log_sum_exp: Option<DevicePtr<f32>>,
    ) -> Result<()> {
        let Rows { keys, values, capacity } = rows;
        let sum = self.heads * self.head_dim;
        let arguments = AttendArguments {
            batch: self.batch,
            heads: self.heads,
            group: self.group,
            capacity,
            keys,
            values,
            pages,
            queries,
            lengths,
            key_ranks: self.ranks.pointer(),
            value_ranks: self.ranks.pointer(),
            key_offsets: self.offsets.pointer(),
            value_offsets: self.offsets.pointer(),
            key_rank_sum: sum,
            value_rank_sum: sum,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            out,
            log_sum_exp,
            pdl: true,
            workspace: self.workspace.pointer(),
        };
        // SAFETY: the workspace has the length of `new`, ranks and offsets are those of full rank; the rest
        // is the caller's contract.
        Ok(unsafe { self.attend.launch(gpu.stream(), &arguments) }?)
    }
}
