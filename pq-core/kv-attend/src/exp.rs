//! Exponential and hyperbolic tangent: one definition that vectorizes, for the same bits everywhere.

/// `exp(x)` for `x <= 0`, to 2 units in the last place; 0 below -87.
///
/// One definition for all machines, which the compiler can vectorize: `x = n ln 2 + r` with `|r| <= ln(2)/2`,
/// a polynomial of degree 6 for `exp(r)` (Cephes), and `n` added to the exponent. `ln 2` is split in two so
/// that `r` is exact. NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
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
    // The lowest bits of `shifted` are those of `n`; a conversion to an integer would vectorize badly.
    let scaled = exp_r * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { scaled }
}

/// `tanh(x)`, to 4 units in the last place. Vectorizes, as [`exp`] does: a polynomial of degree 11 below
/// 0.625 (Cephes), `(1 - e) / (1 + e)` with `e = exp(-2 |x|)` above. NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn tanh(x: f32) -> f32 {
    let square = x * x;
    let mut p = -5.704_988_7e-3;
    for c in [2.063_909e-2, -5.373_971_6e-2, 0.133_314_42, -0.333_332_8] {
        p = p * square + c;
    }
    let small = p * square * x + x;
    let e = exp(-2.0 * x.abs());
    let large = ((1.0 - e) / (1.0 + e)).copysign(x);
    if x.abs() < 0.625 { small } else { large }
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
    fn the_hyperbolic_tangent_agrees_with_f64() {
        for i in -400_000..400_000 {
            let x = i as f32 * 2.5e-5;
            let exact = libm::tanh(f64::from(x));
            assert!((f64::from(tanh(x)) - exact).abs() <= 4.8e-7 * exact.abs(), "{x}: {} {exact}", tanh(x));
        }
        assert_eq!((tanh(0.0), tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (0.0, 1.0, -1.0));
        assert!(tanh(f32::NAN).is_nan());
    }
}
