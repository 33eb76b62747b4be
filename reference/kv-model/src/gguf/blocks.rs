//! Decoding of ggml's types, plain and quantized in blocks.

mod codes;
mod dot;
mod fixed_point;
mod k_quants;
mod lanes;
mod simple;

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kv_attend::Backend;

use codes::{Block, Codes, UnpackBlocks};
pub(crate) use dot::DotBlocks;
pub use fixed_point::FixedPoint;

/// The block layout of a ggml type.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    kind: u32,    // the type's number
    block: usize, // elements per block
    size: usize,  // bytes per block
    form: Form,
}

/// What blocks hold, and what reads whole ones.
#[derive(Clone, Copy)]
enum Form {
    Floats(fn(&[u8], &mut [f32])),
    Codes {
        group: usize, // elements of a scale
        unpack: UnpackBlocks,
        dot: DotBlocks,
    },
}

/// The types by their numbers; gaps have no name.
const NAMES: [&str; 40] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
    "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4",
];

const Q4_0: Layout = Layout::of_codes::<simple::Q4_0, _, _, _>(2);
const Q8_0: Layout = Layout::of_codes::<simple::Q8_0, _, _, _>(8);

impl Layout {
    /// The layout of a ggml type.
    pub fn of(kind: u32) -> Result<Self, String> {
        let floats = |size, decode| Self { kind, block: 1, size, form: Form::Floats(decode) };
        Ok(match kind {
            0 => floats(4, |b, out| decode_floats(b, out, f32::from_le_bytes)),
            1 => floats(2, decode_f16),
            2 => Q4_0,
            3 => Self::of_codes::<simple::Q4_1, _, _, _>(kind),
            6 => Self::of_codes::<simple::Q5_0, _, _, _>(kind),
            7 => Self::of_codes::<simple::Q5_1, _, _, _>(kind),
            8 => Q8_0,
            10 => Self::of_codes::<k_quants::Q2, _, _, _>(kind),
            11 => Self::of_codes::<k_quants::Q3, _, _, _>(kind),
            12 => Self::of_codes::<k_quants::Q4, _, _, _>(kind),
            13 => Self::of_codes::<k_quants::Q5, _, _, _>(kind),
            14 => Self::of_codes::<k_quants::Q6, _, _, _>(kind),
            20 => Self::of_codes::<simple::Iq4Nl, _, _, _>(kind),
            28 => floats(8, |b, out| decode_floats(b, out, |x| f64::from_le_bytes(x) as f32)),
            30 => floats(2, |b, out| decode_floats(b, out, |x| bf16::from_le_bytes(x).to_f32())),
            39 => Self::of_codes::<simple::Mxfp4, _, _, _>(kind),
            _ => {
                let name = NAMES.get(kind as usize).filter(|name| !name.is_empty());
                let name = name.map_or_else(|| kind.to_string(), |name| (*name).to_owned());
                return Err(format!(
                    "ggml type {name} is not supported (only F64, F32, F16, BF16, MXFP4, IQ4_NL, Q4_0 to Q8_0, \
                     Q2_K to Q6_K)"
                ));
            }
        })
    }

    const fn of_codes<B: Block<SIZE, N, GROUPS>, const SIZE: usize, const N: usize, const GROUPS: usize>(
        kind: u32,
    ) -> Self {
        let (unpack, dot) = (Codes::unpack::<B, SIZE, N, GROUPS>, dot::dot_blocks::<B, SIZE, N, GROUPS>);
        let form = Form::Codes { group: 32 * N / GROUPS, unpack, dot };
        Self { kind, block: 32 * N, size: SIZE, form }
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

    /// Decodes whole blocks: as many as `bytes` and `out` both have.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let unpack = match self.form {
            Form::Floats(decode) => return decode(bytes, out),
            Form::Codes { unpack, .. } => unpack,
        };
        const BLOCKS: usize = 4096; // elements at a time: their codes stay in the first-level cache
        let blocks = BLOCKS / self.block;
        let mut codes = Codes::default();
        for (bytes, out) in bytes.chunks(blocks * self.size).zip(out.chunks_mut(blocks * self.block)) {
            unpack(&mut codes, Backend::detect(), bytes);
            codes.decode(out);
        }
    }

    /// Elements of a scale, and the products of blocks, in types that are made of codes.
    pub const fn codes(self) -> Option<(usize, DotBlocks)> {
        match self.form {
            Form::Floats(_) => None,
            Form::Codes { group, dot, .. } => Some((group, dot)),
        }
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
    Q4_0.decode(bytes, out);
}

/// Decodes Q8_0 blocks (32 elements in 34 bytes): as many as `bytes` and `out` both have.
pub fn decode_q8_0(bytes: &[u8], out: &mut [f32]) {
    Q8_0.decode(bytes, out);
}

/// Decodes elements of `N` bytes.
fn decode_floats<const N: usize>(bytes: &[u8], out: &mut [f32], to_f32: impl Fn([u8; N]) -> f32) {
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

    /// Against `gguf.quants.dequantize` of the `gguf` package, on pseudo-random blocks: the digest of the
    /// numbers.
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
            let Form::Codes { unpack, .. } = layout.form else { panic!("no codes") };
            let [expected, others @ ..] = Backend::ALL.map(|backend| {
                let mut codes = Codes::default();
                unpack(&mut codes, backend, &bytes);
                codes
            });
            assert!(others.iter().all(|codes| *codes == expected), "{}", NAMES[kind as usize]);
        }
    }
}
