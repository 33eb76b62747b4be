//! Frames decode to the CPU's values.

use std::sync::Arc;

use codec_core::{Backend, Frame, FrameInfo, PlaneBuf, PredictorKind, Steps, TransformBuf, encode_frame};
use kv_gpu::codec::{CodecShape, Decode, DecodeArguments, Planes, Rope};
use kv_gpu::{Device, VectorElement};

use super::{Cache, Case, LAYERS, sides, width};
use crate::common::{Buffer, Random, bytes_of, device, launch, rounded};

/// Decodes a frame, with RoPE of its keys if cosines and sines are given; returns the bytes of the cache and
/// whether a tile failed.
pub fn decode(
    device: &Device,
    case: &Case,
    planes: &Planes,
    bytes: &[u8],
    cache: &Cache,
    parts: usize,
    rope: Option<&[Vec<f32>; 2]>,
) -> (Vec<u8>, bool) {
    let compile = if rope.is_some() { Decode::rotating } else { Decode::new };
    let kernel = compile(device, planes.shape(case.element, case.page_tokens.is_some())).unwrap();
    let angles = rope.map(|rope| rope.each_ref().map(|numbers| Buffer::new(device, numbers)));
    let rope = angles.as_ref().map(|[cos, sin]| Rope { cos: cos.pointer(), sin: sin.pointer() });
    let frame = Frame::parse(bytes, case.info.elements()).unwrap();
    let whole = [bytes, &[0; 3]].concat();
    let (there, words) = (Buffer::new(device, &whole), Buffer::new(device, planes.words()));
    let failed = Buffer::new(device, &[0_u32]);
    let blocks = case.info.blocks();
    let workspace = kernel.workspace_len(&case.info, LAYERS, blocks.div_ceil(parts));
    let workspace = Buffer::scratch(device, workspace);
    for part in 0..parts {
        let arguments = DecodeArguments {
            frame: there.pointer(),
            planes: words.pointer(),
            layers: 0..LAYERS,
            blocks: part * blocks / parts..(part + 1) * blocks / parts,
            out: cache.pointers.pointer().cast(),
            place: cache.place,
            rope,
            workspace: workspace.pointer(),
            failed: failed.pointer(),
        };
        launch!(device, kernel, &frame, planes, &arguments);
    }
    (cache.numbers.read(), failed.read()[0] != 0)
}

fn number_bits(element: VectorElement, x: f32) -> u32 {
    let mut bits = [0; 4];
    bits[..width(element)].copy_from_slice(&bytes_of(element, &[x]));
    u32::from_le_bytes(bits)
}

/// The value of an element from its bits.
fn number(element: VectorElement, bits: u32) -> f32 {
    match element {
        VectorElement::F32 => f32::from_bits(bits),
        VectorElement::F16 => half::f16::from_bits(bits as u16).to_f32(),
        VectorElement::Bf16 => half::bf16::from_bits(bits as u16).to_f32(),
    }
}

/// The bits of the nearest finite element.
fn finite_bits(element: VectorElement, x: f32) -> u32 {
    let largest = match element {
        VectorElement::F32 => f32::MAX,
        VectorElement::F16 => half::f16::MAX.to_f32(),
        VectorElement::Bf16 => half::bf16::MAX.to_f32(),
    };
    number_bits(element, x.clamp(-largest, largest))
}

/// Asserts that a frame of these rows decodes to the CPU's values.
fn assert_decodes_as_the_cpu(device: &Device, case: &Case, random: &mut Random, rows: &[Vec<f32>]) {
    let fitted: Vec<PlaneBuf> = rows.iter().map(|rows| case.plane(rows)).collect();
    let views: Vec<_> = fitted.iter().map(|plane| plane.view()).collect();
    let slices: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    let mut bytes = vec![];
    encode_frame(&case.info, &views, &slices, &mut bytes).unwrap();
    let planes = Planes::pack(&views, case.info.head_dim).unwrap();
    let cache = Cache::new(device, case, random, None);
    let parts = 1 + random.below(3);
    let (got, failed) = decode(device, case, &planes, &bytes, &cache, parts, None);
    assert!(!failed, "{case:?}");

    let frame = Frame::parse(&bytes, case.info.elements()).unwrap();
    for (plane, (layer, side)) in sides().enumerate() {
        let mut expected = vec![0.0; rows[plane].len()];
        frame
            .decode_plane_into_with(Backend::Scalar, &views[plane], layer, side, None, &mut expected)
            .unwrap();
        let shape = planes.shape(case.element, case.page_tokens.is_some());
        let error = error_of(&shape, &expected);
        let wrong = first_difference(case.element, &cache.read(case, &got, plane), &expected, error);
        assert_eq!(wrong, None, "{case:?}, plane {plane}");
    }
}

