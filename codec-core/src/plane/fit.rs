//! Fitting of planes to sample rows.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use crate::block::centre;
use crate::error::check_len;
use crate::model::cost::{cost, deviation};
use crate::model::family;
use crate::model::slots::{Distribution, MAX_SYMBOLS};
use crate::model::{CONTEXTS, TABLE_LEN, family_model};
use crate::plane::owned::{ModelsBuf, PlaneBufParts, PredictorBuf, ScalingBuf};
use crate::quant::{self, bin};
use crate::{Backend, Coder, Error, PlaneBuf, TransformBuf, block};

/// The predictor for [`PlaneBuf::fit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PredictorKind {
    /// No prediction, not even the mean.
    None,
    /// The mean of each channel.
    Mean,
    /// The mean, and the previous token times a factor per channel.
    Previous,
    /// The mean, and an anchor for each group of tokens.
    Anchor {
        /// Tokens per group, at least 1.
        group: u16,
    },
}

/// The quantization steps for [`PlaneBuf::fit`].
///
/// Bins have 16 bits. If a value is more than 32,767 steps from its mean, or prediction, its whole tile (32
/// channels, all tokens of the block) is coded with steps scaled up by a power of two. Steps should therefore
/// suit the largest values of later contexts, not only the sample's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Steps<'a> {
    /// A multiple of the standard deviation, per channel, after the mean or the anchor is subtracted
    /// (CacheGen). A channel that does not vary in the sample gets the median deviation of the others.
    Deviations(f32),
    /// The given step for each channel, or coefficient of a transform: (channels,).
    Given(&'a [f32]),
    /// A step per token: the token's largest magnitude, divided by this number (LMCache): 1..=127.
    TokenAbsmax(u8),
}

/// The kind of probability models for [`PlaneBuf::fit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ModelKind {
    /// The best of 256 families for each channel, one byte per channel.
    Families,
    /// A table for each channel, 130 bytes per channel.
    Tables,
    /// Three tables for each channel; the previous bin selects one.
    ContextTables,
}

/// What [`PlaneBuf::fit`] fits, and what it is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitOptions<'a> {
    /// How a value is predicted; factors are fitted.
    pub predictor: PredictorKind,
    /// Where the quantization steps come from.
    pub steps: Steps<'a>,
    /// The kind of probability models.
    pub models: ModelKind,
    /// What turns symbols into bytes.
    pub coder: Coder,
}

impl Default for FitOptions<'_> {
    /// Needs no access to the model: the mean, steps of a quarter of each channel's standard deviation,
    /// families, interleaved rANS.
    fn default() -> Self {
        Self {
            predictor: PredictorKind::Mean,
            steps: Steps::Deviations(0.25),
            models: ModelKind::Families,
            coder: Coder::InterleavedRans,
        }
    }
}

