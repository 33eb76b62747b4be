//! AVX2 with FMA and F16C.

use core::arch::x86_64::*;

use super::{Kernel, Simd};
use crate::{instructions, op};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

crate::cpu_features!(Avx2 => run);

impl Simd for Avx2 {
    type F32 = __m256;
    type F64 = __m256d;

    const LANES: usize = 8;
    const WIDE: bool = false;

    instructions! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        unsafe fn load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        unsafe fn load_f16(p: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        unsafe fn store(p: *mut f32, x: __m256) = _mm256_storeu_ps(p, x);
        fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T1>(p.cast());
        fn zero_f64() -> __m256d = _mm256_setzero_pd();
        unsafe fn splat_f64(p: *const f64) -> __m256d = _mm256_set1_pd(*p);
        unsafe fn load_f64(p: *const f64) -> __m256d = _mm256_loadu_pd(p);
        unsafe fn store_f64(p: *mut f64, x: __m256d) = _mm256_storeu_pd(p, x);
        fn add_f64(a: __m256d, b: __m256d) -> __m256d = _mm256_add_pd(a, b);
        fn mul_add_f64(a: __m256d, b: __m256d, c: __m256d) -> __m256d = _mm256_fmadd_pd(a, b, c);
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        op!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))))
    }
    #[inline(always)]
    unsafe fn dot_i8_i16<const N: usize>(self, a: *const i8, b: *const i16) -> __m256 {
        const { assert!(N == 16 || N == 32) };
        op!({
            let mut sums = _mm256_setzero_si256();
            let mut i = 0;
            while i < N {
                let a = _mm256_cvtepi8_epi16(_mm_loadu_si128(a.add(i).cast()));
                sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, _mm256_loadu_si256(b.add(i).cast())));
                i += 16;
            }
            _mm256_cvtepi32_ps(sums)
        })
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: __m256) {
        op!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)));
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: __m256) {
        op!({
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let upper = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(upper, upper));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
        });
    }
    #[inline(always)]
    fn sum4(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        op!({
            let abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        })
    }
}
