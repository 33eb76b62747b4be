//! Attention on codes agrees with `pq_core::attend_into` and `pq_core::attend_exact_into`.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{Buffer, Random, SIDES, device, from_element, relative_error, to_element};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use half::f16;
use kv_gpu::pq::{Attend, AttendArguments, AttendShape, CodeLayout, ExactTokens, Pages, Paging, Side, TILE};
use kv_gpu::{Device, Element};
use pq_core::{
    Attention, Backend, CodebookBuf, CodedTokens, Codes, PqShape, Rows, SoftmaxStats, attend_exact_into,
    attend_into_with, attend_scratch_len, lut_into,
};

/// Maximum relative error of an output vector, by element type: the rounding of weights to f16 (2^-11) and of
/// the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 6e-3)];
/// Maximum absolute error of the log-sum-exp.
const LOG_SUM_EXP: f32 = 2e-3;

/// The shape of one launch, and the tokens of its sequences.
struct Case {
    shape: AttendShape,
    batch: usize,
    heads: usize,
    capacity: usize, // coded tokens of a sequence
    lengths: Vec<u32>,
    exact_capacity: usize, // 0: without exact tokens
    exact_lengths: Vec<u32>,
    page_tiles: usize, // half tiles if pages have these
}

/// The inputs of a case for the CPU. Pairs are [keys, values], indexed by [`Side`].
struct Inputs {
    queries: Vec<f32>,            // (batch, heads, group, dim)
    exact: [Vec<f32>; 2],         // (batch, heads, exact_capacity, dim)
    books: Vec<[CodebookBuf; 2]>, // (heads,)
    codes: Vec<[Vec<u8>; 2]>,     // (batch, heads), packed, of `capacity` tokens
    pages: Vec<usize>,            // (batch, max_pages) and an unused page; (batch,) without pages
    pdl: bool,
}

/// Bits of the outputs (batch, heads, group, dim) and of their log-sum-exps.
#[derive(Clone, PartialEq)]
struct Outputs {
    out: Vec<u16>,
    log_sum_exp: Vec<u32>,
}

/// Normalized outputs (batch, heads, group, dim) and their statistics.
struct Expected {
    out: Vec<f32>,
    stats: Vec<SoftmaxStats>,
}

fn codebook(random: &mut Random, shape: PqShape) -> CodebookBuf {
    let centroids: Vec<f32> = random.normals(shape.codebook_len());
    let halves: Vec<f32> = centroids.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    CodebookBuf::new(shape, &halves).unwrap()
}

