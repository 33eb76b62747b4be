//! Floating-point codes of 8 and 4 bits: E4M3 (`fp8_e4m3` of vLLM and FlashInfer), and E2M1 in blocks of 16
//! with a scale in E4M3 (NVFP4).

use std::array;
use std::sync::LazyLock;

use super::codecs::{pack, unpack};
use super::store::BlockCodec;

/// The non-negative finite numbers of a format of `N` codes, in the order of the codes. The sign is the bit
/// above them.
struct MiniFloat<const N: usize> {
    numbers: [f32; N],
}

/// OCP's E4M3: finite up to 448, without infinities.
static E4M3: LazyLock<MiniFloat<0x7f>> = LazyLock::new(|| MiniFloat::new(3, 7));

/// OCP's E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
static E2M1: LazyLock<MiniFloat<8>> = LazyLock::new(|| MiniFloat::new(1, 1));

impl<const N: usize> MiniFloat<N> {
    /// A format with so many bits of the mantissa, and a bias of the exponent.
    fn new(mantissa_bits: u32, bias: i32) -> Self {
        let one = 1 << mantissa_bits;
        let numbers = array::from_fn(|code| {
            let (exponent, mantissa) = ((code / one) as i32, (code % one) as f32 / one as f32);
            match exponent {
                0 => mantissa * 2_f32.powi(1 - bias),
                _ => (1.0 + mantissa) * 2_f32.powi(exponent - bias),
            }
        });
        Self { numbers }
    }

    /// The code of the nearest number, of two the even code; beyond the largest number that of the largest.
    fn code(&self, x: f32) -> u8 {
        let magnitude = x.abs();
        let above = self.numbers.partition_point(|&number| number < magnitude).min(N - 1);
        let below = above.saturating_sub(1);
        let [down, up] = [magnitude - self.numbers[below], self.numbers[above] - magnitude];
        let nearest = if down < up || (down == up && below.is_multiple_of(2)) { below } else { above };
        nearest as u8 | if x.is_sign_negative() { Self::SIGN } else { 0 }
    }

    fn number(&self, code: u8) -> f32 {
        let number = self.numbers[usize::from(code & (Self::SIGN - 1))];
        if code & Self::SIGN == 0 { number } else { -number }
    }

    const SIGN: u8 = N.next_power_of_two() as u8;
}

/// E4M3 codes of elements over a scale; what is beyond the largest number becomes it, as in vLLM.
pub(crate) struct Fp8 {
    pub scale: f32,
}

impl Fp8 {
    /// The largest element at scale 1.
    pub const MOST: f32 = 448.0;
}

impl BlockCodec for Fp8 {
    fn encode(&self, rows: &[f32], _head_dim: usize, bytes: &mut Vec<u8>) {
        bytes.extend(rows.iter().map(|x| E4M3.code(x / self.scale)));
    }

    fn decode(&self, bytes: &[u8], _head_dim: usize, rows: &mut [f32]) {
        rows.iter_mut().zip(bytes).for_each(|(x, &code)| *x = E4M3.number(code) * self.scale);
    }
}

/// E2M1 codes of blocks of neighbouring components over a scale in E4M3, which is over a scale of the layer.
pub(crate) struct NvFp4 {
    pub scale: f32,
}

impl NvFp4 {
    /// The largest element at scale 1.
    pub const MOST: f32 = 6.0 * Fp8::MOST;

    /// Components per block. The last one of a row may have fewer.
    const BLOCK: usize = 16;
    const BITS: u32 = 4;
}

