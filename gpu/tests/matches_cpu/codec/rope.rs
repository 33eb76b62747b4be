//! Keys that are stored before RoPE decode to the CPU's rotated keys.

use codec_core::{Backend, Frame, FrameInfo, PlaneBuf, RopeTable, Side, Steps, TransformBuf, encode_frame};
use kv_gpu::codec::{CodecShape, Decode, DecodeArguments, Planes, Rope};
use kv_gpu::{DevicePtr, Error, VectorElement};

use super::decode::{decode, first_difference};
use super::{Cache, Case, LAYERS, sides};
use crate::common::{Random, device};

/// A frame whose transform has maps of whole heads.
fn random_case(random: &mut Random) -> Case {
    let (heads, head_dim) = random.pick(&[(1, 32), (2, 64), (3, 40), (6, 16), (4, 12), (5, 4), (8, 128)]);
    let map_heads: Vec<usize> = (1..=heads).filter(|n| heads % n == 0 && n * head_dim <= 512).collect();
    let map_dim = random.pick(&map_heads) * head_dim;
    let maps = |random: &mut Random| {
        let numbers = random.normals(heads * head_dim * map_dim);
        numbers.into_iter().map(|x| x / (map_dim as f32).sqrt()).collect()
    };
    let case = Case::random(random);
    Case {
        info: FrameInfo {
            block_tokens: case.info.block_tokens,
            ..FrameInfo::new(LAYERS, heads, head_dim, case.info.tokens)
        },
        steps: Steps::Deviations(random.pick(&[1e-4, 0.002, 0.05, 0.5, 3.0])),
        transform: Some(TransformBuf::new(map_dim, maps(random), maps(random)).unwrap().into()),
        ..case
    }
}

/// Angles (tokens, head_dim / 2) of tokens from a position on.
fn angles(info: &FrameInfo, first: usize) -> Vec<f64> {
    let frequency = |i: usize| 5e5_f64.powf(-2.0 * i as f64 / info.head_dim as f64);
    (first..first + info.tokens)
        .flat_map(|position| (0..info.head_dim / 2).map(move |i| position as f64 * frequency(i)))
        .collect()
}

/// Rows of keys, rotated in `f64`.
fn rotated(info: &FrameInfo, keys: &[f32], angles: &[f64]) -> Vec<f32> {
    let half = info.head_dim / 2;
    let mut rotated = keys.to_vec();
    for (i, head) in rotated.chunks_exact_mut(info.head_dim).enumerate() {
        let angles = &angles[i / info.heads * half..][..half];
        let (first, second) = head.split_at_mut(half);
        for ((a, b), angle) in first.iter_mut().zip(second).zip(angles) {
            let ((x, y), (sin, cos)) = ((f64::from(*a), f64::from(*b)), angle.sin_cos());
            (*a, *b) = ((x * cos - y * sin) as f32, (y * cos + x * sin) as f32);
        }
    }
    rotated
}

/// The kernels that rotate keys.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// From points, on tensor cores.
    Points,
    /// From coefficients, on tensor cores.
    Coefficients,
    /// From coefficients, with the CPU's bits.
    Exact,
}

impl Form {
    fn of(shape: &CodecShape) -> Self {
        match (shape.points_program(), shape.tensor_core_program(usize::MAX)) {
            (Some(_), _) => Self::Points,
            (_, Some(_)) => Self::Coefficients,
            _ => Self::Exact,
        }
    }
}

#[test]
fn keys_from_points_are_rotated() {
    assert_rotates_like_the_cpu("keys_from_points_are_rotated", Form::Points, 4000);
}

#[test]
fn keys_from_coefficients_are_rotated() {
    assert_rotates_like_the_cpu("keys_from_coefficients_are_rotated", Form::Coefficients, 4100);
}

#[test]
fn exact_keys_are_rotated() {
    assert_rotates_like_the_cpu("exact_keys_are_rotated", Form::Exact, 4200);
}

