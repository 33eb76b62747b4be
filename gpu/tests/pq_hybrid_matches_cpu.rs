//! Hybrid attention agrees with `pq_core::hybrid_select_into`, `pq_core::hybrid_attend_into` and
//! `pq_core::attend_exact_into`.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{Buffer, Random, SIDES, device, from_element, relative_error, to_element};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode};
use half::f16;
use kv_gpu::pq::{
    CodeLayout, ErrorBound, ExactRows, ExactTokens, Hybrid, HybridArguments, HybridShape, Pages, RowIndex,
    Select, SelectArguments, SelectShape, Side, TILE,
};
use kv_gpu::{Device, Element, Error};
use pq_core::{
    Attention, CodebookBuf, CodedTokens, Codes, GroupRule, HybridScratch, PqShape, RowBudget, Rows,
    SoftmaxStats, attend_exact_into, hybrid_attend_into, hybrid_select_into, lut_into,
};

/// Maximum relative error of an output vector, by element type: the rounding of weights to f16 (2^-11) and of
/// the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 6e-3)];
/// Maximum absolute error of the log-sum-exp and of a coded score, and of the latter relative to the spread
/// of the scores: table entries are f16.
const LOG_SUM_EXP: f32 = 2e-3;
const SCORE: f64 = 2e-3;
const SCORE_OF_SPREAD: f64 = 1e-3;
/// How much larger or smaller a bound may be for which the CPU finds as many rows, or one more or less:
/// rounding moves weights between buckets, whose mean squares differ by up to a quarter.
const BOUND: f32 = 0.15;

/// The shape of one step, and the tokens of its sequences.
#[derive(Debug)]
struct Case {
    shape: HybridShape,
    batch: usize,
    heads: usize,
    capacity: usize, // coded tokens of a sequence
    lengths: Vec<u32>,
    ks: Vec<u32>,
    selected_len: usize,
    exact_capacity: usize, // 0: without exact tokens
    exact_lengths: Vec<u32>,
    page_tiles: usize,
    has_errors: bool,
    index: Index,
    has_code_queries: bool,
    spread: f32, // factor of the queries
    bound: f32,  // if the shape is adaptive
}

/// [`RowIndex`] of a case. Slots of a list are in the reverse order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Index {
    Order,
    Token,
    List,
}

/// The inputs of a case for the CPU. Pairs are [keys, values], indexed by [`Side`].
struct Inputs {
    queries: Vec<f32>,            // (batch, heads, group, dim)
    code_queries: Vec<f32>,       // the same, or with their components in reverse order
    errors: Vec<f32>,             // (heads, dim)
    value_errors: Vec<f32>,       // (heads,)
    exact: [Vec<f32>; 2],         // (batch, heads, exact_capacity, dim)
    rows: [Vec<f32>; 2],          // (batch, heads, capacity, dim)
    books: Vec<[CodebookBuf; 2]>, // (heads,)
    codes: Vec<[Vec<u8>; 2]>,     // (batch, heads), packed, of `capacity` tokens
    pages: Vec<usize>,            // (batch, max_pages) and an unused page; (batch,) without pages
    pdl: bool,
}

/// The selection, how many tokens of each head (batch, heads) it has, and the bits of the outputs (batch,
/// heads, group, dim) and of their log-sum-exps.
#[derive(Clone, PartialEq)]
struct Outputs {
    found: Vec<u32>,
    selected: Vec<u32>,
    out: Vec<u16>,
    log_sum_exp: Vec<u32>,
}

