//! Second moments agree with `svd_core::Gram`.

use kv_gpu::svd::{Gram, GramArguments, GramShape};
use kv_gpu::{Element, Error};
use svd_core::NoRope;

use crate::common::{Buffer, Random, device, from_element, launch, to_element};

/// Maximum error of an element relative to the square root of the product of its two diagonal elements.
/// Tensor cores sum 128 products in `f32` with their own rounding.
const TOLERANCE: f64 = 1e-6;

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..50 {
        let mut random = Random(seed);
        let element = random.pick(&[Element::F16, Element::Bf16]);
        let shape = GramShape { dim: random.pick(&[16, 32, 48, 64, 64, 80, 96, 112, 128, 128]), element };
        let (dim, heads) = (shape.dim, 1 + random.below(9));
        let n = random.pick(&[1, 7, 127, 128, 129, 500, 9000, 30_000]);
        let spread: Vec<f32> = (0..dim).map(|d| 10_f32.powf(-3.0 * d as f32 / dim as f32)).collect();
        // (n, heads, dim), so that strides matter.
        let numbers = random.normals(heads * n * dim);
        let bits: Vec<u16> =
            numbers.iter().enumerate().map(|(i, x)| to_element(element, x * spread[i % dim] + 0.5)).collect();
        let rows = Buffer::new(&device, &bits);
        let kernel = Gram::new(&device, shape).unwrap();
        let matrices = Buffer::new(&device, &vec![0.0_f64; heads * dim * dim]);
        let sums = Buffer::new(&device, &vec![0.0_f64; heads * dim]);
        let workspace = Buffer::scratch(&device, kernel.workspace_len(heads));
        let arguments = GramArguments {
            heads,
            n,
            rows: rows.pointer().cast(),
            strides: [dim, heads * dim],
            matrices: matrices.pointer(),
            sums: sums.pointer(),
            workspace: workspace.pointer(),
        };
        // Two launches: the second adds to the sums of the first.
        for _ in 0..2 {
            launch!(device, kernel, &arguments);
        }
        let (matrices, sums) = (matrices.read(), sums.read());
        let rows: Vec<f32> = bits.iter().map(|&bits| from_element(element, bits)).collect();
        for head in 0..heads {
            let mut expected = svd_core::Gram::<NoRope>::new(dim).unwrap();
            for _ in 0..2 {
                let rows = svd_core::Rows::contiguous(&rows, heads * dim).unwrap();
                expected.add_rows(rows.columns(head * dim, dim).unwrap()).unwrap();
            }
            let (matrix, sums) = (&matrices[head * dim * dim..][..dim * dim], &sums[head * dim..][..dim]);
            let got = svd_core::Gram::<NoRope>::from_sums(dim, 2 * n as u64, matrix, sums).unwrap();
            let (got_mean, mean) = (got.mean(), expected.mean());
            let expected = expected.matrix();
            for (i, (got, want)) in matrix.iter().zip(&expected).enumerate() {
                let (r, c) = (i / dim, i % dim);
                let scale = (expected[r * dim + r] * expected[c * dim + c]).sqrt();
                assert!(
                    (got - want).abs() <= TOLERANCE * scale,
                    "{shape:?}, {n} rows: ({r}, {c}) {got} {want}"
                );
                assert!(matrix[c * dim + r].to_bits() == got.to_bits(), "{shape:?}: not symmetric");
            }
            for (d, (got, want)) in got_mean.iter().zip(&mean).enumerate() {
                let scale = (expected[d * dim + d] / (2 * n) as f64).sqrt();
                assert!((got - want).abs() <= TOLERANCE * scale, "{shape:?}: mean {d} {got} {want}");
            }
        }
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    for dim in [0, 8, 100, 256] {
        let shape = GramShape { dim, element: Element::F16 };
        assert!(matches!(shape.program((9, 0)), Err(Error::Unsupported { .. })), "{dim}");
    }
}
