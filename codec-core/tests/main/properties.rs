//! Round trips give the same bits on every backend, and all damage is detected.

use std::sync::Arc;

use codec_core::*;
use proptest::prelude::*;

use super::support::backends;

/// Rows with heavy tails and rare outliers.
fn rows(channels: usize, tokens: usize, seed: u64) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut last = vec![0.0; channels];
    (0..channels * tokens)
        .map(|i| {
            let sum: f32 = (0..6).map(|_| rng.f32()).sum::<f32>() - 3.0;
            let scale = 0.1 + (i % channels) as f32 * 0.2;
            let outlier = if rng.f32() < 0.003 { 60.0 } else { 1.0 };
            let x = 0.5 * last[i % channels] + scale * outlier * sum;
            last[i % channels] = x;
            x + (i % channels) as f32 * 0.3
        })
        .collect()
}

/// A rotation of pairs and its inverse: a simple invertible map for every head.
fn transform(heads: usize, dim: usize) -> Arc<TransformBuf> {
    let (mut into, mut back) = (vec![0.0; heads * dim * dim], vec![0.0; heads * dim * dim]);
    for head in 0..heads {
        for i in 0..dim {
            let at = |r: usize, c: usize| (head * dim + r) * dim + c;
            let j = i ^ 1;
            if j < dim {
                let (c, s) = (0.8_f32, if i < j { 0.6 } else { -0.6 });
                (into[at(i, i)], into[at(i, j)]) = (c, s);
                (back[at(i, i)], back[at(i, j)]) = (c, -s);
            } else {
                (into[at(i, i)], back[at(i, i)]) = (2.0, 0.5);
            }
        }
    }
    Arc::new(TransformBuf::new(dim, into, back).unwrap())
}

fn info(heads: usize, head_dim: usize, tokens: usize, block_tokens: usize) -> FrameInfo {
    FrameInfo {
        level: 1,
        first_token: 7,
        block_tokens,
        model_id: 42,
        ..FrameInfo::new(1, heads, head_dim, tokens)
    }
}

fn predictor() -> impl Strategy<Value = PredictorKind> {
    prop_oneof![
        Just(PredictorKind::None),
        Just(PredictorKind::Mean),
        Just(PredictorKind::Previous),
        (1_u16..12).prop_map(|group| PredictorKind::Anchor { group }),
    ]
}

fn models() -> impl Strategy<Value = ModelKind> {
    prop_oneof![Just(ModelKind::Families), Just(ModelKind::Tables), Just(ModelKind::ContextTables)]
}

fn coder() -> impl Strategy<Value = Coder> {
    prop_oneof![Just(Coder::InterleavedRans), Just(Coder::Range)]
}

/// The frame of a plane's rows as keys and values, the same on every backend.
fn encoded_alike(info: &FrameInfo, plane: Plane<'_>, rows: &[f32]) -> Vec<u8> {
    let mut frames = backends().map(|backend| {
        let mut frame = vec![];
        encode_frame_with(backend, info, &[plane, plane], &[rows, rows], &mut frame).unwrap();
        frame
    });
    let bytes = frames.next().unwrap();
    assert!(frames.all(|other| other == bytes), "backends write other bytes");
    bytes
}

