//! Values at the ends of the range of `f32`, constant channels, and forged side information give an error or
//! finite values.

use std::sync::Arc;

use codec_core::*;
use proptest::prelude::*;

use super::support::backends;

/// Any finite value, often 0 or near the largest.
fn finite() -> impl Strategy<Value = f32> {
    prop_oneof![
        Just(0.0_f32),
        (-1.0_f32..=1.0).prop_map(|x| x * f32::MAX),
        prop_oneof![Just(f32::MAX), Just(f32::MIN)],
        any::<u32>().prop_map(|bits| f32::from_bits(bits & 0xff7f_ffff)),
    ]
}

/// Valid steps of a plane, from the smallest to the largest.
fn step() -> impl Strategy<Value = f32> {
    (1_u32..253, 0_u32..1 << 23).prop_map(|(exponent, mantissa)| f32::from_bits(exponent << 23 | mantissa))
}

/// The parameters of a plane that are not checked separately.
#[derive(Clone, Debug)]
struct Parts {
    mean: Vec<f32>,
    factors: Vec<f32>,
    steps: Vec<f32>,
    families: Vec<u8>,
    maps: Option<TransformBuf>,
    predictor: u8,
    group: u16,
    levels: u8,
}

impl Parts {
    /// Scaling by token excludes prediction and transform.
    fn plane(&self) -> Plane<'_> {
        let maps = self.maps.as_ref().filter(|_| self.levels == 0).map(|maps| maps.view());
        Plane::new(PlaneParts {
            transform: maps,
            mean: &self.mean,
            predictor: match self.predictor {
                1 if self.levels == 0 => Predictor::Previous(&self.factors),
                2 if self.levels == 0 => Predictor::Anchor { group: self.group },
                _ => Predictor::Mean,
            },
            scaling: match self.levels {
                0 => Scaling::Steps(&self.steps),
                levels => Scaling::TokenAbsmax { levels },
            },
            centroids: [0.2, -0.1],
            models: Models::families(&self.families),
            coder: Coder::InterleavedRans,
        })
        .unwrap()
    }
}

fn parts() -> impl Strategy<Value = Parts> {
    (1_usize..40).prop_flat_map(|channels| {
        let each = |n: usize| prop::collection::vec(finite(), n);
        let maps = prop::option::of((each(channels * channels), each(channels * channels)));
        (
            (each(channels), prop::collection::vec(-1.0_f32..=1.0, channels)),
            prop::collection::vec(step(), channels),
            prop::collection::vec(any::<u8>(), channels),
            maps.prop_map(move |maps| maps.map(|(a, b)| TransformBuf::new(channels, a, b).unwrap())),
            (0_u8..3, 1_u16..6, prop_oneof![Just(0_u8), 1_u8..128]),
        )
            .prop_map(|((mean, factors), steps, families, maps, (predictor, group, levels))| Parts {
                mean,
                factors,
                steps,
                families,
                maps,
                predictor,
                group,
                levels,
            })
    })
}

/// The coefficients to quantize, by FORMAT.md.
fn coefficients(plane: &Plane<'_>, rows: &[f32]) -> Vec<f32> {
    let channels = plane.channels();
    let centred =
        rows.chunks_exact(channels).map(|row| row.iter().zip(plane.parts().mean).map(|(x, m)| x - m));
    let Some(transform) = plane.parts().transform else { return centred.flatten().collect() };
    centred
        .flat_map(|row| {
            let mut sum = vec![0.0_f32; channels];
            for (x, map) in row.zip(transform.forward().chunks_exact(channels)).filter(|(x, _)| *x != 0.0) {
                sum.iter_mut().zip(map).for_each(|(sum, m)| *sum += x * m);
            }
            sum
        })
        .collect()
}

fn info(channels: usize, tokens: usize) -> FrameInfo {
    FrameInfo { block_tokens: 16, ..FrameInfo::new(1, 1, channels, tokens) }
}