impl Case {
    fn random(random: &mut Random) -> Self {
        const SHAPES: [(usize, usize, u32); 10] = [
            (128, 16, 8),
            (128, 16, 8),
            (128, 8, 8),
            (128, 32, 8),
            (128, 32, 4),
            (128, 16, 4),
            (64, 16, 8),
            (64, 8, 8),
            (64, 32, 4),
            (64, 8, 4),
        ];
        let (dim, m, nbits) = random.pick(&SHAPES);
        let keys = PqShape::new(dim, m, nbits).unwrap();
        let values = loop {
            let (other, m, nbits) = random.pick(&SHAPES);
            if other == dim {
                break PqShape::new(dim, m, nbits).unwrap();
            }
        };
        let (batch, heads) = (random.pick(&[1, 2, 4]), 1 + random.below(3));
        let shape = HybridShape {
            keys,
            values,
            group: 1 + random.below(8),
            element: random.pick(&[Element::F16, Element::Bf16]),
            rule: random.pick(&[GroupRule::SumOfSoftmax, GroupRule::MaxOfSoftmax]),
            paged: random.below(2) == 1,
            adaptive: false,
        };
        let capacity = random.pick(&[1, 31, 32, 33, 100, 700, 3000, 9000]);
        let length = |random: &mut Random| match random.below(6) {
            0 => 0,
            1 => capacity,
            2 => 1.min(capacity),
            _ => random.below(capacity + 1),
        };
        let lengths: Vec<u32> = (0..batch).map(|_| length(random) as u32).collect();
        let k = |&n: &u32| match random.below(6) {
            0 => 0,
            1 => n + 5,
            2 => 1,
            _ => random.below(n as usize / 4 + 1) as u32,
        };
        let ks: Vec<u32> = lengths.iter().map(k).collect();
        let exact_capacity = random.pick(&[0, 1, 7, 40, 132]);
        Self {
            shape,
            batch,
            heads,
            capacity,
            selected_len: capacity.min(1 + random.below(2 * capacity)),
            exact_lengths: (0..batch).map(|_| random.below(exact_capacity + 1) as u32).collect(),
            lengths,
            ks,
            exact_capacity,
            page_tiles: if shape.paged {
                random.pick(&[1, 2, 3, 8])
            } else {
                capacity.div_ceil(TILE) + random.below(3)
            },
            has_errors: random.below(2) == 1,
            index: random.pick(&[Index::Order, Index::Token, Index::List]),
            has_code_queries: random.below(2) == 1,
            spread: random.pick(&[1.0, 1.0, 2.0]),
            bound: 0.0,
        }
    }