/// The error of a plane whose products are on tensor cores: they are off by 2^-16 of their terms, or by less.
pub fn error_of(shape: &CodecShape, expected: &[f32]) -> Option<f32> {
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let on_tensor_cores = shape.points_program().or(shape.tensor_core_program(usize::MAX));
    on_tensor_cores.map(|_| largest / 4096.0)
}

/// The index of the first element that is not a value rounded, or a value within `error` of it.
pub fn first_difference(
    element: VectorElement,
    got: &[u32],
    expected: &[f32],
    error: Option<f32>,
) -> Option<usize> {
    let bits = |x| finite_bits(element, x);
    let number = |bits| number(element, bits);
    got.iter().zip(expected).position(|(&got, &x)| match error {
        None => got != bits(x),
        Some(e) => !(number(bits(x - e))..=number(bits(x + e))).contains(&number(got)),
    })
}

#[test]
fn frames_decode_to_the_numbers_of_the_cpu() {
    let Some(device) = device("frames_decode_to_the_numbers_of_the_cpu") else { return };
    for seed in 0..45 {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        if seed % 10 == 9 {
            (case.predictor, case.steps, case.transform) =
                (PredictorKind::None, Steps::TokenAbsmax(15), None);
        }
        let mut rows: Vec<Vec<f32>> = (0..2 * LAYERS).map(|_| case.rows(&mut random)).collect();
        if seed % 10 == 8 {
            case.element = VectorElement::F16; // these rows exceed its range
            rows.iter_mut().flatten().for_each(|x| *x *= 3e4);
        }
        assert_decodes_as_the_cpu(&device, &case, &mut random, &rows);
    }
}

/// Coefficients whose points do not fit f16: bins above 2048, among the escapes and under models with low
/// bits, and bins times a power of two, in some tiles or in all.
#[test]
fn far_coefficients_decode_to_the_numbers_of_the_cpu() {
    let Some(device) = device("far_coefficients_decode_to_the_numbers_of_the_cpu") else { return };
    for seed in 3000..3024 {
        let mut random = Random(seed);
        let (heads, map_dim) = random.pick(&[(1, 16), (3, 48), (2, 64), (1, 112), (2, 128)]);
        let maps = |random: &mut Random| {
            let numbers = random.normals(heads * map_dim * map_dim);
            numbers.into_iter().map(|x| x / (map_dim as f32).sqrt()).collect()
        };
        let transform = TransformBuf::new(map_dim, maps(&mut random), maps(&mut random)).unwrap();
        let case = Case {
            info: FrameInfo {
                block_tokens: random.pick(&[13, 64, 256]),
                ..FrameInfo::new(LAYERS, heads, map_dim, random.pick(&[1, 31, 150, 700]))
            },
            predictor: random.pick(&[PredictorKind::None, PredictorKind::Mean]),
            steps: Steps::Deviations(random.pick(&[1e-4, 0.002, 0.1, 1.0])),
            element: random.pick(&[VectorElement::F16, VectorElement::Bf16]),
            transform: Some(Arc::new(transform)),
            ..Case::random(&mut random)
        };
        let mut rows: Vec<Vec<f32>> = (0..2 * LAYERS).map(|_| case.rows(&mut random)).collect();
        let from = rows[0].len() / 2; // the second half, which planes are not fitted to
        for row in rows.iter_mut().flat_map(|rows| rows[from..].chunks_mut(case.info.channels())) {
            if random.below(40) == 0 {
                let far = random.pick(&[1e3, 1e4]);
                row.iter_mut().for_each(|x| *x = rounded(case.element, (*x * far).clamp(-6e4, 6e4)));
            }
        }
        assert_decodes_as_the_cpu(&device, &case, &mut random, &rows);
    }
}
