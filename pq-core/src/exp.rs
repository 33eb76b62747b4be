/// `exp(x)` for `x <= 0`, to 2 units in the last place; 0 below -87.
///
/// One definition for every machine, in operations that vectorize: `x = n ln 2 + r` with `|r| <= ln 2 / 2`, a
/// polynomial of degree 6 for `exp(r)` (Cephes), and `n` added to the exponent. `ln 2` is split in two so
/// that `r` is exact. NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    let clamped = if x < -87.0 { -87.0 } else { x };
    let shifted = clamped * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_2e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + c;
    }
    let exp_r = (p * r * r + r) + 1.0;
    // The lowest bits of `shifted` are those of `n`, which avoids a conversion to an integer, since that
    // vectorizes poorly.
    let scaled = exp_r * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { scaled }
}

/// `ln(x)` for finite `x >= 1`, to 2 units in the last place; finite for 0.
///
/// Vectorizes, as [`exp`] does: `x = 2^n (1 + f)` with `1 + f` between the square roots of 1/2 and 2, and a
/// polynomial of degree 9 for `ln(1 + f)` (Cephes).
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const ROOT_HALF: u32 = 0x3f35_04f3; // bits of the square root of 1/2
    let above = x.to_bits().wrapping_sub(ROOT_HALF);
    let n = (above as i32 >> 23) as f32;
    let f = f32::from_bits((above & 0x007f_ffff) + ROOT_HALF) - 1.0;
    let mut p = 7.037_683_6e-2;
    for c in [
        -0.115_146_1,
        0.116_769_99,
        -0.124_201_41,
        0.142_493_23,
        -0.166_680_58,
        0.200_007_14,
        -0.249_999_94,
        0.333_333_3,
    ] {
        p = p * f + c;
    }
    let small = p * f * f * f + n * LN2_LOW - 0.5 * f * f;
    f + small + n * LN2_HIGH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_f64() {
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = libm::exp(f64::from(x));
            assert!((f64::from(exp(x)) - exact).abs() <= 2.4e-7 * exact, "{x}: {} {exact}", exp(x));
        }
        assert_eq!((exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn the_logarithm_agrees_with_f64() {
        let small = (0..2_000_000).map(|i| 1.0 + i as f32 * 1e-4);
        let every = (f32::to_bits(1.0)..f32::INFINITY.to_bits()).step_by(997).map(f32::from_bits);
        for x in small.chain(every) {
            let exact = libm::log(f64::from(x));
            assert!((f64::from(ln(x)) - exact).abs() <= 2.4e-7 * exact, "{x}: {} {exact}", ln(x));
        }
        assert!(ln(1.0) == 0.0 && ln(0.0).is_finite());
    }
}