proptest! {
    #[test]
    fn frames_return_their_rows_on_every_backend(
        (heads, dim, tokens, block) in (1_usize..4, 1_usize..40, 2_usize..150, 1_usize..120),
        (predictor, models, coder) in (predictor(), models(), coder()),
        (with_transform, size, seed) in (any::<bool>(), 0.02_f32..3.0, any::<u64>()),
    ) {
        let channels = heads * dim;
        let rows = rows(channels, tokens, seed);
        let map = with_transform.then(|| transform(heads, dim));
        let options = FitOptions { predictor, steps: Steps::Deviations(size), models, coder };
        let plane = PlaneBuf::fit(&rows, channels, map, &options).unwrap();
        let read = PlaneBuf::from_bytes(&plane.to_bytes()).unwrap();
        prop_assert_eq!(&read, &plane);
        let plane = read.view();
        let info = info(heads, dim, tokens, block);
        let bytes = encoded_alike(&info, plane, &rows);
        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        prop_assert_eq!(frame.info(), &info);
        let mut first: Option<Vec<u32>> = None;
        for backend in backends() {
            let mut out = vec![f32::NAN; rows.len()];
            frame.decode_plane_into_with(backend, &plane, 0, Side::Values, None, &mut out).unwrap();
            let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            prop_assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "backends read other numbers");
            check_error(&rows, &out, predictor, size);
        }
    }

    /// The plain form in `f64`: rows projected to their leading coefficients, within half a step of each.
    #[test]
    fn leading_coefficients_decode_to_the_projection(
        (heads, dim, tokens, block) in (1_usize..4, 1_usize..80, 2_usize..90, 1_usize..60),
        (part, predictor, models, coder) in (0.0_f64..1.0, predictor(), models(), coder()),
        (step, seed) in (0.05_f32..2.0, any::<u64>()),
    ) {
        let (channels, rank) = (heads * dim, 1 + (part * dim as f64) as usize);
        let rows = rows(channels, tokens, seed);
        let whole = transform(heads, dim);
        let into = whole.view().forward().chunks_exact(dim).flat_map(|row| &row[..rank]);
        let back = whole.view().inverse().chunks_exact(dim * dim).flat_map(|map| &map[..rank * dim]);
        let (into, back): (Vec<f32>, Vec<f32>) = (into.copied().collect(), back.copied().collect());
        let map = TransformBuf::leading(dim, rank, into.clone(), back.clone()).unwrap();
        // The largest values are below 15,000 steps, so that no tile needs larger ones.
        let scale = 0.1 + 0.2 * channels as f32;
        let step = step * scale;
        let steps = vec![step; heads * rank];
        let options = FitOptions { predictor, steps: Steps::Given(&steps), models, coder };
        let plane = PlaneBuf::fit(&rows, channels, Some(map.into()), &options).unwrap();
        prop_assert_eq!(&PlaneBuf::from_bytes(&plane.to_bytes()).unwrap(), &plane);
        prop_assert_eq!(plane.to_bytes()[4], if rank < dim { 3 } else { 2 });
        let plane = plane.view();
        prop_assert_eq!((plane.channels(), plane.coefficients()), (channels, heads * rank));
        let info = info(heads, dim, tokens, block);
        let bytes = encoded_alike(&info, plane, &rows);
        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        let mean = plane.parts().mean;
        let mut first: Option<Vec<f32>> = None;
        for backend in backends() {
            let mut out = vec![f32::NAN; rows.len()];
            frame.decode_plane_into_with(backend, &plane, 0, Side::Keys, None, &mut out).unwrap();
            prop_assert_eq!(first.get_or_insert_with(|| out.clone()), &out, "backends read other numbers");
        }
        let out = first.unwrap();
        // Anchors have 8 bits of the largest coefficient.
        let anchor = if matches!(predictor, PredictorKind::Anchor { .. }) { 3.0 * scale } else { 0.0 };
        for (t, (row, out)) in rows.chunks_exact(channels).zip(out.chunks_exact(channels)).enumerate() {
            for (head, out) in out.chunks_exact(dim).enumerate() {
                let columns = head * dim..(head + 1) * dim;
                let x: Vec<f64> = columns.clone().map(|c| f64::from(row[c]) - f64::from(mean[c])).collect();
                let y = |k: usize| -> f64 {
                    x.iter().zip(columns.clone()).map(|(x, c)| x * f64::from(into[c * rank + k])).sum()
                };
                let y: Vec<f64> = (0..rank).map(y).collect();
                for (i, (out, mean)) in out.iter().zip(&mean[columns.clone()]).enumerate() {
                    let entries = || (0..rank).map(|k| f64::from(back[(head * rank + k) * dim + i]));
                    let value: f64 = f64::from(*mean) + entries().zip(&y).map(|(b, y)| b * y).sum::<f64>();
                    let errors: f64 = entries().map(|b| b.abs() * f64::from(1.01 * step + anchor)).sum();
                    let bound = errors + 0.01 * f64::from(scale);
                    prop_assert!((value - f64::from(*out)).abs() < bound, "token {t}, component {i}");
                }
            }
        }
    }

    #[test]
    fn lossless_frames_return_every_bit(
        (channels, tokens, block) in (1_usize..70, 1_usize..200, 1_usize..200),
        (brain, wild, seed) in (any::<bool>(), any::<bool>(), any::<u64>()),
    ) {
        let element = if brain { ElementType::Bf16 } else { ElementType::F16 };
        let bits: Vec<u16> = rows(channels, tokens, seed).iter().enumerate().map(|(i, x)| match (wild, brain) {
            (true, _) => (seed >> (i % 48)) as u16 ^ (i * i) as u16,
            (_, true) => (x.to_bits() >> 16) as u16,
            (_, false) => to_f16(*x),
        }).collect();
        let plane = LosslessPlaneBuf::fit(element, &bits[..bits.len().min(channels * 40)], channels).unwrap();
        let read = LosslessPlaneBuf::from_bytes(&plane.to_bytes()).unwrap();
        prop_assert_eq!(&read, &plane);
        let plane = read.view();
        let info = FrameInfo { element, lossless: true, ..info(1, channels, tokens, block) };
        let mut bytes = vec![];
        encode_lossless_frame(&info, &[plane, plane], &[&bits, &bits], &mut bytes).unwrap();
        let tiles = 2 * info.blocks() * channels.div_ceil(32);
        let header = 64 + 4 + 2 * (4 + info.blocks() * 12) + tiles * 6;
        prop_assert!(bytes.len() <= header + 4 * bits.len(), "grew by more than its headers");
        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        for backend in backends() {
            for block in 0..info.blocks() {
                let tokens = info.tokens_of_block(block);
                let part = tokens.start * channels..tokens.end * channels;
                let mut out = vec![0; part.len()];
                let index = BlockIndex { layer: 0, side: Side::Keys, block };
                frame.decode_lossless_block_into_with(backend, &plane, index, &mut out).unwrap();
                prop_assert_eq!(&out, &bits[part]);
            }
        }
    }

    #[test]
    fn symbols_come_back_and_streams_are_the_same_on_every_backend(
        families in prop::collection::vec(any::<u8>(), 1..33),
        codes in prop::collection::vec(any::<u16>(), 0..4000),
    ) {
        let lanes = families.len();
        let models = Models::families(&families);
        // Whole rows, so that there are codes after the last channel.
        let rows: Vec<Row> = codes.as_chunks::<LANES>().0.iter().map(|codes| {
            let mut row = *codes;
            // Small codes in half of the lanes, so that not all escape.
            row.iter_mut().step_by(2).for_each(|code| *code %= 3);
            row
        }).collect();
        let mut streams = backends().map(|backend| {
            let mut stream = vec![];
            encode_symbols_with(backend, &models, &rows, &mut stream).unwrap();
            stream
        });
        let stream = streams.next().unwrap();
        prop_assert!(streams.all(|other| other == stream));
        let mut expected: Option<Vec<Row>> = None;
        for backend in backends() {
            let mut decoded = vec![[9; LANES]; rows.len()];
            decode_symbols_into_with(backend, &models, &stream, &mut decoded).unwrap();
            for (decoded, row) in decoded.iter().zip(&rows) {
                let same = |(a, b): (&u16, &u16)| a == b || *a == ESCAPE;
                prop_assert!(decoded[..lanes].iter().zip(row).all(same));
                prop_assert!(decoded[lanes..].iter().all(|&code| code == 0));
            }
            prop_assert_eq!(expected.get_or_insert_with(|| decoded.clone()), &decoded);
        }
    }

    #[test]
    fn any_stream_decodes_alike_on_every_backend(
        families in prop::collection::vec(any::<u8>(), 1..33),
        bytes in prop::collection::vec(any::<u8>(), 0..900),
        tokens in 0_usize..80,
    ) {
        let models = Models::families(&families);
        let mut expected = None;
        for backend in backends() {
            let mut rows = vec![[0; LANES]; tokens];
            let result = decode_symbols_into_with(backend, &models, &bytes, &mut rows).map(|()| rows);
            prop_assert_eq!(expected.get_or_insert_with(|| result.clone()), &result);
        }
    }

    #[test]
    fn forged_blocks_end_in_an_error_or_in_finite_numbers(
        payload in prop::collection::vec(any::<u8>(), 0..400),
        (kind, width, predictor, models, coder) in (0_u8..5, 0_u8..20, predictor(), models(), coder()),
        cut in any::<prop::sample::Index>(),
    ) {
        let rows = rows(40, 30, 3);
        let options = FitOptions { predictor, steps: Steps::Deviations(0.5), models, coder };
        let plane = PlaneBuf::fit(&rows, 40, None, &options).unwrap();
        let plane = plane.view();
        let info = info(1, 40, 30, 30);
        let mut bytes = vec![];
        encode_frame(&info, &[plane, plane], &[&rows, &rows], &mut bytes).unwrap();
        let mut payload = payload;
        if let [first, second, ..] = &mut payload[..] {
            (*first, *second) = (kind, width);
        }
        let bytes = forge(&bytes, &payload, cut.index(payload.len() + 1) / 2);
        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        for backend in backends() {
            let mut out = vec![0.0; rows.len()];
            let index = BlockIndex { layer: 0, side: Side::Keys, block: 0 };
            let _ = frame.decode_block_into_with(backend, &plane, index, None, &mut out);
            prop_assert!(out.iter().all(|x| x.is_finite()));
        }
    }
}

