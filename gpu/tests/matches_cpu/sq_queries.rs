//! Queries of scalar codes are those of the formula in f64, to half a unit and the rounding of f16.

use kv_gpu::pq::Pages;
use kv_gpu::sq::{AttendShape, IntegerQueries, Queries, QueriesArguments};
use kv_gpu::{Device, Element};
use pq_core::sq::{self, Shape};

use crate::common::{Buffer, Random, bytes_of, device, from_element, launch};

/// A component of a query and one of the map are rounded by 2^-11 at most, at random: this is about seven
/// deviations of what that makes of a product.
const ROUNDING: f64 = 4.0 / 2048.0;

fn random_shape(random: &mut Random) -> AttendShape {
    let dim = random.pick(&[64, 96, 128, 128, 256]);
    let uniform_keys = random.below(3) == 0;
    let width = 1 + random.below(4);
    AttendShape {
        dim,
        key_slots: if uniform_keys { width * dim / 16 } else { 1 + random.below(4 * dim / 16) },
        uniform_keys,
        value_bits: 2,
        block: random.pick(&[32, 64, 128, 256]),
        group: 1 + random.below(16),
        element: random.pick(&[Element::F16, Element::Bf16]),
        mean_errors: false,
        addends: false,
        paged: random.below(2) == 1,
    }
}

/// What a test fixes; the rest is random.
struct Case {
    size: f32,            // of the queries
    spoiler: Option<f32>, // in the second query of every head
}

