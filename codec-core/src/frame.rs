//! The frame around one coded plane chunk, little-endian:
//!
//! | bytes | field |
//! | --- | --- |
//! | 4 | magic `KVCC` |
//! | 1 | version, 1 |
//! | 4 | profile id: CRC-32 over predictor, means, steps and tables |
//! | 4 | channels |
//! | 4 | tokens |
//! | n | payload of the range coder |
//! | 4 | CRC-32 over all bytes before it |

use crate::Error;

const MAGIC: [u8; 4] = *b"KVCC";
const VERSION: u8 = 1;
const HEADER: usize = 17;

/// Bytes of a frame beside its payload.
pub const FRAME_OVERHEAD: usize = HEADER + 4;

/// What a frame says about itself; its checksum has been verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameInfo {
    /// Identifies the profile it was coded under.
    pub profile_id: u32,
    /// Numbers per token.
    pub channels: usize,
    /// Tokens.
    pub tokens: usize,
}

impl FrameInfo {
    /// Reads and verifies the frame around `bytes`; returns it with its payload. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::BadMagic`], [`Error::BadVersion`], [`Error::BadChecksum`] or [`Error::TooLarge`].
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), Error> {
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or(Error::Truncated)?;
        let (header, payload) = body.split_first_chunk::<HEADER>().ok_or(Error::Truncated)?;
        if header[..4] != MAGIC {
            return Err(Error::BadMagic);
        }
        if header[4] != VERSION {
            return Err(Error::BadVersion { version: header[4] });
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
            return Err(Error::BadChecksum);
        }
        let field =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let info = Self { profile_id: field(5), channels: field(9) as usize, tokens: field(13) as usize };
        info.channels.checked_mul(info.tokens).ok_or(Error::TooLarge)?;
        Ok((info, payload))
    }

    #[cfg(feature = "alloc")]
    pub(crate) fn begin(&self, out: &mut alloc::vec::Vec<u8>) -> Result<(), Error> {
        let size = |n: usize| u32::try_from(n).map_err(|_| Error::TooLarge);
        let (channels, tokens) = (size(self.channels)?, size(self.tokens)?);
        out.extend_from_slice(&MAGIC);
        out.push(VERSION);
        for field in [self.profile_id, channels, tokens] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        Ok(())
    }

    /// Appends the checksum of everything from `start` on.
    #[cfg(feature = "alloc")]
    pub(crate) fn end(start: usize, out: &mut alloc::vec::Vec<u8>) {
        let checksum = crc32fast::hash(&out[start..]);
        out.extend_from_slice(&checksum.to_le_bytes());
    }
}
