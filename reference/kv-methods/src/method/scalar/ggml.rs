//! llama.cpp's cache types: ggml's blocks of 32 neighbouring channels, each with one half-precision step around
//! zero and codes of 4 (`q4_0`, 18 bytes) or 8 bits (`q8_0`, 34 bytes).

use half::f16;
use kv_model::{decode_q4_0, decode_q8_0};

use super::codecs::pack;
use super::store::BlockCodec;
use crate::cache::rounded;

/// Elements per block.
pub(crate) const BLOCK: usize = 32;

/// A type by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ggml {
    Q4,
    Q8,
}

impl Ggml {
    /// The type with codes of so many bits.
    pub const fn of_bits(bits: u32) -> Option<Self> {
        match bits {
            4 => Some(Self::Q4),
            8 => Some(Self::Q8),
            _ => None,
        }
    }
}

/// Arithmetic and rounding are those of ggml's `quantize_row_q4_0_ref` and `quantize_row_q8_0_ref`: codes are
/// computed with the step before it is rounded to half precision.
impl BlockCodec for Ggml {
    fn encode(&self, rows: &[f32], _head_dim: usize, bytes: &mut Vec<u8>) {
        for block in rows.chunks_exact(BLOCK) {
            // The first element of the largest magnitude, with its sign.
            let largest = block.iter().fold(0.0_f32, |largest, &x| match x.abs() > largest.abs() {
                true => x,
                false => largest,
            });
            let step = match self {
                Self::Q4 => largest / -8.0,
                Self::Q8 => largest.abs() / 127.0,
            };
            let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
            bytes.extend(rounded::<f16>(step).to_le_bytes());
            match self {
                Self::Q4 => {
                    let codes: Vec<u8> = block.iter().map(|x| (x * inverse + 8.5).min(15.0) as u8).collect();
                    pack(&codes, 4, bytes);
                }
                Self::Q8 => bytes.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8)),
            }
        }
    }

    fn decode(&self, bytes: &[u8], _head_dim: usize, rows: &mut [f32]) {
        match self {
            Self::Q4 => decode_q4_0(bytes, rows),
            Self::Q8 => decode_q8_0(bytes, rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    /// Rows of four blocks: of pseudo-random elements, of zeros, of elements of which the largest two differ
    /// in sign alone, and of tiny ones, whose step is no normal half.
    fn rows() -> Vec<f32> {
        let mut state = 64_u32;
        let mut rows: Vec<f32> = (0..4 * BLOCK)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect();
        rows[BLOCK..2 * BLOCK].fill(0.0);
        (rows[2 * BLOCK + 5], rows[2 * BLOCK + 9]) = (-1.5, 1.5);
        rows[3 * BLOCK..].iter_mut().for_each(|x| *x *= 1e-4);
        rows
    }

    /// Against `gguf.quants.quantize` of the `gguf` package: the digest of the bytes.
    #[test]
    fn blocks_are_those_of_the_gguf_package() {
        for (kind, size, digest) in [(Ggml::Q4, 18, "c173ce2d01ef9539"), (Ggml::Q8, 34, "2ddef1a74dbdf65c")] {
            let mut bytes = vec![];
            kind.encode(&rows(), 4 * BLOCK, &mut bytes);
            assert_eq!(bytes.len(), 4 * size);
            let got: String = Sha256::digest(&bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(got, digest, "{kind:?}");
        }
    }

    /// The definition in `f64`: a block's largest element has code -8, or -127 or 127.
    #[test]
    fn elements_are_multiples_of_the_stored_step() {
        let rows = rows();
        for kind in [Ggml::Q4, Ggml::Q8] {
            let (mut bytes, mut decoded) = (vec![], vec![0.0; rows.len()]);
            kind.encode(&rows, BLOCK, &mut bytes);
            kind.decode(&bytes, BLOCK, &mut decoded);
            for (block, decoded) in rows.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                let block: Vec<f64> = block.iter().map(|&x| f64::from(x)).collect();
                let most = block.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
                let first = block.iter().find(|x| x.abs() == most).unwrap();
                let step = if kind == Ggml::Q4 { first / -8.0 } else { most / 127.0 };
                let stored = half::f16::from_f64(step).to_f64();
                for (x, &y) in block.iter().zip(decoded) {
                    let code = match kind {
                        _ if step == 0.0 => 0.0,
                        Ggml::Q4 => (x / step + 0.5).floor().min(7.0),
                        Ggml::Q8 => (x / step).round(),
                    };
                    assert_eq!(f64::from(y), stored * code, "{kind:?}: {x}");
                }
            }
        }
    }
}
