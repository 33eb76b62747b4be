//! Round trips within half a bin, and every damage is noticed.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use codec_core::{Error, FRAME_OVERHEAD, PlaneProfile, Predictor, decode_into, encode};
use proptest::prelude::*;

fn rows() -> impl Strategy<Value = (usize, Vec<f32>)> {
    (1_usize..6, 2_usize..60).prop_flat_map(|(channels, tokens)| {
        let value = prop_oneof![9 => -4.0_f32..4.0, 1 => -1e6_f32..1e6];
        (Just(channels), prop::collection::vec(value, channels * tokens))
    })
}

fn predictor() -> impl Strategy<Value = Predictor> {
    prop_oneof![Just(Predictor::Mean), (1_u16..12).prop_map(|group| Predictor::Anchor { group })]
}

proptest! {
    #[test]
    fn round_trip_is_within_half_a_bin((channels, rows) in rows(), predictor in predictor(), bin_size in 0.01_f32..3.0) {
        let profile = PlaneProfile::fit(&rows, channels, predictor, bin_size).unwrap();
        let profile = PlaneProfile::from_bytes(&profile.to_bytes()).unwrap();
        let plane = profile.plane().unwrap();
        let mut bytes = Vec::new();
        encode(&plane, &rows, &mut bytes).unwrap();
        let mut decoded = vec![0.0; rows.len()];
        decode_into(&plane, &bytes, &mut decoded).unwrap();
        let largest = rows.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
        for (i, (a, b)) in rows.iter().zip(&decoded).enumerate() {
            let column: Vec<f32> = rows.iter().skip(i % channels).step_by(channels).copied().collect();
            let spread = column.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
            // Half a bin is at most bin_size * spread (twice the deviation bound for deltas); an anchor's half step is largest / 254.
            prop_assert!((a - b).abs() <= bin_size * spread + largest / 253.0 + 1e-3, "{a} {b}");
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed(at in any::<prop::sample::Index>(), bit in 0_u32..8) {
        let rows: Vec<f32> = (0..90).map(|i| (i as f32).sin()).collect();
        let profile = PlaneProfile::fit(&rows, 3, Predictor::Mean, 0.5).unwrap();
        let plane = profile.plane().unwrap();
        let mut bytes = Vec::new();
        encode(&plane, &rows, &mut bytes).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(decode_into(&plane, &bytes, &mut [0.0; 90]).is_err());
        let mut stored = profile.to_bytes();
        let at = at % stored.len();
        stored[at] ^= 1 << bit;
        prop_assert!(PlaneProfile::from_bytes(&stored).is_err());
    }

    #[test]
    fn arbitrary_payloads_end_in_an_error_or_in_numbers(payload in prop::collection::vec(any::<u8>(), 0..200), group in 1_u16..5) {
        let rows: Vec<f32> = (0..60).map(|i| (i as f32).cos()).collect();
        let profile = PlaneProfile::fit(&rows, 2, Predictor::Anchor { group }, 0.3).unwrap();
        let plane = profile.plane().unwrap();
        let mut bytes = Vec::new();
        encode(&plane, &rows, &mut bytes).unwrap();
        let mut forged = bytes[..FRAME_OVERHEAD - 4].to_vec();
        forged.extend_from_slice(&payload);
        forged.extend_from_slice(&crc32(&forged).to_le_bytes());
        let _ = decode_into(&plane, &forged, &mut [0.0; 60]);
    }
}

/// Plain CRC-32, so that a forged frame passes the checksum and reaches the decoder.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8)
            .fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (0_u32.wrapping_sub(crc & 1))))
    })
}

#[test]
fn size_is_near_the_entropy() {
    // A fair four-sided die per channel costs two bits.
    let mut state = 1_u64;
    let rows: Vec<f32> = (0..4 * 5000)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 62) as f32) - 1.5
        })
        .collect();
    let profile = PlaneProfile::fit(&rows, 4, Predictor::Mean, 0.25).unwrap();
    let mut bytes = Vec::new();
    encode(&profile.plane().unwrap(), &rows, &mut bytes).unwrap();
    let bits = 8.0 * (bytes.len() - FRAME_OVERHEAD) as f64 / rows.len() as f64;
    assert!((1.99..2.25).contains(&bits), "{bits}");
}

#[test]
fn bad_input_is_an_error() {
    let rows = [1.0, 2.0, 3.0, 4.0];
    assert!(PlaneProfile::fit(&rows, 0, Predictor::Mean, 1.0).is_err());
    assert!(PlaneProfile::fit(&rows, 4, Predictor::Mean, 1.0).is_err());
    assert!(PlaneProfile::fit(&rows, 2, Predictor::Mean, 0.0).is_err());
    assert!(PlaneProfile::fit(&rows, 2, Predictor::Anchor { group: 0 }, 1.0).is_err());
    assert!(PlaneProfile::fit(&[f32::NAN; 4], 2, Predictor::Mean, 1.0).is_err());
    let profile = PlaneProfile::fit(&rows, 2, Predictor::Mean, 1.0).unwrap();
    let plane = profile.plane().unwrap();
    let mut bytes = vec![9];
    assert_eq!(encode(&plane, &[f32::INFINITY; 2], &mut bytes), Err(Error::NotFinite { what: "rows" }));
    assert_eq!(bytes, [9]);
    let mut frame = Vec::new();
    encode(&plane, &rows, &mut frame).unwrap();
    assert!(matches!(decode_into(&plane, &frame, &mut [0.0; 2]), Err(Error::Length { .. })));
    let other = PlaneProfile::fit(&rows, 2, Predictor::Mean, 2.0).unwrap();
    assert_eq!(decode_into(&other.plane().unwrap(), &frame, &mut [0.0; 4]), Err(Error::WrongProfile));
    for cut in 0..frame.len() {
        assert!(decode_into(&plane, &frame[..cut], &mut [0.0; 4]).is_err());
    }
}
