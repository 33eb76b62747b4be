//! The levels of uniform midrise quantizers.

/// The optimal steps of uniform midrise quantizers of 0 to 8 bits for a Gaussian of unit variance.
///
/// Max, "Quantizing for Minimum Distortion", IRE Trans. 1960, table 2. The step of 0 bits has no effect.
pub const STEPS: [f32; 9] = [1.0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308];

/// The level of code `c` of `bits` bits, in steps.
#[inline(always)]
pub(super) fn level(c: u8, bits: u32) -> f32 {
    f32::from(c) + 0.5 - half_range(bits)
}

/// `2^(bits - 1)`: half of the number of levels.
#[inline(always)]
pub(super) fn half_range(bits: u32) -> f32 {
    0.5 * (1_u32 << bits) as f32
}

/// The code of a number of `per_step * x` steps.
#[inline(always)]
pub(super) fn code(x: f32, per_step: f32, bits: u32) -> u8 {
    let x = x * per_step + half_range(bits);
    let top = ((1_u32 << bits) - 1) as f32;
    // NaN becomes 0. The order of the comparisons lets them vectorize.
    let x = if x > 0.0 { x } else { 0.0 };
    (if x < top { x } else { top }) as i32 as u8
}
