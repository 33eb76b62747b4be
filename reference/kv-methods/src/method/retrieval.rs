//! Top-k attention: all tokens are scored cheaply, and the best ones are attended to exactly. `oracle` scores
//! by the exact inner product, `pqcache` by product-quantized keys, with offloaded exact rows (on a GPU, in
//! host memory).

use std::sync::Arc;

#[cfg(feature = "cuda")]
use kv_device::plan::{Plan, Retrieval, Training};
use kv_llama::ops::dot;
use kv_llama::{Fetched, Footprint};
use kv_model::{Config, Model, Rope};
use pq_core::{
    CodebookBuf, CodesBuf, GroupRule, Lut, PqShape, TokenBudget, TrainOptions, Trained, combine_group_into,
    lut_into, scan_into, top_k_into, train_batch,
};
use svd_core::SoftmaxStats;

use super::budget::take_budget;
use super::kind::{BuildContext, Kind, Registration, SEED};
#[cfg(feature = "cuda")]
use super::offload::Home;
use super::offload::{OffloadSettings, offload_help};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::pq_code::PqCode;
use super::settings::words;
#[cfg(feature = "cuda")]
use crate::Error;
use crate::cache::{Geometry, OffloadedRows, Store};
use crate::calibrate::{Calibration, rotated_keys};
use crate::{Profile, Result};

pub(super) const ORACLE: Registration = Registration {
    names: &["oracle"],
    help: "\
  oracle            exact top-k, this fraction of the tokens              ratio=0.2 or tokens=N
",
    examples: &["oracle:ratio=1:exact=f32:window=4"],
    parse: |s| {
        Ok(Arc::new(TopK { budget: take_budget(s)?, quantizer: None, offload: OffloadSettings::NONE }))
    },
};

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
        let quantizer = Some(Quantizer { code, iterations, codebooks });
        Ok(Arc::new(TopK { budget, quantizer, offload: OffloadSettings::take(s)? }))
    },
};

#[derive(Debug)]
struct TopK {
    budget: TokenBudget,
    quantizer: Option<Quantizer>,
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
        format!("pqcache/{}/{l}/{head}/centroids", self.code)
    }

    /// The codebooks of layer `l`, one per KV head.
    fn trained(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<CodebookBuf>> {
        let shape = self.code.shape(geometry.head_dim)?;
        (0..geometry.n_kv_heads).map(|head| profile.codebook(&self.key(l, head), shape)).collect()
    }

    /// The scorer of layer `l` before the first keys.
    fn scorer(&self, context: &BuildContext<'_>, l: usize) -> Result<Scorer> {
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
        Ok(Scorer::Pq { shape, iterations: self.iterations, trained_on, heads })
    }
}

impl Kind for TopK {
    fn check(&self, config: &Config) -> Result<()> {
        if let Some(quantizer) = &self.quantizer {
            quantizer.code.check("pqcache", "code", config)?;
        }
        self.offload.check()
    }

    fn device_setting(&self) -> Option<&'static str> {
        self.offload.device_setting()
    }

    fn needs_profile(&self) -> bool {
        self.quantizer.as_ref().is_some_and(|quantizer| quantizer.codebooks == Codebooks::Profile)
    }

    /// Trains key codebooks for every head of every layer, if the profile's are used.
    fn calibrate(
        &self,
        model: &Model,
        rope: &Rope,
        samples: &Calibration,
        profile: &mut Profile,
    ) -> Result<()> {
        let Some(quantizer) = self.quantizer.as_ref().filter(|_| self.needs_profile()) else { return Ok(()) };
        let geometry = Geometry::of(&model.config);
        let shape = quantizer.code.shape(geometry.head_dim)?;
        for (l, layer) in samples.layers.iter().enumerate() {
            let keys = |head| rotated_keys(rope.layer(l), &geometry.head_rows(head, &layer.keys));
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
        if self.quantizer.is_some() { Ok(self) } else { Err(Limit::without_kernels("pqcache")) }
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let scorer = match &self.quantizer {
                None => Scorer::Oracle,
                Some(quantizer) => quantizer.scorer(context, l)?,
            };
            let (geometry, budget, reserved) = (context.geometry, self.budget, context.reserved);
            let (exact, rope) = (self.offload.rows(context)?, context.rope(l));
            Ok(RetrievalStore { geometry, exact, rope, scorer, budget, reserved })
        })
    }
}

