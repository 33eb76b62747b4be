//! How 64 codes of one subspace are packed into `8 * nbits` bytes, a *run*.
//!
//! `nbits` is split into planes of 8, 4, 2 and 1 bits, the widest first, from the low bits of a code up: 6
//! bits are a 4-bit plane with bits 0 to 3 and a 2-bit plane with bits 4 and 5; 12 bits are an 8-bit and a
//! 4-bit plane. In a plane of `w` bits, which is `8 w` bytes, token `i` has its bits in byte `i % (8 w)`,
//! shifted left by `w * (i / (8 w))`.
//!
//! So a run is packed without gaps at every width, the place of a token follows from its index, and vector
//! code unpacks a plane with one shift and one mask, without moving bytes across lanes.

use crate::simd::Kernel;

/// Codes in a run, and vectors in a block of codes.
pub const BLOCK: usize = 64;

/// The planes of a code: (bits, shift of the lowest), widest first.
fn planes(nbits: u32) -> impl Iterator<Item = (usize, u32)> {
    [8, 4, 2, 1].into_iter().filter(move |width| nbits & width != 0).scan(0, |shift, width| {
        let plane = (width as usize, *shift);
        *shift += width;
        Some(plane)
    })
}

/// Packs 64 codes, each below `1 << nbits`, into `run` (8 * nbits bytes).
#[inline(always)]
pub(crate) fn pack_run(codes: &[u16; BLOCK], nbits: u32, run: &mut [u8]) {
    let mut rest = run;
    for (width, shift) in planes(nbits) {
        let (plane, tail) = rest.split_at_mut(8 * width);
        rest = tail;
        let mask = ((1_u32 << width) - 1) as u16;
        plane.fill(0);
        for (part, codes) in codes.chunks_exact(8 * width).enumerate() {
            for (byte, code) in plane.iter_mut().zip(codes) {
                *byte |= (((code >> shift) & mask) << (part * width)) as u8;
            }
        }
    }
}

/// Reads the 64 codes of a run.
#[inline(always)]
pub(crate) fn unpack_run(run: &[u8], nbits: u32) -> [u16; BLOCK] {
    let mut codes = [0; BLOCK];
    let mut rest = run;
    for (width, shift) in planes(nbits) {
        let (plane, tail) = rest.split_at(8 * width);
        rest = tail;
        let mask = ((1_u32 << width) - 1) as u16;
        for (part, codes) in codes.chunks_exact_mut(8 * width).enumerate() {
            for (byte, code) in plane.iter().zip(codes) {
                *code |= ((u16::from(*byte) >> (part * width)) & mask) << shift;
            }
        }
    }
    codes
}

/// Writes the code of token `i` of a run and leaves the others unchanged.
pub(crate) fn set_in_run(run: &mut [u8], nbits: u32, i: usize, code: u16) {
    let mut start = 0;
    for (width, shift) in planes(nbits) {
        let mask = ((1_u32 << width) - 1) as u16;
        let part = (i / (8 * width) * width) as u32;
        let byte = &mut run[start + i % (8 * width)];
        *byte = (*byte & !((mask << part) as u8)) | (((code >> shift) & mask) << part) as u8;
        start += 8 * width;
    }
}

/// Writes the codes of tokens `first` and on of a run and leaves the others unchanged.
pub(crate) struct ReplaceInRun<'a> {
    pub run: &'a mut [u8],
    pub nbits: u32,
    pub first: usize,
    pub codes: &'a [u32], // each below `1 << nbits`; first + len <= 64
}

impl Kernel for ReplaceInRun<'_> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        let Self { run, nbits, first, codes } = self;
        let mut all = if codes.len() == BLOCK { [0; BLOCK] } else { unpack_run(run, nbits) };
        for (slot, &code) in all[first..].iter_mut().zip(codes) {
            *slot = code as u16;
        }
        pack_run(&all, nbits, run);
    }
}

/// Reads the code of token `i` of a run.
pub(crate) fn get_in_run(run: &[u8], nbits: u32, i: usize) -> u16 {
    let mut start = 0;
    let mut code = 0;
    for (width, shift) in planes(nbits) {
        let mask = ((1_u32 << width) - 1) as u16;
        let byte = u16::from(run[start + i % (8 * width)]);
        code |= ((byte >> (i / (8 * width) * width)) & mask) << shift;
        start += 8 * width;
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    #[test]
    fn every_width_round_trips() {
        for nbits in 1..=12 {
            let codes: [u16; BLOCK] = core::array::from_fn(|i| ((i * 2_654_435_761) % (1 << nbits)) as u16);
            let mut run = vec![0xA5; 8 * nbits as usize];
            pack_run(&codes, nbits, &mut run);
            assert_eq!(unpack_run(&run, nbits), codes, "{nbits}");
            assert!((0..BLOCK).map(|i| get_in_run(&run, nbits, i)).eq(codes), "{nbits}");
            let mut one_by_one = vec![0xA5; run.len()];
            for (i, &code) in codes.iter().enumerate() {
                set_in_run(&mut one_by_one, nbits, i, code);
            }
            assert_eq!(one_by_one, run, "{nbits}");
            for (first, count) in [(0, 64), (0, 3), (63, 1), (1, 63), (17, 20), (5, 0)] {
                let mut replaced = vec![0x5A; run.len()];
                let before = unpack_run(&replaced, nbits);
                let codes = codes.map(u32::from);
                let codes = &codes[first..first + count];
                ReplaceInRun { run: &mut replaced, nbits, first, codes }.scalar();
                let expected: [u16; BLOCK] = core::array::from_fn(|i| {
                    i.checked_sub(first).and_then(|i| codes.get(i)).map_or(before[i], |&code| code as u16)
                });
                assert_eq!(unpack_run(&replaced, nbits), expected, "{nbits}, {first}, {count}");
            }
        }
    }

    #[test]
    fn six_bits_are_laid_out_as_the_text_says() {
        let mut run = [0; 48];
        set_in_run(&mut run, 6, 37, 0b10_1101);
        assert_eq!((run[5], run[32 + 5]), (0b1101_0000, 0b10_0000)); // byte 37 % 32, byte 37 % 16 shifted by 2 * 2
        assert_eq!(run.iter().filter(|&&byte| byte != 0).count(), 2);
    }
}
