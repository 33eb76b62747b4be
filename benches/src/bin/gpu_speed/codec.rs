//! Frames of the codec: decoding, alone and overlapped with the copy from the host, and encoding.

mod decode;
mod encode;

use std::sync::Arc;

use codec_core::{
    Coder, FitOptions, FrameInfo, ModelKind, PlaneBuf, PredictorKind, Steps, TransformBuf, encode_frame,
};
use cudarc::driver::CudaSlice;
use half::bf16;
use kv_gpu::VectorElement;
use kv_gpu::codec::{CodecShape, Place, Planes};

use crate::stopwatch::Stopwatch;

/// Heads and components of Llama 3.1 8B.
const HEADS: usize = 8;
const DIM: usize = 128;
/// Layers and tokens of the frames, which have the same number of elements.
const SIZES: [(usize, usize); 2] = [(32, 4096), (4, 32_768)];
/// Tokens that planes are fitted to.
const FITTED: usize = 4096;

pub fn run(watch: &Stopwatch) {
    let transform = Arc::new(cosines());
    for (layers, tokens) in SIZES {
        let info = FrameInfo::new(layers, HEADS, DIM, tokens);
        for (name, predictor, models, transform) in [
            ("mean, families", PredictorKind::Mean, ModelKind::Families, None),
            ("previous, tables by context", PredictorKind::Previous, ModelKind::ContextTables, None),
            ("transform, mean, tables", PredictorKind::Mean, ModelKind::Tables, Some(&transform)),
        ] {
            let options = FitOptions {
                predictor,
                steps: Steps::Deviations(1.0),
                models,
                coder: Coder::InterleavedRans,
            };
            measure(watch, name, info, transform.cloned(), &options);
        }
    }
}

/// The cosine transform as the map of every head.
fn cosines() -> TransformBuf {
    let entry = |component: usize, coefficient: usize| {
        let angle = std::f64::consts::PI / DIM as f64 * (component as f64 + 0.5) * coefficient as f64;
        let scale = if coefficient == 0 { 1.0 } else { 2.0 };
        (angle.cos() * (scale / DIM as f64).sqrt()) as f32
    };
    let map = |entry: &dyn Fn(usize, usize) -> f32| {
        let one: Vec<f32> = (0..DIM * DIM).map(|i| entry(i / DIM, i % DIM)).collect();
        one.repeat(HEADS)
    };
    TransformBuf::new(DIM, map(&entry), map(&|coefficient, component| entry(component, coefficient))).unwrap()
}

/// Decodes and encodes frames of such planes, all layers in one launch and one layer per launch.
fn measure(
    watch: &Stopwatch,
    name: &str,
    info: FrameInfo,
    transform: Option<Arc<TransformBuf>>,
    options: &FitOptions<'_>,
) {
    let load = |layers| {
        let s = if layers == 1 { "" } else { "s" };
        format!("{name}, {layers} layer{s} x {HEADS} heads x {} x {DIM}", info.tokens)
    };
    type Measurement<'a> = fn(&Case<'a>, usize, &str);
    let kernels: [(&str, Measurement<'_>); 2] =
        [("codec decode", Case::decode), ("codec encode", Case::encode)];
    let loads = [info.layers, 1].map(|layers| (layers, load(layers)));
    let all = kernels.into_iter().flat_map(|kernel| loads.iter().map(move |load| (kernel, load)));
    let wanted: Vec<_> = all.filter(|((kernel, _), (_, load))| watch.wants(kernel, load)).collect();
    if wanted.is_empty() {
        return;
    }
    let case = Case::new(watch, info, transform, options);
    for ((_, measure), (layers, load)) in wanted {
        measure(&case, *layers, load);
    }
}

/// A frame whose planes are all the same.
struct Case<'a> {
    watch: &'a Stopwatch,
    info: FrameInfo,
    plane: PlaneBuf,
    planes: Planes,
    shape: CodecShape,
    rows: Vec<bf16>, // of a plane: (tokens, heads, components)
    bytes: Vec<u8>,
}

impl<'a> Case<'a> {
    fn new(
        watch: &'a Stopwatch,
        info: FrameInfo,
        transform: Option<Arc<TransformBuf>>,
        options: &FitOptions<'_>,
    ) -> Self {
        let channels = info.channels();
        let rows: Vec<bf16> =
            kv_benches::keys(info.tokens, channels).into_iter().map(bf16::from_f32).collect();
        let wide: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
        let plane = PlaneBuf::fit(&wide[..FITTED * channels], channels, transform, options).unwrap();
        let views = vec![plane.view(); 2 * info.layers];
        let planes = Planes::pack(&views, info.head_dim).unwrap();
        let shape = planes.shape(VectorElement::Bf16, false);
        let mut bytes = vec![];
        encode_frame(&info, &views, &vec![&wide[..]; 2 * info.layers], &mut bytes).unwrap();
        Self { watch, info, plane, planes, shape, rows, bytes }
    }

    /// Pointers (layers, 2) to the rows of all planes.
    fn pointers(&self, numbers: &CudaSlice<bf16>) -> CudaSlice<u64> {
        let first = self.watch.pointer(numbers);
        let plane = |plane| first.offset(plane * self.rows.len()).address();
        self.watch.upload(&(0..2 * self.info.layers).map(plane).collect::<Vec<_>>())
    }

    fn place(&self) -> Place {
        let info = &self.info;
        Place { token_stride: info.channels(), head_stride: info.head_dim, first_token: 0, pages: None }
    }

    /// Reports launches of `layers` layers, of which each takes `us`.
    fn report(&self, kernel: &str, load: &str, layers: usize, us: f64) {
        let part = layers as f64 / self.info.layers as f64;
        let (elements, bytes) = (self.info.elements() as f64 * part, self.bytes.len() as f64 * part);
        let shape = format!("{load}, {:.2} bits", bytes * 8.0 / elements);
        self.watch.report_rate(kernel, &shape, bytes + 2.0 * elements, elements, us);
    }
}