/// Replaces the payload of a frame of two blocks of two tiles: the first block gets all of it, its first tile
/// `words`.
fn forge(bytes: &[u8], payload: &[u8], words: usize) -> Vec<u8> {
    let mut header = bytes[..60].to_vec();
    header[48..56].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    header.extend_from_slice(&crc32(&header).to_le_bytes());
    let mut index = bytes[64..72].to_vec();
    for lengths in [[words, payload.len() / 2 - words.min(payload.len() / 2)], [0, 0]] {
        index.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        let part = if lengths == [0, 0] { &[] } else { payload };
        index.extend_from_slice(&crc32(part).to_le_bytes());
        lengths.iter().for_each(|&length| index.extend_from_slice(&(length as u16).to_le_bytes()));
    }
    header.extend_from_slice(&index);
    header.extend_from_slice(&crc32(&index).to_le_bytes());
    header.extend_from_slice(payload);
    header
}

/// CRC-32.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8)
            .fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (0_u32.wrapping_sub(crc & 1))))
    })
}

/// Rounds towards zero: any bits will do.
fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let exponent = (bits >> 23 & 0xff) as i32 - 112;
    let sign = (bits >> 16) as u16 & 0x8000;
    if exponent <= 0 { sign } else { sign | ((exponent.min(30) as u16) << 10) | (bits >> 13) as u16 & 0x3ff }
}

