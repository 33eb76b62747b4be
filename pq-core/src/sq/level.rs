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
    floor(if x < top { x } else { top }).1 as u8
}

/// The integer part of a number from 0 to 2^22, as a float and as an integer. A cast would not vectorize,
/// since it saturates.
#[inline(always)]
pub(super) fn floor(x: f32) -> (f32, u32) {
    const ONES: f32 = 8_388_608.0; // 2^23: from here to its double, floats are the integers
    let nearest = x + ONES;
    let floor = if nearest - ONES > x { nearest - 1.0 } else { nearest };
    (floor - ONES, floor.to_bits() & 0x7f_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_integer_part() {
        for i in 0..100_000 {
            let x = i as f32 * 0.003_7;
            assert_eq!(floor(x), (x.trunc(), x as u32), "{x}");
        }
        for x in [1.0, 2.5, 254.999_98, 255.0, 32_512.5, 4_194_303.0] {
            assert_eq!(floor(x), (x.trunc(), x as u32), "{x}");
        }
    }
}
