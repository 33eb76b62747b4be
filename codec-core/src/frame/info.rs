//! The header of a frame. FORMAT.md, "Frame", specifies the bytes.

use core::ops::Range;

use crate::Error;
use crate::block::{self, MAX_BLOCK_TOKENS};

const MAGIC: [u8; 4] = *b"KVCC";
const VERSION: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const TOKEN_HEAD_COMPONENT: u8 = 0;
/// Bytes of a frame in front of its index.
pub(super) const HEADER: usize = 64;

/// The element type of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ElementType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// bfloat16: the exponent of `f32` and 7 bits of mantissa.
    Bf16,
}

/// Keys or values of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Side {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

/// The position of a block in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockIndex {
    /// Index of the layer in the frame.
    pub layer: usize,
    /// Whether it holds keys or values.
    pub side: Side,
    /// Block of the plane: it holds the tokens [`FrameInfo::tokens_of_block`].
    pub block: usize,
}

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FrameInfo {
    /// Element type of the source.
    pub element: ElementType,
    /// Whether keys are stored after RoPE. Keys stored before RoPE can be rotated as they are decoded.
    pub keys_rotated: bool,
    /// Whether the frame is lossless: it holds the bits of 16-bit elements.
    pub lossless: bool,
    /// The encoding level; the user defines its meaning.
    pub level: u8,
    /// Number of layers, with two planes each.
    pub layers: usize,
    /// Key/value heads per layer.
    pub heads: usize,
    /// Components per head.
    pub head_dim: usize,
    /// Position of the first token.
    pub first_token: u64,
    /// Number of tokens of every plane.
    pub tokens: usize,
    /// Tokens per block, the unit of random access, at most [`MAX_BLOCK_TOKENS`]. The last block may have
    /// fewer.
    pub block_tokens: usize,
    /// The user's identifier of the model, for example a hash of its weights.
    pub model_id: u64,
}

impl FrameInfo {
    /// A lossy frame of `f32` elements, with keys before RoPE, positions from 0 and blocks of 256 tokens;
    /// level and model id are 0.
    #[must_use]
    pub const fn new(layers: usize, heads: usize, head_dim: usize, tokens: usize) -> Self {
        Self {
            element: ElementType::F32,
            keys_rotated: false,
            lossless: false,
            level: 0,
            layers,
            heads,
            head_dim,
            first_token: 0,
            tokens,
            block_tokens: 256,
            model_id: 0,
        }
    }