/// Decodes the keys of layer 0 on every backend; all give the same result.
fn decode(bytes: &[u8], plane: &Plane<'_>) -> Result<Vec<f32>, Error> {
    let frame = Frame::parse(bytes, usize::MAX)?;
    let mut results = backends().map(|backend| {
        let mut out = vec![f32::NAN; frame.info().tokens * plane.channels()];
        let result = frame.decode_plane_into_with(backend, plane, 0, Side::Keys, None, &mut out);
        result.map(|()| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    });
    let first = results.next().unwrap();
    assert!(results.all(|other| other == first), "backends differ");
    first.map(|bits| bits.into_iter().map(f32::from_bits).collect())
}

/// Changes the first block of the keys of a frame of one layer, and recomputes the checksums.
fn with_changed_block(bytes: &[u8], plane: &Plane<'_>, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let index = BlockIndex { layer: 0, side: Side::Keys, block: 0 };
    let place = Frame::parse(bytes, usize::MAX).unwrap().block_range(index).unwrap();
    let mut bytes = bytes.to_vec();
    change(&mut bytes[place.clone()]);
    let checksum = crc32fast::hash(&bytes[place]);
    bytes[80..84].copy_from_slice(&checksum.to_le_bytes());
    mend_index(&mut bytes, plane.channels());
    bytes
}

/// Recomputes the checksum of the index of a frame of one layer.
fn mend_index(bytes: &mut [u8], channels: usize) {
    let tokens = u32::from_le_bytes(bytes[32..36].try_into().unwrap()) as usize;
    let end = 64 + 2 * (4 + tokens.div_ceil(16) * (12 + 2 * channels.div_ceil(LANES)));
    let checksum = crc32fast::hash(&bytes[64..end]);
    bytes[end..end + 4].copy_from_slice(&checksum.to_le_bytes());
}

proptest! {
    #[test]
    fn finite_rows_are_refused_or_decode_to_finite_numbers(
        parts in parts(),
        numbers in prop::collection::vec(finite(), 40..400),
        near in any::<bool>(),
    ) {
        let plane = parts.plane();
        let channels = plane.channels();
        let tokens = numbers.len() / channels;
        // In half of the cases, rows are a few steps from the mean, where no bin is out of range.
        let rows: Vec<f32> = numbers[..tokens * channels].iter().enumerate().map(|(i, x)| {
            let (mean, step) = (parts.mean[i % channels], parts.steps[i % channels]);
            if near { (mean + x / f32::MAX * 9.0 * step).clamp(f32::MIN, f32::MAX) } else { *x }
        }).collect();
        let finite = coefficients(&plane, &rows).iter().all(|x| x.is_finite());
        let mut bytes = vec![];
        let info = info(channels, tokens);
        let result = encode_frame(&info, &[plane; 2], &[&rows[..]; 2], &mut bytes);
        if !finite {
            prop_assert!(matches!(result, Err(Error::OutOfRange { .. })), "{result:?}");
        }
        if result.is_ok() {
            match decode(&bytes, &plane) {
                Ok(out) => prop_assert!(out.iter().all(|x| x.is_finite())),
                // A map may produce a NaN from two infinities.
                Err(error) => {
                    prop_assert_eq!(error, Error::NotFinite { what: "decoded values" });
                    prop_assert!(plane.parts().transform.is_some());
                }
            }
        }
    }

    #[test]
    fn forged_side_information_gives_an_error_or_finite_values(
        parts in parts(),
        small in prop::collection::vec(-1.0_f32..1.0, 40..400),
        (words, at) in (prop::collection::vec(any::<u16>(), 1..8), any::<prop::sample::Index>()),
    ) {
        let parts = Parts { predictor: 2, ..parts };
        let plane = parts.plane();
        let channels = plane.channels();
        let tokens = small.len() / channels;
        let rows: Vec<f32> = parts.mean.iter().cycle().zip(&small[..tokens * channels]).map(|(mean, x)| mean + x)
            .collect();
        let mut bytes = vec![];
        let result = encode_frame(
            &info(channels, tokens), &[plane; 2], &[&rows[..]; 2], &mut bytes,
        );
        if result.is_ok() {
            let bytes = with_changed_block(&bytes, &plane, |block| {
                let tokens = tokens.min(16);
                // Scales of anchors have their exponents in the third and fourth byte, steps of tokens in
                // both of theirs.
                let places: Vec<usize> = match parts.levels {
                    0 => (0..tokens.div_ceil(parts.group.into())).map(|i| i * (4 + channels) + 2).collect(),
                    _ => (0..tokens).map(|t| 2 * t).collect(),
                };
                for (i, word) in words.iter().enumerate() {
                    let at = places[(at.index(places.len()) + i) % places.len()];
                    // Half of them among the largest, the infinities and NaN.
                    let word = if word % 2 == 0 { word | 0x7f00 } else { *word };
                    block[at..at + 2].copy_from_slice(&word.to_le_bytes());
                }
            });
            if let Ok(out) = decode(&bytes, &plane) {
                prop_assert!(out.iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn channels_that_do_not_vary_are_fitted_and_come_back(
        constants in prop::collection::vec(prop_oneof![Just(0.0_f32), -1e30_f32..1e30, -2.0_f32..2.0], 1..40),
        (tokens, kinds, rotated) in (2_usize..40, 0_usize..72, any::<bool>()),
        later in -1e3_f32..1e3,
    ) {
        let channels = constants.len();
        let rows = constants.repeat(tokens);
        let predictor = [
            PredictorKind::Mean,
            PredictorKind::Previous,
            PredictorKind::Anchor { group: 5 },
            PredictorKind::None,
        ][kinds % 4];
        let plain = matches!(predictor, PredictorKind::Mean | PredictorKind::None);
        let options = FitOptions {
            predictor,
            steps: if plain && kinds >= 48 { Steps::TokenAbsmax(15) } else { Steps::Deviations(0.5) },
            models: [ModelKind::Families, ModelKind::Tables, ModelKind::ContextTables][kinds / 4 % 3],
            coder: if kinds / 12 % 2 == 1 { Coder::Range } else { Coder::InterleavedRans },
        };
        let mut identity = vec![0.0; channels * channels];
        identity.iter_mut().step_by(channels + 1).for_each(|x| *x = 1.0);
        let maps = Arc::new(TransformBuf::new(channels, identity.clone(), identity).unwrap());
        let maps = (rotated && options.steps == Steps::Deviations(0.5)).then_some(maps);
        let plane = PlaneBuf::fit(&rows, channels, maps, &options).unwrap();
        let plane = plane.view();
        if let Scaling::Steps(steps) = plane.parts().scaling {
            prop_assert!(steps.iter().all(|step| step.is_normal() && *step > 0.0));
        }
        // The sample itself, and rows that vary: these are far from the mean in steps, so their tiles are
        // coarse.
        let varying: Vec<f32> = rows.iter().enumerate().map(|(i, x)| x + later * (i % 3) as f32).collect();
        for (rows, tolerance) in [(&rows, 0.1), (&varying, 1.0)] {
            let mut bytes = vec![];
            encode_frame(
                &info(channels, tokens), &[plane; 2], &[&rows[..]; 2], &mut bytes,
            ).unwrap();
            let out = decode(&bytes, &plane).unwrap();
            let largest = rows.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            for (a, b) in rows.iter().zip(&out) {
                prop_assert!((a - b).abs() <= tolerance * largest, "{a} {b}");
            }
        }
    }
}

/// Rows that leave the range of `f32` when the mean is subtracted, and when a map is applied.
#[test]
fn samples_that_leave_the_range_are_refused() {
    for predictor in [PredictorKind::Mean, PredictorKind::Previous, PredictorKind::Anchor { group: 2 }] {
        for (rows, map) in [
            ([1.0, f32::MAX, 1.0, f32::MAX, 1.0, f32::MAX, 1.0, f32::MIN], None),
            ([1.0, 1e30, 1.0, -1e30, 1.0, 1e30, 1.0, -1e30], Some([1.0, 0.0, 0.0, 1e10])),
        ] {
            let map = map.map(|map| Arc::new(TransformBuf::new(2, map.to_vec(), map.to_vec()).unwrap()));
            let (steps, models) = (Steps::Deviations(0.5), ModelKind::Tables);
            let options = FitOptions { predictor, steps, models, coder: Coder::InterleavedRans };
            assert_eq!(PlaneBuf::fit(&rows, 2, map, &options), Err(Error::OutOfRange { channel: 1 }));
        }
    }
}

/// A largest magnitude that its quantized form must not exceed.
#[test]
fn an_anchor_of_the_largest_number_comes_back() {
    let parts = Parts {
        mean: vec![0.0; 3],
        factors: vec![],
        steps: vec![1e37; 3],
        families: vec![20; 3],
        maps: None,
        predictor: 2,
        group: 1,
        levels: 0,
    };
    let plane = parts.plane();
    let rows = [f32::MAX, f32::MIN, 1e37];
    let mut bytes = vec![];
    encode_frame(&info(3, 1), &[plane; 2], &[&rows[..]; 2], &mut bytes).unwrap();
    let out = decode(&bytes, &plane).unwrap();
    assert!(rows.iter().zip(&out).all(|(a, b)| (a / 127.0 - b / 127.0).abs() < 1.1e34), "{out:?}");
}

/// The tiles of blocks that consist of anchors have no bytes and a length of 0.
#[test]
fn lengths_of_tiles_without_rows_are_zero() {
    let rows: Vec<f32> = (0..70 * 16).map(|i| (i as f32).sin()).collect();
    let options = FitOptions {
        predictor: PredictorKind::Anchor { group: 1 },
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let plane = PlaneBuf::fit(&rows, 70, None, &options).unwrap();
    let plane = plane.view();
    let mut bytes = vec![];
    encode_frame(&info(70, 16), &[plane; 2], &[&rows[..]; 2], &mut bytes).unwrap();
    decode(&bytes, &plane).unwrap();
    for at in 84..90 {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            mend_index(&mut bytes, 70);
            assert_eq!(decode(&bytes, &plane), Err(Error::Corrupt), "byte {at}, bit {bit}");
        }
    }
}

/// A tile keeps its rate and its precision if one of its channels is constant in the sample and varies later.
/// A step of 1e-12 took 16 bits per element, and the exponent that such steps need lost the other channels.
#[test]
fn channels_that_are_constant_in_the_sample_do_not_cost_their_tiles() {
    const CHANNELS: usize = 32;
    let mut state = 3_u32;
    let mut rows = |constant: bool| -> Vec<f32> {
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let mut element = |i: usize| match i % CHANNELS {
            5 if constant => 0.3,
            c => (noise() + noise() + noise()) * (1.0 + c as f32 / 32.0) + c as f32,
        };
        (0..256 * CHANNELS).map(&mut element).collect()
    };
    let (sample, varying) = (rows(true), rows(false));
    let bits = |sample: &[f32]| {
        let plane = PlaneBuf::fit(sample, CHANNELS, None, &FitOptions::default()).unwrap();
        let (info, mut bytes) = (FrameInfo::new(1, 1, CHANNELS, 256), vec![]);
        encode_frame(&info, &[plane.view(); 2], &[&varying, &varying], &mut bytes).unwrap();
        let mut decoded = vec![0.0; varying.len()];
        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        frame.decode_plane_into(&plane.view(), 0, Side::Keys, None, &mut decoded).unwrap();
        let worst = varying.iter().zip(&decoded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 0.3, "{worst}");
        8.0 * bytes.len() as f64 / info.elements() as f64
    };
    let (constant, all) = (bits(&sample), bits(&varying));
    assert!(constant < all + 0.5, "{constant:.2} bits per element, {all:.2} with a sample that varies");
    println!("{constant:.2} bits per element, {all:.2} with a sample that varies");
}
