//! AVX-512: 32 lanes are one register of 16-bit or two of 32-bit elements. Masks are mask registers.

use core::arch::x86_64::*;

use super::{Kernel, REFILL_BYTES, SPILL_WORDS, Simd};
use crate::model::tables::{KEY_BITS, LANES, Row, last_key};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

features!(Avx512: "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx2" "fma" "bmi1" "bmi2" "popcnt" "lzcnt");

/// An expression of intrinsics, which the token `Avx512` makes safe.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of `Avx512` exists only if the CPU has the features; pointers are into slices whose
        // length has been checked, or arrays.
        unsafe { $e }
    }};
}

#[inline(always)]
fn widen(x: __m512i) -> [__m512i; 2] {
    op!([
        _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)),
        _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(x)),
    ])
}

#[inline(always)]
fn narrow([a, b]: [__m512i; 2]) -> __m512i {
    op!(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)), _mm512_cvtepi32_epi16(b)))
}

impl Simd for Avx512 {
    type Row = __m512i;
    type Wide = [__m512i; 2];
    type Mask = __mmask32;

    #[inline(always)]
    fn splat(self, x: u16) -> __m512i {
        op!(_mm512_set1_epi16(x as i16))
    }
    #[inline(always)]
    fn load(self, row: &Row) -> __m512i {
        op!(_mm512_loadu_si512(row.as_ptr().cast()))
    }
    #[inline(always)]
    fn store(self, row: &mut Row, x: __m512i) {
        op!(_mm512_storeu_si512(row.as_mut_ptr().cast(), x));
    }
    #[inline(always)]
    fn add(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi16(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_sub_epi16(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_min_epu16(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_max_epu16(a, b))
    }
    #[inline(always)]
    fn last_keys(self, slots: __m512i) -> __m512i {
        op!(_mm512_or_si512(_mm512_slli_epi16::<KEY_BITS>(slots), _mm512_set1_epi16(last_key(0) as i16)))
    }
    #[inline(always)]
    fn slots_of(self, keys: __m512i) -> __m512i {
        op!(_mm512_srli_epi16::<KEY_BITS>(keys))
    }
    #[inline(always)]
    fn at_least(self, a: __m512i, b: __m512i) -> __mmask32 {
        op!(_mm512_cmpge_epu16_mask(a, b))
    }
    #[inline(always)]
    fn any(self, mask: __mmask32) -> bool {
        mask != 0
    }
    #[inline(always)]
    fn select(self, mask: __mmask32, yes: __m512i, no: __m512i) -> __m512i {
        op!(_mm512_mask_mov_epi16(no, mask, yes))
    }

    #[inline(always)]
    fn load_wide(self, x: &[u32; LANES]) -> [__m512i; 2] {
        op!([_mm512_loadu_si512(x.as_ptr().cast()), _mm512_loadu_si512(x[16..].as_ptr().cast())])
    }
    #[inline(always)]
    fn store_wide(self, out: &mut [u32; LANES], x: [__m512i; 2]) {
        op!({
            _mm512_storeu_si512(out.as_mut_ptr().cast(), x[0]);
            _mm512_storeu_si512(out[16..].as_mut_ptr().cast(), x[1]);
        });
    }
    #[inline(always)]
    fn slots(self, states: [__m512i; 2]) -> __m512i {
        op!(_mm512_and_si512(narrow(states), _mm512_set1_epi16(0xfff)))
    }
    #[inline(always)]
    fn advance(self, states: [__m512i; 2], width: __m512i, offset: __m512i) -> [__m512i; 2] {
        let (width, offset) = (widen(width), widen(offset));
        let mut next = states;
        for i in 0..2 {
            next[i] = op!(_mm512_add_epi32(
                _mm512_mullo_epi32(width[i], _mm512_srli_epi32::<12>(states[i])),
                offset[i]
            ));
        }
        next
    }
    #[inline(always)]
    fn take_low_bits(
        self,
        states: [__m512i; 2],
        code: __m512i,
        bits: [__m512i; 2],
    ) -> ([__m512i; 2], __m512i) {
        let (mut rest, mut code) = (states, widen(code));
        for i in 0..2 {
            op!({
                rest[i] = _mm512_srlv_epi32(states[i], bits[i]);
                let low = _mm512_xor_si512(states[i], _mm512_sllv_epi32(rest[i], bits[i]));
                code[i] = _mm512_or_si512(_mm512_sllv_epi32(code[i], bits[i]), low);
            });
        }
        (rest, narrow(code))
    }
    #[inline(always)]
    fn refill(self, states: &mut [__m512i; 2], words: &[u8]) -> usize {
        assert!(words.len() >= REFILL_BYTES);
        let mut used = 0;
        for state in states {
            op!({
                let taking = _mm512_cmplt_epu32_mask(*state, _mm512_set1_epi32(1 << 16));
                let next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(words.as_ptr().add(used).cast()));
                let next = _mm512_maskz_expand_epi32(taking, next);
                let shifted = _mm512_mask_slli_epi32::<16>(*state, taking, *state);
                *state = _mm512_or_si512(shifted, next);
                used += 2 * taking.count_ones() as usize;
            });
        }
        used
    }

    #[inline(always)]
    fn splat_wide(self, x: u32) -> [__m512i; 2] {
        op!([_mm512_set1_epi32(x as i32); 2])
    }
    #[inline(always)]
    fn widen(self, x: __m512i) -> [__m512i; 2] {
        widen(x)
    }
    #[inline(always)]
    fn sub_from_32(self, x: [__m512i; 2]) -> [__m512i; 2] {
        let n = self.splat_wide(32);
        op!([_mm512_sub_epi32(n[0], x[0]), _mm512_sub_epi32(n[1], x[1])])
    }
    #[inline(always)]
    fn split(self, code: __m512i, bits: [__m512i; 2]) -> (__m512i, __m512i) {
        let bits = narrow(bits);
        op!({
            let symbol = _mm512_srlv_epi16(code, bits);
            (symbol, _mm512_xor_si512(code, _mm512_sllv_epi16(symbol, bits)))
        })
    }
    #[inline(always)]
    fn join(self, states: [__m512i; 2], low: __m512i, bits: [__m512i; 2]) -> [__m512i; 2] {
        let (mut joined, low) = (states, widen(low));
        for i in 0..2 {
            joined[i] = op!(_mm512_or_si512(_mm512_sllv_epi32(states[i], bits[i]), low[i]));
        }
        joined
    }
    #[inline(always)]
    fn spill(
        self,
        states: &mut [__m512i; 2],
        shift: [__m512i; 2],
        bound: [__m512i; 2],
        words: &mut [u16],
    ) -> usize {
        assert!(words.len() >= SPILL_WORDS);
        let end = words.as_mut_ptr_range().end;
        let mut written = 0;
        for i in [1, 0] {
            op!({
                let spilling = _mm512_cmpge_epu32_mask(_mm512_srlv_epi32(states[i], shift[i]), bound[i]);
                let n = spilling.count_ones() as usize;
                written += n;
                let low = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(spilling, states[i]));
                // On Zen 4, a compressing store is microcoded; a masked store is not.
                _mm256_mask_storeu_epi16(end.sub(written).cast(), ((1_u32 << n) - 1) as u16, low);
                states[i] = _mm512_mask_srli_epi32::<16>(states[i], spilling, states[i]);
            });
        }
        written
    }
    #[inline(always)]
    fn encode(self, states: [__m512i; 2], start: __m512i, width: __m512i) -> [__m512i; 2] {
        let (mut next, start, width) = (states, widen(start), widen(width));
        for i in 0..2 {
            op!({
                let reciprocal = _mm512_div_ps(_mm512_set1_ps(1.0), _mm512_cvtepi32_ps(width[i]));
                let quotient = _mm512_mul_ps(_mm512_cvtepu32_ps(states[i]), reciprocal);
                let quotient = _mm512_cvttps_epi32(quotient);
                let rest = _mm512_sub_epi32(states[i], _mm512_mullo_epi32(quotient, width[i]));
                // A quotient that is one too large gives a negative remainder, one too small a remainder of
                // at least the width.
                let below = _mm512_srai_epi32::<31>(rest);
                let quotient = _mm512_add_epi32(quotient, below);
                let rest = _mm512_add_epi32(rest, _mm512_and_si512(below, width[i]));
                let above = _mm512_cmpge_epi32_mask(rest, width[i]);
                let quotient = _mm512_mask_add_epi32(quotient, above, quotient, _mm512_set1_epi32(1));
                let rest = _mm512_mask_sub_epi32(rest, above, rest, width[i]);
                let sum = _mm512_add_epi32(rest, start[i]);
                next[i] = _mm512_add_epi32(_mm512_slli_epi32::<12>(quotient), sum);
            });
        }
        next
    }
}
