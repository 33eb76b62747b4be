//! Attention on scalar codes agrees with `pq_core::sq::attend_into` and with its formula in f64.

use half::f16;
use kv_gpu::pq::{Addends, Pages};
use kv_gpu::sq::{Attend, AttendArguments, AttendShape, IntegerQueries};
use kv_gpu::{Device, Element, Error};
use pq_core::sq::{self, Block, Keys, Shape, TILE, Values};
use pq_core::{Backend, SoftmaxStats};

use crate::common::{Buffer, Random, device, from_element, launch, relative_error, where_it_fits};

/// Maximum relative error of an output vector, by element type. Queries have 15 bits on both sides, so scores
/// are the same up to a rounding of f32, unless an integer is rounded to its neighbour. The largest weight of
/// a tile has 10 to 16 bits here, that of a block 15 bits there: of n tokens next to a larger one, sqrt(n)
/// 2^-16 of it, 1e-3 for 256 tokens in the worst case, and less than the rounding of the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 6e-3)];
/// Maximum absolute error of the log-sum-exp.
const LOG_SUM_EXP: f64 = 1e-3;
/// The largest integer of a query's component times its step.
const QUERY_LIMIT: f64 = 16_256.0;

/// One block of tokens of a head.
struct Coded {
    n: usize,
    steps: Vec<u8>,
    keys: Vec<u32>,
    values: Vec<u32>,
    norms: Vec<u8>,
    error: Vec<f16>,
    queries: Vec<f32>, // (group, dim), in the dual basis
    addends: Vec<f16>, // (group, n)
}

impl Coded {
    fn new(
        shape: &AttendShape,
        keys: Shape,
        n: usize,
        sigma: &[f32],
        lead: f32,
        random: &mut Random,
    ) -> Self {
        let AttendShape { dim, group, .. } = *shape;
        let values = Shape::uniform(dim, shape.value_bits as u32).unwrap();
        let rows: Vec<f32> = (0..n).flat_map(|_| sigma).map(|sigma| sigma * random.normal()).collect();
        let (mut steps, mut key_words) = (vec![0; dim], vec![0; keys.words_len(n)]);
        sq::encode_keys_into(&keys, &rows, &mut steps, &mut key_words).unwrap();
        let mean = random.normals(dim);
        let rows: Vec<f32> = (0..n)
            .flat_map(|_| {
                let norm = random.normal().exp();
                let row: Vec<f32> = mean.iter().map(|mean| norm * (random.normal() + 0.3 * mean)).collect();
                row
            })
            .collect();
        let (mut norms, mut value_words) = (vec![0; n], vec![0; values.words_len(n)]);
        sq::encode_values_into(&values, &rows, &mut norms, &mut value_words).unwrap();
        let mut error = vec![f16::ZERO; dim];
        sq::mean_error_into(&Values::new(values, &norms, &value_words).unwrap(), &rows, &mut error).unwrap();
        // Scores of deviation `lead`.
        let scale = lead / (dim as f32).sqrt();
        let queries =
            (0..group).flat_map(|_| sigma).map(|sigma| scale * random.normal() / sigma.max(1e-3)).collect();
        let addend = |_| f16::from_f32(if shape.addends { lead * random.normal() } else { 0.0 });
        let addends = (0..group * n).map(addend).collect();
        Self { n, steps, keys: key_words, values: value_words, norms, error, queries, addends }
    }
}

/// Shape of the keys of every head: components of falling deviation in random order, so that widths differ
/// and codes are split, or of equal deviation and width.
fn key_shape(shape: &AttendShape, random: &mut Random) -> (Shape, Vec<f32>) {
    let (dim, slots) = (shape.dim, shape.key_slots);
    if shape.uniform_keys {
        return (Shape::uniform(dim, (16 * slots / dim) as u32).unwrap(), vec![4.0; dim]);
    }
    let fall = random.pick(&[1.0, 0.99, 0.97, 0.9_f32]);
    let sigma: Vec<f32> = (0..dim).map(|i| 4.0 * fall.powi(i as i32)).collect();
    let mut order = vec![0; dim];
    let shape = sq::allot(&sigma, slots, &mut order).unwrap();
    (shape, order.iter().map(|&i| sigma[i]).collect())
}

