//! Profiles of whole models: they encode the same bytes as their planes, and mismatches are errors.

use std::sync::Arc;

use codec_core::*;
use half::f16;

const MODEL: ModelInfo =
    ModelInfo { model_id: 0x0123_4567_89ab_cdef, layers: 3, heads: 2, head_dim: 6, keys_rotated: false };
const TOKENS: usize = 70;
const CHANNELS: usize = 12;

/// Each plane has its own scales and means.
fn tensors() -> Vec<Vec<f16>> {
    let mut state = 5_u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    let mut plane = |p: usize| -> Vec<f16> {
        let element = |i: usize| noise() * (1 + (i + p) % 5) as f32 + (i % CHANNELS + 2 * p) as f32;
        (0..TOKENS * CHANNELS).map(element).map(f16::from_f32).collect()
    };
    (0..2 * MODEL.layers).map(&mut plane).collect()
}

fn rows(tensors: &[Vec<f16>]) -> Vec<LayerRows<'_, f16>> {
    tensors.chunks_exact(2).map(|layer| LayerRows { keys: &layer[0], values: &layer[1] }).collect()
}

const PLACE: Place<'static> = Place::nhd(MODEL.heads, MODEL.head_dim);

fn transform() -> Arc<TransformBuf> {
    let map: Vec<f32> = (0..72).map(|i| if i / 6 % 6 == i % 6 { 1.0 } else { 0.0 }).collect();
    Arc::new(TransformBuf::new(6, map.clone(), map).unwrap())
}

fn fit_plane(level: usize, layer: usize, side: Side, sample: &[f32]) -> Result<PlaneBuf, Error> {
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations([0.1, 0.5][level] * (1 + layer) as f32),
        models: ModelKind::Tables,
        coder: Coder::InterleavedRans,
    };
    let predictors = [PredictorKind::Mean, PredictorKind::Previous];
    let transform = (side == Side::Keys).then(transform);
    PlaneBuf::fit_best(sample, CHANNELS, transform, &options, &predictors)
}

fn profile(tensors: &[Vec<f16>]) -> Profile {
    Profile::fit(MODEL, 2, TOKENS, &rows(tensors), &PLACE, fit_plane).unwrap()
}

