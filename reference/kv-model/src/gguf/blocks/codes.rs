//! Quantized blocks as codes of 8 bits in groups of one scale and one offset, which all quantized types are.

use std::marker::PhantomData;

use kv_attend::Backend;
use kv_attend::simd::{self, Run, Simd};

use super::lanes::{self, Lanes, Products};

/// Quantized numbers: `code * scale + offset`, in which the product is exact in single precision.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Codes {
    codes: Vec<[i8; 32]>, // (n / 32,)
    scales: Vec<f32>,     // of 16 or 32 neighbouring codes each
    offsets: Vec<f32>,    // as many, or none in types without offsets
}

impl Codes {
    /// The numbers: as many as there are codes, and `out` has.
    pub(super) fn decode(&self, out: &mut [f32]) {
        let Self { codes, scales, offsets } = self;
        if let Some(group) = (32 * codes.len()).checked_div(scales.len()) {
            Backend::detect().run(Decode { codes: codes.as_flattened(), scales, offsets, group, out });
        }
    }

    /// Replaces all by those of whole blocks.
    pub(super) fn unpack<B, const SIZE: usize, const N: usize, const GROUPS: usize>(
        &mut self,
        backend: Backend,
        bytes: &[u8],
    ) where
        B: Block<SIZE, N, GROUPS>,
    {
        let Self { codes, scales, offsets } = self;
        let n = bytes.len() / SIZE;
        codes.resize(n * N, [0; 32]);
        scales.resize(n * GROUPS, 0.0);
        offsets.resize(if B::HAS_OFFSETS { n * GROUPS } else { 0 }, 0.0);
        let (codes, scales) = (codes.as_chunks_mut().0, scales.as_chunks_mut().0);
        let (blocks, offsets, kind) = (bytes.as_chunks().0, offsets.as_chunks_mut().0, PhantomData::<B>);
        lanes::run(backend, Unpack { kind, blocks, codes, scales, offsets });
    }
}

/// [`Codes::unpack`] of a type.
pub(super) type UnpackBlocks = fn(&mut Codes, Backend, &[u8]);

/// A quantized type: blocks of `SIZE` bytes that hold `32 * N` elements in `GROUPS` groups.
pub(super) trait Block<const SIZE: usize, const N: usize, const GROUPS: usize> {
    /// Whether groups have offsets.
    const HAS_OFFSETS: bool = false;

    /// What a block holds. It must be `#[inline(always)]`, as must what it calls, so that it is compiled for
    /// each instruction set.
    fn unpack<L: Lanes>(l: L, block: &[u8; SIZE]) -> Unpacked<L::Bytes, N, GROUPS>;
}

/// Codes, scales and offsets of a block.
pub(super) struct Unpacked<T, const N: usize, const GROUPS: usize> {
    pub codes: [T; N],
    pub scales: [f32; GROUPS],
    pub offsets: [f32; GROUPS], // unused without `HAS_OFFSETS`
}

impl<T, const N: usize, const GROUPS: usize> Unpacked<T, N, GROUPS> {
    /// A block without offsets.
    #[inline(always)]
    pub fn scaled(codes: [T; N], scales: [f32; GROUPS]) -> Self {
        Self { codes, scales, offsets: [0.0; GROUPS] }
    }
}

/// Asks memory for what is 8192 bytes behind a block, which need not exist: while codes are computed with, it
/// would be idle. That is in another page, at whose start the CPU's own prefetching ends.
#[inline(always)]
pub(super) fn prefetch_behind<L: Lanes, const SIZE: usize>(l: L, block: &[u8; SIZE]) {
    for line in (0..SIZE).step_by(64) {
        l.prefetch(block.as_ptr().wrapping_add(8192 + line));
    }
}

/// [`Codes::unpack`].
struct Unpack<'a, B, const SIZE: usize, const N: usize, const GROUPS: usize> {
    kind: PhantomData<B>,
    blocks: &'a [[u8; SIZE]],
    codes: &'a mut [[[i8; 32]; N]],
    scales: &'a mut [[f32; GROUPS]],
    offsets: &'a mut [[f32; GROUPS]],
}

impl<B, const SIZE: usize, const N: usize, const GROUPS: usize> lanes::Kernel
    for Unpack<'_, B, SIZE, N, GROUPS>
where
    B: Block<SIZE, N, GROUPS>,
{
    type Output = ();

    #[inline(always)]
    fn vector<L: Products>(self, l: L) {
        let out = self.codes.iter_mut().zip(self.scales);
        for (i, (block, (codes, scales))) in self.blocks.iter().zip(out).enumerate() {
            prefetch_behind(l, block);
            let unpacked = B::unpack(l, block);
            for (out, codes) in codes.iter_mut().zip(unpacked.codes) {
                l.store(codes, out);
            }
            *scales = unpacked.scales;
            if B::HAS_OFFSETS {
                self.offsets[i] = unpacked.offsets;
            }
        }
    }
}

/// [`Codes::decode`].
struct Decode<'a> {
    codes: &'a [i8],
    scales: &'a [f32],
    offsets: &'a [f32],
    group: usize,
    out: &'a mut [f32],
}

impl simd::Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        // -0 changes no number.
        let offsets = self.offsets.iter().copied().chain(std::iter::repeat(-0.0));
        let groups = self.out.chunks_exact_mut(self.group).zip(self.codes.chunks_exact(self.group));
        for ((out, codes), (scale, offset)) in groups.zip(self.scales.iter().zip(offsets)) {
            out.iter_mut().zip(codes).for_each(|(out, &code)| *out = f32::from(code) * scale + offset);
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.scalar();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers, by every backend.
    #[test]
    fn all_instructions_give_the_same_numbers() {
        for (n, group) in [(0, 32), (32, 32), (64, 16), (160, 32)] {
            let codes: Vec<i8> = (0..n).map(|i| (i * 37) as i8).collect();
            let scales: Vec<f32> = (0..n / group).map(|i| 0.375 * i as f32).collect();
            for offsets in [vec![], scales.iter().map(|x| 1.0 - x).collect::<Vec<_>>()] {
                let run = |backend: Backend| {
                    let mut out = vec![f32::NAN; n];
                    let (codes, scales, offsets) = (&codes, &scales, &offsets);
                    backend.run(Decode { codes, scales, offsets, group, out: &mut out });
                    out
                };
                let expected = run(Backend::Scalar);
                assert!(expected.iter().all(|x| x.is_finite()));
                for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                    assert_eq!(run(backend), expected, "{backend:?}");
                }
            }
        }
    }
}
