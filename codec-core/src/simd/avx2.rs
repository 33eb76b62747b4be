//! AVX2: 32 lanes are two registers of 16-bit or four of 32-bit elements. A mask is all ones where the flag
//! is *not* set, as the signed comparison `b > a` gives it.

use core::arch::x86_64::*;

use super::{Kernel, REFILL_BYTES, SPILL_WORDS, Simd};
use crate::model::tables::{KEY_BITS, LANES, Row, last_key};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

features!(Avx2: "avx2" "fma" "bmi1" "bmi2" "popcnt" "lzcnt");

/// An expression of intrinsics, which the token `Avx2` makes safe.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of `Avx2` exists only if the CPU has the features; pointers are into slices whose
        // length has been checked, or arrays.
        unsafe { $e }
    }};
}

/// For every set of eight lanes that read a word: the index of each lane's word.
static TAKEN: [[u8; 8]; 256] = {
    let mut all = [[0; 8]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut lane, mut taken) = (0, 0);
        while lane < 8 {
            all[set][lane] = taken;
            taken += (set >> lane & 1) as u8;
            lane += 1;
        }
        set += 1;
    }
    all
};

/// For every set of eight lanes that write a word: the lanes in order, at the end.
static GIVEN: [[u8; 8]; 256] = {
    let mut all = [[0; 8]; 256];
    let mut set: usize = 0;
    while set < 256 {
        let (mut lane, mut at) = (0, 8 - set.count_ones() as usize);
        while lane < 8 {
            if set >> lane & 1 == 1 {
                all[set][at] = lane;
                at += 1;
            }
            lane += 1;
        }
        set += 1;
    }
    all
};

#[inline(always)]
fn widen(x: [__m256i; 2]) -> [__m256i; 4] {
    op!([
        _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x[0])),
        _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(x[0])),
        _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x[1])),
        _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(x[1])),
    ])
}

/// Narrows elements below 2^16.
#[inline(always)]
fn narrow(x: [__m256i; 4]) -> [__m256i; 2] {
    op!([
        _mm256_permute4x64_epi64::<0xD8>(_mm256_packus_epi32(x[0], x[1])),
        _mm256_permute4x64_epi64::<0xD8>(_mm256_packus_epi32(x[2], x[3])),
    ])
}

impl Simd for Avx2 {
    type Row = [__m256i; 2];
    type Wide = [__m256i; 4];
    type Mask = [__m256i; 2];

