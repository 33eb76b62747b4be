//! The cache that a method has on a device.

use std::sync::Arc;

use kv_attend::Window;
use kv_device::{CacheShape, DeviceCache, Gpu};
use kv_gpu::Element;
use kv_llama_gpu::ranks::{Rank, Shard};
use kv_llama_gpu::{Decoder, WeightLayout, Weights};
use kv_methods::{Method, Profile};
use kv_model::{Config, Model, rope_frequencies};

use crate::{Error, Result};

/// The same method for a rank of a model on a device, where defaults are those that a device supports. Needs
/// neither weights nor a device: what is refused here is refused before any work.
///
/// # Errors
/// [`Error::Argument`] for a model that no device runs or that cannot be divided so, for settings that do not
/// fit it or that no device supports, and for codes that the kernels do not: what is wrong, and what to pass
/// instead. Also for a bitstream, which no rank has a part of.
pub fn fitted(method: &Method, config: &Config, shard: Shard) -> Result<Method> {
    let part = shard.config(config)?;
    Weights::check(&part)?;
    let method = method.on_device(config)?;
    if shard != Shard::WHOLE && method.has_bitstream() {
        return Err(Error::Argument(format!(
            "method {}: a bitstream is of all heads, of which a rank has a part: pass one device, or another method",
            method.spec()
        )));
    }
    let shape = shape(&part, method.device_element()?, method.window(), (1, 1));
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
/// As [`method_cache`].
pub fn rank_cache(
    gpu: &Gpu,
    method: &Method,
    (config, shard): (&Config, Shard),
    element: Element,
    profile: Option<&Profile>,
    batch: usize,
    capacity: usize,
) -> Result<DeviceCache> {
    let method = fitted(method, config, shard)?;
    let shape = shape(&shard.config(config)?, element, method.window(), (batch, capacity));
    let plan = method.device_plan(config, profile)?;
    let plan = if shard == Shard::WHOLE { plan } else { plan.of_heads(shard.kv_heads(config.n_kv_heads))? };
    Ok(plan.build(gpu, &shape)?)
}

/// A decoder of a rank over an empty cache of a method, which the model has been
/// [folded](Method::device_model) for, with weights in the layout of the batch.
///
/// # Errors
/// As [`rank_cache`], and those of [`Decoder::of_rank`].
pub fn rank_decoder(
    rank: &Rank,
    method: &Method,
    model: &Model,
    profile: &Profile,
    (batch, capacity): (usize, usize),
) -> Result<Decoder> {
    let (element, shard) = (method.device_element()?, rank.shard());
    let cache =
        rank_cache(&rank.gpu, method, (&model.config, shard), element, Some(profile), batch, capacity)?;
    let layout = WeightLayout::of_batch(batch);
    let weights = Weights::shard_of(&rank.gpu, model, element, layout, shard)?;
    Ok(Decoder::of_rank(rank, Arc::new(weights), cache, batch)?)
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
