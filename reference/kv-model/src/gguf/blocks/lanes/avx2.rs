//! AVX2: 32 bytes in a register.

use std::arch::asm;
use std::arch::x86_64::*;

use super::products::padded;
use super::{Kernel, Lanes, Products};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

kv_attend::cpu_features!(Avx2 => run);

/// A set that includes AVX2, FMA and F16C. A value proves that the CPU supports them.
pub(super) trait HasAvx2: Copy {}

impl HasAvx2 for Avx2 {}

/// Evaluates an expression of the set's intrinsics.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of a set exists only where the CPU has its features; what pointers read or write
        // is a reference's array of that size.
        unsafe { $e }
    }};
}
pub(super) use op;

impl<T: HasAvx2> Lanes for T {
    type Bytes = __m256i;

    #[inline(always)]
    fn load(self, bytes: &[u8; 32]) -> __m256i {
        op!(_mm256_loadu_si256(bytes.as_ptr().cast()))
    }
    #[inline(always)]
    fn store(self, x: __m256i, out: &mut [i8; 32]) {
        op!(_mm256_storeu_si256(out.as_mut_ptr().cast(), x));
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    fn halves(self, bytes: &[u8; 4]) -> [f32; 2] {
        op!({
            // From the intrinsic of a load, the compiler makes an insertion of one half into a register that
            // holds something else, such as sums, for which it then waits.
            let halves: __m128i;
            asm!(
                "vmovd {}, dword ptr [{}]", out(xmm_reg) halves, in(reg) bytes,
                options(pure, readonly, nostack, preserves_flags)
            );
            let both = _mm_cvtph_ps(halves);
            [_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both))]
        })
    }
    #[inline(always)]
    fn scaled<const N: usize>(self, x: [i8; N], factor: f32) -> [f32; N] {
        let mut out = [0.0; N];
        for (x, out) in x.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
            op!({
                let x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()));
                let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(factor));
                _mm256_storeu_ps(out.as_mut_ptr(), scaled);
            });
        }
        out
    }
    #[inline(always)]
    fn nibbles(self, bytes: &[u8; 16]) -> __m256i {
        op!({
            let low = _mm_loadu_si128(bytes.as_ptr().cast());
            let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
            _mm256_and_si256(both, _mm256_set1_epi8(15))
        })
    }
    #[inline(always)]
    fn sixteens(self, bits: u32) -> __m256i {
        op!({
            // Each byte eight times, of which each keeps its bit.
            let byte_of =
                _mm256_set_epi64x(0x0303_0303_0303_0303, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0);
            let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), byte_of);
            let bit_of = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
            _mm256_and_si256(set, _mm256_set1_epi8(16))
        })
    }
    #[inline(always)]
    fn part<const BITS: u32>(self, x: __m256i, at: u32, to: u32) -> __m256i {
        op!({
            let down = _mm256_srl_epi16(x, _mm_cvtsi32_si128(at.saturating_sub(to) as i32));
            let moved = _mm256_sll_epi16(down, _mm_cvtsi32_si128(to.saturating_sub(at) as i32));
            _mm256_and_si256(moved, _mm256_set1_epi8((((1_u32 << BITS) - 1) << to) as i8))
        })
    }
    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn less(self, x: __m256i, zero: u8) -> __m256i {
        op!(_mm256_sub_epi8(x, _mm256_set1_epi8(zero as i8)))
    }
    #[inline(always)]
    fn of_table(self, x: __m256i, table: &[i8; 16]) -> __m256i {
        op!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, x)
        })
    }
}

impl Products for Avx2 {
    type Sums = __m256;
    type Factors = [__m256; 2];

    #[inline(always)]
    fn zero(self) -> __m256 {
        op!(_mm256_setzero_ps())
    }
    #[inline(always)]
    fn factors<const N: usize>(self, a: &[f32; N], b: &[f32; N]) -> [__m256; 2] {
        let (a, b) = (padded(a), padded(b));
        [0, 8].map(|i| {
            op!(_mm256_mul_ps(_mm256_loadu_ps(a.as_ptr().add(i)), _mm256_loadu_ps(b.as_ptr().add(i))))
        })
    }
    #[inline(always)]
    fn add_factors(self, sums: __m256, factors: [__m256; 2]) -> __m256 {
        op!(_mm256_add_ps(sums, _mm256_add_ps(factors[0], factors[1])))
    }
    #[inline(always)]
    fn add32(self, sums: __m256, codes: __m256i, x: &[i16; 32], factors: [__m256; 2], i: usize) -> __m256 {
        op!({
            let [a, b] = products(codes, x);
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(a, b)), factor(factors, i), sums)
        })
    }
    #[inline(always)]
    fn add16(self, sums: __m256, codes: __m256i, x: &[i16; 32], factors: [__m256; 2], i: usize) -> __m256 {
        op!({
            let [a, b] = products(codes, x);
            let sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), factor(factors, 2 * i), sums);
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(b), factor(factors, 2 * i + 1), sums)
        })
    }
    #[inline(always)]
    fn total(self, [a, b, c, d]: [__m256; 4]) -> f32 {
        op!({
            let sums = _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
            let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
}

/// The products of the first 16 codes and of the last, neighbours added up.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn products(codes: __m256i, x: &[i16; 32]) -> [__m256i; 2] {
    op!({
        let (low, high) = (_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
        let x = x.as_ptr().cast::<__m256i>();
        [
            _mm256_madd_epi16(_mm256_cvtepi8_epi16(low), _mm256_loadu_si256(x)),
            _mm256_madd_epi16(_mm256_cvtepi8_epi16(high), _mm256_loadu_si256(x.add(1))),
        ]
    })
}

/// The `i`-th of 16 numbers, in every lane.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn factor(factors: [__m256; 2], i: usize) -> __m256 {
    op!(_mm256_permutevar8x32_ps(factors[i / 8], _mm256_set1_epi32(i as i32 % 8)))
}