/// Half a step, of a deviation that outliers bound; for anchors their half step as well.
fn check_error(rows: &[f32], out: &[f32], predictor: PredictorKind, size: f32) {
    let largest = rows.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let anchor = if let PredictorKind::Anchor { .. } = predictor { 8.0 * largest / 127.0 } else { 0.0 };
    // Deviations are below the largest value (twice that for differences), a transform's coefficients below
    // twice that.
    for (a, b) in rows.iter().zip(out) {
        assert!((a - b).abs() <= 2.0 * size * largest + anchor + 1e-3, "{a} {b}");
    }
}

/// A plane that a frame was not encoded with, shapes that do not match, indices out of bounds.
#[test]
fn bad_input_is_an_error() {
    let rows = rows(6, 20, 5);
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let fit = |options: &FitOptions<'_>| PlaneBuf::fit(&rows, 6, None, options);
    for steps in
        [Steps::Deviations(0.0), Steps::Deviations(f32::NAN), Steps::Given(&[1.0; 5]), Steps::TokenAbsmax(0)]
    {
        assert!(fit(&FitOptions { steps, ..options }).is_err(), "{steps:?}");
    }
    let anchors = FitOptions { predictor: PredictorKind::Anchor { group: 0 }, ..options };
    assert_eq!(fit(&anchors), Err(Error::Zero { what: "group" }));
    let absmax = FitOptions { predictor: PredictorKind::Previous, steps: Steps::TokenAbsmax(7), ..options };
    assert!(matches!(fit(&absmax), Err(Error::BadPlane { .. })));
    assert!(PlaneBuf::fit(&rows, 0, None, &options).is_err());
    assert!(PlaneBuf::fit(&rows[..6], 6, None, &options).is_err());
    assert!(PlaneBuf::fit(&[f32::NAN; 12], 6, None, &options).is_err());
    assert!(PlaneBuf::fit(&rows, 6, Some(transform(1, 5)), &options).is_err());
    assert!(TransformBuf::new(2, vec![1.0; 4], vec![1.0; 3]).is_err());
    assert!(TransformBuf::new(1000, vec![1.0; 4], vec![1.0; 4]).is_err());
    for rank in [0, 5, 3] {
        assert!(TransformBuf::leading(4, rank, vec![1.0; 8], vec![1.0; 8]).is_err(), "rank {rank}");
    }
    assert!(TransformBuf::leading(4, 2, vec![1.0; 8], vec![1.0; 12]).is_err());
    let leading = || Some(Arc::new(TransformBuf::leading(6, 2, vec![1.0; 12], vec![1.0; 12]).unwrap()));
    let given = FitOptions { steps: Steps::Given(&[1.0; 6]), ..options };
    assert!(PlaneBuf::fit(&rows, 6, leading(), &given).is_err(), "a step for each channel");
    let given = FitOptions { steps: Steps::Given(&[1.0; 2]), ..options };
    let plane = PlaneBuf::fit(&rows, 6, leading(), &given).unwrap();
    let parts = plane.view().parts();
    assert!(Plane::new(PlaneParts { mean: &parts.mean[..2], ..parts }).is_err());
    assert!(Plane::new(PlaneParts { transform: None, ..parts }).is_err());

    let (fitted, other) =
        (fit(&options).unwrap(), fit(&FitOptions { steps: Steps::Deviations(0.6), ..options }).unwrap());
    let (plane, other) = (fitted.view(), other.view());
    let info = info(2, 3, 20, 8);
    let encode =
        |info: &FrameInfo, rows: &[f32], out: &mut Vec<u8>| encode_frame(info, &[plane; 2], &[rows; 2], out);
    let mut bytes = vec![9];
    assert_eq!(encode(&info, &[f32::INFINITY; 120], &mut bytes), Err(Error::NotFinite { what: "rows" }));
    assert!(encode(&info, &rows[1..], &mut bytes).is_err());
    assert!(encode(&FrameInfo { block_tokens: 0, ..info }, &rows, &mut bytes).is_err());
    assert!(encode(&FrameInfo { block_tokens: 1025, ..info }, &rows, &mut bytes).is_err());
    assert!(encode(&FrameInfo { heads: usize::MAX, ..info }, &rows, &mut bytes).is_err());
    assert!(encode(&FrameInfo { lossless: true, ..info }, &rows, &mut bytes).is_err());
    assert_eq!(bytes, [9], "what failed has written nothing");
    bytes.clear();
    encode(&info, &rows, &mut bytes).unwrap();
    assert_eq!(Frame::parse(&bytes, 239).unwrap_err(), Error::Limit { needed: 240, limit: 239 });
    let frame = Frame::parse(&bytes, 240).unwrap();
    let mut out = [7.0; 48];
    let decode = |plane, place, rope: Option<&RopeTable<'_>>, out: &mut [f32]| {
        frame.decode_block_into(plane, place, rope, out).unwrap_err()
    };
    let first = BlockIndex { layer: 0, side: Side::Keys, block: 0 };
    assert_eq!(decode(&other, first, None, &mut out), Error::WrongPlane);
    for (index, what) in
        [(BlockIndex { layer: 1, ..first }, "layer"), (BlockIndex { block: 3, ..first }, "block")]
    {
        assert_eq!(decode(&plane, index, None, &mut out), Error::OutOfBounds { what });
    }
    assert!(matches!(decode(&plane, first, None, &mut out[1..]), Error::Length { .. }));
    let angles = [0.5; 8 * 2];
    assert!(RopeTable::halves(3, &angles, &angles).is_err());
    let rope = RopeTable::halves(4, &angles, &angles).unwrap();
    assert!(matches!(decode(&plane, first, Some(&rope), &mut out), Error::Length { .. }));
    let values = BlockIndex { side: Side::Values, ..first };
    assert_eq!(decode(&plane, values, Some(&rope), &mut out), Error::NotBeforeRope);
    assert!(out.iter().all(|&x| x == 7.0), "what was refused has written nothing");
    let wrong = encode(&FrameInfo { lossless: true, ..info }, &rows, &mut bytes);
    assert_eq!(wrong, Err(Error::WrongCoding { lossless: true }));
    assert!(matches!(
        LosslessPlane::new(ElementType::F32, &[1], &[0; TABLE_LEN]),
        Err(Error::ElementNot16Bit)
    ));
    assert!(matches!(RopeTable::neighbours(0, &[], &[]), Err(Error::OddHeadDim { head_dim: 0 })));
    assert!(encode_symbols(&Models::families(&[0; 33]), &[], &mut bytes).is_err());
    assert!(decode_symbols_into(&Models::families(&[]), &bytes, &mut []).is_err());
}

