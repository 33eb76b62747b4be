//! The random numbers of training: one seed gives one result.

use alloc::vec::Vec;

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). The random numbers of training must not change with the
/// version of a dependency, since equal seeds give equal bytes.
pub(crate) struct SplitMix64(pub u64);

impl SplitMix64 {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n` up to a bias of n / 2^64; `n` must not be 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }

    /// Uniform in [0, 1), in steps of 2^-53.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// `k` different indices below `n` in random order; `0..n` in ascending order when `k >= n`.
    pub fn sample(&mut self, n: usize, k: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        if k < n {
            for i in 0..k {
                let other = i + self.below(n - i);
                order.swap(i, other);
            }
            order.truncate(k);
        }
        order
    }
}
