//! Frames of the codec: decoding, alone and overlapped with the copy from the host, and encoding.

use std::sync::Arc;

use codec_core::{
    BlockIndex, Coder, FitOptions, Frame, FrameInfo, ModelKind, PlaneBuf, PredictorKind, Side, Steps,
    TransformBuf, assemble_frame, encode_frame,
};
use cudarc::driver::result::memcpy_htod_async;
use half::bf16;
use kv_gpu::codec::{Decode, DecodeArguments, Encode, EncodeArguments, Place, Planes};
use kv_gpu::{DevicePtr, VectorElement};

use crate::stopwatch::Stopwatch;

/// The shape of Llama 3.1 8B.
const INFO: FrameInfo = FrameInfo::new(32, 8, 128, 4096);
const LAYERS: usize = INFO.layers;
/// Layers that are copied at a time.
const PART: usize = 4;

pub fn run(watch: &Stopwatch) {
    let transform = Some(Arc::new(cosines()));
    for (name, predictor, models, transform) in [
        ("mean, families", PredictorKind::Mean, ModelKind::Families, None),
        ("previous, tables by context", PredictorKind::Previous, ModelKind::ContextTables, None),
        ("transform, mean, tables", PredictorKind::Mean, ModelKind::Tables, transform),
    ] {
        let load = format!("{name}, 32 layers x 8 heads x 4096 x 128");
        if watch.wants("codec decode", &load) || watch.wants("codec encode", &load) {
            measure(watch, &load, transform, predictor, models);
        }
    }
}

/// The cosine transform as the map of every head.
fn cosines() -> TransformBuf {
    let dim = INFO.head_dim;
    let entry = |component: usize, coefficient: usize| {
        let angle = std::f64::consts::PI / dim as f64 * (component as f64 + 0.5) * coefficient as f64;
        let scale = if coefficient == 0 { 1.0 } else { 2.0 };
        (angle.cos() * (scale / dim as f64).sqrt()) as f32
    };
    let map = |entry: &dyn Fn(usize, usize) -> f32| {
        let one: Vec<f32> = (0..dim * dim).map(|i| entry(i / dim, i % dim)).collect();
        one.repeat(INFO.channels() / dim)
    };
    TransformBuf::new(dim, map(&entry), map(&|coefficient, component| entry(component, coefficient))).unwrap()
}