/// The queries (group, dim) of a block as integers, and their units and offsets: what `Queries` writes.
fn integers(coded: &Coded, keys: Shape, shape: &AttendShape) -> (Vec<u32>, Vec<f32>) {
    let steps: Vec<f32> = coded.steps.iter().map(|&s| ((f32::from(s) - 128.0) / 8.0).exp2()).collect();
    // Codes of one width are at the top of their bytes.
    let key_scale = if shape.uniform_keys { f32::from(1_u16 << (8 - keys.widths()[0])) } else { 1.0 };
    let (mut words, mut units) = (vec![], vec![]);
    for query in coded.queries.chunks_exact(shape.dim) {
        let products: Vec<f32> = query.iter().zip(&steps).map(|(q, step)| q * step).collect();
        // A product that is none is the largest.
        let top = products
            .iter()
            .fold(0.0, |top: f32, x| if top.is_nan() || x.is_nan() { f32::NAN } else { top.max(x.abs()) });
        let unit = if top.is_finite() { top / QUERY_LIMIT as f32 } else { f32::NAN };
        let z: Vec<i32> = products
            .iter()
            .map(|x| if unit > 0.0 { (x / unit).round_ties_even() as i32 } else { 0 })
            .collect();
        let packed = |quad: &[i32], byte: &dyn Fn(i32) -> i32| {
            u32::from_le_bytes([0, 1, 2, 3].map(|i| byte(quad[i]) as u8))
        };
        for quad in z.chunks_exact(4) {
            words.extend([packed(quad, &|z| (z + 128) >> 8), packed(quad, &|z| z)]);
        }
        let levels: i32 = z
            .chunks_exact(4)
            .zip(keys.widths())
            .map(|(quad, &width)| quad.iter().sum::<i32>() * (1 - (1 << width)))
            .sum();
        units.extend([unit / key_scale, 0.5 * unit * levels as f32].map(|x| x * std::f32::consts::LOG2_E));
    }
    (words, units)
}

/// The formula, over decoded rows: output and log-sum-exp of a query, and how far the scores of the
/// definition may be from it: each component of a query, times its step, is rounded to an integer, and so has
/// half a unit times the level of the code. A block of few tokens has steps of very different sizes, so its
/// unit is large next to most components.
fn formula(blocks: &[Coded], keys: Shape, shape: &AttendShape, query: usize) -> (Vec<f32>, f64, f64) {
    let dim = shape.dim;
    let values = Shape::uniform(dim, shape.value_bits as u32).unwrap();
    let mut tokens: Vec<(f64, Vec<f64>)> = vec![];
    let mut rounding = 0.0_f64;
    for block in blocks {
        let (mut key_rows, mut value_rows) = (vec![0.0; block.n * dim], vec![0.0; block.n * dim]);
        sq::decode_keys_into(&Keys::new(keys, block.n, &block.steps, &block.keys).unwrap(), &mut key_rows)
            .unwrap();
        sq::decode_values_into(&Values::new(values, &block.norms, &block.values).unwrap(), &mut value_rows)
            .unwrap();
        let of_query = &block.queries[query * dim..][..dim];
        let steps: Vec<f64> = block.steps.iter().map(|&s| ((f64::from(s) - 128.0) / 8.0).exp2()).collect();
        let products = of_query.iter().zip(&steps).map(|(&q, step)| (f64::from(q) * step).abs());
        let unit = products.fold(0.0, f64::max) / QUERY_LIMIT;
        let rows = key_rows.chunks_exact(dim).zip(value_rows.chunks_exact(dim));
        for ((key, value), addend) in rows.zip(&block.addends[query * block.n..]) {
            let score: f64 = key.iter().zip(of_query).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum();
            let levels: f64 = key.iter().zip(&steps).map(|(&k, step)| (f64::from(k) / step).abs()).sum();
            rounding = rounding.max(0.5 * unit * levels);
            let error = block.error.iter().map(|x| if shape.mean_errors { x.to_f64() } else { 0.0 });
            let score = score + addend.to_f64();
            tokens.push((score, value.iter().zip(error).map(|(&v, e)| f64::from(v) + e).collect()));
        }
    }
    let max = tokens.iter().map(|token| token.0).fold(f64::NEG_INFINITY, f64::max);
    let (mut out, mut sum) = (vec![0.0; dim], 0.0);
    for (score, value) in &tokens {
        let weight = (score - max).exp();
        sum += weight;
        out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
    }
    (out.iter().map(|x| (x / sum) as f32).collect(), max + sum.ln(), rounding)
}

