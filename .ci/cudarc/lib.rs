//! Compiles where kv-gpu shares an engine's cudarc: an older release, linked instead of loaded, with bindings
//! of another CUDA version. Each folder has one such tree; `.ci/run` checks them. Types must be the same on
//! both sides.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use kv_gpu::{Device, Error};

pub fn on_the_engines_context(context: Arc<CudaContext>) -> Result<Device, Error> {
    Device::on_context(context)
}

pub fn stream(device: &Device) -> &Arc<CudaStream> {
    device.stream()
}
