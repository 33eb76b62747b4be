//! CacheGen's way: a cache becomes a frame on one device, and on another the frame becomes a cache while it arrives.
//!
//! `cargo run --release -p kv-gpu --example send_a_cache`

use codec_core::{
    Coder, FitOptions, Frame, FrameInfo, ModelKind, PlaneBuf, PredictorKind, Side, Steps, assemble_frame,
};
use cudarc::driver::{DevicePtr, result::memcpy_htod_async};
use half::f16;
use kv_gpu::codec::{Decode, DecodeArguments, Encode, EncodeArguments, Place, Planes};
use kv_gpu::{Device, VectorElement};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let info = FrameInfo::new(2, 4, 64, 1000); // layers, heads, head_dim, tokens
    let (channels, numbers) = (info.channels(), info.tokens * info.channels());
    let device = Device::open(0).map_err(|error| error.to_string())?;
    let stream = device.stream();
    let rows: Vec<f16> =
        (0..numbers).map(|i| f16::from_f32((i as f32 * 0.73).sin() * (1 + i % 5) as f32)).collect();
    let sample: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::Lanes,
    };
    let plane = PlaneBuf::fit(&sample, channels, None, &options)?; // once for a model; one for all planes here
    let planes = Planes::pack(&[plane.view()?; 4], info.head_dim)?;
    let shape = planes.shape(VectorElement::F16, false);
    let place = Place { token_stride: channels, head_stride: info.head_dim, first_token: 0, pages: None };
    let words = stream.clone_htod(planes.words())?;

    // The sender.
    let encode = Encode::new(&device, shape)?;
    let given = stream.clone_htod(&rows)?;
    let pointers = stream.clone_htod(&[given.device_ptr(stream).0; 4])?;
    let capacity = Encode::slots_len(&info, info.layers);
    let (slots, payload) = (stream.alloc_zeros::<u8>(capacity)?, stream.alloc_zeros::<u8>(capacity)?);
    let workspace = stream.alloc_zeros::<u8>(encode.workspace_len(&info, info.layers))?;
    let lengths = stream.alloc_zeros::<u16>(4 * info.blocks() * channels.div_ceil(32))?;
    let (bytes, failed) = (stream.alloc_zeros::<u64>(1)?, stream.alloc_zeros::<u32>(1)?);
    let arguments = EncodeArguments {
        planes: words.device_ptr(stream).0,
        layers: 0..info.layers,
        rows: pointers.device_ptr(stream).0,
        place,
        slots: slots.device_ptr(stream).0,
        workspace: workspace.device_ptr(stream).0,
        lengths: lengths.device_ptr(stream).0,
        payload: payload.device_ptr(stream).0,
        capacity,
        payload_bytes: bytes.device_ptr(stream).0,
        failed: failed.device_ptr(stream).0,
    };
    // SAFETY: memory of the shapes that the arguments name, kept until the stream has been waited for.
    unsafe { encode.launch(stream.cu_stream(), &info, &planes, &arguments)? };
    let bytes = stream.clone_dtoh(&bytes)?[0] as usize;
    let mut frame = vec![];
    assemble_frame(
        &info,
        planes.ids(),
        &stream.clone_dtoh(&lengths)?,
        &stream.clone_dtoh(&payload)?[..bytes],
        &mut frame,
    )?;
    println!("{} numbers in {} bytes", 4 * numbers, frame.len());

    // The receiver: a layer is decoded while the next one is copied.
    let parsed = Frame::parse(&frame, info.numbers())?;
    let decode = Decode::new(&device, shape)?;
    let there = stream.alloc_zeros::<u8>(frame.len() + 3)?;
    let out = stream.alloc_zeros::<f16>(4 * numbers)?;
    let pointers: Vec<u64> = (0..4).map(|i| out.device_ptr(stream).0 + (i * numbers * 2) as u64).collect();
    let pointers = stream.clone_htod(&pointers)?;
    let copies = device.context().new_stream()?;
    copies.join(stream)?;
    let mut copied = 0;
    for layer in 0..info.layers {
        let end = parsed.block_range(layer, Side::Values, info.blocks() - 1)?.end;
        let arguments = DecodeArguments {
            frame: there.device_ptr(stream).0,
            planes: words.device_ptr(stream).0,
            layers: layer..layer + 1,
            blocks: 0..info.blocks(),
            out: pointers.device_ptr(stream).0 + layer as u64 * 16,
            place,
            workspace: workspace.device_ptr(stream).0,
            failed: failed.device_ptr(stream).0,
        };
        // SAFETY: as above; from pinned memory the copy would not hold up the host either.
        unsafe {
            memcpy_htod_async(arguments.frame + copied as u64, &frame[copied..end], copies.cu_stream())?
        };
        copied = end;
        stream.join(&copies)?;
        // SAFETY: as above.
        unsafe { decode.launch(stream.cu_stream(), &parsed, &planes, &arguments)? };
    }
    let (out, failed) = (stream.clone_dtoh(&out)?, stream.clone_dtoh(&failed)?);
    println!("failed: {}; {} became {}", failed[0], rows[3], out[3]);
    Ok(())
}