/// The definition: outputs (group, dim) and log-sum-exp of a group.
fn definition(blocks: &[Coded], keys: Shape, shape: &AttendShape) -> (Vec<f32>, Vec<f64>) {
    let AttendShape { dim, group, .. } = *shape;
    let values = Shape::uniform(dim, shape.value_bits as u32).unwrap();
    let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
    for block in blocks {
        let of_values = Values::new(values, &block.norms, &block.values).unwrap();
        let of_values =
            if shape.mean_errors { of_values.with_error(&block.error).unwrap() } else { of_values };
        let of_keys = Keys::new(keys, block.n, &block.steps, &block.keys).unwrap();
        let bias: Vec<f32> = block.addends.iter().map(|x| x.to_f32()).collect();
        let coded = Block::new(of_keys, of_values).unwrap().with_bias(&bias[..]);
        let mut scratch = vec![0.0; sq::attend_scratch_len(&keys, &values, block.n, group)];
        let (queries, backend) = (&block.queries, Backend::Scalar);
        sq::attend_into_with(backend, queries, &coded, &mut scratch, &mut out, &mut stats).unwrap();
    }
    out.chunks_exact_mut(dim).zip(&stats).for_each(|(out, stats)| stats.normalize(out));
    (out, stats.iter().map(|stats| f64::from(stats.max) + f64::from(stats.sum).ln()).collect())
}

/// What a test fixes; the rest is random.
struct Case<'a> {
    batches: &'a [usize],
    tokens: &'a [usize], // of a sequence, at most
    leads: &'a [f32],    // deviations of the scores
    spoiler: Option<f32>,
}

fn random_shape(random: &mut Random) -> AttendShape {
    let dim = random.pick(&[64, 96, 128, 128, 256]);
    let (bits, groups) = (random.pick(&[2, 5]), random.pick(&[4, 16]));
    let uniform_keys = random.below(3) == 0;
    let width = 1 + random.below(8);
    let key_slots = if uniform_keys { width * dim / 16 } else { 1 + random.below(bits * dim / 16) };
    let most = if uniform_keys { 64 / (dim / 16) * (dim / 16) } else { 64 };
    AttendShape {
        dim,
        key_slots: key_slots.min(most),
        uniform_keys,
        value_bits: 1 + random.below(4),
        block: random.pick(&[32, 64, 128, 256]),
        group: 1 + random.below(groups),
        element: random.pick(&[Element::F16, Element::Bf16]),
        mean_errors: random.below(2) == 1,
        addends: random.below(2) == 1,
        paged: false,
    }
}

