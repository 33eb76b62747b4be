use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel};

use crate::Result;
use crate::device::{Gpu, programs};

/// Threads of a block, and columns that it has.
const THREADS: u32 = 256;
const COLUMNS: usize = 32;

/// Projects the queries of a step into the space of each head's stored keys or codes.
pub(super) struct ProjectQueries {
    kernel: Kernel,
    head_dim: usize,
}

/// Pointers and sizes of a launch.
#[derive(Clone, Copy)]
pub(super) struct ProjectQueriesArguments {
    pub batch: usize,
    pub heads: usize,
    /// Elements (batch, heads, group, head_dim).
    pub queries: DevicePtr<AnyElement>,
    /// `f32` (heads, head_dim, head_dim); columns from the rank on are not read.
    pub maps: DevicePtr<f32>,
    /// `u32` (heads,).
    pub ranks: DevicePtr<u32>,
    /// As the queries, written up to the rank.
    pub out: DevicePtr<u16>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    queries: DevicePtr<AnyElement>,
    maps: DevicePtr<f32>,
    ranks: DevicePtr<u32>,
    out: DevicePtr<u16>,
    heads: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 40);

impl ProjectQueries {
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn new(gpu: &Gpu, element: Element, head_dim: usize, group: usize) -> Result<Self> {
        let kernel = gpu.device.kernel(&programs::queries(element, head_dim, group), "project", 0)?;
        Ok(Self { kernel, head_dim })
    }

    /// Launches it with PDL: the previous kernel may write the queries, and neither maps nor ranks.
    ///
    /// # Safety
    /// The buffers have the lengths above.
    pub unsafe fn launch(&self, gpu: &Gpu, arguments: &ProjectQueriesArguments) -> Result<()> {
        let ProjectQueriesArguments { batch, heads, queries, maps, ranks, out } = *arguments;
        let arguments = KernelArguments { queries, maps, ranks, out, heads: heads as u32 };
        let grid = Grid::new([heads, batch, self.head_dim / COLUMNS])?;
        // SAFETY: the structure is the kernel's argument; the caller's contract.
        Ok(unsafe { self.kernel.launch(gpu.stream(), grid, THREADS, true, &arguments) }?)
    }
}
