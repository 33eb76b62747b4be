//! PQCache (arXiv 2407.12820): top-k attention by product-quantized keys, with offloaded exact rows (on a
//! GPU, in host memory).

use std::sync::Arc;

#[cfg(feature = "cuda")]
use kv_device::plan::{Plan, Retrieval, Training};
use kv_llama::Footprint;
use kv_model::Config;
use pq_core::{
    CodebookBuf, CodesBuf, Lut, PqShape, TokenBudget, TrainOptions, Trained, lut_into, scan_into, train_batch,
};

use super::budget::take_budget;
use super::kind::{BuildContext, Kind, Registration, SEED};
#[cfg(feature = "cuda")]
use super::offload::Home;
use super::offload::{OffloadSettings, offload_help};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::pq_code::PqCode;
use super::retrieval::{RetrievalStore, Scorer};
use super::settings::words;
use crate::cache::{Geometry, OffloadedRows, Store};
use crate::calibrate::{Calibration, rotated_keys};
use crate::{Profile, Result};

pub(super) const PQ_CACHE: Registration = Registration {
    names: &["pqcache"],
    help: concat!(
        "\
  pqcache           top-k by PQ codes;                                    ratio=0.2 or tokens=N
                                                                          code=16x8 iterations=4
                                                                          codebooks=prompt|profile
",
        offload_help!()
    ),
    examples: &[
        "pqcache:ratio=1:code=4x2:exact=f32:window=4",
        "pqcache:ratio=1:code=4x2:codebooks=profile:exact=f32:window=4",
        "pqcache:ratio=1:code=4x2:offloaded=int8:window=4",
    ],
    parse: |s| {
        let (budget, code) = (take_budget(s)?, PqCode::take(s, "code", 8, 8)?);
        let iterations = s.positive("iterations", 4)?;
        let codebooks = s.common("codebooks", Codebooks::Prompt)?;
        let quantizer = Quantizer { code, iterations, codebooks };
        Ok(Arc::new(PqCache { budget, quantizer, offload: OffloadSettings::take(s)? }))
    },
};

#[derive(Debug)]
struct PqCache {
    budget: TokenBudget,
    quantizer: Quantizer,
    offload: OffloadSettings,
}

/// The quantizer of keys, and the training of its codebooks.
#[derive(Clone, Debug)]
struct Quantizer {
    code: PqCode,
    iterations: usize,
    codebooks: Codebooks,
}

/// The training data of codebooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codebooks {
    /// The first keys appended, which are the prompt's (PQCache 3.3).
    Prompt,
    /// The profile's text.
    Profile,
}

words!(Codebooks, "prompt" => Codebooks::Prompt, "profile" => Codebooks::Profile);

impl Quantizer {
    fn key(&self, l: usize, head: usize) -> String {
        format!("pqcache/{}/{}/{l}/{head}/centroids", self.code, self.iterations)
    }

    /// The codebooks of layer `l`, one per KV head.
    fn trained(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<CodebookBuf>> {
        let shape = self.code.shape(geometry.head_dim)?;
        (0..geometry.n_kv_heads).map(|head| profile.codebook(&self.key(l, head), shape)).collect()
    }

    /// The scorer of layer `l` before the first keys.
    fn scorer(&self, context: &BuildContext<'_>, l: usize) -> Result<PqCodes> {
        let shape = self.code.shape(context.geometry.head_dim)?;
        let codebooks = match self.codebooks {
            Codebooks::Prompt => vec![],
            Codebooks::Profile => self.trained(context.profile, context.geometry, l)?,
        };
        let trained_on = match self.codebooks {
            Codebooks::Prompt => 0,
            Codebooks::Profile => usize::MAX,
        };
        let head = |codebook| PqHead { codebook: Arc::new(codebook), codes: CodesBuf::new(shape) };
        let heads = codebooks.into_iter().map(head).collect();
        Ok(PqCodes { shape, iterations: self.iterations, trained_on, heads })
    }
}

impl Kind for PqCache {
    fn check(&self, config: &Config) -> Result<()> {
        self.quantizer.code.check("pqcache", "code", config)?;
        self.offload.check()
    }

    fn device_setting(&self) -> Option<&'static str> {
        self.offload.device_setting()
    }

    fn needs_profile(&self) -> bool {
        self.quantizer.codebooks == Codebooks::Profile
    }

    /// Trains key codebooks for every head of every layer.
    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let quantizer = &self.quantizer;
        let geometry = Geometry::of(&samples.model.config);
        let shape = quantizer.code.shape(geometry.head_dim)?;
        for (l, layer) in samples.layers.iter().enumerate() {
            let keys = |head| rotated_keys(samples.rope.layer(l), &geometry.head_rows(head, &layer.keys));
            let sets: Vec<Vec<f32>> = (0..geometry.n_kv_heads).map(keys).collect();
            let sets: Vec<&[f32]> = sets.iter().map(Vec::as_slice).collect();
            let trained = train_batch(shape, &sets, &train_options(quantizer.iterations))?;
            for (head, trained) in trained.into_iter().enumerate() {
                profile.put_floats(quantizer.key(l, head), trained.centroids);
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let codes = self.quantizer.scorer(context, l)?;
            RetrievalStore::new(context, l, self.budget, &self.offload, codes)
        })
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for PqCache {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        let mut limits = Limit::of_rings(window);
        limits.push(self.offload.limit_of_files());
        limits
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let quantizer = &self.quantizer;
        let geometry = Geometry::of(config);
        let trains = quantizer.codebooks == Codebooks::Prompt;
        let retrieval = Retrieval {
            quantizer: quantizer.code.shape(geometry.head_dim)?,
            budget: self.budget,
            training: trains.then_some(Training { iterations: quantizer.iterations, max_keys: MOST_TRAINED }),
            home: self.offload.home(Home::Host),
            resident: self.offload.held(),
        };
        let trained =
            |profile| (0..config.n_layers).map(|l| quantizer.trained(profile, geometry, l)).collect();
        let codebooks = profile.filter(|_| !trains).map(trained).transpose()?;
        Ok(Plan::Retrieval(retrieval, codebooks))
    }
}

