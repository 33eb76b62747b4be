//! Committed streams decode to the committed values, encoders write the same bytes, and every flipped bit is
//! detected.
//!
//! `UPDATE_VECTORS=1 cargo test -p codec-core --test main vectors` rewrites them when the decisions of the
//! encoder or the version of the format change. `format.py` decodes them by the text of FORMAT.md alone.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use codec_core::*;
use half::f16;

const HEADS: usize = 2;
const HEAD_DIM: usize = 20;
const CHANNELS: usize = HEADS * HEAD_DIM;
const TOKENS: usize = 53;

fn info() -> FrameInfo {
    FrameInfo {
        level: 3,
        first_token: 4,
        block_tokens: 30,
        model_id: 0x1122_3344_5566_7788,
        ..FrameInfo::new(1, HEADS, HEAD_DIM, TOKENS)
    }
}

/// Values from exact operations, the same on every machine. `reach` scales the last channels.
fn rows(seed: u32, reach: f32) -> Vec<f32> {
    let mut state = seed;
    let mut last = [0.0_f32; CHANNELS];
    (0..TOKENS * CHANNELS)
        .map(|i| {
            let mut noise = 0;
            for _ in 0..4 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                noise += (state >> 16) as i32 - 0x8000;
            }
            let c = i % CHANNELS;
            let scale = if c + 4 > CHANNELS { reach } else { (1 + c % 5) as f32 / 8.0 };
            last[c] = 0.5 * last[c] + noise as f32 / 65536.0 * scale;
            last[c] + (c % 3) as f32
        })
        .collect()
}

/// The first coefficients of each head of [`transform`].
fn leading_transform() -> Arc<TransformBuf> {
    const RANK: usize = 8;
    let whole = transform();
    let into = whole.view().forward().chunks_exact(HEAD_DIM).flat_map(|row| &row[..RANK]);
    let back =
        whole.view().inverse().chunks_exact(HEAD_DIM * HEAD_DIM).flat_map(|map| &map[..RANK * HEAD_DIM]);
    let maps = (into.copied().collect(), back.copied().collect());
    Arc::new(TransformBuf::leading(HEAD_DIM, RANK, maps.0, maps.1).unwrap())
}

/// Sums and differences of neighbours, and their inverse.
fn transform() -> Arc<TransformBuf> {
    let (mut into, mut back) = (vec![], vec![]);
    for i in 0..HEADS * HEAD_DIM * HEAD_DIM {
        let (row, column) = (i / HEAD_DIM % HEAD_DIM, i % HEAD_DIM);
        let near = row / 2 == column / 2;
        let sign = if row % 2 == 1 && column % 2 == 1 { -1.0 } else { 1.0 };
        into.push(if near { sign } else { 0.0 });
        back.push(if near { sign / 2.0 } else { 0.0 });
    }
    Arc::new(TransformBuf::new(HEAD_DIM, into, back).unwrap())
}

/// Name, options, transform and sample of every lossy vector.
fn lossy() -> Vec<(&'static str, PlaneBuf)> {
    let steps = vec![0.25; CHANNELS];
    let options = |predictor, steps, models, coder| FitOptions { predictor, steps, models, coder };
    let fit = |map, options: FitOptions<'_>| PlaneBuf::fit(&rows(1, 2.0), CHANNELS, map, &options).unwrap();
    let given = Steps::Given(&steps);
    vec![
        (
            "transform",
            fit(
                Some(transform()),
                options(PredictorKind::Previous, given, ModelKind::Families, Coder::InterleavedRans),
            ),
        ),
        (
            "tables",
            fit(
                Some(transform()),
                options(PredictorKind::Mean, given, ModelKind::Tables, Coder::InterleavedRans),
            ),
        ),
        (
            "leading",
            fit(
                Some(leading_transform()),
                options(
                    PredictorKind::Previous,
                    Steps::Given(&steps[..16]),
                    ModelKind::Tables,
                    Coder::InterleavedRans,
                ),
            ),
        ),
        (
            "context",
            fit(None, options(PredictorKind::Mean, given, ModelKind::ContextTables, Coder::InterleavedRans)),
        ),
        (
            "paper",
            fit(None, options(PredictorKind::Anchor { group: 10 }, given, ModelKind::Tables, Coder::Range)),
        ),
        (
            "token-scale",
            fit(
                None,
                options(
                    PredictorKind::None,
                    Steps::TokenAbsmax(15),
                    ModelKind::Tables,
                    Coder::InterleavedRans,
                ),
            ),
        ),
    ]
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
}

