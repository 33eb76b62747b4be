//! The serialized form of planes. FORMAT.md, "Plane", specifies the bytes.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::owned::{ModelsBuf, PlaneBufParts, PredictorBuf, ScalingBuf};
use crate::model::{CONTEXTS, TABLE_LEN};
use crate::reader::{Reader, seal};
use crate::{Coder, Error, PlaneBuf, TransformBuf};

const MAGIC: [u8; 4] = *b"KVCP";
const VERSION: u8 = 2;

/// The version of planes whose transforms have the leading coefficients alone, which readers of version 2 do
/// not know.
const LEADING_VERSION: u8 = 3;

impl PlaneBuf {
    /// Serializes the plane. FORMAT.md, "Plane", specifies the bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.parts().to_bytes(true)
    }

    /// Parses and checks the output of [`Self::to_bytes`]. It allocates at most `bytes.len()` bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::TrailingBytes`], [`Error::BadMagic`], [`Error::BadVersion`],
    /// [`Error::BadChecksum`], [`Error::BadField`], [`Error::TooLarge`], the errors of
    /// [`Transform::new`](crate::Transform::new) and [`Plane::new`](crate::Plane::new).
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        Self::new(PlaneBufParts::from_bytes(bytes)?)
    }
}

impl PlaneBufParts {
    /// The serialized plane, or that of the plane without its transform.
    pub fn to_bytes(&self, with_transform: bool) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let (channels, coefficients) = (self.mean.len(), self.coefficients());
        let version = if coefficients < channels { LEADING_VERSION } else { VERSION };
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
        out.extend_from_slice(&[version, predictor, levels, models, u8::from(self.coder == Coder::Range), 0]);
        out.extend_from_slice(&group.to_le_bytes());
        let transform = self.transform.as_ref().filter(|_| with_transform).map(|transform| transform.view());
        let head_dim = transform.map_or(0, |transform| transform.head_dim());
        let sizes = [channels, head_dim, coefficients];
        for size in &sizes[..if version == LEADING_VERSION { 3 } else { 2 }] {
            out.extend_from_slice(&(*size as u32).to_le_bytes());
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
        if let Some(transform) = transform {
            floats(transform.forward());
            floats(transform.inverse());
        }
        match &self.models {
            ModelsBuf::Families(families) => out.extend_from_slice(families),
            ModelsBuf::Tables(tables) | ModelsBuf::ContextTables(tables) => {
                tables.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
            }
        }
        seal(out)
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let (version, mut reader) = Reader::open_any(bytes, MAGIC, &[VERSION, LEADING_VERSION])?;
        let [predictor, levels, models, coder, reserved] = reader.array()?;
        let group = u16::from_le_bytes(reader.array()?);
        let (channels, head_dim) = (reader.size()?, reader.size()?);
        let coefficients = if version == LEADING_VERSION { reader.size()? } else { channels };
        if version == LEADING_VERSION && coefficients >= channels {
            return Err(Error::BadField { what: "coefficients" });
        }
        let mean = reader.floats(channels)?;
        let predictor = match (predictor, group) {
            (0, 0) => PredictorBuf::Mean,
            (1, 0) => PredictorBuf::Previous(reader.floats(coefficients)?),
            (2, _) => PredictorBuf::Anchor { group },
            _ => return Err(Error::BadField { what: "predictor" }),
        };
        let scaling = match levels {
            0 => ScalingBuf::Steps(reader.floats(coefficients)?),
            levels => ScalingBuf::TokenAbsmax { levels },
        };
        let mut float = || Ok(f32::from_le_bytes(reader.array()?));
        let centroids = [float()?, float()?];
        let transform = match head_dim {
            0 => None,
            _ => {
                // Heads must be whole, and of equal ranks.
                let heads = channels / head_dim;
                let rank = coefficients.checked_div(heads).unwrap_or(0);
                if heads * head_dim != channels || heads * rank != coefficients {
                    return Err(Error::BadField { what: "coefficients" });
                }
                let entries = coefficients.checked_mul(head_dim).ok_or(Error::TooLarge)?;
                let (forward, inverse) = (reader.floats(entries)?, reader.floats(entries)?);
                Some(Arc::new(TransformBuf::leading(head_dim, rank, forward, inverse)?))
            }
        };
        let table_len =
            |contexts: usize| coefficients.checked_mul(contexts * TABLE_LEN).ok_or(Error::TooLarge);
        let models = match usize::from(models) {
            0 => ModelsBuf::Families(reader.take(coefficients)?.to_vec()),
            1 => ModelsBuf::Tables(reader.words(table_len(1)?)?),
            CONTEXTS => ModelsBuf::ContextTables(reader.words(table_len(CONTEXTS)?)?),
            _ => return Err(Error::BadField { what: "kind of models" }),
        };
        let coder = match (coder, reserved) {
            (0, 0) => Coder::InterleavedRans,
            (1, 0) => Coder::Range,
            _ => return Err(Error::BadField { what: "entropy coder" }),
        };
        reader.finish()?;
        Ok(Self { transform, mean, predictor, scaling, centroids, models, coder })
    }
}