    /// Makes the number of rows depend on a bound, up to k of them.
    fn adapt(&mut self, bound: f32) {
        (self.shape.adaptive, self.bound) = (true, bound);
        let k = |(&n, k): (&u32, &u32)| if k % 3 == 0 { n } else { *k };
        self.ks = self.lengths.iter().zip(&self.ks).map(k).collect();
        self.selected_len = self.capacity;
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.keys.dim() as f32).sqrt()
    }

    fn layouts(&self) -> [CodeLayout; 2] {
        let HybridShape { keys, values, .. } = self.shape;
        [CodeLayout::new(keys, Side::Keys), CodeLayout::new(values, Side::Values)].map(Result::unwrap)
    }

    fn max_pages(&self) -> usize {
        self.capacity.div_ceil(TILE).div_ceil(self.page_tiles)
    }

    /// Tokens that are selected in a sequence, or the most if the shape is adaptive.
    fn most(&self, sequence: usize) -> usize {
        (self.ks[sequence].min(self.lengths[sequence]) as usize).min(self.selected_len)
    }

    fn inputs(&self, random: &mut Random, spoil: impl Fn(&mut [f32])) -> Inputs {
        let Self { shape, batch, heads, capacity, .. } = *self;
        let dim = shape.keys.dim();
        let rounded = |x: f32| from_element(shape.element, to_element(shape.element, x));
        let mut queries: Vec<f32> = random.normals(batch * heads * shape.group * dim);
        queries.iter_mut().for_each(|x| *x = rounded(self.spread * *x));
        spoil(&mut queries);
        let mut code_queries = queries.clone();
        if self.has_code_queries {
            code_queries.chunks_exact_mut(dim).for_each(<[f32]>::reverse);
        }
        let errors = (0..heads * dim).map(|_| random.normal().abs()).collect();
        let value_errors = (0..heads).map(|head| 0.1 + 0.2 * head as f32).collect();
        let mut elements =
            |len: usize| SIDES.map(|_| random.normals(len).into_iter().map(rounded).collect::<Vec<_>>());
        let exact = elements(batch * heads * self.exact_capacity * dim);
        let rows = elements(batch * heads * capacity * dim);
        let quantizers = [shape.keys, shape.values];
        let book = |random: &mut Random, shape: PqShape| {
            let centroids = random.normals(shape.codebook_len());
            let halves: Vec<f32> = centroids.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            CodebookBuf::new(shape, &halves).unwrap()
        };
        let books = (0..heads).map(|_| quantizers.map(|shape| book(random, shape))).collect();
        let codes = (0..batch * heads)
            .map(|_| quantizers.map(|shape| random.bytes(shape.codes_len(capacity))))
            .collect();
        let page_count = if shape.paged { batch * self.max_pages() + 1 } else { batch };
        let mut pages: Vec<usize> = (0..page_count).collect();
        if shape.paged {
            (1..page_count).for_each(|i| pages.swap(i, random.below(i + 1)));
        }
        let pdl = random.below(2) == 1;
        Inputs { queries, code_queries, errors, value_errors, exact, rows, books, codes, pages, pdl }
    }

    /// The codes of all sequences in tiles; bytes without tokens are arbitrary.
    fn tiles(&self, inputs: &Inputs, side: Side) -> Vec<u8> {
        let layout = &self.layouts()[side as usize];
        let mut memory = vec![0xA5; inputs.pages.len() * self.heads * self.page_tiles * layout.tile_len()];
        for (i, codes) in inputs.codes.iter().enumerate() {
            let (sequence, head) = (i / self.heads, i % self.heads);
            let mut packed = vec![0; self.capacity.div_ceil(TILE) * layout.tile_len()];
            let codes = Codes::new(layout.shape(), self.capacity, &codes[side as usize]).unwrap();
            layout.pack_into(&codes, &mut packed).unwrap();
            for (tile, packed) in packed.chunks_exact(layout.tile_len()).enumerate() {
                let page = if self.shape.paged {
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
                let used = (self.lengths[i / max_pages] as usize).div_ceil(TILE * self.page_tiles);
                if i % max_pages < used {
                    inputs.pages.get(i).map_or(0, |&page| page as u32)
                } else {
                    u32::MAX
                }
            })
            .collect()
    }

    /// Rows of the selected tokens in their order, or in their slots; other rows are not numbers.
    fn collect(&self, rows: &[u16], selected: &[u32], found: &[u32]) -> Vec<u16> {
        let dim = self.shape.keys.dim();
        let mut collected = vec![u16::MAX; self.batch * self.heads * self.selected_len * dim];
        for i in 0..self.batch * self.heads {
            let row = i * self.selected_len;
            for (place, &token) in selected[row..][..found[i] as usize].iter().enumerate() {
                let from = (i * self.capacity + token as usize) * dim;
                let place = if self.index == Index::List { self.selected_len - 1 - place } else { place };
                collected[(row + place) * dim..][..dim].copy_from_slice(&rows[from..][..dim]);
            }
        }
        collected
    }

    /// Two runs, or with `graph` the second one from a graph that was captured with other lengths.
    fn run_on_device(&self, device: &Device, inputs: &Inputs, graph: bool) -> Outputs {
        let Self { shape, batch, heads, .. } = *self;
        let (group, dim) = (shape.group, shape.keys.dim());
        let elements = |x: &Vec<f32>| x.iter().map(|&x| to_element(shape.element, x)).collect::<Vec<u16>>();
        let [key_codes, value_codes] = SIDES.map(|side| Buffer::new(device, &self.tiles(inputs, side)));
        let [key_table, value_table] = SIDES.map(|side| Buffer::new(device, &self.tables(inputs, side)));
        let [exact_keys, exact_values] = inputs.exact.each_ref().map(|x| Buffer::new(device, &elements(x)));
        let rows = inputs.rows.each_ref().map(elements);
        let rows_there = rows.each_ref().map(|rows| Buffer::new(device, rows));
        let queries = Buffer::new(device, &elements(&inputs.queries));
        let code_queries = Buffer::new(device, &elements(&inputs.code_queries));
        let errors = Buffer::new(device, &inputs.errors);
        let value_errors = Buffer::new(device, &inputs.value_errors);
        let most: Vec<u32> = (0..batch * heads).map(|i| self.most(i / heads) as u32).collect();
        let found = Buffer::new(device, &if shape.adaptive { vec![u32::MAX; most.len()] } else { most });
        let total = Buffer::new(device, &[0_u64]);
        let page_table = Buffer::new(device, &self.page_table(inputs));
        let mut lengths = Buffer::new(device, &self.lengths);
        let exact_lengths = Buffer::new(device, &self.exact_lengths);
        let ks = Buffer::new(device, &self.ks);
        let hybrid = Hybrid::new(device, shape).unwrap();
        let room = self.max_pages() * self.page_tiles * TILE;
        let workspace = Buffer::new(device, &vec![0_u8; hybrid.workspace_len(batch, heads, room)]);
        let selected = Buffer::new(device, &vec![u32::MAX; batch * heads * self.selected_len]);
        let slots: Vec<u32> = (0..self.selected_len as u32).rev().collect();
        let slots = Buffer::new(device, &slots.repeat(batch * heads));
        let collected =
            [(); 2].map(|()| Buffer::new(device, &vec![0_u16; batch * heads * self.selected_len * dim]));
        let out = Buffer::new(device, &vec![u16::MAX; batch * heads * group * dim]); // NaN
        let log_sum_exp = Buffer::new(device, &vec![f32::NAN; batch * heads * group]);
        let [row_keys, row_values] =
            if self.index == Index::Token { &rows_there } else { &collected }.each_ref();
        let arguments = HybridArguments {
            batch,
            heads,
            tiles: self.page_tiles,
            key_codes: key_codes.pointer(),
            value_codes: value_codes.pointer(),
            key_table: key_table.pointer(),
            value_table: value_table.pointer(),
            key_errors: self.has_errors.then(|| errors.pointer()),
            queries: queries.pointer().cast(),
            code_queries: self.has_code_queries.then(|| code_queries.pointer().cast()),
            lengths: lengths.pointer(),
            pages: shape.paged.then(|| Pages { table: page_table.pointer(), max_pages: self.max_pages() }),
            ks: ks.pointer(),
            bound: shape.adaptive.then(|| ErrorBound {
                bound: self.bound,
                value_errors: value_errors.pointer(),
                found: found.pointer(),
                total: Some(total.pointer()),
            }),
            selected: selected.pointer(),
            selected_len: self.selected_len,
            rows: ExactRows {
                keys: row_keys.pointer().cast(),
                values: row_values.pointer().cast(),
                capacity: if self.index == Index::Token { self.capacity } else { self.selected_len },
                index: match self.index {
                    Index::Order => RowIndex::Order,
                    Index::Token => RowIndex::Token,
                    Index::List => RowIndex::List(slots.pointer()),
                },
                arriving: self.index != Index::Token,
            },
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
        // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
        // requires.
        #[allow(unsafe_code)]
        let select = |stream: CUstream| unsafe { hybrid.select(stream, &arguments) }.unwrap();
        // SAFETY: as above.
        #[allow(unsafe_code)]
        let attend = |stream: CUstream| unsafe { hybrid.attend(stream, &arguments) }.unwrap();
        let stream = device.stream();
        let read = || Outputs {
            found: found.read(),
            selected: selected.read(),
            out: out.read(),
            log_sum_exp: log_sum_exp.read().iter().map(|x| x.to_bits()).collect(),
        };
        let mut collected = collected;
        let mut run = || {
            select(stream.cu_stream());
            if self.index != Index::Token {
                let (selected, found) = (selected.read(), found.read());
                for (collected, rows) in collected.iter_mut().zip(&rows) {
                    collected.write(&self.collect(rows, &selected, &found));
                }
            }
            attend(stream.cu_stream());
            read()
        };
        let outputs = run();
        if graph {
            lengths.write(&vec![0; batch]);
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            select(stream.cu_stream());
            attend(stream.cu_stream());
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().unwrap();
            graph.launch().unwrap();
            lengths.write(&self.lengths);
            graph.launch().unwrap();
            assert!(read() == outputs, "{self:?}: a graph differs");
        } else {
            assert!(run() == outputs, "{self:?}: two runs differ");
            assert!(
                shape.adaptive || self.select_alone(device, &arguments) == outputs.selected,
                "{self:?}: pq::Select differs"
            );
        }
        let sum: u64 = if shape.adaptive { found.read().iter().map(|&n| u64::from(n)).sum() } else { 0 };
        assert_eq!(total.read(), [2 * sum], "{self:?}: the rows of two runs");
        outputs
    }

    /// The selection of [`Select`].
    fn select_alone(&self, device: &Device, step: &HybridArguments) -> Vec<u32> {
        let HybridShape { keys, group, element, rule, paged, .. } = self.shape;
        let select = Select::new(device, SelectShape { keys, group, element, rule, paged }).unwrap();
        let room = self.max_pages() * self.page_tiles * TILE;
        let workspace = Buffer::new(device, &vec![0_u8; select.workspace_len(step.batch, step.heads, room)]);
        let selected = Buffer::new(device, &vec![u32::MAX; step.batch * step.heads * step.selected_len]);
        let arguments = SelectArguments {
            batch: step.batch,
            heads: step.heads,
            tiles: step.tiles,
            codes: step.key_codes,
            table: step.key_table,
            errors: step.key_errors,
            queries: step.code_queries.unwrap_or(step.queries),
            lengths: step.lengths,
            pages: step.pages,
            ks: step.ks,
            selected: selected.pointer(),
            selected_len: step.selected_len,
            scale: step.scale,
            pdl: step.pdl,
            workspace: workspace.pointer(),
        };
        // SAFETY: the buffers live until the selection has been read, and have the lengths of the shape.
        #[allow(unsafe_code)]
        unsafe { select.launch(device.stream().cu_stream(), &arguments) }.unwrap();
        selected.read()
    }

    /// Checks a step against the CPU, which attends to the rows that the device has selected.
    fn check(&self, inputs: &Inputs, got: &Outputs) {
        let Self { shape, heads, capacity, .. } = *self;
        let (group, dim) = (shape.group, shape.keys.dim());
        let tolerance = TOLERANCES.iter().find(|(element, _)| *element == shape.element).unwrap().1;
        for i in 0..self.batch * heads {
            let (sequence, books) = (i / heads, &inputs.books[i % heads]);
            let (n, found) = (self.lengths[sequence] as usize, got.found[i] as usize);
            let [keys, values] = SIDES.map(|side| {
                let shape = [shape.keys, shape.values][side as usize];
                Codes::new(shape, n, &inputs.codes[i][side as usize][..shape.codes_len(n)]).unwrap()
            });
            let scaled = |queries: &[f32]| -> Vec<f32> {
                queries[i * group * dim..][..group * dim].iter().map(|x| x * self.scale()).collect()
            };
            let (queries, code_queries) = (scaled(&inputs.queries), scaled(&inputs.code_queries));
            let mut luts = vec![0.0; group * shape.keys.lut_len()];
            let luts = lut_into(&books[Side::Keys as usize].view(), &code_queries, &mut luts).unwrap();
            let tokens = CodedTokens::new(keys, values, books[Side::Values as usize].view()).unwrap();
            let variance = |query: &[f32]| {
                let errors = &inputs.errors[i % heads * dim..][..dim];
                let variance: f32 = query.iter().zip(errors).map(|(q, e)| q * q * e).sum();
                if variance.is_finite() { variance } else { 0.0 }
            };
            let variances: Vec<f32> = code_queries.chunks_exact(dim).map(variance).collect();
            let hybrid = pq_core::Hybrid {
                rows: RowBudget::Count(found),
                rule: shape.rule,
                score_variances: if self.has_errors { &variances } else { &[] },
                others: &[],
            };
            let mut floats = vec![0.0; HybridScratch::len(shape.values, group, n)];
            let mut coded = vec![SoftmaxStats::EMPTY; group];
            let mut scratch = HybridScratch::new(shape.values, n, &mut floats, &mut coded).unwrap();
            let mut best = vec![0; n];
            let of_head = |x: &[Vec<f32>; 2], capacity: usize| {
                x.each_ref().map(|x| x[i * capacity * dim..][..capacity * dim].to_vec())
            };
            let exact = of_head(&inputs.exact, self.exact_capacity);
            let m = self.exact_lengths[sequence] as usize;
            let exact = exact.each_ref().map(|rows| &rows[..m * dim]);
            let exact =
                (m > 0).then(|| pq_core::ExactTokens::contiguous(exact[0], dim, exact[1], dim).unwrap());
            let add = |rows: &pq_core::ExactTokens<'_, f32>, out: &mut [f32], stats: &mut [SoftmaxStats]| {
                let (attention, mut scratch) = (Attention::default(), vec![0.0; queries.len()]);
                let queries = Rows::from(&queries[..]);
                attend_exact_into(&attention, queries, rows, &mut scratch, out, stats).unwrap();
            };
            let is_finite = |query: &[f32]| query.iter().all(|x| x.is_finite());
            // The CPU gives infinite scores all weight, the device leaves their query out of the choice.
            if shape.adaptive && queries.chunks_exact(dim).all(is_finite) {
                let mut others = vec![SoftmaxStats::EMPTY; group];
                exact.iter().for_each(|exact| add(exact, &mut vec![0.0; group * dim], &mut others));
                let mut count = |factor: f32| {
                    let rows = RowBudget::Error {
                        bound: self.bound * factor,
                        value_error: inputs.value_errors[i % heads],
                        most: self.most(sequence),
                    };
                    let hybrid = pq_core::Hybrid { rows, others: &others, ..hybrid };
                    hybrid_select_into(&luts, &tokens, &hybrid, &mut scratch, &mut best).unwrap()
                };
                let (least, most) = (count(1.0 + BOUND), count(1.0 - BOUND));
                assert!((least..=most + 1).contains(&found) || found + 1 == least, "{self:?}: {found} rows");
            }
            hybrid_select_into(&luts, &tokens, &hybrid, &mut scratch, &mut best).unwrap();

            let selected = &got.selected[i * self.selected_len..][..self.selected_len];
            assert!(selected[found..].iter().all(|&t| t == u32::MAX), "{self:?}: behind the selected");
            let selected = &selected[..found];
            assert!(selected.is_sorted_by(|a, b| a < b) && selected.iter().all(|&t| (t as usize) < n));
            check_selection(self, scratch.search().scores(), selected, n);

            let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
            hybrid_attend_into(&tokens, selected, &mut scratch, &mut out, &mut stats).unwrap();
            let [keys, values] = of_head(&inputs.rows, capacity);
            let rows = pq_core::ExactTokens::contiguous(&keys, dim, &values, dim).unwrap();
            let rows = rows.chosen(selected).unwrap();
            for rows in [(found > 0).then_some(rows), exact].into_iter().flatten() {
                add(&rows, &mut out, &mut stats);
            }
            for (g, (out, stats)) in out.chunks_exact_mut(dim).zip(&stats).enumerate() {
                stats.normalize(out);
                let query = i * group + g;
                let place = format!("{self:?} head {i} query {g}");
                let got_out: Vec<f32> = got.out[query * dim..][..dim]
                    .iter()
                    .map(|&bits| from_element(shape.element, bits))
                    .collect();
                let log = f32::from_bits(got.log_sum_exp[query]);
                let is_empty = n + m == 0;
                if !is_finite(&queries[g * dim..][..dim]) {
                    assert!(is_empty || got_out.iter().all(|x| x.is_nan()), "{place}: {got_out:?}");
                    continue;
                }
                let error = relative_error(&got_out, out);
                assert!(error <= tolerance, "{place}: error {error}\n{got_out:?}\n{out:?}");
                if is_empty {
                    assert_eq!(log, f32::NEG_INFINITY, "{place}");
                } else {
                    let error = (log - stats.log_sum_exp()).abs();
                    assert!(error <= LOG_SUM_EXP, "{place}: log-sum-exp {log} for {}", stats.log_sum_exp());
                }
            }
        }
    }
}

