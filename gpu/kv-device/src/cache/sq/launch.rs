//! The launches of a step.

use kv_attend::owner::Side;
use kv_gpu::sq::AttendArguments;
use kv_gpu::{AnyElement, DevicePtr, Grid};

use super::SqCache;
use crate::Result;
use crate::cache::window::WindowShape;
use crate::gpu::Gpu;
use crate::rows::{Rows, Sequences};

#[derive(Clone, Copy)]
#[repr(C)]
struct CloseUpArguments {
    rows: DevicePtr<AnyElement>,
    counts: DevicePtr<u32>,
    heads: u32,
    capacity: u32,
    sinks: u32,
    behind: u32,
}

const _: () = assert!(size_of::<CloseUpArguments>() == 32);

impl SqCache {
    /// Moves the rows behind a block that has left to where it was.
    pub(super) fn launch_close_up(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        const THREADS: u32 = 256;
        let WindowShape { batch, heads, sinks, ring, leaving, .. } = self.window.shape;
        let Rows { keys, capacity, .. } = self.window.rows(layer);
        let arguments = CloseUpArguments {
            rows: keys,
            counts: self.codes.transform.counts(),
            heads: heads as u32,
            capacity: capacity as u32,
            sinks: sinks as u32,
            behind: (ring - leaving) as u32,
        };
        // SAFETY: the structure is the kernel's argument; a block, which is no larger than the ring, and the
        // rows behind it are all rows after the sinks. Values follow keys.
        Ok(unsafe {
            self.close_up.launch(gpu.stream(), Grid::new([heads, batch, 2])?, THREADS, false, &arguments)
        }?)
    }

    /// Launches attention of the transformed queries to the codes.
    ///
    /// # Safety
    /// As [`DeviceCache::attend`](crate::DeviceCache::attend).
    pub(super) unsafe fn launch_coded(&self, gpu: &Gpu, layer: usize, sequences: &Sequences) -> Result<()> {
        let WindowShape { batch, heads, .. } = self.window.shape;
        let arguments = AttendArguments {
            batch,
            heads,
            blocks: self.codes.blocks,
            keys: self.codes.words(Side::Keys, layer, 0),
            values: self.codes.words(Side::Values, layer, 0),
            norms: self.codes.scales(Side::Values, layer, 0),
            mean_errors: self.codes.mean_errors(layer, 0),
            addends: Some(self.codes.transform.means.addends()),
            key_tables: self.codes.tables(layer),
            queries: self.queries.integers(),
            lengths: sequences.coded_lengths,
            pages: None,
            out: self.scratch.out.pointer().cast(),
            log_sum_exp: Some(self.scratch.log_sum_exps[1].pointer()),
            pdl: true,
            workspace: self.scratch.workspace.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`; lengths are those of whole blocks, all encoded. The
        // kernel before this one does not write them; the caller's contract.
        Ok(unsafe { self.attend.launch(gpu.stream(), &arguments) }?)
    }
}
