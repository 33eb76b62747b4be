//! The inner products of a vector with rows of blocks, whose codes are multiplied in the registers that they
//! are unpacked into.

use std::marker::PhantomData;

use kv_attend::Backend;

use super::codes::{Block, Unpacked, prefetch_behind};
use super::fixed_point::FixedPoint;
use super::lanes::{self, Products};

/// `out[i] = rows[i] . x`, of rows as long as `x`, as many as both have.
pub(crate) type DotBlocks = fn(Backend, &[u8], &FixedPoint, &mut [f32]);

/// [`DotBlocks`] of a type.
pub(super) fn dot_blocks<B, const SIZE: usize, const N: usize, const GROUPS: usize>(
    backend: Backend,
    rows: &[u8],
    x: &FixedPoint,
    out: &mut [f32],
) where
    B: Block<SIZE, N, GROUPS>,
{
    let (integers, steps, sums) = (x.integers.as_chunks().0, x.steps.as_chunks().0, x.sums.as_chunks().0);
    let (rows, kind) = (rows.as_chunks().0, PhantomData::<B>);
    lanes::run(backend, Dots { kind, rows, integers, steps, sums, out });
}

/// [`dot_blocks`], with the parts of the vector that blocks are multiplied with.
struct Dots<'a, B, const SIZE: usize, const N: usize, const GROUPS: usize> {
    kind: PhantomData<B>,
    rows: &'a [[u8; SIZE]],
    integers: &'a [[[i16; 32]; N]],
    steps: &'a [[f32; GROUPS]],
    sums: &'a [[f32; GROUPS]],
    out: &'a mut [f32],
}

impl<B, const SIZE: usize, const N: usize, const GROUPS: usize> lanes::Kernel for Dots<'_, B, SIZE, N, GROUPS>
where
    B: Block<SIZE, N, GROUPS>,
{
    type Output = ();

    #[inline(always)]
    fn vector<L: Products>(self, l: L) {
        let Self { rows, integers, steps, sums, out, .. } = self;
        for (out, row) in out.iter_mut().zip(rows.chunks_exact(integers.len())) {
            // Sums take turns, so that additions need not wait for each other: from register to register of a
            // block, or from block to block of one register.
            let mut totals = [l.zero(); 4];
            for (((block, integers), steps), sums) in row.iter().zip(integers).zip(steps).zip(sums) {
                prefetch_behind(l, block);
                let Unpacked { codes, scales, offsets } = B::unpack(l, block);
                let factors = l.factors(&scales, steps);
                for (i, (&codes, x)) in codes.iter().zip(integers).enumerate() {
                    let total = &mut totals[i % 4];
                    *total = match GROUPS / N {
                        1 => l.add32(*total, codes, x, factors, i),
                        _ => l.add16(*total, codes, x, factors, i),
                    };
                }
                if B::HAS_OFFSETS {
                    totals[3] = l.add_factors(totals[3], l.factors(&offsets, sums));
                }
                if N == 1 {
                    let [a, b, c, d] = totals;
                    totals = [b, c, d, a];
                }
            }
            *out = l.total(totals);
        }
    }
}
