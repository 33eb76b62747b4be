//! Fits planes once, then encodes and decodes a chunk of a two-layer cache.

use codec_core::*;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const TOKENS: usize = 600;

/// Values of one plane. Each channel has its own scale and mean.
fn plane(seed: u32, tokens: usize) -> Vec<f32> {
    let mut state = seed;
    (0..tokens * HEADS * HEAD_DIM)
        .map(|i| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let channel = i % (HEADS * HEAD_DIM);
            ((state >> 8) as f32 / 8_388_608.0 - 1.0) * (1.0 + channel as f32 / 4.0) + channel as f32
        })
        .collect()
}

fn main() -> Result<(), Error> {
    let channels = HEADS * HEAD_DIM;
    // Once per model, over a sample text: a plane for the keys and one for the values of every layer.
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let fitted: Vec<PlaneBuf> = (0..2 * LAYERS as u32)
        .map(|seed| PlaneBuf::fit(&plane(seed, 400), channels, None, &options))
        .collect::<Result<_, _>>()?;
    let stored: Vec<Vec<u8>> = fitted.iter().map(PlaneBuf::to_bytes).collect();
    println!("profile: {} bytes", stored.iter().map(Vec::len).sum::<usize>());

    // One frame per chunk of tokens.
    let rows: Vec<Vec<f32>> = (0..2 * LAYERS as u32).map(|seed| plane(seed + 100, TOKENS)).collect();
    let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    let info = FrameInfo {
        element: ElementType::F16,
        model_id: 0x5eed,
        ..FrameInfo::new(LAYERS, HEADS, HEAD_DIM, TOKENS)
    };
    let planes: Vec<Plane<'_>> = fitted.iter().map(PlaneBuf::view).collect();
    let mut bytes = vec![];
    encode_frame(&info, &planes, &rows, &mut bytes)?;
    println!(
        "frame: {} bytes, {:.2} bits per element",
        bytes.len(),
        8.0 * bytes.len() as f64 / info.elements() as f64
    );

    // The receiver limits the number of elements to what its memory holds.
    let frame = Frame::parse(&bytes, 1 << 20)?;
    let mut decoded = vec![0.0; TOKENS * channels];
    for (layer, rows) in rows.chunks_exact(2).enumerate() {
        for (side, rows) in [Side::Keys, Side::Values].into_iter().zip(rows) {
            let plane = &planes[2 * layer + usize::from(side == Side::Values)];
            frame.decode_plane_into(plane, layer, side, None, &mut decoded)?;
            let worst = rows.iter().zip(&decoded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("layer {layer} {side:?}: largest error {worst:.3}");
        }
    }
    Ok(())
}