impl Case {
    fn run(&self, device: &Device, random: &mut Random, spoil: impl Fn(&mut [f32])) {
        let inputs = self.inputs(random, spoil);
        self.compare(&inputs, &self.run_on_device(device, &inputs), &self.run_on_cpu(&inputs));
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.keys.dim() as f32).sqrt()
    }

    fn layouts(&self) -> [CodeLayout; 2] {
        let AttendShape { keys, values, paging, .. } = self.shape;
        let layouts = [CodeLayout::new(keys, Side::Keys), CodeLayout::new(values, Side::Values)];
        let halves = paging == Paging::HalfTiles;
        layouts.map(Result::unwrap).map(|whole| if halves { whole.half_tiles().unwrap() } else { whole })
    }

    fn paged(&self) -> bool {
        self.shape.paging != Paging::Contiguous
    }

    /// Tokens of a tile in memory.
    fn tile_tokens(&self) -> usize {
        self.layouts()[0].tokens()
    }

    fn max_pages(&self) -> usize {
        self.capacity.div_ceil(self.tile_tokens()).div_ceil(self.page_tiles)
    }

    fn inputs(&self, random: &mut Random, spoil: impl Fn(&mut [f32])) -> Inputs {
        let Self { shape, batch, heads, .. } = *self;
        let dim = shape.keys.dim();
        let rounded = |x: f32| from_element(shape.element, to_element(shape.element, x));
        let mut queries: Vec<f32> = random.normals(batch * heads * shape.group * dim);
        queries.iter_mut().for_each(|x| *x = rounded(2.0 * *x));
        spoil(&mut queries);
        let exact_len = batch * heads * self.exact_capacity * dim;
        let exact = SIDES.map(|_| random.normals(exact_len).into_iter().map(rounded).collect());
        let quantizers = [shape.keys, shape.values];
        let books = (0..heads).map(|_| quantizers.map(|shape| codebook(random, shape))).collect();
        let codes = (0..batch * heads)
            .map(|_| quantizers.map(|shape| random.bytes(shape.codes_len(self.capacity))))
            .collect();
        let page_count = if self.paged() { batch * self.max_pages() + 1 } else { batch };
        let mut pages: Vec<usize> = (0..page_count).collect();
        if self.paged() {
            (1..page_count).for_each(|i| pages.swap(i, random.below(i + 1)));
        }
        Inputs { queries, exact, books, codes, pages, pdl: random.below(2) == 1 }
    }

    /// The codes of all sequences in tiles; bytes without tokens are arbitrary.
    fn tiles(&self, inputs: &Inputs, side: Side) -> Vec<u8> {
        let layout = &self.layouts()[side as usize];
        let mut memory = vec![0xA5; inputs.pages.len() * self.heads * self.page_tiles * layout.tile_len()];
        for (i, codes) in inputs.codes.iter().enumerate() {
            let (sequence, head) = (i / self.heads, i % self.heads);
            let mut packed = vec![0; self.capacity.div_ceil(layout.tokens()) * layout.tile_len()];
            let codes = Codes::new(layout.shape(), self.capacity, &codes[side as usize]).unwrap();
            layout.pack_into(&codes, &mut packed).unwrap();
            for (tile, packed) in packed.chunks_exact(layout.tile_len()).enumerate() {
                let page = if self.paged() {
                    inputs.pages[sequence * self.max_pages() + tile / self.page_tiles]
                } else {
                    sequence
                };
                let at = (page * self.heads + head) * self.page_tiles + tile % self.page_tiles;
                memory[at * layout.tile_len()..][..layout.tile_len()].copy_from_slice(packed);
            }
        }
        memory
    }

    /// The codebooks of all heads as tables.
    fn tables(&self, inputs: &Inputs, side: Side) -> Vec<f16> {
        let layout = &self.layouts()[side as usize];
        let mut tables = vec![f16::ZERO; self.heads * layout.table_len()];
        for (table, books) in tables.chunks_exact_mut(layout.table_len()).zip(&inputs.books) {
            layout.table_into(&books[side as usize].view(), table).unwrap();
        }
        tables
    }

    /// The page table of all sequences; entries beyond the tokens of a sequence are invalid.
    fn page_table(&self, inputs: &Inputs) -> Vec<u32> {
        let max_pages = self.max_pages();
        (0..self.batch * max_pages)
            .map(|i| {
                let used =
                    (self.lengths[i / max_pages] as usize).div_ceil(self.tile_tokens() * self.page_tiles);
                if i % max_pages < used {
                    inputs.pages.get(i).map_or(0, |&page| page as u32)
                } else {
                    u32::MAX
                }
            })
            .collect()
    }

    fn run_on_device(&self, device: &Device, inputs: &Inputs) -> Outputs {
        let Self { shape, batch, heads, .. } = *self;
        let (group, dim) = (shape.group, shape.keys.dim());
        let elements = |x: &Vec<f32>| x.iter().map(|&x| to_element(shape.element, x)).collect::<Vec<u16>>();
        let [key_codes, value_codes] = SIDES.map(|side| Buffer::new(device, &self.tiles(inputs, side)));
        let [key_table, value_table] = SIDES.map(|side| Buffer::new(device, &self.tables(inputs, side)));
        let [exact_keys, exact_values] = inputs.exact.each_ref().map(|x| Buffer::new(device, &elements(x)));
        let queries = Buffer::new(device, &elements(&inputs.queries));
        let page_table = Buffer::new(device, &self.page_table(inputs));
        let lengths = Buffer::new(device, &self.lengths);
        let exact_lengths = Buffer::new(device, &self.exact_lengths);
        let attend = Attend::new(device, shape).unwrap();
        let workspace = Buffer::new(device, &vec![0_u8; attend.workspace_len(batch, heads)]);
        let launch = || {
            let out = Buffer::new(device, &vec![u16::MAX; batch * heads * group * dim]); // NaN
            let log_sum_exp = Buffer::new(device, &vec![f32::NAN; batch * heads * group]);
            let arguments = AttendArguments {
                batch,
                heads,
                tiles: self.page_tiles,
                key_codes: key_codes.pointer(),
                value_codes: value_codes.pointer(),
                key_table: key_table.pointer(),
                value_table: value_table.pointer(),
                queries: queries.pointer().cast(),
                lengths: lengths.pointer(),
                pages: self
                    .paged()
                    .then(|| Pages { table: page_table.pointer(), max_pages: self.max_pages() }),
                exact: (self.exact_capacity > 0).then(|| ExactTokens {
                    keys: exact_keys.pointer().cast(),
                    values: exact_values.pointer().cast(),
                    lengths: exact_lengths.pointer(),
                    capacity: self.exact_capacity,
                }),
                scale: self.scale(),
                out: out.pointer().cast(),
                log_sum_exp: Some(log_sum_exp.pointer()),
                pdl: inputs.pdl,
                workspace: workspace.pointer(),
            };
            // SAFETY: the buffers live until their contents have been read, and have the lengths that the
            // shape requires.
            #[allow(unsafe_code)]
            unsafe { attend.launch(device.stream().cu_stream(), &arguments) }.unwrap();
            let log_sum_exp = log_sum_exp.read().iter().map(|x| x.to_bits()).collect();
            Outputs { out: out.read(), log_sum_exp }
        };
        let outputs = launch();
        assert!(launch() == outputs, "two runs differ");
        outputs
    }

    fn run_on_cpu(&self, inputs: &Inputs) -> Expected {
        let Self { shape, heads, .. } = *self;
        let (group, dim) = (shape.group, shape.keys.dim());
        let mut scratch = vec![0.0; attend_scratch_len(shape.values, group)];
        let mut out = vec![0.0; inputs.queries.len()];
        let mut stats = vec![SoftmaxStats::EMPTY; inputs.queries.len() / dim];
        let of_heads = out.chunks_exact_mut(group * dim).zip(stats.chunks_exact_mut(group));
        for (i, (out, stats)) in of_heads.enumerate() {
            let (sequence, books) = (i / heads, &inputs.books[i % heads]);
            let n = self.lengths[sequence] as usize;
            let [keys, values] = SIDES.map(|side| {
                let shape = [shape.keys, shape.values][side as usize];
                Codes::new(shape, n, &inputs.codes[i][side as usize][..shape.codes_len(n)]).unwrap()
            });
            let queries: Vec<f32> =
                inputs.queries[i * group * dim..][..group * dim].iter().map(|x| x * self.scale()).collect();
            let mut luts = vec![0.0; group * shape.keys.lut_len()];
            let luts = lut_into(&books[Side::Keys as usize].view(), &queries, &mut luts).unwrap();
            let tokens = CodedTokens::new(keys, values, books[Side::Values as usize].view()).unwrap();
            attend_into_with(Backend::Scalar, &luts, &tokens, &mut scratch, out, stats).unwrap();
            let m = self.exact_lengths[sequence] as usize;
            if m > 0 {
                let [keys, values] =
                    inputs.exact.each_ref().map(|x| &x[i * self.exact_capacity * dim..][..m * dim]);
                let tokens = pq_core::ExactTokens::contiguous(keys, dim, values, dim).unwrap();
                let (attention, mut scratch) = (Attention::default(), vec![0.0; queries.len()]);
                let queries = Rows::from(&queries[..]);
                attend_exact_into(&attention, queries, &tokens, &mut scratch, out, stats).unwrap();
            }
            out.chunks_exact_mut(dim).zip(stats).for_each(|(out, stats)| stats.normalize(out));
        }
        Expected { out, stats }
    }

    fn compare(&self, inputs: &Inputs, got: &Outputs, expected: &Expected) {
        let (shape, group, dim) = (self.shape, self.shape.group, self.shape.keys.dim());
        let tolerance = TOLERANCES.iter().find(|(element, _)| *element == shape.element).unwrap().1;
        for (i, stats) in expected.stats.iter().enumerate() {
            let (sequence, vector) = (i / group / self.heads, i * dim..(i + 1) * dim);
            let is_empty = self.lengths[sequence] + self.exact_lengths[sequence] == 0;
            let out: Vec<f32> =
                got.out[vector.clone()].iter().map(|&bits| from_element(shape.element, bits)).collect();
            let log = f32::from_bits(got.log_sum_exp[i]);
            let place = format!(
                "{shape:?} lengths {:?} {:?} head {} query {}",
                self.lengths,
                self.exact_lengths,
                i / group,
                i % group
            );
            if inputs.queries[vector.clone()].iter().any(|x| !x.is_finite()) {
                let spoiled = is_empty || out.iter().all(|x| x.is_nan());
                assert!(spoiled, "{place}: a query that is not finite gives {out:?}");
                continue;
            }
            let expected = &expected.out[vector];
            let error = relative_error(&out, expected);
            assert!(error <= tolerance, "{place}: error {error}\n{out:?}\n{expected:?}");
            if is_empty {
                assert_eq!(log, f32::NEG_INFINITY, "{place}");
            } else {
                let error = (log - stats.log_sum_exp()).abs();
                assert!(error <= LOG_SUM_EXP, "{place}: log-sum-exp {log} for {}", stats.log_sum_exp());
            }
        }
    }
}

