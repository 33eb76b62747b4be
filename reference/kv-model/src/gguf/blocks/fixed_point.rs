//! Vectors in 16-bit fixed point, which codes are multiplied with.

use kv_attend::Backend;
use kv_attend::simd::{Kernel, Run, Simd};

/// A vector in groups of integers times the step of their group, which is 1/32767 of its largest magnitude.
///
/// That is 1/258 of the step of activations in 8 bits, at about the same cost: the product of a code is that
/// of 16-bit integers.
#[derive(Clone, Debug)]
pub struct FixedPoint {
    pub(super) integers: Vec<[i16; 32]>, // (len / 32,)
    pub(super) steps: Vec<f32>,          // (len / group,)
    pub(super) sums: Vec<f32>,           // of the numbers of a group before they were rounded
}

impl FixedPoint {
    /// A vector in groups of 16 or 32.
    pub(crate) fn new(x: &[f32], group: usize) -> Self {
        match group {
            16 => Backend::detect().run(Round { x: x.as_chunks::<16>().0 }),
            _ => Backend::detect().run(Round { x: x.as_chunks::<32>().0 }),
        }
    }

    /// Numbers.
    pub(crate) const fn len(&self) -> usize {
        32 * self.integers.len()
    }

    /// Numbers of a step.
    pub(crate) const fn group(&self) -> usize {
        self.len() / self.steps.len()
    }
}

/// [`FixedPoint::new`].
struct Round<'a, const GROUP: usize> {
    x: &'a [[f32; GROUP]],
}

impl<const GROUP: usize> Kernel for Round<'_, GROUP> {
    type Output = FixedPoint;

    #[inline(always)]
    fn scalar(self) -> FixedPoint {
        const MOST: f32 = 32767.0;
        // Added to a number below 2^22 it leaves, rounded, an integer in the lowest bits.
        const TO_INTEGER: f32 = (3 << 22) as f32;
        let n = self.x.len();
        let mut integers = vec![[0; 32]; n * GROUP / 32];
        let (mut steps, mut sums) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for (x, out) in self.x.iter().zip(integers.as_flattened_mut().as_chunks_mut::<GROUP>().0) {
            // By their bits a NaN is larger than infinity, and that than any number.
            let most = f32::from_bits(x.iter().fold(0, |most, x| most.max(x.abs().to_bits())));
            let scale = if most > 0.0 { MOST / most } else { 0.0 };
            out.iter_mut().zip(x).for_each(|(out, x)| *out = (x * scale + TO_INTEGER).to_bits() as i16);
            steps.push(most / MOST);
            sums.push(x.iter().sum());
        }
        FixedPoint { integers, steps, sums }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) -> FixedPoint {
        self.scalar()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect()
    }

    /// On every backend.
    fn rounded<const GROUP: usize>(x: &[f32]) -> Vec<FixedPoint> {
        let available = Backend::ALL.into_iter().filter(|backend| backend.is_available());
        available.map(|backend| backend.run(Round { x: x.as_chunks::<GROUP>().0 })).collect()
    }

    #[test]
    fn numbers_are_rounded_to_the_step_of_their_group() {
        let x: Vec<f32> =
            numbers(96).into_iter().enumerate().map(|(i, x)| x * 10_f32.powi(i as i32 / 32)).collect();
        for (group, all) in [(16, rounded::<16>(&x)), (32, rounded::<32>(&x))] {
            for FixedPoint { integers, steps, sums } in all {
                for (i, x) in x.iter().enumerate() {
                    let step = steps[i / group];
                    let rounded = f32::from(integers.as_flattened()[i]) * step;
                    assert!((rounded - x).abs() <= 0.51 * step, "{x} is {rounded}");
                }
                for (x, sum) in x.chunks(group).zip(sums) {
                    let exact = x.iter().map(|x| f64::from(*x)).sum::<f64>();
                    assert!((f64::from(sum) - exact).abs() < 1e-3);
                }
            }
        }
    }

    /// A NaN or an infinity must reach the logits, which are checked.
    #[test]
    fn what_is_not_finite_stays_so() {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 5, 31] {
                let mut x = numbers(32);
                x[at] = special;
                for FixedPoint { integers, steps, .. } in rounded::<32>(&x) {
                    let mut numbers = integers[0].iter().map(|&x| f32::from(x) * steps[0]);
                    assert!(numbers.all(|x| !x.is_finite()), "{special} at {at}");
                }
            }
        }
        for zero in rounded::<32>(&[0.0; 32]) {
            assert_eq!((zero.integers[0], zero.steps[0]), ([0; 32], 0.0));
        }
        for FixedPoint { integers, steps, .. } in rounded::<32>(&[1e-45; 32]) {
            assert!(integers[0].iter().all(|x| (f32::from(*x) * steps[0]).abs() <= 1e-45));
        }
    }
}
