//! Quantized blocks as codes of 8 bits in groups of one scale and one offset, which all quantized types are.

use std::array::from_fn;
use std::marker::PhantomData;

use kv_attend::Backend;
use kv_attend::simd::{Kernel, Run, Simd};

/// Quantized numbers: `code * scale + offset`, in which the product is exact in single precision.
#[derive(Clone, Debug, Default)]
pub struct Codes {
    words: Vec<Word32>, // (n / 32,)
    groups: Vec<Group>,
}

/// The scale and the offset of neighbouring codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// What a code is multiplied by.
    pub scale: f32,
    /// What is added to the product: -0, which changes no number, in types that have no offset.
    pub offset: f32,
}

impl Group {
    /// A group without an offset.
    pub(super) const fn scaled(scale: f32) -> Self {
        Self { scale, offset: -0.0 }
    }
}

impl Codes {
    /// Codes (n,).
    #[must_use]
    pub fn codes(&self) -> &[i8] {
        bytemuck::cast_slice(self.words.as_flattened())
    }

    /// One for each 16 or 32 neighbouring codes.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The numbers: as many as there are codes, and `out` has.
    pub(super) fn decode(&self, out: &mut [f32]) {
        let (codes, groups) = (self.codes(), self.groups());
        if let Some(group) = codes.len().checked_div(groups.len()) {
            Backend::detect().run(Scale { codes, groups, group, out });
        }
    }

    /// Replaces all by those of whole blocks.
    pub(super) fn unpack<
        B: Block<SIZE, N, GROUPS>,
        const SIZE: usize,
        const N: usize,
        const GROUPS: usize,
    >(
        &mut self,
        bytes: &[u8],
    ) {
        let n = bytes.len() / SIZE;
        self.words.resize(n * N, [0; 4]);
        self.groups.resize(n * GROUPS, Group::scaled(0.0));
        let (words, groups) = (self.words.as_chunks_mut().0, self.groups.as_chunks_mut().0);
        let kind = PhantomData::<B>;
        Backend::detect().run(Unpack { kind, blocks: bytes.as_chunks().0, words, groups });
    }
}

/// A quantized type: blocks of `SIZE` bytes that hold `32 * N` elements in `GROUPS` groups.
pub(super) trait Block<const SIZE: usize, const N: usize, const GROUPS: usize> {
    /// The codes and groups of a block. It must be `#[inline(always)]`, as must what it calls, so that it is compiled
    /// for each instruction set.
    fn unpack(block: &[u8; SIZE]) -> ([Word32; N], [Group; GROUPS]);
}

/// [`Codes::unpack`].
struct Unpack<'a, B, const SIZE: usize, const N: usize, const GROUPS: usize> {
    kind: PhantomData<B>,
    blocks: &'a [[u8; SIZE]],
    words: &'a mut [[Word32; N]],
    groups: &'a mut [[Group; GROUPS]],
}

impl<B, const SIZE: usize, const N: usize, const GROUPS: usize> Kernel for Unpack<'_, B, SIZE, N, GROUPS>
where
    B: Block<SIZE, N, GROUPS>,
{
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        for (block, (words, groups)) in self.blocks.iter().zip(self.words.iter_mut().zip(self.groups)) {
            let (codes, scales) = B::unpack(block);
            (*words, *groups) = (codes.map(|codes| codes.map(u64::to_le)), scales);
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.scalar();
    }
}

/// [`Codes::decode`].
struct Scale<'a> {
    codes: &'a [i8],
    groups: &'a [Group],
    group: usize,
    out: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let groups = self.out.chunks_exact_mut(self.group).zip(self.codes.chunks_exact(self.group));
        for ((out, codes), Group { scale, offset }) in groups.zip(self.groups) {
            out.iter_mut().zip(codes).for_each(|(out, &code)| *out = f32::from(code) * scale + offset);
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.scalar();
    }
}

/// 32 codes, eight in a word, the first one lowest: what a register of AVX2 holds. The compiler makes vectors of the
/// four words, and at worst words of eight codes, where it may leave loops over bytes in memory as they are.
pub(super) type Word32 = [u64; 4];

