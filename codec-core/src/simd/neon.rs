//! NEON: 32 lanes are four registers of 16-bit or eight of 32-bit elements. A mask is all ones where the flag
//! is set.

use core::arch::aarch64::*;

use super::{Kernel, REFILL_BYTES, SPILL_WORDS, Simd};
use crate::model::tables::{KEY_BITS, LANES, Row, last_key};

#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Runs a kernel compiled for NEON. Callers have checked that the backend is available.
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    #[target_feature(enable = "neon")]
    fn with_features<K: Kernel>(kernel: K) -> K::Output {
        kernel.vector(Neon(()))
    }
    // SAFETY: `Backend::run` calls this only where `is_available` has confirmed the features.
    unsafe { with_features(kernel) }
}

/// An expression of intrinsics, which the token `Neon` makes safe.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of `Neon` exists only if the CPU has the features; pointers are into slices whose
        // length has been checked, or arrays.
        unsafe { $e }
    }};
}

/// For every set of four lanes that read a word: the byte indices of each lane's word. Those of the upper
/// half are out of range, which gives zero.
static TAKEN: [[u8; 16]; 16] = {
    let mut all = [[255; 16]; 16];
    let mut set = 0;
    while set < 16 {
        let (mut lane, mut taken) = (0, 0);
        while lane < 4 {
            all[set][4 * lane] = 2 * taken;
            all[set][4 * lane + 1] = 2 * taken + 1;
            taken += (set >> lane & 1) as u8;
            lane += 1;
        }
        set += 1;
    }
    all
};

/// For every set of four lanes that write a word: the byte indices of their lower halves in order, at the
/// end.
static GIVEN: [[u8; 8]; 16] = {
    let mut all = [[0; 8]; 16];
    let mut set: usize = 0;
    while set < 16 {
        let (mut lane, mut at) = (0, 8 - 2 * set.count_ones() as usize);
        while lane < 4 {
            if set >> lane & 1 == 1 {
                all[set][at] = 4 * lane;
                all[set][at + 1] = 4 * lane + 1;
                at += 2;
            }
            lane += 1;
        }
        set += 1;
    }
    all
};

/// One bit per lane of a mask, lane 0 lowest.
#[inline(always)]
fn set_of(mask: uint32x4_t) -> usize {
    const WEIGHTS: [u32; 4] = [1, 2, 4, 8];
    op!(vaddvq_u32(vandq_u32(mask, vld1q_u32(WEIGHTS.as_ptr())))) as usize
}

#[inline(always)]
fn widen(x: [uint16x8_t; 4]) -> [uint32x4_t; 8] {
    let mut wide = op!([vdupq_n_u32(0); 8]);
    for i in 0..4 {
        op!({
            wide[2 * i] = vmovl_u16(vget_low_u16(x[i]));
            wide[2 * i + 1] = vmovl_high_u16(x[i]);
        });
    }
    wide
}

#[inline(always)]
fn narrow(x: [uint32x4_t; 8]) -> [uint16x8_t; 4] {
    let mut row = op!([vdupq_n_u16(0); 4]);
    for i in 0..4 {
        row[i] = op!(vmovn_high_u32(vmovn_u32(x[2 * i]), x[2 * i + 1]));
    }
    row
}

impl Simd for Neon {
    type Row = [uint16x8_t; 4];
    type Wide = [uint32x4_t; 8];
    type Mask = [uint16x8_t; 4];

