//! Profiles with changed bytes are rejected, or parse to one that round-trips through its bytes and decodes
//! what it encodes.
#![no_main]

use std::sync::OnceLock;

use codec_core::*;
use libfuzzer_sys::fuzz_target;

const TOKENS: usize = 12;
const CHANNELS: usize = 6;
/// Length of the header, before the planes.
const HEADER: usize = 28;

fn rows() -> Vec<f32> {
    (0..TOKENS * CHANNELS).map(|i| (i as f32).cos() * (1 + i % 7) as f32).collect()
}

/// Three levels of two layers: one without loss, and two that share their transforms, a square one of keys
/// and one to leading coefficients of the last values.
static PROFILE: OnceLock<Vec<u8>> = OnceLock::new();

fn profile() -> Vec<u8> {
    let info = ModelInfo { model_id: 1, layers: 2, heads: 2, head_dim: 3, keys_rotated: false };
    let map: Vec<f32> = (0..18).map(|i| if i % 9 % 4 == 0 { 1.0 } else { 0.0 }).collect();
    let transform = std::sync::Arc::new(TransformBuf::new(3, map.clone(), map).unwrap());
    let (rows, place) = (rows(), Place::nhd(2, 3));
    let layers = [LayerRows { keys: &rows, values: &rows }; 2];
    let leading = std::sync::Arc::new(TransformBuf::leading(6, 2, vec![0.5; 12], vec![0.5; 12]).unwrap());
    let fit = |_, layer, side, sample: &[f32]| {
        let transform = match (layer, side) {
            (_, Side::Keys) => Some(transform.clone()),
            (0, Side::Values) => None,
            _ => Some(leading.clone()),
        };
        PlaneBuf::fit(sample, CHANNELS, transform, &FitOptions::default())
    };
    let lossless = Profile::fit_lossless(info, ElementType::F16, TOKENS, &layers, &place).unwrap();
    Profile::join([lossless, Profile::fit(info, 2, TOKENS, &layers, &place, fit).unwrap()])
        .unwrap()
        .to_bytes()
}

/// Recomputes the checksums of the planes, located by their lengths, and the overall checksum.
fn mend(bytes: &mut [u8]) {
    let end = bytes.len() - 4;
    let mut at = HEADER;
    while let Some(length) = bytes[..end].get(at + 1..at + 5) {
        let next = at + 5 + u32::from_le_bytes(length.try_into().unwrap()) as usize;
        let Some(body) = bytes[..end].get_mut(at + 5..next).filter(|plane| plane.len() >= 4) else { break };
        let (body, checksum) = body.split_at_mut(next - at - 9);
        checksum.copy_from_slice(&crc32fast::hash(body).to_le_bytes());
        at = next;
    }
    let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&checksum);
}

fuzz_target!(|input: (Vec<(u16, u8)>, u16)| {
    let (changes, cut) = input;
    let mut bytes = PROFILE.get_or_init(profile).clone();
    if cut > 0 {
        bytes.truncate((usize::from(cut) % bytes.len()).max(HEADER + 4));
    }
    for (at, value) in changes {
        let at = usize::from(at) % (bytes.len() - 4);
        bytes[at] ^= value;
    }
    mend(&mut bytes);
    let Ok(profile) = Profile::from_bytes(&bytes) else { return };
    assert_eq!(Profile::from_bytes(&profile.to_bytes()).as_ref(), Ok(&profile));
    (0..profile.levels().min(2)).for_each(|level| round_trip(&profile, level as u8));
});

fn round_trip(profile: &Profile, level: u8) {
    let (info, rows) = (profile.frame_info(level, TOKENS), rows());
    let place = Place::nhd(info.heads, info.head_dim);
    let layers = vec![LayerRows { keys: &rows[..], values: &rows[..] }; info.layers];
    let mut bytes = vec![0; info.max_frame_len()];
    // A mean or a map of 1e38 may push values out of range, and other heads need other rows.
    let Ok(len) = profile.encode_into(&info, &layers, &place, &mut bytes) else { return };
    let frame = Frame::parse(&bytes[..len], info.elements()).unwrap();
    let (mut keys, mut values) = (rows.clone(), rows.clone());
    for layer in 0..info.layers {
        match profile.decode_layer_to(&frame, layer, None, &place, &mut keys, &mut values) {
            Ok(()) => assert!(keys.iter().chain(&values).all(|x| x.is_finite())),
            Err(error) => assert_eq!(error, Error::NotFinite { what: "decoded values" }),
        }
    }
    if info.lossless {
        // The rows are now elements of 16 bits, which come back as they are.
        let layers = vec![LayerRows { keys: &keys[..], values: &values[..] }; info.layers];
        let mut again = vec![0; info.max_frame_len()];
        assert_eq!(profile.encode_into(&info, &layers, &place, &mut again), Ok(len));
        assert_eq!(again[..len], bytes[..len]);
    }
}
