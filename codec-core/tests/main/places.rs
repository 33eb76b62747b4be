//! Rows of any element type, strided or paged, give the same bytes and values as contiguous rows.

use codec_core::*;
use half::{bf16, f16};
use proptest::prelude::*;

use super::support::backends;

/// Elements that the test converts with `half` alone.
trait Converted: Element + PartialEq + std::fmt::Debug {
    fn of(x: f32) -> Self;
    fn to(self) -> f32;
}

impl Converted for f32 {
    fn of(x: f32) -> Self {
        x
    }
    fn to(self) -> f32 {
        self
    }
}

impl Converted for f16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to(self) -> f32 {
        self.to_f32()
    }
}

impl Converted for bf16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to(self) -> f32 {
        self.to_f32()
    }
}

/// A place, the length of its rows, and the position of each element by definition.
struct Layout {
    token_stride: usize,
    head_stride: usize,
    first_token: usize,
    page_tokens: usize, // 0: no pages
    page_stride: usize,
    table: Vec<u32>,
    len: usize,
}

impl Layout {
    fn new(
        info: &FrameInfo,
        kind: u8,
        gap: usize,
        first_token: usize,
        page_tokens: usize,
        seed: u32,
    ) -> Self {
        let (heads, dim) = (info.heads, info.head_dim);
        let paged = kind >= 2;
        let capacity = if paged { page_tokens } else { first_token + info.tokens };
        let (token_stride, head_stride) = match kind % 2 {
            0 => (heads * (dim + gap) + gap, dim + gap),
            _ => (dim + gap, capacity * (dim + gap) + gap),
        };
        let page_stride = capacity * heads * (dim + gap) + heads * gap + capacity * gap;
        let pages = (first_token + info.tokens).div_ceil(capacity.max(1)).max(1) as u32;
        // An odd multiplier permutes the page numbers below a power of two.
        let table: Vec<u32> =
            (0..pages).map(|i| (2 * seed + 1).wrapping_mul(i) % pages.next_power_of_two()).collect();
        let len = page_stride * pages.next_power_of_two() as usize;
        let page_tokens = if paged { page_tokens } else { 0 };
        Self { token_stride, head_stride, first_token, page_tokens, page_stride, table, len }
    }

    fn place(&self) -> Place<'_> {
        Place {
            token_stride: self.token_stride,
            head_stride: self.head_stride,
            first_token: self.first_token,
            pages: (self.page_tokens > 0).then_some(TokenPages {
                table: &self.table,
                page_tokens: self.page_tokens,
                stride: self.page_stride,
            }),
        }
    }

    fn at(&self, token: usize, head: usize, i: usize) -> usize {
        let position = self.first_token + token;
        let (page, slot) = match self.page_tokens {
            0 => (0, position),
            n => (self.table[position / n] as usize, position % n),
        };
        page * self.page_stride + slot * self.token_stride + head * self.head_stride + i
    }
}

