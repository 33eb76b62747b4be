//! The kernels decode frames to the CPU's values and encode them to its bytes: random frames, and an engine's cache
//! to decode them to and encode them from.

mod damage;
mod decode;
mod encode;
mod planes;
mod rope;

use std::sync::Arc;

use codec_core::{
    Coder, FitOptions, FrameInfo, ModelKind, PlaneBuf, PredictorKind, Side, Steps, TransformBuf,
};
use kv_gpu::codec::{Place, TokenPages};
use kv_gpu::{Device, VectorElement};

use crate::common::{Buffer, Random, bytes_of, rounded};

pub const LAYERS: usize = 2;

/// A frame of two layers, the options of its planes, and the layout of an engine's cache.
#[derive(Debug)]
pub struct Case {
    pub info: FrameInfo,
    pub models: ModelKind,
    pub predictor: PredictorKind,
    pub steps: Steps<'static>,
    pub element: VectorElement,
    pub heads_first: bool,
    pub page_tokens: Option<usize>,
    pub transform: Option<Arc<TransformBuf>>,
}

impl Case {
    pub fn random(random: &mut Random) -> Self {
        let (heads, head_dim) = random.pick(&[(1, 32), (2, 64), (3, 40), (5, 7), (8, 128)]);
        let tokens = random.pick(&[1, 2, 31, 150, 700]);
        let block_tokens = random.pick(&[1, 13, 64, 256, 1024]);
        // The transform's head size: that of the frame, or another divisor of the channels.
        let map_dims: Vec<usize> = [head_dim, 2 * head_dim, 1, 35, 16, 120, 512]
            .into_iter()
            .filter(|d| heads * head_dim % d == 0)
            .collect();
        let map_dim = random.pick(&map_dims);
        let maps = |random: &mut Random| {
            let numbers = random.normals(heads * head_dim * map_dim);
            numbers.into_iter().map(|x| x / (map_dim as f32).sqrt()).collect()
        };
        let transform = (random.below(2) == 0)
            .then(|| TransformBuf::new(map_dim, maps(random), maps(random)).unwrap().into());
        Self {
            info: FrameInfo { block_tokens, ..FrameInfo::new(LAYERS, heads, head_dim, tokens) },
            models: random.pick(&[ModelKind::Families, ModelKind::Tables, ModelKind::ContextTables]),
            predictor: random.pick(&[PredictorKind::None, PredictorKind::Mean, PredictorKind::Previous]),
            steps: Steps::Deviations(random.pick(&[0.002, 0.05, 0.5, 1.0, 3.0])),
            element: random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]),
            heads_first: random.below(2) == 0,
            page_tokens: (random.below(3) == 0).then(|| 1 + random.below(40)),
            transform,
        }
    }

    /// Rows of a plane. Channels have different scales, a few values are outliers, and the second half of the
    /// tokens has another spread than the first.
    pub fn rows(&self, random: &mut Random) -> Vec<f32> {
        let channels = self.info.channels();
        let mut last = vec![0.0; channels];
        let mut rows = Vec::with_capacity(self.info.tokens * channels);
        for token in 0..self.info.tokens {
            let spread = if 2 * token > self.info.tokens { random.pick(&[0.3, 1.0, 4.0]) } else { 1.0 };
            for (channel, last) in last.iter_mut().enumerate() {
                let far = if random.below(500) == 0 { 80.0 } else { 1.0 };
                let scale = 0.1 + (channel % 11) as f32 * 0.2;
                *last = *last * 0.5 + random.normal() * scale * far * spread;
                let number = *last + channel as f32 * 0.01;
                rows.push(rounded(self.element, number));
            }
        }
        rows
    }

    /// A plane fitted to the first half of the rows, so that later tiles choose their own families.
    pub fn plane(&self, rows: &[f32]) -> PlaneBuf {
        let sample = (self.info.tokens / 2).max(1) * self.info.channels();
        // One token is not enough for a fit.
        let twice = [&rows[..sample], &rows[..sample]].concat();
        self.fit(if self.info.tokens > 3 { &rows[..sample] } else { &twice })
    }

    pub fn fit(&self, sample: &[f32]) -> PlaneBuf {
        let options = FitOptions {
            predictor: self.predictor,
            steps: self.steps,
            models: self.models,
            coder: Coder::InterleavedRans,
        };
        PlaneBuf::fit(sample, self.info.channels(), self.transform.clone(), &options).unwrap()
    }
}

