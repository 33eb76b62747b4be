//! The serialized form of profiles. FORMAT.md, "Profile", specifies the bytes.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use super::{Level, MAX_LEVELS, ModelInfo, Profile};
use crate::plane::owned::PlaneBufParts;
use crate::reader::{Reader, seal};
use crate::{Error, LosslessPlaneBuf, PlaneBuf};

const MAGIC: [u8; 4] = *b"KVCM";
const VERSION: u8 = 1;

/// A plane as it is.
const WHOLE: u8 = 0;
/// A plane without its transform, which is that of the first lossy level.
const SHARED: u8 = 1;
/// A plane without loss.
const LOSSLESS: u8 = 2;

impl Profile {
    /// Serializes the profile. FORMAT.md, "Profile", specifies the bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let ModelInfo { model_id, layers, heads, head_dim, keys_rotated } = self.info;
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&[VERSION, keys_rotated.into()]);
        out.extend_from_slice(&(self.levels() as u16).to_le_bytes());
        for size in [layers, heads, head_dim] {
            out.extend_from_slice(&(size as u32).to_le_bytes());
        }
        out.extend_from_slice(&model_id.to_le_bytes());
        let mut append = |kind: u8, bytes: &[u8]| {
            out.push(kind);
            out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            out.extend_from_slice(bytes);
        };
        let mut first: Option<&[PlaneBuf]> = None; // the first lossy level
        for level in &self.levels {
            match level {
                Level::Lossless(planes) => {
                    planes.iter().for_each(|plane| append(LOSSLESS, &plane.to_bytes()));
                }
                Level::Lossy(planes) => {
                    for (i, plane) in planes.iter().enumerate() {
                        let parts = plane.parts();
                        let shared = parts.transform.is_some()
                            && first.is_some_and(|first| first[i].parts().transform == parts.transform);
                        append(if shared { SHARED } else { WHOLE }, &parts.to_bytes(!shared));
                    }
                    first = first.or(Some(planes));
                }
            }
        }
        seal(out)
    }

    /// Parses and checks the output of [`Self::to_bytes`]. It allocates little more than `bytes.len()` bytes:
    /// planes of several levels share their transforms in memory, too.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::TrailingBytes`], [`Error::BadMagic`], [`Error::BadVersion`],
    /// [`Error::BadChecksum`], [`Error::BadField`], those of [`PlaneBuf::from_bytes`] and [`Self::new`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION)?;
        let keys_rotated = match reader.array()? {
            [0] => false,
            [1] => true,
            _ => return Err(Error::BadField { what: "position encoding of keys" }),
        };
        let levels = usize::from(u16::from_le_bytes(reader.array()?));
        let (layers, heads, head_dim) = (reader.size()?, reader.size()?, reader.size()?);
        let model_id = u64::from_le_bytes(reader.array()?);
        let info = ModelInfo { model_id, layers, heads, head_dim, keys_rotated };
        info.check()?;
        if !(1..=MAX_LEVELS).contains(&levels) {
            return Err(Error::BadField { what: "number of levels" });
        }
        // No `with_capacity`: the numbers of levels and of planes are untrusted.
        let (mut all, mut first) = (vec![], None);
        for _ in 0..levels {
            let level = read_level(&mut reader, layers, first.and_then(|i| all.get(i)))?;
            if first.is_none() && matches!(level, Level::Lossy(_)) {
                first = Some(all.len());
            }
            all.push(level);
        }
        reader.finish()?;
        Self::of_levels(info, all)
    }
}

/// Reads the planes of a level; `first` is the first lossy level, whose transforms others may share.
fn read_level(reader: &mut Reader<'_>, layers: usize, first: Option<&Level>) -> Result<Level, Error> {
    let (mut lossy, mut lossless) = (Vec::new(), Vec::new());
    for i in 0..layers.saturating_mul(2) {
        let [kind] = reader.array()?;
        let len = reader.size()?;
        let bytes = reader.take(len)?;
        if kind == LOSSLESS && lossy.is_empty() {
            lossless.push(LosslessPlaneBuf::from_bytes(bytes)?);
            continue;
        }
        if !lossless.is_empty() {
            return Err(Error::BadField { what: "kind of a plane" });
        }
        let mut parts = PlaneBufParts::from_bytes(bytes)?;
        let shared = match first {
            Some(Level::Lossy(first)) => first.get(i).and_then(|plane| plane.parts().transform.as_ref()),
            _ => None,
        };
        match (kind, &parts.transform, shared) {
            (WHOLE, _, _) => {}
            (SHARED, None, Some(transform)) => parts.transform = Some(Arc::clone(transform)),
            (SHARED, _, _) => return Err(Error::BadField { what: "shared transform" }),
            _ => return Err(Error::BadField { what: "kind of a plane" }),
        }
        lossy.push(PlaneBuf::new(parts)?);
    }
    Ok(if lossless.is_empty() { Level::Lossy(lossy) } else { Level::Lossless(lossless) })
}