const SHAPES: [(usize, usize, u32); 12] = [
    (128, 64, 8),
    (128, 64, 6),
    (128, 64, 4),
    (128, 128, 4),
    (128, 128, 3),
    (128, 32, 8),
    (128, 16, 8),
    (64, 32, 8),
    (64, 32, 6),
    (64, 32, 4),
    (64, 64, 4),
    (64, 16, 8),
];

fn random_case(random: &mut Random, batches: &[usize]) -> Case {
    let (dim, m, nbits) = random.pick(&SHAPES);
    let keys = PqShape::new(dim, m, nbits).unwrap();
    let values = loop {
        let (other, m, nbits) = random.pick(&SHAPES);
        if other == dim {
            break PqShape::new(dim, m, nbits).unwrap();
        }
    };
    let (batch, heads) = (random.pick(batches), 1 + random.below(4));
    let (group, element) = (1 + random.below(16), random.pick(&[Element::F16, Element::Bf16]));
    let pagings = [Paging::Contiguous, Paging::Contiguous, Paging::Tiles, Paging::HalfTiles];
    let mut shape = AttendShape { keys, values, group, element, paging: random.pick(&pagings) };
    if shape.check().is_err() {
        shape.paging = Paging::Tiles; // a quantizer without half tiles
    }
    let capacity = random.pick(&[1, 31, 32, 33, 100, 700, 3000]);
    let lengths = (0..batch)
        .map(|_| match random.below(4) {
            0 => random.pick(&[0, 1, capacity]) as u32,
            _ => random.below(capacity + 1) as u32,
        })
        .collect();
    let exact_capacity = random.pick(&[0, 1, 7, 40, 132]);
    let exact_lengths = (0..batch).map(|_| random.below(exact_capacity + 1) as u32).collect();
    let page_tiles = if shape.paging == Paging::Contiguous {
        capacity.div_ceil(TILE) + random.below(3)
    } else {
        random.pick(&[1, 2, 3, 8])
    };
    Case { shape, batch, heads, capacity, lengths, exact_capacity, exact_lengths, page_tiles }
}

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..60 {
        let mut random = Random(seed);
        random_case(&mut random, &[1, 2, 5]).run(&device, &mut random, |_| ());
    }
}

