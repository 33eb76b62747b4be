//! Hybrid attention: one softmax over coarse PQ codes of all tokens, with exact rows for the few tokens of
//! largest weight.
//!
//! Codes and their training are those of `pqklt`. The exact rows are offloaded; [`Fetched`] counts those that
//! a step reads. `retroinfer` approximates unfetched tokens by cluster centroids; this method uses product
//! codes, which also select the rows.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use kv_attend::owner::Pair;
#[cfg(feature = "cuda")]
use kv_device::plan::{HybridPlan, Plan};
use kv_llama::{Fetched, Footprint, HeadFit};
#[cfg(feature = "cuda")]
use kv_model::Model;
use kv_model::{Config, Rope};
#[cfg(feature = "cuda")]
use pq_core::Window;
use pq_core::{Hybrid, HybridScratch, RowBudget, TokenBudget, hybrid_attend_into, hybrid_select_into};
use svd_core::SoftmaxStats;

use super::kind::{BuildContext, Kind, Registration};
use super::offload::{Home, OffloadSettings, offload_help};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::pq_code::PqCode;
use super::pqklt::{CodedStep, PqKlt, TransformedStore};
use super::settings::Switch;
use crate::Profile;
use crate::Result;
use crate::cache::{Geometry, OffloadedRows, Store, Sums};
use crate::calibrate::Calibration;

pub(super) const HYBRID: Registration = Registration {
    names: &["hybrid"],
    help: concat!(
        "\
  hybrid            attention on coarse PQ codes, with the exact rows of  k=32x6 v=8x8 keys=mean|rope|rotated
                      the few tokens that hold most of the weight:        values=gaussian|trained
                      a fraction of the tokens, or as many as keep the    iterations=8 refine=0 rows=0.01|auto
                      error of about 95 % of the outputs below `bound`    bound=0.05
                      standard deviations of the values, up to `most`     most=1
                      of the tokens
                      norms of keys, for texts unlike the profile's       norms=on|off
                      the mean of what the codes of 256 values lose       mean-error=on|off
                      on a GPU: the memory that holds the exact rows      rows-on=host|device
",
        offload_help!()
    ),
    examples: &[
        "hybrid:k=8/8:v=8/8:rows=1:exact=f32:window=4",
        "hybrid:k=8/1:v=8/1:rows=0.1:keys=rotated:norms=off:exact=f32:window=4",
        "hybrid:k=8/1:v=8/1:rows=auto:exact=f32:window=4",
        "hybrid:k=8/2:v=8/2:rows=0.1:norms=off:mean-error=off:exact=f32:window=4",
        "hybrid:k=8/8:v=8/8:rows=1:offloaded=int8:exact=f32:window=4",
    ],
    parse: |s| {
        // Of values 8 subspaces, the fewest that a device has.
        let of_values = (s.head_dim / 8).clamp(1, 16);
        let codes = Pair::new(PqCode::take(s, "k", 6, 4)?, PqCode::take(s, "v", 8, of_values)?);
        let rows = s.own("rows", Rows::Share(0.01))?;
        if rows != Rows::Auto {
            s.need(&["bound", "most"], "rows=auto")?;
        }
        Ok(Arc::new(HybridKind {
            rows,
            bound: s.common_part("bound", 0.05)? as f32,
            most: s.common_part("most", 1.0)?,
            offload: OffloadSettings::take(s)?,
            home: s.common("rows-on", Home::Host)?,
            mean_error: s.common("mean-error", Switch::On)? == Switch::On,
            codes: PqKlt::take(s, codes)?,
        }))
    },
};

/// How many rows a decode step reads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rows {
    Share(f64),
    Auto,
}

impl FromStr for Rows {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self::Share(share)),
            _ => Err("must be `auto` or a fraction of the tokens from 0 to 1".into()),
        }
    }
}

impl Display for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Share(share) => share.fmt(f),
            Self::Auto => f.write_str("auto"),
        }
    }
}

#[derive(Debug)]
struct HybridKind {
    codes: PqKlt,
    rows: Rows,
    bound: f32,
    most: f64, // fraction of the tokens
    offload: OffloadSettings,
    home: Home,
    mean_error: bool, // of blocks of values
}

