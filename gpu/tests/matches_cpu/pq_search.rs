//! Tables and scores have the bits of `pq-core`, and searches select the tokens of its definition.

use kv_gpu::pq::{
    Lut, LutArguments, LutShape, Scan, ScanArguments, ScanShape, Search, SearchArguments, SearchShape,
};
use kv_gpu::{Device, Error, VectorElement};
use pq_core::{CodebookBuf, Codes, GroupRule, PqShape, lut_into, pack_codes_into, scan_into};

use crate::common::{Buffer, Random, device, launch};

/// Tolerances of the logarithm of a weight: absolute, and relative to the largest score.
const TOLERANCE: f64 = 1e-5;
const SCORE_TOLERANCE: f64 = 1e-6;

/// Sequences of different lengths with codes and tables.
#[derive(Debug)]
struct Case {
    shape: SearchShape,
    heads: usize,
    capacity: usize,
    lengths: Vec<u32>,
    ks: Vec<u32>,
    sinks: usize,
    recent: usize,
    spread: f32,          // factor of the queries
    spoiled: Option<f32>, // a bad value in the first query's tables
}

/// Head dimension, subspaces and bits, for the histogram kernel of sm_90 (counted) and for the scoring
/// kernels (scored).
const COUNTED: [(usize, usize, u32); 7] =
    [(64, 2, 6), (128, 2, 6), (32, 1, 8), (32, 4, 3), (24, 3, 4), (16, 4, 1), (8, 2, 1)];
// Tables of the last two take up to 48 KiB, without the other shared memory of a block.
const SCORED: [(usize, usize, u32); 6] =
    [(64, 4, 8), (32, 8, 5), (64, 2, 8), (64, 16, 7), (96, 6, 6), (80, 5, 6)];

impl Case {
    fn random(random: &mut Random, shapes: &[(usize, usize, u32)], capacities: &[usize]) -> Self {
        let (dim, m, nbits) = random.pick(shapes);
        let quantizer = PqShape::new(dim, m, nbits).unwrap();
        let rule = random.pick(&[GroupRule::SumOfSoftmax, GroupRule::MaxOfSoftmax]);
        let capacity = random.pick(capacities);
        let batch = 1 + random.below(3);
        let lengths: Vec<u32> = (0..batch)
            .map(|_| match random.below(6) {
                0 => 0,
                1 => capacity as u32,
                _ => random.below(capacity + 1) as u32,
            })
            .collect();
        let k = |&n: &u32| match random.below(6) {
            0 => 0,
            1 => n + 5,
            2 => 1,
            3 => n / 2,
            _ => random.below(n as usize / 4 + 1) as u32,
        };
        let ks = lengths.iter().map(k).collect();
        Self {
            shape: SearchShape { quantizer, group: 1 + random.below(9), rule },
            heads: 1 + random.below(3),
            capacity,
            lengths,
            ks,
            sinks: random.pick(&[0, 0, 4, 100]),
            recent: random.pick(&[0, 0, 1, 64, 3000]),
            spread: random.pick(&[1.0, 1.0, 10.0, 100.0, 10_000.0]),
            spoiled: None,
        }
    }

    fn scan(&self) -> ScanShape {
        ScanShape { quantizer: self.shape.quantizer, group: self.shape.group }
    }

    /// Packed codes of one head of a sequence; low codes are more frequent.
    fn codes(&self, random: &mut Random) -> Vec<u8> {
        let (quantizer, n) = (self.shape.quantizer, self.capacity);
        let favoured = 1 + random.below(quantizer.ksub());
        let codes: Vec<u16> = (0..n * quantizer.m())
            .map(|_| {
                let below = random.pick(&[favoured, quantizer.ksub()]);
                random.below(below) as u16
            })
            .collect();
        let mut packed = vec![0; quantizer.codes_len(n)];
        pack_codes_into(quantizer, &codes, &mut packed).unwrap();
        packed
    }
}

