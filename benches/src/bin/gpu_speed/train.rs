//! One iteration of k-means.

use half::f16;
use kv_gpu::VectorElement;
use kv_gpu::pq::{Train, TrainArguments, TrainShape};
use pq_core::{PqShape, Start, TrainOptions, train};

use crate::stopwatch::Stopwatch;

const HEADS: usize = 8;
const N: usize = 32_768;
const DIM: usize = 128;

pub fn run(watch: &Stopwatch) {
    for (m, nbits) in [(2, 6), (64, 8)] {
        let (name, load) = (format!("train ({m}, {nbits})"), format!("{HEADS} heads x {N} x {DIM}"));
        if !watch.wants(&name, &load) {
            continue;
        }
        let quantizer = PqShape::new(DIM, m, nbits).unwrap();
        let kernel = Train::new(&watch.gpu, TrainShape { quantizer, element: VectorElement::F16 }).unwrap();
        let vectors: Vec<f16> = kv_benches::keys(N, DIM).into_iter().map(f16::from_f32).collect();
        let start: Vec<f32> = kv_benches::keys(quantizer.ksub(), DIM);
        let there = watch.upload(&vectors.repeat(HEADS));
        let centroids = watch.upload(&start.repeat(HEADS));
        let errors = watch.zeros::<f64>(HEADS * m);
        let workspace = watch.zeros::<u8>(kernel.workspace_len(HEADS, N));
        let arguments = |iterations| TrainArguments {
            sets: HEADS,
            n: N,
            vectors: watch.pointer(&there).cast(),
            strides: [N * DIM, DIM],
            starts: None,
            centroids: watch.pointer(&centroids),
            errors: Some(watch.pointer(&errors)),
            iterations,
            tolerance: -1.0, // no subspace stops early
            workspace: watch.pointer(&workspace),
        };
        // Compares one iteration with the CPU.
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the launches.
        unsafe { kernel.launch(watch.gpu.stream().cu_stream(), &arguments(1)) }.unwrap();
        let options = TrainOptions { iterations: 1, start: Start::From(&start), ..Default::default() };
        let expected = train(quantizer, &vectors, &options).unwrap().error;
        let got: f64 = watch.download(&errors)[..m].iter().sum();
        assert!((got - expected).abs() < 1e-5 * expected, "{name}: {got} {expected}");

        let (few, many) = (arguments(1), arguments(11));
        // SAFETY: as above.
        let time = |arguments| watch.time(1, |_, stream| unsafe { kernel.launch(stream, arguments) });
        let us = (time(&many) - time(&few)) / 10.0;
        let operations = (HEADS * N * m * quantizer.ksub() * (quantizer.dsub() + 3)) as f64;
        watch.report_with_floor(
            &name,
            &load,
            (HEADS * N * DIM * 2) as f64,
            us,
            operations / watch.operations_per_us(),
        );
    }
}
