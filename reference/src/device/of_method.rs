//! The cache that a method has on a device.

use kv_attend::Window;
use kv_device::{CacheShape, DeviceCache, Gpu};
use kv_gpu::Element;
use kv_llama_gpu::Weights;
use kv_llama_gpu::ranks::Shard;
use kv_methods::{Method, Profile};
use kv_model::{Config, rope_frequencies};

use crate::{Error, Result};

/// The same method for a model on a device, where defaults are those that a device supports. Needs neither
/// weights nor a device: what is refused here is refused before any work.
///
/// # Errors
/// [`Error::Argument`] for a model that no device runs, for settings that do not fit it or that no device
/// supports, and for codes that the kernels do not: what is wrong, and what to pass instead.
pub fn fitted(method: &Method, config: &Config) -> Result<Method> {
    Weights::check(config)?;
    let method = method.on_device(config)?;
    let shape = shape(config, method.device_element()?, method.window(), (1, 1));
    match method.device_plan(config, None)?.check(&shape) {
        Err(kv_device::Error::Gpu(kv_gpu::Error::Unsupported { supported, .. })) => {
            Err(Error::Argument(format!(
                "method {}: kernels on a device take {supported}: pass other codes, or --device cpu",
                method.spec()
            )))
        }
        checked => Ok(checked.map(|()| method)?),
    }
}

/// The cache of a method for `batch` sequences of at most `capacity` tokens; codebooks are from the profile,
/// or hashed without one.
///
/// # Errors
/// As [`fitted`]; [`kv_methods::Error::Profile`]; [`Error::Device`] also where memory of the device or of the
/// host is short.
pub fn method_cache(
    gpu: &Gpu,
    method: &Method,
    config: &Config,
    element: Element,
    profile: Option<&Profile>,
    batch: usize,
    capacity: usize,
) -> Result<DeviceCache> {
    rank_cache(gpu, method, (config, Shard::WHOLE), element, profile, batch, capacity)
}

/// As [`method_cache`], for a rank's heads of a model of this shape.
///
/// # Errors
/// As [`method_cache`], and [`Error::Argument`] for a model or a cache that cannot be divided.
pub fn rank_cache(
    gpu: &Gpu,
    method: &Method,
    (config, shard): (&Config, Shard),
    element: Element,
    profile: Option<&Profile>,
    batch: usize,
    capacity: usize,
) -> Result<DeviceCache> {
    let method = fitted(method, config)?;
    let shape = shape(&shard.config(config)?, element, method.window(), (batch, capacity));
    let plan = method.device_plan(config, profile)?;
    let plan = if shard == Shard::WHOLE { plan } else { plan.of_heads(shard.kv_heads(config.n_kv_heads))? };
    Ok(plan.build(gpu, &shape)?)
}

/// The sizes of a cache of the model.
fn shape(config: &Config, element: Element, window: Window, (batch, capacity): (usize, usize)) -> CacheShape {
    CacheShape {
        layers: config.n_layers,
        heads: config.n_kv_heads,
        group: config.gqa_group(),
        head_dim: config.head_dim,
        frequencies: rope_frequencies(config),
        element,
        window,
        batch,
        capacity,
    }
}