/// The inputs of a run: queries, codebooks and codes.
struct Inputs {
    queries: Vec<f32>,
    centroids: Vec<f32>,
    books: Vec<CodebookBuf>,
    codes: Vec<Vec<u8>>, // (batch, heads)
}

impl Inputs {
    fn new(case: &Case, random: &mut Random) -> Self {
        let (quantizer, rows) = (case.shape.quantizer, case.lengths.len() * case.heads);
        let mut queries = random.normals(rows * case.shape.group * quantizer.dim());
        queries.iter_mut().for_each(|x| *x *= case.spread);
        let each = quantizer.ksub() * quantizer.dim();
        let centroids = random.normals(case.heads * each);
        let book = |centroids| CodebookBuf::new(quantizer, centroids).unwrap();
        let books = centroids.chunks_exact(each).map(book).collect();
        let codes = (0..rows).map(|_| case.codes(random)).collect();
        Self { queries, centroids, books, codes }
    }

    /// Tables of all rows, by the CPU.
    fn luts(&self, case: &Case) -> Vec<f32> {
        let each = case.shape.group * case.shape.quantizer.lut_len();
        let mut luts = vec![0.0; self.codes.len() * each];
        let queries = self.queries.chunks_exact(case.shape.group * case.shape.quantizer.dim());
        for (row, (luts, queries)) in luts.chunks_exact_mut(each).zip(queries).enumerate() {
            lut_into(&self.books[row % case.heads].view(), queries, luts).unwrap();
        }
        if let Some(spoiled) = case.spoiled {
            for luts in luts.chunks_exact_mut(each) {
                luts[..case.shape.quantizer.lut_len()].iter_mut().step_by(5).for_each(|x| *x = spoiled);
            }
        }
        luts
    }
}

/// Scores of a row's queries, (group, n), by the CPU.
fn scores(case: &Case, luts: &[f32], codes: &[u8], n: usize) -> Vec<f32> {
    let quantizer = case.shape.quantizer;
    let codes = Codes::new(quantizer, n, &codes[..quantizer.codes_len(n)]).unwrap();
    let mut scores = vec![0.0; case.shape.group * n];
    for (scores, lut) in scores.chunks_exact_mut(n.max(1)).zip(luts.chunks_exact(quantizer.lut_len())) {
        scan_into(&pq_core::Lut::new(quantizer, lut).unwrap(), &codes, scores).unwrap();
    }
    scores
}

#[test]
fn tables_and_scores_have_the_bits_of_the_cpu() {
    let Some(device) = device("tables_and_scores_have_the_bits_of_the_cpu") else { return };
    for seed in 0..30 {
        let mut random = Random(seed);
        let shapes = if seed % 2 == 0 { &COUNTED[..] } else { &SCORED };
        let case = Case::random(&mut random, shapes, &[64, 300, 5000, 10_000, 20_000]);
        let inputs = Inputs::new(&case, &mut random);
        let expected = inputs.luts(&case);
        let shape = LutShape {
            quantizer: case.shape.quantizer,
            group: case.shape.group,
            element: VectorElement::F32,
        };
        let queries = Buffer::new(&device, &inputs.queries);
        let centroids = Buffer::new(&device, &inputs.centroids);
        let luts = Buffer::new(&device, &vec![f32::NAN; expected.len()]);
        let batch = case.lengths.len();
        let lut_arguments = LutArguments {
            batch,
            heads: case.heads,
            queries: queries.pointer().cast(),
            scale: 1.0,
            centroids: centroids.pointer(),
            luts: luts.pointer(),
        };
        let codes = Buffer::new(&device, &inputs.codes.concat());
        let lengths = Buffer::new(&device, &case.lengths);
        let len = batch * case.heads * case.shape.group * case.capacity;
        let out = Buffer::new(&device, &vec![-1.0_f32; len]);
        let scan_arguments = ScanArguments {
            batch,
            heads: case.heads,
            capacity: case.capacity,
            luts: luts.pointer(),
            codes: codes.pointer(),
            lengths: lengths.pointer(),
            scores: out.pointer(),
        };
        let (lut, scan) = (Lut::new(&device, shape).unwrap(), Scan::new(&device, case.scan()).unwrap());
        let stream = device.stream().cu_stream();
        // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
        // requires.
        #[allow(unsafe_code)]
        unsafe {
            lut.launch(stream, &lut_arguments).unwrap();
            scan.launch(stream, &scan_arguments).unwrap();
        }
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&luts.read()) == bits(&expected), "{case:?}: tables");
        let got = out.read();
        for (row, luts) in
            expected.chunks_exact(case.shape.group * case.shape.quantizer.lut_len()).enumerate()
        {
            let n = case.lengths[row / case.heads] as usize;
            let expected = scores(&case, luts, &inputs.codes[row], n);
            for query in 0..case.shape.group {
                let got = &got[(row * case.shape.group + query) * case.capacity..][..case.capacity];
                assert!(bits(&got[..n]) == bits(&expected[query * n..][..n]), "{case:?}: scores");
                assert!(got[n..].iter().all(|&x| x == -1.0), "{case:?}: scores of no tokens");
            }
        }
    }
}

