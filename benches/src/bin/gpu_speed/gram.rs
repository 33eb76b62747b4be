//! Second moments of rows.

use half::f16;
use kv_gpu::Element;
use kv_gpu::svd::{Gram, GramArguments, GramShape};
use svd_core::NoRope;

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const N: usize = 32_768;
const DIM: usize = 128;

pub fn run(watch: &Stopwatch) {
    for heads in [8, 32] {
        let load = format!("{heads} heads x {N} x {DIM}");
        if !watch.wants("gram", &load) {
            continue;
        }
        let gram = Gram::new(&watch.gpu, GramShape { dim: DIM, element: Element::F16 }).unwrap();
        let rows: Vec<f16> = kv_benches::keys(N, DIM).into_iter().map(f16::from_f32).collect();
        let copies = BEYOND_CACHE / (heads * N * DIM * 2) + 2;
        let there: Vec<_> = (0..copies).map(|_| watch.upload(&rows.repeat(heads))).collect();
        let (matrices, sums) = (watch.zeros::<f64>(heads * DIM * DIM), watch.zeros::<f64>(heads * DIM));
        let workspace = watch.zeros::<u8>(gram.workspace_len(heads));
        let argument = |rows| GramArguments {
            heads,
            n: N,
            rows: watch.pointer(rows).cast(),
            strides: [N * DIM, DIM],
            matrices: watch.pointer(&matrices),
            sums: watch.pointer(&sums),
            workspace: watch.pointer(&workspace),
        };
        let all: Vec<GramArguments> = there.iter().map(argument).collect();
        // Compares one launch with the CPU.
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the launches.
        unsafe { gram.launch(watch.gpu.stream().cu_stream(), &all[0]) }.unwrap();
        let got = watch.download(&matrices);
        let mut expected = svd_core::Gram::<NoRope>::new(DIM).unwrap();
        expected.add_rows(svd_core::Rows::contiguous(&rows, DIM).unwrap()).unwrap();
        let expected = expected.matrix();
        for (i, (got, want)) in got[(heads - 1) * DIM * DIM..].iter().zip(&expected).enumerate() {
            let scale = (expected[i / DIM * (DIM + 1)] * expected[i % DIM * (DIM + 1)]).sqrt();
            assert!((got - want).abs() < 1e-6 * scale, "element {i}: {got} {want}");
        }
        // SAFETY: as above.
        let us = watch.time(2 * copies, |i, stream| unsafe { gram.launch(stream, &all[i % copies]) });
        watch.report("gram", &load, (heads * N * DIM * 2) as f64, us);
    }
}
