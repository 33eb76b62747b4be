//! The kernels decode frames to the CPU's values and encode them to its bytes.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use codec_core::{
    Backend, BlockIndex, Coder, FitOptions, Frame, FrameInfo, ModelKind, PlaneBuf, PredictorKind, Side,
    Steps, TransformBuf, assemble_frame, encode_frame,
};
use common::{Buffer, Random, bytes_of, device, rounded};
use kv_gpu::codec::{Decode, DecodeArguments, Encode, EncodeArguments, Place, Planes, TokenPages};
use kv_gpu::{Device, VectorElement};

const LAYERS: usize = 2;

/// A frame of two layers, the options of its planes, and the layout of an engine's cache.
#[derive(Debug)]
struct Case {
    info: FrameInfo,
    models: ModelKind,
    predictor: PredictorKind,
    steps: Steps<'static>,
    element: VectorElement,
    heads_first: bool,
    page_tokens: Option<usize>,
    transform: Option<Arc<TransformBuf>>,
}

impl Case {
    fn random(random: &mut Random) -> Self {
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
    fn rows(&self, random: &mut Random) -> Vec<f32> {
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

    /// A plane fitted to the first half of the rows, so that later tiles choose families of their own.
    fn plane(&self, rows: &[f32]) -> PlaneBuf {
        let sample = (self.info.tokens / 2).max(1) * self.info.channels();
        // One token is not enough for a fit.
        let twice = [&rows[..sample], &rows[..sample]].concat();
        self.fit(if self.info.tokens > 3 { &rows[..sample] } else { &twice })
    }

    fn fit(&self, sample: &[f32]) -> PlaneBuf {
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
struct Cache {
    numbers: Buffer<u8>,
    pointers: Buffer<u64>,
    _pages: Option<Buffer<u32>>, // kept alive while its pointer is in `place`
    place: Place,
    plane_len: usize, // numbers
    table: Vec<u32>,
}

impl Cache {
    /// A cache that holds `rows` of every plane, or nothing but ones.
    fn new(device: &Device, case: &Case, random: &mut Random, rows: Option<&[Vec<f32>]>) -> Self {
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
    fn at(&self, info: &FrameInfo, i: usize) -> usize {
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
    fn read(&self, case: &Case, bytes: &[u8], plane: usize) -> Vec<u32> {
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

fn width(element: VectorElement) -> usize {
    if element == VectorElement::F32 { 4 } else { 2 }
}

/// Decodes a frame; returns the bytes of the cache and whether a tile failed.
fn decode(
    device: &Device,
    case: &Case,
    planes: &Planes,
    bytes: &[u8],
    cache: &Cache,
    parts: usize,
) -> (Vec<u8>, bool) {
    let kernel = Decode::new(device, planes.shape(case.element, case.page_tokens.is_some())).unwrap();
    let frame = Frame::parse(bytes, case.info.elements()).unwrap();
    let whole = [bytes, &[0; 3]].concat();
    let (there, words) = (Buffer::new(device, &whole), Buffer::new(device, planes.words()));
    let failed = Buffer::new(device, &[0_u32]);
    let blocks = case.info.blocks();
    let workspace = kernel.workspace_len(&case.info, LAYERS, blocks.div_ceil(parts));
    let workspace = Buffer::new(device, &vec![0xaa_u8; workspace]);
    for part in 0..parts {
        let arguments = DecodeArguments {
            frame: there.pointer(),
            planes: words.pointer(),
            layers: 0..LAYERS,
            blocks: part * blocks / parts..(part + 1) * blocks / parts,
            out: cache.pointers.pointer().cast(),
            place: cache.place,
            workspace: workspace.pointer(),
            failed: failed.pointer(),
        };
        // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
        // requires.
        #[allow(unsafe_code)]
        unsafe { kernel.launch(device.stream().cu_stream(), &frame, planes, &arguments) }.unwrap();
    }
    (cache.numbers.read(), failed.read()[0] != 0)
}

fn number_bits(element: VectorElement, x: f32) -> u32 {
    let mut bits = [0; 4];
    bits[..width(element)].copy_from_slice(&bytes_of(element, &[x]));
    u32::from_le_bytes(bits)
}

/// The number that these bits are.
fn number(element: VectorElement, bits: u32) -> f32 {
    match element {
        VectorElement::F32 => f32::from_bits(bits),
        VectorElement::F16 => half::f16::from_bits(bits as u16).to_f32(),
        VectorElement::Bf16 => half::bf16::from_bits(bits as u16).to_f32(),
    }
}

/// The bits of the nearest finite element.
fn finite_bits(element: VectorElement, x: f32) -> u32 {
    let largest = match element {
        VectorElement::F32 => f32::MAX,
        VectorElement::F16 => half::f16::MAX.to_f32(),
        VectorElement::Bf16 => half::bf16::MAX.to_f32(),
    };
    number_bits(element, x.clamp(-largest, largest))
}

/// Side and layer of the planes, in order.
fn sides() -> impl Iterator<Item = (usize, Side)> {
    (0..LAYERS).flat_map(|layer| [(layer, Side::Keys), (layer, Side::Values)])
}

#[test]
fn frames_decode_to_the_numbers_of_the_cpu() {
    let Some(device) = device("frames_decode_to_the_numbers_of_the_cpu") else { return };
    for seed in 0..45 {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        if seed % 10 == 9 {
            (case.predictor, case.steps, case.transform) =
                (PredictorKind::None, Steps::TokenAbsmax(15), None);
        }
        let mut rows: Vec<Vec<f32>> = (0..2 * LAYERS).map(|_| case.rows(&mut random)).collect();
        if seed % 10 == 8 {
            case.element = VectorElement::F16; // whose range ends among these rows
            rows.iter_mut().flatten().for_each(|x| *x *= 3e4);
        }
        let fitted: Vec<PlaneBuf> = rows.iter().map(|rows| case.plane(rows)).collect();
        let views: Vec<_> = fitted.iter().map(|plane| plane.view()).collect();
        let slices: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let mut bytes = vec![];
        encode_frame(&case.info, &views, &slices, &mut bytes).unwrap();
        let planes = Planes::pack(&views, case.info.head_dim).unwrap();
        let cache = Cache::new(&device, &case, &mut random, None);
        let parts = 1 + random.below(3);
        let (got, failed) = decode(&device, &case, &planes, &bytes, &cache, parts);
        assert!(!failed, "{case:?}");

        let frame = Frame::parse(&bytes, case.info.elements()).unwrap();
        for (plane, (layer, side)) in sides().enumerate() {
            let mut expected = vec![0.0; rows[plane].len()];
            frame
                .decode_plane_into_with(Backend::Scalar, &views[plane], layer, side, None, &mut expected)
                .unwrap();
            let shape = planes.shape(case.element, case.page_tokens.is_some());
            // Products on tensor cores are off by 2^-16 of their terms.
            let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let on_tensor_cores = shape.points_program().or(shape.tensor_core_program());
            let error = on_tensor_cores.map(|_| largest / 4096.0);
            let got = cache.read(&case, &got, plane);
            let wrong = got.iter().zip(&expected).position(|(&got, &x)| {
                let bits = |x| finite_bits(case.element, x);
                let number = |bits| number(case.element, bits);
                match error {
                    None => got != bits(x),
                    Some(e) => !(number(bits(x - e))..=number(bits(x + e))).contains(&number(got)),
                }
            });
            assert_eq!(wrong, None, "{case:?}, seed {seed}, plane {plane}");
        }
    }
}

/// Encodes on the device: lengths of the tiles, payload, and whether an element was not finite.
fn encode(device: &Device, case: &Case, planes: &Planes, cache: &Cache) -> (Vec<u16>, Vec<u8>, bool) {
    let kernel = Encode::new(device, planes.shape(case.element, case.page_tokens.is_some())).unwrap();
    let slots_len = Encode::slots_len(&case.info, LAYERS);
    let tiles = 2 * LAYERS * case.info.blocks() * case.info.channels().div_ceil(32);
    let (words, slots) = (Buffer::new(device, planes.words()), Buffer::new(device, &vec![0_u8; slots_len]));
    let payload = Buffer::new(device, &vec![0_u8; slots_len]);
    let workspace = Buffer::new(device, &vec![0xaa_u8; kernel.workspace_len(&case.info, LAYERS)]);
    let lengths = Buffer::new(device, &vec![0_u16; tiles]);
    let (payload_bytes, failed) = (Buffer::new(device, &[0_u64]), Buffer::new(device, &[0_u32]));
    let arguments = EncodeArguments {
        planes: words.pointer(),
        layers: 0..LAYERS,
        rows: cache.pointers.pointer().cast(),
        place: cache.place,
        slots: slots.pointer(),
        workspace: workspace.pointer(),
        lengths: lengths.pointer(),
        payload: payload.pointer(),
        capacity: slots_len,
        payload_bytes: payload_bytes.pointer(),
        failed: failed.pointer(),
    };
    // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
    // requires.
    #[allow(unsafe_code)]
    unsafe { kernel.launch(device.stream().cu_stream(), &case.info, planes, &arguments) }.unwrap();
    let mut payload = payload.read();
    payload.truncate(payload_bytes.read()[0] as usize);
    (lengths.read(), payload, failed.read()[0] != 0)
}

/// Asserts that these rows are encoded to the CPU's bytes; returns what encoded them.
fn assert_encodes_as_the_cpu(
    device: &Device,
    case: &Case,
    random: &mut Random,
    rows: &[Vec<f32>],
    fitted: &[PlaneBuf],
) -> (Planes, Cache) {
    let views: Vec<_> = fitted.iter().map(|plane| plane.view()).collect();
    let slices: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    let mut expected = vec![];
    encode_frame(&case.info, &views, &slices, &mut expected).unwrap();
    let planes = Planes::pack(&views, case.info.head_dim).unwrap();
    let cache = Cache::new(device, case, random, Some(rows));
    let (lengths, payload, failed) = encode(device, case, &planes, &cache);
    assert!(!failed, "{case:?}");
    let mut got = vec![];
    assemble_frame(&case.info, planes.ids(), &lengths, &payload, &mut got).unwrap();
    let first = got.iter().zip(&expected).position(|(got, expected)| got != expected);
    assert!(got == expected, "{case:?}: {} bytes for {}, {first:?} differs", got.len(), expected.len());
    (planes, cache)
}

#[test]
fn rows_encode_to_the_bytes_of_the_cpu() {
    let Some(device) = device("rows_encode_to_the_bytes_of_the_cpu") else { return };
    for seed in 100..145 {
        let mut random = Random(seed);
        let case = Case::random(&mut random);
        let rows: Vec<Vec<f32>> = (0..2 * LAYERS).map(|_| case.rows(&mut random)).collect();
        let fitted: Vec<PlaneBuf> = rows.iter().map(|rows| case.plane(rows)).collect();
        let (planes, mut cache) = assert_encodes_as_the_cpu(&device, &case, &mut random, &rows, &fitted);

        // A NaN is reported.
        let mut bytes = cache.numbers.read();
        let at = cache.at(&case.info, random.below(rows[0].len())) * width(case.element);
        bytes[at..at + width(case.element)].fill(0xff);
        cache.numbers.write(&bytes);
        assert!(encode(&device, &case, &planes, &cache).2, "{case:?}");
    }
}

/// What makes coefficients hard to quantize without the CPU's arithmetic.
#[derive(Clone, Copy, Debug)]
enum Hard {
    /// All lie in the middle between two bins.
    Ties,
    /// They lie next to it, on either side.
    NextToTies,
    /// Rows of zeros, and rows that are far below a step.
    Nothing,
    /// Some are thousands to millions of steps.
    Far,
    /// All are, and the squares of components exceed the numbers.
    Huge,
    /// Steps are below the rounding of the sums.
    SmallSteps,
}

#[test]
fn hard_coefficients_encode_to_the_bytes_of_the_cpu() {
    const STEP: f32 = 0.125;
    static STEPS: [f32; 256] = [STEP; 256];
    static SMALL_STEPS: [f32; 256] = [STEP / (1 << 16) as f32; 256];
    let Some(device) = device("hard_coefficients_encode_to_the_bytes_of_the_cpu") else { return };
    let hard = [Hard::Ties, Hard::NextToTies, Hard::Nothing, Hard::Far, Hard::Huge, Hard::SmallSteps];
    for (seed, hard) in (2000..).zip(hard.into_iter().cycle()).take(36) {
        let mut random = Random(seed);
        let map_dim = random.pick(&[16, 48, 64, 80, 128]);
        let (heads, channels) = (2, 2 * map_dim);
        // Sums of numbers that are a few powers of two: many coefficients are exact.
        let sums = random.below(2) == 0;
        let entry = |i: usize, j: usize| match (i % map_dim).abs_diff(j) {
            0 => 1.0,
            1 | 8 if sums => 0.5,
            _ => 0.0,
        };
        let map: Vec<f32> = (0..channels).flat_map(|i| (0..map_dim).map(move |j| entry(i, j))).collect();
        let tokens = random.pick(&[1, 9, 150, 700]);
        let info = FrameInfo {
            block_tokens: random.pick(&[13, 64, 256, 1024]),
            ..FrameInfo::new(LAYERS, heads, map_dim, tokens)
        };
        let small = matches!(hard, Hard::SmallSteps);
        let case = Case {
            info,
            models: random.pick(&[ModelKind::Families, ModelKind::Tables, ModelKind::ContextTables]),
            predictor: random.pick(&[PredictorKind::None, PredictorKind::Mean]),
            steps: Steps::Given(&if small { &SMALL_STEPS } else { &STEPS }[..channels]),
            element: match hard {
                Hard::Far | Hard::Huge => VectorElement::F32,
                _ => random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]),
            },
            heads_first: random.below(2) == 0,
            page_tokens: (random.below(3) == 0).then(|| 1 + random.below(40)),
            transform: Some(Arc::new(TransformBuf::new(map_dim, map.clone(), map).unwrap())),
        };
        let sample: Vec<f32> = random.normals(64 * channels).into_iter().map(|x| 0.3 * x).collect();
        let number = |random: &mut Random| {
            let tie = (random.below(8) as f32 - 3.5) * STEP;
            let x = match hard {
                Hard::Ties => tie,
                Hard::NextToTies => tie * (1.0 + (random.below(5) as f32 - 2.0) * f32::EPSILON),
                Hard::Nothing => random.pick(&[0.0, -0.0, 1e-30, f32::MIN_POSITIVE / 8.0]),
                Hard::Far => random.normal() * if random.below(40) == 0 { 1e3 } else { 0.3 },
                Hard::Huge => random.normal() * 1e30,
                Hard::SmallSteps => random.normal() * 0.01,
            };
            rounded(case.element, x)
        };
        let rows: Vec<Vec<f32>> =
            (0..2 * LAYERS).map(|_| (0..tokens * channels).map(|_| number(&mut random)).collect()).collect();
        let fitted: Vec<PlaneBuf> = rows.iter().map(|_| case.fit(&sample)).collect();
        let (planes, mut cache) = assert_encodes_as_the_cpu(&device, &case, &mut random, &rows, &fitted);

        // What is not finite is reported, wherever it is.
        let mut bytes = cache.numbers.read();
        let bad = random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        let at = cache.at(&case.info, random.below(rows[0].len())) * width(case.element);
        bytes[at..at + width(case.element)].copy_from_slice(&bytes_of(case.element, &[bad]));
        cache.numbers.write(&bytes);
        assert!(encode(&device, &case, &planes, &cache).2, "{case:?}, {hard:?}");
    }
}

#[test]
fn damaged_frames_fail_where_they_do_on_the_cpu() {
    let Some(device) = device("damaged_frames_fail_where_they_do_on_the_cpu") else { return };
    let mut failures = 0;
    for seed in 0..100 {
        let mut random = Random(seed + 1000);
        let mut case = Case::random(&mut random);
        (case.element, case.page_tokens) = (VectorElement::F32, None);
        let rows = case.rows(&mut random);
        let plane = case.plane(&rows);
        let view = plane.view();
        let mut bytes = vec![];
        encode_frame(&case.info, &[view; 2 * LAYERS], &[&rows[..]; 2 * LAYERS], &mut bytes).unwrap();
        let places: Vec<_> = {
            let frame = Frame::parse(&bytes, case.info.elements()).unwrap();
            let places = sides().flat_map(|(layer, side)| {
                (0..case.info.blocks())
                    .map(move |block| frame.block_range(BlockIndex { layer, side, block }).unwrap())
            });
            places.collect()
        };
        let tiles = case.info.channels().div_ceil(32);
        let index = 64 + 8 * LAYERS;
        for _ in 0..=random.below(3) {
            let entry = index + random.below(places.len()) * (12 + 2 * tiles);
            let place = &places[random.below(places.len())];
            match random.below(4) {
                0 => bytes[entry + 12 + random.below(2 * tiles)] = random.next() as u8,
                1 => bytes[place.start + random.below(place.len().min(16))] = random.next() as u8,
                _ => bytes[place.start + random.below(place.len())] = random.next() as u8,
            }
        }
        // Recomputes the checksums.
        for (block, place) in places.iter().enumerate() {
            let checksum = crc32fast::hash(&bytes[place.clone()]);
            bytes[index + block * (12 + 2 * tiles) + 8..][..4].copy_from_slice(&checksum.to_le_bytes());
        }
        let end = index + places.len() * (12 + 2 * tiles);
        let checksum = crc32fast::hash(&bytes[64..end]);
        bytes[end..end + 4].copy_from_slice(&checksum.to_le_bytes());

        let planes = Planes::pack(&[view; 2 * LAYERS], case.info.head_dim).unwrap();
        let cache = Cache::new(&device, &case, &mut random, None);
        let (got, failed) = decode(&device, &case, &planes, &bytes, &cache, 1);
        let frame = Frame::parse(&bytes, case.info.elements()).unwrap();
        let mut results = sides().map(|(layer, side)| {
            let mut out = vec![0.0; rows.len()];
            frame.decode_plane_into_with(Backend::Scalar, &view, layer, side, None, &mut out).map(|()| out)
        });
        let expected: Result<Vec<_>, _> = results.by_ref().collect();
        match expected {
            Err(_) => assert!(failed, "{case:?}, seed {seed}: the CPU finds an error"),
            Ok(expected) if !failed => {
                for (plane, expected) in expected.into_iter().enumerate() {
                    let expected: Vec<u32> = expected.into_iter().map(f32::to_bits).collect();
                    assert_eq!(cache.read(&case, &got, plane), expected, "{case:?}, seed {seed}");
                }
            }
            // A tile of the range coder is an error on the device only. Planes of the interleaved coder have
            // none.
            Ok(_) => assert!(
                places.iter().any(|place| has_range_tile(&bytes, place.start, index, &places, tiles)),
                "{case:?}, seed {seed}: the CPU finds no error"
            ),
        }
        failures += usize::from(failed);
    }
    assert!((20..100).contains(&failures), "{failures} frames of 100 failed");
}

/// Whether a tile of the block that starts at `start` is marked as one of the range coder.
fn has_range_tile(
    bytes: &[u8],
    start: usize,
    index: usize,
    places: &[std::ops::Range<usize>],
    tiles: usize,
) -> bool {
    let block = places.iter().position(|place| place.start == start).unwrap();
    let lengths = &bytes[index + block * (12 + 2 * tiles) + 12..][..2 * tiles];
    let mut at = start;
    lengths.chunks_exact(2).any(|length| {
        let kind = bytes[at];
        at += 2 * usize::from(u16::from_le_bytes([length[0], length[1]]));
        kind == 3
    })
}

#[test]
fn planes_without_a_kernel_are_errors() {
    let random = &mut Random(1);
    let case = Case { page_tokens: None, ..Case::random(random) };
    let rows = random.normals(case.info.channels() * 40);
    for (predictor, coder) in
        [(PredictorKind::Anchor { group: 4 }, Coder::InterleavedRans), (PredictorKind::Mean, Coder::Range)]
    {
        let options =
            FitOptions { predictor, steps: Steps::Deviations(0.5), models: ModelKind::Families, coder };
        let plane = PlaneBuf::fit(&rows, case.info.channels(), None, &options).unwrap();
        let packed = Planes::pack(&[plane.view()], case.info.head_dim);
        assert!(matches!(packed, Err(kv_gpu::Error::Unsupported { .. })));
    }
    assert!(matches!(Planes::pack(&[], 4), Err(kv_gpu::Error::Argument { .. })));
    // Only one of the planes has a transform.
    let channels = case.info.channels();
    let maps = vec![0.5; channels * channels];
    let transform = Arc::new(TransformBuf::new(channels, maps.clone(), maps).unwrap());
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let planes =
        [Some(transform), None].map(|transform| PlaneBuf::fit(&rows, channels, transform, &options).unwrap());
    let views = planes.each_ref().map(|plane| plane.view());
    assert!(matches!(Planes::pack(&views, case.info.head_dim), Err(kv_gpu::Error::Unsupported { .. })));
}