fn run(device: &Device, random: &mut Random, case: &Case<'_>) {
    let shape = random_shape(random);
    let AttendShape { dim, block, group, element, .. } = shape;
    let Some(attend) = where_it_fits(device, Attend::new(device, shape)) else { return };
    let (batch, heads) = (random.pick(case.batches), 1 + random.below(4));
    let capacity = random.pick(case.tokens);
    let lengths: Vec<usize> =
        (0..batch)
            .map(|_| {
                if random.below(4) == 0 { random.pick(&[0, 1, capacity]) } else { random.below(capacity + 1) }
            })
            .collect();
    let lead = random.pick(case.leads);
    let of_heads: Vec<(Shape, Vec<f32>)> = (0..heads).map(|_| key_shape(&shape, random)).collect();
    let mut coded: Vec<Vec<Coded>> = vec![]; // [sequence and head][block]
    for pair in 0..batch * heads {
        let (keys, sigma) = &of_heads[pair % heads];
        let n = lengths[pair / heads];
        let of_block = |b: usize| block.min(n - b * block);
        let blocks =
            (0..n.div_ceil(block)).map(|b| Coded::new(&shape, *keys, of_block(b), sigma, lead, random));
        coded.push(blocks.collect());
    }
    if let (Some(spoiler), Some(block)) = (case.spoiler, coded[0].first_mut()) {
        block.queries[3] = spoiler;
    }

    let blocks = capacity.div_ceil(block);
    let table = shape.key_table();
    let mut tables = vec![0; heads * table.table_len()];
    for (table_words, (keys, _)) in tables.chunks_exact_mut(table.table_len()).zip(&of_heads) {
        table.table_into(keys, table_words).unwrap();
    }
    // The arrays for a number of places of `of_place` blocks, where (sequence, block) is at `place`.
    let key_len = TILE * shape.key_slots / 2 * (block / TILE);
    let value_len = dim * shape.value_bits * (block / TILE);
    let arrays = |places: usize, of_place: usize, place: &dyn Fn(usize, usize) -> (usize, usize)| {
        let all = places * heads * of_place;
        let (mut keys, mut values) =
            (vec![0xdddd_dddd_u32; all * key_len], vec![0xdddd_dddd_u32; all * value_len]);
        let mut norms = vec![0xff_u8; all * block];
        let mut errors = vec![f16::NAN; all * dim];
        for (pair, blocks) in coded.iter().enumerate() {
            for (b, coded) in blocks.iter().enumerate() {
                let (place, at) = place(pair / heads, b);
                let at = (place * heads + pair % heads) * of_place + at;
                keys[at * key_len..][..coded.keys.len()].copy_from_slice(&coded.keys);
                values[at * value_len..][..coded.values.len()].copy_from_slice(&coded.values);
                norms[at * block..][..coded.n].copy_from_slice(&coded.norms);
                errors[at * dim..][..dim].copy_from_slice(&coded.error);
            }
        }
        let words = [keys, values].map(|words| Buffer::new(device, &words));
        (words, Buffer::new(device, &norms), Buffer::new(device, &errors))
    };
    let rows = batch * heads * blocks * group;
    let (mut words, mut units) = (vec![0xdddd_dddd_u32; rows * dim / 2], vec![f32::NAN; rows * 2]);
    for (pair, of_pair) in coded.iter().enumerate() {
        for (b, coded) in of_pair.iter().enumerate() {
            let (of_block, first) =
                (integers(coded, of_heads[pair % heads].0, &shape), (pair * blocks + b) * group);
            words[first * dim / 2..][..of_block.0.len()].copy_from_slice(&of_block.0);
            units[first * 2..][..of_block.1.len()].copy_from_slice(&of_block.1);
        }
    }
    let tiles = blocks * block / TILE + random.below(3);
    let mut addends = vec![f16::NAN; batch * heads * tiles * group * TILE];
    for (pair, of_pair) in coded.iter().enumerate() {
        for (b, coded) in of_pair.iter().enumerate() {
            for (i, &addend) in coded.addends.iter().enumerate() {
                let (query, t) = (i / coded.n, b * block + i % coded.n);
                addends[((pair * tiles + t / TILE) * group + query) * TILE + t % TILE] = addend;
            }
        }
    }
    let (query_words, units) = (Buffer::new(device, &words), Buffer::new(device, &units));
    let queries = IntegerQueries { words: query_words.pointer(), units: units.pointer(), blocks };
    let tables = Buffer::new(device, &tables);
    let addends = Buffer::new(device, &addends);
    let lengths_there = Buffer::new(device, &lengths.iter().map(|&n| n as u32).collect::<Vec<u32>>());
    let workspace = Buffer::new(device, &vec![0_u8; attend.workspace_len(batch, heads)]);
    let pdl = random.below(2) == 1;
    type Arrays = ([Buffer<u32>; 2], Buffer<u8>, Buffer<f16>);
    let launch = |attend: &Attend, (words, norms, errors): &Arrays, blocks_of_place, pages| {
        let out = Buffer::new(device, &vec![u16::MAX; batch * heads * group * dim]); // NaN
        let log_sum_exp = Buffer::new(device, &vec![f32::NAN; batch * heads * group]);
        let arguments = AttendArguments {
            batch,
            heads,
            blocks: blocks_of_place,
            keys: words[0].pointer(),
            values: words[1].pointer(),
            norms: norms.pointer(),
            mean_errors: shape.mean_errors.then(|| errors.pointer()),
            addends: shape.addends.then(|| Addends { values: addends.pointer(), tiles }),
            key_tables: tables.pointer(),
            queries,
            lengths: lengths_there.pointer(),
            pages,
            out: out.pointer().cast(),
            log_sum_exp: Some(log_sum_exp.pointer()),
            pdl,
            workspace: workspace.pointer(),
        };
        launch!(device, attend, &arguments);
        (out.read(), log_sum_exp.read().iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
    };
    let contiguous = arrays(batch, blocks, &|sequence, b| (sequence, b));
    let (out, log_sum_exp) = launch(&attend, &contiguous, blocks, None);
    assert!(
        launch(&attend, &contiguous, blocks, None) == (out.clone(), log_sum_exp.clone()),
        "two runs differ"
    );

    // The same blocks in pages, in any order and with unused pages between them: the same bytes.
    let of_page = 1 + random.below(3);
    let max_pages = blocks.div_ceil(of_page);
    let mut numbers: Vec<u32> = (0..2 * (batch * max_pages) as u32).collect();
    (1..numbers.len()).rev().for_each(|i| numbers.swap(i, random.below(i + 1)));
    let place =
        |sequence: usize, b: usize| (numbers[sequence * max_pages + b / of_page] as usize, b % of_page);
    let in_pages = arrays(numbers.len(), of_page, &place);
    let numbers = Buffer::new(device, &numbers);
    let pages = Some(Pages { table: numbers.pointer(), max_pages });
    let paged = Attend::new(device, AttendShape { paged: true, ..shape }).unwrap();
    assert!(
        launch(&paged, &in_pages, of_page, pages) == (out.clone(), log_sum_exp.clone()),
        "{shape:?}: pages of {of_page} blocks, lengths {lengths:?}"
    );

    let tolerance = TOLERANCES.iter().find(|(e, _)| *e == element).unwrap().1;
    for (pair, of_pair) in coded.iter().enumerate() {
        let n = lengths[pair / heads];
        let (keys, _) = of_heads[pair % heads];
        let (expected, logs) = definition(of_pair, keys, &shape);
        for query in 0..group {
            let index = pair * group + query;
            let got: Vec<f32> =
                out[index * dim..][..dim].iter().map(|&bits| from_element(element, bits)).collect();
            let log = f64::from(f32::from_bits(log_sum_exp[index]));
            let place = format!(
                "{shape:?} lengths {lengths:?} heads {heads} lead {lead} {:?}, pair {pair} query {query}",
                keys.widths()
            );
            if n == 0 {
                assert!(got.iter().all(|&x| x == 0.0) && log == f64::NEG_INFINITY, "{place}: {log} {got:?}");
                continue;
            }
            if pair == 0 && query == 0 && case.spoiler.is_some() {
                assert!(got.iter().all(|x| x.is_nan()), "{place}: {got:?}");
                continue;
            }
            let error = relative_error(&got, &expected[query * dim..][..dim]);
            assert!(error <= tolerance, "{place}: error {error}");
            assert!(
                (log - logs[query]).abs() <= LOG_SUM_EXP,
                "{place}: log-sum-exp {log} for {}",
                logs[query]
            );
            if query > 0 && query + 1 < group {
                continue; // the formula is slow
            }
            let (exact, exact_log, rounding) = formula(of_pair, keys, &shape, query);
            let error = relative_error(&got, &exact);
            assert!(error <= tolerance + rounding, "{place}: error {error} next to the formula");
            assert!((log - exact_log).abs() <= LOG_SUM_EXP + rounding, "{place}: {log} for {exact_log}");
        }
    }
}

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    let case = Case {
        batches: &[1, 2, 5],
        tokens: &[1, 31, 32, 33, 100, 700, 2000],
        leads: &[0.3, 1.0, 3.0],
        spoiler: None,
    };
    (0..16).for_each(|seed| run(&device, &mut Random(seed), &case));
}

