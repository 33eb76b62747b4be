//! Projection agrees with `svd_core::Map::project_into`.

use kv_gpu::svd::{Project, ProjectArguments, ProjectShape};
use kv_gpu::{Element, Error};
use svd_core::{Backend, Map, Rows, RowsMut};

use crate::common::{Buffer, Random, device, from_element, launch, relative_error, to_element};

/// Maximum error of a row relative to its norm, or to the expected norm for a random map if that is greater:
/// the rounding of the map to f16, and of the result.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 1e-3), (Element::Bf16, 4e-3)];

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..40 {
        let mut random = Random(seed);
        let dim = random.pick(&[32, 64, 96, 128]);
        let rank = 8 * (1 + random.below(dim / 8));
        let shape = ProjectShape { dim, rank, element: random.pick(&[Element::F16, Element::Bf16]) };
        let element = shape.element;
        let (heads, n) = (1 + random.below(5), random.pick(&[1, 7, 32, 33, 500, 3000]));
        let rounded = |x: f32| from_element(element, to_element(element, x));
        let mut rows: Vec<f32> = random.normals(heads * n * dim).into_iter().map(rounded).collect();
        let spoiled = random.below(rows.len());
        rows[spoiled] = f32::NAN; // must affect this row alone
        let columns = random.normals(heads * dim * rank);

        // (n, heads, dim) on the device, so that strides matter.
        let mut there = vec![0_u16; rows.len()];
        for (i, row) in rows.chunks_exact(dim).enumerate() {
            let (head, row_of_head) = (i / n, i % n);
            for (d, &x) in row.iter().enumerate() {
                there[(row_of_head * heads + head) * dim + d] = to_element(element, x);
            }
        }
        let (there, columns_there) = (Buffer::new(&device, &there), Buffer::new(&device, &columns));
        let [out, twice, twice_apart] =
            [0, 1, 2].map(|_| Buffer::new(&device, &vec![0x7e01_u16; heads * n * rank]));
        let project = Project::new(&device, shape).unwrap();
        let arguments = ProjectArguments {
            heads,
            n,
            rows: there.pointer().cast(),
            strides: [dim, heads * dim],
            columns: columns_there.pointer(),
            out: out.pointer().cast(),
            pdl: false,
        };
        let launch = |arguments: &ProjectArguments| {
            launch!(device, project, arguments);
        };
        launch(&arguments);
        if rank == dim {
            // Projects the results again: a launch with PDL must wait for them.
            let again = ProjectArguments { rows: out.pointer().cast(), strides: [n * dim, dim], ..arguments };
            launch(&ProjectArguments { out: twice.pointer().cast(), pdl: true, ..again });
            device.stream().synchronize().unwrap();
            launch(&ProjectArguments { out: twice_apart.pointer().cast(), ..again });
            assert!(twice.read() == twice_apart.read(), "{shape:?}");
        }
        let got = out.read();

        let tolerance = TOLERANCES.iter().find(|(e, _)| *e == element).unwrap().1;
        for head in 0..heads {
            let map = Map::new(&columns[head * dim * rank..][..dim * rank], dim, rank).unwrap();
            let mut expected = vec![0.0; n * rank];
            let head_rows = Rows::contiguous(&rows[head * n * dim..][..n * dim], dim).unwrap();
            let projected = RowsMut::contiguous(&mut expected, rank).unwrap();
            map.project_into_with(Backend::Scalar, head_rows, projected).unwrap();
            for (row, expected) in expected.chunks_exact(rank).enumerate() {
                let bits = &got[(head * n + row) * rank..][..rank];
                let got: Vec<f32> = bits.iter().map(|&bits| from_element(element, bits)).collect();
                if spoiled / dim == head * n + row {
                    assert!(got.iter().all(|x| x.is_nan()), "{shape:?}: {got:?}");
                    continue;
                }
                let length = |x: &[f32]| x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
                let row_length = length(&rows[(head * n + row) * dim..][..dim]);
                let usual =
                    row_length * length(&columns[head * dim * rank..][..dim * rank]) / (dim as f64).sqrt();
                let error = relative_error(&got, expected) * length(expected) / usual.max(length(expected));
                assert!(error <= tolerance, "{shape:?} head {head} row {row}: error {error}");
            }
        }
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    for (dim, rank) in [(100, 8), (256, 64), (64, 0), (64, 72), (64, 12)] {
        let shape = ProjectShape { dim, rank, element: Element::F16 };
        assert!(matches!(shape.program((9, 0)), Err(Error::Unsupported { .. })), "{shape:?}");
    }
}
