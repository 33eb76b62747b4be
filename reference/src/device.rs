//! Methods on a GPU: the cache of `kv-device` that a method has for the loop of `kv-llama-gpu`, its scores,
//! and streams into it.

mod of_method;
mod score;
mod stream_target;

use crate::Error;
pub use of_method::{fitted, method_cache, rank_cache, rank_decoder};
pub use score::{answer_questions, score_text};
pub use stream_target::StreamTarget;

/// Whether an error says that the GPU does not support a model or a method; the CPU then runs it.
#[must_use]
pub fn unsupported(error: &Error) -> bool {
    use kv_device::Error::Gpu;
    use kv_gpu::Error::{NoNvrtc, Unsupported};
    match error {
        Error::Argument(_) | Error::Device(Gpu(NoNvrtc | Unsupported { .. })) => true,
        Error::LlamaGpu(e) => matches!(e, kv_llama_gpu::Error::Blas(_)),
        _ => false,
    }
}