fn plane(sample: &[f32], channels: usize, kind: usize) -> PlaneBuf {
    let options = FitOptions {
        predictor: [PredictorKind::Mean, PredictorKind::Previous, PredictorKind::Anchor { group: 3 }]
            [kind % 3],
        steps: Steps::Deviations(0.3),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    PlaneBuf::fit(sample, channels, None, &options).unwrap()
}

fn round_trip<E: Converted>(info: &FrameInfo, layout: &Layout, rows: &[f32], kind: usize) {
    let elements: Vec<E> = rows.iter().map(|&x| E::of(x)).collect();
    let widened: Vec<f32> = elements.iter().map(|x| x.to()).collect();
    let untouched = E::of(-7.0);
    let mut placed = vec![untouched; layout.len];
    let each = || {
        let dims = (0..info.tokens).flat_map(|t| (0..info.heads).map(move |h| (t, h)));
        dims.flat_map(|(t, h)| (0..info.head_dim).map(move |i| layout.at(t, h, i)))
    };
    each().zip(&elements).for_each(|(at, &x)| placed[at] = x);

    let plane = plane(rows, info.channels(), kind);
    let planes = [plane.view(); 2];
    let mut expected = vec![];
    encode_frame(info, &planes, &[&widened, &widened], &mut expected).unwrap();
    assert!(expected.len() <= info.max_frame_len());
    let frame = Frame::parse(&expected, info.elements()).unwrap();
    let mut decoded = vec![0.0; rows.len()];
    frame.decode_plane_into(&planes[0], 0, Side::Values, None, &mut decoded).unwrap();
    let mut whole = vec![untouched; layout.len];
    each().zip(&decoded).for_each(|(at, &x)| whole[at] = E::of(x));

    let place = layout.place();
    for backend in backends() {
        let mut bytes = vec![9; info.max_frame_len()];
        let len = encode_frame_into_with(backend, info, &planes, &[&placed, &placed], &place, &mut bytes);
        assert_eq!(bytes[..len.unwrap()], expected);
        let mut out = vec![untouched; layout.len];
        frame.decode_plane_to_with(backend, &planes[0], 0, Side::Values, None, &place, &mut out).unwrap();
        assert_eq!(out, whole);
        let mut out = vec![untouched; layout.len];
        let mut scratch = vec![0.0; info.block_tokens * info.channels()];
        for block in 0..info.blocks() {
            let index = BlockIndex { layer: 0, side: Side::Values, block };
            let scratch = &mut scratch;
            frame.decode_block_to_with(backend, &planes[0], index, None, &place, scratch, &mut out).unwrap();
        }
        assert_eq!(out, whole);
    }
}

fn lossless_round_trip(info: &FrameInfo, layout: &Layout, rows: &[f32]) {
    let info = FrameInfo { lossless: true, element: ElementType::F16, ..*info };
    let bits: Vec<u16> = rows.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
    let mut placed = vec![0xabcd; layout.len];
    let dims = (0..info.tokens).flat_map(|t| (0..info.heads).map(move |h| (t, h)));
    dims.flat_map(|(t, h)| (0..info.head_dim).map(move |i| layout.at(t, h, i)))
        .zip(&bits)
        .for_each(|(at, &x)| placed[at] = x);
    let plane = LosslessPlaneBuf::fit(info.element, &bits, info.channels()).unwrap();
    let (planes, place) = ([plane.view(); 2], layout.place());
    let (mut expected, mut bytes) = (vec![], vec![0; info.max_frame_len()]);
    encode_lossless_frame(&info, &planes, &[&bits, &bits], &mut expected).unwrap();
    let len = encode_lossless_frame_into(&info, &planes, &[&placed, &placed], &place, &mut bytes).unwrap();
    assert_eq!(bytes[..len], expected);
    let frame = Frame::parse(&expected, info.elements()).unwrap();
    let mut out = vec![0xabcd; layout.len];
    frame.decode_lossless_plane_to(&planes[0], 0, Side::Keys, &place, &mut out).unwrap();
    assert_eq!(out, placed);
}

proptest! {
    #[test]
    fn places_and_elements_are_those_of_plain_rows(
        (heads, dim, tokens, block) in (1_usize..4, 1_usize..24, 2_usize..60, 1_usize..40),
        (kind, gap, first, page_tokens) in (0_u8..4, 0_usize..3, 0_usize..20, 1_usize..20),
        (predictor, element, seed) in (0_usize..3, 0_u8..4, 0_u32..1000),
    ) {
        let info = FrameInfo { block_tokens: block, ..FrameInfo::new(1, heads, dim, tokens) };
        let rows: Vec<f32> = (0..tokens * heads * dim)
            .map(|i| ((i as f32 + seed as f32) * 0.37).sin() * (1 + i % 5) as f32)
            .collect();
        let layout = Layout::new(&info, kind, gap, first, page_tokens, seed);
        match element {
            0 => round_trip::<f32>(&info, &layout, &rows, predictor),
            1 => round_trip::<f16>(&info, &layout, &rows, predictor),
            2 => round_trip::<bf16>(&info, &layout, &rows, predictor),
            _ => lossless_round_trip(&info, &layout, &rows),
        }
    }
}

/// Every kind of tile, with few and with many channels, at values that maximize its size.
#[test]
fn no_frame_is_longer_than_its_bound() {
    let mut state = 1_u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 - 8_388_608.0
    };
    for (channels, tokens, block) in [(1, 1, 1), (1, 50, 7), (3, 40, 40), (33, 20, 9), (70, 300, 256)] {
        let info = FrameInfo { block_tokens: block, ..FrameInfo::new(1, 1, channels, tokens) };
        let rows: Vec<f32> = (0..channels * tokens).map(|_| noise()).collect();
        let sample: Vec<f32> = (0..20 * channels).map(|i| (i as f32).sin()).collect();
        for kind in 0..4 {
            let options = FitOptions {
                predictor: if kind == 1 { PredictorKind::Anchor { group: 1 } } else { PredictorKind::None },
                steps: if kind == 2 { Steps::TokenAbsmax(127) } else { Steps::Deviations(1e-3) },
                models: ModelKind::Tables,
                coder: if kind == 3 { Coder::Range } else { Coder::InterleavedRans },
            };
            let plane = PlaneBuf::fit(&sample, channels, None, &options).unwrap();
            let mut bytes = vec![];
            encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut bytes).unwrap();
            assert!(bytes.len() <= info.max_frame_len(), "{channels} {tokens} {kind}");

            let mut exact = vec![0; bytes.len()];
            let place = Place::nhd(1, channels);
            let encode =
                |out: &mut [u8]| encode_frame_into(&info, &[plane.view(); 2], &[&rows, &rows], &place, out);
            assert_eq!(encode(&mut exact), Ok(bytes.len()));
            assert_eq!(exact, bytes);
            let (needed, actual) = (bytes.len(), bytes.len() - 1);
            let mut short = vec![7; actual];
            assert_eq!(encode(&mut short), Err(Error::TooShort { what: "out", needed, actual }));
            assert!(short.iter().all(|&byte| byte == 7));
        }
    }
    let endless = FrameInfo::new(usize::MAX, usize::MAX, usize::MAX, usize::MAX);
    assert_eq!(endless.max_frame_len(), usize::MAX);
}