#[test]
fn many_ragged_sequences_agree() {
    let Some(device) = device("many_ragged_sequences_agree") else { return };
    let case = Case { batches: &[33, 70, 150], tokens: &[200], leads: &[1.0], spoiler: None };
    (100..104).for_each(|seed| run(&device, &mut Random(seed), &case));
}

/// Scores whose largest leads by up to 40 nats: most tokens of a tile have no weight next to it.
#[test]
fn tokens_that_lead_agree() {
    let Some(device) = device("tokens_that_lead_agree") else { return };
    let case = Case { batches: &[1, 2], tokens: &[64, 5000], leads: &[10.0], spoiler: None };
    (200..208).for_each(|seed| run(&device, &mut Random(seed), &case));
}

/// All tokens but one have a score of 0, and that one the weight of all others together.
#[test]
fn a_long_tail_keeps_its_weight() {
    let Some(device) = device("a_long_tail_keeps_its_weight") else { return };
    let (dim, block, n) = (128, 256, 1 << 15);
    let shape = AttendShape {
        dim,
        key_slots: 16,
        uniform_keys: true,
        value_bits: 4,
        block,
        group: 1,
        element: Element::F16,
        mean_errors: false,
        addends: false,
        paged: false,
    };
    let attend = Attend::new(&device, shape).unwrap();
    let (keys, blocks) = (Shape::uniform(dim, 2).unwrap(), n / block);
    let mut random = Random(7);
    let mut coded: Vec<Coded> =
        (0..blocks).map(|_| Coded::new(&shape, keys, block, &[1.0; 128], 0.0, &mut random)).collect();
    // A query along a component whose code is the lowest for one token of the block alone.
    let leader = &mut coded[blocks / 3];
    let mut rows = vec![1.0; block * dim];
    rows[17 * dim] = -1.0;
    sq::encode_keys_into(&keys, &rows, &mut leader.steps, &mut leader.keys).unwrap();
    let mut decoded = vec![0.0; block * dim];
    let of_leader = Keys::new(keys, block, &leader.steps, &leader.keys).unwrap();
    sq::decode_keys_into(&of_leader, &mut decoded).unwrap();
    let scale = (n as f32).ln() / (decoded[17 * dim] - decoded[0]);
    leader.queries[0] = scale;
    leader.queries[1] = -scale * decoded[0] / decoded[1]; // the others of the block: 0
    let table = shape.key_table();
    let mut table_words = vec![0; table.table_len()];
    table.table_into(&keys, &mut table_words).unwrap();
    let words = [|c: &Coded| c.keys.clone(), |c: &Coded| c.values.clone()]
        .map(|of| Buffer::new(&device, &coded.iter().flat_map(of).collect::<Vec<u32>>()));
    let norms = Buffer::new(&device, &coded.iter().flat_map(|c| c.norms.clone()).collect::<Vec<u8>>());
    let (query_words, units): (Vec<_>, Vec<_>) = coded.iter().map(|c| integers(c, keys, &shape)).unzip();
    let (query_words, units) =
        (Buffer::new(&device, &query_words.concat()), Buffer::new(&device, &units.concat()));
    let table_words = Buffer::new(&device, &table_words);
    let (lengths, out) = (Buffer::new(&device, &[n as u32]), Buffer::new(&device, &vec![u16::MAX; dim]));
    let workspace = Buffer::new(&device, &vec![0_u8; attend.workspace_len(1, 1)]);
    let arguments = AttendArguments {
        batch: 1,
        heads: 1,
        blocks,
        keys: words[0].pointer(),
        values: words[1].pointer(),
        norms: norms.pointer(),
        mean_errors: None,
        addends: None,
        key_tables: table_words.pointer(),
        queries: IntegerQueries { words: query_words.pointer(), units: units.pointer(), blocks },
        lengths: lengths.pointer(),
        pages: None,
        out: out.pointer().cast(),
        log_sum_exp: None,
        pdl: false,
        workspace: workspace.pointer(),
    };
    launch!(device, attend, &arguments);
    let got: Vec<f32> = out.read().iter().map(|&bits| from_element(Element::F16, bits)).collect();
    let (exact, _, _) = formula(&coded, keys, &shape, 0);
    let error = relative_error(&got, &exact);
    assert!(error <= 2e-3, "error {error}");
}

