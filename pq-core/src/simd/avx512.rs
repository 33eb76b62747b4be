//! AVX-512 with VBMI: a table of 256 bytes lives in four registers and is looked up by two permutations and a
//! blend.
//!
//! Block order: register `v` holds, in its 128-bit lane `l`, tokens `16 l + 4 v` to `16 l + 4 v + 3`.

use core::arch::x86_64::*;

use kv_attend::{instructions, op};

use super::{BLOCK, Kernel, Simd, interleave, row_len, transpose_rows};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

kv_attend::cpu_features!(Avx512 => run);

impl Avx512 {
    /// Swaps the roles of register and 128-bit lane: token order to block order, and back.
    #[inline(always)]
    fn transpose(self, [a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
        op!({
            let ab_low = _mm512_shuffle_f32x4::<0x44>(a, b);
            let ab_high = _mm512_shuffle_f32x4::<0xEE>(a, b);
            let cd_low = _mm512_shuffle_f32x4::<0x44>(c, d);
            let cd_high = _mm512_shuffle_f32x4::<0xEE>(c, d);
            [
                _mm512_shuffle_f32x4::<0x88>(ab_low, cd_low),
                _mm512_shuffle_f32x4::<0xDD>(ab_low, cd_low),
                _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high),
                _mm512_shuffle_f32x4::<0xDD>(ab_high, cd_high),
            ]
        })
    }

    /// Interleaves units of 64 bytes of each part.
    #[inline(always)]
    fn interleaved<const UNIT: usize, const PARTS: usize>(self, x: [__m512i; 4]) -> [__m512i; 4] {
        let [a, b, c, d] = x;
        // Register v: a stretch of each part, concatenated.
        let mut x = op!(match PARTS {
            4 => self.transpose([a, b, c, d].map(|x| _mm512_castsi512_ps(x))).map(|x| _mm512_castps_si512(x)),
            _ => [_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xEE>(a, b), c, d],
        });
        if UNIT * PARTS < 64 {
            let order = const { in_turn(UNIT, PARTS) };
            for x in &mut x[..PARTS] {
                *x = op!(_mm512_permutexvar_epi8(_mm512_loadu_si512(order.as_ptr().cast()), *x));
            }
        }
        x
    }
}

/// The bytes of a register of (`parts`, units of `unit` bytes) in the order (units, `parts`).
const fn in_turn(unit: usize, parts: usize) -> [u8; 64] {
    let mut order = [0; 64];
    let mut i = 0;
    while i < 64 {
        order[i] = (i / unit % parts * (64 / parts) + i / (unit * parts) * unit + i % unit) as u8;
        i += 1;
    }
    order
}

/// The mask of the first `n` bytes, 1 to 64.
#[inline(always)]
const fn first_bytes(n: usize) -> u64 {
    u64::MAX >> (64 - n)
}

impl Simd for Avx512 {
    type F32 = __m512;
    type U32 = __m512i;
    type Codes = __m512i;
    type Products = [__m512i; 2]; // with the factors' multiples of 256, and with the rests
    type Bytes = __m512i;
    type Table = [__m512i; 4];
    type FloatTable = [[__m512i; 4]; 4]; // a table for each byte of a float
    type Sums = [__m512i; 2]; // pairs of tokens as 16 bits; the odd tokens alone
    type Block = [__m512; 4];

    const LANES: usize = 16;
    const WIDE: bool = true;
    const FLOAT_TABLE_BITS: u32 = 8;

