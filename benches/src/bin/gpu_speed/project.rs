//! Projection of rows to the components that rotations keep.

use half::f16;
use kv_gpu::Element;
use kv_gpu::svd::{Project, ProjectArguments, ProjectShape};
use svd_core::{Map, Rows, RowsMut};

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const N: usize = 32_768;
const DIM: usize = 128;

pub fn run(watch: &Stopwatch) {
    for (heads, rank) in [(8, 64), (8, 128), (32, 64)] {
        let load = format!("{heads} heads x {N} x {DIM} to {rank}");
        if !watch.wants("project", &load) {
            continue;
        }
        let shape = ProjectShape { dim: DIM, rank, element: Element::F16 };
        let project = Project::new(&watch.gpu, shape).unwrap();
        let number = |i: usize| ((i * 2_654_435_761) % 2001) as f32 / 1000.0 - 1.0;
        let rows: Vec<f16> = (0..N * DIM).map(|i| f16::from_f32(number(i))).collect();
        let columns: Vec<f32> = (0..DIM * rank).map(|i| f16::from_f32(number(i + 7)).to_f32()).collect();
        let copies = BEYOND_CACHE / (heads * N * (DIM + rank) * 2) + 2;
        let there: Vec<_> = (0..copies).map(|_| watch.upload(&rows.repeat(heads))).collect();
        let out: Vec<_> = (0..copies).map(|_| watch.zeros::<f16>(heads * N * rank)).collect();
        let columns_there = watch.upload(&columns.repeat(heads));
        let arguments = |copy: usize, pdl: bool| ProjectArguments {
            heads,
            n: N,
            rows: watch.pointer(&there[copy]).cast(),
            strides: [N * DIM, DIM],
            columns: watch.pointer(&columns_there),
            out: watch.pointer(&out[copy]).cast(),
            pdl,
        };
        let [us, us_pdl] = [false, true].map(|pdl| {
            let all: Vec<ProjectArguments> = (0..copies).map(|copy| arguments(copy, pdl)).collect();
            // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
            watch.time(2 * copies, |i, stream| unsafe { project.launch(stream, &all[i % copies]) })
        });

        // Compares the last head with the CPU.
        let wide: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
        let mut expected = vec![0.0; N * rank];
        let (rows, projected) = (Rows::contiguous(&wide, DIM), RowsMut::contiguous(&mut expected, rank));
        let map = Map::new(&columns, DIM, rank).unwrap();
        map.project_into(rows.unwrap(), projected.unwrap()).unwrap();
        let got = watch.download(&out[copies - 1]);
        let square = |x: f32| f64::from(x) * f64::from(x);
        let got = &got[(heads - 1) * N * rank..];
        let error: f64 = got.iter().zip(&expected).map(|(a, b)| square(a.to_f32() - b)).sum();
        let norm: f64 = expected.iter().map(|&x| square(x)).sum();
        assert!((error / norm).sqrt() < 1e-3, "{shape:?}: {}", (error / norm).sqrt());
        let bytes = (heads * N * (DIM + rank) * 2) as f64;
        watch.report("project", &load, bytes, us);
        watch.report("project, overlapped", &load, bytes, us_pdl);
    }
}
