//! The part of the scores that comes from a mean of the keys before RoPE.

use half::f16;
use kv_gpu::Element;
use kv_gpu::pq::{RopeMeanScores, RopeMeanScoresArguments, RopeMeanScoresShape, TILE};
use pq_core::RopeMeanBuf;

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const DIM: usize = 128;
/// Query heads, key/value heads, sequences, and tokens of the first and of the other ones.
const LOADS: [(usize, usize, usize, usize, usize); 7] = [
    (32, 8, 1, 131_072, 0),
    (32, 32, 1, 32_768, 0),
    (32, 8, 1, 32_768, 0),
    (8, 1, 1, 32_768, 0),
    (128, 8, 1, 65_536, 0),
    (32, 8, 256, 512, 512),
    (32, 8, 32, 131_072, 512),
];

pub fn run(watch: &Stopwatch) {
    for (query_heads, heads, batch, n, others) in LOADS {
        let mut name = String::from("rope mean scores");
        if batch > 1 && others != n {
            name += &format!(", one of {n} and {} of {others}", batch - 1);
        }
        let tokens = n + (batch - 1) * others;
        let load = format!("{query_heads}/{heads} heads, {batch} x {} x {DIM}", tokens / batch);
        if !watch.wants(&name, &load) {
            continue;
        }
        let group = query_heads / heads;
        let shape = RopeMeanScoresShape { dim: DIM, group, element: Element::F16 };
        let scores = RopeMeanScores::new(&watch.gpu, shape).unwrap();
        let number = |i: usize| ((i * 2_654_435_761) % 2001) as f32 / 1000.0 - 1.0;
        let means: Vec<f32> = (0..heads * DIM).map(|i| 2.0 * number(i)).collect();
        let queries: Vec<f16> =
            (0..batch * query_heads * DIM).map(|i| f16::from_f32(2.0 * number(i + 7))).collect();
        let frequencies: Vec<f32> =
            (0..DIM / 2).map(|i| 5e5_f32.powf(-2.0 * i as f32 / DIM as f32)).collect();
        let mut lengths = vec![others as u32; batch];
        lengths[0] = n as u32;
        let [means_there, frequencies_there] = [&means, &frequencies].map(|x| watch.upload(x));
        let (queries_there, lengths) = (watch.upload(&queries), watch.upload(&lengths));
        let tiles = n.div_ceil(TILE);
        let (first, scale) = (4, 1.0 / (DIM as f32).sqrt());
        let bytes = tokens * query_heads * 2;
        let copies = BEYOND_CACHE / bytes + 1;
        let addends: Vec<_> =
            (0..copies).map(|_| watch.zeros::<f16>(batch * query_heads * tiles * TILE)).collect();
        let arguments = |copy: usize, pdl: bool| RopeMeanScoresArguments {
            batch,
            heads,
            tiles,
            means: watch.pointer(&means_there),
            frequencies: watch.pointer(&frequencies_there),
            first,
            queries: watch.pointer(&queries_there).cast(),
            lengths: watch.pointer(&lengths),
            scale,
            addends: watch.pointer(&addends[copy]),
            pdl,
        };
        let [us, us_pdl] = [false, true].map(|pdl| {
            let all: Vec<_> = (0..copies).map(|copy| arguments(copy, pdl)).collect();
            // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
            watch.time(copies, |i, stream| unsafe { scores.launch(stream, &all[i % copies]) })
        });

        // Compares the last query of the first sequence with the CPU.
        let got = watch.download(&addends[copies - 1]);
        let (query, head) = (query_heads - 1, heads - 1);
        let wide: Vec<f32> = queries[query * DIM..][..DIM].iter().map(|x| x.to_f32() * scale).collect();
        let mut expected = vec![0.0; n];
        let mean = RopeMeanBuf::new(&means[head * DIM..], &frequencies).unwrap();
        mean.view().scores_into(&wide, first, &mut expected).unwrap();
        for (token, &expected) in expected.iter().enumerate() {
            let tile = (head * tiles + token / TILE) * group + group - 1;
            let got = got[tile * TILE + token % TILE].to_f32();
            assert!((got - expected).abs() < 2e-2, "{shape:?}: {got} for {expected}");
        }
        watch.report(&name, &load, bytes as f64, us);
        watch.report(&format!("{name}, overlapped"), &load, bytes as f64, us_pdl);
    }
}