    #[inline(always)]
    fn splat(self, x: u16) -> [uint16x8_t; 4] {
        op!([vdupq_n_u16(x); 4])
    }
    #[inline(always)]
    fn load(self, row: &Row) -> [uint16x8_t; 4] {
        let mut x = self.splat(0);
        for (x, row) in x.iter_mut().zip(row.as_chunks::<8>().0) {
            *x = op!(vld1q_u16(row.as_ptr()));
        }
        x
    }
    #[inline(always)]
    fn store(self, row: &mut Row, x: [uint16x8_t; 4]) {
        for (row, x) in row.as_chunks_mut::<8>().0.iter_mut().zip(x) {
            op!(vst1q_u16(row.as_mut_ptr(), x));
        }
    }
    #[inline(always)]
    fn add(self, a: [uint16x8_t; 4], b: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut x = a;
        for i in 0..4 {
            x[i] = op!(vaddq_u16(a[i], b[i]));
        }
        x
    }
    #[inline(always)]
    fn sub(self, a: [uint16x8_t; 4], b: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut x = a;
        for i in 0..4 {
            x[i] = op!(vsubq_u16(a[i], b[i]));
        }
        x
    }
    #[inline(always)]
    fn min(self, a: [uint16x8_t; 4], b: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut x = a;
        for i in 0..4 {
            x[i] = op!(vminq_u16(a[i], b[i]));
        }
        x
    }
    #[inline(always)]
    fn max(self, a: [uint16x8_t; 4], b: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut x = a;
        for i in 0..4 {
            x[i] = op!(vmaxq_u16(a[i], b[i]));
        }
        x
    }
    #[inline(always)]
    fn last_keys(self, slots: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut keys = self.splat(last_key(0));
        for i in 0..4 {
            keys[i] = op!(vorrq_u16(vshlq_n_u16::<{ KEY_BITS as i32 }>(slots[i]), keys[i]));
        }
        keys
    }
    #[inline(always)]
    fn slots_of(self, keys: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut slots = keys;
        for i in 0..4 {
            slots[i] = op!(vshrq_n_u16::<{ KEY_BITS as i32 }>(keys[i]));
        }
        slots
    }
    #[inline(always)]
    fn at_least(self, a: [uint16x8_t; 4], b: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut x = a;
        for i in 0..4 {
            x[i] = op!(vcgeq_u16(a[i], b[i]));
        }
        x
    }
    #[inline(always)]
    fn any(self, mask: [uint16x8_t; 4]) -> bool {
        op!({
            let either = vorrq_u16(vorrq_u16(mask[0], mask[1]), vorrq_u16(mask[2], mask[3]));
            vmaxvq_u16(either) != 0
        })
    }
    #[inline(always)]
    fn select(self, mask: [uint16x8_t; 4], yes: [uint16x8_t; 4], no: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        let mut x = no;
        for i in 0..4 {
            x[i] = op!(vbslq_u16(mask[i], yes[i], no[i]));
        }
        x
    }

