//! Arbitrary bytes are rejected as a plane or a lossless plane, or parse to one that serializes to the same
//! bytes. Planes encode and decode.
#![no_main]

use codec_core::*;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| {
    let (mut bytes, rows) = input;
    // Half of the inputs get a valid checksum, to reach the code after the check.
    if let Some((body, _)) = bytes.split_last_chunk::<4>().filter(|_| rows.len() % 2 == 0) {
        let checksum = crc32fast::hash(body).to_le_bytes();
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&checksum);
    }
    if let Ok(plane) = LosslessPlaneBuf::from_bytes(&bytes) {
        assert_eq!(plane.to_bytes(), bytes);
    }
    let Ok(plane) = PlaneBuf::from_bytes(&bytes) else { return };
    assert_eq!(plane.to_bytes(), bytes);
    let plane = plane.view();
    let channels = plane.channels();
    let tokens = rows.len() / channels;
    let rows: Vec<f32> = rows[..tokens * channels].iter().map(|&x| f32::from(x) - 128.0).collect();
    let info = FrameInfo { keys_rotated: true, block_tokens: 64, ..FrameInfo::new(1, 1, channels, tokens) };
    let mut frame = Vec::new();
    // A mean or a map of 1e38 may push values out of range, which must be an error.
    if encode_frame(&info, &[plane; 2], &[&rows[..]; 2], &mut frame).is_ok() {
        let frame = Frame::parse(&frame, usize::MAX).unwrap();
        let mut out = vec![0.0; rows.len()];
        match frame.decode_plane_into(&plane, 0, Side::Values, None, &mut out) {
            Ok(()) => assert!(out.iter().all(|x| x.is_finite())),
            // The inverse map may sum two infinities to a NaN.
            Err(error) => {
                assert_eq!(error, Error::NotFinite { what: "decoded values" });
                assert!(plane.parts().transform.is_some());
            }
        }
    }
});
