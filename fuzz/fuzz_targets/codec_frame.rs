//! Frames with any payload, and any bytes at all, decode to an error or to numbers.
#![no_main]

use codec_core::{FRAME_OVERHEAD, PlaneProfile, Predictor, decode_into, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, Vec<u8>)| {
    let (group, payload) = input;
    let predictor = if group == 0 { Predictor::Mean } else { Predictor::Anchor { group: group.into() } };
    let rows: Vec<f32> = (0..60).map(|i| (i as f32).cos()).collect();
    let profile = PlaneProfile::fit(&rows, 2, predictor, 0.3).unwrap();
    let plane = profile.plane().unwrap();
    let mut out = [0.0; 60];
    let _ = decode_into(&plane, &payload, &mut out);
    // The same bytes as the payload of a valid frame: past the checksum.
    let mut frame = Vec::new();
    encode(&plane, &rows, &mut frame).unwrap();
    frame.truncate(FRAME_OVERHEAD - 4);
    frame.extend_from_slice(&payload);
    frame.extend_from_slice(&crc32(&frame).to_le_bytes());
    let _ = decode_into(&plane, &frame, &mut out);
});

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8)
            .fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (0_u32.wrapping_sub(crc & 1))))
    })
}
