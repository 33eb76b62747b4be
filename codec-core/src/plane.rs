//! What encodes and decodes one plane: transform, mean, predictor, steps, models and coder, checked together.

#[cfg(feature = "alloc")]
mod bytes;
#[cfg(feature = "alloc")]
pub(crate) mod fit;
#[cfg(feature = "alloc")]
pub(crate) mod owned;

use crate::error::check_len;
use crate::{Coder, Error, Models, Transform};

/// The prediction of a value. The residual is quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Predictor<'a> {
    /// The mean of the channel.
    Mean,
    /// The previous token as decoded, times a factor per coefficient: (coefficients,), within -1..=1. The
    /// first token of a block has no prediction.
    Previous(&'a [f32]),
    /// CacheGen's predictor: the first token of each group is stored with 8 bits per element, the others as
    /// their difference from it (5.2 of the paper, groups of 10).
    Anchor {
        /// Tokens per group, at least 1.
        group: u16,
    },
}

/// The quantization steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling<'a> {
    /// A positive step for each coefficient: (coefficients,). After a transform that whitens the cost of
    /// errors, equal steps give the smallest total error at a given rate.
    Steps(&'a [f32]),
    /// LMCache's scaling, for comparison: the step of a token is its largest magnitude, stored as bf16,
    /// divided by `levels`.
    TokenAbsmax {
        /// Bins on each side of zero, 1..=127.
        levels: u8,
    },
}

/// The parameters that encode and decode one plane, the keys or the values of one layer: a row of `channels`
/// elements per token.
///
/// Rows minus `mean` are transformed to coefficients, which are as many or, with [`Transform::leading`],
/// fewer; their residuals under `predictor` are quantized to bins with the steps of `scaling`; `coder` codes
/// bins as symbols under `models`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plane<'a> {
    pub(crate) transform: Option<Transform<'a>>,
    pub(crate) mean: &'a [f32],
    pub(crate) predictor: Predictor<'a>,
    pub(crate) scaling: Scaling<'a>,
    pub(crate) centroids: [f32; 2],
    pub(crate) models: Models<'a>,
    pub(crate) coder: Coder,
    id: u32,
}

/// The parts of a [`Plane`], not yet checked.
#[derive(Clone, Copy, Debug)]
pub struct PlaneParts<'a> {
    /// The transform; without one, channels are coded directly.
    pub transform: Option<Transform<'a>>,
    /// (channels,), subtracted from rows.
    pub mean: &'a [f32],
    /// The prediction of coefficients.
    pub predictor: Predictor<'a>,
    /// The quantization steps.
    pub scaling: Scaling<'a>,
    /// Offsets of the decoded values of bins +-1 and +-2 from the middle of the bin, away from zero, in
    /// steps: within -1/2..=1/2.
    pub centroids: [f32; 2],
    /// Probabilities of bins of each coefficient.
    pub models: Models<'a>,
    /// The entropy coder.
    pub coder: Coder,
}

impl<'a> Plane<'a> {
    /// Checks the parts, which may be untrusted.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`], [`Error::NotFinite`], [`Error::BadStep`], [`Error::BadPlane`].
    pub fn new(parts: PlaneParts<'a>) -> Result<Self, Error> {
        let PlaneParts { transform, mean, predictor, scaling, centroids, models, coder } = parts;
        let coefficients = models.channels();
        if coefficients == 0 {
            return Err(Error::Zero { what: "channels" });
        }
        let channels = match transform {
            None => coefficients,
            Some(transform) => {
                check_len("transform", transform.coefficients(), coefficients)?;
                transform.channels()
            }
        };
        check_len("mean", mean.len(), channels)?;
        if mean.iter().any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "mean" });
        }
        let plain = transform.is_none() && predictor == Predictor::Mean;
        match scaling {
            Scaling::Steps(steps) => {
                check_len("steps", steps.len(), coefficients)?;
                let bad = |&step: &f32| !(step.is_normal() && step > 0.0 && (1.0 / step).is_normal());
                if let Some(channel) = steps.iter().position(bad) {
                    return Err(Error::BadStep { channel });
                }
            }
            Scaling::TokenAbsmax { levels: 0 | 128.. } => {
                return Err(Error::BadPlane {
                    what: "the levels of a scaling by token must be within 1..=127",
                });
            }
            Scaling::TokenAbsmax { .. } if !plain => {
                return Err(Error::BadPlane {
                    what: "a scaling by token takes neither a transform nor a predictor other than the mean",
                });
            }
            Scaling::TokenAbsmax { .. } => {}
        }
        match predictor {
            Predictor::Previous(factors) => {
                check_len("factors", factors.len(), coefficients)?;
                if factors.iter().any(|x| !(-1.0..=1.0).contains(x)) {
                    return Err(Error::BadPlane {
                        what: "the factors of the previous token must be within -1..=1",
                    });
                }
            }
            Predictor::Anchor { group: 0 } => return Err(Error::Zero { what: "group" }),
            Predictor::Anchor { .. } | Predictor::Mean => {}
        }
        if centroids.iter().any(|x| !(-0.5..=0.5).contains(x)) {
            return Err(Error::BadPlane { what: "the centroids must be within -1/2..=1/2" });
        }
        let id = parts.checksum();
        Ok(Self { transform, mean, predictor, scaling, centroids, models, coder, id })
    }

    /// The parts of the plane.
    #[must_use]
    pub const fn parts(&self) -> PlaneParts<'a> {
        let Self { transform, mean, predictor, scaling, centroids, models, coder, .. } = *self;
        PlaneParts { transform, mean, predictor, scaling, centroids, models, coder }
    }

    /// Elements per token.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.mean.len()
    }

    /// Coefficients per token: elements of the tiles.
    #[must_use]
    pub const fn coefficients(&self) -> usize {
        self.models.channels
    }

    /// The number of tokens that tiles encode, out of `tokens`: all but anchors.
    pub(crate) fn coded_tokens(&self, tokens: usize) -> usize {
        match self.predictor {
            Predictor::Anchor { group } => tokens - tokens.div_ceil(group.into()),
            _ => tokens,
        }
    }

    /// A checksum (CRC-32) of everything that determines the meaning of a stream. Frames name their planes by
    /// it.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }
}

impl PlaneParts<'_> {
    fn checksum(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        let (predictor, group, factors) = match self.predictor {
            Predictor::Mean => (0, 0, [].as_slice()),
            Predictor::Previous(factors) => (1, 0, factors),
            Predictor::Anchor { group } => (2, group, [].as_slice()),
        };
        let (scaling, steps) = match self.scaling {
            Scaling::Steps(steps) => (0, steps),
            Scaling::TokenAbsmax { levels } => (levels, [].as_slice()),
        };
        let [group_low, group_high] = group.to_le_bytes();
        let head_dim = self.transform.map_or(0, |transform| transform.head_dim as u32);
        hasher.update(&[predictor, group_low, group_high, scaling, u8::from(self.coder == Coder::Range)]);
        hasher.update(&head_dim.to_le_bytes());
        if let Some(Transform { head_dim, rank, .. }) = self.transform
            && rank < head_dim
        {
            hasher.update(&(rank as u32).to_le_bytes());
        }
        let transform = self.transform.iter().flat_map(Transform::entries);
        let values = self.mean.iter().chain(factors).chain(steps).chain(&self.centroids).chain(transform);
        values.for_each(|x| hasher.update(&x.to_le_bytes()));
        self.models.hash(&mut hasher);
        hasher.finalize()
    }
}
