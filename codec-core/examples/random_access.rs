//! Decodes one block of one layer without allocation, and applies RoPE to its keys.

use codec_core::*;

const HEAD_DIM: usize = 8;
const TOKENS: usize = 1000;

fn main() -> Result<(), Error> {
    let keys: Vec<f32> = (0..TOKENS * HEAD_DIM).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let options = FitOptions {
        predictor: PredictorKind::Previous,
        steps: Steps::Deviations(0.25),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let fitted = PlaneBuf::fit(&keys, HEAD_DIM, None, &options)?;
    let plane = fitted.view();
    let info = FrameInfo { block_tokens: 128, model_id: 1, ..FrameInfo::new(3, 1, HEAD_DIM, TOKENS) };
    let mut bytes = vec![];
    encode_frame(&info, &[plane; 6], &[&keys[..]; 6], &mut bytes)?;

    let frame = Frame::parse(&bytes, info.elements())?;
    let (layer, block) = (2, 5);
    let index = BlockIndex { layer, side: Side::Keys, block };
    let tokens = info.tokens_of_block(block);
    println!(
        "block {block} of layer {layer}: tokens {tokens:?}, {} of {} bytes",
        frame.block_range(index)?.len(),
        bytes.len()
    );

    // Cosines and sines of the positions of the block.
    let angles = |token: usize| {
        (0..HEAD_DIM / 2).map(move |i| token as f32 * 10_000_f32.powf(-2.0 * i as f32 / HEAD_DIM as f32))
    };
    let cos: Vec<f32> = tokens.clone().flat_map(angles).map(f32::cos).collect();
    let sin: Vec<f32> = tokens.clone().flat_map(angles).map(f32::sin).collect();
    let rope = RopeTable::halves(HEAD_DIM, &cos, &sin)?;
    let mut out = vec![0.0; tokens.len() * HEAD_DIM];
    frame.decode_block_into(&plane, index, Some(&rope), &mut out)?;
    println!("first key, rotated to position {}: {:.2?}", tokens.start, &out[..HEAD_DIM]);
    Ok(())
}
