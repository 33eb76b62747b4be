//! Builds the cache of a plan.

use kv_attend::owner::Pair;
use pq_core::{CodebookBuf, is_norm_scale};

use crate::bases::{Bases, BasisMaps};
use crate::cache::Cache;
use crate::cache::cachegen::{CacheGenCache, hashed_planes};
use crate::cache::codes::{check_encoders, paging};
use crate::cache::dense::DenseCache;
use crate::cache::hybrid::{self, HybridCache};
use crate::cache::int4::Int4Cache;
use crate::cache::million::{self, MillionCache};
use crate::cache::paged::PagedCache;
use crate::cache::pqcache::{self, PqCache};
use crate::cache::sq::{self, SqCache};
use crate::cache::transformed::TransformedCodes;
use crate::cache::zack::{Cuts, ZackCache, uniform_ranks};
use crate::device_cache::DeviceCache;
use crate::gpu::Gpu;
use crate::ledger::Allocating;
use crate::plan::{CodedRows, DeviceCuts, HeadMaps, Heads, HybridPlan, Plan, RowHome, TransformedHead};
use crate::shape::CacheShape;
use crate::{Error, Result};

impl Plan {
    /// Rejects sizes and codes that the kernels of the cache do not support. Needs no device.
    ///
    /// # Errors
    /// [`Error::Argument`]; [`Error::Gpu`] with the codes that kernels support.
    pub fn check(&self, shape: &CacheShape) -> Result<()> {
        shape.check()?;
        match self {
            // Kernels support them for all sizes.
            Self::Dense(_) | Self::Int4 | Self::Cuts(..) | Self::Bitstream(..) => Ok(()),
            Self::Codes { quantizers, rows, pages } => {
                let form = match rows {
                    CodedRows::Plain(_) => None,
                    CodedRows::Transformed(form, _) => Some(*form),
                };
                if form.is_some_and(|form| form.norms.keys.is_some() != form.norms.values.is_some()) {
                    return Err(Error::argument("attention to codes has norms of keys and values, or none"));
                }
                let paging = paging(pages.is_some());
                check_encoders(*quantizers, shape.element, paging)?;
                Ok(million::kernel(shape, *quantizers, form, paging).check()?)
            }
            Self::Hybrid(plan, _) => {
                check_encoders(plan.quantizers, shape.element, paging(false))?;
                Ok(hybrid::kernels(shape, plan).check()?)
            }
            Self::Retrieval(retrieval, _) => {
                if retrieval.home == RowHome::Device {
                    return Err(Error::argument("retrieval reads rows from memory of the host"));
                }
                pqcache::check_kernels(shape, retrieval)
            }
            Self::Scalar(plan, _) => sq::check(shape, plan),
        }
    }

    /// An empty cache of these sizes.
    ///
    /// # Errors
    /// As [`Self::check`]; [`Error::Argument`] for data of other sizes or a scale of values that is not
    /// positive; [`Error::Profile`] for data that no 16-bit element holds; [`Error::DeviceMemory`],
    /// [`Error::HostMemory`], [`Error::Gpu`].
    pub fn build(self, gpu: &Gpu, shape: &CacheShape) -> Result<DeviceCache> {
        let _purpose = Allocating::new("caches");
        self.check(shape)?;
        self.check_data(shape)?;
        let cache: Box<dyn Cache> = match self {
            Self::Dense(Some(pages)) => Box::new(PagedCache::new(gpu, shape, pages)?),
            Self::Dense(None) => Box::new(DenseCache::new(gpu, shape)?),
            Self::Int4 => Box::new(Int4Cache::new(gpu, shape)?),
            Self::Retrieval(retrieval, codebooks) => {
                Box::new(PqCache::new(gpu, shape, retrieval, codebooks)?)
            }
            Self::Scalar(plan, heads) => Box::new(SqCache::new(gpu, shape, &plan, heads.as_ref())?),
            Self::Hybrid(plan, heads) => {
                let codes = TransformedCodes::new(shape, plan.form, heads);
                Box::new(HybridCache::new(gpu, shape, plan, codes)?)
            }
            Self::Cuts(cuts, heads) => {
                let (maps, ranks) = match heads {
                    Some(heads) => {
                        let ranks = heads.iter().map(|layer| layer.iter().map(|head| head.ranks).collect());
                        (BasisMaps::of(heads.iter().flatten().map(|head| &head.maps)), ranks.collect())
                    }
                    None => (BasisMaps::random(shape), uniform_ranks(shape, cuts.fractions)),
                };
                let bases = Bases::new(gpu, shape, &maps)?;
                let cuts = Cuts { bases, ranks, cuts_prompts: cuts.cuts_prompts };
                Box::new(ZackCache::new(gpu, shape, cuts)?)
            }
            Self::Bitstream(bitstream, planes) => {
                let planes = planes.map_or_else(|| hashed_planes(shape, &bitstream), Ok)?;
                Box::new(CacheGenCache::new(gpu, shape, &planes)?)
            }
            Self::Codes { quantizers, rows, pages } => {
                let (codebooks, transformed) = match rows {
                    CodedRows::Plain(codebooks) => (codebooks, None),
                    CodedRows::Transformed(form, heads) => {
                        let mut codes = TransformedCodes::new(shape, form, heads);
                        (codes.codebooks.take(), Some(codes))
                    }
                };
                Box::new(MillionCache::new(gpu, shape, quantizers, codebooks, transformed, pages)?)
            }
        };
        Ok(DeviceCache::new(gpu, shape, cache))
    }