impl PlaneBuf {
    /// Fits means, factors, steps and a probability model per channel to sample rows.
    ///
    /// # Shapes
    /// `rows` (tokens, channels), finite, at least two tokens.
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`], [`Error::NotFinite`], [`Error::BadStep`], [`Error::BadPlane`];
    /// [`Error::OutOfRange`] for values that leave the range of `f32` when the mean or the transform is
    /// applied.
    /// # Cost
    /// Tens of operations per element; families try two dozen candidates per channel.
    /// # Examples
    /// ```
    /// use codec_core::*;
    /// # let mut state = 1_u32;
    /// # let mut noise = || {
    /// #     state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    /// #     (state >> 8) as f32 / 8e6
    /// # };
    /// # let sample: Vec<f32> = (0..200 * 8).map(|i| noise() * (1 + i % 8) as f32).collect();
    /// let channels = 8; // of `sample`, (tokens, channels)
    /// let plane = PlaneBuf::fit(&sample, channels, None, &FitOptions::default())?;
    /// assert_eq!(PlaneBuf::from_bytes(&plane.to_bytes())?, plane);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn fit(
        rows: &[f32],
        channels: usize,
        transform: Option<Arc<TransformBuf>>,
        options: &FitOptions<'_>,
    ) -> Result<Self, Error> {
        if channels == 0 {
            return Err(Error::Zero { what: "channels" });
        }
        let tokens = rows.len() / channels;
        check_len("rows", rows.len(), tokens * channels)?;
        if tokens < 2 {
            return Err(Error::Zero { what: "the number of sample tokens after the first" });
        }
        if rows.iter().any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "rows" });
        }
        if options.predictor == (PredictorKind::Anchor { group: 0 }) {
            return Err(Error::Zero { what: "group" });
        }
        let mean = match options.predictor {
            PredictorKind::None => vec![0.0; channels],
            _ => (0..channels).map(|c| column_mean(rows, channels, c)).collect(),
        };
        let mut rows = rows.to_vec();
        for row in rows.chunks_exact_mut(channels) {
            row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
        }
        let channels = match &transform {
            None => channels,
            Some(transform) => {
                let transform = transform.view();
                check_len("transform", transform.channels(), channels)?;
                block::encode::coefficients(transform, Backend::detect(), &mut rows);
                transform.coefficients()
            }
        };
        if let Some(i) = rows.iter().position(|x| !x.is_finite()) {
            return Err(Error::OutOfRange { channel: i % channels });
        }
        let sample = Sample::new(&rows, channels, options)?;
        let residuals: Vec<Residuals> = (0..channels).map(|c| sample.residuals(c)).collect();
        let typical = typical_deviation(&residuals);
        let columns = residuals.into_iter().enumerate();
        let columns: Vec<Column> =
            columns.map(|(c, residuals)| sample.column(c, residuals, typical)).collect::<Result<_, _>>()?;
        let centroids = match options.steps {
            Steps::TokenAbsmax(_) => [0.0; 2], // as LMCache
            _ => centroids(&columns),
        };
        let models = models(&columns, options.models, centroids);
        let predictor = match options.predictor {
            PredictorKind::None | PredictorKind::Mean => PredictorBuf::Mean,
            PredictorKind::Anchor { group } => PredictorBuf::Anchor { group },
            PredictorKind::Previous => {
                PredictorBuf::Previous(columns.iter().map(|column| column.factor).collect())
            }
        };
        let scaling = match options.steps {
            Steps::TokenAbsmax(levels) => ScalingBuf::TokenAbsmax { levels },
            _ => ScalingBuf::Steps(columns.iter().map(|column| column.step).collect()),
        };
        let coder = options.coder;
        Self::new(PlaneBufParts { transform, mean, predictor, scaling, centroids, models, coder })
    }

    /// Fits a plane with each of `predictors` and returns the one that encodes the sample in the fewest
    /// bytes.
    ///
    /// Given steps have the same error with all predictors, so comparing bytes suffices. Anchors are
    /// included.
    ///
    /// # Errors
    /// As [`Self::fit`]; [`Error::Zero`] for no predictors.
    /// # Examples
    /// ```
    /// use codec_core::*;
    /// // Each token is close to the previous one.
    /// let sample: Vec<f32> = (0..200 * 8).map(|i| (i as f32 * 1e-3).sin() + (i % 8) as f32).collect();
    /// let predictors = [PredictorKind::Mean, PredictorKind::Previous];
    /// let plane = PlaneBuf::fit_best(&sample, 8, None, &FitOptions::default(), &predictors)?;
    /// assert!(matches!(plane.view().parts().predictor, Predictor::Previous(_)));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn fit_best(
        rows: &[f32],
        channels: usize,
        transform: Option<Arc<TransformBuf>>,
        options: &FitOptions<'_>,
        predictors: &[PredictorKind],
    ) -> Result<Self, Error> {
        let mut best: Option<(usize, Self)> = None;
        for &predictor in predictors {
            let plane = Self::fit(rows, channels, transform.clone(), &FitOptions { predictor, ..*options })?;
            let bytes = plane.coded_len(rows)?;
            if best.as_ref().is_none_or(|(least, _)| bytes < *least) {
                best = Some((bytes, plane));
            }
        }
        best.map(|(_, plane)| plane).ok_or(Error::Zero { what: "predictors" })
    }

    /// The coded length of rows in bytes.
    fn coded_len(&self, rows: &[f32]) -> Result<usize, Error> {
        let plane = self.view();
        let (mut bytes, mut lengths) = (vec![], vec![]);
        for rows in rows.chunks(256 * plane.channels()) {
            block::encode::encode(&plane, Backend::detect(), rows.to_vec(), &mut bytes, &mut lengths)?;
        }
        Ok(bytes.len())
    }
}

fn column_mean(rows: &[f32], channels: usize, c: usize) -> f32 {
    let sum: f64 = rows.iter().skip(c).step_by(channels).copied().map(f64::from).sum();
    (sum * channels as f64 / rows.len() as f64) as f32
}