    instructions! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        unsafe fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        unsafe fn store(p: *mut f32, x: __m512) = _mm512_storeu_ps(p, x);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn neg_mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fnmadd_ps(a, b, c);
        fn sum(x: __m512) -> f32 = _mm512_reduce_add_ps(x);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn splat_u32(x: u32) -> __m512i = _mm512_set1_epi32(x as i32);
        unsafe fn load_u32(p: *const u32) -> __m512i = _mm512_loadu_si512(p.cast());
        unsafe fn store_u32(p: *mut u32, x: __m512i) = _mm512_storeu_si512(p.cast(), x);
        fn min_lane(x: __m512) -> f32 = _mm512_reduce_min_ps(x);
        fn equal(a: __m512, b: __m512) -> u32 = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b).into();
        fn at_least(x: __m512i, bound: __m512i) -> u32 = _mm512_cmpge_epu32_mask(x, bound).into();
        fn lanes() -> __m512i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        fn add_u32(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn no_products() -> [__m512i; 2] = [_mm512_setzero_si512(); 2];
        fn total(sum: [__m512i; 2]) -> __m512i = _mm512_add_epi32(_mm512_slli_epi32::<8>(sum[0]), sum[1]);
        fn no_sums() -> [__m512i; 2] = [_mm512_setzero_si512(); 2];
    }

    #[inline(always)]
    fn call<R>(self, f: impl FnOnce() -> R) -> R {
        op!(with_features(f))
    }

    #[inline(always)]
    unsafe fn load_u16(self, p: *const u16) -> __m512 {
        op!(_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
    }

    #[inline(always)]
    fn any_less(self, a: __m512, b: __m512) -> bool {
        op!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b)) != 0
    }

    #[inline(always)]
    fn keep_smaller(self, best: (__m512, __m512i), candidate: __m512, index: __m512i) -> (__m512, __m512i) {
        op!({
            let smaller = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(candidate, best.0);
            (_mm512_min_ps(candidate, best.0), _mm512_mask_mov_epi32(best.1, smaller, index))
        })
    }

    #[inline(always)]
    fn min_lanes(self, [a, b, c, d]: [__m512; 4], out: &mut [f32; 4]) -> [__m512; 4] {
        op!({
            let ab = _mm512_min_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_min_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let x = _mm512_min_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xEE>(ab, cd));
            let x = _mm512_min_ps(x, _mm512_shuffle_f32x4::<0x4E>(x, x));
            let x = _mm512_min_ps(x, _mm512_shuffle_f32x4::<0xB1>(x, x));
            _mm_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps128(x));
            [
                _mm512_permute_ps::<0x00>(x),
                _mm512_permute_ps::<0x55>(x),
                _mm512_permute_ps::<0xAA>(x),
                _mm512_permute_ps::<0xFF>(x),
            ]
        })
    }

    #[inline(always)]
    fn keys(self, scores: __m512) -> __m512i {
        op!({
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(scores, scores);
            let x = _mm512_add_ps(scores, _mm512_setzero_ps());
            let x = _mm512_castps_si512(_mm512_mask_mov_ps(x, nan, _mm512_set1_ps(f32::NEG_INFINITY)));
            let flip = _mm512_or_si512(_mm512_srai_epi32::<31>(x), _mm512_set1_epi32(i32::MIN));
            _mm512_xor_si512(x, flip)
        })
    }
    /// Bytes of the multiples of 256, and bytes of the rests.
    #[inline(always)]
    fn factors(self, integers: [i32; 16]) -> [u32; 8] {
        op!({
            let integers = _mm512_loadu_si512(integers.as_ptr().cast());
            let upper = _mm512_srai_epi32::<8>(_mm512_add_epi32(integers, _mm512_set1_epi32(128)));
            let (upper, rests) = (_mm512_cvtepi32_epi8(upper), _mm512_cvtepi32_epi8(integers));
            let mut factors = [0; 8];
            _mm_storeu_si128(factors.as_mut_ptr().cast(), _mm_unpacklo_epi32(upper, rests));
            _mm_storeu_si128(factors.as_mut_ptr().add(4).cast(), _mm_unpackhi_epi32(upper, rests));
            factors
        })
    }
    #[inline(always)]
    fn codes(self, words: __m512i, shift: i32, mask: u32) -> __m512i {
        op!(_mm512_and_si512(_mm512_rorv_epi32(words, _mm512_set1_epi32(shift)), self.splat_u32(mask)))
    }
    #[inline(always)]
    fn add_products(self, sum: [__m512i; 2], codes: __m512i, factors: [__m512i; 2]) -> [__m512i; 2] {
        op!([_mm512_dpbusd_epi32(sum[0], codes, factors[0]), _mm512_dpbusd_epi32(sum[1], codes, factors[1]),])
    }
    #[inline(always)]
    unsafe fn write_chosen(self, out: *mut u32, x: __m512i, chosen: u32) {
        // Compressing into memory is microcoded on Zen 4: compress in a register, then write all of it.
        op!(_mm512_storeu_si512(out.cast(), _mm512_maskz_compress_epi32(chosen as u16, x)));
    }

    #[inline(always)]
    fn transpose_rows(self, rows: [&[f32]; 4], out: &mut [f32]) {
        let [a, b, c, d] = rows.map(|row| row.as_chunks::<16>().0);
        let columns = out.chunks_mut(16 * BLOCK);
        for ((((a, b), c), d), columns) in a.iter().zip(b).zip(c).zip(d).zip(columns) {
            assert!(columns.len() >= 15 * BLOCK + 4);
            op!({
                let [a, b, c, d] = [a, b, c, d].map(|row| _mm512_loadu_ps(row.as_ptr()));
                let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                // Register i holds components i, 4 + i, 8 + i and 12 + i of the rows.
                let registers = [
                    _mm512_shuffle_ps::<0x44>(ab_low, cd_low),
                    _mm512_shuffle_ps::<0xEE>(ab_low, cd_low),
                    _mm512_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm512_shuffle_ps::<0xEE>(ab_high, cd_high),
                ];
                for (i, x) in registers.into_iter().enumerate() {
                    let out = columns.as_mut_ptr().add(i * BLOCK);
                    _mm_storeu_ps(out, _mm512_castps512_ps128(x));
                    _mm_storeu_ps(out.add(4 * BLOCK), _mm512_extractf32x4_ps::<1>(x));
                    _mm_storeu_ps(out.add(8 * BLOCK), _mm512_extractf32x4_ps::<2>(x));
                    _mm_storeu_ps(out.add(12 * BLOCK), _mm512_extractf32x4_ps::<3>(x));
                }
            });
        }
        transpose_rows(rows, rows[0].len() / 16 * 16, out);
    }
    #[inline(always)]
    fn interleave<const UNIT: usize, const PARTS: usize>(self, parts: [&[u8]; PARTS], out: &mut [u8]) {
        if UNIT == 32 {
            return interleave::<UNIT, PARTS>(parts, out); // halves of registers are copied as they are
        }
        let mut rest = parts;
        let mut lines = out.chunks_exact_mut(64 * PARTS);
        for out in &mut lines {
            let mut x = [op!(_mm512_setzero_si512()); 4];
            for (x, rest) in x.iter_mut().zip(&mut rest) {
                let (line, after) = rest.split_at(64);
                // SAFETY: 64 bytes.
                *x = op!(_mm512_loadu_si512(line.as_ptr().cast()));
                *rest = after;
            }
            for (out, x) in out.chunks_exact_mut(64).zip(self.interleaved::<UNIT, PARTS>(x)) {
                op!(_mm512_storeu_si512(out.as_mut_ptr().cast(), x));
            }
        }
        let out = lines.into_remainder();
        if out.is_empty() {
            return;
        }
        let mut x = [op!(_mm512_setzero_si512()); 4];
        for (x, rest) in x.iter_mut().zip(rest) {
            let rest = &rest[..out.len() / PARTS];
            *x = op!(_mm512_maskz_loadu_epi8(first_bytes(rest.len()), rest.as_ptr().cast()));
        }
        for (out, x) in out.chunks_mut(64).zip(self.interleaved::<UNIT, PARTS>(x)) {
            op!(_mm512_mask_storeu_epi8(out.as_mut_ptr().cast(), first_bytes(out.len()), x));
        }
    }
    #[inline(always)]
    unsafe fn unpack<const NBITS: u32>(self, run: *const u8) -> __m512i {
        op!({
            if NBITS == 8 {
                return _mm512_loadu_si512(run.cast());
            }
            let mut codes = _mm512_setzero_si512();
            let mut at = run;
            if NBITS & 4 != 0 {
                let mask = _mm256_set1_epi8(15);
                let pairs = _mm256_loadu_si256(at.cast());
                let low = _mm256_and_si256(pairs, mask);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(pairs), mask);
                codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                at = at.add(32);
            }
            if NBITS & 2 != 0 {
                let quads = _mm512_broadcast_i32x4(_mm_loadu_si128(at.cast()));
                let shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
                let plane = _mm512_and_si512(_mm512_srlv_epi32(quads, shifts), _mm512_set1_epi8(3));
                let low_bits = if NBITS & 4 != 0 { 4 } else { 0 };
                codes = _mm512_or_si512(codes, _mm512_sll_epi16(plane, _mm_cvtsi32_si128(low_bits)));
                at = at.add(16);
            }
            if NBITS & 1 != 0 {
                let eights = _mm512_set1_epi64(at.cast::<i64>().read_unaligned());
                let shifts = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
                let plane = _mm512_and_si512(_mm512_srlv_epi64(eights, shifts), _mm512_set1_epi8(1));
                let low_bits = (NBITS - 1) as i32;
                codes = _mm512_or_si512(codes, _mm512_sll_epi16(plane, _mm_cvtsi32_si128(low_bits)));
            }
            codes
        })
    }
    #[inline(always)]
    unsafe fn table<const NBITS: u32>(self, p: *const u8) -> [__m512i; 4] {
        op!({
            let zero = _mm512_setzero_si512();
            let row = |i: usize| _mm512_loadu_si512(p.add(64 * i).cast());
            match NBITS {
                0..=4 => [_mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())), zero, zero, zero],
                5 => [_mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast())), zero, zero, zero],
                6 => [row(0), zero, zero, zero],
                7 => [row(0), row(1), zero, zero],
                _ => [row(0), row(1), row(2), row(3)],
            }
        })
    }
    #[inline(always)]
    fn look_up<const NBITS: u32>(self, [a, b, c, d]: [__m512i; 4], codes: __m512i) -> __m512i {
        op!({
            match NBITS {
                0..=4 => _mm512_shuffle_epi8(a, codes),
                5 | 6 => _mm512_permutexvar_epi8(codes, a),
                7 => _mm512_permutex2var_epi8(a, codes, b),
                _ => _mm512_mask_blend_epi8(
                    _mm512_movepi8_mask(codes),
                    _mm512_permutex2var_epi8(a, codes, b),
                    _mm512_permutex2var_epi8(c, codes, d),
                ),
            }
        })
    }

    #[inline(always)]
    fn add_bytes(self, [pairs, odd]: [__m512i; 2], bytes: __m512i) -> [__m512i; 2] {
        op!([_mm512_add_epi16(pairs, bytes), _mm512_add_epi16(odd, _mm512_srli_epi16::<8>(bytes))])
    }
    #[inline(always)]
    fn store_sums(self, out: &mut [u16; 64], [pairs, odd]: [__m512i; 2]) {
        op!({
            // pairs = even + 256 * odd, modulo 2^16.
            let even = _mm512_sub_epi16(pairs, _mm512_slli_epi16::<8>(odd));
            let low = _mm512_unpacklo_epi16(even, odd);
            let high = _mm512_unpackhi_epi16(even, odd);
            let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
            let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            let out = out.as_mut_ptr();
            _mm512_storeu_si512(out.cast(), _mm512_permutex2var_epi64(low, first, high));
            _mm512_storeu_si512(out.add(32).cast(), _mm512_permutex2var_epi64(low, second, high));
        });
    }

    #[inline(always)]
    unsafe fn float_table<const NBITS: u32>(self, _: *const f32, planes: *const u8) -> [[__m512i; 4]; 4] {
        let len = row_len(1 << NBITS);
        op!([
            self.table::<NBITS>(planes),
            self.table::<NBITS>(planes.add(len)),
            self.table::<NBITS>(planes.add(2 * len)),
            self.table::<NBITS>(planes.add(3 * len)),
        ])
    }
    #[inline(always)]
    fn look_up_floats<const NBITS: u32>(self, table: [[__m512i; 4]; 4], codes: __m512i) -> [__m512; 4] {
        let a = self.look_up::<NBITS>(table[0], codes);
        let b = self.look_up::<NBITS>(table[1], codes);
        let c = self.look_up::<NBITS>(table[2], codes);
        let d = self.look_up::<NBITS>(table[3], codes);
        op!({
            let (ab_low, ab_high) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d));
            [
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab_low, cd_low)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab_low, cd_low)),
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab_high, cd_high)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab_high, cd_high)),
            ]
        })
    }
    #[inline(always)]
    fn zero_block(self) -> [__m512; 4] {
        [self.splat(0.0); 4]
    }
    #[inline(always)]
    unsafe fn load_block(self, p: *const f32) -> [__m512; 4] {
        op!(self.transpose([
            _mm512_loadu_ps(p),
            _mm512_loadu_ps(p.add(16)),
            _mm512_loadu_ps(p.add(32)),
            _mm512_loadu_ps(p.add(48)),
        ]))
    }
    #[inline(always)]
    unsafe fn store_block(self, p: *mut f32, block: [__m512; 4]) {
        let rows = self.transpose(block);
        for (i, row) in rows.into_iter().enumerate() {
            op!(_mm512_storeu_ps(p.add(16 * i), row));
        }
    }
}
