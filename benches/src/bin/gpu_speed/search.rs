//! Scores and the best tokens.

use kv_gpu::pq::{Search, SearchArguments, SearchShape};
use pq_core::{Codes, GroupRule, Luts, PqShape, SearchScratch, SoftmaxStats, pack_codes_into, search_into};

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const GROUP: usize = 4;
const DIM: usize = 128;
/// Heads of all sequences, tokens to find, and of how many.
const LOADS: [(usize, usize, usize); 6] = [
    (8, 13_107, 131_072),
    (8, 65_536, 131_072),
    (8, 2048, 131_072),
    (8, 2048, 524_288),
    (8, 2048, 1_000_000),
    (128, 1024, 32_768),
];

pub fn run(watch: &Stopwatch) {
    for (m, nbits) in [(2, 6), (4, 8)] {
        for (heads, k, n) in LOADS {
            let (name, load) =
                (format!("search ({m}, {nbits})"), format!("{heads} heads x {GROUP}, {k} of {n}"));
            if watch.wants(&name, &load) {
                measure(watch, &name, &load, PqShape::new(DIM, m, nbits).unwrap(), (heads, k, n));
            }
        }
    }
}

fn measure(
    watch: &Stopwatch,
    name: &str,
    load: &str,
    quantizer: PqShape,
    (heads, k, n): (usize, usize, usize),
) {
    let shape = SearchShape { quantizer, group: GROUP, rule: GroupRule::SumOfSoftmax };
    let kernel = Search::new(&watch.gpu, shape).unwrap();
    let number = |i: usize| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as u32;
    // Neighbouring codes are similar, as those of a text are.
    let codes: Vec<u16> = (0..n * quantizer.m())
        .map(|i| {
            let (near, far) = (number(i / 64 % 512), number(i));
            (if far % 4 < 3 { near.wrapping_add(far % 8) } else { far >> 8 }) as u16 % quantizer.ksub() as u16
        })
        .collect();
    let mut packed = vec![0; quantizer.codes_len(n)];
    pack_codes_into(quantizer, &codes, &mut packed).unwrap();
    let luts: Vec<f32> =
        (0..heads * GROUP * quantizer.lut_len()).map(|i| (number(i) % 4001) as f32 / 500.0 - 4.0).collect();
    let copies = BEYOND_CACHE / (heads * packed.len()) + 2;
    let there: Vec<_> = (0..copies).map(|_| watch.upload(&packed.repeat(heads))).collect();
    let luts_there = watch.upload(&luts);
    let (lengths, ks) = (watch.upload(&[n as u32]), watch.upload(&[k as u32]));
    let workspace = watch.zeros::<u8>(kernel.workspace_len(1, heads, n));
    let tokens = watch.zeros::<u32>(heads * k);
    let counts = watch.zeros::<u32>(1);
    let arguments = |codes, pdl| SearchArguments {
        batch: 1,
        heads,
        capacity: n,
        luts: watch.pointer(&luts_there),
        codes: watch.pointer(codes),
        lengths: watch.pointer(&lengths),
        ks: watch.pointer(&ks),
        sinks: 0,
        recent: 0,
        workspace: watch.pointer(&workspace),
        tokens: watch.pointer(&tokens),
        tokens_len: k,
        counts: watch.pointer(&counts),
        stats: None,
        pdl,
    };
    let [us, us_pdl] = [false, true].map(|pdl| {
        let all: Vec<SearchArguments> = there.iter().map(|codes| arguments(codes, pdl)).collect();
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        watch.time(copies, |i, stream| unsafe { kernel.launch(stream, &all[i]) })
    });

    // Compares the last head with the CPU, up to ties within rounding.
    let got = watch.download(&tokens);
    let head = &luts[(heads - 1) * GROUP * quantizer.lut_len()..];
    let mut floats = vec![0.0; SearchScratch::len(GROUP, n)];
    let (mut stats, mut expected) = ([SoftmaxStats::EMPTY; GROUP], vec![0; k]);
    let search = pq_core::Search { k, sinks: 0, recent: 0, rule: GroupRule::SumOfSoftmax };
    let codes = Codes::new(quantizer, n, &packed).unwrap();
    let mut scratch = SearchScratch::new(n, &mut floats, &mut stats).unwrap();
    search_into(&Luts::new(quantizer, head).unwrap(), &codes, &search, &mut scratch, &mut expected).unwrap();
    let got: std::collections::HashSet<u32> = got[(heads - 1) * k..].iter().copied().collect();
    let missing = expected.iter().filter(|token| !got.contains(token)).count();
    assert!(got.len() == k && missing * 1000 <= k, "{name}: {missing} of {k} tokens are others");
    let bytes = heads * (quantizer.codes_len(n) + 4 * k);
    watch.report(name, load, bytes as f64, us);
    watch.report(&format!("{name}, overlapped"), load, bytes as f64, us_pdl);
}