/// Keys per centroid at which codebooks are final.
const ENOUGH: usize = 4;

/// Maximum keys per head to train a prompt's codebooks on: 16 per centroid have the KL of all.
const MOST_TRAINED: usize = 4096;

/// The stride at which a prompt's keys are sampled for training.
const fn training_step(keys: usize) -> usize {
    if keys == 0 { 1 } else { keys.div_ceil(MOST_TRAINED) }
}

fn train_options(iterations: usize) -> TrainOptions<'static> {
    TrainOptions { iterations, seed: SEED, ..Default::default() }
}

/// Product-quantized keys.
#[derive(Clone)]
struct PqCodes {
    shape: PqShape,
    iterations: usize,
    trained_on: usize,  // keys of a head
    heads: Vec<PqHead>, // one per KV head; empty until codebooks are trained on the first keys
}

/// One head's codebook and the codes of its keys.
#[derive(Clone)]
struct PqHead {
    codebook: Arc<CodebookBuf>,
    codes: CodesBuf,
}

/// Keys (tokens, head_dim) of a head.
fn all_keys(exact: &OffloadedRows, head: usize, head_dim: usize) -> Result<Vec<f32>> {
    let mut keys = vec![0.0; exact.len() * head_dim];
    keys.chunks_exact_mut(head_dim).enumerate().try_for_each(|(t, key)| exact.key(head, t, key))?;
    Ok(keys)
}

impl Scorer for PqCodes {
    /// Codebooks are trained on the first keys, and again on all keys whenever their number has doubled,
    /// until there are [`ENOUGH`] per centroid.
    fn push(&mut self, _pos: usize, rotated: &[f32], exact: &OffloadedRows) -> Result<()> {
        let Self { shape, iterations, trained_on, heads } = self;
        let (geometry, n, enough) = (exact.geometry(), exact.len(), ENOUGH * shape.ksub());
        let trains = *trained_on == 0 || (*trained_on < enough && n >= 2 * *trained_on);
        let head_rows = |head| match trains && *trained_on > 0 {
            true => all_keys(exact, head, geometry.head_dim),
            false => Ok(geometry.head_rows(head, rotated)),
        };
        let rows = (0..geometry.n_kv_heads).map(head_rows).collect::<Result<Vec<_>>>()?;
        if trains {
            let step = training_step(n);
            let sample = |rows: &Vec<f32>| -> Vec<f32> {
                rows.chunks_exact(geometry.head_dim).step_by(step).flatten().copied().collect()
            };
            let samples: Vec<Vec<f32>> = rows.iter().map(sample).collect();
            let samples: Vec<&[f32]> = samples.iter().map(Vec::as_slice).collect();
            let trained = train_batch(*shape, &samples, &train_options(*iterations))?;
            let head = |trained: Trained| -> Result<PqHead> {
                let codebook = Arc::new(CodebookBuf::new(*shape, &trained.centroids)?);
                Ok(PqHead { codebook, codes: CodesBuf::new(*shape) })
            };
            (*heads, *trained_on) = (trained.into_iter().map(head).collect::<Result<_>>()?, n);
        }
        for (head, rows) in heads.iter_mut().zip(&rows) {
            head.codes.append(&head.codebook.view(), rows)?;
        }
        Ok(())
    }

    fn truncate(&mut self, exact: &OffloadedRows) -> Result<()> {
        self.heads.iter_mut().for_each(|head| head.codes.truncate(exact.len()));
        if exact.len() == 0 && self.trained_on < usize::MAX {
            (self.heads, self.trained_on) = (vec![], 0);
        }
        Ok(())
    }

    fn scores(&self, exact: &OffloadedRows, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let (n, group) = (exact.len(), q.len() / exact.geometry().head_dim);
        let (head, lut_len) = (&self.heads[head], self.shape.lut_len());
        let (mut scores, mut luts) = (vec![0.0; group * n], vec![0.0; group * lut_len]);
        lut_into(&head.codebook.view(), q, &mut luts)?;
        for (lut, scores) in luts.chunks_exact(lut_len).zip(scores.chunks_exact_mut(n)) {
            scan_into(&Lut::new(self.shape, lut)?, &head.codes.view(), scores)?;
        }
        Ok(scores)
    }

    fn scored_bytes(&self, exact: &OffloadedRows) -> usize {
        self.shape.codes_len(exact.len())
    }

    fn footprint(&self, exact: &OffloadedRows) -> Footprint {
        let of_head = |head: &PqHead| head.codes.view().size() + 4 * self.shape.codebook_len();
        Footprint { kept: self.heads.iter().map(of_head).sum(), ..exact.footprint() }
    }
}