fn measure(
    watch: &Stopwatch,
    load: &str,
    transform: Option<Arc<TransformBuf>>,
    predictor: PredictorKind,
    models: ModelKind,
) {
    let values = INFO.elements() as f64;
    let rows: Vec<bf16> =
        kv_benches::keys(INFO.tokens, INFO.channels()).into_iter().map(bf16::from_f32).collect();
    let wide: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
    let options =
        FitOptions { predictor, steps: Steps::Deviations(1.0), models, coder: Coder::InterleavedRans };
    let tensor_cores = transform.is_some();
    let plane = PlaneBuf::fit(&wide, INFO.channels(), transform, &options).unwrap();
    let plane = plane.view();
    let mut bytes = vec![];
    encode_frame(&INFO, &[plane; 2 * LAYERS], &[&wide[..]; 2 * LAYERS], &mut bytes).unwrap();
    let frame = Frame::parse(&bytes, INFO.elements()).unwrap();
    let planes = Planes::pack(&[plane; 2 * LAYERS], INFO.head_dim).unwrap();
    let shape = planes.shape(VectorElement::Bf16, false);
    let place =
        Place { token_stride: INFO.channels(), head_stride: INFO.head_dim, first_token: 0, pages: None };

    let there = watch.zeros::<u8>(bytes.len() + 3);
    let words = watch.upload(planes.words());
    let numbers = watch.zeros::<bf16>(INFO.elements());
    let pointers = |first: DevicePtr<bf16>| -> Vec<u64> {
        (0..2 * LAYERS).map(|plane| first.offset(plane * rows.len()).address()).collect()
    };
    let out = watch.upload(&pointers(watch.pointer(&numbers)));
    let failed = watch.zeros::<u32>(1);
    let decode = Decode::new(&watch.gpu, shape).unwrap();
    let workspace = watch.zeros::<u8>(decode.workspace_len(&INFO, LAYERS, INFO.blocks()));
    let arguments = DecodeArguments {
        frame: watch.pointer(&there),
        planes: watch.pointer(&words),
        layers: 0..LAYERS,
        blocks: 0..INFO.blocks(),
        out: watch.pointer(&out).cast(),
        place,
        workspace: watch.pointer(&workspace),
        failed: watch.pointer(&failed),
    };

    // From pinned memory, copied and decoded part by part: the copy of a part overlaps the decoding of the
    // previous one. SAFETY: written before it is read.
    let mut host = unsafe { watch.gpu.context().alloc_pinned::<u8>(bytes.len()) }.unwrap();
    host.as_mut_slice().unwrap().copy_from_slice(&bytes);
    let host = host.as_slice().unwrap();
    let copies = watch.gpu.context().new_stream().unwrap();
    let layers = |part: usize| part * PART..(part + 1) * PART;
    let range = |part: usize| {
        let block = |layer, side, block| frame.block_range(BlockIndex { layer, side, block }).unwrap();
        let start = if part == 0 { 0 } else { block(part * PART, Side::Keys, 0).start };
        start..block((part + 1) * PART - 1, Side::Values, INFO.blocks() - 1).end
    };
    let copy = |range: std::ops::Range<usize>, stream| {
        let to = arguments.frame.offset(range.start).address();
        // SAFETY: the buffer has room for all bytes of the frame.
        unsafe { memcpy_htod_async(to, &host[range], stream) }.unwrap();
    };
    let stream = watch.gpu.stream();
    let copied = watch.replay(|| copy(0..bytes.len(), stream.cu_stream()));
    let parts: Vec<DecodeArguments> = (0..LAYERS / PART)
        .map(|part| DecodeArguments {
            layers: layers(part),
            out: arguments.out.offset(2 * part * PART),
            ..arguments.clone()
        })
        .collect();
    let both = watch.replay(|| {
        copies.join(stream).unwrap();
        for (part, arguments) in parts.iter().enumerate() {
            copy(range(part), copies.cu_stream());
            stream.join(&copies).unwrap();
            // SAFETY: the buffers have the shapes that the arguments require, and outlive the launch.
            unsafe { decode.launch(stream.cu_stream(), &frame, &planes, arguments) }.unwrap();
        }
    });
    let bits = bytes.len() as f64 * 8.0 / values;
    // SAFETY: as above.
    let us = watch.time(1, |_, stream| unsafe { decode.launch(stream, &frame, &planes, &arguments) });
    assert_eq!(watch.download(&failed), [0]);
    // Compares the last plane with the CPU.
    let mut expected = vec![0.0; rows.len()];
    frame.decode_plane_into(&plane, LAYERS - 1, Side::Values, None, &mut expected).unwrap();
    let got = watch.download(&numbers);
    let got = &got[got.len() - rows.len()..];
    assert!(got.chunks_exact(INFO.head_dim).zip(expected.chunks_exact(INFO.head_dim)).all(|(got, row)| {
        // On tensor cores: one unit in the last place at the scale of the row's largest value (FORMAT.md).
        let largest = row.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        let tolerance = if tensor_cores { largest / 128.0 } else { 0.0 };
        got.iter().zip(row).all(|(got, &x)| (got.to_f32() - bf16::from_f32(x).to_f32()).abs() <= tolerance)
    }));
    drop(expected);
    let decoded_bytes = bytes.len() as f64 + 2.0 * values;
    if watch.wants("codec decode", load) {
        watch.report("codec decode", &format!("{load}, {bits:.2} bits"), decoded_bytes, us);
        let shape = format!("{load}, in {} parts beside their copy", LAYERS / PART);
        watch.report_with_floor("codec decode", &shape, bytes.len() as f64, both, copied);
    }
    if !watch.wants("codec encode", load) {
        return;
    }

    let given = watch.upload(&rows.repeat(2 * LAYERS));
    let all = watch.upload(&pointers(watch.pointer(&given)));
    let kernel = Encode::new(&watch.gpu, shape).unwrap();
    let slots_len = Encode::slots_len(&INFO, LAYERS);
    let (slots, payload) = (watch.zeros::<u8>(slots_len), watch.zeros::<u8>(slots_len));
    let workspace = watch.zeros::<u8>(kernel.workspace_len(&INFO, LAYERS));
    let lengths = watch.zeros::<u16>(2 * LAYERS * INFO.blocks() * INFO.channels() / 32);
    let payload_bytes = watch.zeros::<u64>(1);
    let arguments = EncodeArguments {
        planes: watch.pointer(&words),
        layers: 0..LAYERS,
        rows: watch.pointer(&all).cast(),
        place,
        slots: watch.pointer(&slots),
        workspace: watch.pointer(&workspace),
        lengths: watch.pointer(&lengths),
        payload: watch.pointer(&payload),
        capacity: slots_len,
        payload_bytes: watch.pointer(&payload_bytes),
        failed: watch.pointer(&failed),
    };
    // SAFETY: as above.
    let us = watch.time(1, |_, stream| unsafe { kernel.launch(stream, &INFO, &planes, &arguments) });
    assert_eq!(watch.download(&failed), [0]);
    let mut payload = watch.download(&payload);
    payload.truncate(watch.download(&payload_bytes)[0] as usize);
    let mut assembled = vec![];
    assemble_frame(&INFO, planes.ids(), &watch.download(&lengths), &payload, &mut assembled).unwrap();
    assert!(assembled == bytes, "other bytes than the CPU's");
    watch.report("codec encode", &format!("{load}, {bits:.2} bits"), decoded_bytes, us);
}
