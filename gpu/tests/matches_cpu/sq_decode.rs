//! Decoded rows of scalar codes are those of `pq_core::sq::decode_keys_into` and `decode_values_into`,
//! rounded.

use half::f16;
use kv_gpu::pq::Pages;
use kv_gpu::sq::{CodedBlocks, Decode, DecodeShape, EncodeShape, Side};
use kv_gpu::{Device, Error, VectorElement};
use pq_core::sq::{self, Keys, Shape, Values};

use crate::common::{Buffer, Random, bytes_of, device};

/// The codes of a head: random words and scales are the codes of some rows.
fn random_shape(keys: bool, dim: usize, slots: usize, random: &mut Random) -> Shape {
    if !keys {
        return Shape::uniform(dim, (slots / (dim / 16)) as u32).unwrap();
    }
    let fall = random.pick(&[1.0, 0.99, 0.97, 0.9_f32]);
    let sigma: Vec<f32> = (0..dim).map(|i| fall.powi(i as i32)).collect();
    sq::allot(&sigma, slots, &mut vec![0; dim]).unwrap()
}

fn run(device: &Device, random: &mut Random, keys: bool) {
    let (dim, block) = (random.pick(&[64, 96, 128, 256]), random.pick(&[32, 64, 128, 256]));
    let (batch, heads, paged) = (1 + random.below(3), 1 + random.below(3), random.below(2) == 1);
    let bits = 1 + random.below(8);
    let slots = bits * dim / 16 - if keys { random.below(dim / 16) } else { 0 };
    let side = if keys { Side::Keys { slots } } else { Side::Values { bits } };
    let element = random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]);
    let shape = DecodeShape { coded: EncodeShape { dim, side, block, paged }, element };
    let of_heads: Vec<Shape> = (0..heads).map(|_| random_shape(keys, dim, slots, random)).collect();
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
    let places = batch * max_pages * heads * of_place;
    let (scale_len, word_len) = (if keys { dim } else { block }, of_heads[0].words_len(block));
    // Scales near 1, so that f16 holds the numbers.
    let scales: Vec<u8> = (0..places * scale_len).map(|_| 100 + random.below(56) as u8).collect();
    let words: Vec<u32> = (0..places * word_len).map(|_| random.next() as u32).collect();
    let errors: Vec<f16> = random.normals(places * dim).into_iter().map(f16::from_f32).collect();
    let has_errors = !keys && random.below(2) == 1;

    let decode = Decode::new(device, shape).unwrap();
    let tables = shape.coded.key_table().map(|layout| {
        let mut tables = vec![0; heads * layout.table_len()];
        for (table, codes) in tables.chunks_exact_mut(layout.table_len()).zip(&of_heads) {
            layout.table_into(codes, table).unwrap();
        }
        Buffer::new(device, &tables)
    });
    let (scales_there, words_there) = (Buffer::new(device, &scales), Buffer::new(device, &words));
    let errors_there = Buffer::new(device, &errors);
    let firsts_there = Buffer::new(device, &firsts);
    let counts_there = Buffer::new(device, &counts.iter().map(|&n| n as u32).collect::<Vec<u32>>());
    let table_there = Buffer::new(device, &table);
    let row_len = bytes_of(element, &[0.0]).len() * dim;
    let rows = Buffer::new(device, &vec![0xdd_u8; batch * heads * max_rows * row_len]);
    let coded = CodedBlocks {
        batch,
        heads,
        max_rows,
        firsts: firsts_there.pointer(),
        counts: counts_there.pointer(),
        key_tables: tables.as_ref().map(Buffer::pointer),
        scales: scales_there.pointer(),
        words: words_there.pointer(),
        mean_errors: has_errors.then(|| errors_there.pointer()),
        blocks: of_place,
        pages: paged.then(|| Pages { table: table_there.pointer(), max_pages }),
    };
    // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
    // requires.
    #[allow(unsafe_code)]
    unsafe { decode.launch(device.stream().cu_stream(), &coded, rows.pointer().cast()) }.unwrap();
    let got = rows.read();

    for (pair, got) in got.chunks_exact(max_rows * row_len).enumerate() {
        let (sequence, head) = (pair / heads, pair % heads);
        let (codes, count) = (of_heads[head], counts[sequence]);
        let (rows, rest) = got.split_at(count * row_len);
        assert!(rest.iter().all(|&x| x == 0xdd), "{shape:?}: other rows written");
        for (b, rows) in rows.chunks(block * row_len).enumerate() {
            let (n, at) = (rows.len() / row_len, place(sequence, head, firsts[sequence] as usize + b));
            let scales = &scales[at * scale_len..][..if keys { dim } else { n }];
            let words = &words[at * word_len..][..codes.words_len(n)];
            let mut expected = vec![0.0; n * dim];
            if keys {
                sq::decode_keys_into(&Keys::new(codes, n, scales, words).unwrap(), &mut expected).unwrap();
            } else {
                sq::decode_values_into(&Values::new(codes, scales, words).unwrap(), &mut expected).unwrap();
            }
            if has_errors {
                let error = errors[at * dim..][..dim].iter().cycle();
                expected.iter_mut().zip(error).for_each(|(x, error)| *x += error.to_f32());
            }
            assert!(
                rows == bytes_of(element, &expected),
                "{shape:?}, pair {pair}, block {b} of {n}, {:?}",
                codes.widths()
            );
        }
    }
}

#[test]
fn keys_are_the_cpus() {
    let Some(device) = device("keys_are_the_cpus") else { return };
    (0..60).for_each(|seed| run(&device, &mut Random(seed), true));
}

#[test]
fn values_are_the_cpus() {
    let Some(device) = device("values_are_the_cpus") else { return };
    (100..160).for_each(|seed| run(&device, &mut Random(seed), false));
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let shape = EncodeShape { dim: 128, side: Side::Values { bits: 4 }, block: 64, paged: false };
    let program = |coded| DecodeShape { coded, element: VectorElement::F16 }.program();
    assert!(program(shape).is_ok());
    for bad in [
        EncodeShape { dim: 80, ..shape },
        EncodeShape { block: 48, ..shape },
        EncodeShape { side: Side::Values { bits: 9 }, ..shape },
        EncodeShape { side: Side::Keys { slots: 0 }, ..shape },
    ] {
        assert!(matches!(program(bad), Err(Error::Unsupported { .. })), "{bad:?}");
    }
}