/// Runs a search: tokens (batch, heads, room), counts, and maximum and sum of each query.
fn search(
    device: &Device,
    case: &Case,
    luts: &[f32],
    inputs: &Inputs,
    room: usize,
) -> (Vec<u32>, Vec<u32>, Vec<f32>) {
    let kernel = Search::new(device, case.shape).unwrap();
    let (batch, heads) = (case.lengths.len(), case.heads);
    // The tables of the second launch, which the device computes unless a value is spoiled.
    let made_luts =
        Buffer::new(device, &if case.spoiled.is_some() { luts.to_vec() } else { vec![f32::NAN; luts.len()] });
    let (luts, codes) = (Buffer::new(device, luts), Buffer::new(device, &inputs.codes.concat()));
    let (lengths, ks) = (Buffer::new(device, &case.lengths), Buffer::new(device, &case.ks));
    let workspace = Buffer::scratch(device, kernel.workspace_len(batch, heads, case.capacity));
    let [tokens, tokens_again] = [0, 1].map(|_| Buffer::new(device, &vec![u32::MAX; batch * heads * room]));
    let counts = Buffer::new(device, &vec![0_u32; batch]);
    let stats = Buffer::new(device, &vec![0.0_f32; batch * heads * case.shape.group * 2]);
    let arguments = |luts: &Buffer<f32>, tokens: &Buffer<u32>, pdl| SearchArguments {
        batch,
        heads,
        capacity: case.capacity,
        luts: luts.pointer(),
        codes: codes.pointer(),
        lengths: lengths.pointer(),
        ks: ks.pointer(),
        sinks: case.sinks,
        recent: case.recent,
        workspace: workspace.pointer(),
        tokens: tokens.pointer(),
        tokens_len: room,
        counts: counts.pointer(),
        stats: Some(stats.pointer()),
        pdl,
    };
    launch!(device, kernel, &arguments(&luts, &tokens, false));
    let first = tokens.read();
    // The second launch reuses the first one's workspace, and with PDL it reads codes while the previous
    // kernel computes the tables. No other work may run between the two launches.
    let queries = Buffer::new(device, &inputs.queries);
    let centroids = Buffer::new(device, &inputs.centroids);
    let (quantizer, element) = (case.shape.quantizer, VectorElement::F32);
    let lut = Lut::new(device, LutShape { quantizer, group: case.shape.group, element }).unwrap();
    let lut_arguments = LutArguments {
        batch,
        heads,
        queries: queries.pointer().cast(),
        scale: 1.0,
        centroids: centroids.pointer(),
        luts: made_luts.pointer(),
    };
    let again = arguments(&made_luts, &tokens_again, true);
    let stream = device.stream().cu_stream();
    // SAFETY: as above.
    #[allow(unsafe_code)]
    unsafe {
        if case.spoiled.is_none() {
            lut.launch(stream, &lut_arguments).unwrap();
        }
        kernel.launch(stream, &again).unwrap();
    }
    assert!(tokens_again.read() == first, "{case:?}: another result");
    (first, counts.read(), stats.read())
}

