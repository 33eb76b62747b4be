use crate::error::check_len;
use crate::{Error, Models};

/// What is subtracted from a number before it is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predictor {
    /// The channel's mean.
    Mean,
    /// CacheGen's: the first token of each group of this many is stored in 8 bits a number, the others as their
    /// difference to it (paper 5.2, groups of 10).
    Anchor {
        /// Tokens per group, at least 1.
        group: u16,
    },
}

/// How to code one plane, that is the keys or the values of one layer: rows of `channels` numbers, one row a token.
#[derive(Clone, Copy, Debug)]
pub struct Plane<'a> {
    pub(crate) predictor: Predictor,
    pub(crate) mean: &'a [f32], // (channels,), finite; not used by `Predictor::Anchor`
    pub(crate) step: &'a [f32], // (channels,), positive and finite
    pub(crate) models: Models<'a>,
}

impl<'a> Plane<'a> {
    /// Checks the parts, which may come from outside.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`], [`Error::NotFinite`], [`Error::BadStep`], or what [`Models::new`] finds.
    pub fn new(
        predictor: Predictor,
        mean: &'a [f32],
        step: &'a [f32],
        alphabet: usize,
        cdf: &'a [u16],
    ) -> Result<Self, Error> {
        let channels = step.len();
        if channels == 0 {
            return Err(Error::Zero { what: "channels" });
        }
        if predictor == (Predictor::Anchor { group: 0 }) {
            return Err(Error::Zero { what: "group" });
        }
        check_len("mean", mean.len(), channels)?;
        if mean.iter().any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "mean" });
        }
        if let Some(channel) = step.iter().position(|&x| !(x.is_finite() && x > 0.0)) {
            return Err(Error::BadStep { channel });
        }
        Ok(Self { predictor, mean, step, models: Models::new(channels, alphabet, cdf)? })
    }

    /// Numbers per token.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.step.len()
    }

    /// A checksum over everything that decides what a code means.
    pub(crate) fn id(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        let (tag, group) = self.predictor.tag();
        hasher.update(&[tag]);
        hasher.update(&group.to_le_bytes());
        for x in self.mean.iter().chain(self.step) {
            hasher.update(&x.to_le_bytes());
        }
        for channel in 0..self.channels() {
            for start in self.models.row(channel) {
                hasher.update(&start.to_le_bytes());
            }
        }
        hasher.finalize()
    }
}

impl Predictor {
    pub(crate) const fn tag(self) -> (u8, u16) {
        match self {
            Self::Mean => (0, 0),
            Self::Anchor { group } => (1, group),
        }
    }

    #[cfg(feature = "alloc")]
    pub(crate) const fn from_tag(tag: u8, group: u16) -> Result<Self, Error> {
        match (tag, group) {
            (0, 0) => Ok(Self::Mean),
            (1, 1..) => Ok(Self::Anchor { group }),
            _ => Err(Error::BadPredictor),
        }
    }
}