/// `pqcache`; the exact scores of `oracle` have no kernels.
#[cfg(feature = "cuda")]
impl DeviceKind for TopK {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        let mut limits = Limit::of_rings(window);
        limits.push(self.offload.limit_of_files());
        limits
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let Some(quantizer) = &self.quantizer else {
            return Err(Error::argument("a device selects by codes alone"));
        };
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

/// How to score tokens.
#[derive(Clone)]
enum Scorer {
    /// By the exact inner product: the upper bound for every top-k method.
    Oracle,
    /// By product-quantized keys.
    Pq {
        shape: PqShape,
        iterations: usize,
        trained_on: usize,  // keys of a head
        heads: Vec<PqHead>, // one per KV head; empty until codebooks are trained on the first keys
    },
}

/// One head's codebook and the codes of its keys.
#[derive(Clone)]
struct PqHead {
    codebook: Arc<CodebookBuf>,
    codes: CodesBuf,
}

/// Exact rows; each step attends to the highest-scored ones only.
#[derive(Clone)]
struct RetrievalStore {
    geometry: Geometry,
    exact: OffloadedRows, // rotated keys, values
    rope: Arc<Rope>,
    scorer: Scorer,
    budget: TokenBudget,
    reserved: usize, // tokens in sinks and window
}

impl RetrievalStore {
    /// Scores of all tokens for every query of the group: (group, tokens).
    fn scores(&self, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let head_dim = self.geometry.head_dim;
        let n = self.exact.len();
        let mut scores = vec![0.0; q.len() / head_dim * n];
        match &self.scorer {
            Scorer::Oracle => {
                let mut key = vec![0.0; head_dim];
                for t in 0..n {
                    self.exact.key(head, t, &mut key)?;
                    for (g, q) in q.chunks_exact(head_dim).enumerate() {
                        scores[g * n + t] = dot(q, &key);
                    }
                }
            }
            Scorer::Pq { shape, heads, .. } => {
                let head = &heads[head];
                let mut luts = vec![0.0; q.len() / head_dim * shape.lut_len()];
                lut_into(&head.codebook.view(), q, &mut luts)?;
                for (lut, scores) in luts.chunks_exact(shape.lut_len()).zip(scores.chunks_exact_mut(n)) {
                    scan_into(&Lut::new(*shape, lut)?, &head.codes.view(), scores)?;
                }
            }
        }
        Ok(scores)
    }

    /// The tokens, from `first` on, that the whole group fetches.
    fn select(&self, head: usize, first: usize, q: &[f32]) -> Result<Vec<u32>> {
        let n = self.exact.len() - first;
        let scores = self.scores(head, q)?;
        let visible = scores.chunks_exact(first + n).flat_map(|scores| &scores[first..]);
        let scores: Vec<f32> = visible.copied().collect();
        let mut total = vec![0.0; n];
        let mut stats = vec![SoftmaxStats::EMPTY; q.len() / self.geometry.head_dim];
        combine_group_into(&scores, GroupRule::SumOfSoftmax, &mut stats, &mut total)?;
        let k = self.budget.k(n, self.reserved);
        let mut indices = vec![0; k];
        top_k_into(&total, k, &mut indices)?;
        Ok(indices.into_iter().map(|i| first as u32 + i).collect())
    }
}

impl Scorer {
    /// Encodes keys (n, kv_dim), the last rows of `exact`. Codebooks are trained on the first keys, and again
    /// on all keys whenever their number has doubled, until there are [`ENOUGH`] per centroid.
    fn push(&mut self, geometry: Geometry, rotated: &[f32], exact: &OffloadedRows) -> Result<()> {
        let Self::Pq { shape, iterations, trained_on, heads } = self else { return Ok(()) };
        let (n, enough) = (exact.len(), ENOUGH * shape.ksub());
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
}

/// Keys (tokens, head_dim) of a head.
fn all_keys(exact: &OffloadedRows, head: usize, head_dim: usize) -> Result<Vec<f32>> {
    let mut keys = vec![0.0; exact.len() * head_dim];
    keys.chunks_exact_mut(head_dim).enumerate().try_for_each(|(t, key)| exact.key(head, t, key))?;
    Ok(keys)
}

impl Store for RetrievalStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (n, rotated) = (self.exact.len(), self.rope.rotated(k, self.geometry.kv_dim(), pos));
        self.exact.push(&rotated, v)?;
        self.scorer.push(self.geometry, &rotated, &self.exact).inspect_err(|_| self.exact.truncate(n))
    }

    fn len(&self) -> usize {
        self.exact.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if let Scorer::Pq { heads, trained_on, .. } = &mut self.scorer {
            heads.iter_mut().for_each(|head| head.codes.truncate(len));
            if len == 0 && *trained_on < usize::MAX {
                (*heads, *trained_on) = (vec![], 0);
            }
        }
        self.exact.truncate(len);
        Ok(())
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        if self.exact.len() <= first {
            return Ok(());
        }
        self.exact.attend(head, &self.select(head, first, q)?, q, out, stats)
    }

    fn fetched(&self) -> Fetched {
        self.exact.fetched()
    }

    fn footprint(&self) -> Footprint {
        let exact = self.exact.footprint();
        match &self.scorer {
            Scorer::Oracle => Footprint { kept: exact.offloaded, ..Footprint::default() },
            Scorer::Pq { shape, heads, .. } => Footprint {
                kept: heads.iter().map(|head| head.codes.view().size() + 4 * shape.codebook_len()).sum(),
                ..exact
            },
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
