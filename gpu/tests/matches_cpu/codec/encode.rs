//! Rows encode to the CPU's bytes.

use std::sync::Arc;

use codec_core::{
    FrameInfo, ModelKind, PlaneBuf, PredictorKind, Steps, TransformBuf, assemble_frame, encode_frame,
};
use kv_gpu::codec::{Encode, EncodeArguments, Planes};
use kv_gpu::{Device, VectorElement};

use super::{Cache, Case, LAYERS, width};
use crate::common::{Buffer, Random, bytes_of, device, launch, rounded};

/// Encodes on the device: lengths of the tiles, payload, and whether an element was not finite.
fn encode(device: &Device, case: &Case, planes: &Planes, cache: &Cache) -> (Vec<u16>, Vec<u8>, bool) {
    let kernel = Encode::new(device, planes.shape(case.element, case.page_tokens.is_some())).unwrap();
    let slots_len = Encode::slots_len(&case.info, LAYERS);
    let tiles = 2 * LAYERS * case.info.blocks() * case.info.channels().div_ceil(32);
    let (words, slots) = (Buffer::new(device, planes.words()), Buffer::scratch(device, slots_len));
    let payload = Buffer::new(device, &vec![0_u8; slots_len]);
    let workspace = Buffer::scratch(device, kernel.workspace_len(&case.info, LAYERS));
    let lengths = Buffer::new(device, &vec![0_u16; tiles]);
    let (payload_bytes, failed) = (Buffer::new(device, &[0_u64]), Buffer::new(device, &[0_u32]));
    let arguments = EncodeArguments {
        planes: words.pointer(),
        layers: 0..LAYERS,
        rows: cache.pointers.pointer().cast(),
        place: cache.place,
        slots: slots.pointer(),
        workspace: workspace.pointer(),
        lengths: lengths.pointer(),
        payload: payload.pointer(),
        capacity: slots_len,
        payload_bytes: payload_bytes.pointer(),
        failed: failed.pointer(),
    };
    launch!(device, kernel, &case.info, planes, &arguments);
    let mut payload = payload.read();
    payload.truncate(payload_bytes.read()[0] as usize);
    (lengths.read(), payload, failed.read()[0] != 0)
}

/// Asserts that these rows encode to the CPU's bytes; returns planes and cache.
fn assert_encodes_as_the_cpu(
    device: &Device,
    case: &Case,
    random: &mut Random,
    rows: &[Vec<f32>],
    fitted: &[PlaneBuf],
) -> (Planes, Cache) {
    let views: Vec<_> = fitted.iter().map(|plane| plane.view()).collect();
    let slices: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    let mut expected = vec![];
    encode_frame(&case.info, &views, &slices, &mut expected).unwrap();
    let planes = Planes::pack(&views, case.info.head_dim).unwrap();
    let cache = Cache::new(device, case, random, Some(rows));
    let (lengths, payload, failed) = encode(device, case, &planes, &cache);
    assert!(!failed, "{case:?}");
    let mut got = vec![];
    assemble_frame(&case.info, planes.ids(), &lengths, &payload, &mut got).unwrap();
    let first = got.iter().zip(&expected).position(|(got, expected)| got != expected);
    assert!(got == expected, "{case:?}: {} bytes for {}, {first:?} differs", got.len(), expected.len());
    (planes, cache)
}

#[test]
fn rows_encode_to_the_bytes_of_the_cpu() {
    let Some(device) = device("rows_encode_to_the_bytes_of_the_cpu") else { return };
    for seed in 100..145 {
        let mut random = Random(seed);
        let case = Case::random(&mut random);
        let rows: Vec<Vec<f32>> = (0..2 * LAYERS).map(|_| case.rows(&mut random)).collect();
        let fitted: Vec<PlaneBuf> = rows.iter().map(|rows| case.plane(rows)).collect();
        let (planes, mut cache) = assert_encodes_as_the_cpu(&device, &case, &mut random, &rows, &fitted);

        // A NaN is reported.
        let mut bytes = cache.numbers.read();
        let at = cache.at(&case.info, random.below(rows[0].len())) * width(case.element);
        bytes[at..at + width(case.element)].fill(0xff);
        cache.numbers.write(&bytes);
        assert!(encode(&device, &case, &planes, &cache).2, "{case:?}");
    }
}

