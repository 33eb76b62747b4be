//! How 64 codes of one subspace are packed into `8 * nbits` bytes, a *run*.
//!
//! `nbits` is split into planes of 8, 4, 2 and 1 bits, the widest first, from the low bits of a code up: 6
//! bits are a 4-bit plane with bits 0 to 3 and a 2-bit plane with bits 4 and 5; 12 bits are an 8-bit and a
//! 4-bit plane. In a plane of `w` bits, which is `8 w` bytes, token `i` has its bits in byte `i % (8 w)`,
//! shifted left by `w * (i / (8 w))`. Pages of 16 and 32 tokens have runs of 16 and 32 codes by the same
//! rule, with 2 and 4 in place of 8.
//!
//! A run is thus packed without gaps at every width, a token's bits are found from its index, and vector code
//! unpacks a plane with one shift and one mask, without moving bytes across lanes.

use crate::simd::BLOCK;

/// Calls `f` with the bits and the shift of each plane of a code, the widest first. It is inlined for each
/// width, so that loops over planes have constant lengths.
#[inline(always)]
fn each_plane(nbits: u32, mut f: impl FnMut(usize, u32)) {
    if nbits & 8 != 0 {
        f(8, 0);
    }
    if nbits & 4 != 0 {
        f(4, nbits & 8);
    }
    if nbits & 2 != 0 {
        f(2, nbits & 12);
    }
    if nbits & 1 != 0 {
        f(1, nbits & 14);
    }
}

/// Packs 64, 32 or 16 codes, each below `1 << nbits`, into `run` (`codes.len() / 8 * nbits` bytes).
#[cfg(any(test, feature = "alloc"))]
#[inline(always)]
pub(crate) fn pack_run(codes: &[u16], nbits: u32, run: &mut [u8]) {
    replace(run, nbits, codes.len(), 0, codes);
}

/// Writes the codes of a run of `len` codes from token `first` on and leaves the others unchanged.
#[inline(always)]
pub(crate) fn replace<C: Copy + Into<u32>>(
    run: &mut [u8],
    nbits: u32,
    len: usize,
    first: usize,
    codes: &[C],
) {
    let mut start = 0;
    each_plane(
        nbits,
        #[inline(always)]
        |width, shift| {
            let plane_len = len / 8 * width;
            let plane = &mut run[start..][..plane_len];
            start += plane_len;
            let mask = ((1_u32 << width) - 1) as u8;
            for part in 0..8 / width {
                // Tokens of this part, whose bits have the same position in every byte.
                let tokens = part * plane_len;
                let (from, to) = (tokens.max(first), (tokens + plane_len).min(first + codes.len()));
                if from >= to {
                    continue;
                }
                let codes = &codes[from - first..to - first];
                let put = |byte: &mut u8, code: C| {
                    let bits = (code.into() >> shift) as u8 & mask;
                    *byte = (*byte & !(mask << (part * width))) | (bits << (part * width));
                };
                // A compile-time length, so that short runs are not looped over byte by byte.
                let (bytes, last_bytes) = plane[from - tokens..to - tokens].as_chunks_mut::<16>();
                let (codes, last_codes) = codes.as_chunks::<16>();
                for (bytes, codes) in bytes.iter_mut().zip(codes) {
                    bytes.iter_mut().zip(codes).for_each(|(byte, &code)| put(byte, code));
                }
                last_bytes.iter_mut().zip(last_codes).for_each(|(byte, &code)| put(byte, code));
            }
        },
    );
}

/// Packs 64 codes of at most 8 bits, given as bytes in words, into the first `nbits` words of a run. Higher
/// bits are dropped.
#[inline(always)]
pub(crate) fn pack_words(codes: &[u64; 8], nbits: u32) -> [u64; 8] {
    let mut run = [0; 8];
    let mut start = 0;
    each_plane(
        nbits,
        #[inline(always)]
        |width, shift| {
            // Shifts move bits between bytes only to places that the mask clears.
            let mask = u64::from_ne_bytes([(0xFF_u32 >> (8 - width)) as u8; 8]);
            for (i, word) in run[start..][..width].iter_mut().enumerate() {
                for part in 0..8 / width {
                    *word |= ((codes[part * width + i] >> shift) & mask) << (part * width);
                }
            }
            start += width;
        },
    );
    run
}