#[test]
fn numbers_that_are_none_stay_with_their_query() {
    let Some(device) = device("numbers_that_are_none_stay_with_their_query") else { return };
    let spoilers = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle().take(6);
    for (seed, spoiler) in spoilers.enumerate() {
        let case = Case { batches: &[2], tokens: &[300], leads: &[1.0], spoiler: Some(spoiler) };
        run(&device, &mut Random(2000 + seed as u64), &case);
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let good = AttendShape {
        dim: 128,
        key_slots: 16,
        uniform_keys: false,
        value_bits: 2,
        block: 256,
        group: 4,
        element: Element::F16,
        mean_errors: false,
        addends: false,
        paged: false,
    };
    assert_eq!(good.check(), Ok(()));
    for bad in [
        AttendShape { dim: 0, ..good },
        AttendShape { dim: 80, ..good },
        AttendShape { key_slots: 0, ..good },
        AttendShape { key_slots: 65, ..good },
        AttendShape { dim: 64, key_slots: 33, ..good },
        AttendShape { key_slots: 17, uniform_keys: true, ..good },
        AttendShape { value_bits: 0, ..good },
        AttendShape { value_bits: 5, ..good },
        AttendShape { block: 0, ..good },
        AttendShape { block: 48, ..good },
        AttendShape { block: 512, ..good },
        AttendShape { group: 0, ..good },
        AttendShape { group: 17, ..good },
    ] {
        assert!(matches!(bad.programs(227 << 10), Err(Error::Unsupported { .. })), "{bad:?}");
    }
}