/// Coefficients that are hard to quantize without the CPU's arithmetic.
#[derive(Clone, Copy, Debug)]
enum Hard {
    /// All lie at the midpoint of two bins.
    Ties,
    /// All lie next to a midpoint, on either side.
    NextToTies,
    /// Rows of zeros, and rows far below a step.
    Nothing,
    /// Some are thousands to millions of steps.
    Far,
    /// All are, and the squares of components overflow.
    Huge,
    /// Steps are below the rounding of the sums.
    SmallSteps,
}

#[test]
fn hard_coefficients_encode_to_the_bytes_of_the_cpu() {
    const STEP: f32 = 0.125;
    static STEPS: [f32; 256] = [STEP; 256];
    static SMALL_STEPS: [f32; 256] = [STEP / (1 << 16) as f32; 256];
    let Some(device) = device("hard_coefficients_encode_to_the_bytes_of_the_cpu") else { return };
    let hard = [Hard::Ties, Hard::NextToTies, Hard::Nothing, Hard::Far, Hard::Huge, Hard::SmallSteps];
    for (seed, hard) in (2000..).zip(hard.into_iter().cycle()).take(36) {
        let mut random = Random(seed);
        let map_dim = random.pick(&[16, 48, 64, 80, 128]);
        let (heads, channels) = (2, 2 * map_dim);
        // Sums of a few powers of two: many coefficients are exact.
        let sums = random.below(2) == 0;
        let entry = |i: usize, j: usize| match (i % map_dim).abs_diff(j) {
            0 => 1.0,
            1 | 8 if sums => 0.5,
            _ => 0.0,
        };
        let map: Vec<f32> = (0..channels).flat_map(|i| (0..map_dim).map(move |j| entry(i, j))).collect();
        let tokens = random.pick(&[1, 9, 150, 700]);
        let info = FrameInfo {
            block_tokens: random.pick(&[13, 64, 256, 1024]),
            ..FrameInfo::new(LAYERS, heads, map_dim, tokens)
        };
        let small = matches!(hard, Hard::SmallSteps);
        let case = Case {
            info,
            models: random.pick(&[ModelKind::Families, ModelKind::Tables, ModelKind::ContextTables]),
            predictor: random.pick(&[PredictorKind::None, PredictorKind::Mean]),
            steps: Steps::Given(&if small { &SMALL_STEPS } else { &STEPS }[..channels]),
            element: match hard {
                Hard::Far | Hard::Huge => VectorElement::F32,
                _ => random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]),
            },
            heads_first: random.below(2) == 0,
            page_tokens: (random.below(3) == 0).then(|| 1 + random.below(40)),
            transform: Some(Arc::new(TransformBuf::new(map_dim, map.clone(), map).unwrap())),
        };
        let sample: Vec<f32> = random.normals(64 * channels).into_iter().map(|x| 0.3 * x).collect();
        let number = |random: &mut Random| {
            let tie = (random.below(8) as f32 - 3.5) * STEP;
            let x = match hard {
                Hard::Ties => tie,
                Hard::NextToTies => tie * (1.0 + (random.below(5) as f32 - 2.0) * f32::EPSILON),
                Hard::Nothing => random.pick(&[0.0, -0.0, 1e-30, f32::MIN_POSITIVE / 8.0]),
                Hard::Far => random.normal() * if random.below(40) == 0 { 1e3 } else { 0.3 },
                Hard::Huge => random.normal() * 1e30,
                Hard::SmallSteps => random.normal() * 0.01,
            };
            rounded(case.element, x)
        };
        let rows: Vec<Vec<f32>> =
            (0..2 * LAYERS).map(|_| (0..tokens * channels).map(|_| number(&mut random)).collect()).collect();
        let fitted: Vec<PlaneBuf> = rows.iter().map(|_| case.fit(&sample)).collect();
        let (planes, mut cache) = assert_encodes_as_the_cpu(&device, &case, &mut random, &rows, &fitted);

        // A value that is not finite is reported wherever it is.
        let mut bytes = cache.numbers.read();
        let bad = random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        let at = cache.at(&case.info, random.below(rows[0].len())) * width(case.element);
        bytes[at..at + width(case.element)].copy_from_slice(&bytes_of(case.element, &[bad]));
        cache.numbers.write(&bytes);
        assert!(encode(&device, &case, &planes, &cache).2, "{case:?}, {hard:?}");
    }
}
