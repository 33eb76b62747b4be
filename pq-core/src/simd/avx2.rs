//! AVX2: tables stay in memory; a shuffle looks up sixteen bytes of one, and the upper bits of a
//! code choose between them in a tree of blends. Floor at 8 bits: 16 shuffles, 8 ors and 7 blends for 32
//! codes.
//!
//! N.B. Blends alone are 12 % slower, ors on two levels 6 %.
//!
//! Block order: register `4 h + v` holds, in its 128-bit lane `l`, tokens `32 h + 16 l + 4 v + i`, `i` from 0
//! to 3.

use core::arch::x86_64::*;

use kv_attend::{instructions, op};

use super::{BLOCK, Kernel, Simd, row_len, transpose_rows};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

kv_attend::cpu_features!(Avx2 => run);

/// The codes of one lookup. A shuffle reads the low nibble of each byte and gives 0 where the top bit is set.
#[derive(Clone, Copy)]
struct Index {
    /// The low nibbles, with the top bit set where bit 4 of the code is set.
    even: __m256i,
    /// The same, with the top bit set where bit 4 is clear.
    odd: __m256i,
    /// The codes shifted so that bit 5, 6 or 7 is the top bit, where a blend reads it.
    by_bit: [__m256i; 3],
}

/// Looks sixteen-byte row `i` of the table up.
#[inline(always)]
unsafe fn row(p: *const u8, i: usize, index: __m256i) -> __m256i {
    op!(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(16 * i).cast())), index))
}
/// Every code is found in one of two rows: an `or` joins them, which runs on more ports than a blend.
#[inline(always)]
unsafe fn two_rows(p: *const u8, i: usize, index: Index) -> __m256i {
    op!(_mm256_or_si256(row(p, i, index.even), row(p, i + 1, index.odd)))
}
#[inline(always)]
unsafe fn four_rows(p: *const u8, i: usize, index: Index) -> __m256i {
    op!(_mm256_blendv_epi8(two_rows(p, i, index), two_rows(p, i + 2, index), index.by_bit[0]))
}
#[inline(always)]
unsafe fn eight_rows(p: *const u8, i: usize, index: Index) -> __m256i {
    op!(_mm256_blendv_epi8(four_rows(p, i, index), four_rows(p, i + 4, index), index.by_bit[1]))
}

/// Looks 32 codes up in the rows from `p` on.
#[inline(always)]
fn look_up_half<const NBITS: u32>(p: *const u8, codes: __m256i) -> __m256i {
    op!({
        if NBITS <= 4 {
            return row(p, 0, codes);
        }
        let top = _mm256_set1_epi8(i8::MIN);
        let low = _mm256_and_si256(codes, _mm256_set1_epi8(15));
        let even = _mm256_or_si256(low, _mm256_and_si256(_mm256_slli_epi16::<3>(codes), top));
        let index = Index {
            even,
            odd: _mm256_xor_si256(even, top),
            by_bit: [_mm256_slli_epi16::<2>(codes), _mm256_slli_epi16::<1>(codes), codes],
        };
        match NBITS {
            5 => two_rows(p, 0, index),
            6 => four_rows(p, 0, index),
            7 => eight_rows(p, 0, index),
            _ => _mm256_blendv_epi8(eight_rows(p, 0, index), eight_rows(p, 8, index), index.by_bit[2]),
        }
    })
}

/// Joins four bytes, lowest first, into integers: 32 of them, in block order.
#[inline(always)]
fn join(a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> [__m256i; 4] {
    op!({
        let (ab_low, ab_high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d));
        [
            _mm256_unpacklo_epi16(ab_low, cd_low),
            _mm256_unpackhi_epi16(ab_low, cd_low),
            _mm256_unpacklo_epi16(ab_high, cd_high),
            _mm256_unpackhi_epi16(ab_high, cd_high),
        ]
    })
}

/// For every lane mask, the permutation that moves the chosen lanes to the front.
static CHOSEN_FIRST: [[u32; 8]; 256] = {
    let mut orders = [[0; 8]; 256];
    let mut chosen = 0;
    while chosen < 256 {
        let (mut lane, mut written) = (0, 0);
        while lane < 8 {
            if chosen >> lane & 1 == 1 {
                orders[chosen][written] = lane as u32;
                written += 1;
            }
            lane += 1;
        }
        chosen += 1;
    }
    orders
};