fn encoded(profile: &Profile, info: &FrameInfo, tensors: &[Vec<f16>]) -> Vec<u8> {
    let mut bytes = vec![0; info.max_frame_len()];
    let len = profile.encode_into(info, &rows(tensors), &PLACE, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

#[test]
fn a_profile_is_its_planes() {
    let tensors = tensors();
    let profile = profile(&tensors);
    assert_eq!((profile.levels(), *profile.info()), (2, MODEL));
    let widened: Vec<Vec<f32>> =
        tensors.iter().map(|rows| rows.iter().map(|x| x.to_f32()).collect()).collect();
    let slices: Vec<&[f32]> = widened.iter().map(Vec::as_slice).collect();
    for level in 0..2 {
        let mut planes = vec![];
        for (i, sample) in widened.iter().enumerate() {
            let (layer, side) = (i / 2, [Side::Keys, Side::Values][i % 2]);
            planes.push(fit_plane(level, layer, side, sample).unwrap());
            assert_eq!(profile.plane(level, layer, side).unwrap(), &planes[i]);
        }
        let info = FrameInfo { first_token: 9, block_tokens: 32, ..profile.frame_info(level as u8, TOKENS) };
        let views: Vec<_> = planes.iter().map(PlaneBuf::view).collect();
        let mut expected = vec![];
        encode_frame(&FrameInfo { element: ElementType::F16, ..info }, &views, &slices, &mut expected)
            .unwrap();
        let bytes = encoded(&profile, &info, &tensors);
        assert_eq!(bytes, expected);

        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        let place = Place::hnd(TOKENS, MODEL.head_dim);
        let (mut keys, mut values) = (vec![0.0_f32; tensors[0].len()], vec![0.0_f32; tensors[0].len()]);
        for layer in 0..MODEL.layers {
            profile.decode_layer_to(&frame, layer, None, &place, &mut keys, &mut values).unwrap();
            for (side, out) in [(Side::Keys, &keys), (Side::Values, &values)] {
                let mut expected = vec![0.0; out.len()];
                let plane = profile.plane(level, layer, side).unwrap().view();
                frame.decode_plane_to(&plane, layer, side, None, &place, &mut expected).unwrap();
                assert_eq!(out, &expected);
            }
        }
    }
}

#[test]
fn bytes_return_the_profile_and_transforms_are_stored_once() {
    let profile = profile(&tensors());
    let bytes = profile.to_bytes();
    let read = Profile::from_bytes(&bytes).unwrap();
    assert_eq!(read, profile);
    assert_eq!(read.to_bytes(), bytes);
    let planes = (0..2).flat_map(|level| (0..3).map(move |layer| (level, layer)));
    let lone: usize = planes
        .flat_map(|(level, layer)| [Side::Keys, Side::Values].map(|side| (level, layer, side)))
        .map(|(level, layer, side)| {
            let parts = profile.plane(level, layer, side).unwrap().view().parts();
            let shared = level == 1 && parts.transform.is_some();
            let factors =
                if let Predictor::Previous(factors) = parts.predictor { 4 * factors.len() } else { 0 };
            let transform = if parts.transform.is_some() && !shared { 8 * 72 } else { 0 };
            5 + 20 + 4 * 12 + factors + 4 * 12 + 8 + transform + 12 * 130 + 4
        })
        .sum();
    assert_eq!(bytes.len(), 28 + lone + 4);
    let mut damaged = bytes.clone();
    for at in 0..bytes.len() {
        damaged[at] ^= 1 << (at % 8);
        assert!(Profile::from_bytes(&damaged).is_err(), "byte {at}");
        damaged[at] = bytes[at];
        assert!(Profile::from_bytes(&bytes[..at]).is_err(), "cut at {at}");
    }
}

/// Any byte changed under a valid outer checksum: planes have their own, the header is compared.
#[test]
fn forged_headers_are_refused_or_have_other_models() {
    let bytes = profile(&tensors()).to_bytes();
    let forge = |at: usize, value: u8| {
        let mut forged = bytes[..bytes.len() - 4].to_vec();
        forged[at] = value;
        let checksum = crc32fast::hash(&forged).to_le_bytes();
        forged.extend_from_slice(&checksum);
        Profile::from_bytes(&forged)
    };
    assert_eq!(forge(5, 2), Err(Error::BadField { what: "position encoding of keys" }));
    assert_eq!(forge(6, 0), Err(Error::BadField { what: "number of levels" }));
    assert_eq!(forge(7, 2), Err(Error::BadField { what: "number of levels" }));
    assert_eq!(forge(6, 3), Err(Error::Truncated));
    assert_eq!(forge(6, 1), Err(Error::TrailingBytes));
    assert_eq!(forge(8, 0), Err(Error::Zero { what: "layers" }));
    assert!(forge(11, 255).is_err()); // 4 G layers: the second level's transforms are at the first
    assert_eq!(forge(12, 3), Err(Error::Length { what: "channels of a plane", expected: 18, actual: 12 }));
    assert_eq!(forge(28, 1), Err(Error::BadField { what: "shared transform" }));
    assert_eq!(forge(28, 2), Err(Error::BadMagic)); // no plane without loss
    assert_eq!(forge(28, 3), Err(Error::BadField { what: "kind of a plane" }));
    assert_eq!(forge(32, 255), Err(Error::Truncated));
    assert_ne!(forge(20, 1).unwrap().info().model_id, MODEL.model_id);
    assert_eq!(Profile::new(MODEL, vec![]), Err(Error::Zero { what: "levels" }));
}

/// Recomputes the checksums of the planes, found by their lengths, and the checksum of the whole.
fn mend(bytes: &mut [u8]) {
    const HEADER: usize = 28;
    let end = bytes.len() - 4;
    let mut at = HEADER;
    while let Some(length) = bytes[..end].get(at + 1..at + 5) {
        let next = at + 5 + u32::from_le_bytes(length.try_into().unwrap()) as usize;
        let Some(plane) = bytes[..end].get_mut(at + 5..next).filter(|plane| plane.len() >= 4) else { break };
        let (body, checksum) = plane.split_at_mut(next - at - 9);
        checksum.copy_from_slice(&crc32fast::hash(body).to_le_bytes());
        at = next;
    }
    let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&checksum);
}

/// Changed bytes under valid checksums, also of planes, give an error or a profile that encodes and decodes.
#[test]
fn forged_profiles_are_refused_or_work() {
    let tensors = tensors();
    forge(&with_lossless(&tensors).to_bytes(), &rows(&tensors));
}

fn forge(bytes: &[u8], rows: &[LayerRows<'_, f16>]) {
    let mut state = 11_u32;
    let mut random = |n: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((u64::from(state >> 4) * n as u64) >> 28) as usize
    };
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mut forged = bytes.to_vec();
        for _ in 0..=random(2) {
            // Headers and first fields of planes are more likely to give valid fields.
            let at = if random(2) == 0 { random(bytes.len() - 4) } else { random(120) };
            forged[at] ^= 1 << random(8);
        }
        mend(&mut forged);
        let Ok(profile) = Profile::from_bytes(&forged) else {
            refused += 1;
            continue;
        };
        taken += 1;
        assert_eq!(Profile::from_bytes(&profile.to_bytes()).as_ref(), Ok(&profile));
        for level in 0..2 {
            let info = profile.frame_info(level, TOKENS);
            let mut frame = vec![0; info.max_frame_len()];
            // A map of 1e38 takes values out of range.
            let Ok(len) = profile.encode_into(&info, rows, &PLACE, &mut frame) else { continue };
            let frame = Frame::parse(&frame[..len], info.elements()).unwrap();
            let (mut keys, mut values) = (vec![0.0_f32; 840], vec![0.0_f32; 840]);
            match profile.decode_layer_to(&frame, 0, None, &PLACE, &mut keys, &mut values) {
                Ok(()) => assert!(keys.iter().chain(&values).all(|x| x.is_finite())),
                Err(error) => assert_eq!(error, Error::NotFinite { what: "decoded values" }),
            }
        }
    }
    assert!(taken > 200 && refused > 200, "{taken} {refused}");
}

