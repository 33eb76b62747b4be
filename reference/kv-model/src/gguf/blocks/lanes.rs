//! Operations on 32 bytes at a time, over which the types are unpacked and multiplied: portable, of AVX2 and
//! of AVX-512.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod products;

use std::array::from_fn;

use kv_attend::Backend;

pub(super) use products::Products;

/// An operation over [`Products`]. `vector` must be `#[inline(always)]`, so that it is compiled with the
/// features of the function that it is inlined into.
pub(super) trait Kernel {
    type Output;

    fn vector<L: Products>(self, lanes: L) -> Self::Output;
}

/// Runs a kernel on the lanes of a backend.
pub(super) fn run<K: Kernel>(backend: Backend, kernel: K) -> K::Output {
    match backend {
        #[cfg(target_arch = "x86_64")]
        Backend::Avx512 if backend.is_available() => avx512::run(kernel),
        #[cfg(target_arch = "x86_64")]
        Backend::Avx2 if backend.is_available() => avx2::run(kernel),
        _ => kernel.vector(Portable),
    }
}

/// The operations of an instruction set. A value proves that the CPU supports it.
pub(super) trait Lanes: Copy {
    /// 32 bytes.
    type Bytes: Copy;

    fn load(self, bytes: &[u8; 32]) -> Self::Bytes;
    fn store(self, x: Self::Bytes, out: &mut [i8; 32]);
    /// Prefetches the cache line at `p`, which need not be readable.
    fn prefetch(self, p: *const u8);
    /// Two numbers in half precision.
    fn halves(self, bytes: &[u8; 4]) -> [f32; 2];
    /// Integers times a factor: 8 or 16.
    fn scaled<const N: usize>(self, x: [i8; N], factor: f32) -> [f32; N];
    /// The low nibbles of 16 bytes, then the high ones.
    fn nibbles(self, bytes: &[u8; 16]) -> Self::Bytes;
    /// Bytes of 16 where a bit is set, else of 0, from the lowest bit on.
    fn sixteens(self, bits: u32) -> Self::Bytes;
    /// `BITS` bits of each byte, from bit `at` on, moved to bit `to`.
    fn part<const BITS: u32>(self, x: Self::Bytes, at: u32, to: u32) -> Self::Bytes;
    /// `a | b`.
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Subtracts `zero` from bytes below 128.
    fn less(self, x: Self::Bytes, zero: u8) -> Self::Bytes;
    /// The entries of a table that bytes below 16 ask for.
    fn of_table(self, x: Self::Bytes, table: &[i8; 16]) -> Self::Bytes;
}

/// The definition, on words of eight bytes, the first one lowest.
#[derive(Clone, Copy)]
struct Portable;

/// A word whose bytes are all this one.
const fn every(byte: u8) -> u64 {
    byte as u64 * 0x0101_0101_0101_0101
}

impl Lanes for Portable {
    type Bytes = [u64; 4];

    #[inline(always)]
    fn load(self, bytes: &[u8; 32]) -> [u64; 4] {
        let (words, _) = bytes.as_chunks();
        from_fn(|i| u64::from_le_bytes(words[i]))
    }

    #[inline(always)]
    fn store(self, x: [u64; 4], out: &mut [i8; 32]) {
        let words = out.as_chunks_mut().0.iter_mut();
        words.zip(x).for_each(|(out, word)| *out = word.to_le_bytes().map(|byte| byte as i8));
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn halves(self, &[a, b, c, d]: &[u8; 4]) -> [f32; 2] {
        [[a, b], [c, d]].map(|bytes| {
            let bits = u32::from(u16::from_le_bytes(bytes));
            // The exponent's bias differs by 112. The product is exact, of subnormal numbers, too.
            let magnitude = match bits & 0x7c00 {
                0x7c00 => f32::from_bits(0x7f80_0000 | (bits & 0x3ff) << 13),
                _ => f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23),
            };
            f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
        })
    }

    #[inline(always)]
    fn scaled<const N: usize>(self, x: [i8; N], factor: f32) -> [f32; N] {
        x.map(|x| factor * f32::from(x))
    }

    #[inline(always)]
    fn nibbles(self, bytes: &[u8; 16]) -> [u64; 4] {
        let (words, _) = bytes.as_chunks();
        let [a, b] = [words[0], words[1]].map(u64::from_le_bytes);
        [a, b, a >> 4, b >> 4].map(|codes| codes & every(15))
    }

