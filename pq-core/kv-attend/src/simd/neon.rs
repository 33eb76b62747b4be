//! NEON: registers of four floats, 32 of them.

use core::arch::aarch64::*;

use super::{Kernel, Simd};
use crate::{instructions, op};

#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Runs a kernel. NEON is a feature of the compilation target.
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.vector(Neon(()))
}

impl Simd for Neon {
    type F32 = float32x4_t;
    type F64 = float64x2_t;

    const LANES: usize = 4;
    const WIDE: bool = true;

    instructions! {
        fn splat(x: f32) -> float32x4_t = vdupq_n_f32(x);
        unsafe fn load(p: *const f32) -> float32x4_t = vld1q_f32(p);
        unsafe fn store(p: *mut f32, x: float32x4_t) = vst1q_f32(p, x);
        fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        unsafe fn splat_f64(p: *const f64) -> float64x2_t = vld1q_dup_f64(p);
        unsafe fn load_f64(p: *const f64) -> float64x2_t = vld1q_f64(p);
        unsafe fn store_f64(p: *mut f64, x: float64x2_t) = vst1q_f64(p, x);
        fn add_f64(a: float64x2_t, b: float64x2_t) -> float64x2_t = vaddq_f64(a, b);
        fn mul_add_f64(a: float64x2_t, b: float64x2_t, c: float64x2_t) -> float64x2_t = vfmaq_f64(c, a, b);
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> float32x4_t {
        // The conversion intrinsic needs the unstable type f16. A half shifted into the fields of an f32 is
        // 2^-112 times its value; scaled back, a result of 2^16 or above was infinite or NaN.
        op!({
            let x = vmovl_u16(vld1_u16(p));
            let magnitude = vshlq_n_u32::<13>(vandq_u32(x, vdupq_n_u32(0x7fff)));
            let scaled =
                vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits(0x7780_0000)));
            let special = vcgeq_f32(scaled, vdupq_n_f32(65_536.0));
            let exponent = vandq_u32(special, vdupq_n_u32(0x7f80_0000));
            let sign = vshlq_n_u32::<16>(vandq_u32(x, vdupq_n_u32(0x8000)));
            vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(vreinterpretq_u32_f32(scaled), exponent), sign))
        })
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> float32x4_t {
        op!(vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(p)))))
    }
    #[inline(always)]
    unsafe fn dot_i8_i16<const N: usize>(self, a: *const i8, b: *const i16) -> float32x4_t {
        const { assert!(N == 16 || N == 32) };
        op!({
            let mut sums = vdupq_n_s32(0);
            let mut i = 0;
            while i < N {
                let (a, b) = (vmovl_s8(vld1_s8(a.add(i))), vld1q_s16(b.add(i)));
                sums = vmlal_s16(sums, vget_low_s16(a), vget_low_s16(b));
                sums = vmlal_s16(sums, vget_high_s16(a), vget_high_s16(b));
                i += 8;
            }
            vcvtq_f32_s32(sums)
        })
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: float32x4_t) {
        // The conversion intrinsic needs the unstable type f16.
        let mut lanes = [0.0; 4];
        // SAFETY: four floats in `lanes`; the caller guarantees four elements from `p` on.
        unsafe {
            self.store(lanes.as_mut_ptr(), x);
            p.cast::<[half::f16; 4]>().write_unaligned(lanes.map(half::f16::from_f32));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: float32x4_t) {
        let mut lanes = [0.0; 4];
        // SAFETY: as above.
        unsafe {
            self.store(lanes.as_mut_ptr(), x);
            p.cast::<[half::bf16; 4]>().write_unaligned(lanes.map(half::bf16::from_f32));
        }
    }
    #[inline(always)]
    fn sum4(self, [a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        op!({
            let sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), sums);
            out
        })
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn zero_f64(self) -> float64x2_t {
        op!(vdupq_n_f64(0.0))
    }
}
