//! Estimates of the coded size.

use crate::model::slots::{MAX_SYMBOLS, PRECISION, SLOTS, Starts};
use crate::quant;

/// Fractional bits of a [`cost`].
pub(crate) const COST_BITS: u32 = 8;

/// The size of bins under a model, in units of `2^-COST_BITS` bits.
pub(crate) fn cost((low_bits, starts): (u32, Starts<'_>), bins: impl ExactSizeIterator<Item = i32>) -> i64 {
    let symbols = starts.symbols();
    let mut costs = [i64::from(low_bits) << COST_BITS; MAX_SYMBOLS];
    for (symbol, cost) in costs[..symbols].iter_mut().enumerate() {
        let end = starts.0.get(symbol + 1).copied().unwrap_or(SLOTS);
        *cost += i64::from(COSTS[usize::from(end - starts.0[symbol])]);
    }
    costs[symbols - 1] += 16 << COST_BITS; // the bin itself follows the escape
    bins.map(|bin| costs[quant::symbol(bin, low_bits).min(symbols as u32 - 1) as usize]).sum()
}

/// The size of symbols with these counts under a model, in the same units, without that of escaped values.
pub(crate) fn cost_of_counts(counts: &[u64; MAX_SYMBOLS], low_bits: u32, starts: Starts<'_>) -> u64 {
    let widths = starts.0.windows(2).map(|pair| usize::from(pair[1] - pair[0]));
    let last = starts.0.last().map(|&start| usize::from(SLOTS - start));
    let cost = |width: usize| u64::from(COSTS[width]) + (u64::from(low_bits) << COST_BITS);
    counts.iter().zip(widths.chain(last)).filter(|(n, _)| **n > 0).map(|(n, width)| n * cost(width)).sum()
}

/// The standard deviation of `n` values that were rounded to bins with this sum of squares.
pub(crate) fn deviation(squares: f64, n: f64) -> f64 {
    // Rounding adds 1/12 to the variance.
    libm::sqrt((squares / n.max(1.0) - 1.0 / 12.0).max(0.0))
}

/// The standard deviation that a model expects, without escapes.
pub(crate) fn deviation_under((low_bits, starts): (u32, Starts<'_>)) -> f64 {
    let symbols = starts.symbols();
    let squares = (0..symbols - 1).map(|symbol| {
        let bin = f64::from(quant::unzigzag(symbol as u32) << low_bits);
        f64::from(starts.0[symbol + 1] - starts.0[symbol]) * bin * bin
    });
    deviation(squares.sum(), f64::from(SLOTS))
}

/// The logarithm to base 2 of a positive normal value, within 1e-9.
///
/// It uses only operations that every machine rounds the same way, so that encoders on CPUs and GPUs take the
/// same decisions.
pub(crate) fn log2(x: f64) -> f64 {
    let (one, bits) = (1.0_f64.to_bits(), x.to_bits());
    let mantissa = f64::from_bits(bits & ((1 << 52) - 1) | one);
    let exponent = (bits >> 52) as f64 - (one >> 52) as f64;
    // 2 atanh(s) is the natural logarithm of mantissa / sqrt(2), mantissa in 1..2; s is within
    // -0.1716..=0.1716.
    let s = (mantissa - core::f64::consts::SQRT_2) / (mantissa + core::f64::consts::SQRT_2);
    let square = s * s;
    let sum = [11.0, 9.0, 7.0, 5.0, 3.0, 1.0].iter().fold(0.0, |sum, n| sum * square + 1.0 / n);
    exponent + 0.5 + 2.0 * core::f64::consts::LOG2_E * (s * sum)
}

/// `PRECISION - log2(width)` in units of `2^-COST_BITS`.
static COSTS: [u16; SLOTS as usize + 1] = {
    let mut all = [0; SLOTS as usize + 1];
    let mut width = 1;
    while width < all.len() {
        // Bit by bit: the square of a value in 1..2 is at least 2 exactly if the next bit of its logarithm is
        // 1.
        let whole = width.ilog2();
        let (mut x, mut log) = ((width as u64) << (32 - whole), whole as u16);
        let mut digit = 0;
        while digit < COST_BITS {
            x = ((x as u128 * x as u128) >> 32) as u64;
            let carry = x >> 33;
            log = log << 1 | carry as u16;
            x >>= carry;
            digit += 1;
        }
        all[width] = ((PRECISION as u16) << COST_BITS) - log;
        width += 1;
    }
    all
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log2_is_a_logarithm() {
        for i in 1..4000 {
            let x = f64::from(i) * f64::from(i) / 1000.0;
            assert!((log2(x) - x.log2()).abs() < 1e-9, "{x}: {}", log2(x));
        }
    }

    #[test]
    fn costs_are_logarithms() {
        for (width, &cost) in COSTS.iter().enumerate().skip(1) {
            let exact = 256.0 * (4096.0 / width as f64).log2();
            assert!((0.0..1.01).contains(&(f64::from(cost) - exact)), "{width}: {cost} {exact}");
        }
    }
}
