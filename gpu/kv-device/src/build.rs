//! The cache that a method has on a device.

use kv_gpu::Element;

use super::codes::{Codebooks, check_encoders, paging};
use super::zack::{Cuts, uniform_ranks};
use super::{
    CacheGenCache, DenseCache, DeviceCache, HybridCache, Int4Cache, MillionCache, PagedCache, PqCache,
    ZackCache, cachegen, hybrid, million, pqcache,
};
use crate::device::bases::{Bases, BasisMaps};
use crate::device::ledger::Allocating;
use crate::device::{Gpu, Weights, hashed};
use crate::method::{CodedRows, Heads, Method, Plan, RowForm, TransformedHead};
use crate::model::Config;
use crate::{Error, Profile, Result};

/// The same method for a model on a device, where defaults are those that a device supports. Needs neither
/// weights nor a device: what is refused here is refused before any work.
///
/// # Errors
/// [`Error::Argument`] for a model that no device runs, for settings that do not fit it or that no device
/// supports, and for codes that the kernels do not: what is wrong, and what to pass instead.
pub fn fitted(method: &Method, config: &Config) -> Result<Method> {
    Weights::check(config)?;
    let method = method.on_device(config)?;
    let (element, plan) = (method.device_element()?, method.device_plan(config, None)?);
    match check_kernels(&plan, config, element) {
        Err(Error::Device(kv_gpu::Error::Unsupported { supported, .. })) => Err(Error::Argument(format!(
            "method {}: kernels on a device take {supported}: pass other codes, or --device cpu",
            method.spec()
        ))),
        checked => checked.map(|()| method),
    }
}

/// Rejects shapes of codes that the kernels of a cache do not support.
fn check_kernels(plan: &Plan, config: &Config, element: Element) -> Result<()> {
    match plan {
        // Every model that a device runs has them.
        Plan::Dense(_) | Plan::Int4 | Plan::Cuts(..) | Plan::Bitstream(..) => Ok(()),
        Plan::Codes { quantizers, rows, pages } => {
            let form = match rows {
                CodedRows::Plain(_) => None,
                CodedRows::Transformed(form, _) => Some(*form),
            };
            let paging = paging(pages.is_some());
            check_encoders(*quantizers, element, paging)?;
            Ok(million::kernel(config, element, *quantizers, form, paging).check()?)
        }
        Plan::Hybrid(plan, _) => {
            check_encoders(plan.quantizers, element, paging(false))?;
            Ok(hybrid::kernels(config, element, plan).check()?)
        }
        Plan::Retrieval(retrieval, _) => pqcache::check_kernels(config, element, retrieval),
    }
}

/// The cache of a method for `batch` sequences of at most `capacity` tokens; codebooks are from the profile,
/// or hashed without one.
///
/// # Errors
/// As [`fitted`]; [`Error::Profile`]; [`Error::DeviceMemory`] and [`Error::HostMemory`]; [`Error::Device`].
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
    let method = fitted(method, config)?;
    let window = method.window();
    Ok(match method.device_plan(config, profile)? {
        Plan::Dense(Some(pages)) => Box::new(PagedCache::new(gpu, config, element, pages, batch, capacity)?),
        Plan::Dense(None) => Box::new(DenseCache::new(gpu, config, element, batch, capacity)?),
        Plan::Int4 => Box::new(Int4Cache::new(gpu, config, element, window, batch, capacity)?),
        Plan::Retrieval(retrieval, codebooks) => {
            Box::new(PqCache::new(gpu, config, element, retrieval, codebooks, window, batch, capacity)?)
        }
        Plan::Hybrid(plan, heads) => {
            let codes = TransformedCodes::new(config, plan.form, heads);
            Box::new(HybridCache::new(gpu, config, element, plan, codes, window, batch, capacity)?)
        }
        Plan::Cuts(cuts, heads) => {
            let (maps, ranks) = match heads {
                Some(heads) => {
                    let ranks = heads.iter().map(|layer| layer.iter().map(|head| head.ranks).collect());
                    (BasisMaps::of(heads.iter().flatten().map(|head| &head.maps)), ranks.collect())
                }
                None => (BasisMaps::random(config), uniform_ranks(config, cuts.fractions)),
            };
            let bases = Bases::new(gpu, config, element, &maps)?;
            let cuts = Cuts { bases, ranks, cuts_prompts: cuts.cuts_prompts };
            Box::new(ZackCache::new(gpu, config, element, cuts, window, batch, capacity)?)
        }
        Plan::Bitstream(bitstream, planes) => {
            let planes = planes.map_or_else(|| cachegen::hashed_planes(config, &bitstream), Ok)?;
            Box::new(CacheGenCache::new(gpu, config, element, &planes, window, batch, capacity)?)
        }
        Plan::Codes { quantizers, rows, pages } => {
            let (codebooks, transformed) = match rows {
                CodedRows::Plain(codebooks) => (codebooks, None),
                CodedRows::Transformed(form, heads) => {
                    let mut codes = TransformedCodes::new(config, form, heads);
                    (codes.codebooks.take(), Some(codes))
                }
            };
            Box::new(MillionCache::new(
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
            )?)
        }
    })
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
    /// Those of these heads, or hashed ones.
    fn new(config: &Config, form: RowForm, heads: Option<Heads<TransformedHead>>) -> Self {
        let Some(heads) = heads else {
            let keys = config.n_layers * config.kv_dim();
            return Self {
                form,
                codebooks: None,
                maps: BasisMaps::random(config),
                key_means: (0..keys as u64).map(|i| hashed(RANDOM_MEANS, i, 1.0)).collect(),
                key_errors: vec![0.0; keys],
                value_errors: vec![HASHED_VALUE_ERROR; config.n_layers * config.n_kv_heads],
            };
        };
        let all = || heads.iter().flatten();
        let of_all = |part: fn(&TransformedHead) -> &[f32]| all().flat_map(part).copied().collect();
        Self {
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
        }
    }
}