/// No token that was left out has a larger weight than a selected one, but for the rounding of scores.
fn check_selection(case: &Case, scores: &[f32], selected: &[u32], n: usize) {
    if selected.is_empty() || selected.len() == n {
        return;
    }
    let queries: Vec<Vec<f64>> = scores
        .chunks_exact(n)
        .filter(|scores| scores.iter().all(|x| x.is_finite()))
        .map(|scores| {
            let max = scores.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = scores.iter().map(|&x| f64::from(x - max).exp()).sum();
            scores.iter().map(|&x| f64::from(x - max) - sum.ln()).collect()
        })
        .collect();
    let weight = |t: usize| {
        let logs = queries.iter().map(|logs| logs[t]);
        let max = logs.clone().fold(f64::NEG_INFINITY, f64::max);
        match case.shape.rule {
            GroupRule::MaxOfSoftmax => max,
            GroupRule::SumOfSoftmax => max + logs.map(|log| (log - max).exp()).sum::<f64>().ln(),
        }
    };
    let mut is_in = vec![false; n];
    selected.iter().for_each(|&t| is_in[t as usize] = true);
    let of = |wanted: bool| (0..n).filter(|&t| is_in[t] == wanted).map(weight).collect::<Vec<_>>();
    let least = of(true).into_iter().fold(f64::INFINITY, f64::min);
    let most = of(false).into_iter().fold(f64::NEG_INFINITY, f64::max);
    let spread = queries.iter().flatten().fold(0.0, |spread: f64, log| spread.max(-log));
    let tolerance = SCORE + SCORE_OF_SPREAD * spread;
    assert!(queries.is_empty() || least >= most - tolerance, "{case:?}: {least} {most}, spread {spread}");
}

