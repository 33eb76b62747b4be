//! NEON: a table of 256 bytes lives in sixteen registers, looked up 64 bytes at a time.
//!
//! Block order is token order: register `v` holds tokens `4 v` to `4 v + 3`.

use core::arch::aarch64::*;

use kv_attend::{instructions, op};

use super::{Kernel, Simd, row_len};

#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Runs a kernel. Callers have checked that NEON is part of the compilation target.
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.vector(Neon(()))
}

impl Simd for Neon {
    type F32 = float32x4_t;
    type U32 = uint32x4_t;
    type Codes = [uint32x4_t; 2]; // bytes 0 and 2, bytes 1 and 3, as 16-bit halves
    type Products = uint32x4_t;
    type Bytes = [uint8x16_t; 4];
    type Table = [uint8x16x4_t; 4];
    type FloatTable = *const u8;
    type Sums = [[uint16x8_t; 2]; 4];
    type Block = [float32x4_t; 16];

    const LANES: usize = 4;
    const WIDE: bool = true;
    const FLOAT_TABLE_BITS: u32 = 8;

    #[inline(never)]
    fn call<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }

    instructions! {
        fn splat(x: f32) -> float32x4_t = vdupq_n_f32(x);
        unsafe fn load(p: *const f32) -> float32x4_t = vld1q_f32(p);
        unsafe fn store(p: *mut f32, x: float32x4_t) = vst1q_f32(p, x);
        unsafe fn load_u16(p: *const u16) -> float32x4_t = vcvtq_f32_u32(vmovl_u16(vld1_u16(p)));
        fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t = vaddq_f32(a, b);
        fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        fn neg_mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmsq_f32(c, a, b);
        fn sum(x: float32x4_t) -> f32 = vaddvq_f32(x);
        fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t = vminnmq_f32(a, b);
        fn splat_u32(x: u32) -> uint32x4_t = vdupq_n_u32(x);
        unsafe fn load_u32(p: *const u32) -> uint32x4_t = vld1q_u32(p);
        unsafe fn store_u32(p: *mut u32, x: uint32x4_t) = vst1q_u32(p, x);
        fn min_lane(x: float32x4_t) -> f32 = vminvq_f32(x);
        fn lanes() -> uint32x4_t = vld1q_u32([0, 1, 2, 3].as_ptr());
        fn add_u32(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t = vaddq_u32(a, b);
        fn no_sums() -> [[uint16x8_t; 2]; 4] = [[vdupq_n_u16(0); 2]; 4];
    }

    #[inline(always)]
    fn any_less(self, a: float32x4_t, b: float32x4_t) -> bool {
        op!(vmaxvq_u32(vcltq_f32(a, b))) != 0
    }

    #[inline(always)]
    fn keep_smaller(
        self,
        best: (float32x4_t, uint32x4_t),
        candidate: float32x4_t,
        index: uint32x4_t,
    ) -> (float32x4_t, uint32x4_t) {
        op!({
            let smaller = vcltq_f32(candidate, best.0);
            (vbslq_f32(smaller, candidate, best.0), vbslq_u32(smaller, index, best.1))
        })
    }

    #[inline(always)]
    fn min_lanes(self, [a, b, c, d]: [float32x4_t; 4], out: &mut [f32; 4]) -> [float32x4_t; 4] {
        op!({
            let x = vpminq_f32(vpminq_f32(a, b), vpminq_f32(c, d));
            vst1q_f32(out.as_mut_ptr(), x);
            [
                vdupq_laneq_f32::<0>(x),
                vdupq_laneq_f32::<1>(x),
                vdupq_laneq_f32::<2>(x),
                vdupq_laneq_f32::<3>(x),
            ]
        })
    }
    #[inline(always)]
    fn equal(self, a: float32x4_t, b: float32x4_t) -> u32 {
        op!({
            let bits = vld1q_u32([1, 2, 4, 8].as_ptr());
            vaddvq_u32(vandq_u32(vceqq_f32(a, b), bits))
        })
    }

    #[inline(always)]
    fn keys(self, scores: float32x4_t) -> uint32x4_t {
        op!({
            let not_nan = vceqq_f32(scores, scores);
            let x = vaddq_f32(scores, vdupq_n_f32(0.0));
            let x = vreinterpretq_s32_f32(vbslq_f32(not_nan, x, vdupq_n_f32(f32::NEG_INFINITY)));
            let flip = vorrq_s32(vshrq_n_s32::<31>(x), vdupq_n_s32(i32::MIN));
            vreinterpretq_u32_s32(veorq_s32(x, flip))
        })
    }
    #[inline(always)]
    fn at_least(self, x: uint32x4_t, bound: uint32x4_t) -> u32 {
        op!({
            let bits = vld1q_u32([1, 2, 4, 8].as_ptr());
            vaddvq_u32(vandq_u32(vcgeq_u32(x, bound), bits))
        })
    }

    #[inline(always)]
    fn codes(self, words: uint32x4_t, shift: i32, mask: u32) -> [uint32x4_t; 2] {
        let mask = self.splat_u32(mask & 0xff_00ff);
        [shift, shift + 8].map(
            #[inline(always)]
            |shift| op!(vandq_u32(vshlq_u32(words, vdupq_n_s32(-shift)), mask)),
        )
    }
    #[inline(always)]
    fn no_products(self) -> uint32x4_t {
        self.splat_u32(0)
    }
    #[inline(always)]
    fn add_products(self, sum: uint32x4_t, codes: [uint32x4_t; 2], factors: [uint32x4_t; 2]) -> uint32x4_t {
        let mut sum = sum;
        for (codes, factors) in codes.into_iter().zip(factors) {
            sum = op!({
                let (codes, factors) = (vreinterpretq_s16_u32(codes), vreinterpretq_s16_u32(factors));
                let low = vmull_s16(vget_low_s16(codes), vget_low_s16(factors));
                let pairs = vpaddq_s32(low, vmull_high_s16(codes, factors));
                vaddq_u32(sum, vreinterpretq_u32_s32(pairs))
            });
        }
        sum
    }
    #[inline(always)]
    fn total(self, sum: uint32x4_t) -> uint32x4_t {
        sum
    }
    #[inline(always)]
    unsafe fn write_chosen(self, mut out: *mut u32, x: uint32x4_t, chosen: u32) {
        let mut lanes = [0; 4];
        op!(vst1q_u32(lanes.as_mut_ptr(), x));
        for (lane, x) in lanes.into_iter().enumerate() {
            // Always written, and kept unless the next write overwrites it: no branch to mispredict.
            op!({
                out.write(x);
                out = out.add((chosen >> lane & 1) as usize);
            });
        }
    }

    #[inline(always)]
    unsafe fn unpack<const NBITS: u32>(self, run: *const u8) -> [uint8x16_t; 4] {
        op!({
            if NBITS == 8 {
                return [vld1q_u8(run), vld1q_u8(run.add(16)), vld1q_u8(run.add(32)), vld1q_u8(run.add(48))];
            }
            let mut codes = [vdupq_n_u8(0); 4];
            let mut at = run;
            if NBITS & 4 != 0 {
                let pairs = [vld1q_u8(at), vld1q_u8(at.add(16))];
                let mask = vdupq_n_u8(15);
                codes = [
                    vandq_u8(pairs[0], mask),
                    vandq_u8(pairs[1], mask),
                    vshrq_n_u8::<4>(pairs[0]),
                    vshrq_n_u8::<4>(pairs[1]),
                ];
                at = at.add(32);
            }
            if NBITS & 2 != 0 {
                let quads = vld1q_u8(at);
                let low_bits = vdupq_n_s8(if NBITS & 4 != 0 { 4 } else { 0 });
                for (i, codes) in codes.iter_mut().enumerate() {
                    let shifted = vshlq_u8(quads, vdupq_n_s8(-2 * i as i8));
                    let plane = vandq_u8(shifted, vdupq_n_u8(3));
                    *codes = vorrq_u8(*codes, vshlq_u8(plane, low_bits));
                }
                at = at.add(16);
            }
            if NBITS & 1 != 0 {
                let eights = vcombine_u8(vld1_u8(at), vld1_u8(at));
                let low_bits = vdupq_n_s8(NBITS as i8 - 1);
                for (i, codes) in codes.iter_mut().enumerate() {
                    let s = -2 * i as i8;
                    let shifted = vshlq_u8(eights, vcombine_s8(vdup_n_s8(s), vdup_n_s8(s - 1)));
                    let plane = vandq_u8(shifted, vdupq_n_u8(1));
                    *codes = vorrq_u8(*codes, vshlq_u8(plane, low_bits));
                }
            }
            codes
        })
    }
    #[inline(always)]
    unsafe fn table<const NBITS: u32>(self, p: *const u8) -> [uint8x16x4_t; 4] {
        op!({
            let rows = if NBITS <= 4 { 1 } else { 1 << (NBITS - 4) };
            let row = |i: usize| if i < rows { vld1q_u8(p.add(16 * i)) } else { vdupq_n_u8(0) };
            [0, 4, 8, 12].map(|i| uint8x16x4_t(row(i), row(i + 1), row(i + 2), row(i + 3)))
        })
    }
    #[inline(always)]
    fn look_up<const NBITS: u32>(self, table: [uint8x16x4_t; 4], codes: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        codes.map(|codes| {
            op!({
                if NBITS <= 4 {
                    return vqtbl1q_u8(table[0].0, codes);
                }
                // An index beyond the 64 bytes at hand keeps the bytes found in the others.
                let mut found = vqtbl4q_u8(table[0], codes);
                if NBITS > 6 {
                    found = vqtbx4q_u8(found, table[1], vsubq_u8(codes, vdupq_n_u8(64)));
                }
                if NBITS > 7 {
                    found = vqtbx4q_u8(found, table[2], vsubq_u8(codes, vdupq_n_u8(128)));
                    found = vqtbx4q_u8(found, table[3], vsubq_u8(codes, vdupq_n_u8(192)));
                }
                found
            })
        })
    }

    #[inline(always)]
    fn add_bytes(self, mut sums: [[uint16x8_t; 2]; 4], bytes: [uint8x16_t; 4]) -> [[uint16x8_t; 2]; 4] {
        for (sums, bytes) in sums.iter_mut().zip(bytes) {
            *sums = op!([vaddw_u8(sums[0], vget_low_u8(bytes)), vaddw_high_u8(sums[1], bytes)]);
        }
        sums
    }
    #[inline(always)]
    fn store_sums(self, out: &mut [u16; 64], sums: [[uint16x8_t; 2]; 4]) {
        for (out, sums) in out.chunks_exact_mut(8).zip(sums.as_flattened()) {
            op!(vst1q_u16(out.as_mut_ptr(), *sums));
        }
    }

    #[inline(always)]
    unsafe fn float_table<const NBITS: u32>(self, _: *const f32, planes: *const u8) -> *const u8 {
        planes
    }
    #[inline(always)]
    fn look_up_floats<const NBITS: u32>(
        self,
        planes: *const u8,
        codes: [uint8x16_t; 4],
    ) -> [float32x4_t; 16] {
        let len = row_len(1 << NBITS);
        op!({
            // 32 registers hold the tables of one plane at a time.
            let a = self.look_up::<NBITS>(self.table::<NBITS>(planes), codes);
            let b = self.look_up::<NBITS>(self.table::<NBITS>(planes.add(len)), codes);
            let c = self.look_up::<NBITS>(self.table::<NBITS>(planes.add(2 * len)), codes);
            let d = self.look_up::<NBITS>(self.table::<NBITS>(planes.add(3 * len)), codes);
            let mut block = [vdupq_n_f32(0.0); 16];
            for (i, four) in block.chunks_exact_mut(4).enumerate() {
                let ab = [vzip1q_u8(a[i], b[i]), vzip2q_u8(a[i], b[i])];
                let cd = [vzip1q_u8(c[i], d[i]), vzip2q_u8(c[i], d[i])];
                for v in 0..2 {
                    let (ab, cd) = (vreinterpretq_u16_u8(ab[v]), vreinterpretq_u16_u8(cd[v]));
                    four[2 * v] = vreinterpretq_f32_u16(vzip1q_u16(ab, cd));
                    four[2 * v + 1] = vreinterpretq_f32_u16(vzip2q_u16(ab, cd));
                }
            }
            block
        })
    }
    #[inline(always)]
    fn zero_block(self) -> [float32x4_t; 16] {
        [self.splat(0.0); 16]
    }
    #[inline(always)]
    unsafe fn load_block(self, p: *const f32) -> [float32x4_t; 16] {
        op!(core::array::from_fn(|i| vld1q_f32(p.add(4 * i))))
    }
    #[inline(always)]
    unsafe fn store_block(self, p: *mut f32, block: [float32x4_t; 16]) {
        for (i, x) in block.into_iter().enumerate() {
            op!(vst1q_f32(p.add(4 * i), x));
        }
    }
}