/// Logarithms of the weights of a row's tokens by the plain formula in f64, and the log-sum-exps of the
/// queries.
fn log_weights(scores: &[f32], n: usize, rule: GroupRule) -> (Vec<f64>, Vec<f64>) {
    let clean = |s: f32| f64::from(if s.is_nan() { f32::NEG_INFINITY } else { s.min(f32::MAX) });
    let log_sum_exp = |x: &mut dyn Iterator<Item = f64>| {
        let x: Vec<f64> = x.collect();
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY { max } else { max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln() }
    };
    let sums: Vec<f64> =
        scores.chunks_exact(n).map(|scores| log_sum_exp(&mut scores.iter().map(|&s| clean(s)))).collect();
    let of_token = |t: usize| {
        let logs = || {
            let of_query = |(scores, &sum): (&[f32], &f64)| match clean(scores[t]) {
                f64::NEG_INFINITY => f64::NEG_INFINITY,
                score => score - sum,
            };
            scores.chunks_exact(n).zip(&sums).map(of_query)
        };
        match rule {
            GroupRule::SumOfSoftmax => log_sum_exp(&mut logs()),
            GroupRule::MaxOfSoftmax => logs().fold(f64::NEG_INFINITY, f64::max),
        }
    };
    ((0..n).map(of_token).collect(), sums)
}

#[test]
fn searches_by_counts_find_the_heaviest_tokens() {
    let Some(device) = device("searches_by_counts_find_the_heaviest_tokens") else { return };
    check_searches(&device, 0..10, &COUNTED, &[64, 300, 5000, 10_000]);
}

#[test]
fn searches_of_long_sequences_by_counts_do_too() {
    let Some(device) = device("searches_of_long_sequences_by_counts_do_too") else { return };
    check_searches(&device, 10..14, &COUNTED, &[30_000, 200_000]);
}

/// On a device of 132 multiprocessors, clusters of 8, 4 and 2 blocks and single blocks, in one round and in
/// several. The first sequence selects half of its tokens.
#[test]
fn searches_of_many_rows_by_counts_do_too() {
    let Some(device) = device("searches_of_many_rows_by_counts_do_too") else { return };
    for (seed, rows) in (60..).zip([12, 30, 60, 120, 270].repeat(2)) {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random, &COUNTED, &[300, 5000, 40_000]);
        case.heads = rows / case.lengths.len();
        (case.lengths[0], case.ks[0]) = (case.capacity as u32, case.capacity as u32 / 2);
        check_search(&device, &case, &mut random, seed);
    }
}

#[test]
fn searches_by_scores_find_the_heaviest_tokens() {
    let Some(device) = device("searches_by_scores_find_the_heaviest_tokens") else { return };
    check_searches(&device, 20..35, &SCORED, &[64, 300, 5000, 10_000]);
    check_searches(&device, 35..40, &SCORED, &[30_000]);
}

fn check_searches(
    device: &Device,
    seeds: std::ops::Range<u64>,
    shapes: &[(usize, usize, u32)],
    capacities: &[usize],
) {
    for seed in seeds {
        let mut random = Random(seed);
        let case = Case::random(&mut random, shapes, capacities);
        check_search(device, &case, &mut random, seed);
    }
}

