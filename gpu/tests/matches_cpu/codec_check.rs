//! `Check` finds the blocks whose checksums the CPU finds wrong.

use codec_core::{BlockIndex, FitOptions, Frame, FrameInfo, PlaneBuf, Side, Steps, encode_frame};
use kv_gpu::codec::{Check, CheckArguments};

use crate::common::{Buffer, Random, device};

const LAYERS: usize = 3;

#[test]
fn wrong_checksums_are_those_of_the_cpu() {
    let Some(device) = device("wrong_checksums_are_those_of_the_cpu") else { return };
    let (check, stream) = (Check::new(&device).unwrap(), device.stream().cu_stream());
    let mut found = 0;
    for seed in 0..200 {
        let mut random = Random(seed);
        let (heads, head_dim) = random.pick(&[(1, 1), (1, 32), (2, 64), (3, 40), (5, 7), (8, 128)]);
        let (tokens, block_tokens) =
            (random.pick(&[1, 2, 31, 150, 700]), random.pick(&[1, 13, 64, 256, 1024]));
        let info = FrameInfo { block_tokens, ..FrameInfo::new(LAYERS, heads, head_dim, tokens) };
        let rows = random.normals(tokens * info.channels());
        let steps = Steps::Deviations(random.pick(&[0.01, 0.3, 3.0]));
        let plane = PlaneBuf::fit(
            &rows.repeat(2), // one token is not enough for a fit
            info.channels(),
            None,
            &FitOptions { steps, ..FitOptions::default() },
        );
        let (plane, mut bytes) = (plane.unwrap(), vec![]);
        encode_frame(&info, &[plane.view(); 2 * LAYERS], &[&rows[..]; 2 * LAYERS], &mut bytes).unwrap();
        let payload = bytes.len() - info.head_len();
        for _ in 0..random.below(4) {
            let at = info.head_len() + random.below(payload);
            bytes[at] ^= 1 << random.below(8);
        }
        if random.below(4) == 0 {
            // The index holds the checksum of another block, under a right checksum of its own.
            let (entries, entry) = (64 + 8 * LAYERS, 12 + 2 * info.channels().div_ceil(32));
            let at = entries + entry * random.below(2 * LAYERS * info.blocks()) + 8;
            bytes[at + random.below(4)] ^= 1 << random.below(8);
            let end = info.head_len() - 4;
            let checksum = crc32fast::hash(&bytes[64..end]);
            bytes[end..end + 4].copy_from_slice(&checksum.to_le_bytes());
        }

        let first = random.below(LAYERS + 1);
        let layers = first..first + random.below(LAYERS + 1 - first);
        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        let wrong = |layer: usize, plane: usize, block: usize| {
            let side = [Side::Keys, Side::Values][plane];
            let index = BlockIndex { layer, side, block };
            let entry = (2 * layer + plane) * info.blocks() + block;
            frame.check_block(index).is_err().then_some(entry as u32 + 1)
        };
        let entries = layers.clone().flat_map(|layer| {
            (0..2).flat_map(move |plane| (0..info.blocks()).map(move |block| (layer, plane, block)))
        });
        let expected = entries.filter_map(|(layer, plane, block)| wrong(layer, plane, block)).max();

        let at = random.below(4);
        let mut placed = vec![0xaa_u8; at + bytes.len() + 3];
        placed[at..at + bytes.len()].copy_from_slice(&bytes);
        let (placed, got) = (Buffer::new(&device, &placed), Buffer::new(&device, &[0_u32]));
        let arguments = CheckArguments { frame: placed.pointer().offset(at), layers, wrong: got.pointer() };
        // SAFETY: the buffers live until the word has been read; three bytes follow the frame.
        #[allow(unsafe_code)]
        unsafe {
            check.launch(stream, &info, &arguments).unwrap();
        }
        assert_eq!(got.read(), [expected.unwrap_or(0)], "seed {seed}: {info:?}, {arguments:?}");
        found += usize::from(expected.is_some());
    }
    assert!((50..150).contains(&found), "{found} frames were wrong");
}