#[test]
fn many_ragged_sequences_agree() {
    let Some(device) = device("many_ragged_sequences_agree") else { return };
    for seed in 100..104 {
        let mut random = Random(seed);
        random_case(&mut random, &[33, 70, 200]).run(&device, &mut random, |_| ());
    }
}

/// Numbers of heads for which blocks take several of them, with their tables, one after another.
#[test]
fn many_heads_agree() {
    let Some(device) = device("many_heads_agree") else { return };
    for (seed, heads) in [(4000, 40), (4001, 67), (4002, 133), (4003, 300)] {
        let mut random = Random(seed);
        let mut case = random_case(&mut random, &[1, 3]);
        (case.heads, case.shape.group) = (heads, 1 + random.below(8));
        case.run(&device, &mut random, |_| ());
    }
}

/// Sequences so long that a warp looks up the pages of its tiles several times.
#[test]
fn many_pages_agree() {
    let Some(device) = device("many_pages_agree") else { return };
    let quantizer = PqShape::new(64, 16, 4).unwrap();
    for (seed, group, paging, page_tiles) in [
        (5000, 1, Paging::Tiles, 1),
        (5001, 4, Paging::Tiles, 3),
        (5002, 8, Paging::Tiles, 8),
        (5003, 1, Paging::HalfTiles, 1),
        (5004, 4, Paging::HalfTiles, 1),
        (5005, 8, Paging::HalfTiles, 3),
    ] {
        let element = Element::F16;
        let shape = AttendShape { keys: quantizer, values: quantizer, group, element, paging };
        let (heads, capacity) = (8, 280_000);
        let case = Case {
            shape,
            batch: 1,
            heads,
            capacity,
            lengths: vec![capacity as u32 - 17],
            exact_capacity: 0,
            exact_lengths: vec![0],
            page_tiles,
        };
        case.run(&device, &mut Random(seed), |_| ());
    }
}