fn run(device: &Device, seeds: std::ops::Range<u64>, change: impl Fn(&mut Case), spoil: impl Fn(&mut [f32])) {
    for seed in seeds {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        change(&mut case);
        let inputs = case.inputs(&mut random, &spoil);
        let graph = case.index == Index::Token && !case.shape.paged;
        let outputs = case.run_on_device(device, &inputs, graph);
        case.check(&inputs, &outputs);
    }
}

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    run(&device, 0..40, |_| (), |_| ());
}

/// As many rows as a bound needs, up to k of them.
#[test]
fn rows_within_a_bound_agree() {
    let Some(device) = device("rows_within_a_bound_agree") else { return };
    for (seeds, bound) in [(500..508, 0.02), (508..520, 0.1), (520..532, 0.3), (532..540, 1.0)] {
        run(&device, seeds, |case| case.adapt(bound), |_| ());
    }
    for group in 1..=8 {
        let of_group = |case: &mut Case| {
            case.shape.group = group;
            case.adapt(0.2);
        };
        run(&device, 540 + group as u64..541 + group as u64, of_group, |_| ());
    }
    for (seed, bad) in (550..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(2)) {
        run(&device, seed..seed + 1, |case| case.adapt(0.2), |queries| queries[7] = bad);
    }
}

