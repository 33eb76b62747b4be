//! The inner products of one vector with rows of quantized blocks, which are decoded in registers.

use kv_attend::Backend;
use kv_attend::simd::{Kernel, Run, Simd, dot};
use kv_model::{CodedRows, Codes, Group};

use super::dot_rows::dot_registers;

/// Maximum numbers in a step of the kernel: four registers of 16.
const STEP: usize = 64;

/// `out[i] = rows[first + i] . x`, with the bits that [`dot_rows`](super::dot_rows::dot_rows) gives for the numbers of
/// the rows: a code times its scale is exact, so a fused multiply-add decodes it.
///
/// # Cost
/// One pass over the blocks. Floor: their bytes from memory. Eight numbers take a load, a conversion and two
/// multiply-adds of AVX2, next to their share in unpacking the codes.
///
/// # Panics
/// When there are not so many rows, or they are not as long as `x`.
pub(crate) fn dot_codes(rows: CodedRows<'_>, first: usize, x: &[f32], out: &mut [f32]) {
    let backend = Backend::detect();
    let mut codes = Codes::default();
    for (i, out) in out.iter_mut().enumerate() {
        rows.unpack(first + i, &mut codes);
        let (codes, groups) = (codes.codes(), codes.groups());
        *out = match x.len() / groups.len() {
            16 => backend.run(DotCodes::<16>::new(codes, groups, x)),
            _ => backend.run(DotCodes::<32>::new(codes, groups, x)),
        };
    }
}

/// The inner product of `x` with a row.
struct DotCodes<'a, const GROUP: usize> {
    codes: &'a [i8],
    groups: &'a [Group],
    x: &'a [f32],
}

impl<'a, const GROUP: usize> DotCodes<'a, GROUP> {
    fn new(codes: &'a [i8], groups: &'a [Group], x: &'a [f32]) -> Self {
        assert!(codes.len() == x.len() && GROUP * groups.len() == x.len());
        Self { codes, groups, x }
    }

    /// Decodes as many numbers as `out` takes, from the first of a group on.
    fn decode(&self, first: usize, out: &mut [f32]) {
        let groups = self.codes[first..].chunks(GROUP).zip(&self.groups[first / GROUP..]);
        for (out, (codes, Group { scale, offset })) in out.chunks_mut(GROUP).zip(groups) {
            out.iter_mut().zip(codes).for_each(|(out, &code)| *out = f32::from(code) * scale + offset);
        }
    }
}

impl<const GROUP: usize> Kernel for DotCodes<'_, GROUP> {
    type Output = f32;

    fn scalar(self) -> f32 {
        let mut row = vec![0.0; self.x.len()];
        self.decode(0, &mut row);
        dot(self.x, &row)
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f32 {
        const { assert!(GROUP.is_multiple_of(S::LANES) && 4 * S::LANES <= STEP) };
        let (x, tail) = self.x.split_at(self.x.len() - self.x.len() % (4 * S::LANES));
        let sum = dot_registers(s, x, |at| {
            // SAFETY: `new` has found as many codes as numbers in `x`, and a group for each `GROUP` of them; `at`
            // is a register's first number in `x`, so all of its numbers are in one group.
            unsafe {
                let Group { scale, offset } = *self.groups.get_unchecked(at / GROUP);
                s.mul_add(s.load_i8(self.codes.as_ptr().add(at)), s.splat(scale), s.splat(offset))
            }
        });
        let mut row = [0.0; STEP];
        self.decode(x.len(), &mut row[..tail.len()]);
        sum + dot(tail, &row[..tail.len()])
    }
}