/// Coefficients of sample rows, which steps, factors and models are fitted to.
struct Sample<'a> {
    rows: &'a [f32],
    channels: usize,
    options: &'a FitOptions<'a>,
    token_steps: Vec<f32>,
}

/// The coefficients of a channel minus the anchor.
struct Residuals {
    values: Vec<f32>,
    squares: f64,
}

impl Residuals {
    fn deviation(&self) -> f64 {
        libm::sqrt(self.squares / self.values.len().max(1) as f64)
    }
}

/// The median deviation of the channels that vary; 0 if none does.
fn typical_deviation(all: &[Residuals]) -> f64 {
    let mut deviations: Vec<f64> = all.iter().map(Residuals::deviation).filter(|&x| x > 0.0).collect();
    deviations.sort_unstable_by(f64::total_cmp);
    deviations.get(deviations.len() / 2).copied().unwrap_or(0.0)
}

/// Below this fraction of the typical deviation, a channel is constant up to rounding.
const CONSTANT: f64 = 1e-6;

/// One channel of a sample, as the coder sees it.
struct Column {
    step: f32,
    factor: f32,
    scaled: Vec<f32>, // coefficients minus the anchor, in steps
}

impl<'a> Sample<'a> {
    fn new(rows: &'a [f32], channels: usize, options: &'a FitOptions<'a>) -> Result<Self, Error> {
        match options.steps {
            Steps::Given(steps) => check_len("steps", steps.len(), channels)?,
            Steps::Deviations(size) if !(size.is_finite() && size > 0.0) => {
                return Err(Error::BadStep { channel: 0 });
            }
            Steps::TokenAbsmax(0 | 128..) => {
                return Err(Error::BadPlane {
                    what: "the levels of a scaling by token must be within 1..=127",
                });
            }
            _ => {}
        }
        let largest = |row: &[f32]| row.iter().fold(f32::MIN_POSITIVE, |max, x| max.max(x.abs()));
        let token_steps = match options.steps {
            Steps::TokenAbsmax(levels) => {
                rows.chunks_exact(channels).map(|row| largest(row) / f32::from(levels)).collect()
            }
            _ => vec![],
        };
        Ok(Self { rows, channels, options, token_steps })
    }

    fn residuals(&self, c: usize) -> Residuals {
        let all: Vec<f32> = self.rows.iter().skip(c).step_by(self.channels).copied().collect();
        let values: Vec<f32> = match self.options.predictor {
            // Anchors are not quantized here: the effect of their 8 bits on a model is small.
            PredictorKind::Anchor { group } => all
                .chunks(group.into())
                .flat_map(|tokens| tokens[1..].iter().map(|x| x - tokens[0]))
                .collect(),
            _ => all,
        };
        let squares = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        Residuals { values, squares }
    }

    fn column(&self, c: usize, residuals: Residuals, typical: f64) -> Result<Column, Error> {
        let deviation = match residuals.deviation() {
            // If the channel varied later, a proportional step would be so small that its whole tile would
            // take 16 bits per element.
            deviation if deviation < CONSTANT * typical => typical,
            deviation => deviation,
        };
        let Residuals { values: residuals, squares } = residuals;
        let step = match self.options.steps {
            Steps::Given(steps) => steps[c],
            Steps::Deviations(size) => (size * deviation as f32).clamp(1e-12, 1e30),
            Steps::TokenAbsmax(_) => 1.0,
        };
        if !(step.is_finite() && step > 0.0) {
            return Err(Error::BadStep { channel: c });
        }
        let factor = match self.options.predictor {
            PredictorKind::Previous => {
                let products: f64 =
                    residuals.windows(2).map(|pair| f64::from(pair[0]) * f64::from(pair[1])).sum();
                // The optimal factor for a previous token with quantization noise.
                let noise = f64::from(step) * f64::from(step) / 12.0 * residuals.len() as f64;
                (products / (squares + noise).max(f64::MIN_POSITIVE)).clamp(-1.0, 1.0) as f32
            }
            _ => 0.0,
        };
        let scaled = match self.options.steps {
            Steps::TokenAbsmax(_) => residuals.iter().zip(&self.token_steps).map(|(x, s)| x / s).collect(),
            _ => residuals.iter().map(|x| x * (1.0 / step)).collect(),
        };
        Ok(Column { step, factor, scaled })
    }
}

