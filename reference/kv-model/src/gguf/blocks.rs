//! Decoding of ggml's types, plain and quantized in blocks.

mod codes;
mod k_quants;

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use codes::{Group, decode_codes, nibbles, with_fifth_bits};

/// The block layout of a ggml type.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    kind: u32,    // the type's number
    block: usize, // elements per block
    size: usize,  // bytes per block
    decode: Decode,
}

/// Decodes whole blocks.
type Decode = fn(&[u8], &mut [f32]);

/// The types by their numbers; gaps have no name.
const NAMES: [&str; 40] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
    "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4",
];

impl Layout {
    /// The layout of a ggml type.
    pub fn of(kind: u32) -> Result<Self, String> {
        let (block, size, decode): (_, _, Decode) = match kind {
            0 => (1, 4, |b, out| floats(b, out, f32::from_le_bytes)),
            1 => (1, 2, decode_f16),
            2 => (32, 18, decode_q4_0),
            3 => (32, 20, |b, out| decode_codes(b, out, q4_1)),
            6 => (32, 22, |b, out| decode_codes(b, out, q5_0)),
            7 => (32, 24, |b, out| decode_codes(b, out, q5_1)),
            8 => (32, 34, decode_q8_0),
            10 => (256, 84, |b, out| decode_codes(b, out, k_quants::q2)),
            11 => (256, 110, |b, out| decode_codes(b, out, k_quants::q3)),
            12 => (256, 144, |b, out| decode_codes(b, out, k_quants::q4)),
            13 => (256, 176, |b, out| decode_codes(b, out, k_quants::q5)),
            14 => (256, 210, |b, out| decode_codes(b, out, k_quants::q6)),
            20 => (32, 18, |b, out| decode_codes(b, out, iq4_nl)),
            28 => (1, 8, |b, out| floats(b, out, |x| f64::from_le_bytes(x) as f32)),
            30 => (1, 2, |b, out| floats(b, out, |x| bf16::from_le_bytes(x).to_f32())),
            39 => (32, 17, |b, out| decode_codes(b, out, mxfp4)),
            _ => {
                let name = NAMES.get(kind as usize).filter(|name| !name.is_empty());
                let name = name.map_or_else(|| kind.to_string(), |name| (*name).to_owned());
                return Err(format!(
                    "ggml type {name} is not supported (only F64, F32, F16, BF16, MXFP4, IQ4_NL, Q4_0 to Q8_0, \
                     Q2_K to Q6_K)"
                ));
            }
        };
        Ok(Self { kind, block, size, decode })
    }

    /// Whether elements take less than single precision.
    pub const fn saves_memory(self) -> bool {
        self.size < size_of::<f32>() * self.block
    }

    /// Bytes of `n` elements.
    pub fn bytes(self, n: usize) -> Result<usize, String> {
        if !n.is_multiple_of(self.block) {
            return Err(format!("{n} numbers are no whole number of blocks of {}", self.block));
        }
        (n / self.block).checked_mul(self.size).ok_or_else(|| "its size does not fit this machine".into())
    }

    /// Decodes whole blocks: `out` has as many elements as `bytes` hold.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        debug_assert_eq!(bytes.len() / self.size * self.block, out.len());
        (self.decode)(bytes, out);
    }

    /// As [`Self::decode`], into a new list.
    pub fn decoded(self, bytes: &[u8]) -> Result<Vec<f32>, String> {
        let len = bytes.len() / self.size * self.block;
        let mut out = vec![];
        out.try_reserve_exact(len).map_err(|e| e.to_string())?;
        out.resize(len, 0.0);
        self.decode(bytes, &mut out);
        Ok(out)
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES[self.kind as usize])
    }
}

/// Decodes Q4_0 blocks (32 elements in 18 bytes): as many as `bytes` and `out` both have.
pub fn decode_q4_0(bytes: &[u8], out: &mut [f32]) {
    decode_codes(bytes, out, q4_0);
}

/// Decodes Q8_0 blocks (32 elements in 34 bytes): as many as `bytes` and `out` both have.
pub fn decode_q8_0(bytes: &[u8], out: &mut [f32]) {
    decode_codes(bytes, out, q8_0);
}

#[inline(always)]
fn q4_0(b: &[u8; 18], codes: &mut [i8; 32]) -> [Group; 1] {
    nibbles(&b[2..], codes, |q| q as i8 - 8);
    [Group::scaled(half(b))]
}

#[inline(always)]
fn q8_0(b: &[u8; 34], codes: &mut [i8; 32]) -> [Group; 1] {
    codes.iter_mut().zip(&b[2..]).for_each(|(code, &q)| *code = q as i8);
    [Group::scaled(half(b))]
}