/// On sm_90, tokens for several blocks of a cluster.
#[test]
fn many_rows_within_a_bound_agree() {
    let Some(device) = device("many_rows_within_a_bound_agree") else { return };
    for (seeds, rows, bound) in [(600..602, 1, 0.02), (603..605, 2, 0.1)] {
        let lengthen = |case: &mut Case| {
            let n = 39_990;
            (case.capacity, case.batch, case.heads) = (n, rows, 2);
            let shares = (0..rows).map(|i| ((rows - i) * n / rows) as u32);
            (case.lengths, case.ks) = (shares.clone().collect(), shares.collect());
            case.exact_lengths = vec![case.exact_capacity as u32; rows];
            case.page_tiles = if case.shape.paged { 8 } else { n.div_ceil(TILE) };
            case.adapt(bound);
        };
        run(&device, seeds, lengthen, |_| ());
    }
}

#[test]
fn loose_bounds_need_no_rows_and_a_bound_of_zero_needs_all() {
    let Some(device) = device("loose_bounds_need_no_rows_and_a_bound_of_zero_needs_all") else { return };
    for (seed, bound) in (620..632).zip([1e6, 0.0].repeat(6)) {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        case.adapt(bound);
        let inputs = case.inputs(&mut random, |_| ());
        let outputs = case.run_on_device(&device, &inputs, false);
        for (i, &found) in outputs.found.iter().enumerate() {
            let most = if bound > 0.0 { 0 } else { case.most(i / case.heads) };
            assert_eq!(found as usize, most, "{case:?}");
        }
        case.check(&inputs, &outputs);
    }
}

