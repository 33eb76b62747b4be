//! Streams with changed bytes and valid checksums decode to an error or to finite values, the same on every
//! backend.
//!
//! `MUTATIONS=10000000 cargo test --release -p codec-core --test main mutations` for more than the default;
//! with `RUSTFLAGS=-Zsanitizer=address` (nightly) it also finds accesses outside of buffers.

use std::sync::Arc;

use codec_core::*;
use fastrand::Rng;

const CHANNELS: usize = 40;
const TOKENS: usize = 80;
/// The index has two ids, then two entries of two tiles.
const INDEX_END: usize = 64 + 8 + 2 * 16;

/// Numbers of the kinds of planes: without a transform; with one of a head, of all heads together, or of
/// their leading coefficients, which fill a part of the first tile.
const PLAIN: usize = 24;
const ALL: usize = PLAIN + 18;

fn fitted(kinds: usize) -> PlaneBuf {
    let (head_dim, rank) = [(8, 8), (CHANNELS, CHANNELS), (CHANNELS, 19)][kinds % 3];
    let transform = (kinds >= PLAIN).then(|| Arc::new(transform(head_dim, rank)));
    let kinds = kinds % PLAIN;
    let predictors = [
        PredictorKind::Mean,
        PredictorKind::Previous,
        PredictorKind::Anchor { group: 5 },
        PredictorKind::None,
    ];
    let options = FitOptions {
        predictor: predictors[kinds % 4],
        steps: if kinds % 16 == 15 && transform.is_none() {
            Steps::TokenAbsmax(15)
        } else {
            Steps::Deviations(0.1 + kinds as f32 / 20.0)
        },
        models: [ModelKind::Families, ModelKind::Tables, ModelKind::ContextTables][kinds / 4 % 3],
        coder: if kinds / 12 == 1 { Coder::Range } else { Coder::InterleavedRans },
    };
    PlaneBuf::fit(&rows(), CHANNELS, transform, &options).unwrap()
}

/// Dense maps, of which a few coefficients near the largest number make infinities and NaN.
fn transform(head_dim: usize, rank: usize) -> TransformBuf {
    let map = |phase: f32, columns: usize| -> Vec<f32> {
        let entry =
            |i: usize| if i.is_multiple_of(columns + 1) { 1.0 } else { (i as f32 * phase).sin() / 8.0 };
        (0..CHANNELS / head_dim).flat_map(|_| (0..head_dim * rank).map(entry)).collect()
    };
    TransformBuf::leading(head_dim, rank, map(0.37, rank), map(0.73, head_dim)).unwrap()
}

fn rows() -> Vec<f32> {
    (0..CHANNELS * TOKENS)
        .map(|i| (i as f32 * 0.61).sin() * (1 + i % 7) as f32 * (1 + i % 3) as f32)
        .collect()
}

#[test]
fn mutated_streams_decode_alike_or_not_at_all() {
    let streams = std::env::var("MUTATIONS").map_or(20_000, |n| n.parse::<usize>().unwrap());
    std::thread::scope(|scope| {
        for seed in [1, 2] {
            scope.spawn(move || {
                (0..ALL).for_each(|kinds| mutate_lossy(kinds, seed, streams / (2 * ALL)));
                [ElementType::F16, ElementType::Bf16]
                    .into_iter()
                    .for_each(|element| mutate_lossless(element, seed, streams / (2 * ALL)));
            });
        }
    });
}

const INDEX: BlockIndex = BlockIndex { layer: 0, side: Side::Keys, block: 0 };