#[test]
fn places_outside_of_their_rows_are_refused() {
    let (heads, dim, tokens) = (2, 3, 5);
    let info = FrameInfo::new(1, heads, dim, tokens);
    let sample: Vec<f32> = (0..60).map(|i| (i as f32).sin()).collect();
    let plane = plane(&sample, heads * dim, 0);
    let rows = vec![1.0_f32; 30];
    let encode = |place: &Place<'_>, len: usize| {
        encode_frame_into(&info, &[plane.view(); 2], &[&rows[..len]; 2], place, &mut [0; 1000])
    };
    let mut bytes = vec![];
    encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut bytes).unwrap();
    let frame = Frame::parse(&bytes, 60).unwrap();
    let decode = |place: &Place<'_>, len: usize| {
        frame.decode_plane_to(&plane.view(), 0, Side::Keys, None, place, &mut vec![f16::ONE; len])
    };
    let whole = Place::nhd(heads, dim);
    let pages = |table, page_tokens, stride| Place {
        pages: Some(TokenPages { table, page_tokens, stride }),
        ..whole
    };
    let short = |what, needed, actual| Some(Error::TooShort { what, needed, actual });
    for (place, len, needed) in [
        (whole, 29, Some(30)),
        (whole, 30, None),
        (Place { first_token: 1, ..whole }, 30, Some(36)),
        (Place::hnd(5, dim), 30, None),
        (Place::hnd(6, dim), 30, Some(33)),
        (Place { token_stride: usize::MAX, ..whole }, 30, Some(usize::MAX)),
        (Place { head_stride: usize::MAX, ..whole }, 30, Some(usize::MAX)),
        (pages(&[0, 1, 2], 2, 12), 30, None), // the last page is not full
        (pages(&[2, 1, 0], 2, 12), 30, Some(36)),
        (pages(&[0, u32::MAX, 1], 2, 12), 30, Some(12 * u32::MAX as usize + 12)),
    ] {
        assert_eq!(
            encode(&place, len).err(),
            needed.and_then(|n| short("rows of a plane", n, len)),
            "{place:?}"
        );
        assert_eq!(decode(&place, len).err(), needed.and_then(|n| short("out", n, len)), "{place:?}");
    }
    let table_short = short("page table", 3, 2);
    assert_eq!(encode(&pages(&[0, 1], 2, 12), 30).err(), table_short);
    assert_eq!(decode(&pages(&[0, 1], 2, 12), 30).err(), table_short);
    assert_eq!(encode(&pages(&[0], 0, 12), 30), Err(Error::Zero { what: "page_tokens" }));
    assert_eq!(encode(&Place { first_token: usize::MAX, ..whole }, 30), Err(Error::TooLarge));
    let index = BlockIndex { layer: 0, side: Side::Keys, block: 0 };
    let mut out = [f16::ONE; 30];
    let result = frame.decode_block_to(&plane.view(), index, None, &whole, &mut [0.0; 29], &mut out);
    assert_eq!(result.err(), short("scratch", 30, 29));
}
