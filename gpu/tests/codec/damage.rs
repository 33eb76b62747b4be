//! Damaged frames fail on the device if they fail on the CPU.

use std::ops::Range;

use codec_core::{Backend, BlockIndex, Frame, encode_frame};
use kv_gpu::VectorElement;
use kv_gpu::codec::Planes;

use super::decode::{decode, error_of, first_difference};
use super::{Cache, Case, LAYERS, sides};
use crate::common::{Random, device};

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
        let places: Vec<_> = {
            let frame = Frame::parse(&bytes, case.info.elements()).unwrap();
            let places = sides().flat_map(|(layer, side)| {
                (0..case.info.blocks())
                    .map(move |block| frame.block_range(BlockIndex { layer, side, block }).unwrap())
            });
            places.collect()
        };
        let tiles = case.info.channels().div_ceil(32);
        let index = 64 + 8 * LAYERS;
        for _ in 0..=random.below(3) {
            let entry = index + random.below(places.len()) * (12 + 2 * tiles);
            let place = &places[random.below(places.len())];
            match random.below(4) {
                0 => bytes[entry + 12 + random.below(2 * tiles)] = random.next() as u8,
                1 => bytes[place.start + random.below(place.len().min(16))] = random.next() as u8,
                _ => bytes[place.start + random.below(place.len())] = random.next() as u8,
            }
        }
        // Recomputes the checksums.
        for (block, place) in places.iter().enumerate() {
            let checksum = crc32fast::hash(&bytes[place.clone()]);
            bytes[index + block * (12 + 2 * tiles) + 8..][..4].copy_from_slice(&checksum.to_le_bytes());
        }
        let end = index + places.len() * (12 + 2 * tiles);
        let checksum = crc32fast::hash(&bytes[64..end]);
        bytes[end..end + 4].copy_from_slice(&checksum.to_le_bytes());

        let planes = Planes::pack(&[view; 2 * LAYERS], case.info.head_dim).unwrap();
        let cache = Cache::new(&device, &case, &mut random, None);
        let (got, failed) = decode(&device, &case, &planes, &bytes, &cache, 1, None);
        let frame = Frame::parse(&bytes, case.info.elements()).unwrap();
        let mut results = sides().map(|(layer, side)| {
            let mut out = vec![0.0; rows.len()];
            frame.decode_plane_into_with(Backend::Scalar, &view, layer, side, None, &mut out).map(|()| out)
        });
        let expected: Result<Vec<_>, _> = results.by_ref().collect();
        match expected {
            Err(_) => assert!(failed, "{case:?}, seed {seed}: the CPU finds an error"),
            Ok(expected) if !failed => {
                for (plane, expected) in expected.into_iter().enumerate() {
                    let error = error_of(&planes.shape(case.element, false), &expected);
                    let got = cache.read(&case, &got, plane);
                    let wrong = first_difference(case.element, &got, &expected, error);
                    assert_eq!(wrong, None, "{case:?}, seed {seed}");
                }
            }
            // A tile of the range coder is an error on the device only; planes of the interleaved coder have
            // none.
            Ok(_) => assert!(
                places.iter().any(|place| has_range_tile(&bytes, place.start, index, &places, tiles)),
                "{case:?}, seed {seed}: the CPU finds no error"
            ),
        }
        failures += usize::from(failed);
    }
    assert!((20..100).contains(&failures), "{failures} frames of 100 failed");
}

/// Whether a tile of the block that starts at `start` is marked as one of the range coder.
fn has_range_tile(bytes: &[u8], start: usize, index: usize, places: &[Range<usize>], tiles: usize) -> bool {
    let block = places.iter().position(|place| place.start == start).unwrap();
    let lengths = &bytes[index + block * (12 + 2 * tiles) + 12..][..2 * tiles];
    let mut at = start;
    lengths.chunks_exact(2).any(|length| {
        let kind = bytes[at];
        at += 2 * usize::from(u16::from_le_bytes([length[0], length[1]]));
        kind == 3
    })
}
