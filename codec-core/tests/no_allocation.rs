//! Decoding allocates nothing; parsing a serialized form allocates no more than its length.

#![allow(clippy::unwrap_used)]

use allocation_counter::measure;
use codec_core::*;
use half::f16;

const CHANNELS: usize = 40;
const TOKENS: usize = 100;

fn rows() -> Vec<f32> {
    (0..CHANNELS * TOKENS).map(|i| (i as f32 * 0.7).sin() * (1 + i % 7) as f32).collect()
}

fn profile(rows: &[f32]) -> Profile {
    let info = ModelInfo { model_id: 1, layers: 2, heads: 2, head_dim: 20, keys_rotated: false };
    let layers = [LayerRows { keys: rows, values: rows }; 2];
    let fit = |_, layer, _, sample: &[f32]| {
        let models = [ModelKind::ContextTables, ModelKind::Families][layer];
        PlaneBuf::fit(sample, CHANNELS, None, &FitOptions { models, ..FitOptions::default() })
    };
    Profile::fit(info, 2, TOKENS, &layers, &Place::nhd(2, 20), fit).unwrap()
}

#[test]
fn decoding_allocates_nothing() {
    let rows = rows();
    let profile = profile(&rows);
    let info = FrameInfo { block_tokens: 64, ..profile.frame_info(1, TOKENS) };
    let layers = [LayerRows { keys: &rows, values: &rows }; 2];
    let mut bytes = vec![0; info.max_frame_len()];
    let len = profile.encode_into(&info, &layers, &Place::nhd(2, 20), &mut bytes).unwrap();
    let (mut block, mut scratch) = (vec![0.0; 36 * CHANNELS], vec![0.0; 64 * CHANNELS]);
    let pages = TokenPages { table: &[2, 0, 1, 3], page_tokens: 32, stride: 32 * CHANNELS };
    let place = Place { pages: Some(pages), ..Place::hnd(32, 20) };
    let mut pool = vec![f16::ZERO; 4 * pages.stride];
    let index = BlockIndex { layer: 1, side: Side::Values, block: 1 };
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let allocated = measure(|| {
            let frame = Frame::parse(&bytes[..len], info.elements()).unwrap();
            let plane = profile.plane(1, 1, Side::Values).unwrap().view();
            frame.decode_block_into_with(backend, &plane, index, None, &mut block).unwrap();
            let (scratch, pool) = (&mut scratch, &mut pool);
            frame.decode_block_to_with(backend, &plane, index, None, &place, scratch, pool).unwrap();
        });
        assert_eq!(allocated.count_total, 0, "{backend:?}");
    }
}

/// Every byte of the headers set to 255, under a valid checksum.
#[test]
fn hostile_sizes_are_not_allocated() {
    let rows = rows();
    let profile = profile(&rows);
    let bits: Vec<u16> = rows.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
    let lossless = LosslessPlaneBuf::fit(ElementType::F16, &bits, CHANNELS).unwrap();
    let plane = profile.plane(0, 0, Side::Keys).unwrap().to_bytes();
    type Read = fn(&[u8]) -> Result<(), Error>;
    let forms: [(Vec<u8>, Read); 3] = [
        (profile.to_bytes(), |bytes| Profile::from_bytes(bytes).map(drop)),
        (plane, |bytes| PlaneBuf::from_bytes(bytes).map(drop)),
        (lossless.to_bytes(), |bytes| LosslessPlaneBuf::from_bytes(bytes).map(drop)),
    ];
    for (bytes, read) in forms {
        for (at, wide) in (5..40).flat_map(|at| [1, 2, 4].map(|wide| (at, wide))) {
            let mut forged = bytes[..bytes.len() - 4].to_vec();
            forged[at..at + wide].fill(255);
            let checksum = crc32fast::hash(&forged).to_le_bytes();
            forged.extend_from_slice(&checksum);
            let mut result = Ok(());
            let allocated = measure(|| result = read(&forged)).bytes_total;
            let most = 2 * forged.len() as u64;
            assert!(allocated <= most, "{at}: {allocated} of {}, {result:?}", forged.len());
            let text = result.err().map_or(String::new(), |error| error.to_string());
            assert!(!text.contains('\n'));
        }
    }
}
