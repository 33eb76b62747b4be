//! The serialized form of profiles. FORMAT.md, "Profile", specifies the bytes.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{MAX_LEVELS, ModelInfo, Profile};
use crate::plane::owned::PlaneBufParts;
use crate::reader::{Reader, seal};
use crate::{Error, PlaneBuf};

const MAGIC: [u8; 4] = *b"KVCM";
const VERSION: u8 = 1;

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
        for (i, plane) in self.planes.iter().enumerate() {
            let parts = plane.parts();
            let shared = i >= 2 * layers && parts.transform.is_some() && {
                parts.transform == self.planes[i % (2 * layers)].parts().transform
            };
            let bytes = parts.to_bytes(!shared);
            out.push(shared.into());
            out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            out.extend_from_slice(&bytes);
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
        // No `with_capacity`: the number of planes is untrusted.
        let mut planes: Vec<PlaneBuf> = Vec::new();
        for i in 0..levels.saturating_mul(2 * layers) {
            let [shared] = reader.array()?;
            let len = reader.size()?;
            let mut parts = PlaneBufParts::from_bytes(reader.take(len)?)?;
            let first = planes.get(i % (2 * layers)).map(|plane| &plane.parts().transform);
            match (shared, &parts.transform, first) {
                (0, _, _) => {}
                (1, None, Some(Some(transform))) if i >= 2 * layers => {
                    parts.transform = Some(Arc::clone(transform));
                }
                _ => return Err(Error::BadField { what: "shared transform" }),
            }
            planes.push(PlaneBuf::new(parts)?);
        }
        reader.finish()?;
        Self::new(info, planes)
    }
}
