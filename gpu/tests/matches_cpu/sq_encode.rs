//! Scalar encoding agrees with `pq_core::sq::encode_keys_into`, `encode_values_into` and `mean_error_into` bit
//! for bit, and leaves other blocks as they are.

use half::f16;
use kv_gpu::pq::Pages;
use kv_gpu::sq::{CodedBlocks, Encode, EncodeShape, Side};
use kv_gpu::{Device, Error};
use pq_core::sq::{self, Keys, Shape, Values};

use crate::common::{Buffer, Random, device};

/// Another step or norm may be chosen if its logarithm is this close to the middle of two bytes, or, for a
/// step, if the squared errors of both differ by at most this fraction.
const TIE: f64 = 1e-4;

/// Components of which an array may have one.
const FEW: [f32; 2] = [0.0, 1e-30];
/// Components that rows may have many of: not finite, or so large that squares, sums or mean errors overflow.
const MANY: [f32; 11] =
    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e30, -1e19, 1e12, -2e7, 7e4, 1e-40];

/// A NaN or an infinity counts as 0.
fn finite(x: f32) -> f64 {
    if x.is_finite() { f64::from(x) } else { 0.0 }
}

fn run(device: &Device, random: &mut Random, keys: bool, spoil: impl Fn(&mut Random, &mut [f32])) {
    let (dim, block) = (random.pick(&[64, 96, 128, 256]), random.pick(&[32, 64, 128, 256]));
    let (batch, heads, paged) = (1 + random.below(3), 1 + random.below(3), random.below(2) == 1);
    let bits = 1 + random.below(if keys { 5 } else { 8 });
    let slots = bits * dim / 16 - if keys { random.below(dim / 16) } else { 0 };
    let side = if keys { Side::Keys { slots } } else { Side::Values { bits } };
    let shape = EncodeShape { dim, side, block, paged };
    let of_heads: Vec<(Shape, Vec<f32>)> = (0..heads)
        .map(|_| {
            let sigma: Vec<f32> = (0..dim).map(|i| 0.97_f32.powi(i as i32)).collect();
            let mut order = vec![0; dim];
            let codes = sq::allot(&sigma, slots, &mut order).unwrap();
            let codes = if keys { codes } else { Shape::uniform(dim, bits as u32).unwrap() };
            (codes, order.iter().map(|&i| sigma[i]).collect())
        })
        .collect();
    let firsts: Vec<u32> = (0..batch).map(|_| random.below(3) as u32).collect();
    let counts: Vec<usize> =
        (0..batch).map(|_| random.pick(&[0, 1, 31, block, block + 33, 2 * block])).collect();
    let max_rows = 2 * block + 33 + random.below(3);
    let blocks = 5; // of a sequence
    let of_place = if paged { 1 + random.below(3) } else { blocks };
    let max_pages = blocks.div_ceil(of_place);
    let table: Vec<u32> = (0..(batch * max_pages) as u32).rev().collect();
    let place = |sequence: usize, head: usize, b: usize| {
        let page = if paged { table[sequence * max_pages + b / of_place] as usize } else { sequence };
        (page * heads + head) * of_place + b % of_place
    };

    let mut rows = vec![f32::NAN; batch * heads * max_rows * dim];
    for (pair, rows) in rows.chunks_exact_mut(max_rows * dim).enumerate() {
        let sigma = &of_heads[pair % heads].1;
        for row in rows[..counts[pair / heads] * dim].chunks_exact_mut(dim) {
            let norm = if keys { 1.0 } else { random.normal().exp() };
            row.iter_mut().zip(sigma).for_each(|(x, sigma)| *x = norm * sigma * random.normal());
        }
        spoil(random, &mut rows[..counts[pair / heads] * dim]);
    }
    let encode = Encode::new(device, shape).unwrap();
    let tables = shape.key_table().map(|layout| {
        let mut tables = vec![0; heads * layout.table_len()];
        for (table, (codes, _)) in tables.chunks_exact_mut(layout.table_len()).zip(&of_heads) {
            layout.table_into(codes, table).unwrap();
        }
        Buffer::new(device, &tables)
    });
    let places = batch * max_pages * heads * of_place;
    let (scale_len, word_len) = (if keys { dim } else { block }, of_heads[0].0.words_len(block));
    let scales = Buffer::new(device, &vec![0xdd_u8; places * scale_len]);
    let words = Buffer::new(device, &vec![0xdddd_dddd_u32; places * word_len]);
    let errors = Buffer::new(device, &vec![f16::NAN; places * dim]);
    let rows_there = Buffer::new(device, &rows);
    let firsts_there = Buffer::new(device, &firsts);
    let counts_there = Buffer::new(device, &counts.iter().map(|&n| n as u32).collect::<Vec<u32>>());
    let table_there = Buffer::new(device, &table);
    let coded = CodedBlocks {
        batch,
        heads,
        max_rows,
        firsts: firsts_there.pointer(),
        counts: counts_there.pointer(),
        key_tables: tables.as_ref().map(Buffer::pointer),
        scales: scales.pointer(),
        words: words.pointer(),
        mean_errors: (!keys).then(|| errors.pointer()),
        blocks: of_place,
        pages: paged.then(|| Pages { table: table_there.pointer(), max_pages }),
    };
    // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
    // requires.
    #[allow(unsafe_code)]
    unsafe { encode.launch(device.stream().cu_stream(), rows_there.pointer(), &coded) }.unwrap();
    let (mut scales, mut words, errors) = (scales.read(), words.read(), errors.read());

    for pair in 0..batch * heads {
        let (sequence, head) = (pair / heads, pair % heads);
        let codes = of_heads[head].0;
        let of_pair = &rows[pair * max_rows * dim..][..counts[sequence] * dim];
        for (b, rows) in of_pair.chunks(block * dim).enumerate() {
            let (n, at) = (rows.len() / dim, place(sequence, head, firsts[sequence] as usize + b));
            let where_is = format!("{shape:?}, pair {pair}, block {b} of {n}, {:?}", codes.widths());
            let used = if keys { dim } else { n };
            let scales = &mut scales[at * scale_len..][..used];
            let words = &mut words[at * word_len..][..codes.words_len(n)];
            let (mut expected_scales, mut expected_words) = (vec![0; used], vec![0; words.len()]);
            if keys {
                sq::encode_keys_into(&codes, rows, &mut expected_scales, &mut expected_words).unwrap();
                let (got, expected) = ((&*scales, &*words), (&expected_scales[..], &expected_words[..]));
                check_keys(&codes, rows, got, expected, &where_is);
            } else {
                sq::encode_values_into(&codes, rows, &mut expected_scales, &mut expected_words).unwrap();
                if *scales == expected_scales {
                    assert!(*words == expected_words, "{where_is}: other codes");
                    let mut error = vec![f16::ZERO; dim];
                    let values = Values::new(codes, scales, words).unwrap();
                    sq::mean_error_into(&values, rows, &mut error).unwrap();
                    let bits = |errors: &[f16]| errors.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
                    let got = bits(&errors[at * dim..][..dim]);
                    assert!(got == bits(&error), "{where_is}: other mean errors");
                }
                for (row, (&got, &expected)) in
                    rows.chunks_exact(dim).zip(scales.iter().zip(&expected_scales))
                {
                    let norm = row.iter().map(|&x| finite(x).powi(2)).sum::<f64>().sqrt();
                    let tie = (norm.log2() * 16.0 + 128.5 - f64::from(got.max(expected))).abs() < TIE;
                    assert!(got == expected || tie, "{where_is}: norm {got} for {expected}");
                }
            }
            scales.fill(0xdd);
            words.fill(0xdddd_dddd);
        }
    }
    assert!(scales.iter().all(|&x| x == 0xdd), "{shape:?}: other scales written");
    assert!(words.iter().all(|&x| x == 0xdddd_dddd), "{shape:?}: other codes written");
}