/// Every group size with the shape of the benchmark. The sequence is long enough that all blocks share it.
#[test]
fn every_group_agrees() {
    let Some(device) = device("every_group_agrees") else { return };
    for (group, heads) in (1..=16).map(|group| (group, 2)).chain([(3, 1), (8, 1), (12, 1)]) {
        let mut random = Random(1000 + group as u64);
        let quantizer = PqShape::new(128, 64, 8).unwrap();
        let (element, paging) = (Element::F16, Paging::Contiguous);
        let shape = AttendShape { keys: quantizer, values: quantizer, group, element, paging };
        let (capacity, page_tiles) = (9000, 9000_usize.div_ceil(TILE));
        let (lengths, exact_lengths) = (vec![8999], vec![100]);
        let case = Case {
            shape,
            batch: 1,
            heads,
            capacity,
            lengths,
            exact_capacity: 100,
            exact_lengths,
            page_tiles,
        };
        case.run(&device, &mut random, |_| ());
    }
}

/// Pages of 16 tokens or a few times as many, in a random order: ragged lengths that end in either half of a tile,
/// with exact tokens beside them.
fn pages_of_half_tiles(device: &Device, seed: u64, (dim, m, nbits): (usize, usize, u32), group: usize) {
    let mut random = Random(seed);
    let quantizer = PqShape::new(dim, m, nbits).unwrap();
    let (element, paging) = (random.pick(&[Element::F16, Element::Bf16]), Paging::HalfTiles);
    let shape = AttendShape { keys: quantizer, values: quantizer, group, element, paging };
    let lengths = [1, 15, 16, 17, 31, 33, 47, 48, 2000, 2999].map(|most| random.below(most + 1) as u32);
    let exact_lengths = lengths.map(|_| random.below(101) as u32);
    let case = Case {
        shape,
        batch: lengths.len(),
        heads: 1 + random.below(3),
        capacity: 3000,
        lengths: lengths.to_vec(),
        exact_capacity: 100,
        exact_lengths: exact_lengths.to_vec(),
        page_tiles: random.pick(&[1, 1, 2, 5]),
    };
    case.run(device, &mut random, |_| ());
}

#[test]
fn half_tiles_of_every_group_agree() {
    let Some(device) = device("half_tiles_of_every_group_agree") else { return };
    (1..=8).for_each(|group| pages_of_half_tiles(&device, 6000 + group as u64, SHAPES[0], group));
}

#[test]
fn half_tiles_of_every_quantizer_agree() {
    let Some(device) = device("half_tiles_of_every_quantizer_agree") else { return };
    for (i, shape) in SHAPES.into_iter().enumerate() {
        pages_of_half_tiles(&device, 6100 + i as u64, shape, 1 + i % 8);
    }
}