#[test]
fn frames_of_other_models_levels_and_planes_are_refused() {
    let tensors = tensors();
    let profile = profile(&tensors);
    let info = profile.frame_info(0, TOKENS);
    let decode = |bytes: &[u8]| {
        let frame = Frame::parse(bytes, info.elements()).unwrap();
        let (mut keys, mut values) = (vec![f16::ZERO; 840], vec![f16::ZERO; 840]);
        profile.decode_layer_to(&frame, 1, None, &PLACE, &mut keys, &mut values)
    };
    let planes = |order: [(usize, Side); 6]| order.map(|(l, side)| profile.plane(0, l, side).unwrap().view());
    let (k, v) = (Side::Keys, Side::Values);
    let slices: Vec<Vec<f32>> =
        tensors.iter().map(|rows| rows.iter().map(|x| x.to_f32()).collect()).collect();
    let slices: Vec<&[f32]> = slices.iter().map(Vec::as_slice).collect();
    let encode = |info: &FrameInfo, order| {
        let mut bytes = vec![];
        encode_frame(info, &planes(order), &slices, &mut bytes).unwrap();
        bytes
    };
    let order = [(0, k), (0, v), (1, k), (1, v), (2, k), (2, v)];
    assert_eq!(decode(&encode(&info, order)), Ok(()));
    // Keys and values swapped, and layers swapped.
    let swapped = [(0, v), (0, k), (1, v), (1, k), (2, v), (2, k)];
    assert_eq!(decode(&encode(&info, swapped)), Err(Error::WrongPlane));
    let swapped = [(1, k), (1, v), (0, k), (0, v), (2, k), (2, v)];
    assert_eq!(decode(&encode(&info, swapped)), Err(Error::WrongPlane));
    // Another level than the header's, a level that does not exist, and another model.
    assert_eq!(decode(&encode(&FrameInfo { level: 1, ..info }, order)), Err(Error::WrongPlane));
    let third = FrameInfo { level: 2, ..info };
    assert_eq!(decode(&encode(&third, order)), Err(Error::OutOfBounds { what: "level" }));
    let others = [FrameInfo { model_id: 7, ..info }, FrameInfo { keys_rotated: true, ..info }];
    let mut out = vec![0; info.max_frame_len()];
    for other in others {
        assert_eq!(decode(&encode(&other, order)), Err(Error::WrongModel));
        assert_eq!(profile.encode_into(&other, &rows(&tensors), &PLACE, &mut out), Err(Error::WrongModel));
    }
    let other_heads = FrameInfo { heads: 1, head_dim: 12, ..info };
    assert_eq!(decode(&encode(&other_heads, order)), Err(Error::WrongModel));
    let level = profile.encode_into(&third, &rows(&tensors), &PLACE, &mut out);
    assert_eq!(level, Err(Error::OutOfBounds { what: "level" }));
    let lossless = FrameInfo { lossless: true, ..info };
    let lossless = profile.encode_into(&lossless, &rows(&tensors), &PLACE, &mut out);
    assert_eq!(lossless, Err(Error::WrongCoding { lossless: true }));
    let short = profile.encode_into(&info, &rows(&tensors)[..2], &PLACE, &mut out);
    assert_eq!(short, Err(Error::Length { what: "rows", expected: 3, actual: 2 }));
    assert!(profile.plane(0, 3, k).is_err() && profile.plane(2, 0, k).is_err());
}

