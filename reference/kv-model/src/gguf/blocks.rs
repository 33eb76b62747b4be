//! Decoding of ggml's types, plain and quantized in blocks.

mod k_quants;

use half::{bf16, f16};

/// The block layout of a ggml type.
pub(super) struct Layout {
    block: usize, // elements per block
    size: usize,  // bytes per block
    unpack: Unpack,
}

/// Appends the elements of one block.
type Unpack = fn(&[u8], &mut Vec<f32>);

/// The types by their numbers; gaps have no name.
const NAMES: [&str; 40] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
    "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4",
];

impl Layout {
    /// The layout of a ggml type.
    pub fn of(kind: u32) -> Result<Self, String> {
        let (block, size, unpack): (_, _, Unpack) = match kind {
            0 => (1, 4, |b, out| out.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            1 => (1, 2, |b, out| out.push(half(b))),
            2 => (32, 18, unpack_q4_0),
            3 => (32, 20, |b, out| {
                let (d, m) = (half(b), half(&b[2..]));
                nibbles(&b[4..], out, |q| f32::from(q) * d + m);
            }),
            6 => (32, 22, |b, out| five_bits(&b[2..], out, scaled(half(b), -16.0))),
            7 => (32, 24, |b, out| {
                let (d, m) = (half(b), half(&b[2..]));
                five_bits(&b[4..], out, |q| f32::from(q) * d + m);
            }),
            8 => (32, 34, unpack_q8_0),
            10 => (256, 84, k_quants::q2),
            11 => (256, 110, k_quants::q3),
            12 => (256, 144, k_quants::q4),
            13 => (256, 176, k_quants::q5),
            14 => (256, 210, k_quants::q6),
            20 => (32, 18, |b, out| {
                let d = half(b);
                nibbles(&b[2..], out, |q| d * NONLINEAR[usize::from(q)]);
            }),
            28 => (1, 8, |b, out| out.push(f64::from_le_bytes(std::array::from_fn(|i| b[i])) as f32)),
            30 => (1, 2, |b, out| out.push(bf16::from_le_bytes([b[0], b[1]]).to_f32())),
            39 => (32, 17, |b, out| {
                let d = f64::powi(2.0, i32::from(b[0]) - 128) as f32; // the table holds doubled values
                nibbles(&b[1..], out, |q| d * E2M1[usize::from(q)]);
            }),
            _ => {
                let name = NAMES.get(kind as usize).filter(|name| !name.is_empty());
                let name = name.map_or_else(|| kind.to_string(), |name| (*name).to_owned());
                return Err(format!(
                    "ggml type {name} is not supported (only F64, F32, F16, BF16, MXFP4, IQ4_NL, Q4_0 to Q8_0, \
                     Q2_K to Q6_K)"
                ));
            }
        };
        Ok(Self { block, size, unpack })
    }

    /// Bytes of `n` elements.
    pub fn bytes(&self, n: usize) -> Result<usize, String> {
        if !n.is_multiple_of(self.block) {
            return Err(format!("{n} numbers are no whole number of blocks of {}", self.block));
        }
        (n / self.block).checked_mul(self.size).ok_or_else(|| "its size does not fit this machine".into())
    }

    /// Decodes whole blocks.
    pub fn unpack(&self, bytes: &[u8]) -> Result<Vec<f32>, String> {
        let mut out = vec![];
        out.try_reserve_exact(bytes.len() / self.size * self.block).map_err(|e| e.to_string())?;
        bytes.chunks_exact(self.size).for_each(|block| (self.unpack)(block, &mut out));
        Ok(out)
    }
}

/// Appends the 32 elements of a Q4_0 block (18 bytes).
///
/// # Panics
/// When the block is shorter.
pub fn unpack_q4_0(block: &[u8], out: &mut Vec<f32>) {
    nibbles(&block[2..], out, scaled(half(block), -8.0));
}

/// Appends the 32 elements of a Q8_0 block (34 bytes).
///
/// # Panics
/// When the block is shorter.
pub fn unpack_q8_0(block: &[u8], out: &mut Vec<f32>) {
    let d = half(block);
    out.extend(block[2..].iter().map(|&q| f32::from(q as i8) * d));
}

/// The levels of IQ4_NL.
const NONLINEAR: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// The values of 4-bit floats (E2M1), doubled.
const E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

fn scaled(d: f32, offset: f32) -> impl Fn(u8) -> f32 {
    move |q| (f32::from(q) + offset) * d
}

/// The low nibbles of all bytes, then the high ones.
fn nibbles(bytes: &[u8], out: &mut Vec<f32>, value: impl Fn(u8) -> f32) {
    out.extend(bytes.iter().map(|x| x & 15).chain(bytes.iter().map(|x| x >> 4)).map(value));
}

/// Nibbles behind the fifth bits of all elements.
fn five_bits(bytes: &[u8], out: &mut Vec<f32>, value: impl Fn(u8) -> f32) {
    let (high, low) = bytes.split_at(4);
    let nibbles = low.iter().map(|x| x & 15).chain(low.iter().map(|x| x >> 4));
    out.extend(nibbles.enumerate().map(|(i, nibble)| value(nibble | (high[i / 8] >> (i % 8) & 1) << 4)));
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn blocks_follow_ggml() {
        let unpack = |kind: u32, bytes: &[u8]| Layout::of(kind).unwrap().unpack(bytes).unwrap();
        let d = f16::from_f32(0.5).to_le_bytes();
        let m = f16::from_f32(-1.0).to_le_bytes();
        let quants: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let q4_0 = unpack(2, &[&d[..], &quants].concat());
        assert_eq!((q4_0[0], q4_0[1], q4_0[16]), (-4.0, -3.5, 3.5));
        let q4_1 = unpack(3, &[&d[..], &m, &quants].concat());
        assert_eq!((q4_1[0], q4_1[2], q4_1[31]), (-1.0, 0.0, -1.0));
        assert_eq!(unpack(8, &[&d[..], &[254; 32]].concat()), [-1.0; 32]);
        assert_eq!(unpack(28, &1.5_f64.to_le_bytes()), [1.5]);
        assert_eq!(Layout::of(8).unwrap().bytes(32), Ok(34));
        assert!(Layout::of(8).unwrap().bytes(31).is_err());
        assert!(Layout::of(0).unwrap().bytes(usize::MAX).is_err());
        let refused = |kind| Layout::of(kind).err().unwrap();
        assert!(refused(16).starts_with("ggml type IQ2_XXS is") && refused(4).starts_with("ggml type 4 is"));
        assert!(refused(99).starts_with("ggml type 99 is"));
    }

    /// Against `gguf.quants.dequantize` of the `gguf` package, on pseudo-random blocks: the digest of the numbers.
    #[test]
    fn every_type_decodes_as_the_gguf_package_does() {
        // Type, offsets of the block's half-precision scales, digest.
        let cases: [(u32, &[usize], &str); 12] = [
            (2, &[0], "8df8b9a69b0579aa"),
            (3, &[0, 2], "c3017077ef73ab68"),
            (6, &[0], "867c66316c952463"),
            (7, &[0, 2], "7d50b8b1c8ae07b3"),
            (8, &[0], "f7684c9f98d7d71a"),
            (10, &[80, 82], "a0dcec92264f96bf"),
            (11, &[108], "60f5ee4daeb036c1"),
            (12, &[0, 2], "cae9d7e2d2008368"),
            (13, &[0, 2], "a8c47a8d2592c840"),
            (14, &[208], "5d17f8b7a0c5749a"),
            (20, &[0], "03713fb3f27dec89"),
            (39, &[], "9adc71a592fa35ce"),
        ];
        for (kind, scales, digest) in cases {
            let layout = Layout::of(kind).unwrap();
            let mut state = kind;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            let mut bytes: Vec<u8> = (0..4 * layout.size).map(|_| next()).collect();
            for block in bytes.chunks_exact_mut(layout.size) {
                for &at in scales {
                    block[at + 1] = block[at + 1] & 0x83 | 0x2c; // neither tiny nor huge
                }
            }
            let numbers = layout.unpack(&bytes).unwrap();
            assert_eq!(numbers.len(), 4 * layout.block);
            let raw: Vec<u8> = numbers.iter().flat_map(|x| (x + 0.0).to_le_bytes()).collect(); // no -0
            let got: String = Sha256::digest(&raw)[..8].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(got, digest, "{}", NAMES[kind as usize]);
        }
    }
}
