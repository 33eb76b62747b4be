//! Frames with changed bytes or an arbitrary payload, and arbitrary bytes, decode to an error or to finite
//! values, the same on every backend. Chunk directories are rejected or match their frames.
#![no_main]

use std::sync::OnceLock;

use codec_core::*;
use libfuzzer_sys::fuzz_target;

const CHANNELS: usize = 40;
const TOKENS: usize = 30;

/// A plane of every kind, with ordinary values and with values near the largest finite one, and a frame for
/// each.
static CASES: [OnceLock<(PlaneBuf, Vec<u8>)>; 48] = [const { OnceLock::new() }; 48];

fn case(kinds: usize) -> (PlaneBuf, Vec<u8>) {
    let (magnitude, kinds) = ([1.0, 2.4e37][kinds / 24], kinds % 24);
    let rows: Vec<f32> =
        (0..CHANNELS * TOKENS).map(|i| (i as f32).cos() * (1 + i % 7) as f32 * magnitude).collect();
    let predictors = [
        PredictorKind::Mean,
        PredictorKind::Previous,
        PredictorKind::Anchor { group: 5 },
        PredictorKind::None,
    ];
    let options = FitOptions {
        predictor: predictors[kinds % 4],
        steps: if kinds % 8 == 3 { Steps::TokenAbsmax(15) } else { Steps::Deviations(0.3) },
        models: [ModelKind::Families, ModelKind::Tables, ModelKind::ContextTables][kinds / 4 % 3],
        coder: [Coder::InterleavedRans, Coder::Range][kinds / 12],
    };
    let plane = PlaneBuf::fit(&rows, CHANNELS, None, &options).unwrap();
    let info = FrameInfo { block_tokens: 16, ..FrameInfo::new(1, 1, CHANNELS, TOKENS) };
    let mut frame = Vec::new();
    let view = plane.view();
    encode_frame_with(Backend::Scalar, &info, &[view; 2], &[&rows[..]; 2], &mut frame).unwrap();
    (plane, frame)
}

fuzz_target!(|input: (u8, u8, Vec<u8>, Vec<(u16, u8)>)| {
    let (kinds, first, payload, changes) = input;
    let kinds = usize::from(kinds) % CASES.len();
    let (plane, frame) = CASES[kinds].get_or_init(|| case(kinds));
    let (plane, mut frame) = (plane.view(), frame.clone());
    // Changes bytes one at a time and recomputes the checksums.
    for &(at, value) in &changes {
        let at = 64 + usize::from(at) % (frame.len() - 64);
        frame[at] ^= value;
        mend(&mut frame);
        decode(&frame, &plane);
    }
    // Any payload in the first block.
    frame.truncate(INDEX_END + 4);
    frame.push(first % 5);
    frame.extend_from_slice(&payload);
    frame.resize(frame.len().next_multiple_of(2), 0);
    let len = frame.len() - INDEX_END - 4;
    frame[48..56].copy_from_slice(&(len as u64).to_le_bytes());
    for entry in 0..4 {
        let at = INDEX + 8 + 16 * entry;
        frame[at..at + 8].copy_from_slice(&(len as u64).to_le_bytes());
        let words = if entry == 0 { [len / 4, len / 2 - len / 4] } else { [0, 0] };
        frame[at + 12..at + 14].copy_from_slice(&(words[0] as u16).to_le_bytes());
        frame[at + 14..at + 16].copy_from_slice(&(words[1] as u16).to_le_bytes());
    }
    mend(&mut frame);
    decode(&frame, &plane);
    let _ = Frame::parse(&payload, 1 << 20);
    let _ = Chunk::parse(&payload);
    change_directory(kinds, &changes);
});

/// Changes bytes of a chunk's directory and recomputes its checksum.
fn change_directory(kinds: usize, changes: &[(u16, u8)]) {
    let (_, frame) = &CASES[kinds].get_or_init(|| case(kinds));
    let mut chunk = Vec::new();
    write_chunk(&[&frame[..]; 2], &mut chunk).unwrap();
    for (at, value) in changes {
        chunk[8 + usize::from(*at) % 48] ^= value;
        let checksum = crc32fast::hash(&chunk[..56]);
        chunk[56..60].copy_from_slice(&checksum.to_le_bytes());
        let Ok(parsed) = Chunk::parse(&chunk) else { continue };
        for i in 0..2 {
            let (entry, bytes) = (parsed.entry(i).unwrap(), parsed.frame(i).unwrap());
            let frame = Frame::parse(bytes, usize::MAX).unwrap();
            let info = frame.info();
            let said = (entry.first_token, entry.tokens, entry.level, entry.lossless);
            assert_eq!(said, (info.first_token, info.tokens, info.level, info.lossless));
        }
    }
}

/// Offset of the index: two ids, then an entry for each of two blocks of two planes, with two tiles each.
const INDEX: usize = 64;
const INDEX_END: usize = INDEX + 8 + 4 * 16;

/// Recomputes the checksums; blocks outside the payload get the checksum of an empty slice.
fn mend(frame: &mut [u8]) {
    let mut start = 0;
    for entry in 0..4 {
        let at = INDEX + 8 + 16 * entry;
        let end = u64::from_le_bytes(frame[at..at + 8].try_into().unwrap()) as usize;
        let payload = &frame[INDEX_END + 4..];
        let checksum = crc32fast::hash(payload.get(start..end).unwrap_or(&[]));
        frame[at + 8..at + 12].copy_from_slice(&checksum.to_le_bytes());
        start = end;
    }
    let header = crc32fast::hash(&frame[..60]);
    frame[60..64].copy_from_slice(&header.to_le_bytes());
    let index = crc32fast::hash(&frame[INDEX..INDEX_END]);
    frame[INDEX_END..INDEX_END + 4].copy_from_slice(&index.to_le_bytes());
}

fn decode(bytes: &[u8], plane: &Plane<'_>) {
    let Ok(frame) = Frame::parse(bytes, 2 * CHANNELS * TOKENS) else { return };
    for block in 0..2 {
        let mut expected = None;
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            let mut out = vec![0.0; frame.info().tokens_of_block(block).len() * CHANNELS];
            let result = frame.decode_block_into_with(
                backend,
                plane,
                BlockIndex { layer: 0, side: Side::Keys, block },
                None,
                &mut out,
            );
            assert!(result.is_err() || out.iter().all(|x| x.is_finite()));
            let result = result.map(|()| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            assert_eq!(expected.get_or_insert_with(|| result.clone()), &result);
        }
    }
}