impl Simd for Avx2 {
    type F32 = __m256;
    type U32 = __m256i;
    type Codes = [__m256i; 2]; // bytes 0 and 2, bytes 1 and 3, as 16-bit halves
    type Products = __m256i;
    type Bytes = [__m256i; 2];
    type Table = *const u8;
    type FloatTable = (*const f32, *const u8);
    type Sums = [[__m256i; 2]; 2]; // of each half: pairs of tokens as 16 bits, the odd tokens alone
    type Block = [__m256; 8];

    const LANES: usize = 8;
    const WIDE: bool = false;
    const FLOAT_TABLE_BITS: u32 = 6;

    instructions! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        unsafe fn load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        unsafe fn store(p: *mut f32, x: __m256) = _mm256_storeu_ps(p, x);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn neg_mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fnmadd_ps(a, b, c);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn splat_u32(x: u32) -> __m256i = _mm256_set1_epi32(x as i32);
        unsafe fn load_u32(p: *const u32) -> __m256i = _mm256_loadu_si256(p.cast());
        unsafe fn store_u32(p: *mut u32, x: __m256i) = _mm256_storeu_si256(p.cast(), x);
        fn lanes() -> __m256i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        fn add_u32(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        fn no_products() -> __m256i = _mm256_setzero_si256();
        fn no_sums() -> [[__m256i; 2]; 2] = [[_mm256_setzero_si256(); 2]; 2];
    }

    #[inline(always)]
    fn call<R>(self, f: impl FnOnce() -> R) -> R {
        op!(with_features(f))
    }

