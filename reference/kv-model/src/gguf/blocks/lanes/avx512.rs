//! AVX-512: bytes as in AVX2, whose products with 32 integers are one instruction.

use std::arch::x86_64::*;

use super::avx2::{HasAvx2, op};
use super::products::padded;
use super::{Kernel, Products};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

kv_attend::cpu_features!(Avx512 => run);

impl HasAvx2 for Avx512 {}

impl Products for Avx512 {
    type Sums = __m512;
    type Factors = __m512;

    #[inline(always)]
    fn zero(self) -> __m512 {
        op!(_mm512_setzero_ps())
    }
    #[inline(always)]
    fn factors<const N: usize>(self, a: &[f32; N], b: &[f32; N]) -> __m512 {
        let (a, b) = (padded(a), padded(b));
        op!(_mm512_mul_ps(_mm512_loadu_ps(a.as_ptr()), _mm512_loadu_ps(b.as_ptr())))
    }
    #[inline(always)]
    fn add_factors(self, sums: __m512, factors: __m512) -> __m512 {
        op!(_mm512_add_ps(sums, factors))
    }
    #[inline(always)]
    fn add32(self, sums: __m512, codes: __m256i, x: &[i16; 32], factors: __m512, i: usize) -> __m512 {
        op!({
            let factor = _mm512_permutexvar_ps(_mm512_set1_epi32(i as i32), factors);
            _mm512_fmadd_ps(products(codes, x), factor, sums)
        })
    }
    #[inline(always)]
    fn add16(self, sums: __m512, codes: __m256i, x: &[i16; 32], factors: __m512, i: usize) -> __m512 {
        op!({
            let (first, second) = (_mm256_set1_epi32(2 * i as i32), _mm256_set1_epi32(2 * i as i32 + 1));
            let of_halves = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            _mm512_fmadd_ps(products(codes, x), _mm512_permutexvar_ps(of_halves, factors), sums)
        })
    }
    #[inline(always)]
    fn total(self, [a, b, c, d]: [__m512; 4]) -> f32 {
        op!(_mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d))))
    }
}

/// The products of codes, neighbours added up.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn products(codes: __m256i, x: &[i16; 32]) -> __m512 {
    op!(_mm512_cvtepi32_ps(_mm512_madd_epi16(
        _mm512_cvtepi8_epi16(codes),
        _mm512_loadu_si512(x.as_ptr().cast())
    )))
}
