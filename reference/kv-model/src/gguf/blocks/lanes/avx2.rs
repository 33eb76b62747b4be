//! AVX2: 32 bytes in a register.

use std::arch::x86_64::*;

use super::{Kernel, Lanes};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

kv_attend::cpu_features!(Avx2 => run);

/// Evaluates an expression of the set's intrinsics.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of `Avx2` exists only where the CPU has the features; what pointers read or write
        // is a reference's array of that size.
        unsafe { $e }
    }};
}

impl Lanes for Avx2 {
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
    fn half(self, bytes: [u8; 2]) -> f32 {
        op!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(u16::from_le_bytes(bytes))))))
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
            let down = _mm256_srl_epi16(x, _mm_cvtsi32_si128(at as i32));
            let part = _mm256_and_si256(down, _mm256_set1_epi8(((1_u32 << BITS) - 1) as i8));
            _mm256_sll_epi16(part, _mm_cvtsi32_si128(to as i32))
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
