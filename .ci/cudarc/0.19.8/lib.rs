//! As `../lib.rs`, and where kv-device runs on an engine's stream: its oldest cudarc.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use kv_device::{Gpu, Result};

#[path = "../lib.rs"]
pub mod gpu;

pub fn on_the_engines_stream(stream: Arc<CudaStream>, bytes: usize) -> Result<Gpu> {
    Gpu::on_stream(stream, bytes)
}