#[test]
fn long_sequences_agree() {
    let Some(device) = device("long_sequences_agree") else { return };
    let lengthen = |case: &mut Case| {
        (case.capacity, case.batch, case.heads) = (40_000, 1, 2);
        (case.lengths, case.ks, case.exact_lengths) =
            (vec![39_990], vec![400], vec![case.exact_capacity as u32]);
        case.selected_len = 500;
        case.page_tiles = if case.shape.paged { 8 } else { 1250 };
    };
    run(&device, 100..106, lengthen, |_| ());
}

/// Without differences between the weights, the order of the tokens decides, over all blocks of a row.
#[test]
fn of_equal_tokens_the_first_are_selected() {
    let Some(device) = device("of_equal_tokens_the_first_are_selected") else { return };
    for (seed, (n, k)) in (120..).zip([(39_990, 400), (39_990, 39_989), (700, 30), (40_000, 20_000)]) {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        (case.capacity, case.batch, case.heads, case.selected_len) = (40_000, 1, 2, 40_000);
        (case.lengths, case.ks, case.exact_lengths) = (vec![n], vec![k], vec![case.exact_capacity as u32]);
        case.page_tiles = if case.shape.paged { 8 } else { 1250 };
        let inputs = case.inputs(&mut random, |queries| queries.fill(0.0));
        let outputs = case.run_on_device(&device, &inputs, false);
        for selected in outputs.selected.chunks_exact(case.selected_len) {
            assert!(selected[..k as usize].iter().copied().eq(0..k), "{case:?}");
        }
        case.check(&inputs, &outputs);
    }
}

