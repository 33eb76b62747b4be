//! Stores a context of half-precision tensors, then loads one layer into pages, as an engine's connector
//! does.

use codec_core::*;
use half::f16;

const MODEL: ModelInfo =
    ModelInfo { model_id: 0x5eed, layers: 4, heads: 8, head_dim: 64, keys_rotated: true };
const TOKENS: usize = 512;
const PAGE_TOKENS: usize = 16;

/// A tensor (layers, 2, tokens, heads, head_dim). Each channel has its own scale and mean.
fn tensor(seed: u32) -> Vec<f16> {
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as f32 / 32_768.0 - 1.0
    };
    let channel = |i: usize| (i % MODEL.channels()) as f32 / 64.0;
    (0..2 * MODEL.layers * TOKENS * MODEL.channels())
        .map(|i| f16::from_f32((noise() + noise() + noise()) * (1.0 + channel(i)) + channel(i)))
        .collect()
}

fn layers(tensor: &[f16]) -> Vec<LayerRows<'_, f16>> {
    let halves =
        tensor.chunks_exact(tensor.len() / MODEL.layers).map(|layer| layer.split_at(layer.len() / 2));
    halves.map(|(keys, values)| LayerRows { keys, values }).collect()
}

fn main() -> Result<(), Error> {
    let place = Place::nhd(MODEL.heads, MODEL.head_dim);
    let profile = Profile::fit(MODEL, 2, TOKENS, &layers(&tensor(1)), &place, |level, _, _, sample| {
        let options = FitOptions { steps: Steps::Deviations([0.1, 0.5][level]), ..FitOptions::default() };
        PlaneBuf::fit(sample, MODEL.channels(), None, &options)
    })?;
    println!("profile: {} levels, {} bytes", profile.levels(), profile.to_bytes().len());

    let context = tensor(2);
    for level in 0..2 {
        let info = profile.frame_info(level, TOKENS);
        let mut buffer = vec![0; info.max_frame_len()];
        let len = profile.encode_into(&info, &layers(&context), &place, &mut buffer)?;

        let frame = Frame::parse(&buffer[..len], info.elements())?;
        let table: Vec<u32> = (0..(TOKENS / PAGE_TOKENS) as u32).rev().collect();
        let stride = PAGE_TOKENS * MODEL.channels();
        let pages = Some(TokenPages { table: &table, page_tokens: PAGE_TOKENS, stride });
        let (mut keys, mut values) =
            (vec![f16::ZERO; table.len() * stride], vec![f16::ZERO; table.len() * stride]);
        let paged = Place { pages, ..place };
        profile.decode_layer_to(&frame, 2, None, &paged, &mut keys, &mut values)?;

        let bits = 8.0 * len as f64 / info.elements() as f64;
        let decoded = keys.chunks_exact(stride).rev().flatten(); // by the page table
        let errors = decoded.zip(layers(&context)[2].keys).map(|(a, b)| (a.to_f32() - b.to_f32()).abs());
        println!(
            "level {level}: {bits:.2} bits per element, largest error {:.3}",
            errors.fold(0.0, f32::max)
        );
    }
    Ok(())
}
