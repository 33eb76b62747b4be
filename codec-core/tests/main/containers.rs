//! Frames and chunks: directories and arguments must match the headers of frames.

use codec_core::*;
use fastrand::Rng;

const CHANNELS: usize = 6;

fn plane(size: f32) -> PlaneBuf {
    let rows: Vec<f32> = (0..20 * CHANNELS).map(|i| (i as f32 * 0.7).sin()).collect();
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(size),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    PlaneBuf::fit(&rows, CHANNELS, None, &options).unwrap()
}

fn frame(info: &FrameInfo) -> Vec<u8> {
    let rows = vec![0.5; info.tokens * CHANNELS];
    let mut frame = vec![];
    if info.lossless {
        let bits = vec![0x3f00_u16; info.tokens * CHANNELS];
        let plane = LosslessPlaneBuf::fit(ElementType::Bf16, &[0x3f00; CHANNELS], CHANNELS).unwrap();
        let plane = plane.view();
        let info = FrameInfo { element: ElementType::Bf16, ..*info };
        encode_lossless_frame(&info, &[plane; 2], &[&bits[..]; 2], &mut frame).unwrap();
    } else {
        let plane = plane(0.5);
        let planes = [plane.view(); 2];
        encode_frame(info, &planes, &[&rows[..]; 2], &mut frame).unwrap();
    }
    frame
}

/// Directories with changed bytes and valid checksums.
#[test]
fn a_directory_that_is_not_its_frames_is_refused() {
    let frames: Vec<Vec<u8>> = (0..4_u8)
        .map(|i| {
            let tokens = 3 + usize::from(i / 2);
            let info = FrameInfo {
                level: i % 2,
                lossless: i == 3,
                first_token: 100 * u64::from(i),
                ..FrameInfo::new(1, 2, CHANNELS / 2, tokens)
            };
            frame(&info)
        })
        .collect();
    let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
    let mut chunk = vec![];
    write_chunk(&frames, &mut chunk).unwrap();
    let (head, mut random) = (8 + 24 * frames.len(), Rng::with_seed(7));
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = chunk.clone();
        for _ in 0..=random.usize(..2) {
            let at = 8 + random.usize(..head - 8);
            // Small changes are more likely to give valid fields.
            bytes[at] = if random.usize(..2) == 0 { bytes[at] ^ 1 } else { random.u8(..) };
        }
        let checksum = crc32fast::hash(&bytes[..head]);
        bytes[head..head + 4].copy_from_slice(&checksum.to_le_bytes());
        let Ok(parsed) = Chunk::parse(&bytes) else {
            refused += 1;
            continue;
        };
        taken += 1;
        for i in 0..parsed.len() {
            let entry = parsed.entry(i).unwrap();
            let frame = Frame::parse(parsed.frame(i).unwrap(), usize::MAX).unwrap();
            let info = frame.info();
            assert_eq!(
                (entry.first_token, entry.tokens, entry.level, entry.lossless),
                (info.first_token, info.tokens, info.level, info.lossless)
            );
        }
    }
    assert!(taken > 10 && refused > 10_000, "{taken} {refused}");
}

/// Arguments are checked the same way for any number of tokens.
#[test]
fn planes_of_no_tokens_are_checked_as_others_are() {
    let (fitted, other) = (plane(0.5), plane(0.6));
    let (plane, other) = (fitted.view(), other.view());
    for tokens in [0, 5] {
        let info = FrameInfo::new(1, 2, CHANNELS / 2, tokens);
        let angles = vec![0.5; tokens.max(1) * 2];
        let (frame_bytes, rotated, lossless) = (
            frame(&info),
            frame(&FrameInfo { keys_rotated: true, ..info }),
            frame(&FrameInfo { lossless: true, ..info }),
        );
        let decode = |bytes: &[u8], plane: &Plane<'_>, layer, side, rope: Option<&RopeTable<'_>>| {
            let frame = Frame::parse(bytes, usize::MAX).unwrap();
            let mut out = vec![0.0; tokens * CHANNELS];
            frame.decode_plane_into(plane, layer, side, rope, &mut out)
        };
        assert_eq!(decode(&frame_bytes, &plane, 0, Side::Keys, None), Ok(()));
        let no_layer = Err(Error::OutOfBounds { what: "layer" });
        for layer in [1, 99, usize::MAX] {
            assert_eq!(decode(&frame_bytes, &plane, layer, Side::Values, None), no_layer);
        }
        assert_eq!(decode(&frame_bytes, &other, 0, Side::Keys, None), Err(Error::WrongPlane));
        let coding = decode(&lossless, &plane, 0, Side::Keys, None);
        assert_eq!(coding, Err(Error::WrongCoding { lossless: true }));
        let rope = RopeTable::halves(2, &angles[..tokens], &angles[..tokens]).unwrap();
        let head = decode(&frame_bytes, &plane, 0, Side::Keys, Some(&rope));
        assert!(matches!(head, Err(Error::Length { .. })), "{head:?}");
        for (bytes, side) in [(&rotated, Side::Keys), (&frame_bytes, Side::Values)] {
            assert_eq!(decode(bytes, &plane, 0, side, Some(&rope)), Err(Error::NotBeforeRope));
        }
        let absent = Backend::ALL.into_iter().find(|backend| !backend.is_available()).unwrap();
        let frame = Frame::parse(&frame_bytes, usize::MAX).unwrap();
        let mut out = vec![0.0; tokens * CHANNELS];
        assert_eq!(
            frame.decode_plane_into_with(absent, &plane, 0, Side::Keys, None, &mut out),
            Err(Error::BackendUnavailable)
        );
    }
}