/// From so few tokens that not all blocks work to some more, with few and with many exact tokens.
#[test]
fn few_tokens_agree() {
    let Some(device) = device("few_tokens_agree") else { return };
    let quantizer = PqShape::new(128, 64, 8).unwrap();
    let lengths = [0, 1, 32, 200, 256, 257, 1024, 2500, 4096];
    for (seed, length) in (7000..).zip(lengths.iter().cycle().take(2 * lengths.len()).copied()) {
        let mut random = Random(seed);
        let group = random.pick(&[1, 2, 4, 6, 8]);
        let (element, paging) = (Element::F16, random.pick(&[Paging::Contiguous, Paging::HalfTiles]));
        let shape = AttendShape { keys: quantizer, values: quantizer, group, element, paging };
        let exact = random.pick(&[0, 1, 16, 17, 1024, 3000]);
        let capacity = length.max(1) as usize;
        let case = Case {
            shape,
            batch: 1,
            heads: random.pick(&[1, 4, 8]),
            capacity,
            lengths: vec![length],
            exact_capacity: exact,
            exact_lengths: vec![exact as u32],
            page_tiles: if paging == Paging::Contiguous { capacity.div_ceil(TILE) } else { 1 },
        };
        case.run(&device, &mut random, |_| ());
    }
}

#[test]
fn numbers_that_are_none_stay_with_their_query() {
    let Some(device) = device("numbers_that_are_none_stay_with_their_query") else { return };
    for (seed, spoiler) in
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle().take(6).enumerate()
    {
        let mut random = Random(2000 + seed as u64);
        let case = random_case(&mut random, &[2]);
        case.run(&device, &mut random, |queries| queries[5] = spoiler);
    }
}

#[test]
fn a_captured_graph_follows_the_lengths() {
    let Some(device) = device("a_captured_graph_follows_the_lengths") else { return };
    let mut random = Random(3000);
    let quantizer = PqShape::new(64, 32, 6).unwrap();
    let (group, element, paging) = (4, Element::F16, Paging::Contiguous);
    let shape = AttendShape { keys: quantizer, values: quantizer, group, element, paging };
    let (batch, heads, tiles) = (3, 2, 40);
    let layout = CodeLayout::new(quantizer, Side::Keys).unwrap();
    let codes = Buffer::new(&device, &random.bytes(batch * heads * tiles * layout.tile_len()));
    let halves = |x: Vec<f32>| x.iter().map(|&x| to_element(Element::F16, x)).collect::<Vec<u16>>();
    let table = Buffer::new(&device, &halves(random.normals(heads * layout.table_len())));
    let queries = Buffer::new(&device, &halves(random.normals(batch * heads * 4 * 64)));
    let mut lengths = Buffer::new(&device, &[100_u32, 0, 1280]);
    let attend = Attend::new(&device, shape).unwrap();
    let workspace = Buffer::new(&device, &vec![0_u8; attend.workspace_len(batch, heads)]);
    let out = Buffer::new(&device, &vec![0_u16; batch * heads * 4 * 64]);
    let arguments = AttendArguments {
        batch,
        heads,
        tiles,
        key_codes: codes.pointer(),
        value_codes: codes.pointer(),
        key_table: table.pointer().cast(),
        value_table: table.pointer().cast(),
        queries: queries.pointer().cast(),
        lengths: lengths.pointer(),
        pages: None,
        exact: None,
        scale: 0.125,
        out: out.pointer().cast(),
        log_sum_exp: None,
        pdl: false,
        workspace: workspace.pointer(),
    };
    let stream = device.stream();
    // SAFETY: the buffers outlive the graph, and have the lengths that the shape requires.
    #[allow(unsafe_code)]
    let launch = || unsafe { attend.launch(stream.cu_stream(), &arguments) }.unwrap();
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    launch();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    let mut before = Vec::new();
    for new_lengths in [[100, 0, 1280], [101, 32, 1], [1280, 1280, 1280]] {
        lengths.write(&new_lengths);
        graph.launch().unwrap();
        let by_graph = out.read();
        launch();
        assert!(by_graph == out.read(), "{new_lengths:?}");
        assert!(by_graph != before, "{new_lengths:?}: as with the lengths before");
        before = by_graph;
    }
}
