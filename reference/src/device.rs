//! A Llama on a GPU, built on the kernels of `kv-gpu` and the caches of `kv-device`: the counterpart of
//! [`kv_llama::Decoder`] and of the caches of `kv-methods` on the CPU.
//!
//! A decode step of a whole batch is one CUDA graph: four launches per layer and those of attention, with
//! tokens and lengths on the device and no wait for the host. A prompt runs in chunks, layer by layer, with
//! GEMMs by cuBLASLt and `kv_gpu::svd::Prefill`. [`Weights`] holds the model, a [`DeviceCache`] the keys and
//! values, a [`Decoder`] runs steps.

mod gemm;
mod gemv;
mod of_method;
mod programs;
mod score;
mod serve;
mod step;
mod stream_target;
mod weights;

use cudarc::driver::DriverError;
pub use kv_device::{
    Chunk, DeviceCache, FRAMES, Gpu, Loader, PageLocked, SlotMapping, Stages, Timed, hashed,
};
pub use kv_gpu::Element;

use crate::Error;
pub use gemm::check_cublas;
pub use of_method::{fitted, method_cache};
pub use programs::programs;
pub use score::{answer_questions, score_text};
pub use serve::serve;
pub use step::{CHUNK, Decoder, Part};
pub use stream_target::StreamTarget;
pub use weights::{RANDOM_MODELS, Weights};

/// Whether an error says that the GPU does not support a model or a method; the CPU then runs it.
#[must_use]
pub fn unsupported(error: &Error) -> bool {
    use kv_device::Error::Gpu;
    use kv_gpu::Error::{NoNvrtc, Unsupported};
    matches!(error, Error::Argument(_) | Error::Blas(_) | Error::Device(Gpu(NoNvrtc | Unsupported { .. })))
}

/// Names the operation that caused a driver error.
fn driver(operation: &str, source: DriverError) -> Error {
    Error::from(kv_gpu::Error::Driver { operation: operation.to_owned(), source })
}