/// `32 * i` bytes on.
#[inline(always)]
pub(super) fn bytes32(bytes: &[u8], i: usize) -> Word32 {
    let (words, _) = bytes[32 * i..].as_chunks();
    from_fn(|j| u64::from_le_bytes(words[j]))
}

/// The low nibbles of 16 bytes, then the high ones.
#[inline(always)]
pub(super) fn nibbles16(bytes: &[u8]) -> Word32 {
    let (words, _) = bytes.as_chunks();
    let [a, b] = [words[0], words[1]].map(u64::from_le_bytes);
    [a, b, a >> 4, b >> 4].map(|codes| codes & every(15))
}

/// A word whose bytes are all this one.
pub(super) const fn every(byte: u8) -> u64 {
    byte as u64 * 0x0101_0101_0101_0101
}

/// `BITS` bits of each code, from bit `at` on, moved to bit `to`.
#[inline(always)]
pub(super) fn part<const BITS: u32>(codes: Word32, at: usize, to: usize) -> Word32 {
    codes.map(|codes| (codes >> at & every((1 << BITS) - 1)) << to)
}

/// `a | b`.
#[inline(always)]
pub(super) fn or(a: Word32, b: Word32) -> Word32 {
    from_fn(|i| a[i] | b[i])
}

/// Subtracts `zero` from codes below 128.
#[inline(always)]
pub(super) fn less(codes: Word32, zero: u8) -> Word32 {
    // The top bit of each code keeps its difference from borrowing of the next.
    codes.map(|codes| ((codes | every(0x80)) - every(zero)) ^ every(0x80))
}

/// The entries of a table that nibbles ask for.
#[inline(always)]
pub(super) fn of_table(nibbles: Word32, table: &[i8; 16]) -> Word32 {
    nibbles
        .map(|codes| u64::from_le_bytes(codes.to_le_bytes().map(|code| table[usize::from(code & 15)] as u8)))
}

/// 32 bits, each as bit 4 of a code.
#[inline(always)]
pub(super) fn fifth_bits(bytes: &[u8]) -> Word32 {
    const OF_BYTE: [u64; 256] = {
        let mut of_byte = [0; 256];
        let mut i = 0;
        while i < 256 * 8 {
            let (byte, bit) = (i / 8, i % 8);
            of_byte[byte] |= ((byte >> bit & 1) as u64) << (8 * bit + 4);
            i += 1;
        }
        of_byte
    };
    from_fn(|i| OF_BYTE[usize::from(bytes[i])])
}

/// The half-precision number at the start of `bytes`.
#[inline(always)]
pub(super) fn half(bytes: &[u8]) -> f32 {
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
    use half::f16;

    use super::*;

    #[test]
    fn halves_are_exact() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (half(&bits.to_le_bytes()), f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{bits:04x}");
        }
    }

    /// Codes, groups and numbers, by every backend.
    #[test]
    fn all_instructions_give_the_same_numbers() {
        struct Three;
        impl Block<3, 1, 1> for Three {
            #[inline(always)]
            fn unpack(block: &[u8; 3]) -> ([Word32; 1], [Group; 1]) {
                let codes = [every(block[0]), every(block[1]), 0, 1];
                ([codes], [Group { scale: 0.375, offset: f32::from(block[2]) }])
            }
        }
        for n in [0, 1, 15, 16, 17, 40] {
            let bytes: Vec<u8> = (0..3 * n).map(|i| (i * 37) as u8).collect();
            let run = |backend: Backend| {
                let (mut words, mut groups) = (vec![[[0; 4]]; n], vec![[Group::scaled(0.0)]; n]);
                let blocks = bytes.as_chunks().0;
                let kind = PhantomData::<Three>;
                backend.run(Unpack { kind, blocks, words: &mut words, groups: &mut groups });
                let codes = Codes { words: words.into_flattened(), groups: groups.into_flattened() };
                let (codes, groups) = (codes.codes(), codes.groups());
                let mut out = vec![f32::NAN; codes.len()];
                backend.run(Scale { codes, groups, group: 32, out: &mut out });
                (codes.to_vec(), groups.to_vec(), out)
            };
            let expected = run(Backend::Scalar);
            assert!(expected.2.iter().all(|x| x.is_finite()));
            for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                assert_eq!(run(backend), expected, "{backend:?}");
            }
        }
    }
}
