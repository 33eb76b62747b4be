//! Quantized blocks as codes of 8 bits in groups of one scale and one offset, which all quantized types are.

/// The scale and the offset of a group of neighbouring codes.
#[derive(Clone, Copy)]
pub(super) struct Group {
    pub scale: f32,
    pub offset: f32,
}

impl Group {
    /// A group without an offset: adding -0 changes no number.
    pub const fn scaled(scale: f32) -> Self {
        Self { scale, offset: -0.0 }
    }
}

/// Elements that are unpacked before they are scaled. Codes in memory keep the compiler from splitting a small block
/// into variables, one for each code.
const BATCH: usize = 512;

/// Decodes blocks of `SIZE` bytes, each of `LEN` elements in `GROUPS` groups: `code * scale + offset`, with two
/// roundings. `unpack` writes a block's codes and returns its groups.
pub(super) fn decode_codes<const SIZE: usize, const LEN: usize, const GROUPS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; SIZE], &mut [i8; LEN]) -> [Group; GROUPS],
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: this CPU has AVX2.
        return unsafe { decode_avx2(bytes, out, unpack) };
    }
    decode(bytes, out, unpack);
}

/// As [`decode`], compiled for AVX2: the same operations on each element.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn decode_avx2<const SIZE: usize, const LEN: usize, const GROUPS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; SIZE], &mut [i8; LEN]) -> [Group; GROUPS],
) {
    decode(bytes, out, unpack);
}

#[inline(always)]
fn decode<const SIZE: usize, const LEN: usize, const GROUPS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; SIZE], &mut [i8; LEN]) -> [Group; GROUPS],
) {
    let n = BATCH / LEN;
    let (mut codes, mut groups) = ([0; BATCH], [Group::scaled(0.0); BATCH / 16]);
    for (bytes, out) in bytes.chunks(n * SIZE).zip(out.chunks_mut(n * LEN)) {
        let of_blocks = codes.as_chunks_mut().0.iter_mut().zip(groups.as_chunks_mut().0);
        for (block, (codes, groups)) in bytes.as_chunks().0.iter().zip(of_blocks) {
            *groups = unpack(block, codes);
        }
        let of_groups = codes.chunks_exact(LEN / GROUPS).zip(groups);
        for (out, (codes, Group { scale, offset })) in out.chunks_exact_mut(LEN / GROUPS).zip(of_groups) {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = f32::from(code) * scale + offset;
            }
        }
    }
}

/// The low nibbles of `codes.len() / 2` bytes, then the high ones.
#[inline(always)]
pub(super) fn nibbles(bytes: &[u8], codes: &mut [i8], code: impl Fn(u8) -> i8) {
    let (low, high) = codes.split_at_mut(codes.len() / 2);
    for (byte, (low, high)) in bytes.iter().zip(low.iter_mut().zip(high)) {
        *low = code(byte & 15);
        *high = code(byte >> 4);
    }
}

/// A word whose bytes are all this one.
const fn every(byte: u8) -> u64 {
    byte as u64 * 0x0101_0101_0101_0101
}

/// The fifth bits of 32 codes, then their nibbles as [`nibbles`] reads them; less `zero`, at most 16.
#[inline(always)]
pub(super) fn with_fifth_bits(bytes: &[u8], codes: &mut [i8; 32], zero: u8) {
    let (fifth, bytes) = bytes.split_at(4);
    let (low, high) = codes.split_at_mut(16);
    // Eight codes in a word. The top bit of each keeps a difference from borrowing of the next.
    let code = |nibbles: u64, fifth: u8| {
        let codes = (nibbles & every(15) | bits(fifth) << 4 | every(0x80)) - every(zero);
        (codes ^ every(0x80)).to_le_bytes().map(|code| code as i8)
    };
    let halves = low.as_chunks_mut().0.iter_mut().zip(high.as_chunks_mut().0);
    for (i, (word, (low, high))) in bytes.as_chunks().0.iter().zip(halves).enumerate() {
        let word = u64::from_le_bytes(*word);
        *low = code(word, fifth[i]);
        *high = code(word >> 4, fifth[2 + i]);
    }
}

/// The bits of a byte, each in a byte of a word.
#[inline(always)]
const fn bits(byte: u8) -> u64 {
    // Byte i of the product is the given byte, of which the mask leaves bit i; the sum carries it to bit 7.
    let kept = every(byte) & 0x8040_2010_0804_0201;
    let carried = (kept & every(0x7f)) + every(0x7f);
    (carried | kept) >> 7 & every(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_every_byte() {
        for byte in 0..=u8::MAX {
            assert_eq!(bits(byte).to_le_bytes(), std::array::from_fn(|i| byte >> i & 1));
        }
    }

    /// Every tail of a batch, by the best instructions and by none.
    #[test]
    fn all_instructions_give_the_same_numbers() {
        let unpack = |block: &[u8; 3], codes: &mut [i8; 32]| {
            codes.iter_mut().enumerate().for_each(|(i, code)| *code = block[i % 2] as i8);
            [Group { scale: 0.3, offset: f32::from(block[2]) }]
        };
        for blocks in [0, 1, 15, 16, 17, 40] {
            let bytes: Vec<u8> = (0..3 * blocks).map(|i| (i * 37) as u8).collect();
            let [mut best, mut portable] = [(); 2].map(|()| vec![f32::NAN; 32 * blocks]);
            decode_codes(&bytes, &mut best, unpack);
            decode(&bytes, &mut portable, unpack);
            assert_eq!(best, portable);
        }
    }
}