    #[inline(always)]
    fn load_wide(self, x: &[u32; LANES]) -> [uint32x4_t; 8] {
        let mut wide = op!([vdupq_n_u32(0); 8]);
        for (wide, x) in wide.iter_mut().zip(x.as_chunks::<4>().0) {
            *wide = op!(vld1q_u32(x.as_ptr()));
        }
        wide
    }
    #[inline(always)]
    fn store_wide(self, out: &mut [u32; LANES], x: [uint32x4_t; 8]) {
        for (out, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(x) {
            op!(vst1q_u32(out.as_mut_ptr(), x));
        }
    }
    #[inline(always)]
    fn slots(self, states: [uint32x4_t; 8]) -> [uint16x8_t; 4] {
        let mut row = narrow(states);
        for x in &mut row {
            *x = op!(vandq_u16(*x, vdupq_n_u16(0xfff)));
        }
        row
    }
    #[inline(always)]
    fn advance(
        self,
        states: [uint32x4_t; 8],
        width: [uint16x8_t; 4],
        offset: [uint16x8_t; 4],
    ) -> [uint32x4_t; 8] {
        let (width, offset) = (widen(width), widen(offset));
        let mut next = states;
        for i in 0..8 {
            next[i] = op!(vmlaq_u32(offset[i], width[i], vshrq_n_u32::<12>(states[i])));
        }
        next
    }
    #[inline(always)]
    fn take_low_bits(
        self,
        states: [uint32x4_t; 8],
        code: [uint16x8_t; 4],
        bits: [uint32x4_t; 8],
    ) -> ([uint32x4_t; 8], [uint16x8_t; 4]) {
        let (mut rest, mut code) = (states, widen(code));
        for i in 0..8 {
            op!({
                let left = vreinterpretq_s32_u32(bits[i]);
                rest[i] = vshlq_u32(states[i], vnegq_s32(left));
                let low = veorq_u32(states[i], vshlq_u32(rest[i], left));
                code[i] = vorrq_u32(vshlq_u32(code[i], left), low);
            });
        }
        (rest, narrow(code))
    }
    #[inline(always)]
    fn refill(self, states: &mut [uint32x4_t; 8], words: &[u8]) -> usize {
        assert!(words.len() >= REFILL_BYTES);
        let mut used = 0;
        for state in states {
            op!({
                let taking = vceqzq_u32(vshrq_n_u32::<16>(*state));
                let set = set_of(taking);
                let next = vqtbl1q_u8(vld1q_u8(words.as_ptr().add(used)), vld1q_u8(TAKEN[set].as_ptr()));
                let refilled = vorrq_u32(vshlq_n_u32::<16>(*state), vreinterpretq_u32_u8(next));
                *state = vbslq_u32(taking, refilled, *state);
                used += 2 * set.count_ones() as usize;
            });
        }
        used
    }

    #[inline(always)]
    fn splat_wide(self, x: u32) -> [uint32x4_t; 8] {
        op!([vdupq_n_u32(x); 8])
    }
    #[inline(always)]
    fn widen(self, x: [uint16x8_t; 4]) -> [uint32x4_t; 8] {
        widen(x)
    }
    #[inline(always)]
    fn sub_from_32(self, x: [uint32x4_t; 8]) -> [uint32x4_t; 8] {
        let mut y = x;
        for i in 0..8 {
            y[i] = op!(vsubq_u32(vdupq_n_u32(32), x[i]));
        }
        y
    }
    #[inline(always)]
    fn split(self, code: [uint16x8_t; 4], bits: [uint32x4_t; 8]) -> ([uint16x8_t; 4], [uint16x8_t; 4]) {
        let (mut symbol, mut low, bits) = (code, code, narrow(bits));
        for i in 0..4 {
            op!({
                let left = vreinterpretq_s16_u16(bits[i]);
                symbol[i] = vshlq_u16(code[i], vnegq_s16(left));
                low[i] = veorq_u16(code[i], vshlq_u16(symbol[i], left));
            });
        }
        (symbol, low)
    }
    #[inline(always)]
    fn join(self, states: [uint32x4_t; 8], low: [uint16x8_t; 4], bits: [uint32x4_t; 8]) -> [uint32x4_t; 8] {
        let (mut joined, low) = (states, widen(low));
        for i in 0..8 {
            joined[i] = op!(vorrq_u32(vshlq_u32(states[i], vreinterpretq_s32_u32(bits[i])), low[i]));
        }
        joined
    }
    #[inline(always)]
    fn spill(
        self,
        states: &mut [uint32x4_t; 8],
        shift: [uint32x4_t; 8],
        bound: [uint32x4_t; 8],
        words: &mut [u16],
    ) -> usize {
        assert!(words.len() >= SPILL_WORDS);
        let end = words.as_mut_ptr_range().end;
        let mut written = 0;
        for i in [7, 6, 5, 4, 3, 2, 1, 0] {
            op!({
                let right = vnegq_s32(vreinterpretq_s32_u32(shift[i]));
                let spilling = vcgeq_u32(vshlq_u32(states[i], right), bound[i]);
                let set = set_of(spilling);
                let words = vqtbl1_u8(vreinterpretq_u8_u32(states[i]), vld1_u8(GIVEN[set].as_ptr()));
                // All four words are stored; later stores overwrite the invalid ones.
                vst1_u8(end.sub(written + 4).cast(), words);
                written += set.count_ones() as usize;
                states[i] = vbslq_u32(spilling, vshrq_n_u32::<16>(states[i]), states[i]);
            });
        }
        written
    }
    #[inline(always)]
    fn encode(
        self,
        states: [uint32x4_t; 8],
        start: [uint16x8_t; 4],
        width: [uint16x8_t; 4],
    ) -> [uint32x4_t; 8] {
        let (mut next, start, width) = (states, widen(start), widen(width));
        for i in 0..8 {
            op!({
                let reciprocal = vdivq_f32(vdupq_n_f32(1.0), vcvtq_f32_u32(width[i]));
                let quotient = vcvtq_u32_f32(vmulq_f32(vcvtq_f32_u32(states[i]), reciprocal));
                let rest = vmlsq_u32(states[i], quotient, width[i]);
                // A quotient that is one too large gives a negative remainder, one too small a remainder of
                // at least the width.
                let below = vcltzq_s32(vreinterpretq_s32_u32(rest));
                let quotient = vaddq_u32(quotient, below);
                let rest = vaddq_u32(rest, vandq_u32(below, width[i]));
                let above = vcgeq_u32(rest, width[i]);
                let quotient = vsubq_u32(quotient, above);
                let rest = vsubq_u32(rest, vandq_u32(above, width[i]));
                next[i] = vaddq_u32(vshlq_n_u32::<12>(quotient), vaddq_u32(rest, start[i]));
            });
        }
        next
    }
}
