//! Damaged frames fail on the device if they fail on the CPU.

use std::ops::Range;

use codec_core::{Backend, BlockIndex, Frame, Plane, PredictorKind, Steps, encode_frame};
use kv_gpu::codec::Planes;
use kv_gpu::{Device, VectorElement};

use super::decode::{decode, error_of, first_difference};
use super::{Cache, Case, LAYERS, sides};
use crate::common::{Random, device};

/// Where the index of a frame begins.
const INDEX: usize = 64 + 8 * LAYERS;

#[test]
fn damaged_frames_fail_where_they_do_on_the_cpu() {
    let Some(device) = device("damaged_frames_fail_where_they_do_on_the_cpu") else { return };
    let mut failures = 0;
    for seed in 1000..1100 {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        // Half of the frames decode to 16 bits, by other kernels.
        let elements = [VectorElement::F32, VectorElement::F16, VectorElement::F32, VectorElement::Bf16];
        (case.element, case.page_tokens) = (elements[(seed / 10 % 4) as usize], None);
        let rows = case.rows(&mut random);
        let plane = case.plane(&rows);
        let view = plane.view();
        let mut bytes = vec![];
        encode_frame(&case.info, &[view; 2 * LAYERS], &[&rows[..]; 2 * LAYERS], &mut bytes).unwrap();
        let places = block_places(&case, &bytes);
        let tiles = case.info.channels().div_ceil(32);
        for _ in 0..=random.below(3) {
            let entry = INDEX + random.below(places.len()) * (12 + 2 * tiles);
            let place = &places[random.below(places.len())];
            match random.below(4) {
                0 => bytes[entry + 12 + random.below(2 * tiles)] = random.next() as u8,
                1 => bytes[place.start + random.below(place.len().min(16))] = random.next() as u8,
                _ => bytes[place.start + random.below(place.len())] = random.next() as u8,
            }
        }
        seal(&mut bytes, &places, tiles);
        let failed = decodes_as_on_the_cpu(&device, &case, &mut random, &[view; 2 * LAYERS], &bytes);
        failures += usize::from(failed);
    }
    assert!((20..100).contains(&failures), "{failures} frames of 100 failed");
}

/// A frame decoded with the planes of another one, so that blocks without scales of their tokens should have
/// some.
#[test]
fn planes_of_another_kind_fail_where_they_do_on_the_cpu() {
    let Some(device) = device("planes_of_another_kind_fail_where_they_do_on_the_cpu") else { return };
    let mut failures = 0;
    for seed in 2000..2030 {
        let mut random = Random(seed);
        let mut case = Case { transform: None, page_tokens: None, ..Case::random(&mut random) };
        let rows = case.rows(&mut random);
        let kinds = [
            (PredictorKind::Previous, Steps::Deviations(3.0)),
            (PredictorKind::None, Steps::TokenAbsmax(15)),
        ];
        let fitted = kinds.map(|kind| {
            (case.predictor, case.steps) = kind;
            case.plane(&rows)
        });
        let of = |i: usize| fitted[i % 2].view();
        let (views, others): ([_; 2 * LAYERS], [_; 2 * LAYERS]) =
            (std::array::from_fn(of), std::array::from_fn(|i| of(i + 1)));
        let mut bytes = vec![];
        encode_frame(&case.info, &views, &[&rows[..]; 2 * LAYERS], &mut bytes).unwrap();
        assert!(!decodes_as_on_the_cpu(&device, &case, &mut random, &views, &bytes), "{case:?}");
        // The frame names the planes that it was coded under.
        let mut of_others = vec![];
        encode_frame(&case.info, &others, &[&rows[..]; 2 * LAYERS], &mut of_others).unwrap();
        let places = block_places(&case, &bytes);
        bytes[64..INDEX].copy_from_slice(&of_others[64..INDEX]);
        seal(&mut bytes, &places, case.info.channels().div_ceil(32));
        failures += usize::from(decodes_as_on_the_cpu(&device, &case, &mut random, &others, &bytes));
    }
    assert!(failures > 20, "{failures} frames of 30 failed");
}

/// Recomputes the checksums of blocks and index.
fn seal(bytes: &mut [u8], places: &[Range<usize>], tiles: usize) {
    for (block, place) in places.iter().enumerate() {
        let checksum = crc32fast::hash(&bytes[place.clone()]);
        bytes[INDEX + block * (12 + 2 * tiles) + 8..][..4].copy_from_slice(&checksum.to_le_bytes());
    }
    let end = INDEX + places.len() * (12 + 2 * tiles);
    let checksum = crc32fast::hash(&bytes[64..end]);
    bytes[end..end + 4].copy_from_slice(&checksum.to_le_bytes());
}

/// Where the blocks of a frame are.
fn block_places(case: &Case, bytes: &[u8]) -> Vec<Range<usize>> {
    let frame = Frame::parse(bytes, case.info.elements()).unwrap();
    let places = sides().flat_map(|(layer, side)| {
        (0..case.info.blocks())
            .map(move |block| frame.block_range(BlockIndex { layer, side, block }).unwrap())
    });
    places.collect()
}

/// Decodes a frame, whose damage has the checksums of intact blocks, and compares it with the CPU. Whether it
/// failed.
fn decodes_as_on_the_cpu(
    device: &Device,
    case: &Case,
    random: &mut Random,
    views: &[Plane<'_>; 2 * LAYERS],
    bytes: &[u8],
) -> bool {
    let planes = Planes::pack(views, case.info.head_dim).unwrap();
    let cache = Cache::new(device, case, random, None);
    let (got, failed) = decode(device, case, &planes, bytes, &cache, 1, None);
    let frame = Frame::parse(bytes, case.info.elements()).unwrap();
    let mut results = sides().zip(views).map(|((layer, side), view)| {
        let mut out = vec![0.0; case.info.tokens * case.info.channels()];
        frame.decode_plane_into_with(Backend::Scalar, view, layer, side, None, &mut out).map(|()| out)
    });
    let expected: Result<Vec<_>, _> = results.by_ref().collect();
    match expected {
        Err(_) => assert!(failed, "{case:?}: the CPU finds an error"),
        Ok(expected) if !failed => {
            for (plane, expected) in expected.into_iter().enumerate() {
                let error = error_of(&planes.shape(case.element, false), &expected);
                let got = cache.read(case, &got, plane);
                let wrong = first_difference(case.element, &got, &expected, error);
                assert_eq!(wrong, None, "{case:?}");
            }
        }
        // A tile of the range coder is an error on the device only: these planes have none.
        Ok(_) => {
            let places = block_places(case, bytes);
            let tiles = case.info.channels().div_ceil(32);
            assert!(
                places.iter().any(|place| has_range_tile(bytes, place.start, &places, tiles)),
                "{case:?}: the CPU finds no error"
            );
        }
    }
    failed
}

/// Whether a tile of the block that starts at `start` is marked as one of the range coder.
fn has_range_tile(bytes: &[u8], start: usize, places: &[Range<usize>], tiles: usize) -> bool {
    let block = places.iter().position(|place| place.start == start).unwrap();
    let lengths = &bytes[INDEX + block * (12 + 2 * tiles) + 12..][..2 * tiles];
    let mut at = start;
    lengths.chunks_exact(2).any(|length| {
        let kind = bytes[at];
        at += 2 * usize::from(u16::from_le_bytes([length[0], length[1]]));
        kind == 3
    })
}
