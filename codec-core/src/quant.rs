//! Numbers to bins and back: round to nearest, ties to even, no contraction.

/// Bins beyond this cannot be told apart in `f32` anyway; it bounds the escape code.
pub(crate) const MAX_BIN: i32 = 1 << 24;

/// The bin of `x`: `round(x / step)`, clamped to +-[`MAX_BIN`].
#[cfg(any(feature = "alloc", test))]
pub(crate) fn bin(x: f32, step: f32) -> i32 {
    let rounded = libm::rintf(x / step);
    rounded.clamp(-(MAX_BIN as f32), MAX_BIN as f32) as i32
}

/// The middle of a bin.
pub(crate) fn middle(bin: i32, step: f32) -> f32 {
    bin as f32 * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_even_and_range_is_clamped() {
        assert_eq!([0.5, 1.5, -0.5, -2.5].map(|x| bin(x, 1.0)), [0, 2, 0, -2]);
        assert_eq!(bin(f32::MAX, f32::MIN_POSITIVE), MAX_BIN);
        assert_eq!(bin(-1e30, 1e-3), -MAX_BIN);
    }
}
