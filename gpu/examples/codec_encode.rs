//! CacheGen's sender: encodes a cache on the device; the host adds header, index and checksums of the frame.

#[path = "common/gpu.rs"]
mod gpu;

use codec_core::{Coder, FitOptions, FrameInfo, ModelKind, PlaneBuf, PredictorKind, Steps, assemble_frame};
use gpu::{Gpu, Result, halves, numbers};
use kv_gpu::VectorElement;
use kv_gpu::codec::{Encode, EncodeArguments, Place, Planes};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let info = FrameInfo::new(2, 4, 64, 1000); // layers, heads, head_dim, tokens
    let (layers, channels) = (info.layers, info.channels());
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let plane = PlaneBuf::fit(&numbers(1000 * channels), channels, None, &options)?; // once for a model
    let planes = Planes::pack(&[plane.view(); 4], info.head_dim)?; // one for all
    let words = gpu.upload(planes.words())?;
    let rows = gpu.upload(&halves(1000 * channels))?; // (tokens, heads, head_dim), the same for all
    let pointers = gpu.upload(&[rows.pointer.address(); 4])?;
    let encode = Encode::new(&gpu, planes.shape(VectorElement::F16, false))?;
    let capacity = Encode::slots_len(&info, layers);
    let (slots, payload) = (gpu.zeros::<u8>(capacity)?, gpu.zeros::<u8>(capacity)?);
    let workspace = gpu.zeros::<u8>(encode.workspace_len(&info, layers))?;
    let lengths = gpu.zeros::<u16>(2 * layers * info.blocks() * channels.div_ceil(32))?;
    let (payload_bytes, failed) = (gpu.zeros::<u64>(1)?, gpu.zeros::<u32>(1)?);
    let arguments = EncodeArguments {
        planes: words.pointer,
        layers: 0..layers,
        rows: pointers.pointer.cast(),
        place: Place { token_stride: channels, head_stride: info.head_dim, first_token: 0, pages: None },
        slots: slots.pointer,
        workspace: workspace.pointer,
        lengths: lengths.pointer,
        payload: payload.pointer,
        capacity,
        payload_bytes: payload_bytes.pointer,
        failed: failed.pointer,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { encode.launch(gpu.stream().cu_stream(), &info, &planes, &arguments)? };
    let payload = &gpu.read(&payload)?[..gpu.read(&payload_bytes)?[0] as usize];
    let mut frame = vec![];
    assemble_frame(&info, planes.ids(), &gpu.read(&lengths)?, payload, &mut frame)?;
    println!("{} elements in {} bytes; failed: {}", info.elements(), frame.len(), gpu.read(&failed)?[0]);
    Ok(())
}
