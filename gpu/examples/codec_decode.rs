//! CacheGen's receiver: decodes a frame into a cache, each layer while the next one is copied.

#[path = "common/gpu.rs"]
mod gpu;

use codec_core::{
    BlockIndex, Coder, FitOptions, Frame, FrameInfo, ModelKind, PlaneBuf, PredictorKind, Side, Steps,
    encode_frame,
};
use cudarc::driver::result::memcpy_htod_async;
use gpu::{Gpu, Result, numbers};
use half::f16;
use kv_gpu::VectorElement;
use kv_gpu::codec::{Decode, DecodeArguments, Place, Planes};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let info = FrameInfo::new(2, 4, 64, 1000); // layers, heads, head_dim, tokens
    let (layers, channels, rows) = (info.layers, info.channels(), numbers(1000 * info.channels()));
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let plane = PlaneBuf::fit(&rows, channels, None, &options)?;
    let mut bytes = vec![]; // the frame that the sender sent
    encode_frame(&info, &[plane.view(); 4], &[&rows[..]; 4], &mut bytes)?;

    let frame = Frame::parse(&bytes, info.elements())?;
    let planes = Planes::pack(&[plane.view(); 4], info.head_dim)?;
    let words = gpu.upload(planes.words())?;
    let decode = Decode::new(&gpu, planes.shape(VectorElement::F16, false))?;
    let (there, out) = (gpu.zeros::<u8>(bytes.len() + 3)?, gpu.zeros::<f16>(4 * rows.len())?);
    let pointers: Vec<u64> = (0..4).map(|plane| out.pointer.offset(plane * rows.len()).address()).collect();
    let (pointers, failed) = (gpu.upload(&pointers)?, gpu.zeros::<u32>(1)?);
    let workspace = gpu.zeros::<u8>(decode.workspace_len(&info, 1, info.blocks()))?;
    let (decoding, copying) = (gpu.stream(), gpu.context().new_stream()?);
    copying.join(decoding)?;
    let mut copied = 0;
    for layer in 0..layers {
        let arrived =
            frame.block_range(BlockIndex { layer, side: Side::Values, block: info.blocks() - 1 })?.end;
        // SAFETY: `there` has room for the bytes. (From pinned memory the copy would not block the host
        // either.)
        unsafe {
            memcpy_htod_async(
                there.pointer.offset(copied).address(),
                &bytes[copied..arrived],
                copying.cu_stream(),
            )?
        };
        copied = arrived;
        decoding.join(&copying)?;
        let arguments = DecodeArguments {
            frame: there.pointer,
            planes: words.pointer,
            layers: layer..layer + 1,
            blocks: 0..info.blocks(),
            out: pointers.pointer.offset(2 * layer).cast(),
            place: Place { token_stride: channels, head_stride: info.head_dim, first_token: 0, pages: None },
            rope: None,
            workspace: workspace.pointer,
            failed: failed.pointer,
        };
        // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
        unsafe { decode.launch(gpu.stream().cu_stream(), &frame, &planes, &arguments)? };
    }
    println!("failed: {}; {} became {}", gpu.read(&failed)?[0], rows[3], gpu.read(&out)?[3]);
    Ok(())
}
