//! The inner products of one vector with rows of quantized blocks, by products of integers.

use kv_attend::Backend;
use kv_attend::simd::{Kernel, Run, Simd, dot};
use kv_model::{CodedRows, Codes};

use super::matmul::{TILE, rows_of};

/// `out[i] = rows[first + i] . x`, by groups of neighbouring codes that share a scale and an offset:
/// `sum over groups of scale * (codes . x) + offset * sum(x)`, in `f32` in an order that depends on the CPU.
///
/// In the products, `x` is rounded to 16 bits: to multiples of 1/32767 of the largest magnitude in its group.
/// That is 1/258 of the step of activations in 8 bits, at the same cost: the product of a code is that of
/// 16-bit integers.
///
/// # Cost
/// One pass over the blocks. Floor: their bytes from memory. 16 numbers take two loads, a conversion, a
/// multiply-add and an addition of AVX2, next to their share in unpacking the codes.
///
/// # Panics
/// When there are not so many rows, or they are not as long as `x`.
pub(crate) fn dot_codes(rows: CodedRows<'_>, first: usize, x: &[f32], out: &mut [f32]) {
    let (backend, fixed) = (Backend::detect(), Fixed::of(x, rows.group()));
    let mut codes = Codes::default();
    let tile = rows_of(TILE, x.len());
    for (i, out) in out.chunks_mut(tile).enumerate() {
        let first = first + i * tile;
        rows.unpack(first..first + out.len(), &mut codes);
        match rows.group() {
            16 => backend.run(ScaledDots::<16>::new(&codes, &fixed, out)),
            _ => backend.run(ScaledDots::<32>::new(&codes, &fixed, out)),
        }
        for (out, offsets) in out.iter_mut().zip(codes.offsets().chunks_exact(fixed.sums.len())) {
            *out += dot(offsets, &fixed.sums);
        }
    }
}

/// A vector in fixed point: groups of integers times the step of their group.
struct Fixed {
    integers: Vec<i16>,
    steps: Vec<f32>,
    sums: Vec<f32>, // of the numbers before they were rounded
}

impl Fixed {
    fn of(x: &[f32], group: usize) -> Self {
        const MOST: f32 = 32767.0;
        // Added to a number below 2^22 it leaves, rounded, an integer in the lowest bits.
        const TO_INTEGER: f32 = (3 << 22) as f32;
        let mut integers = Vec::with_capacity(x.len());
        let mut steps = Vec::with_capacity(x.len() / group);
        for x in x.chunks(group) {
            // By their bits a NaN is larger than infinity, and that than any number.
            let most = f32::from_bits(x.iter().fold(0, |most, x| most.max(x.abs().to_bits())));
            let scale = if most > 0.0 { MOST / most } else { 0.0 };
            integers.extend(x.iter().map(|x| (x * scale + TO_INTEGER).to_bits() as i16));
            steps.push(most / MOST);
        }
        Self { integers, steps, sums: x.chunks(group).map(|x| x.iter().sum()).collect() }
    }
}

/// `out[i] = sum over groups of scale * step * (codes . integers)`, of the codes and scales of each row.
struct ScaledDots<'a, const GROUP: usize> {
    codes: &'a [[i8; GROUP]],
    scales: &'a [f32],
    integers: &'a [[i16; GROUP]],
    steps: &'a [f32],
    out: &'a mut [f32],
}

impl<'a, const GROUP: usize> ScaledDots<'a, GROUP> {
    fn new(codes: &'a Codes, x: &'a Fixed, out: &'a mut [f32]) -> Self {
        let (codes, scales) = (codes.codes().as_chunks().0, codes.scales());
        let (integers, steps) = (x.integers.as_chunks().0, &x.steps);
        assert!(integers.len() == steps.len() && [codes.len(), scales.len()] == [steps.len() * out.len(); 2]);
        Self { codes, scales, integers, steps, out }
    }
}

