//! A GPU: its kernels, its streams, and the memory of its buffers.

use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaGraph, CudaStream, DriverError, result, sys};
use kv_gpu::Device;

use crate::ledger::Ledger;
use crate::{Error, Result};

/// Held shared by graph captures, exclusively by calls that may wait for the whole context
/// ([`without_captures`]).
static CAPTURES: RwLock<()> = RwLock::new(());

/// Excludes [graph captures](Gpu::capture) while the guard is held. A call that waits for the context, as
/// cuBLASLt does when a handle is created or destroyed, must not run during a capture on another thread:
/// parallel tests have seen captures invalidated, and a trial with `cuCtxSynchronize` or `cublasLtCreate`
/// crashed. Allocations, page-locked or not, modules, events and copies on other threads are safe.
pub fn without_captures() -> RwLockWriteGuard<'static, ()> {
    CAPTURES.write().unwrap_or_else(PoisonError::into_inner)
}

/// An open GPU: its kernels, and the streams of a decode loop.
pub struct Gpu {
    pub(crate) device: Device,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) ledger: Arc<Ledger>,
}

impl Gpu {
    /// Opens device `ordinal`, with a stream of the highest priority.
    ///
    /// # Errors
    /// [`Error::Gpu`] if there is none.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::open_within(ordinal, usize::MAX)
    }

    /// Opens device `ordinal`, with a limit of `bytes` on the memory of all [buffers](crate::Buffer). The
    /// driver's own memory, some hundred megabytes, is not counted.
    ///
    /// # Errors
    /// [`Error::Gpu`] if there is none.
    pub fn open_within(ordinal: usize, bytes: usize) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let priorities = result::stream::get_priority_range();
        let (_, highest) = priorities.map_err(|e| driver("read priorities", e))?;
        let stream = device.context().new_stream_with_priority(highest);
        let stream = stream.map_err(|e| driver("make a stream", e))?;
        Ok(Self { device, stream, ledger: Arc::new(Ledger::new(bytes)) })
    }

    /// Uses an engine's own context and stream, with a limit of `bytes` as in [`Self::open_within`].
    /// Background encoding runs on a second stream, of the lowest priority.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn on_stream(stream: Arc<CudaStream>, bytes: usize) -> Result<Self> {
        let device = Device::on_context(stream.context().clone())?;
        Ok(Self { device, stream, ledger: Arc::new(Ledger::new(bytes)) })
    }

    /// The device with its compiled kernels.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// The stream of all work but background encoding.
    #[must_use]
    pub fn stream(&self) -> CUstream {
        self.stream.cu_stream()
    }

    /// The same stream, to record events on it or make others wait for it.
    #[must_use]
    pub const fn cuda_stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Makes the context current on this thread, for calls to the driver.
    pub(crate) fn bind_to_thread(&self) -> Result<()> {
        self.device.context().bind_to_thread().map_err(|e| driver("use device on this thread", e))
    }

    /// Waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::Gpu`], also for an error of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(|e| driver("wait for the device", e))
    }

    /// Captures the work that `launch` enqueues as a graph.
    ///
    /// # Errors
    /// [`Error::Gpu`]; [`Error::Argument`] if nothing was enqueued; those of `launch`.
    pub fn capture<E: From<Error>>(&self, launch: impl FnOnce() -> Result<(), E>) -> Result<CudaGraph, E> {
        let _shared = CAPTURES.read().unwrap_or_else(PoisonError::into_inner);
        let stream = &self.stream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|e| driver("begin capture", e))?;
        let launched = launch();
        let flag = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        let graph = stream.end_capture(flag);
        launched?;
        let graph = graph.map_err(|e| driver("end capture", e))?;
        Ok(graph.ok_or_else(|| Error::argument("an empty graph was captured"))?)
    }
}

/// Names the operation that caused a driver error.
pub(crate) fn driver(operation: &str, source: DriverError) -> Error {
    Error::Gpu(kv_gpu::Error::Driver { operation: operation.to_owned(), source })
}