/// Reads the codes of a run of `len` codes, 64, 32 or 16.
#[inline(always)]
pub(crate) fn unpack_run(run: &[u8], nbits: u32, len: usize) -> [u16; BLOCK] {
    let mut codes = [0; BLOCK];
    let mut start = 0;
    each_plane(
        nbits,
        #[inline(always)]
        |width, shift| {
            let plane = &run[start..][..len / 8 * width];
            start += plane.len();
            let mask = ((1_u32 << width) - 1) as u16;
            for (part, codes) in codes[..len].chunks_exact_mut(plane.len()).enumerate() {
                for (byte, code) in plane.iter().zip(codes) {
                    *code |= ((u16::from(*byte) >> (part * width)) & mask) << shift;
                }
            }
        },
    );
    codes
}

/// Writes the code of token `i` in each of the leading runs of `len` codes and leaves the others unchanged.
#[inline(always)]
pub(crate) fn set_in_runs(runs: &mut [u8], nbits: u32, len: usize, i: usize, codes: &[u32]) {
    let mut start = 0;
    each_plane(
        nbits,
        #[inline(always)]
        |width, shift| {
            let (plane_len, mask) = (len / 8 * width, (1_u32 << width) - 1);
            let (part, byte) = (i / plane_len * width, start + i % plane_len);
            for (run, code) in runs.chunks_exact_mut(len / 8 * nbits as usize).zip(codes) {
                run[byte] = run[byte] & !((mask << part) as u8) | (((code >> shift) & mask) << part) as u8;
            }
            start += plane_len;
        },
    );
}

/// Reads the code of token `i` of a run of `len` codes.
pub(crate) fn get_in_run(run: &[u8], nbits: u32, len: usize, i: usize) -> u16 {
    let mut start = 0;
    let mut code = 0;
    each_plane(nbits, |width, shift| {
        let (plane_len, mask) = (len / 8 * width, ((1_u32 << width) - 1) as u16);
        let byte = u16::from(run[start + i % plane_len]);
        code |= ((byte >> (i / plane_len * width)) & mask) << shift;
        start += plane_len;
    });
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    #[test]
    fn every_width_and_length_round_trips() {
        for (nbits, len) in (1..=12).flat_map(|nbits| [16, 32, 64].map(|len| (nbits, len))) {
            let codes: [u16; BLOCK] = core::array::from_fn(|i| ((i * 2_654_435_761) % (1 << nbits)) as u16);
            let codes = &codes[..len];
            let mut run = vec![0xA5; len / 8 * nbits as usize];
            pack_run(codes, nbits, &mut run);
            assert_eq!(unpack_run(&run, nbits, len)[..len], *codes, "{nbits}");
            assert!((0..len).map(|i| get_in_run(&run, nbits, len, i)).eq(codes.iter().copied()), "{nbits}");
            let mut one_by_one = vec![0xA5; run.len()];
            for (i, &code) in codes.iter().enumerate() {
                set_in_runs(&mut one_by_one, nbits, len, i, &[code.into()]);
            }
            assert_eq!(one_by_one, run, "{nbits}");
            for (first, count) in [(0, len), (0, 3), (len - 1, 1), (1, len - 1), (7, 5), (5, 0)] {
                let mut replaced = vec![0x5A; run.len()];
                let mut expected = unpack_run(&replaced, nbits, len);
                expected[first..][..count].copy_from_slice(&codes[first..][..count]);
                let codes: Vec<u32> = codes[first..][..count].iter().map(|&code| code.into()).collect();
                replace(&mut replaced, nbits, len, first, &codes);
                assert_eq!(unpack_run(&replaced, nbits, len), expected, "{nbits}, {first}, {count}");
            }
            if let (..=8, 64) = (nbits, len) {
                let bytes: [_; 8] = core::array::from_fn(|i| {
                    u64::from_ne_bytes(core::array::from_fn(|byte| codes[8 * i + byte] as u8))
                });
                let words = pack_words(&bytes, nbits).map(u64::to_ne_bytes);
                assert_eq!(words.as_flattened()[..run.len()], run, "{nbits}");
            }
        }
    }

    #[test]
    fn six_bits_are_laid_out_as_the_text_says() {
        let mut run = [0; 48];
        set_in_runs(&mut run, 6, 64, 37, &[0b10_1101]);
        assert_eq!((run[5], run[32 + 5]), (0b1101_0000, 0b10_0000)); // byte 37 % 32, byte 37 % 16 shifted by 2 * 2
        assert_eq!(run.iter().filter(|&&byte| byte != 0).count(), 2);
    }
}