/// Both layouts rotate keys by their token's angle.
#[test]
fn keys_are_rotated_as_they_are_decoded() {
    let rows = rows(8, 12, 1);
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.01),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let fitted = PlaneBuf::fit(&rows, 8, Some(transform(2, 4)), &options).unwrap();
    let plane = fitted.view();
    let info = info(2, 4, 12, 5);
    let mut bytes = vec![];
    encode_frame(&info, &[plane; 2], &[&rows[..]; 2], &mut bytes).unwrap();
    let frame = Frame::parse(&bytes, usize::MAX).unwrap();
    let angle = |token: usize, pair: usize| (token + 1) as f32 * [0.9, 0.1][pair];
    let table = |f: fn(f32) -> f32| (0..24).map(|i| f(angle(i / 2, i % 2))).collect::<Vec<_>>();
    let (cos, sin) = (table(f32::cos), table(f32::sin));
    let decode = |rope: Option<&RopeTable<'_>>| {
        let mut out = vec![0.0; rows.len()];
        frame.decode_plane_into(&plane, 0, Side::Keys, rope, &mut out).unwrap();
        out
    };
    let plain = decode(None);
    for (neighbours, rope) in [
        (false, RopeTable::halves(4, &cos, &sin).unwrap()),
        (true, RopeTable::neighbours(4, &cos, &sin).unwrap()),
    ] {
        let rotated = decode(Some(&rope));
        for (t, (plain, rotated)) in plain.chunks_exact(8).zip(rotated.chunks_exact(8)).enumerate() {
            for (head, pair) in [(0, 0), (0, 1), (4, 0), (4, 1)] {
                let (i, j) = if neighbours {
                    (head + 2 * pair, head + 2 * pair + 1)
                } else {
                    (head + pair, head + pair + 2)
                };
                let (cos, sin) = (angle(t, pair).cos(), angle(t, pair).sin());
                assert!((rotated[i] - (plain[i] * cos - plain[j] * sin)).abs() < 1e-5);
                assert!((rotated[j] - (plain[j] * cos + plain[i] * sin)).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn a_frame_can_be_assembled_of_its_tiles() {
    let (channels, tokens) = (70, 100);
    let rows = rows(channels, tokens, 3);
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.7),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let plane = PlaneBuf::fit(&rows, channels, None, &options).unwrap();
    let plane = plane.view();
    let info = info(7, 10, tokens, 40);
    let mut bytes = vec![];
    encode_frame(&info, &[plane, plane], &[&rows, &rows], &mut bytes).unwrap();
    let frame = Frame::parse(&bytes, info.elements()).unwrap();
    let places =
        || [Side::Keys, Side::Values].into_iter().flat_map(|side| (0..3).map(move |block| (side, block)));
    let (mut payload, mut lengths) = (vec![], vec![]);
    for (i, (side, block)) in places().enumerate() {
        frame.check_block(BlockIndex { layer: 0, side, block }).unwrap();
        assert_eq!(frame.plane_id(0, side).unwrap(), plane.id());
        payload.extend_from_slice(&bytes[frame.block_range(BlockIndex { layer: 0, side, block }).unwrap()]);
        // After header and ids, an entry is the end of a block, its checksum and three lengths.
        let entry = &bytes[64 + 8 + i * (12 + 6)..][12..18];
        lengths.extend(entry.chunks_exact(2).map(|x| u16::from_le_bytes([x[0], x[1]])));
    }
    let mut assembled = vec![];
    assemble_frame(&info, &[plane.id(); 2], &lengths, &payload, &mut assembled).unwrap();
    assert!(assembled == bytes);
    lengths[0] += 1;
    assert!(matches!(
        assemble_frame(&info, &[plane.id(); 2], &lengths, &payload, &mut assembled),
        Err(Error::Length { .. })
    ));
    let beyond = BlockIndex { layer: 1, side: Side::Keys, block: 0 };
    assert!(matches!(frame.block_range(beyond), Err(Error::OutOfBounds { .. })));
    assert!(matches!(frame.plane_id(1, Side::Keys), Err(Error::OutOfBounds { .. })));
    let last = BlockIndex { layer: 0, side: Side::Values, block: 2 };
    let at = frame.block_range(last).unwrap().start;
    bytes[at] ^= 1;
    let frame = Frame::parse(&bytes, info.elements()).unwrap();
    assert_eq!(frame.check_block(last), Err(Error::BadChecksum));
}

#[test]
fn models_say_their_tables() {
    let models = Models::families(&[20, 70, 200]);
    for channel in 0..3 {
        let table = models.table(channel, 0).unwrap();
        assert_eq!(table, family_table([20, 70, 200][channel]));
        let shown = Models::tables(1, &table).unwrap();
        assert_eq!(shown.expectation(0).unwrap().1, models.expectation(channel).unwrap().1);
        assert_eq!(models.expectation(channel).unwrap().0, [0, 1, 3][channel]);
    }
    assert!(matches!(models.table(3, 0), Err(Error::OutOfBounds { .. })));
    assert!(matches!(models.table(0, 1), Err(Error::OutOfBounds { .. })));
    assert!(matches!(models.expectation(3), Err(Error::OutOfBounds { .. })));
}