#[inline(always)]
fn q4_1(b: &[u8; 20], codes: &mut [i8; 32]) -> [Group; 1] {
    nibbles(&b[4..], codes, |q| q as i8);
    [Group { scale: half(b), offset: half(&b[2..]) }]
}

#[inline(always)]
fn q5_0(b: &[u8; 22], codes: &mut [i8; 32]) -> [Group; 1] {
    with_fifth_bits(&b[2..], codes, 16);
    [Group::scaled(half(b))]
}

#[inline(always)]
fn q5_1(b: &[u8; 24], codes: &mut [i8; 32]) -> [Group; 1] {
    with_fifth_bits(&b[4..], codes, 0);
    [Group { scale: half(b), offset: half(&b[2..]) }]
}

#[inline(always)]
fn iq4_nl(b: &[u8; 18], codes: &mut [i8; 32]) -> [Group; 1] {
    /// The levels.
    const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    nibbles(&b[2..], codes, |q| LEVELS[usize::from(q)]);
    [Group::scaled(half(b))]
}

#[inline(always)]
fn mxfp4(b: &[u8; 17], codes: &mut [i8; 32]) -> [Group; 1] {
    /// The values of 4-bit floats (E2M1), doubled.
    const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    nibbles(&b[1..], codes, |q| E2M1[usize::from(q)]);
    [Group::scaled(f64::powi(2.0, i32::from(b[0]) - 128) as f32)]
}

/// Decodes elements of `N` bytes.
fn floats<const N: usize>(bytes: &[u8], out: &mut [f32], to_f32: impl Fn([u8; N]) -> f32) {
    bytes.as_chunks::<N>().0.iter().zip(out).for_each(|(&x, out)| *out = to_f32(x));
}

fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    const SOME: usize = 256; // whose conversion is one call
    for (bytes, out) in bytes.chunks(2 * SOME).zip(out.chunks_mut(SOME)) {
        let mut some = [f16::ZERO; SOME];
        bytes.as_chunks().0.iter().zip(&mut some).for_each(|(&x, some)| *some = f16::from_le_bytes(x));
        some[..out.len()].convert_to_f32_slice(out);
    }
}

/// The half-precision number at the start of `bytes`.
#[inline(always)]
fn half(bytes: &[u8]) -> f32 {
    let bits = u32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    // The exponent's bias differs by 112. The product is exact, of subnormal numbers, too.
    let magnitude = match bits & 0x7c00 {
        0x7c00 => f32::from_bits(0x7f80_0000 | (bits & 0x3ff) << 13),
        _ => f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23),
    };
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn blocks_follow_ggml() {
        let decoded = |kind: u32, bytes: &[u8]| Layout::of(kind).unwrap().decoded(bytes).unwrap();
        let d = f16::from_f32(0.5).to_le_bytes();
        let m = f16::from_f32(-1.0).to_le_bytes();
        let quants: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let q4_0 = decoded(2, &[&d[..], &quants].concat());
        assert_eq!((q4_0[0], q4_0[1], q4_0[16]), (-4.0, -3.5, 3.5));
        let q4_1 = decoded(3, &[&d[..], &m, &quants].concat());
        assert_eq!((q4_1[0], q4_1[2], q4_1[31]), (-1.0, 0.0, -1.0));
        assert_eq!(decoded(8, &[&d[..], &[254; 32]].concat()), [-1.0; 32]);
        assert_eq!(decoded(28, &1.5_f64.to_le_bytes()), [1.5]);
        assert_eq!(Layout::of(8).unwrap().bytes(32), Ok(34));
        assert!(Layout::of(8).unwrap().bytes(31).is_err());
        assert!(Layout::of(0).unwrap().bytes(usize::MAX).is_err());
        let refused = |kind| Layout::of(kind).err().unwrap();
        assert!(refused(16).starts_with("ggml type IQ2_XXS is") && refused(4).starts_with("ggml type 4 is"));
        assert!(refused(99).starts_with("ggml type 99 is"));
    }

    #[test]
    fn halves_are_exact() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (half(&bits.to_le_bytes()), f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{bits:04x}");
        }
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
            let numbers = layout.decoded(&bytes).unwrap();
            assert_eq!(numbers.len(), 4 * layout.block);
            let raw: Vec<u8> = numbers.iter().flat_map(|x| (x + 0.0).to_le_bytes()).collect(); // no -0
            let got: String = Sha256::digest(&raw)[..8].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(got, digest, "{}", NAMES[kind as usize]);
        }
    }
}
