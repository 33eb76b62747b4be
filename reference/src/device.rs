//! A Llama on a GPU, built on the kernels of `kv-gpu`: the counterpart of [`forward`](crate::forward) and
//! [`cache`](crate::cache) on the CPU.
//!
//! A decode step of a whole batch is one CUDA graph: four launches per layer and those of attention, with
//! tokens and lengths on the device and no wait for the host. A prompt runs in chunks, layer by layer, with
//! GEMMs by cuBLASLt and `kv_gpu::svd::Prefill`. [`Weights`] holds the model, a [`DeviceCache`] the keys and
//! values, a [`Decoder`] runs steps.

mod all_programs;
#[path = "../../gpu/kv-device/src/bases.rs"]
mod bases;
#[path = "../../gpu/kv-device/src/cache.rs"]
mod cache;
mod gemm;
mod gemv;
#[path = "../../gpu/kv-device/src/host_memory.rs"]
mod host_memory;
#[path = "../../gpu/kv-device/src/ledger.rs"]
mod ledger;
#[path = "../../gpu/kv-device/src/load.rs"]
mod load;
#[path = "../../gpu/kv-device/src/memory.rs"]
mod memory;
mod programs;
#[path = "../../gpu/kv-device/src/rotate.rs"]
mod rotate;
mod score;
mod serve;
mod step;
mod weights;

use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaGraph, CudaStream, DriverError, result, sys};
pub use kv_gpu::Element;

pub use all_programs::programs;
pub use cache::{
    CacheGenCache, Chunk, DenseCache, DeviceCache, HybridCache, Int4Cache, MillionCache, PagedCache, PqCache,
    Room, Timed, ZackCache, fitted, method_cache,
};
pub use gemm::check_cublas;
pub use host_memory::PageLocked;
pub use load::{FRAMES, Loader, Stages, StreamTarget};
pub use score::{answer_questions, score_text};
pub use serve::serve;
pub use step::{CHUNK, Decoder, Part};
pub use weights::{RANDOM_MODELS, Weights, hashed};

use crate::{Error, Result};
use ledger::Ledger;
use memory::Buffer;

/// Held shared by graph captures, exclusively by calls that may wait for the whole context
/// ([`without_captures`]).
static CAPTURES: RwLock<()> = RwLock::new(());

/// Excludes graph captures while the guard is held. A call that waits for the context, as cuBLASLt does when
/// a handle is created or destroyed, must not run during a capture on another thread: parallel tests have
/// seen captures invalidated, and a trial with `cuCtxSynchronize` or `cublasLtCreate` crashed. Allocations,
/// page-locked or not, modules, events and copies on other threads are safe.
fn without_captures() -> RwLockWriteGuard<'static, ()> {
    CAPTURES.write().unwrap_or_else(PoisonError::into_inner)
}

/// An open GPU: its kernels, and the streams of a decode loop.
pub struct Gpu {
    device: kv_gpu::Device,
    stream: Arc<CudaStream>, // highest priority
    ledger: Arc<Ledger>,
}

impl Gpu {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`Error::Device`] if there is none.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::open_within(ordinal, usize::MAX)
    }

    /// Opens device `ordinal`, with a limit of `bytes` on the memory of all buffers: weights, caches, and the
    /// buffers of steps and prompts. The driver's own memory, some hundred megabytes, is not counted.
    ///
    /// # Errors
    /// [`Error::Device`] if there is none.
    pub fn open_within(ordinal: usize, bytes: usize) -> Result<Self> {
        let device = kv_gpu::Device::open(ordinal)?;
        let priorities = result::stream::get_priority_range();
        let (_, highest) = priorities.map_err(|e| driver("read priorities", e))?;
        let stream = device.context().new_stream_with_priority(highest);
        let stream = stream.map_err(|e| driver("make a stream", e))?;
        Ok(Self { device, stream, ledger: Arc::new(Ledger::new(bytes)) })
    }

    /// The device with its compiled kernels.
    #[must_use]
    pub const fn device(&self) -> &kv_gpu::Device {
        &self.device
    }

    /// The stream of all work but background encoding.
    fn stream(&self) -> CUstream {
        self.stream.cu_stream()
    }

    /// Waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::Device`], also for an error of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(|e| driver("wait for the device", e))
    }

    /// Copy rate within device memory in bytes per second, reads and writes both counted.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn copy_rate(&self) -> Result<f64> {
        use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
        const BYTES: usize = 1 << 30;
        let (from, to) = (Buffer::<u8>::zeros(self, BYTES)?, Buffer::<u8>::zeros(self, BYTES)?);
        let stream = &self.stream;
        let event = || stream.record_event(Some(CU_EVENT_DEFAULT)).map_err(|e| driver("record an event", e));
        let times = (0..9).map(|_| {
            let start = event()?;
            let (from, to) = (from.pointer().address(), to.pointer().address());
            // SAFETY: both buffers have that many bytes and outlive the copy, which the next line waits for.
            unsafe { result::memcpy_dtod_async(to, from, BYTES, self.stream()) }
                .map_err(|e| driver("copy", e))?;
            start.elapsed_ms(&event()?).map_err(|e| driver("time a copy", e))
        });
        let mut times = times.collect::<Result<Vec<f32>>>()?;
        times.sort_by(f32::total_cmp);
        Ok(2e3 * BYTES as f64 / f64::from(times[times.len() / 2]))
    }

    /// Captures the work that `launch` enqueues as a graph.
    fn capture(&self, launch: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
        let _shared = CAPTURES.read().unwrap_or_else(PoisonError::into_inner);
        let stream = &self.stream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|e| driver("begin capture", e))?;
        let launched = launch();
        let flag = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        let graph = stream.end_capture(flag);
        launched?;
        let graph = graph.map_err(|e| driver("end capture", e))?;
        graph.ok_or_else(|| Error::argument("an empty graph was captured"))
    }
}

/// Whether an error says that the GPU does not support a model or a method; the CPU then runs it.
#[must_use]
pub fn unsupported(error: &Error) -> bool {
    use kv_gpu::Error::{NoNvrtc, Unsupported};
    matches!(error, Error::Argument(_) | Error::Blas(_) | Error::Device(NoNvrtc | Unsupported { .. }))
}

/// Names the operation that caused a driver error.
fn driver(operation: &str, source: DriverError) -> Error {
    Error::Device(kv_gpu::Error::Driver { operation: operation.to_owned(), source })
}
