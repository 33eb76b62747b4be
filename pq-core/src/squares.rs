//! The sum of squares of rows, with which the error of their codes is compared.

use kv_attend::simd::{Kernel, Run, Simd};

use crate::assign::finite;
use crate::{Backend, Element, Rows};

/// The sum of the squares of all elements; those that are not finite count as 0, as in codes. Vector forms
/// add the squares of a row in `f32`.
pub(crate) fn squares<E: Element>(backend: Backend, rows: Rows<'_, E>) -> f64 {
    backend.run(Squares { rows })
}

struct Squares<'a, E> {
    rows: Rows<'a, E>,
}

impl<E: Element> Kernel for Squares<'_, E> {
    type Output = f64;

    fn scalar(self) -> f64 {
        self.rows.iter().map(of_elements).sum()
    }

    /// N.B. A closure over rows instead of the loop is not compiled for the instruction set: an append of
    /// rows to codes of 32x6 took twice as long, instead of 1.03 times.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f64 {
        let (mut total, components) = (0.0, self.rows.components());
        let whole = components / (4 * S::LANES) * 4 * S::LANES;
        for row in self.rows.iter() {
            let mut sums = [s.splat(0.0); 4];
            for first in (0..whole).step_by(4 * S::LANES) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: a row has at least `whole` elements, of which 4 LANES are from `first` on.
                    let x = unsafe { E::load(s, row.as_ptr().add(first + i * S::LANES)) };
                    *sum = s.mul_add(x, x, *sum);
                }
            }
            let [a, b, c, d] = s.sum4(sums);
            let sum = f64::from((a + b) + (c + d));
            // An element that is not finite, or one whose square is beyond f32.
            total += if sum.is_finite() { sum + of_elements(&row[whole..]) } else { of_elements(row) };
        }
        total
    }
}

fn of_elements<E: Element>(elements: &[E]) -> f64 {
    elements.iter().map(|&x| f64::from(finite(x)) * f64::from(finite(x))).sum()
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use half::{bf16, f16};

    use super::*;

    #[test]
    fn every_backend_adds_the_finite_squares() {
        fn check<E: Element>(special: f32) {
            for (dim, at) in [(1, 0), (15, 3), (64, 64), (67, 66), (128, 128), (130, 5)] {
                let element = |i: usize| E::from_f32(if i == at { special } else { (i % 13) as f32 - 6.0 });
                let elements: Vec<E> = (0..3 * dim).map(element).collect();
                let expected = of_elements(&elements);
                let rows = Rows::contiguous(&elements, dim).unwrap();
                for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                    let sum = squares(backend, rows);
                    assert!((sum - expected).abs() <= 1e-5 * expected, "{backend:?} {dim}: {sum} {expected}");
                }
            }
        }
        for special in [0.0, f32::NAN, f32::NEG_INFINITY, 3e38] {
            check::<f32>(special);
            check::<f16>(special);
            check::<bf16>(special);
        }
    }
}
