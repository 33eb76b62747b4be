//! The part of the scores that comes from a mean of the keys before RoPE.

use cudarc::driver::CudaSlice;
use cudarc::driver::sys::CUstream;
use half::f16;
use kv_gpu::pq::{RopeMeanScores, RopeMeanScoresArguments, RopeMeanScoresShape, TILE};
use kv_gpu::{AnyElement, DevicePtr, Element, Error};
use pq_core::RopeMeanBuf;

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const DIM: usize = 128;
/// Query heads, KV heads, sequences, and tokens of the first and of the other sequences.
const LOADS: [(usize, usize, usize, usize, usize); 7] = [
    (32, 8, 1, 131_072, 0),
    (32, 32, 1, 32_768, 0),
    (32, 8, 1, 32_768, 0),
    (8, 1, 1, 32_768, 0),
    (128, 8, 1, 65_536, 0),
    (32, 8, 256, 512, 512),
    (32, 8, 32, 131_072, 512),
];
/// Position of the first coded token: there are as many sinks.
const FIRST: usize = 4;

/// The means of some heads' keys before RoPE, and the kernel that takes them to scores.
pub struct Means {
    heads: usize,
    means: Vec<f32>,       // (heads, DIM)
    frequencies: Vec<f32>, // (DIM / 2,)
    there: [CudaSlice<f32>; 2],
    kernel: RopeMeanScores,
}

impl Means {
    pub fn new(watch: &Stopwatch, heads: usize, group: usize, element: Element) -> Self {
        let means: Vec<f32> =
            (0..heads * DIM).map(|i| ((i * 2_654_435_761) % 2001) as f32 / 500.0 - 2.0).collect();
        let frequencies: Vec<f32> =
            (0..DIM / 2).map(|i| 5e5_f32.powf(-2.0 * i as f32 / DIM as f32)).collect();
        let there = [&means, &frequencies].map(|x| watch.upload(x));
        let kernel =
            RopeMeanScores::new(&watch.gpu, RopeMeanScoresShape { dim: DIM, group, element }).unwrap();
        Self { heads, means, frequencies, there, kernel }
    }

    /// A closure that launches the kernel for `batch` sequences, with room for `tiles` tiles each. The
    /// buffers, which have the shapes that the arguments require, must outlive it.
    pub fn launch(
        &self,
        watch: &Stopwatch,
        (batch, tiles): (usize, usize),
        queries: DevicePtr<AnyElement>,
        lengths: DevicePtr<u32>,
        addends: &CudaSlice<f16>,
        pdl: bool,
    ) -> impl Fn(CUstream) -> Result<(), Error> {
        let arguments = RopeMeanScoresArguments {
            batch,
            heads: self.heads,
            tiles,
            means: watch.pointer(&self.there[0]),
            frequencies: watch.pointer(&self.there[1]),
            first: FIRST,
            queries,
            lengths,
            scale: 1.0 / (DIM as f32).sqrt(),
            addends: watch.pointer(addends),
            pdl,
        };
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the launch.
        move |stream| unsafe { self.kernel.launch(stream, &arguments) }
    }

    /// The expected addends of a head's scaled query for the first `n` tokens.
    pub fn expected(&self, head: usize, query: &[f32], n: usize) -> Vec<f32> {
        let mut scores = vec![0.0; n];
        let mean = RopeMeanBuf::new(&self.means[head * DIM..][..DIM], &self.frequencies).unwrap();
        mean.view().scores_into(query, FIRST, &mut scores).unwrap();
        scores
    }
}

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
        let means = Means::new(watch, heads, group, Element::F16);
        let number = |i: usize| f16::from_f32(((i * 2_654_435_761) % 1999) as f32 / 500.0 - 2.0);
        let queries: Vec<f16> = (0..batch * query_heads * DIM).map(number).collect();
        let mut lengths = vec![others as u32; batch];
        lengths[0] = n as u32;
        let (queries_there, lengths) = (watch.upload(&queries), watch.upload(&lengths));
        let (tiles, bytes) = (n.div_ceil(TILE), tokens * query_heads * 2);
        let copies = BEYOND_CACHE / bytes + 1;
        let addends: Vec<_> =
            (0..copies).map(|_| watch.zeros::<f16>(batch * query_heads * tiles * TILE)).collect();
        let [us, us_pdl] = [false, true].map(|pdl| {
            let (queries, lengths) = (watch.pointer(&queries_there).cast(), watch.pointer(&lengths));
            let of = |addends| means.launch(watch, (batch, tiles), queries, lengths, addends, pdl);
            let all: Vec<_> = addends.iter().map(of).collect();
            watch.time(copies, |i, stream| all[i % copies](stream))
        });

        // Compares the last query of the first sequence with the CPU.
        let got = watch.download(&addends[copies - 1]);
        let (query, head) = (query_heads - 1, heads - 1);
        let scale = 1.0 / (DIM as f32).sqrt();
        let scaled: Vec<f32> = queries[query * DIM..][..DIM].iter().map(|x| x.to_f32() * scale).collect();
        for (token, &expected) in means.expected(head, &scaled, n).iter().enumerate() {
            let tile = (head * tiles + token / TILE) * group + group - 1;
            let got = got[tile * TILE + token % TILE].to_f32();
            assert!((got - expected).abs() < 2e-2, "{name}, {load}: {got} for {expected}");
        }
        watch.report(&name, &load, bytes as f64, us);
        watch.report(&format!("{name}, overlapped"), &load, bytes as f64, us_pdl);
    }
}