    #[inline(always)]
    fn sixteens(self, bits: u32) -> [u64; 4] {
        // A byte in each place leaves its bit there; adding 127 carries that to the top.
        bits.to_le_bytes().map(|byte| {
            let bits = every(byte) & 0x8040_2010_0804_0201;
            (bits + every(0x7f)) >> 3 & every(16)
        })
    }

    #[inline(always)]
    fn part<const BITS: u32>(self, x: [u64; 4], at: u32, to: u32) -> [u64; 4] {
        x.map(|word| (word >> at & every((1 << BITS) - 1)) << to)
    }

    #[inline(always)]
    fn or(self, a: [u64; 4], b: [u64; 4]) -> [u64; 4] {
        from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn less(self, x: [u64; 4], zero: u8) -> [u64; 4] {
        // No byte carries into the next: it is below 128, and so is what is added to it.
        x.map(|word| (word + every(0x80 - zero)) ^ every(0x80))
    }

    #[inline(always)]
    fn of_table(self, x: [u64; 4], table: &[i8; 16]) -> [u64; 4] {
        x.map(|word| u64::from_le_bytes(word.to_le_bytes().map(|i| table[usize::from(i & 15)] as u8)))
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn available() -> impl Iterator<Item = Backend> {
        Backend::ALL.into_iter().filter(|backend| backend.is_available())
    }

    #[test]
    fn halves_are_exact() {
        struct Halves([u8; 4]);
        impl Kernel for Halves {
            type Output = [f32; 2];
            #[inline(always)]
            fn vector<L: Products>(self, lanes: L) -> [f32; 2] {
                lanes.halves(&self.0)
            }
        }
        for backend in available() {
            for bits in 0..=u16::MAX {
                let ([a, b], [c, d]) = (bits.to_le_bytes(), (!bits).to_le_bytes());
                let numbers = run(backend, Halves([a, b, c, d])).into_iter().zip([bits, !bits]);
                for (got, expected) in numbers.map(|(got, bits)| (got, f16::from_bits(bits).to_f32())) {
                    let equal = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                    assert!(equal, "{backend:?}, {bits:04x}");
                }
            }
        }
    }

    /// Every operation on every byte in every place, next to its description.
    #[test]
    fn operations_follow_their_descriptions() {
        const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
        struct All([u8; 32]);
        impl Kernel for All {
            type Output = [[i8; 32]; 8];
            #[inline(always)]
            fn vector<L: Products>(self, l: L) -> Self::Output {
                let x = l.load(&self.0);
                let (low, high) = (l.part::<4>(x, 0, 0), l.part::<3>(x, 5, 4));
                let [half, ..] = self.0.as_chunks().0 else { return [[0; 32]; 8] };
                let [word, ..] = self.0.as_chunks().0 else { return [[0; 32]; 8] };
                let nibbles = l.nibbles(half);
                let sixteens = l.sixteens(u32::from_le_bytes(*word));
                let (less, of_table) = (l.less(l.part::<7>(x, 1, 0), 16), l.of_table(low, &TABLE));
                let results = [x, low, high, nibbles, sixteens, l.or(low, high), less, of_table];
                results.map(|x| {
                    let mut out = [0; 32];
                    l.store(x, &mut out);
                    out
                })
            }
        }
        for first in 0..=u8::MAX {
            let bytes: [u8; 32] = from_fn(|i| first.wrapping_add((i * 37) as u8));
            let nibble = |i: usize| bytes[i % 16] >> (i / 16 * 4) & 15;
            let expected = [
                bytes,
                bytes.map(|x| x & 15),
                bytes.map(|x| x >> 5 << 4),
                from_fn(nibble),
                from_fn(|i| (bytes[i / 8] >> (i % 8) & 1) * 16),
                bytes.map(|x| x & 15 | x >> 5 << 4),
                bytes.map(|x| (x >> 1).wrapping_sub(16)),
                bytes.map(|x| TABLE[usize::from(x & 15)] as u8),
            ];
            let expected = expected.map(|bytes| bytes.map(|byte| byte as i8));
            for backend in available() {
                assert_eq!(run(backend, All(bytes)), expected, "{backend:?}");
            }
        }
    }
}