    #[inline(always)]
    fn splat(self, x: u16) -> [__m256i; 2] {
        op!([_mm256_set1_epi16(x as i16); 2])
    }
    #[inline(always)]
    fn load(self, row: &Row) -> [__m256i; 2] {
        op!([_mm256_loadu_si256(row.as_ptr().cast()), _mm256_loadu_si256(row[16..].as_ptr().cast())])
    }
    #[inline(always)]
    fn store(self, row: &mut Row, x: [__m256i; 2]) {
        op!({
            _mm256_storeu_si256(row.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(row[16..].as_mut_ptr().cast(), x[1]);
        });
    }
    #[inline(always)]
    fn add(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        op!([_mm256_add_epi16(a[0], b[0]), _mm256_add_epi16(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        op!([_mm256_sub_epi16(a[0], b[0]), _mm256_sub_epi16(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        op!([_mm256_min_epu16(a[0], b[0]), _mm256_min_epu16(a[1], b[1])])
    }
    #[inline(always)]
    fn max(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        op!([_mm256_max_epu16(a[0], b[0]), _mm256_max_epu16(a[1], b[1])])
    }
    #[inline(always)]
    fn last_keys(self, slots: [__m256i; 2]) -> [__m256i; 2] {
        let mut keys = self.splat(last_key(0));
        for i in 0..2 {
            keys[i] = op!(_mm256_or_si256(_mm256_slli_epi16::<{ KEY_BITS as i32 }>(slots[i]), keys[i]));
        }
        keys
    }
    #[inline(always)]
    fn slots_of(self, keys: [__m256i; 2]) -> [__m256i; 2] {
        const BITS: i32 = KEY_BITS as i32;
        op!([_mm256_srli_epi16::<BITS>(keys[0]), _mm256_srli_epi16::<BITS>(keys[1])])
    }
    #[inline(always)]
    fn at_least(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        op!([_mm256_cmpgt_epi16(b[0], a[0]), _mm256_cmpgt_epi16(b[1], a[1])])
    }
    #[inline(always)]
    fn any(self, mask: [__m256i; 2]) -> bool {
        op!(_mm256_movemask_epi8(_mm256_and_si256(mask[0], mask[1]))) != -1
    }
    #[inline(always)]
    fn select(self, mask: [__m256i; 2], yes: [__m256i; 2], no: [__m256i; 2]) -> [__m256i; 2] {
        op!([_mm256_blendv_epi8(yes[0], no[0], mask[0]), _mm256_blendv_epi8(yes[1], no[1], mask[1])])
    }

    #[inline(always)]
    fn load_wide(self, x: &[u32; LANES]) -> [__m256i; 4] {
        op!([
            _mm256_loadu_si256(x.as_ptr().cast()),
            _mm256_loadu_si256(x[8..].as_ptr().cast()),
            _mm256_loadu_si256(x[16..].as_ptr().cast()),
            _mm256_loadu_si256(x[24..].as_ptr().cast()),
        ])
    }
    #[inline(always)]
    fn store_wide(self, out: &mut [u32; LANES], x: [__m256i; 4]) {
        for (out, x) in out.as_chunks_mut::<8>().0.iter_mut().zip(x) {
            op!(_mm256_storeu_si256(out.as_mut_ptr().cast(), x));
        }
    }
    #[inline(always)]
    fn slots(self, states: [__m256i; 4]) -> [__m256i; 2] {
        let mut low = states;
        for i in 0..4 {
            low[i] = op!(_mm256_and_si256(states[i], _mm256_set1_epi32(0xfff)));
        }
        narrow(low)
    }
    #[inline(always)]
    fn advance(self, states: [__m256i; 4], width: [__m256i; 2], offset: [__m256i; 2]) -> [__m256i; 4] {
        let (width, offset) = (widen(width), widen(offset));
        let mut next = states;
        for i in 0..4 {
            next[i] = op!(_mm256_add_epi32(
                _mm256_mullo_epi32(width[i], _mm256_srli_epi32::<12>(states[i])),
                offset[i]
            ));
        }
        next
    }
    #[inline(always)]
    fn take_low_bits(
        self,
        states: [__m256i; 4],
        code: [__m256i; 2],
        bits: [__m256i; 4],
    ) -> ([__m256i; 4], [__m256i; 2]) {
        let (mut rest, mut code) = (states, widen(code));
        for i in 0..4 {
            op!({
                rest[i] = _mm256_srlv_epi32(states[i], bits[i]);
                let low = _mm256_xor_si256(states[i], _mm256_sllv_epi32(rest[i], bits[i]));
                code[i] = _mm256_or_si256(_mm256_sllv_epi32(code[i], bits[i]), low);
            });
        }
        (rest, narrow(code))
    }
    #[inline(always)]
    fn refill(self, states: &mut [__m256i; 4], words: &[u8]) -> usize {
        assert!(words.len() >= REFILL_BYTES);
        let mut used = 0;
        for state in states {
            op!({
                let taking = _mm256_cmpeq_epi32(_mm256_srli_epi32::<16>(*state), _mm256_setzero_si256());
                let set = _mm256_movemask_ps(_mm256_castsi256_ps(taking)) as usize;
                let next = _mm256_cvtepu16_epi32(_mm_loadu_si128(words.as_ptr().add(used).cast()));
                let index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(TAKEN[set].as_ptr().cast()));
                let next = _mm256_permutevar8x32_epi32(next, index);
                let refilled = _mm256_or_si256(_mm256_slli_epi32::<16>(*state), next);
                *state = _mm256_blendv_epi8(*state, refilled, taking);
                used += 2 * set.count_ones() as usize;
            });
        }
        used
    }

    #[inline(always)]
    fn splat_wide(self, x: u32) -> [__m256i; 4] {
        op!([_mm256_set1_epi32(x as i32); 4])
    }
    #[inline(always)]
    fn widen(self, x: [__m256i; 2]) -> [__m256i; 4] {
        widen(x)
    }
    #[inline(always)]
    fn sub_from_32(self, x: [__m256i; 4]) -> [__m256i; 4] {
        let mut y = x;
        for i in 0..4 {
            y[i] = op!(_mm256_sub_epi32(_mm256_set1_epi32(32), x[i]));
        }
        y
    }
    #[inline(always)]
    fn split(self, code: [__m256i; 2], bits: [__m256i; 4]) -> ([__m256i; 2], [__m256i; 2]) {
        let (mut symbol, mut low) = (widen(code), widen(code));
        for i in 0..4 {
            op!({
                symbol[i] = _mm256_srlv_epi32(low[i], bits[i]);
                low[i] = _mm256_xor_si256(low[i], _mm256_sllv_epi32(symbol[i], bits[i]));
            });
        }
        (narrow(symbol), narrow(low))
    }
    #[inline(always)]
    fn join(self, states: [__m256i; 4], low: [__m256i; 2], bits: [__m256i; 4]) -> [__m256i; 4] {
        let (mut joined, low) = (states, widen(low));
        for i in 0..4 {
            joined[i] = op!(_mm256_or_si256(_mm256_sllv_epi32(states[i], bits[i]), low[i]));
        }
        joined
    }
    #[inline(always)]
    fn spill(
        self,
        states: &mut [__m256i; 4],
        shift: [__m256i; 4],
        bound: [__m256i; 4],
        words: &mut [u16],
    ) -> usize {
        assert!(words.len() >= SPILL_WORDS);
        let end = words.as_mut_ptr_range().end;
        let mut written = 0;
        for i in [3, 2, 1, 0] {
            op!({
                let staying = _mm256_cmpgt_epi32(bound[i], _mm256_srlv_epi32(states[i], shift[i]));
                let set = !_mm256_movemask_ps(_mm256_castsi256_ps(staying)) as usize & 255;
                let index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(GIVEN[set].as_ptr().cast()));
                let words = _mm256_permutevar8x32_epi32(states[i], index);
                let words = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
                let words = _mm256_permute4x64_epi64::<0xD8>(_mm256_packus_epi32(words, words));
                // All eight words are stored; later stores overwrite the invalid ones.
                _mm_storeu_si128(end.sub(written + 8).cast(), _mm256_castsi256_si128(words));
                written += set.count_ones() as usize;
                states[i] = _mm256_blendv_epi8(_mm256_srli_epi32::<16>(states[i]), states[i], staying);
            });
        }
        written
    }
    #[inline(always)]
    fn encode(self, states: [__m256i; 4], start: [__m256i; 2], width: [__m256i; 2]) -> [__m256i; 4] {
        let (mut next, start, width) = (states, widen(start), widen(width));
        for i in 0..4 {
            op!({
                let reciprocal = _mm256_div_ps(_mm256_set1_ps(1.0), _mm256_cvtepi32_ps(width[i]));
                // AVX2 cannot convert unsigned integers, so both halves are converted and joined with one
                // rounding.
                let upper = _mm256_cvtepi32_ps(_mm256_srli_epi32::<16>(states[i]));
                let lower = _mm256_and_si256(states[i], _mm256_set1_epi32(0xffff));
                let state = _mm256_fmadd_ps(upper, _mm256_set1_ps(65536.0), _mm256_cvtepi32_ps(lower));
                let quotient = _mm256_cvttps_epi32(_mm256_mul_ps(state, reciprocal));
                let rest = _mm256_sub_epi32(states[i], _mm256_mullo_epi32(quotient, width[i]));
                // A quotient that is one too large gives a negative remainder, one too small a remainder of
                // at least the width.
                let below = _mm256_srai_epi32::<31>(rest);
                let quotient = _mm256_add_epi32(quotient, below);
                let rest = _mm256_add_epi32(rest, _mm256_and_si256(below, width[i]));
                let within = _mm256_cmpgt_epi32(width[i], rest);
                let quotient = _mm256_add_epi32(quotient, _mm256_add_epi32(within, _mm256_set1_epi32(1)));
                let rest = _mm256_sub_epi32(rest, _mm256_andnot_si256(within, width[i]));
                let sum = _mm256_add_epi32(rest, start[i]);
                next[i] = _mm256_add_epi32(_mm256_slli_epi32::<12>(quotient), sum);
            });
        }
        next
    }
}