fn run(device: &Device, random: &mut Random, case: &Case) {
    let shape = random_shape(random);
    let AttendShape { dim, block, group, element, .. } = shape;
    let (batch, heads, half) = (1 + random.below(3), 1 + random.below(3), dim / 2);
    let blocks = random.pick(&[1, 3, 40]);
    let lengths: Vec<usize> = (0..batch).map(|_| random.below(blocks * block + 1)).collect();
    let of_place = if shape.paged { 1 + random.below(3) } else { blocks };
    let max_pages = blocks.div_ceil(of_place);
    let table: Vec<u32> = (0..(batch * max_pages) as u32).rev().collect();
    let place = |sequence: usize, head: usize, b: usize| {
        let page = if shape.paged { table[sequence * max_pages + b / of_place] as usize } else { sequence };
        (page * heads + head) * of_place + b % of_place
    };
    let (first, scale) = (random.pick(&[0, 4, 100_000]), 0.25 + random.normal().abs());
    let keys: Vec<Shape> = (0..heads)
        .map(|_| match shape.uniform_keys {
            true => Shape::uniform(dim, (16 * shape.key_slots / dim) as u32).unwrap(),
            false => {
                let fall = random.pick(&[1.0, 0.99, 0.97, 0.9_f32]);
                let sigma: Vec<f32> = (0..dim).map(|i| fall.powi(i as i32)).collect();
                sq::allot(&sigma, shape.key_slots, &mut vec![0; dim]).unwrap()
            }
        })
        .collect();
    let layout = shape.key_table();
    let mut tables = vec![0; heads * layout.table_len()];
    for (table, keys) in tables.chunks_exact_mut(layout.table_len()).zip(&keys) {
        layout.table_into(keys, table).unwrap();
    }
    // Columns of very different sizes.
    let sizes: Vec<f32> = (0..heads * dim).map(|_| (8.0 * random.normal()).exp2()).collect();
    let duals: Vec<f32> =
        (0..heads * dim * dim).map(|i| random.normal() * sizes[i / (dim * dim) * dim + i % dim]).collect();
    let map = shape.dual_table();
    let mut maps = vec![0.0; heads * map.table_len()];
    for (map_words, dual) in maps.chunks_exact_mut(map.table_len()).zip(duals.chunks_exact(dim * dim)) {
        map.table_into(dual, map_words).unwrap();
    }
    let frequencies: Vec<f32> = (0..half).map(|i| 10_000_f32.powf(-(i as f32) / half as f32)).collect();
    let mut queries: Vec<f32> = random.normals(batch * heads * group * dim);
    queries.iter_mut().for_each(|x| *x *= case.size);
    for of_head in queries.chunks_exact_mut(group * dim) {
        if let (Some(spoiler), true) = (case.spoiler, group > 1) {
            of_head[dim + 7] = spoiler;
        }
    }
    let bytes = bytes_of(element.into(), &queries);
    let queries: Vec<f64> = bytes
        .chunks_exact(2)
        .map(|bits| f64::from(from_element(element, u16::from_le_bytes([bits[0], bits[1]]))))
        .collect();
    let places = batch * max_pages * heads * of_place;
    let steps: Vec<u8> = (0..places * dim).map(|_| 100 + random.below(56) as u8).collect();

    let operation = Queries::new(device, shape).unwrap();
    let (queries_there, maps) = (Buffer::new(device, &bytes), Buffer::new(device, &maps));
    let (frequencies_there, steps_there) = (Buffer::new(device, &frequencies), Buffer::new(device, &steps));
    let (tables, table_there) = (Buffer::new(device, &tables), Buffer::new(device, &table));
    let lengths_there = Buffer::new(device, &lengths.iter().map(|&n| n as u32).collect::<Vec<u32>>());
    let rows = batch * heads * blocks * group;
    let words = Buffer::new(device, &vec![0xdddd_dddd_u32; rows * IntegerQueries::words_len(dim)]);
    let units = Buffer::new(device, &vec![f32::MAX; rows * 2]);
    let arguments = QueriesArguments {
        batch,
        heads,
        queries: queries_there.pointer().cast(),
        duals: maps.pointer(),
        frequencies: frequencies_there.pointer(),
        first,
        steps: steps_there.pointer(),
        key_tables: tables.pointer(),
        lengths: lengths_there.pointer(),
        blocks: of_place,
        pages: shape.paged.then(|| Pages { table: table_there.pointer(), max_pages }),
        scale,
        out: IntegerQueries { words: words.pointer(), units: units.pointer(), blocks },
        pdl: random.below(2) == 1,
    };
    launch!(device, operation, &arguments);
    let (words, units) = (words.read(), units.read());

    for row in 0..rows {
        let (query, b, pair) = (row % group, row / group % blocks, row / group / blocks);
        let (sequence, head) = (pair / heads, pair % heads);
        let words = &words[row * dim / 2..][..dim / 2];
        let [unit, offset] = [0, 1].map(|i| f64::from(units[2 * row + i]));
        let place_of_row = format!("{shape:?} lengths {lengths:?}, pair {pair}, block {b}, query {query}");
        if b * block >= lengths[sequence] {
            assert!(words.iter().all(|&word| word == 0xdddd_dddd), "{place_of_row}: written");
            continue;
        }
        if query == 1 && case.spoiler.is_some() {
            assert!(unit.is_nan() && offset.is_nan(), "{place_of_row}: {unit} {offset}");
            continue;
        }
        let key_scale = if shape.uniform_keys { f64::from(1 << (8 - keys[head].widths()[0])) } else { 1.0 };
        let of_query = &queries[(pair * group + query) * dim..][..dim];
        let position = (first + b * block + block / 2) as f64;
        let mut rotated = vec![0.0; dim];
        for (i, &frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position * f64::from(frequency)).sin_cos();
            let (x, y) = (of_query[i], of_query[i + half]);
            (rotated[i], rotated[i + half]) = (cos * x + sin * y, cos * y - sin * x);
        }
        let norm = rotated.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut level = 0.0;
        for c in 0..dim {
            let quad = c / 4;
            let byte = |word: u32| word.to_le_bytes()[c % 4] as i8;
            let z = 256 * i32::from(byte(words[2 * quad])) + i32::from(byte(words[2 * quad + 1]));
            level += f64::from(z) * 0.5 * (1.0 - f64::from(1_u32 << keys[head].widths()[quad]));
            let column = || (0..dim).map(|i| f64::from(duals[(head * dim + i) * dim + c]));
            let step = ((f64::from(steps[place(sequence, head, b) * dim + c]) - 128.0) / 8.0).exp2();
            let factor = f64::from(scale) * std::f64::consts::LOG2_E * step;
            let expected = factor * column().zip(&rotated).map(|(d, q)| d * q).sum::<f64>();
            let got = f64::from(z) * unit * key_scale;
            let column_norm = column().map(|d| d * d).sum::<f64>().sqrt();
            let bound =
                0.51 * unit * key_scale + ROUNDING * factor * norm * column_norm / (dim as f64).sqrt();
            assert!((got - expected).abs() <= bound, "{place_of_row}, {c}: {got} for {expected}, {bound}");
        }
        let expected = level * unit * key_scale;
        assert!(
            (offset - expected).abs() <= 1e-5 * expected.abs() + 1e-30,
            "{place_of_row}: {offset} for {expected}"
        );
    }
}

#[test]
fn random_queries_agree() {
    let Some(device) = device("random_queries_agree") else { return };
    (0..24).for_each(|seed| run(&device, &mut Random(seed), &Case { size: 1.0, spoiler: None }));
}

#[test]
fn queries_of_any_size_agree() {
    let Some(device) = device("queries_of_any_size_agree") else { return };
    for (seed, size) in [1e-4, 3e-3, 2e3, 1e4].into_iter().cycle().take(12).enumerate() {
        run(&device, &mut Random(500 + seed as u64), &Case { size, spoiler: None });
    }
}

#[test]
fn numbers_that_are_none_stay_with_their_query() {
    let Some(device) = device("numbers_that_are_none_stay_with_their_query") else { return };
    for (seed, spoiler) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
        let case = Case { size: 1.0, spoiler: Some(spoiler) };
        run(&device, &mut Random(1000 + seed as u64), &case);
    }
}