/// Sequences so long that a warp looks up the pages of its tiles several times.
#[test]
fn many_pages_agree() {
    let Some(device) = device("many_pages_agree") else { return };
    let lengthen = |case: &mut Case| {
        let quantizer = PqShape::new(64, 8, 4).unwrap();
        (case.shape.keys, case.shape.values) = (quantizer, quantizer);
        (case.shape.group, case.shape.paged, case.page_tiles) = (5, true, 3);
        (case.capacity, case.batch, case.heads) = (280_000, 1, 8);
        (case.lengths, case.ks, case.exact_lengths) =
            (vec![279_990], vec![400], vec![case.exact_capacity as u32]);
        case.selected_len = 500;
    };
    run(&device, 150..151, lengthen, |_| ());
    let adapt = |case: &mut Case| {
        lengthen(case);
        case.adapt(0.01);
    };
    run(&device, 151..152, adapt, |_| ());
}

#[test]
fn many_ragged_sequences_agree() {
    let Some(device) = device("many_ragged_sequences_agree") else { return };
    let ragged = |case: &mut Case| {
        (case.batch, case.capacity) = (40, 300);
        case.lengths = (0..40).map(|i| i * i % 301).collect();
        case.ks = (0..40).map(|i| i * 7 % 50).collect();
        case.exact_lengths = (0..40).map(|i| i % (case.exact_capacity as u32 + 1)).collect();
        case.selected_len = 40;
        case.page_tiles = if case.shape.paged { 3 } else { 10 };
    };
    run(&device, 200..206, ragged, |_| ());
}

#[test]
fn queries_that_are_not_finite_spoil_themselves_alone() {
    let Some(device) = device("queries_that_are_not_finite_spoil_themselves_alone") else { return };
    for (seed, bad) in (300..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(4)) {
        run(&device, seed..seed + 1, |_| (), |queries| queries[7] = bad);
    }
}

#[test]
fn shapes_without_kernels_are_errors() {
    let shape = |dim, m, nbits| PqShape::new(dim, m, nbits).unwrap();
    let good = HybridShape {
        keys: shape(128, 16, 8),
        values: shape(128, 8, 8),
        group: 4,
        element: Element::F16,
        rule: GroupRule::SumOfSoftmax,
        paged: false,
        adaptive: false,
    };
    assert!(good.programs((9, 0), 227 << 10).is_ok());
    let bad = [
        HybridShape { group: 0, ..good },
        HybridShape { group: 9, ..good },
        HybridShape { keys: shape(64, 16, 8), ..good },
        HybridShape { keys: shape(128, 64, 8), ..good },
        HybridShape { values: shape(128, 4, 8), ..good },
        HybridShape { values: shape(128, 16, 6), ..good },
    ];
    for shape in bad {
        assert!(matches!(shape.programs((9, 0), 227 << 10), Err(Error::Unsupported { .. })), "{shape:?}");
    }
    assert!(
        matches!(good.programs((9, 0), 64 << 10), Err(Error::Unsupported { .. })),
        "too little shared memory"
    );
}
