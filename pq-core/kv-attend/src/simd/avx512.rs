//! AVX-512 F, BW, DQ, VL and VBMI.

use core::arch::x86_64::*;

use super::{Kernel, Simd};
use crate::{instructions, op};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

crate::cpu_features!(Avx512 => run);

impl Simd for Avx512 {
    type F32 = __m512;
    type F64 = __m512d;

    const LANES: usize = 16;
    const WIDE: bool = true;

    instructions! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        unsafe fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        unsafe fn load_f16(p: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        unsafe fn store(p: *mut f32, x: __m512) = _mm512_storeu_ps(p, x);
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T1>(p.cast());
        fn zero_f64() -> __m512d = _mm512_setzero_pd();
        unsafe fn splat_f64(p: *const f64) -> __m512d = _mm512_set1_pd(*p);
        unsafe fn load_f64(p: *const f64) -> __m512d = _mm512_loadu_pd(p);
        unsafe fn store_f64(p: *mut f64, x: __m512d) = _mm512_storeu_pd(p, x);
        fn add_f64(a: __m512d, b: __m512d) -> __m512d = _mm512_add_pd(a, b);
        fn mul_add_f64(a: __m512d, b: __m512d, c: __m512d) -> __m512d = _mm512_fmadd_pd(a, b, c);
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))))
    }
    #[inline(always)]
    unsafe fn dot_i8_i16<const N: usize>(self, a: *const i8, b: *const i16) -> __m512 {
        const { assert!(N == 16 || N == 32) };
        op!({
            let sums = if N == 16 {
                let a = _mm256_cvtepi8_epi16(_mm_loadu_si128(a.cast()));
                _mm512_zextsi256_si512(_mm256_madd_epi16(a, _mm256_loadu_si256(b.cast())))
            } else {
                let a = _mm512_cvtepi8_epi16(_mm256_loadu_si256(a.cast()));
                _mm512_madd_epi16(a, _mm512_loadu_si512(b.cast()))
            };
            _mm512_cvtepi32_ps(sums)
        })
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: __m512) {
        op!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)));
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: __m512) {
        op!({
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let upper = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(upper));
        });
    }
    #[inline(always)]
    fn sum4(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        op!({
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            let abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(abcd)));
            let half = _mm256_add_ps(_mm512_castps512_ps256(abcd), upper);
            let sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        })
    }
}
