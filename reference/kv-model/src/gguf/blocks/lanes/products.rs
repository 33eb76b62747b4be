//! The inner products of codes with integers of 16 bits, summed in single precision.

use std::array::from_fn;

use super::{Lanes, Portable};

/// The products of an instruction set.
pub(in super::super) trait Products: Lanes {
    /// Sums of products, lane by lane.
    type Sums: Copy;
    /// What sums of products are multiplied by: up to 16 numbers.
    type Factors: Copy;

    /// Sums of nothing.
    fn zero(self) -> Self::Sums;
    /// The products of numbers, up to 16.
    fn factors<const N: usize>(self, a: &[f32; N], b: &[f32; N]) -> Self::Factors;
    /// Adds all factors.
    fn add_factors(self, sums: Self::Sums, factors: Self::Factors) -> Self::Sums;
    /// Adds `codes . x` times factor `i`; the integers are multiplied and added exactly.
    fn add32(
        self,
        sums: Self::Sums,
        codes: Self::Bytes,
        x: &[i16; 32],
        factors: Self::Factors,
        i: usize,
    ) -> Self::Sums;
    /// As `add32`, with a factor for each half of the codes: `2 * i` and `2 * i + 1`.
    fn add16(
        self,
        sums: Self::Sums,
        codes: Self::Bytes,
        x: &[i16; 32],
        factors: Self::Factors,
        i: usize,
    ) -> Self::Sums;
    /// The sum of all lanes.
    fn total(self, sums: [Self::Sums; 4]) -> f32;
}

/// The definition.
impl Products for Portable {
    type Sums = f32;
    type Factors = [f32; 16];

    #[inline(always)]
    fn zero(self) -> f32 {
        0.0
    }

    #[inline(always)]
    fn factors<const N: usize>(self, a: &[f32; N], b: &[f32; N]) -> [f32; 16] {
        let (a, b) = (padded(a), padded(b));
        from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn add_factors(self, sum: f32, factors: [f32; 16]) -> f32 {
        sum + factors.iter().sum::<f32>()
    }

    #[inline(always)]
    fn add32(self, sum: f32, codes: [u64; 4], x: &[i16; 32], factors: [f32; 16], i: usize) -> f32 {
        let mut bytes = [0; 32];
        self.store(codes, &mut bytes);
        sum + factors[i] * dot(&bytes, x) as f32
    }

    #[inline(always)]
    fn add16(self, sum: f32, codes: [u64; 4], x: &[i16; 32], factors: [f32; 16], i: usize) -> f32 {
        let mut bytes = [0; 32];
        self.store(codes, &mut bytes);
        let (low, high) = (dot(&bytes[..16], &x[..16]), dot(&bytes[16..], &x[16..]));
        sum + factors[2 * i] * low as f32 + factors[2 * i + 1] * high as f32
    }

    #[inline(always)]
    fn total(self, [a, b, c, d]: [f32; 4]) -> f32 {
        (a + b) + (c + d)
    }
}

#[inline(always)]
fn dot(codes: &[i8], x: &[i16]) -> i32 {
    codes.iter().zip(x).map(|(&code, &x)| i32::from(code) * i32::from(x)).sum()
}

/// Numbers, and zeros up to 16.
#[inline(always)]
pub(super) fn padded<const N: usize>(x: &[f32; N]) -> [f32; 16] {
    const { assert!(N <= 16) };
    let mut out = [0.0; 16];
    out[..N].copy_from_slice(x);
    out
}

#[cfg(test)]
mod tests {
    use kv_attend::Backend;

    use super::super::{Kernel, run};
    use super::*;

    /// The products of all codes with all integers, by `add32` and `add16` with factors of 1 and 2.
    struct Both(i8, i16);

    impl Kernel for Both {
        type Output = [f32; 2];

        #[inline(always)]
        fn vector<L: Products>(self, l: L) -> [f32; 2] {
            let (codes, x) = (l.load(&[self.0 as u8; 32]), [self.1; 32]);
            let factors = l.factors(&[f32::NAN, f32::NAN, 1.0, 2.0], &[1.0; 4]);
            let zero = l.zero();
            [l.add32(zero, codes, &x, factors, 2), l.add16(zero, codes, &x, factors, 1)]
                .map(|sums| l.total([zero, zero, zero, sums]))
        }
    }

    #[test]
    fn products_of_extreme_integers_are_exact() {
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            for code in [i8::MIN, -1, 0, 1, i8::MAX] {
                for x in [i16::MIN, -i16::MAX, 1, i16::MAX] {
                    let product = f32::from(code) * f32::from(x);
                    assert_eq!(run(backend, Both(code, x)), [32.0 * product, 48.0 * product], "{backend:?}");
                }
            }
        }
    }

    #[test]
    fn factors_are_added() {
        struct Sum([f32; 16]);
        impl Kernel for Sum {
            type Output = [f32; 3];
            #[inline(always)]
            fn vector<L: Products>(self, l: L) -> [f32; 3] {
                let ([one, ..], [eight, _]) = (self.0.as_chunks::<1>().0, self.0.as_chunks::<8>().0) else {
                    return [f32::NAN; 3];
                };
                let factors = [l.factors(one, one), l.factors(eight, eight), l.factors(&self.0, &self.0)];
                factors
                    .map(|factors| l.total([l.add_factors(l.zero(), factors), l.zero(), l.zero(), l.zero()]))
            }
        }
        let x = from_fn(|i| i as f32 + 1.0);
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            assert_eq!(run(backend, Sum(x)), [1.0, 204.0, 1496.0], "{backend:?}");
        }
    }
}
