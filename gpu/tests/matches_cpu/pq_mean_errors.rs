//! Mean errors of coded values are those of the definition, however many tokens a launch has.

use half::f16;
use kv_gpu::pq::{
    BlockMeans, CodeLayout, EncodeArguments, MEAN_TOKENS, MeanErrors, MeanErrorsArguments, MeanErrorsShape,
    Pages, Side, TILE,
};
use kv_gpu::{DevicePtr, Element};
use pq_core::{CodebookBuf, Codes, PqShape, decode_into};

use crate::common::{Buffer, Random, device, from_element, launch, to_element};

/// Tokens of two sequences of a head each, launch by launch: (first, count) of both. The second launch
/// encodes 40 tokens of the first sequence again; the second sequence begins anew.
const LAUNCHES: [[(u32, u32); 2]; 6] = [
    [(0, 300), (0, 77)],
    [(260, 72), (0, 5)],
    [(332, 368), (5, 250)],
    [(700, 0), (255, 1)],
    [(600, 101), (256, 600)],
    [(701, 139), (856, 7)],
];
const ENDS: [usize; 2] = [840, 863];
const CAPACITY: usize = 1024;
/// Tokens of a part of a block.
const PART: usize = 16;
const RECENT_PARTS: usize = BlockMeans::recent_parts(64);