/// Decodes twelve frames whose shapes have this form. Values are those of a decoder without RoPE.
fn assert_rotates_like_the_cpu(test: &str, form: Form, first_seed: u64) {
    let Some(device) = device(test) else { return };
    let mut frames = 0;
    for seed in first_seed.. {
        let random = &mut Random(seed);
        let case = random_case(random);
        let info = &case.info;
        let rows: Vec<Vec<f32>> = (0..2 * LAYERS).map(|_| case.rows(random)).collect();
        let fitted: Vec<PlaneBuf> = rows.iter().map(|rows| case.plane(rows)).collect();
        let views: Vec<_> = fitted.iter().map(|plane| plane.view()).collect();
        let planes = Planes::pack(&views, info.head_dim).unwrap();
        if Form::of(&planes.shape(case.element, case.page_tokens.is_some())) != form {
            continue;
        }
        let slices: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let mut bytes = vec![];
        encode_frame(info, &views, &slices, &mut bytes).unwrap();
        let angles = angles(info, random.pick(&[0, 3, 999_000]));
        let table = [f64::cos, f64::sin].map(|f| angles.iter().map(|&x| f(x) as f32).collect::<Vec<_>>());
        let cache = Cache::new(&device, &case, random, None);
        let parts = 1 + random.below(3);
        let (plain, failed) = decode(&device, &case, &planes, &bytes, &cache, parts, None);
        assert!(!failed, "{case:?}");
        let (got, failed) = decode(&device, &case, &planes, &bytes, &cache, parts, Some(&table));
        assert!(!failed, "{case:?}");

        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        for (plane, (layer, side)) in sides().enumerate() {
            let got = cache.read(&case, &got, plane);
            if side == Side::Values {
                assert_eq!(got, cache.read(&case, &plain, plane), "{case:?}, plane {plane}");
                continue;
            }
            let keys = |rope: Option<&RopeTable<'_>>| {
                let (view, mut keys) = (&views[plane], vec![0.0; rows[plane].len()]);
                frame.decode_plane_into_with(Backend::Scalar, view, layer, side, rope, &mut keys).unwrap();
                keys
            };
            let plain = keys(None);
            // Products on tensor cores are off by 2^-12 of the largest value, and a rotation adds two of
            // these errors; otherwise the arithmetic is that of f32.
            let largest = plain.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let error =
                largest * if form == Form::Exact { 4.0 * f32::EPSILON } else { 2_f32.sqrt() / 4096.0 };
            let wrong = first_difference(case.element, &got, &rotated(info, &plain, &angles), Some(error));
            assert_eq!(wrong, None, "{case:?}, plane {plane}");
            if form == Form::Exact {
                let [cos, sin] = &table;
                let expected = keys(Some(&RopeTable::halves(info.head_dim, cos, sin).unwrap()));
                let wrong = first_difference(case.element, &got, &expected, None);
                assert_eq!(wrong, None, "{case:?}, plane {plane}: not the CPU's bits");
            }
        }
        frames += 1;
        if frames == 12 {
            return;
        }
    }
}

#[test]
fn rope_of_other_planes_or_frames_is_an_error() {
    let random = &mut Random(5000);
    let case = Case { element: VectorElement::F16, page_tokens: None, ..random_case(random) };
    let rows = case.rows(random);
    let shape = |case: &Case| {
        let planes = Planes::pack(&[case.plane(&rows).view(); 2 * LAYERS], case.info.head_dim).unwrap();
        (planes.shape(case.element, false), planes)
    };
    let (supported, planes) = shape(&case);
    assert!(supported.supports_rope() && supported.rotating_program(usize::MAX).is_some());
    let (without, _) = shape(&Case { transform: None, info: case.info, ..random_case(random) });
    assert!(!without.supports_rope() && without.rotating_program(usize::MAX).is_none());

    let Some(device) = device("rope_of_other_planes_or_frames_is_an_error") else { return };
    assert!(matches!(Decode::rotating(&device, without), Err(Error::Unsupported { .. })));
    let rotating = Decode::rotating(&device, supported).unwrap();
    let plain = Decode::new(&device, supported).unwrap();
    assert!(rotating.rotates() && !plain.rotates());
    let cache = Cache::new(&device, &case, random, None);
    let dangling = DevicePtr::dangling();
    let launch = |decode: &Decode, rope, info| {
        let arguments = DecodeArguments {
            frame: DevicePtr::dangling(),
            planes: DevicePtr::dangling(),
            layers: 0..LAYERS,
            blocks: 0..0,
            out: DevicePtr::dangling(),
            place: cache.place,
            rope,
            workspace: DevicePtr::dangling(),
            failed: DevicePtr::dangling(),
        };
        // SAFETY: no block is decoded.
        #[allow(unsafe_code)]
        unsafe {
            decode.launch_indexed(device.stream().cu_stream(), &info, &planes, &arguments)
        }
    };
    let rope = Some(Rope { cos: dangling, sin: dangling });
    let info = case.info;
    let rotated = FrameInfo { keys_rotated: true, ..info };
    assert!(launch(&rotating, rope, info).is_ok() && launch(&plain, None, rotated).is_ok());
    let other_heads = FrameInfo { heads: 1, head_dim: info.channels(), ..info };
    for (decode, rope, info) in [
        (&rotating, None, info),
        (&plain, rope, info),
        (&rotating, rope, rotated),
        (&rotating, rope, other_heads),
    ] {
        assert!(matches!(launch(decode, rope, info), Err(Error::Argument { .. })));
    }
}