/// Steps and codes are those expected, or as good.
fn check_keys(
    codes: &Shape,
    rows: &[f32],
    (steps, words): (&[u8], &[u32]),
    (expected_steps, expected_words): (&[u8], &[u32]),
    where_is: &str,
) {
    let (dim, n) = (codes.dim(), rows.len() / codes.dim());
    let decoded = |steps: &[u8], words: &[u32]| {
        let mut decoded = vec![0.0; rows.len()];
        sq::decode_keys_into(&Keys::new(*codes, n, steps, words).unwrap(), &mut decoded).unwrap();
        decoded
    };
    let (got, expected) = (decoded(steps, words), decoded(expected_steps, expected_words));
    for i in 0..dim {
        let of = |rows: &[f32]| rows.iter().skip(i).step_by(dim).copied().collect::<Vec<f32>>();
        let (exact, got, expected) = (of(rows), of(&got), of(&expected));
        if steps[i] == expected_steps[i] {
            assert!(got == expected, "{where_is}: other codes of component {i}");
            continue;
        }
        let square = |decoded: &[f32]| -> f64 {
            exact.iter().zip(decoded).map(|(&x, &y)| (finite(x) - f64::from(y)).powi(2)).sum()
        };
        let (least, error) = (square(&expected), square(&got));
        let place = format!("component {i}, step {} for {}", steps[i], expected_steps[i]);
        assert!((error - least).abs() <= TIE * least, "{where_is}: {place}, error {error} for {least}");
    }
}

fn spoil_one(random: &mut Random, rows: &mut [f32]) {
    if random.below(3) == 0 && !rows.is_empty() {
        rows[random.below(rows.len())] = random.pick(&FEW);
    }
}

fn spoil_many(random: &mut Random, rows: &mut [f32]) {
    for _ in 0..rows.len() / 200 {
        rows[random.below(rows.len())] = random.pick(&MANY);
    }
}

#[test]
fn keys_are_the_cpus() {
    let Some(device) = device("keys_are_the_cpus") else { return };
    (0..60).for_each(|seed| run(&device, &mut Random(seed), true, spoil_one));
}

#[test]
fn values_are_the_cpus() {
    let Some(device) = device("values_are_the_cpus") else { return };
    (100..160).for_each(|seed| run(&device, &mut Random(seed), false, spoil_one));
}

#[test]
fn keys_that_are_huge_or_not_finite_are_the_cpus() {
    let Some(device) = device("keys_that_are_huge_or_not_finite_are_the_cpus") else { return };
    (200..240).for_each(|seed| run(&device, &mut Random(seed), true, spoil_many));
}

#[test]
fn values_that_are_huge_or_not_finite_are_the_cpus() {
    let Some(device) = device("values_that_are_huge_or_not_finite_are_the_cpus") else { return };
    (300..340).for_each(|seed| run(&device, &mut Random(seed), false, spoil_many));
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let shape = EncodeShape { dim: 128, side: Side::Values { bits: 4 }, block: 64, paged: false };
    assert!(shape.program().is_ok());
    for bad in [
        EncodeShape { dim: 80, ..shape },
        EncodeShape { block: 48, ..shape },
        EncodeShape { side: Side::Values { bits: 9 }, ..shape },
        EncodeShape { side: Side::Keys { slots: 65 }, ..shape },
        EncodeShape { side: Side::Keys { slots: 0 }, ..shape },
    ] {
        assert!(matches!(bad.program(), Err(Error::Unsupported { .. })), "{bad:?}");
    }
}
