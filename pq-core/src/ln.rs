//! The natural logarithm as code that vectorizes, with the same bits on every backend.

/// `ln(x)` for finite `x >= 1`, to 2 units in the last place; finite for 0.
///
/// Vectorizes like `exp` of `kv-attend`: `x = 2^n (1 + f)` with `1 + f` between the square roots of 1/2 and
/// 2, and a polynomial of degree 9 for `ln(1 + f)` (Cephes).
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