    /// Rejects data of other layers, heads or sizes.
    fn check_data(&self, shape: &CacheShape) -> Result<()> {
        let dim = shape.head_dim;
        let has_maps = |maps: &HeadMaps| {
            [&maps.keys, &maps.queries, &maps.values].into_iter().all(|map| map.len() == dim * dim)
        };
        match self {
            Self::Dense(_) | Self::Int4 => Ok(()),
            Self::Retrieval(retrieval, books) => {
                check_heads(shape, books, |book: &CodebookBuf| book.view().shape() == retrieval.quantizer)
            }
            Self::Codes { quantizers, rows: CodedRows::Plain(books), .. } => {
                check_heads(shape, books, |pair| shapes(pair) == *quantizers)
            }
            Self::Codes { quantizers, rows: CodedRows::Transformed(_, heads), .. }
            | Self::Hybrid(HybridPlan { quantizers, .. }, heads) => {
                check_heads(shape, heads, |head: &TransformedHead| {
                    let rows = [&head.key_mean, &head.value_mean, &head.key_errors];
                    shapes(&head.codebooks) == *quantizers
                        && has_maps(&head.maps)
                        && rows.into_iter().all(|row| row.len() == dim)
                })
            }
            Self::Scalar(_, Some(heads))
                if !heads.iter().flatten().all(|head| is_norm_scale(head.value_scale)) =>
            {
                Err(Error::argument("the scale of a head's values is no power of two from 2^-126 to 2^126"))
            }
            Self::Scalar(plan, heads) => check_heads(shape, heads, |head| {
                let rows = [&head.key_mean, &head.value_mean];
                let maps = [&head.basis, &head.dual, &plan.value_map];
                (head.keys.dim(), head.keys.slots()) == (dim, plan.key_slots)
                    && rows.into_iter().all(|row| row.len() == dim)
                    && maps.into_iter().all(|map| map.len() == dim * dim)
            }),
            Self::Cuts(_, heads) => check_heads(shape, heads, |head| {
                let fits = |&rank: &usize| rank <= dim && rank.is_multiple_of(DeviceCuts::MULTIPLE);
                has_maps(&head.maps) && head.ranks.iter().all(fits)
            }),
            Self::Bitstream(_, planes) => {
                let layers =
                    planes.as_ref().map(|layers| layers.iter().flat_map(Pair::iter).collect::<Vec<_>>());
                match layers {
                    Some(planes)
                        if planes.len() != 2 * shape.layers
                            || planes.iter().any(|plane| plane.channels() != shape.kv_dim()) =>
                    {
                        Err(Error::argument("the planes are of a model of another shape"))
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

/// The shapes of a head's codebooks.
fn shapes(books: &Pair<CodebookBuf>) -> Pair<pq_core::PqShape> {
    Pair::of(|side| books[side].view().shape())
}

/// Rejects other numbers of layers or heads, and heads that do not fit.
fn check_heads<T>(shape: &CacheShape, heads: &Option<Heads<T>>, fits: impl Fn(&T) -> bool) -> Result<()> {
    let Some(layers) = heads else { return Ok(()) };
    match layers.len() == shape.layers
        && layers.iter().all(|heads| heads.len() == shape.heads)
        && layers.iter().flatten().all(fits)
    {
        true => Ok(()),
        false => Err(Error::argument("the data of the heads are of a model of another shape")),
    }
}
