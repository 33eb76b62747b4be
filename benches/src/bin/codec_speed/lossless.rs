//! Lossless coding of 16-bit rows: frames, and zstd on the same elements.

use codec_core::{
    Backend, ElementType, Frame, FrameInfo, LosslessPlaneBuf, Place, Side, encode_lossless_frame_with,
};
use half::{bf16, f16};
use kv_benches::median;

use crate::data::Normal;

const HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const CHANNELS: usize = HEADS * HEAD_DIM;
const TOKENS: usize = 4096;
/// Tokens that the tables are counted on.
const SAMPLE: usize = 2000;

/// Rows whose channels have means and deviations of their own, as keys before RoPE do, and their neighbours a
/// correlation. (tokens, channels)
fn rows(tokens: usize, seed: u64) -> Vec<f32> {
    let mut shape = Normal(1);
    // Deviations, and means relative to them.
    let channels: Vec<(f64, f64)> = (0..CHANNELS).map(|_| (shape.next().exp(), shape.next())).collect();
    let mut normal = Normal(seed);
    let mut last = vec![0.0; CHANNELS];
    let mut rows = Vec::with_capacity(tokens * CHANNELS);
    for _ in 0..tokens {
        for (last, (deviation, mean)) in last.iter_mut().zip(&channels) {
            *last = 0.5 * *last + 0.75_f64.sqrt() * normal.next();
            rows.push((deviation * (*last + mean)) as f32);
        }
    }
    rows
}

/// Prints a line of JSON per element type and coder. Every coder returns the elements before it is timed.
pub fn measure(repeats: usize) {
    let (sample, text) = (rows(SAMPLE, 2), rows(TOKENS, 3));
    for element in [ElementType::Bf16, ElementType::F16] {
        let bits = |rows: &[f32]| -> Vec<u16> {
            let bits_of = |x: &f32| match element {
                ElementType::Bf16 => bf16::from_f32(*x).to_bits(),
                _ => f16::from_f32(*x).to_bits(),
            };
            rows.iter().map(bits_of).collect()
        };
        let plane = LosslessPlaneBuf::fit(element, &bits(&sample), CHANNELS).unwrap();
        let (plane, rows) = (plane.view(), bits(&text));
        let mut out = vec![0_u16; rows.len()];
        let info = FrameInfo { element, lossless: true, ..FrameInfo::new(1, HEADS, HEAD_DIM, TOKENS) };
        let place = Place::nhd(HEADS, HEAD_DIM);
        for backend in Backend::ALL.into_iter().rev().filter(|backend| backend.is_available()) {
            let encode = || {
                let mut bytes = vec![];
                encode_lossless_frame_with(backend, &info, &[plane; 2], &[&rows[..]; 2], &mut bytes).unwrap();
                bytes
            };
            let bytes = encode();
            let frame = Frame::parse(&bytes, info.elements()).unwrap();
            let decode = |out: &mut [u16]| {
                let side = Side::Keys;
                frame.decode_lossless_plane_to_with(backend, &plane, 0, side, &place, out).unwrap();
            };
            decode(&mut out);
            assert!(out == rows, "{backend:?}");
            let times = [
                median(repeats, || drop(std::hint::black_box(encode()))) / 2.0, // of two planes
                median(repeats, || decode(&mut out)),
            ];
            print(element, &format!("codec-core, {backend:?}"), bytes.len() / 2, times);
        }
        let raw: Vec<u8> = rows.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        // ZipNN's order: all high bytes, which hold the exponents, then all low bytes.
        let split: Vec<u8> = [1, 0].iter().flat_map(|&at| raw.iter().skip(at).step_by(2).copied()).collect();
        for (order, bytes) in [("", &raw), (", high bytes first", &split)] {
            for level in [1, 3] {
                let coded = zstd::bulk::compress(bytes, level).unwrap();
                let mut out = vec![0; bytes.len()];
                assert!(
                    zstd::bulk::decompress_to_buffer(&coded, &mut out).unwrap() == out.len()
                        && out == **bytes
                );
                let times = [
                    median(repeats, || {
                        drop(std::hint::black_box(zstd::bulk::compress(bytes, level).unwrap()))
                    }),
                    median(repeats, || {
                        zstd::bulk::decompress_to_buffer(&coded, &mut out).unwrap();
                    }),
                ];
                print(element, &format!("zstd -{level}{order}"), coded.len(), times);
            }
        }
    }
}

fn print(element: ElementType, coder: &str, bytes: usize, [encode, decode]: [f64; 2]) {
    let n = (TOKENS * CHANNELS) as f64;
    let rate = |seconds: f64| n / seconds / 1e6;
    println!(
        "{{\"element\":\"{element:?}\",\"coder\":\"{coder}\",\"bits\":{},\"encode\":{},\"decode\":{}}}",
        8.0 * bytes as f64 / n,
        rate(encode),
        rate(decode)
    );
}