impl Column {
    /// Bins and their quantization errors, predicted from the decoder's reconstruction.
    fn bins(&self, centroids: [f32; 2]) -> impl Iterator<Item = (i32, f32)> {
        let mut last = 0.0;
        self.scaled.iter().map(move |x| {
            let prediction = last * self.factor;
            let bin = bin(x - prediction);
            last = prediction + centre(bin, centroids);
            (bin, x - prediction - bin as f32)
        })
    }
}

/// The average offset of the values of bins +-1 and +-2 from the middle of the bin, away from zero, as a
/// multiple of 1/512: this makes the points of all bins up to 2048 exact in `f16`, the type in which decoders
/// multiply them by the maps of a transform.
fn centroids(columns: &[Column]) -> [f32; 2] {
    let mut sums = [(0.0_f64, 0_u32); 2];
    for (bin, missed) in columns.iter().flat_map(|column| column.bins([0.0; 2])) {
        if let magnitude @ 1..=2 = bin.unsigned_abs() {
            let (sum, n) = &mut sums[magnitude as usize - 1];
            *sum += f64::from(missed) * f64::from(bin.signum());
            *n += 1;
        }
    }
    sums.map(|(sum, n)| {
        let mean = (sum / f64::from(n.max(1))).clamp(-0.5, 0.5);
        (libm::rint(512.0 * mean) / 512.0) as f32
    })
}

fn models(columns: &[Column], kind: ModelKind, centroids: [f32; 2]) -> ModelsBuf {
    let bins = columns.iter().map(|column| column.bins(centroids).map(|(bin, _)| bin).collect::<Vec<_>>());
    match kind {
        ModelKind::Families => ModelsBuf::Families(bins.map(|bins| best_family(&bins)).collect()),
        ModelKind::Tables => ModelsBuf::Tables(bins.flat_map(|bins| tables::<1>(&bins)).collect()),
        ModelKind::ContextTables => {
            ModelsBuf::ContextTables(bins.flat_map(|bins| tables::<CONTEXTS>(&bins)).collect())
        }
    }
}

fn deviation_of(bins: &[i32]) -> f64 {
    let squares = bins.iter().map(|&bin| f64::from(bin) * f64::from(bin)).sum();
    deviation(squares, bins.len() as f64)
}

/// The family that codes the bins in the fewest bits, among those near their standard deviation.
fn best_family(bins: &[i32]) -> u8 {
    let deviation = deviation_of(bins);
    let candidates = (0..family::SHAPE_COUNT).flat_map(|shape| {
        [0.8, 0.87, 0.93, 1.0, 1.07, 1.15].map(|factor| family::nearest(shape, deviation * factor))
    });
    candidates.min_by_key(|&family| cost(family_model(family), bins.iter().copied())).unwrap_or(0)
}

/// Tables from counts, one per context.
fn tables<const C: usize>(bins: &[i32]) -> Vec<u16> {
    let low_bits = family::shift(family::nearest(0, deviation_of(bins)));
    let most = MAX_SYMBOLS as u32 - 1;
    let symbols: Vec<usize> =
        bins.iter().map(|&bin| quant::symbol(bin, low_bits).min(most) as usize).collect();
    let largest = symbols.iter().copied().max().unwrap_or(0).min(MAX_SYMBOLS - 2);
    let mut counts = [[0_u64; MAX_SYMBOLS]; C];
    let mut context = 0;
    for &symbol in &symbols {
        counts[context][symbol.min(largest + 1)] += 1;
        context = if C == 1 || symbol == 0 || symbol > largest { 0 } else { 2 - symbol % 2 };
    }
    let mut tables = Vec::with_capacity(C * TABLE_LEN);
    for counts in &counts {
        tables.push(low_bits as u16);
        tables.extend(Distribution::from_counts(&smoothed(counts, largest), largest + 2).0);
    }
    tables
}

/// Adds a sixteenth of the counts of adjacent bins, and one, so that bins missing from the sample get a
/// plausible probability.
fn smoothed(counts: &[u64; MAX_SYMBOLS], largest: usize) -> [u64; MAX_SYMBOLS] {
    let mut smooth = *counts;
    for symbol in 0..=largest {
        // The bins of symbols 2 apart are adjacent, as are those of symbols 0 and 1.
        let inner = if symbol < 2 { 1 - symbol } else { symbol - 2 };
        let outer = if symbol + 2 <= largest { counts[symbol + 2] } else { 0 };
        smooth[symbol] = 16 * counts[symbol] + counts[inner] + outer + 1;
    }
    smooth[largest + 1] = 16 * counts[largest + 1] + 1;
    smooth
}