fn mutate_lossy(kinds: usize, seed: u64, streams: usize) {
    let plane = fitted(kinds);
    let plane = plane.view();
    let info = FrameInfo { block_tokens: TOKENS, ..FrameInfo::new(1, 1, CHANNELS, TOKENS) };
    let mut frame = vec![];
    encode_frame(&info, &[plane; 2], &[&rows()[..]; 2], &mut frame).unwrap();
    let random = Rng::with_seed(seed << 32 | (kinds as u64 + 1));
    mutate(&format!("kinds {kinds}, seed {seed}"), frame, random, streams, |frame, backend, sum| {
        let mut out = vec![0.0_f32; CHANNELS * TOKENS];
        frame.decode_block_into_with(backend, &plane, INDEX, None, &mut out)?;
        assert!(out.iter().all(|x| x.is_finite()));
        out.iter().for_each(|x| sum(x.to_bits()));
        Ok(())
    });
}

fn mutate_lossless(element: ElementType, seed: u64, streams: usize) {
    // Every 50th element is of an exponent that the sample does not have.
    let bits = |x: &f32| {
        if element == ElementType::Bf16 {
            (x.to_bits() >> 16) as u16
        } else {
            half::f16::from_f32(*x).to_bits()
        }
    };
    let sample: Vec<u16> = rows().iter().map(bits).collect();
    let plane = LosslessPlaneBuf::fit(element, &sample, CHANNELS).unwrap();
    let wild: Vec<u16> = sample
        .iter()
        .enumerate()
        .map(|(i, &bits)| if i % 50 == 7 { !bits ^ i as u16 } else { bits })
        .collect();
    let info =
        FrameInfo { lossless: true, element, block_tokens: TOKENS, ..FrameInfo::new(1, 1, CHANNELS, TOKENS) };
    let plane = plane.view();
    let mut frame = vec![];
    encode_lossless_frame(&info, &[plane; 2], &[&wild[..]; 2], &mut frame).unwrap();
    let random = Rng::with_seed(seed << 32 | 99);
    mutate(&format!("{element:?}, seed {seed}"), frame, random, streams, |frame, backend, sum| {
        let mut out = vec![0_u16; CHANNELS * TOKENS];
        frame.decode_lossless_block_into_with(backend, &plane, INDEX, &mut out)?;
        out.iter().for_each(|&bits| sum(bits.into()));
        Ok(())
    });
}

/// Changes bytes of a frame of one block a plane; `decode` passes what it decodes to its last argument.
fn mutate(
    name: &str,
    mut frame: Vec<u8>,
    mut random: Rng,
    streams: usize,
    decode: impl Fn(&Frame<'_>, Backend, &mut dyn FnMut(u32)) -> Result<(), Error>,
) {
    let (whole, payload) = (frame.clone(), INDEX_END + 4);
    let backends: Vec<Backend> = Backend::ALL.into_iter().filter(|backend| backend.is_available()).collect();
    for i in 0..streams {
        if i % 8 == 0 {
            frame.copy_from_slice(&whole);
        }
        for _ in 0..=random.usize(..3) {
            // Half of the changes go to the heads of tiles and to the index, where lengths are.
            let end = if random.bool() { 48 } else { frame.len() - payload };
            let at = random.usize(..end);
            frame[payload + at] = random.u8(..);
            if random.usize(..8) == 0 {
                let entry = 64 + 8 + 16 * random.usize(..2);
                frame[entry + 12 + random.usize(..4)] = random.u8(..);
            }
        }
        let end = u64::from_le_bytes(frame[72..80].try_into().unwrap()) as usize;
        let checksum = crc32fast::hash(&frame[payload..payload + end]);
        frame[80..84].copy_from_slice(&checksum.to_le_bytes());
        let index = crc32fast::hash(&frame[64..INDEX_END]);
        frame[INDEX_END..payload].copy_from_slice(&index.to_le_bytes());
        let parsed = Frame::parse(&frame, 2 * CHANNELS * TOKENS).unwrap();
        let mut results = backends.iter().map(|&backend| {
            let mut sum = 0_u32;
            let result = decode(&parsed, backend, &mut |x| sum = sum.rotate_left(1) ^ x);
            (result, sum)
        });
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "{name}, stream {i}");
    }
}