/// A level without loss, before the lossy ones.
/// A transform of both heads to their first coefficients.
fn leading_transform() -> Arc<TransformBuf> {
    let map =
        |columns: usize| (0..12 * 5).map(|i| if i / columns == i % columns { 1.0 } else { 0.0 }).collect();
    Arc::new(TransformBuf::leading(12, 5, map(5), map(12)).unwrap())
}

/// Transforms to leading coefficients are stored once for all levels, too, and refused where they contradict
/// their plane.
#[test]
fn forged_leading_transforms_are_refused_or_work() {
    let tensors = tensors();
    let fit = |level: usize, _, _, sample: &[f32]| {
        let steps = Steps::Deviations([0.1, 0.5][level]);
        PlaneBuf::fit(
            sample,
            CHANNELS,
            Some(leading_transform()),
            &FitOptions { steps, ..FitOptions::default() },
        )
    };
    let leading = Profile::fit(MODEL, 2, TOKENS, &rows(&tensors), &PLACE, fit).unwrap();
    let bytes = leading.to_bytes();
    assert_eq!(Profile::from_bytes(&bytes).as_ref(), Ok(&leading));
    // Header, mean, steps, centroids, families and checksum of a plane, and once the maps.
    let plane = 5 + 24 + 4 * 12 + 4 * 5 + 8 + 5 + 4;
    assert_eq!(bytes.len(), 28 + 12 * plane + 6 * 8 * 60 + 4);
    forge(&bytes, &rows(&tensors));
}

fn with_lossless(tensors: &[Vec<f16>]) -> Profile {
    let lossless = Profile::fit_lossless(MODEL, ElementType::F16, TOKENS, &rows(tensors), &PLACE).unwrap();
    Profile::join([lossless, profile(tensors)]).unwrap()
}

#[test]
fn a_level_without_loss_keeps_every_bit() {
    let sample = tensors();
    let profile = with_lossless(&sample);
    assert_eq!(Profile::from_bytes(&profile.to_bytes()).as_ref(), Ok(&profile));
    // NaN with every payload, infinities, zeros of both signs, subnormals, among ordinary values.
    let tensors: Vec<Vec<f16>> = sample
        .iter()
        .map(|rows| rows.iter().enumerate())
        .map(|rows| {
            rows.map(|(i, &x)| if i % 9 == 0 { f16::from_bits((i * 2731) as u16) } else { x }).collect()
        })
        .collect();
    let info = FrameInfo { block_tokens: 32, ..profile.frame_info(0, TOKENS) };
    assert!(info.lossless && info.element == ElementType::F16);
    let bytes = encoded(&profile, &info, &tensors);
    let frame = Frame::parse(&bytes, info.elements()).unwrap();
    let bits = |rows: &[f16]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (layer, tensors) in tensors.chunks_exact(2).enumerate() {
        let (mut keys, mut values) = (vec![f16::ZERO; 840], vec![f16::ZERO; 840]);
        profile.decode_layer_to(&frame, layer, None, &PLACE, &mut keys, &mut values).unwrap();
        assert_eq!((bits(&keys), bits(&values)), (bits(&tensors[0]), bits(&tensors[1])));
        let one = profile.layer(layer).unwrap();
        for (side, id) in [Side::Keys, Side::Values].map(|side| (side, frame.plane_id(layer, side))) {
            assert_eq!((profile.plane_id(0, layer, side), one.plane_id(0, 0, side)), (id, id));
            assert_eq!(profile.lossless_plane(0, layer, side).map(LosslessPlaneBuf::id), id);
        }
        let mut wide = vec![0.0_f32; 840];
        profile.decode_layer_to(&frame, layer, None, &PLACE, &mut wide, &mut vec![0.0; 840]).unwrap();
        let exact = |(x, y): (&f32, &f16)| x.to_bits() == y.to_f32().to_bits() || x.is_nan() && y.is_nan();
        assert!(wide.iter().zip(&tensors[0]).all(exact));
    }
}