/// The search returns the tokens of highest weight, sinks and recent tokens, in ascending order. Of tokens
/// with equal codes it returns the lower indices.
fn check_search(device: &Device, case: &Case, random: &mut Random, seed: u64) {
    let inputs = Inputs::new(case, random);
    let luts = inputs.luts(case);
    let wanted = pq_core::Search { k: 0, sinks: case.sinks, recent: case.recent, rule: case.shape.rule };
    let found =
        |i: usize| pq_core::Search { k: case.ks[i] as usize, ..wanted }.found(case.lengths[i] as usize);
    let room = (0..case.lengths.len()).map(found).max().unwrap() + 3;
    let (tokens, counts, stats) = search(device, case, &luts, &inputs, room);
    let each = case.shape.group * case.shape.quantizer.lut_len();
    for (row, luts) in luts.chunks_exact(each).enumerate() {
        let sequence = row / case.heads;
        let n = case.lengths[sequence] as usize;
        assert_eq!(counts[sequence] as usize, found(sequence), "{case:?}, seed {seed}");
        let tokens = &tokens[row * room..][..room];
        assert!(tokens[found(sequence)..].iter().all(|&t| t == u32::MAX), "{case:?}: behind the found");
        let tokens = &tokens[..found(sequence)];
        assert!(tokens.is_sorted_by(|a, b| a < b) && tokens.iter().all(|&t| (t as usize) < n), "{case:?}");
        if n == 0 {
            continue;
        }
        let mut is_in = vec![false; n];
        tokens.iter().for_each(|&t| is_in[t as usize] = true);
        let sinks = case.sinks.min(n);
        let middle = sinks..n - case.recent.min(n - sinks);
        assert!((0..n).filter(|t| !middle.contains(t)).all(|t| is_in[t]), "{case:?}: sinks and recent");
        let scores = scores(case, luts, &inputs.codes[row], n);
        let (weights, sums) = log_weights(&scores, n, case.shape.rule);
        let chosen = middle.clone().filter(|&t| is_in[t]).map(|t| weights[t]);
        let left = middle.clone().filter(|&t| !is_in[t]).map(|t| weights[t]);
        let (least, most) = (chosen.fold(f64::INFINITY, f64::min), left.fold(f64::NEG_INFINITY, f64::max));
        let largest = scores.iter().map(|s| s.abs().min(f32::MAX)).fold(0.0, f32::max);
        let tolerance = TOLERANCE + SCORE_TOLERANCE * f64::from(largest);
        assert!(least >= most - tolerance, "{case:?}, seed {seed}: {least} {most}");
        // Of tokens with equal codes, those of lower index are selected.
        let codes =
            Codes::new(case.shape.quantizer, n, &inputs.codes[row][..case.shape.quantizer.codes_len(n)])
                .unwrap();
        let mut left_out = std::collections::HashSet::new();
        for t in middle {
            let code: Vec<usize> = codes.iter_vector(t).collect();
            if is_in[t] {
                assert!(!left_out.contains(&code), "{case:?}, seed {seed}: token {t} before an equal one");
            } else {
                left_out.insert(code);
            }
        }
        let stats = stats[row * case.shape.group * 2..].chunks_exact(2);
        for (stats, expected) in stats.zip(sums) {
            let got = f64::from(stats[0]) + f64::from(stats[1]).ln();
            assert!(
                got == expected || (got - expected).abs() < 1e-4 * expected.abs().max(1.0),
                "{case:?}: {got} {expected}"
            );
        }
    }
}

#[test]
fn bad_scores_of_one_query_leave_the_others_their_say() {
    let Some(device) = device("bad_scores_of_one_query_leave_the_others_their_say") else { return };
    for (seed, spoiled) in (40..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(4)) {
        let shapes = if seed % 2 == 0 { &COUNTED[..] } else { &SCORED };
        let mut random = Random(seed);
        let case = Case { spoiled: Some(spoiled), ..Case::random(&mut random, shapes, &[300, 20_000]) };
        check_search(&device, &case, &mut random, seed);
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let huge = 1 << 31;
    for (dim, m, nbits, group) in
        [(64, 2, 12, 1), (128, 64, 8, 4), (64, 2, 6, 17), (64, 2, 6, 0), (huge << 19, huge, 8, 4)]
    {
        let shape = ScanShape { quantizer: PqShape::new(dim, m, nbits).unwrap(), group };
        assert!(matches!(shape.program(227 << 10), Err(Error::Unsupported { .. })), "{shape:?}");
    }
}