    #[inline(always)]
    unsafe fn load_u16(self, p: *const u16) -> __m256 {
        op!(_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
    }

    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        op!({
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }

    #[inline(always)]
    fn any_less(self, a: __m256, b: __m256) -> bool {
        op!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))) != 0
    }

    #[inline(always)]
    fn keep_smaller(self, best: (__m256, __m256i), candidate: __m256, index: __m256i) -> (__m256, __m256i) {
        op!({
            let smaller = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(candidate, best.0));
            (_mm256_min_ps(candidate, best.0), _mm256_blendv_epi8(best.1, index, smaller))
        })
    }

    #[inline(always)]
    fn min_lane(self, x: __m256) -> f32 {
        op!({
            let x = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_min_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_min_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn min_lanes(self, [a, b, c, d]: [__m256; 4], out: &mut [f32; 4]) -> [__m256; 4] {
        op!({
            let ab = _mm256_min_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_min_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let x = _mm256_min_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xEE>(ab, cd));
            let x = _mm256_min_ps(x, _mm256_permute2f128_ps::<0x01>(x, x));
            _mm_storeu_ps(out.as_mut_ptr(), _mm256_castps256_ps128(x));
            [
                _mm256_permute_ps::<0x00>(x),
                _mm256_permute_ps::<0x55>(x),
                _mm256_permute_ps::<0xAA>(x),
                _mm256_permute_ps::<0xFF>(x),
            ]
        })
    }
    #[inline(always)]
    fn equal(self, a: __m256, b: __m256) -> u32 {
        op!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))) as u32
    }

    #[inline(always)]
    fn keys(self, scores: __m256) -> __m256i {
        op!({
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(scores, scores);
            let x = _mm256_add_ps(scores, _mm256_setzero_ps());
            let x = _mm256_castps_si256(_mm256_blendv_ps(x, _mm256_set1_ps(f32::NEG_INFINITY), nan));
            let flip = _mm256_or_si256(_mm256_srai_epi32::<31>(x), _mm256_set1_epi32(i32::MIN));
            _mm256_xor_si256(x, flip)
        })
    }
    #[inline(always)]
    fn at_least(self, x: __m256i, bound: __m256i) -> u32 {
        op!({
            let at_least = _mm256_cmpeq_epi32(_mm256_max_epu32(x, bound), x);
            _mm256_movemask_ps(_mm256_castsi256_ps(at_least)) as u32
        })
    }

    #[inline(always)]
    fn codes(self, words: __m256i, shift: i32, mask: u32) -> [__m256i; 2] {
        let mask = self.splat_u32(mask & 0xff_00ff);
        let shifted = op!(match shift < 0 {
            true => _mm256_sllv_epi32(words, _mm256_set1_epi32(-shift)),
            false => _mm256_srlv_epi32(words, _mm256_set1_epi32(shift)),
        });
        // A shift to the left drops bits of byte 3 that the mask would drop.
        op!([_mm256_and_si256(shifted, mask), _mm256_and_si256(_mm256_srli_epi32::<8>(shifted), mask)])
    }
    #[inline(always)]
    fn add_products(self, sum: __m256i, codes: [__m256i; 2], factors: [__m256i; 2]) -> __m256i {
        op!({
            let sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes[0], factors[0]));
            _mm256_add_epi32(sum, _mm256_madd_epi16(codes[1], factors[1]))
        })
    }
    #[inline(always)]
    fn total(self, sum: __m256i) -> __m256i {
        sum
    }
    #[inline(always)]
    unsafe fn write_chosen(self, out: *mut u32, x: __m256i, chosen: u32) {
        op!({
            let order = _mm256_loadu_si256(CHOSEN_FIRST[chosen as usize].as_ptr().cast());
            _mm256_storeu_si256(out.cast(), _mm256_permutevar8x32_epi32(x, order));
        });
    }

    #[inline(always)]
    fn transpose_rows(self, rows: [&[f32]; 4], out: &mut [f32]) {
        let [a, b, c, d] = rows.map(|row| row.as_chunks::<8>().0);
        let columns = out.chunks_mut(8 * BLOCK);
        for ((((a, b), c), d), columns) in a.iter().zip(b).zip(c).zip(d).zip(columns) {
            assert!(columns.len() >= 7 * BLOCK + 4);
            op!({
                let [a, b, c, d] = [a, b, c, d].map(|row| _mm256_loadu_ps(row.as_ptr()));
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                // Register i holds components i and 4 + i of the rows.
                let registers = [
                    _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0xEE>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0xEE>(ab_high, cd_high),
                ];
                for (i, x) in registers.into_iter().enumerate() {
                    let out = columns.as_mut_ptr().add(i * BLOCK);
                    _mm_storeu_ps(out, _mm256_castps256_ps128(x));
                    _mm_storeu_ps(out.add(4 * BLOCK), _mm256_extractf128_ps::<1>(x));
                }
            });
        }
        transpose_rows(rows, rows[0].len() / 8 * 8, out);
    }
    #[inline(always)]
    unsafe fn unpack<const NBITS: u32>(self, run: *const u8) -> [__m256i; 2] {
        op!({
            if NBITS == 8 {
                return [_mm256_loadu_si256(run.cast()), _mm256_loadu_si256(run.add(32).cast())];
            }
            let mut codes = [_mm256_setzero_si256(); 2];
            let mut at = run;
            if NBITS & 4 != 0 {
                let mask = _mm256_set1_epi8(15);
                let pairs = _mm256_loadu_si256(at.cast());
                codes =
                    [_mm256_and_si256(pairs, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(pairs), mask)];
                at = at.add(32);
            }
            if NBITS & 2 != 0 {
                let quads = _mm256_broadcastsi128_si256(_mm_loadu_si128(at.cast()));
                let low_bits = _mm_cvtsi32_si128(if NBITS & 4 != 0 { 4 } else { 0 });
                for (half, codes) in codes.iter_mut().enumerate() {
                    let s = 4 * half as i32;
                    let shifts = _mm256_setr_epi32(s, s, s, s, s + 2, s + 2, s + 2, s + 2);
                    let plane = _mm256_and_si256(_mm256_srlv_epi32(quads, shifts), _mm256_set1_epi8(3));
                    *codes = _mm256_or_si256(*codes, _mm256_sll_epi16(plane, low_bits));
                }
                at = at.add(16);
            }
            if NBITS & 1 != 0 {
                let eights = _mm256_set1_epi64x(at.cast::<i64>().read_unaligned());
                let low_bits = _mm_cvtsi32_si128((NBITS - 1) as i32);
                for (half, codes) in codes.iter_mut().enumerate() {
                    let s = 4 * half as i64;
                    let shifts = _mm256_setr_epi64x(s, s + 1, s + 2, s + 3);
                    let plane = _mm256_and_si256(_mm256_srlv_epi64(eights, shifts), _mm256_set1_epi8(1));
                    *codes = _mm256_or_si256(*codes, _mm256_sll_epi16(plane, low_bits));
                }
            }
            codes
        })
    }
    #[inline(always)]
    unsafe fn table<const NBITS: u32>(self, p: *const u8) -> *const u8 {
        p
    }
    #[inline(always)]
    fn look_up<const NBITS: u32>(self, table: *const u8, [first, second]: [__m256i; 2]) -> [__m256i; 2] {
        [look_up_half::<NBITS>(table, first), look_up_half::<NBITS>(table, second)]
    }

    #[inline(always)]
    fn add_bytes(self, sums: [[__m256i; 2]; 2], bytes: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        let [[pairs_a, odd_a], [pairs_b, odd_b]] = sums;
        let [a, b] = bytes;
        op!([
            [_mm256_add_epi16(pairs_a, a), _mm256_add_epi16(odd_a, _mm256_srli_epi16::<8>(a))],
            [_mm256_add_epi16(pairs_b, b), _mm256_add_epi16(odd_b, _mm256_srli_epi16::<8>(b))],
        ])
    }
    #[inline(always)]
    fn store_sums(self, out: &mut [u16; 64], sums: [[__m256i; 2]; 2]) {
        for (half, [pairs, odd]) in sums.into_iter().enumerate() {
            op!({
                // pairs = even + 256 * odd, modulo 2^16.
                let even = _mm256_sub_epi16(pairs, _mm256_slli_epi16::<8>(odd));
                let low = _mm256_unpacklo_epi16(even, odd);
                let high = _mm256_unpackhi_epi16(even, odd);
                let out = out.as_mut_ptr().add(32 * half);
                _mm256_storeu_si256(out.cast(), _mm256_permute2x128_si256::<0x20>(low, high));
                _mm256_storeu_si256(out.add(16).cast(), _mm256_permute2x128_si256::<0x31>(low, high));
            });
        }
    }

    #[inline(always)]
    unsafe fn float_table<const NBITS: u32>(
        self,
        row: *const f32,
        planes: *const u8,
    ) -> (*const f32, *const u8) {
        (row, planes)
    }
    #[inline(always)]
    fn look_up_floats<const NBITS: u32>(
        self,
        (row, planes): (*const f32, *const u8),
        codes: [__m256i; 2],
    ) -> [__m256; 8] {
        let mut block = [self.splat(0.0); 8];
        if NBITS > Self::FLOAT_TABLE_BITS {
            // Four trees of blends cost more than a gather from here on: about 190 cycles against 84 for 64
            // codes on Zen 4.
            let zero = op!(_mm256_setzero_si256());
            for (four, codes) in block.chunks_exact_mut(4).zip(codes) {
                let indices = join(codes, zero, zero, zero);
                for (floats, indices) in four.iter_mut().zip(indices) {
                    *floats = op!(_mm256_i32gather_ps::<4>(row, indices));
                }
            }
            return block;
        }
        let len = row_len(1 << NBITS);
        for (four, codes) in block.chunks_exact_mut(4).zip(codes) {
            let joined = join(
                look_up_half::<NBITS>(planes, codes),
                look_up_half::<NBITS>(planes.wrapping_add(len), codes),
                look_up_half::<NBITS>(planes.wrapping_add(2 * len), codes),
                look_up_half::<NBITS>(planes.wrapping_add(3 * len), codes),
            );
            for (floats, joined) in four.iter_mut().zip(joined) {
                *floats = op!(_mm256_castsi256_ps(joined));
            }
        }
        block
    }
    #[inline(always)]
    fn zero_block(self) -> [__m256; 8] {
        [self.splat(0.0); 8]
    }
    #[inline(always)]
    unsafe fn load_block(self, p: *const f32) -> [__m256; 8] {
        op!({
            let mut block = [_mm256_setzero_ps(); 8];
            for half in 0..2 {
                for i in 0..2 {
                    let near = _mm256_loadu_ps(p.add(32 * half + 8 * i));
                    let far = _mm256_loadu_ps(p.add(32 * half + 8 * i + 16));
                    block[4 * half + 2 * i] = _mm256_permute2f128_ps::<0x20>(near, far);
                    block[4 * half + 2 * i + 1] = _mm256_permute2f128_ps::<0x31>(near, far);
                }
            }
            block
        })
    }
    #[inline(always)]
    unsafe fn store_block(self, p: *mut f32, block: [__m256; 8]) {
        for half in 0..2 {
            for i in 0..2 {
                let (a, b) = (block[4 * half + 2 * i], block[4 * half + 2 * i + 1]);
                op!(_mm256_storeu_ps(p.add(32 * half + 8 * i), _mm256_permute2f128_ps::<0x20>(a, b)));
                op!(_mm256_storeu_ps(p.add(32 * half + 8 * i + 16), _mm256_permute2f128_ps::<0x31>(a, b)));
            }
        }
    }
}