/// Memory of an engine's cache: all planes, one after the other.
pub struct Cache {
    pub numbers: Buffer<u8>,
    pub pointers: Buffer<u64>,
    _pages: Option<Buffer<u32>>, // kept alive while its pointer is in `place`
    pub place: Place,
    pub plane_len: usize, // elements
    pub table: Vec<u32>,
}

impl Cache {
    /// A cache that holds `rows` of every plane, or nothing but ones.
    pub fn new(device: &Device, case: &Case, random: &mut Random, rows: Option<&[Vec<f32>]>) -> Self {
        let (info, first_token) = (&case.info, random.below(5));
        let tokens = first_token + info.tokens;
        let page_tokens = case.page_tokens.unwrap_or(tokens);
        let pages = tokens.div_ceil(page_tokens);
        let (token_stride, head_stride) = if case.heads_first {
            (info.head_dim, page_tokens * info.head_dim)
        } else {
            (info.channels(), info.head_dim)
        };
        let stride = page_tokens * info.channels();
        let table: Vec<u32> = (0..pages as u32).rev().collect();
        let there = case.page_tokens.map(|_| Buffer::new(device, &table));
        let place = Place {
            token_stride,
            head_stride,
            first_token,
            pages: there.as_ref().map(|there| TokenPages { table: there.pointer(), page_tokens, stride }),
        };
        let mut cache = Self {
            numbers: Buffer::new(device, &[]),
            pointers: Buffer::new(device, &[]),
            _pages: there,
            place,
            plane_len: pages * stride,
            table,
        };
        let width = width(case.element);
        let mut bytes = vec![0xff_u8; 2 * LAYERS * cache.plane_len * width];
        for (plane, rows) in rows.into_iter().flatten().enumerate() {
            for (i, &x) in rows.iter().enumerate() {
                let at = (plane * cache.plane_len + cache.at(info, i)) * width;
                bytes[at..at + width].copy_from_slice(&bytes_of(case.element, &[x]));
            }
        }
        cache.numbers = Buffer::new(device, &bytes);
        let pointer = |plane| cache.numbers.pointer().offset(plane * cache.plane_len * width).address();
        cache.pointers = Buffer::new(device, &(0..2 * LAYERS).map(pointer).collect::<Vec<_>>());
        cache
    }

    /// The index in its plane of element `i` of (tokens, heads, head_dim).
    pub fn at(&self, info: &FrameInfo, i: usize) -> usize {
        let (token, channel) = (i / info.channels() + self.place.first_token, i % info.channels());
        let inside = channel / info.head_dim * self.place.head_stride + channel % info.head_dim;
        match self.place.pages {
            None => token * self.place.token_stride + inside,
            Some(pages) => {
                let (page, offset) = (token / pages.page_tokens, token % pages.page_tokens);
                self.table[page] as usize * pages.stride + offset * self.place.token_stride + inside
            }
        }
    }

    /// Bits of the elements of a plane, (tokens, heads, head_dim). Asserts that memory between them is
    /// unchanged.
    pub fn read(&self, case: &Case, bytes: &[u8], plane: usize) -> Vec<u32> {
        let width = width(case.element);
        let number = |at: usize| match bytes[at * width..][..width] {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        };
        let count = case.info.tokens * case.info.channels();
        let places: Vec<usize> =
            (0..count).map(|i| plane * self.plane_len + self.at(&case.info, i)).collect();
        let mut written = vec![false; self.plane_len];
        places.iter().for_each(|at| written[at - plane * self.plane_len] = true);
        let untouched = if width == 2 { 0xffff } else { u32::MAX };
        let kept = |(i, written): (usize, &bool)| *written || number(plane * self.plane_len + i) == untouched;
        assert!(written.iter().enumerate().all(kept), "{case:?}: something between the rows was written");
        places.into_iter().map(number).collect()
    }
}

pub fn width(element: VectorElement) -> usize {
    if element == VectorElement::F32 { 4 } else { 2 }
}

/// Side and layer of the planes, in order.
pub fn sides() -> impl Iterator<Item = (usize, Side)> {
    (0..LAYERS).flat_map(|layer| [(layer, Side::Keys), (layer, Side::Values)])
}