/// Compares bytes with the committed file, or writes it.
fn check(name: &str, bytes: &[u8]) {
    let path = folder().join(name);
    if std::env::var_os("UPDATE_VECTORS").is_some() {
        std::fs::create_dir_all(folder()).unwrap();
        std::fs::write(&path, bytes).unwrap();
    }
    assert!(std::fs::read(&path).unwrap() == bytes, "{name} differs from the committed file");
}

fn decode(frame: &[u8], plane: &Plane<'_>) -> Result<Vec<f32>, Error> {
    let frame = Frame::parse(frame, info().elements())?;
    let mut out = vec![0.0; 2 * TOKENS * CHANNELS];
    let (keys, values) = out.split_at_mut(TOKENS * CHANNELS);
    frame.decode_plane_into(plane, 0, Side::Keys, None, keys)?;
    frame.decode_plane_into(plane, 0, Side::Values, None, values)?;
    Ok(out)
}

fn assert_every_flip_is_noticed(name: &str, bytes: &[u8], decode: impl Fn(&[u8]) -> bool) {
    let mut bytes = bytes.to_vec();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            bytes[at] ^= 1 << bit;
            assert!(!decode(&bytes), "{name}: byte {at}, bit {bit}");
            bytes[at] ^= 1 << bit;
        }
        assert!(!decode(&bytes[..at]), "{name}: cut at {at}");
    }
    assert!(decode(&bytes));
}