    /// Elements of a token in one plane.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Blocks per plane.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        if self.block_tokens == 0 { 0 } else { self.tokens.div_ceil(self.block_tokens) }
    }

    /// The tokens of a block, counted from the first token of the frame.
    #[must_use]
    pub fn tokens_of_block(&self, block: usize) -> Range<usize> {
        let start = block.saturating_mul(self.block_tokens).min(self.tokens);
        start..start.saturating_add(self.block_tokens).min(self.tokens)
    }

    /// Elements of all planes.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.layers.saturating_mul(2).saturating_mul(self.tokens).saturating_mul(self.channels())
    }

    /// The largest length in bytes that a frame of this shape can have, lossy or lossless: two bytes per
    /// element, four per token and plane, and the header and index.
    ///
    /// # Examples
    /// ```
    /// // A chunk of 256 tokens of a model with 32 layers and 8 heads of 128 components.
    /// let info = codec_core::FrameInfo::new(32, 8, 128, 256);
    /// assert_eq!(info.max_frame_len(), 33_633_348); // 1.002 times its f16 elements
    /// ```
    #[must_use]
    pub const fn max_frame_len(&self) -> usize {
        // A tile is at most its bins at 16 bits and its header. Side information replaces a row and adds a
        // scale (anchors), or adds a scale.
        let row = self.channels().saturating_mul(2).saturating_add(4);
        let headers = block::tiles(self.channels()).saturating_mul(4).saturating_mul(self.blocks());
        let plane = self.tokens.saturating_mul(row).saturating_add(headers);
        let payload = self.layers.saturating_mul(2).saturating_mul(plane);
        payload.saturating_add(self.head_len())
    }

    /// The length in bytes of a frame before its payload: header, index and its checksum.
    #[must_use]
    pub const fn head_len(&self) -> usize {
        self.index_len().saturating_add(HEADER + 4)
    }

    /// Checks all sizes, so that no product of them overflows below.
    pub(crate) fn check(&self) -> Result<(), Error> {
        for (what, size) in [
            ("layers", self.layers),
            ("heads", self.heads),
            ("head_dim", self.head_dim),
            ("block_tokens", self.block_tokens),
        ] {
            if size == 0 {
                return Err(Error::Zero { what });
            }
        }
        if self.block_tokens > MAX_BLOCK_TOKENS {
            return Err(Error::TooLarge);
        }
        let sizes = [self.layers, self.heads, self.head_dim, self.tokens.max(1)];
        let elements = sizes.iter().try_fold(64_usize, |product, &size| product.checked_mul(size));
        match elements {
            Some(_) if sizes.iter().all(|&size| u32::try_from(size).is_ok()) => Ok(()),
            _ => Err(Error::TooLarge),
        }
    }

    pub(super) const fn entry_len(&self) -> usize {
        8 + 4 + 2 * block::tiles(self.channels())
    }

    pub(super) const fn index_len(&self) -> usize {
        let plane = self.blocks().saturating_mul(self.entry_len()).saturating_add(4);
        self.layers.saturating_mul(2).saturating_mul(plane)
    }

    pub(super) fn read(header: &[u8; HEADER]) -> Result<(Self, u64), Error> {
        if header[..4] != MAGIC {
            return Err(Error::BadMagic);
        }
        if header[4] != VERSION {
            return Err(Error::BadVersion { version: header[4] });
        }
        let (body, checksum) = header.split_at(HEADER - 4);
        if crc32fast::hash(body).to_le_bytes() != checksum {
            return Err(Error::BadChecksum);
        }
        if header[5] != LITTLE_ENDIAN {
            return Err(Error::BadField { what: "byte order" });
        }
        if header[8] != TOKEN_HEAD_COMPONENT || header[11] != 0 {
            return Err(Error::BadField { what: "layout" });
        }
        let flag = |at: usize, what| match header[at] {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Error::BadField { what }),
        };
        let four =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
        let info = Self {
            element: match header[6] {
                0 => ElementType::F32,
                1 => ElementType::F16,
                2 => ElementType::Bf16,
                _ => return Err(Error::BadField { what: "element type" }),
            },
            keys_rotated: flag(7, "position encoding of keys")?,
            lossless: flag(10, "lossless flag")?,
            level: header[9],
            layers: four(12) as usize,
            heads: four(16) as usize,
            head_dim: four(20) as usize,
            first_token: eight(24),
            tokens: four(32) as usize,
            block_tokens: four(36) as usize,
            model_id: eight(40),
        };
        info.check()?;
        Ok((info, eight(48)))
    }

    /// The header of a frame with `payload` bytes of payload.
    #[cfg(feature = "alloc")]
    pub(super) fn header(&self, payload: usize) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&MAGIC);
        let element = match self.element {
            ElementType::F32 => 0,
            ElementType::F16 => 1,
            ElementType::Bf16 => 2,
        };
        let (rotated, lossless) = (u8::from(self.keys_rotated), u8::from(self.lossless));
        let fields = [VERSION, LITTLE_ENDIAN, element, rotated, TOKEN_HEAD_COMPONENT, self.level, lossless];
        header[4..11].copy_from_slice(&fields);
        let mut four = |at: usize, x: usize| header[at..at + 4].copy_from_slice(&(x as u32).to_le_bytes());
        four(12, self.layers);
        four(16, self.heads);
        four(20, self.head_dim);
        four(32, self.tokens);
        four(36, self.block_tokens);
        let mut eight = |at: usize, x: u64| header[at..at + 8].copy_from_slice(&x.to_le_bytes());
        eight(24, self.first_token);
        eight(40, self.model_id);
        eight(48, payload as u64);
        let checksum = crc32fast::hash(&header[..HEADER - 4]);
        header[HEADER - 4..].copy_from_slice(&checksum.to_le_bytes());
        header
    }
}
