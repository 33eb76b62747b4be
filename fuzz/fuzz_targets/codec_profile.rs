//! Any bytes are refused as a profile, or are one that encodes and decodes.
#![no_main]

use codec_core::{PlaneProfile, decode_into, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| {
    let (mut bytes, rows) = input;
    // Half of the inputs get a valid checksum, so that the rest is reached.
    if let Some((body, _)) = bytes.split_last_chunk::<4>().filter(|_| rows.len() % 2 == 0) {
        let checksum = crc32(body).to_le_bytes();
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&checksum);
    }
    let Ok(profile) = PlaneProfile::from_bytes(&bytes) else { return };
    let plane = profile.plane().unwrap();
    let tokens = rows.len() / profile.channels();
    let rows: Vec<f32> = rows[..tokens * profile.channels()].iter().map(|&x| f32::from(x) - 128.0).collect();
    let mut frame = Vec::new();
    encode(&plane, &rows, &mut frame).unwrap();
    decode_into(&plane, &frame, &mut vec![0.0; rows.len()]).unwrap();
});

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8)
            .fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (0_u32.wrapping_sub(crc & 1))))
    })
}