#[test]
fn streams_with_loss() {
    let mut frames = vec![];
    for (name, plane) in lossy() {
        let stored = plane.to_bytes();
        check(&format!("{name}.kvcp"), &stored);
        assert_every_flip_is_noticed(name, &stored, |bytes| PlaneBuf::from_bytes(bytes).is_ok());
        let plane = plane.view();
        // Values far beyond the sample: escapes, and tiles of a fixed width.
        let (keys, values) = (rows(2, 2.0), rows(3, 30_000.0));
        let mut frame = vec![];
        encode_frame(&info(), &[plane; 2], &[&keys, &values], &mut frame).unwrap();
        check(&format!("{name}.kvcc"), &frame);
        let values = decode(&frame, &plane).unwrap();
        check(&format!("{name}.f32"), &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
        assert_every_flip_is_noticed(name, &frame, |bytes| decode(bytes, &plane).is_ok());
        frames.push(frame);
    }
    let frames: Vec<&[u8]> = frames[..2].iter().map(Vec::as_slice).collect();
    let mut chunk = vec![];
    write_chunk(&frames, &mut chunk).unwrap();
    check("levels.kvcs", &chunk);
    let parsed = Chunk::parse(&chunk).unwrap();
    assert_eq!((parsed.len(), parsed.frame(1).unwrap()), (2, frames[1]));
    assert_eq!(parsed.entry(0).unwrap().len, frames[0].len());
    assert!(parsed.entry(2).is_err() && parsed.frame(2).is_err());
    let head = chunk.len() - frames.iter().map(|frame| frame.len()).sum::<usize>();
    assert_every_flip_is_noticed("levels", &chunk[..head], |bytes| {
        Chunk::parse(&[bytes, &chunk[head..]].concat()).is_ok()
    });
}

#[test]
fn streams_without_loss() {
    let bits: Vec<u16> = rows(4, 9.0).iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    let plane = LosslessPlaneBuf::fit(ElementType::Bf16, &bits[..20 * CHANNELS], CHANNELS).unwrap();
    let stored = plane.to_bytes();
    check("lossless.kvcl", &stored);
    assert_every_flip_is_noticed("lossless", &stored, |bytes| LosslessPlaneBuf::from_bytes(bytes).is_ok());
    let plane = plane.view();
    let info = FrameInfo { element: ElementType::Bf16, lossless: true, ..info() };
    let mut frame = vec![];
    encode_lossless_frame(&info, &[plane; 2], &[&bits[..]; 2], &mut frame).unwrap();
    check("lossless.kvcc", &frame);
    check("lossless.u16", &bits.repeat(2).iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let decode = |frame: &[u8]| -> Result<Vec<u16>, Error> {
        let frame = Frame::parse(frame, info.elements())?;
        let mut out = vec![0; bits.len()];
        for side in [Side::Keys, Side::Values] {
            for (block, out) in out.chunks_mut(info.block_tokens * CHANNELS).enumerate() {
                frame.decode_lossless_block_into(&plane, BlockIndex { layer: 0, side, block }, out)?;
            }
        }
        Ok(out)
    };
    assert_eq!(decode(&frame).unwrap(), bits);
    assert_every_flip_is_noticed("lossless", &frame, |bytes| decode(bytes).is_ok());
}

/// Low bits in the stream of the symbols, as 0.2.0 wrote them.
#[test]
fn joint_streams_without_loss() {
    let read = |name| std::fs::read(folder().join(name)).unwrap();
    let plane = LosslessPlaneBuf::from_bytes(&read("lossless-joint.kvcl")).unwrap();
    let bytes = read("lossless-joint.kvcc");
    let frame = Frame::parse(&bytes, info().elements()).unwrap();
    let mut out = vec![0; 2 * TOKENS * CHANNELS];
    for (side, out) in [Side::Keys, Side::Values].into_iter().zip(out.chunks_exact_mut(TOKENS * CHANNELS)) {
        let place = Place::nhd(HEADS, HEAD_DIM);
        frame.decode_lossless_plane_to(&plane.view(), 0, side, &place, out).unwrap();
    }
    let out: Vec<u8> = out.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert!(out == read("lossless-joint.u16"));
}

/// A model of two layers, whose keys have a transform, at two levels; the frame is of half-precision rows.
#[test]
fn a_profile() {
    let model = ModelInfo {
        model_id: ModelInfo::id_of("vectors"),
        layers: 2,
        heads: HEADS,
        head_dim: HEAD_DIM,
        keys_rotated: true,
    };
    let planes: Vec<Vec<f16>> =
        (5..9).map(|seed| rows(seed, 2.0).into_iter().map(f16::from_f32).collect()).collect();
    let rows: Vec<_> =
        planes.chunks_exact(2).map(|layer| LayerRows { keys: &layer[0][..], values: &layer[1] }).collect();
    let place = Place::nhd(HEADS, HEAD_DIM);
    let profile = Profile::fit(model, 2, TOKENS, &rows, &place, |level, layer, side, sample| {
        let steps = [[0.125, 0.5][level]; CHANNELS];
        let options = FitOptions {
            predictor: [PredictorKind::Mean, PredictorKind::Previous][layer],
            steps: Steps::Given(&steps),
            models: ModelKind::Families,
            coder: Coder::InterleavedRans,
        };
        PlaneBuf::fit(sample, CHANNELS, (side == Side::Keys).then(transform), &options)
    });
    let profile = profile.unwrap();
    check("model.kvcm", &profile.to_bytes());
    let info = FrameInfo { block_tokens: 30, first_token: 4, ..profile.frame_info(1, TOKENS) };
    let mut frame = vec![0; info.max_frame_len()];
    let len = profile.encode_into(&info, &rows, &place, &mut frame).unwrap();
    check("model.kvcc", &frame[..len]);
    let frame = Frame::parse(&frame[..len], info.elements()).unwrap();
    let mut decoded = vec![0.0_f32; 4 * TOKENS * CHANNELS];
    for (layer, out) in decoded.chunks_exact_mut(2 * TOKENS * CHANNELS).enumerate() {
        let (keys, values) = out.split_at_mut(TOKENS * CHANNELS);
        profile.decode_layer_to(&frame, layer, None, &place, keys, values).unwrap();
    }
    check("model.f32", &decoded.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
}

/// A model of one layer with a level without loss, before a lossy one; the frame has rows that no sample has.
#[test]
fn a_profile_with_a_level_without_loss() {
    let model = ModelInfo { model_id: 5, layers: 1, heads: HEADS, head_dim: HEAD_DIM, keys_rotated: false };
    let place = Place::nhd(HEADS, HEAD_DIM);
    let sample: Vec<f16> = rows(3, 2.0).into_iter().map(f16::from_f32).collect();
    let layer = [LayerRows { keys: &sample[..], values: &sample }];
    let lossless = Profile::fit_lossless(model, ElementType::F16, TOKENS, &layer, &place).unwrap();
    let lossy = Profile::fit(model, 1, TOKENS, &layer, &place, |_, _, _, sample| {
        PlaneBuf::fit(sample, CHANNELS, None, &FitOptions::default())
    });
    let profile = Profile::join([lossless, lossy.unwrap()]).unwrap();
    check("first-level.kvcm", &profile.to_bytes());
    let bits: Vec<u16> = (0..TOKENS * CHANNELS).map(|i| (i * i * 31 + 7 * i) as u16).collect();
    let wild: Vec<f16> = sample
        .iter()
        .zip(&bits)
        .map(|(&x, &bits)| if bits % 7 == 0 { f16::from_bits(bits) } else { x })
        .collect();
    let info = FrameInfo { block_tokens: 30, ..profile.frame_info(0, TOKENS) };
    let mut frame = vec![0; info.max_frame_len()];
    let layer = [LayerRows { keys: &wild[..], values: &sample }];
    let len = profile.encode_into(&info, &layer, &place, &mut frame).unwrap();
    check("first-level.kvcc", &frame[..len]);
    let frame = Frame::parse(&frame[..len], info.elements()).unwrap();
    let (mut keys, mut values) = (sample.clone(), wild.clone());
    profile.decode_layer_to(&frame, 0, None, &place, &mut keys, &mut values).unwrap();
    let bytes = |rows: &[f16]| rows.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect::<Vec<_>>();
    assert_eq!((bytes(&keys), bytes(&values)), (bytes(&wild), bytes(&sample)));
    check("first-level.u16", &[bytes(&keys), bytes(&values)].concat());
}

/// `format.py` reads every vector from the command line, to the same bits, and rejects mismatched files in
/// one line. `PYTHON` names an interpreter that has numpy.
#[test]
fn the_second_reader_agrees() {
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let run = |arguments: &[&Path]| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/format.py");
        Command::new(&python).arg(script).args(arguments).output()
    };
    let numpy = Command::new(&python).args(["-c", "import numpy"]).output();
    if !numpy.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: no Python with numpy");
        return;
    }
    let out = std::env::temp_dir().join(format!("codec-core-vectors-{}", std::process::id()));
    let read = |profiles: &[&str], frame: &str, expected: &str| {
        let profiles = profiles.iter().map(|name| folder().join(name));
        let files: Vec<PathBuf> = profiles.chain([folder().join(frame), "-o".into(), out.clone()]).collect();
        let output = run(&files.iter().map(PathBuf::as_path).collect::<Vec<_>>()).unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{frame}: {message}");
        assert!(std::fs::read(&out).unwrap() == std::fs::read(folder().join(expected)).unwrap(), "{frame}");
        String::from_utf8(output.stdout).unwrap()
    };
    for name in ["transform", "tables", "leading", "context", "paper", "token-scale"] {
        read(&[&format!("{name}.kvcp")], &format!("{name}.kvcc"), &format!("{name}.f32"));
    }
    for name in ["lossless", "lossless-joint"] {
        read(&[&format!("{name}.kvcl")], &format!("{name}.kvcc"), &format!("{name}.u16"));
    }
    read(&["first-level.kvcm"], "first-level.kvcc", "first-level.u16");
    let text = read(&["model.kvcm"], "model.kvcc", "model.f32");
    let lines: Vec<&str> = text.lines().collect();
    let head = "level 1, keys after RoPE, tokens 4 to 57, 2 heads of 20";
    assert!(
        lines.len() == 5 && lines[0].ends_with(head) && lines[4].starts_with("layer 1 values: "),
        "{text}"
    );
    let whole = run(&[]).unwrap();
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let refused = run(&[&folder().join("paper.kvcp"), &folder().join("tables.kvcc")]).unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && message.lines().count() == 1, "{message}");
    assert!(message.starts_with("format.py: layer 0 keys: coded under plane "), "{message}");
    std::fs::remove_file(&out).unwrap();
}
