use crate::error::check_len;
use crate::{Coder, Error, Models, Transform};

/// What is known of a number before it is coded; what is left over becomes a bin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Predictor<'a> {
    /// Nothing beyond the plane's mean.
    Mean,
    /// The decoded token before, times this factor of each channel: (channels,), within -1..=1. The first token of a tile has
    /// none.
    Previous(&'a [f32]),
    /// CacheGen's: the first token of each group of this many is stored in 8 bits a number, the others as their
    /// difference to it (paper 5.2, groups of 10).
    Anchor {
        /// Tokens per group, at least 1.
        group: u16,
    },
}

/// What a bin is worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling<'a> {
    /// A step for each channel (channels,), positive. One step for all channels of a transform that whitens what errors cost
    /// is the least total error for the bits.
    Steps(&'a [f32]),
    /// LMCache's: bins `-levels..=levels` of each token's largest magnitude, which is stored as bf16. For comparison.
    TokenAbsmax {
        /// Bins on each side of zero, 1..=127.
        levels: u8,
    },
}

/// How to code one plane, that is the keys or the values of one layer: rows of `channels` numbers, one row a token.
///
/// Rows, less `mean`, become coefficients by `transform`, differences by `predictor`, bins by `scaling`, symbols under `models`
/// and bits by `coder`.
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
    /// Maps to coefficients; none codes the channels themselves.
    pub transform: Option<Transform<'a>>,
    /// (channels,), subtracted from rows; zeros for none.
    pub mean: &'a [f32],
    /// What is subtracted from coefficients.
    pub predictor: Predictor<'a>,
    /// What a bin is worth.
    pub scaling: Scaling<'a>,
    /// Where in bins +-1 and +-2 the numbers decode to, in steps from their middle away from zero: within -1/2..=1/2.
    pub centroids: [f32; 2],
    /// Probabilities of bins.
    pub models: Models<'a>,
    /// The entropy coder.
    pub coder: Coder,
}

impl<'a> Plane<'a> {
    /// Checks the parts, which may come from outside.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`], [`Error::NotFinite`], [`Error::BadStep`], or [`Error::BadPlane`] for what does not go
    /// together.
    pub fn new(parts: PlaneParts<'a>) -> Result<Self, Error> {
        let PlaneParts { transform, mean, predictor, scaling, centroids, models, coder } = parts;
        let channels = models.channels();
        if channels == 0 {
            return Err(Error::Zero { what: "channels" });
        }
        check_len("mean", mean.len(), channels)?;
        if mean.iter().any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "mean" });
        }
        if let Some(transform) = transform {
            check_len("transform", transform.channels(), channels)?;
        }
        let plain = transform.is_none() && predictor == Predictor::Mean;
        match scaling {
            Scaling::Steps(steps) => {
                check_len("steps", steps.len(), channels)?;
                let bad = |&step: &f32| !(step.is_normal() && step > 0.0 && (1.0 / step).is_normal());
                if let Some(channel) = steps.iter().position(bad) {
                    return Err(Error::BadStep { channel });
                }
            }
            Scaling::TokenAbsmax { levels: 0 | 128.. } => {
                return Err(Error::BadPlane { what: "levels outside 1..=127" });
            }
            Scaling::TokenAbsmax { .. } if !plain => {
                return Err(Error::BadPlane { what: "steps of tokens with a transform or a prediction" });
            }
            Scaling::TokenAbsmax { .. } => {}
        }
        match predictor {
            Predictor::Previous(factors) => {
                check_len("factors", factors.len(), channels)?;
                if factors.iter().any(|x| !(-1.0..=1.0).contains(x)) {
                    return Err(Error::BadPlane { what: "a factor of the token before outside -1..=1" });
                }
            }
            Predictor::Anchor { group: 0 } => return Err(Error::Zero { what: "group" }),
            Predictor::Anchor { .. } | Predictor::Mean => {}
        }
        if centroids.iter().any(|x| !(-0.5..=0.5).contains(x)) {
            return Err(Error::BadPlane { what: "a centroid outside its bin" });
        }
        let id = parts.checksum();
        Ok(Self { transform, mean, predictor, scaling, centroids, models, coder, id })
    }

    /// The parts that it was made from.
    #[must_use]
    pub const fn parts(&self) -> PlaneParts<'a> {
        let Self { transform, mean, predictor, scaling, centroids, models, coder, .. } = *self;
        PlaneParts { transform, mean, predictor, scaling, centroids, models, coder }
    }

    /// Numbers per token.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.mean.len()
    }

    /// Tokens of `tokens` that are coded in tiles: all but anchors.
    pub(crate) fn coded_tokens(&self, tokens: usize) -> usize {
        match self.predictor {
            Predictor::Anchor { group } => tokens - tokens.div_ceil(group.into()),
            _ => tokens,
        }
    }

    /// A checksum (CRC-32) over everything that decides what bytes mean: a frame names the planes it was coded under by it.
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
        let transform = self.transform.iter().flat_map(Transform::entries);
        let values = self.mean.iter().chain(factors).chain(steps).chain(&self.centroids).chain(transform);
        values.for_each(|x| hasher.update(&x.to_le_bytes()));
        self.models.hash(&mut hasher);
        hasher.finalize()
    }
}