#[test]
fn rows_of_f32_are_rounded_and_keys_rotated_without_loss() {
    let sample = tensors();
    let profile = with_lossless(&sample);
    let wide: Vec<Vec<f32>> =
        sample.iter().map(|rows| rows.iter().map(|x| x.to_f32() * (1.0 + 1e-5)).collect()).collect();
    let rows: Vec<_> = wide.chunks_exact(2).map(|l| LayerRows { keys: &l[0][..], values: &l[1] }).collect();
    let info = profile.frame_info(0, TOKENS);
    let mut bytes = vec![0; info.max_frame_len()];
    let len = profile.encode_into(&info, &rows, &PLACE, &mut bytes).unwrap();
    let frame = Frame::parse(&bytes[..len], info.elements()).unwrap();
    let angles: Vec<f32> = (0..TOKENS * 3).map(|i| i as f32 * 0.1).collect();
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|x| (x.cos(), x.sin())).unzip();
    let rope = RopeTable::halves(6, &cos, &sin).unwrap();
    let decode = |rope: Option<&RopeTable<'_>>| {
        let (mut keys, mut values) = (vec![0.0_f32; 840], vec![0.0_f32; 840]);
        profile.decode_layer_to(&frame, 2, rope, &PLACE, &mut keys, &mut values).map(|()| (keys, values))
    };
    let (keys, values) = decode(None).unwrap();
    let rounded = |x: &f32| f16::from_f32(*x).to_f32();
    assert!(keys.iter().zip(&wide[4]).chain(values.iter().zip(&wide[5])).all(|(x, y)| *x == rounded(y)));
    let rotated = decode(Some(&rope)).unwrap().0;
    for (t, (plain, rotated)) in keys.chunks_exact(12).zip(rotated.chunks_exact(12)).enumerate() {
        let (a, b, i) = (plain[1], plain[4], 3 * t + 1);
        assert_eq!((rotated[1], rotated[4]), (a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]));
    }
}

#[test]
fn levels_without_loss_refuse_other_types_codings_and_models() {
    let tensors = tensors();
    let (lossy, profile) = (profile(&tensors), with_lossless(&tensors));
    assert_eq!((profile.levels(), profile.frame_info(1, TOKENS).lossless), (3, false));
    let (k, coding) = (Side::Keys, |lossless| Error::WrongCoding { lossless });
    assert_eq!(profile.plane(0, 0, k).err(), Some(coding(true)));
    assert_eq!(profile.lossless_plane(1, 0, k).err(), Some(coding(false)));
    assert_eq!(profile.plane(1, 2, k), lossy.plane(0, 2, k));
    let info = profile.frame_info(0, TOKENS);
    let mut out = vec![0; info.max_frame_len()];
    let not = FrameInfo { lossless: false, ..info };
    assert_eq!(profile.encode_into(&not, &rows(&tensors), &PLACE, &mut out), Err(coding(false)));
    let brain = vec![half::bf16::ONE; 840];
    let other = [LayerRows { keys: &brain[..], values: &brain }; 3];
    assert_eq!(profile.encode_into(&info, &other, &PLACE, &mut out), Err(Error::WrongPlane));
    let bytes = encoded(&profile, &info, &tensors);
    let frame = Frame::parse(&bytes, info.elements()).unwrap();
    let (mut keys, mut values) = (brain.clone(), brain);
    let decoded = profile.decode_layer_to(&frame, 0, None, &PLACE, &mut keys, &mut values);
    assert_eq!(decoded, Err(Error::WrongPlane));
    let planes = |element| vec![LosslessPlaneBuf::fit(element, &[0; 24], 12).unwrap(); 3];
    let mixed = [planes(ElementType::F16), planes(ElementType::Bf16)].concat();
    assert!(matches!(Profile::lossless(MODEL, mixed), Err(Error::BadPlane { .. })));
    assert_eq!(Profile::join([lossy.clone(), lossy.layer(0).unwrap()]), Err(Error::WrongModel));
    assert_eq!(Profile::join([]), Err(Error::Zero { what: "levels" }));
    let fitted = Profile::fit_lossless(MODEL, ElementType::F32, TOKENS, &rows(&tensors), &PLACE);
    assert!(fitted.is_err() && lossy.layer(3).is_err());
}

#[cfg(feature = "rayon")]
#[test]
fn any_number_of_threads_fits_the_same_profile() {
    let tensors = tensors();
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let profile = profile(&tensors);
            let frame =
                encoded(&profile, &FrameInfo { block_tokens: 9, ..profile.frame_info(1, TOKENS) }, &tensors);
            let parsed = Frame::parse(&frame, usize::MAX).unwrap();
            let (mut keys, mut values) = (vec![f16::ZERO; 840], vec![f16::ZERO; 840]);
            profile.decode_layer_to(&parsed, 2, None, &PLACE, &mut keys, &mut values).unwrap();
            (profile.to_bytes(), frame, keys, values)
        })
    };
    assert_eq!(on(1), on(3));
}
