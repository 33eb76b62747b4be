//! Owned planes and their serialized form.

pub(crate) mod fit;

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::error::check_len;
use crate::model::{CONTEXTS, TABLE_LEN};
use crate::{Coder, Error, Models, Plane, PlaneParts, Predictor, Scaling, Transform};

const MAGIC: [u8; 4] = *b"KVCP";
const VERSION: u8 = 2;

/// An owned [`Transform`].
#[derive(Clone, Debug, PartialEq)]
pub struct TransformBuf {
    head_dim: usize,
    forward: Vec<f32>,
    inverse: Vec<f32>,
}

impl TransformBuf {
    /// Checks and takes the maps of a [`Transform`].
    ///
    /// # Errors
    /// As [`Transform::new`].
    pub fn new(head_dim: usize, forward: Vec<f32>, inverse: Vec<f32>) -> Result<Self, Error> {
        Transform::new(head_dim, &forward, &inverse)?;
        Ok(Self { head_dim, forward, inverse })
    }

    /// The borrowed form.
    ///
    /// # Errors
    /// None in practice: the checks of [`Self::new`] run again.
    pub fn view(&self) -> Result<Transform<'_>, Error> {
        Transform::new(self.head_dim, &self.forward, &self.inverse)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PredictorBuf {
    Mean,
    Previous(Vec<f32>),
    Anchor { group: u16 },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ScalingBuf {
    Steps(Vec<f32>),
    TokenAbsmax { levels: u8 },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ModelsBuf {
    Families(Vec<u8>),
    Tables(Vec<u16>),
    ContextTables(Vec<u16>),
}

/// An owned [`Plane`]. It is fitted once to the keys or values of a layer and serves all sequences of the
/// model. Planes of several levels share one transform.
#[derive(Clone, Debug, PartialEq)]
pub struct PlaneBuf {
    pub(crate) transform: Option<Arc<TransformBuf>>,
    pub(crate) mean: Vec<f32>,
    pub(crate) predictor: PredictorBuf,
    pub(crate) scaling: ScalingBuf,
    pub(crate) centroids: [f32; 2],
    pub(crate) models: ModelsBuf,
    pub(crate) coder: Coder,
}

impl PlaneBuf {
    /// The borrowed form that encoding and decoding take.
    ///
    /// # Errors
    /// None in practice for a plane that was fitted or parsed: the checks of [`Plane::new`] run again.
    /// # Cost
    /// The checks and the checksum read the whole plane, so call it once, not for every block.
    pub fn view(&self) -> Result<Plane<'_>, Error> {
        let channels = self.mean.len();
        Plane::new(PlaneParts {
            transform: self.transform.as_ref().map(|transform| transform.view()).transpose()?,
            mean: &self.mean,
            predictor: match &self.predictor {
                PredictorBuf::Mean => Predictor::Mean,
                PredictorBuf::Previous(factors) => Predictor::Previous(factors),
                PredictorBuf::Anchor { group } => Predictor::Anchor { group: *group },
            },
            scaling: match &self.scaling {
                ScalingBuf::Steps(steps) => Scaling::Steps(steps),
                ScalingBuf::TokenAbsmax { levels } => Scaling::TokenAbsmax { levels: *levels },
            },
            centroids: self.centroids,
            models: match &self.models {
                ModelsBuf::Families(families) => Models::families(families),
                ModelsBuf::Tables(tables) => Models::tables(channels, tables)?,
                ModelsBuf::ContextTables(tables) => Models::context_tables(channels, tables)?,
            },
            coder: self.coder,
        })
    }

    /// Elements per token.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.mean.len()
    }

    /// Serializes the plane. FORMAT.md, "Plane", specifies the bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let (predictor, group) = match self.predictor {
            PredictorBuf::Mean => (0, 0),
            PredictorBuf::Previous(_) => (1, 0),
            PredictorBuf::Anchor { group } => (2, group),
        };
        let levels = match self.scaling {
            ScalingBuf::Steps(_) => 0,
            ScalingBuf::TokenAbsmax { levels } => levels,
        };
        let models = match self.models {
            ModelsBuf::Families(_) => 0,
            ModelsBuf::Tables(_) => 1,
            ModelsBuf::ContextTables(_) => CONTEXTS as u8,
        };
        out.extend_from_slice(&[VERSION, predictor, levels, models, u8::from(self.coder == Coder::Range), 0]);
        out.extend_from_slice(&group.to_le_bytes());
        let head_dim = self.transform.as_ref().map_or(0, |transform| transform.head_dim);
        for size in [self.mean.len(), head_dim] {
            out.extend_from_slice(&(size as u32).to_le_bytes());
        }
        let mut floats = |values: &[f32]| values.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        floats(&self.mean);
        if let PredictorBuf::Previous(factors) = &self.predictor {
            floats(factors);
        }
        if let ScalingBuf::Steps(steps) = &self.scaling {
            floats(steps);
        }
        floats(&self.centroids);
        if let Some(transform) = &self.transform {
            floats(&transform.forward);
            floats(&transform.inverse);
        }
        match &self.models {
            ModelsBuf::Families(families) => out.extend_from_slice(families),
            ModelsBuf::Tables(tables) | ModelsBuf::ContextTables(tables) => {
                tables.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
            }
        }
        let checksum = crc32fast::hash(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Parses and checks the output of [`Self::to_bytes`].
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::BadMagic`], [`Error::BadVersion`], [`Error::BadChecksum`],
    /// [`Error::BadField`], [`Error::Length`] for bytes after the models, [`Error::TooLarge`], the errors of
    /// [`Transform::new`] and [`Plane::new`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or(Error::Truncated)?;
        let (header, rest) = body.split_first_chunk::<20>().ok_or(Error::Truncated)?;
        if header[..4] != MAGIC {
            return Err(Error::BadMagic);
        }
        if header[4] != VERSION {
            return Err(Error::BadVersion { version: header[4] });
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
            return Err(Error::BadChecksum);
        }
        let [predictor, levels, models, coder, reserved] =
            [header[5], header[6], header[7], header[8], header[9]];
        let group = u16::from_le_bytes([header[10], header[11]]);
        let size = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize
        };
        let (channels, head_dim) = (size(12), size(16));
        let mut reader = Reader { bytes: rest };
        let mean = reader.floats(channels)?;
        let predictor = match (predictor, group) {
            (0, 0) => PredictorBuf::Mean,
            (1, 0) => PredictorBuf::Previous(reader.floats(channels)?),
            (2, _) => PredictorBuf::Anchor { group },
            _ => return Err(Error::BadField { what: "predictor" }),
        };
        let scaling = match levels {
            0 => ScalingBuf::Steps(reader.floats(channels)?),
            levels => ScalingBuf::TokenAbsmax { levels },
        };
        let centroids = reader.floats(2)?;
        let transform = match head_dim {
            0 => None,
            _ => {
                let entries = channels.checked_mul(head_dim).ok_or(Error::TooLarge)?;
                let (forward, inverse) = (reader.floats(entries)?, reader.floats(entries)?);
                Some(Arc::new(TransformBuf::new(head_dim, forward, inverse)?))
            }
        };
        let table_len = |contexts: usize| channels.checked_mul(contexts * TABLE_LEN).ok_or(Error::TooLarge);
        let models = match usize::from(models) {
            0 => ModelsBuf::Families(reader.take(channels)?.to_vec()),
            1 => ModelsBuf::Tables(reader.words(table_len(1)?)?),
            CONTEXTS => ModelsBuf::ContextTables(reader.words(table_len(CONTEXTS)?)?),
            _ => return Err(Error::BadField { what: "kind of models" }),
        };
        let coder = match (coder, reserved) {
            (0, 0) => Coder::InterleavedRans,
            (1, 0) => Coder::Range,
            _ => return Err(Error::BadField { what: "entropy coder" }),
        };
        check_len("profile", reader.bytes.len(), 0)?;
        let centroids = [centroids[0], centroids[1]];
        let plane = Self { transform, mean, predictor, scaling, centroids, models, coder };
        plane.view()?;
        Ok(plane)
    }
}

/// Reads from the front, and allocates only for bytes that exist.
struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let (part, rest) = self.bytes.split_at_checked(n).ok_or(Error::Truncated)?;
        self.bytes = rest;
        Ok(part)
    }

    fn floats(&mut self, n: usize) -> Result<Vec<f32>, Error> {
        let bytes = self.take(n.checked_mul(4).ok_or(Error::TooLarge)?)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)).collect())
    }

    fn words(&mut self, n: usize) -> Result<Vec<u16>, Error> {
        let bytes = self.take(n.checked_mul(2).ok_or(Error::TooLarge)?)?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|&x| u16::from_le_bytes(x)).collect())
    }
}