impl<const GROUP: usize> Kernel for ScaledDots<'_, GROUP> {
    type Output = ();

    fn scalar(self) {
        let n = self.steps.len();
        let rows = self.codes.chunks_exact(n).zip(self.scales.chunks_exact(n));
        for (out, (codes, scales)) in self.out.iter_mut().zip(rows) {
            let product = |(codes, integers): (&[i8; GROUP], &[i16; GROUP])| -> i32 {
                codes.iter().zip(integers).map(|(&code, &x)| i32::from(code) * i32::from(x)).sum()
            };
            let products = codes.iter().zip(self.integers).map(product);
            let factors = scales.iter().zip(self.steps).map(|(scale, step)| scale * step);
            *out = factors.zip(products).map(|(factor, product)| factor * product as f32).sum();
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let n = self.steps.len();
        let (integers, integers_tail) = self.integers.as_chunks::<4>();
        let (steps, steps_tail) = self.steps.as_chunks::<4>();
        let rows = self.codes.chunks_exact(n).zip(self.scales.chunks_exact(n));
        for (out, (codes, scales)) in self.out.iter_mut().zip(rows) {
            let mut sums = [s.splat(0.0); 4];
            let (codes, codes_tail) = codes.as_chunks::<4>();
            let (scales, scales_tail) = scales.as_chunks::<4>();
            for ((codes, integers), (scales, steps)) in
                codes.iter().zip(integers).zip(scales.iter().zip(steps))
            {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = add_group(s, &codes[i], &integers[i], scales[i] * steps[i], *sum);
                }
            }
            let tail = codes_tail.iter().zip(integers_tail).zip(scales_tail.iter().zip(steps_tail));
            for ((codes, integers), (scale, step)) in tail {
                sums[0] = add_group(s, codes, integers, scale * step, sums[0]);
            }
            let [a, b, c, d] = s.sum4(sums);
            *out = (a + b) + (c + d);
        }
    }
}

/// `sum + factor * (codes * integers)`, lane by lane.
#[inline(always)]
fn add_group<S: Simd, const GROUP: usize>(
    s: S,
    codes: &[i8; GROUP],
    integers: &[i16; GROUP],
    factor: f32,
    sum: S::F32,
) -> S::F32 {
    // SAFETY: both arrays have as many items.
    let products = unsafe { s.dot_i8_i16::<GROUP>(codes.as_ptr(), integers.as_ptr()) };
    s.mul_add(products, s.splat(factor), sum)
}

#[cfg(test)]
mod tests {
    use kv_model::Matrix;

    use super::*;

    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect()
    }

    /// Every type on every backend, at lengths with and without a tail of groups.
    #[test]
    fn all_backends_agree_with_the_formula() {
        for n_in in [256, 768, 1024] {
            for matrix in Matrix::examples(5, n_in) {
                let Some(rows) = matrix.as_codes() else { continue };
                let x = Fixed::of(&numbers(n_in), rows.group());
                let mut codes = Codes::default();
                rows.unpack(0..5, &mut codes);
                let run = |backend: Backend| {
                    let mut out = vec![f32::NAN; 5];
                    match rows.group() {
                        16 => backend.run(ScaledDots::<16>::new(&codes, &x, &mut out)),
                        _ => backend.run(ScaledDots::<32>::new(&codes, &x, &mut out)),
                    }
                    out
                };
                for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                    for (i, out) in run(backend).into_iter().enumerate() {
                        let term = |j: usize| {
                            let at = i * n_in + j;
                            let scale = f64::from(codes.scales()[at / rows.group()]);
                            let x = f64::from(x.integers[j]) * f64::from(x.steps[j / rows.group()]);
                            f64::from(codes.codes()[at]) * scale * x
                        };
                        let (exact, sum): (f64, f64) =
                            ((0..n_in).map(term).sum(), (0..n_in).map(|j| term(j).abs()).sum());
                        assert!((f64::from(out) - exact).abs() <= 1e-6 * sum, "{backend:?}, {n_in}");
                    }
                }
            }
        }
    }

    #[test]
    fn fixed_point_rounds_to_the_step_of_a_group() {
        let x: Vec<f32> =
            numbers(96).into_iter().enumerate().map(|(i, x)| x * 10_f32.powi(i as i32 / 32)).collect();
        for group in [16, 32] {
            let Fixed { integers, steps, sums } = Fixed::of(&x, group);
            for (i, x) in x.iter().enumerate() {
                let (rounded, step) = (f32::from(integers[i]) * steps[i / group], steps[i / group]);
                assert!((rounded - x).abs() <= 0.51 * step, "{x} is {rounded}");
            }
            let exact = x[..group].iter().map(|x| f64::from(*x)).sum::<f64>();
            assert!((f64::from(sums[0]) - exact).abs() < 1e-5);
        }
    }

    /// A NaN or an infinity must reach the logits, which are checked.
    #[test]
    fn fixed_point_keeps_what_is_not_finite() {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 5, 31] {
                let mut x = numbers(32);
                x[at] = special;
                let Fixed { integers, steps, .. } = Fixed::of(&x, 32);
                assert!(
                    integers.iter().all(|&x| !(f32::from(x) * steps[0]).is_finite()),
                    "{special} at {at}"
                );
            }
        }
        assert_eq!(Fixed::of(&[0.0; 16], 16).steps, [0.0]);
        let tiny = Fixed::of(&[1e-45; 16], 16);
        assert!(tiny.integers.iter().all(|x| (f32::from(*x) * tiny.steps[0]).abs() <= 1e-45));
    }
}
