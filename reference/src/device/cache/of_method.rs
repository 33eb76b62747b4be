//! The cache that a method has on a device.

use kv_gpu::Element;

use super::codes::Codebooks;
use super::zack::{Cuts, uniform_ranks};
use super::{
    CacheGenCache, DenseCache, DeviceCache, HybridCache, Int4Cache, MillionCache, PagedCache, PqCache,
    ZackCache, cachegen,
};
use crate::device::bases::{Bases, BasisMaps};
use crate::device::ledger::Allocating;
use crate::device::{Gpu, hashed};
use crate::method::{Method, RowForm, TransformedHead};
use crate::model::Config;
use crate::{Error, Profile, Result};

/// The cache of a method for `batch` sequences of at most `capacity` tokens; codebooks are from the profile,
/// or hashed without one.
///
/// # Errors
/// [`Error::Argument`] for a method that is not implemented on the device; [`Error::Profile`];
/// [`Error::DeviceMemory`] and [`Error::HostMemory`]; [`Error::Device`].
pub fn method_cache(
    gpu: &Gpu,
    method: &Method,
    config: &Config,
    element: Element,
    profile: Option<&Profile>,
    batch: usize,
    capacity: usize,
) -> Result<Box<dyn DeviceCache>> {
    let _purpose = Allocating::new("caches");
    let method = method.fitted(config)?;
    if method.is_dense() {
        return Ok(match method.device_pages() {
            Some(pages) => Box::new(PagedCache::new(gpu, config, element, pages, batch, capacity)?),
            None => Box::new(DenseCache::new(gpu, config, element, batch, capacity)?),
        });
    }
    let window = method.window();
    if let Some(retrieval) = method.device_retrieval(config)? {
        let profile = profile.filter(|_| retrieval.training.is_none());
        let codebooks = profile.map(|profile| method.key_codebooks(config, profile)).transpose()?;
        let cache = PqCache::new(gpu, config, element, retrieval, codebooks, window, batch, capacity)?;
        return Ok(Box::new(cache));
    }
    if let Some(plan) = method.device_hybrid(config)? {
        let codes = TransformedCodes::new(&method, config, profile, plan.form)?;
        return Ok(Box::new(HybridCache::new(gpu, config, element, plan, codes, window, batch, capacity)?));
    }
    if method.is_device_int4() {
        return Ok(Box::new(Int4Cache::new(gpu, config, element, window, batch, capacity)?));
    }
    if let Some(cuts) = method.device_cuts() {
        let (maps, ranks) = match profile {
            Some(profile) => {
                let heads = method.cut_heads(config, profile)?;
                let ranks = heads.iter().map(|layer| layer.iter().map(|head| head.ranks).collect());
                (BasisMaps::of(heads.iter().flatten().map(|head| &head.maps)), ranks.collect())
            }
            None => (BasisMaps::random(config), uniform_ranks(config, cuts.fractions)),
        };
        let bases = Bases::new(gpu, config, element, &maps)?;
        let cuts = Cuts { bases, ranks, cuts_prompts: cuts.cuts_prompts };
        return Ok(Box::new(ZackCache::new(gpu, config, element, cuts, window, batch, capacity)?));
    }
    if let Some(bitstream) = method.device_bitstream()? {
        let planes = match profile {
            Some(profile) => method.layer_planes(config, profile)?,
            None => cachegen::hashed_planes(config, &bitstream)?,
        };
        return Ok(Box::new(CacheGenCache::new(gpu, config, element, &planes, window, batch, capacity)?));
    }
    let Some(codes) = method.device_codes(config)? else {
        return Err(Error::Argument(format!(
            "method {} is not implemented on the device; cachegen, dense, hybrid, int4, million (without \
             outliers), pqcache, pqklt and zack (all tokens, without codes) are, all without exact layers: \
             pass --device cpu",
            method.spec()
        )));
    };
    let (codebooks, transformed) = match codes.transformed {
        Some(form) => {
            let mut codes = TransformedCodes::new(&method, config, profile, form)?;
            (codes.codebooks.take(), Some(codes))
        }
        None => (profile.map(|profile| method.codebooks(config, profile)).transpose()?, None),
    };
    let quantizers = codes.quantizers;
    let pages = method.device_pages();
    let cache = MillionCache::new(
        gpu,
        config,
        element,
        quantizers,
        codebooks,
        transformed,
        window,
        pages,
        batch,
        capacity,
    )?;
    Ok(Box::new(cache))
}

/// What hashed codes of values count as: a number with which a bound has some effect on how many rows a step
/// reads.
const HASHED_VALUE_ERROR: f32 = 0.5;

/// The number of the hashed tensor that means of keys are.
const RANDOM_MEANS: u32 = 6 << 16;

/// Codes of transformed rows.
pub(super) struct TransformedCodes {
    pub form: RowForm,
    pub codebooks: Option<Codebooks>, // or hashed ones
    pub maps: BasisMaps,
    pub key_means: Vec<f32>,    // (layer, heads, head_dim)
    pub key_errors: Vec<f32>,   // (layer, heads, head_dim): mean squares
    pub value_errors: Vec<f32>, // (layer, heads): mean squares over the variance
}

impl TransformedCodes {
    /// Those of the profile, or hashed ones.
    fn new(method: &Method, config: &Config, profile: Option<&Profile>, form: RowForm) -> Result<Self> {
        let Some(profile) = profile else {
            let keys = config.n_layers * config.kv_dim();
            return Ok(Self {
                form,
                codebooks: None,
                maps: BasisMaps::random(config),
                key_means: (0..keys as u64).map(|i| hashed(RANDOM_MEANS, i, 1.0)).collect(),
                key_errors: vec![0.0; keys],
                value_errors: vec![HASHED_VALUE_ERROR; config.n_layers * config.n_kv_heads],
            });
        };
        let heads = method.transformed_heads(config, profile)?;
        let all = || heads.iter().flatten();
        let of_all = |part: fn(&TransformedHead) -> &[f32]| all().flat_map(part).copied().collect();
        Ok(Self {
            form,
            maps: BasisMaps {
                value_means: Some(of_all(|head| &head.value_mean)),
                ..BasisMaps::of(all().map(|head| &head.maps))
            },
            key_means: of_all(|head| &head.key_mean),
            key_errors: of_all(|head| &head.key_errors),
            value_errors: all().map(|head| head.value_error).collect(),
            codebooks: Some(
                heads
                    .into_iter()
                    .map(|layer| layer.into_iter().map(|head| head.codebooks).collect())
                    .collect(),
            ),
        })
    }
}
