//! Powers of two with a fraction of a byte: one table, since `exp2` of a whole block would take as long as
//! its dot products.

/// `2^(i / 16)`.
const SIXTEENTHS: [f32; 16] = [
    1.0,
    1.044_273_8,
    1.090_507_7,
    1.138_788_6,
    1.189_207_1,
    1.241_857_8,
    1.296_839_6,
    1.354_255_6,
    core::f32::consts::SQRT_2,
    1.476_826_1,
    1.542_210_8,
    1.610_490_3,
    1.681_792_9,
    1.756_252_2,
    1.834_008_1,
    1.915_206_6,
];

/// `2^((code - 128) / 16)`, [`decode_norm`](crate::decode_norm) to a unit in the last place.
#[inline(always)]
pub(super) fn norm(code: u8) -> f32 {
    sixteenths(code % 16) * power(u32::from(code / 16) + 127 - 8)
}

/// `2^((code - 128) / 8)`.
#[inline(always)]
pub(super) fn step(code: u8) -> f32 {
    sixteenths(code % 8 * 2) * power(u32::from(code / 8) + 127 - 16)
}

/// The nearest code of a step, 0 or 255 outside the range; 0 for NaN.
pub(super) fn encode_step(step: f32) -> u8 {
    (libm::log2f(step) * 8.0 + 128.5) as u8 // saturates
}

/// `2^(i / 16)`: selections in a tree vectorize, a look-up does not.
#[inline(always)]
fn sixteenths(i: u8) -> f32 {
    let mut left = SIXTEENTHS;
    for half in [8, 4, 2, 1] {
        for j in 0..half {
            left[j] = if i & half as u8 == 0 { left[j] } else { left[j + half] };
        }
    }
    left[0]
}

#[inline(always)]
fn power(exponent: u32) -> f32 {
    f32::from_bits(exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_power_of_two() {
        for code in 0..=255 {
            let exact = |over: f64| libm::exp2((f64::from(code) - 128.0) / over);
            assert!((f64::from(norm(code)) / exact(16.0) - 1.0).abs() < 1.2e-7, "{code}");
            assert!((f64::from(step(code)) / exact(8.0) - 1.0).abs() < 1.2e-7, "{code}");
            assert!((norm(code) / crate::decode_norm(code) - 1.0).abs() < 2.4e-7, "{code}");
            assert_eq!(encode_step(step(code)), code);
        }
        assert_eq!([0.0, f32::NAN, -1.0, f32::INFINITY].map(encode_step), [0, 0, 0, 255]);
    }
}