#[test]
fn mean_errors_agree() {
    let Some(device) = device("mean_errors_agree") else { return };
    let shapes =
        [(128, 16, 8), (128, 8, 8), (64, 32, 4), (128, 32, 8), (64, 8, 4), (128, 16, 4), (128, 64, 6)];
    for (seed, (dim, m, nbits)) in (0..).zip(shapes) {
        let mut random = Random(seed);
        let quantizer = PqShape::new(dim, m, nbits).unwrap();
        let layout = CodeLayout::new(quantizer, Side::Values).unwrap();
        let element = [Element::F16, Element::Bf16][seed as usize % 2];
        let (has_norms, paged, gain) = (seed % 3 != 2, seed % 2 == 1, if seed % 3 == 0 { 1.25 } else { 1.0 });
        let book: Vec<f32> = random.normals(quantizer.codebook_len());
        let book: Vec<f32> = book.into_iter().map(|x| f16::from_f32(x).to_f32()).collect();
        let book = CodebookBuf::new(quantizer, &book).unwrap();
        let mut table = vec![f16::ZERO; layout.table_len()];
        layout.table_into(&book.view(), &mut table).unwrap();
        let mut rows: Vec<f32> = random.normals(2 * CAPACITY * dim);
        if element == Element::Bf16 {
            // Of the second component, means exceed 16 bits.
            rows.chunks_exact_mut(dim).for_each(|row| row[1] *= 1e7);
        }
        rows.iter_mut().for_each(|x| *x = from_element(element, to_element(element, *x)));
        let norms: Vec<f16> = (0..2 * CAPACITY)
            .map(|_| f16::from_f32(if has_norms { 0.5 + random.normal().abs() } else { 1.0 }))
            .collect();
        let packed: Vec<Vec<u8>> = (0..2).map(|_| random.bytes(quantizer.codes_len(CAPACITY))).collect();
        // Pages of two tiles, in descending order, or sequences in one piece.
        let page_tiles = if paged { 2 } else { CAPACITY / TILE };
        let max_pages = CAPACITY / TILE / page_tiles;
        let pages: Vec<u32> = (0..2 * max_pages as u32).rev().collect();
        let mut tiles = vec![0; 2 * CAPACITY / TILE * layout.tile_len()];
        let mut norms_there = vec![f16::NAN; norms.len()];
        let mut errors = vec![0.0_f64; rows.len()]; // of every component
        for (sequence, packed) in packed.iter().enumerate() {
            let codes = Codes::new(quantizer, CAPACITY, packed).unwrap();
            let mut in_order = vec![0; CAPACITY / TILE * layout.tile_len()];
            layout.pack_into(&codes, &mut in_order).unwrap();
            for (tile, bytes) in in_order.chunks_exact(layout.tile_len()).enumerate() {
                let page =
                    if paged { pages[sequence * max_pages + tile / page_tiles] as usize } else { sequence };
                let at = page * page_tiles + tile % page_tiles;
                tiles[at * layout.tile_len()..][..layout.tile_len()].copy_from_slice(bytes);
                let from = (sequence * CAPACITY / TILE + tile) * TILE;
                norms_there[at * TILE..][..TILE].copy_from_slice(&norms[from..][..TILE]);
            }
            let mut decoded = vec![0.0; CAPACITY * dim];
            decode_into(&book.view(), &codes, 0, &mut decoded).unwrap();
            let first = sequence * CAPACITY * dim;
            for (i, decoded) in decoded.iter().enumerate() {
                let norm = norms[(first + i) / dim].to_f64();
                errors[first + i] =
                    norm * (f64::from(rows[first + i]) / f64::from(gain) - f64::from(*decoded));
            }
        }
        let kernel = MeanErrors::new(&device, MeanErrorsShape { quantizer, element }).unwrap();
        let blocks = CAPACITY / MEAN_TOKENS;
        let (tiles, table) = (Buffer::new(&device, &tiles), Buffer::new(&device, &table));
        let (norms_there, pages_there) = (Buffer::new(&device, &norms_there), Buffer::new(&device, &pages));
        let means = Buffer::new(&device, &vec![f16::ZERO; 2 * blocks * dim]);
        let recent = Buffer::new(&device, &vec![0_f32; 2 * RECENT_PARTS * dim]);
        let summed = Buffer::new(&device, &[0_u32; 2]);
        for launch in LAUNCHES {
            let most = launch.iter().map(|&(_, count)| count as usize).max().unwrap();
            let vectors: Vec<u16> = launch
                .iter()
                .enumerate()
                .flat_map(|(sequence, &(first, count))| {
                    let at = (sequence * CAPACITY + first as usize) * dim;
                    let mut vectors: Vec<u16> =
                        rows[at..][..count as usize * dim].iter().map(|&x| to_element(element, x)).collect();
                    vectors.resize(most * dim, u16::MAX); // NaN
                    vectors
                })
                .collect();
            let vectors = Buffer::new(&device, &vectors);
            let firsts = Buffer::new(&device, &launch.map(|(first, _)| first));
            let counts = Buffer::new(&device, &launch.map(|(_, count)| count));
            let encoded = EncodeArguments {
                batch: 2,
                heads: 1,
                max_count: most,
                vectors: vectors.pointer().cast(),
                strides: [most * dim, most * dim, dim],
                centroids: DevicePtr::dangling(),
                firsts: firsts.pointer(),
                counts: counts.pointer(),
                codes: tiles.pointer(),
                tiles: page_tiles,
                pages: paged.then(|| Pages { table: pages_there.pointer(), max_pages }),
            };
            let arguments = MeanErrorsArguments {
                encoded,
                table: table.pointer(),
                norms: has_norms.then(|| norms_there.pointer()),
                gain,
                means: BlockMeans {
                    means: means.pointer(),
                    blocks,
                    recent: recent.pointer(),
                    recent_parts: RECENT_PARTS,
                    summed: summed.pointer(),
                },
            };
            launch!(device, kernel, &arguments);
            device.stream().synchronize().unwrap();
        }
        let (means, recent) = (means.read(), recent.read());
        assert_eq!(summed.read(), ENDS.map(|end| end as u32), "{quantizer:?}");
        for (sequence, end) in ENDS.into_iter().enumerate() {
            for component in 0..dim {
                let sum_of = |tokens: std::ops::Range<usize>| -> f64 {
                    tokens.map(|token| errors[(sequence * CAPACITY + token) * dim + component]).sum()
                };
                let check = |what: &str, got: f64, expected: f64| {
                    let place = format!("{quantizer:?}: sequence {sequence} component {component} {what}");
                    let most = 1e-3 * expected.abs() + 1e-3;
                    assert!((got - expected).abs() <= most, "{place}: {got} for {expected}");
                };
                for block in 0..end / MEAN_TOKENS {
                    let got = means[(sequence * blocks + block) * dim + component].to_f64();
                    let tokens = block * MEAN_TOKENS..(block + 1) * MEAN_TOKENS;
                    let most = f64::from(f16::MAX);
                    let expected = (sum_of(tokens) / MEAN_TOKENS as f64).clamp(-most, most);
                    check(&format!("block {block}"), got, expected);
                }
                for part in end.div_ceil(PART) - RECENT_PARTS..end.div_ceil(PART) {
                    let at = sequence * RECENT_PARTS + part % RECENT_PARTS;
                    let got = f64::from(recent[at * dim + component]);
                    check(&format!("part {part}"), got, sum_of(part * PART..end.min((part + 1) * PART)));
                }
            }
        }
    }
}