impl Kind for HybridKind {
    fn check(&self, config: &Config) -> Result<()> {
        self.codes.check_as("hybrid", config)?;
        self.offload.check()
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn device_setting(&self) -> Option<&'static str> {
        let home = (self.home == Home::Device).then_some("rows-on=device");
        home.or(self.offload.device_setting())
    }

    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        self.codes.calibrate(samples, profile)
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let coded = self.codes.store(context, l)?;
            Ok(HybridStore {
                geometry: context.geometry,
                rope: context.rope(l),
                coded: if self.mean_error { coded.with_mean_errors() } else { coded },
                exact: self.offload.rows(context)?,
                rows: self.rows,
                bound: self.bound,
                most: self.most,
            })
        })
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for HybridKind {
    fn limits(&self, window: Window) -> Vec<Limit> {
        let mut limits = Limit::of_rings(window);
        limits.extend(self.codes.limits_of_rows());
        limits.push(self.offload.limit_of_files());
        limits.extend(self.offload.limits_of_home(self.home));
        limits
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let (quantizers, form) = self.codes.device_form(config.head_dim)?;
        let (home, resident) = (self.offload.home(self.home), self.offload.held());
        let (share, bound) = match self.rows {
            Rows::Share(share) => (share, None),
            Rows::Auto => (self.most, Some(self.bound)),
        };
        let (budget, mean_errors) = (TokenBudget::Share(share), self.mean_error);
        let plan = HybridPlan { quantizers, form, mean_errors, budget, bound, home, resident };
        let heads = profile.map(|profile| self.codes.device_heads(config, profile)).transpose()?;
        Ok(Plan::Hybrid(plan, heads))
    }

    fn fold(&self, model: &Model, profile: &Profile) -> Result<Option<Model>> {
        self.codes.fold_values(model, profile).map(Some)
    }
}

/// The codes of all tokens, and their exact rows.
#[derive(Clone)]
struct HybridStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    coded: TransformedStore,
    exact: OffloadedRows, // rotated keys, values
    rows: Rows,
    bound: f32,
    most: f64,
}

impl HybridStore {
    /// Attends to the codes of all tokens from `first` on except the selected ones, which it returns.
    /// `others` (group,) are the statistics of sinks and window.
    fn attend_to_rest(
        &self,
        step: &CodedStep<'_>,
        first: usize,
        others: &[SoftmaxStats],
        sums: &mut Sums<'_>,
    ) -> Result<Vec<u32>> {
        let n = step.tokens.n();
        let part = |share: f64| TokenBudget::Share(share).k(n - first, 0);
        let rows = match self.rows {
            Rows::Share(share) => RowBudget::Count(part(share)),
            Rows::Auto => {
                RowBudget::Error { bound: self.bound, value_error: step.value_error, most: part(self.most) }
            }
        };
        let hybrid = Hybrid { rows, score_variances: &step.score_variances, others, ..Hybrid::default() };
        let shape = step.tokens.value_shape();
        let Sums { out, stats } = sums;
        let mut floats = vec![0.0; HybridScratch::len(shape, stats.len(), n)];
        let mut scratch_stats = vec![SoftmaxStats::EMPTY; stats.len()];
        let mut scratch = HybridScratch::new(shape, n, &mut floats, &mut scratch_stats)?;
        let mut selected = vec![0; hybrid.rows.most(n)];
        let found = hybrid_select_into(&step.luts, &step.tokens, &hybrid, &mut scratch, &mut selected)?;
        selected.truncate(found);
        hybrid_attend_into(&step.tokens, &selected, &mut scratch, out, stats)?;
        if let Some(errors) = step.mean_errors {
            errors.add_to(scratch.search().scores(), stats, out);
        }
        Ok(selected)
    }
}

impl Store for HybridStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let n = self.exact.len();
        self.exact.push(&self.rope.rotated(k, self.geometry.kv_dim(), pos), v)?;
        self.coded.push(pos, k, v).inspect_err(|_| self.exact.truncate(n))
    }

    fn len(&self) -> usize {
        self.coded.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.coded.truncate_of(len, |head, tokens| self.exact.values(head, tokens))?;
        self.exact.truncate(len);
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let others = sums.stats.to_vec();
        let mut selected = vec![];
        self.coded.attend_by(head, first, q, sums, |step, sums| {
            selected = self.attend_to_rest(step, first, &others, sums)?;
            Ok(())
        })?;
        self.exact.attend(head, &selected, q, sums)
    }

    fn footprint(&self) -> Footprint {
        let mut footprint = self.coded.footprint();
        footprint += self.exact.footprint();
        footprint
    }

    fn fetched(&self) -> Fetched {
        self.exact.fetched()
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        self.coded.fits(layer)
    }
}