impl BlockCodec for NvFp4 {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        for block in rows.chunks_exact(head_dim).flat_map(|row| row.chunks(Self::BLOCK)) {
            let largest = block.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            let scale = E4M3.code(largest / 6.0 / self.scale);
            bytes.push(scale);
            let scale = E4M3.number(scale) * self.scale;
            let code = |x: &f32| if scale > 0.0 { E2M1.code(x / scale) } else { 0 };
            pack(&block.iter().map(code).collect::<Vec<_>>(), Self::BITS, bytes);
        }
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        let mut rest = bytes;
        for block in rows.chunks_exact_mut(head_dim).flat_map(|row| row.chunks_mut(Self::BLOCK)) {
            let Some((&scale, codes)) = rest.split_first() else { return };
            let (codes, tail) = codes.split_at(block.len().div_ceil(2));
            rest = tail;
            let scale = E4M3.number(scale) * self.scale;
            unpack(codes, Self::BITS, block, |code| E2M1.number(code) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of a format by its fields, and whether its code is even.
    fn numbers(exponents: u32, mantissa_bits: u32, bias: i32, most: f64) -> Vec<(f64, bool)> {
        let of = |e: u32, m: u32| -> f64 {
            let fraction = f64::from(m) / f64::from(1 << mantissa_bits);
            if e == 0 {
                fraction * 2_f64.powi(1 - bias)
            } else {
                (1.0 + fraction) * 2_f64.powi(e as i32 - bias)
            }
        };
        let all = (0..exponents).flat_map(|e| (0..1 << mantissa_bits).map(move |m| (e, m)));
        all.map(|(e, m)| (of(e, m), m % 2 == 0)).filter(|(x, _)| *x <= most).collect()
    }

    /// The nearest number, of two the one with the even code.
    fn nearest(numbers: &[(f64, bool)], x: f64) -> f64 {
        let distance = |number: f64| (x.abs() - number).abs();
        let closer =
            |a: &&(f64, bool), b: &&(f64, bool)| distance(a.0).total_cmp(&distance(b.0)).then(b.1.cmp(&a.1));
        numbers.iter().min_by(closer).unwrap().0.copysign(x)
    }

    fn rows() -> Vec<f32> {
        let scattered = |i: u32| ((i * 7919 % 2003) as f32 / 1000.0 - 1.0) * 2_f32.powi(i as i32 % 13 - 6);
        let mut rows: Vec<f32> = (0..320).map(scattered).collect();
        rows[16..32].fill(0.0);
        (rows[40], rows[60]) = (1e-6, -5000.0);
        // Halfway between two numbers.
        rows[64..72].copy_from_slice(&[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]);
        rows
    }

    fn decoded(codec: &dyn BlockCodec, rows: &[f32], head_dim: usize) -> (Vec<f32>, usize) {
        let (mut bytes, mut decoded) = (vec![], vec![f32::NAN; rows.len()]);
        codec.encode(rows, head_dim, &mut bytes);
        codec.decode(&bytes, head_dim, &mut decoded);
        (decoded, bytes.len())
    }

    #[test]
    fn the_formats_are_those_of_the_standard() {
        assert_eq!(E2M1.numbers, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        let codes: [(f32, u8); 9] = [
            (0.0, 0x00),
            (0.001_953_125, 0x01), // 2^-9, the smallest
            (0.015_625, 0x08),     // 2^-6, the smallest normal one
            (1.0, 0x38),
            (-1.0, 0xb8),
            (448.0, 0x7e),
            (1e9, 0x7e),
            (-f32::INFINITY, 0xfe),
            (17.0, 0x58), // between 16 and 18: the even code
        ];
        for (x, code) in codes {
            assert_eq!(E4M3.code(x), code, "{x}");
        }
        assert!(
            (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f).all(|code| E4M3.code(E4M3.number(code)) == code)
        );
    }

    #[test]
    fn elements_are_the_nearest_numbers_over_the_scale() {
        let e4m3 = numbers(16, 3, 7, 448.0);
        assert_eq!(e4m3.len(), 127);
        for scale in [1.0, 0.25] {
            let (got, bytes) = decoded(&Fp8 { scale }, &rows(), 64);
            assert_eq!(bytes, rows().len());
            for (&x, got) in rows().iter().zip(got) {
                let (x, scale) = (f64::from(x), f64::from(scale));
                assert_eq!(f64::from(got), nearest(&e4m3, x / scale) * scale, "{x}");
            }
        }
    }

    #[test]
    fn blocks_are_the_nearest_numbers_over_the_nearest_scale() {
        let (e4m3, e2m1) = (numbers(16, 3, 7, 448.0), numbers(4, 1, 1, 6.0));
        for (scale, head_dim) in [(1.0, 64), (0.25, 64), (1.0, 40)] {
            let (got, bytes) = decoded(&NvFp4 { scale }, &rows(), head_dim);
            let blocks = rows().len() / head_dim * head_dim.div_ceil(16);
            assert_eq!(bytes, rows().len() / 2 + blocks);
            for (row, got) in rows().chunks(head_dim).zip(got.chunks(head_dim)) {
                for (block, got) in row.chunks(16).zip(got.chunks(16)) {
                    let largest = block.iter().fold(0.0_f64, |most, &x| most.max(f64::from(x.abs())));
                    let step = nearest(&e4m3, largest / 6.0 / f64::from(scale)) * f64::from(scale);
                    for (&x, &got) in block.iter().zip(got) {
                        let expected =
                            if step > 0.0 { nearest(&e2m1, f64::from(x) / step) * step } else { 0.0 };
                        assert!(
                            (f64::from(got) - expected).abs() <= 1e-6 * expected.abs(),
                            "{x}: {got}, {expected}"
                        );
                    }
                }
            }
        }
    }
}
