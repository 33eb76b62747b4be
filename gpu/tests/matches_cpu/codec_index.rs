//! Frames that never leave the device: `Index` writes the index of `assemble_frame`, and `Decode` reads it.

use codec_core::{FitOptions, Frame, FrameInfo, PlaneBuf, Side, Steps, encode_frame};
use kv_gpu::VectorElement;
use kv_gpu::codec::{Decode, DecodeArguments, Encode, EncodeArguments, Index, IndexArguments, Place, Planes};

use crate::common::{Buffer, Random, bytes_of, device};

const LAYERS: usize = 2;
const ELEMENT: VectorElement = VectorElement::F32;

#[test]
fn frames_of_the_device_decode_where_they_are() {
    let Some(device) = device("frames_of_the_device_decode_where_they_are") else { return };
    for seed in 0..24 {
        let mut random = Random(seed);
        let (heads, head_dim) = random.pick(&[(1, 32), (2, 64), (3, 40), (5, 7), (8, 128)]);
        let (tokens, block_tokens) = (random.pick(&[1, 31, 150, 700]), random.pick(&[13, 64, 256]));
        let info = FrameInfo { block_tokens, ..FrameInfo::new(LAYERS, heads, head_dim, tokens) };
        let rows: Vec<Vec<f32>> = (0..2 * LAYERS).map(|_| random.normals(tokens * info.channels())).collect();
        let options = FitOptions { steps: Steps::Deviations(0.3), ..FitOptions::default() };
        let fit = |rows: &Vec<f32>| {
            let twice = rows.repeat(2); // one token is not enough for a fit
            PlaneBuf::fit(&twice, info.channels(), None, &options).unwrap()
        };
        let fitted: Vec<PlaneBuf> = rows.iter().map(fit).collect();
        let views: Vec<_> = fitted.iter().map(|plane| plane.view()).collect();
        let planes = Planes::pack(&views, head_dim).unwrap();
        let shape = planes.shape(ELEMENT, false);
        let (encode, decode) = (Encode::new(&device, shape).unwrap(), Decode::new(&device, shape).unwrap());
        let index = Index::new(&device).unwrap();

        let numbers: Vec<f32> = rows.iter().flatten().copied().collect();
        let numbers = Buffer::new(&device, &bytes_of(ELEMENT, &numbers));
        let out = Buffer::new(&device, &vec![0xaa_u8; 4 * 2 * LAYERS * tokens * info.channels()]);
        let pointers = |of: &Buffer<u8>| {
            let plane = |i: usize| of.pointer().offset(i * 4 * tokens * info.channels()).address();
            Buffer::new(&device, &(0..2 * LAYERS).map(plane).collect::<Vec<_>>())
        };
        let (from, to) = (pointers(&numbers), pointers(&out));
        let words = Buffer::new(&device, planes.words());
        let slots = Buffer::scratch(&device, Encode::slots_len(&info, LAYERS));
        let workspace = encode.workspace_len(&info, LAYERS);
        let workspace = Buffer::scratch(&device, workspace);
        let tiles = info.channels().div_ceil(32);
        let lengths = Buffer::new(&device, &vec![0_u16; 2 * LAYERS * info.blocks() * tiles]);
        let payload_at = info.head_len().next_multiple_of(8);
        let bytes = Buffer::new(&device, &vec![0_u8; payload_at + Encode::slots_len(&info, LAYERS) + 3]);
        let frame_at = payload_at - info.head_len();
        let (payload_bytes, failed) = (Buffer::new(&device, &[0_u64]), Buffer::new(&device, &[0_u32]));
        let frame_bytes = Buffer::new(&device, &[1000_u64]);
        let place =
            Place { token_stride: info.channels(), head_stride: head_dim, first_token: 0, pages: None };
        let encoding = EncodeArguments {
            planes: words.pointer(),
            layers: 0..LAYERS,
            rows: from.pointer().cast(),
            place,
            slots: slots.pointer(),
            workspace: workspace.pointer(),
            lengths: lengths.pointer(),
            payload: bytes.pointer().offset(payload_at),
            capacity: Encode::slots_len(&info, LAYERS),
            payload_bytes: payload_bytes.pointer(),
            failed: failed.pointer(),
        };
        let frame = bytes.pointer().offset(frame_at);
        let indexing =
            IndexArguments { lengths: lengths.pointer(), frame, frame_bytes: frame_bytes.pointer() };
        let decoding = DecodeArguments {
            frame,
            planes: words.pointer(),
            layers: 0..LAYERS,
            blocks: 0..info.blocks(),
            out: to.pointer().cast(),
            place,
            rope: None,
            workspace: workspace.pointer(),
            failed: failed.pointer(),
        };
        let stream = device.stream().cu_stream();
        // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
        // requires.
        #[allow(unsafe_code)]
        unsafe {
            encode.launch(stream, &info, &planes, &encoding).unwrap();
            index.launch(stream, &info, &indexing).unwrap();
            decode.launch_indexed(stream, &info, &planes, &decoding).unwrap();
        }
        assert_eq!(failed.read(), [0], "seed {seed}");

        let (mut expected, slices) = (vec![], rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
        encode_frame(&info, &views, &slices, &mut expected).unwrap();
        assert_eq!(frame_bytes.read()[0], 1000 + expected.len() as u64, "seed {seed}");
        let mut got = bytes.read()[frame_at..][..expected.len()].to_vec();
        // The device omits the header, the ids of planes, and the checksums.
        let (entries, entry) = (64 + 8 * LAYERS, 12 + 2 * tiles);
        let checksums = (0..2 * LAYERS * info.blocks()).map(|i| entries + i * entry + 8);
        for at in checksums.chain([info.head_len() - 4]) {
            got[at..at + 4].copy_from_slice(&expected[at..at + 4]);
        }
        got[..entries].copy_from_slice(&expected[..entries]);
        assert!(got == expected, "seed {seed}: {info:?}");

        let frame = Frame::parse(&expected, info.elements()).unwrap();
        let sides = (0..LAYERS).flat_map(|layer| [(layer, Side::Keys), (layer, Side::Values)]);
        let mut numbers = vec![];
        for (plane, (layer, side)) in sides.enumerate() {
            let mut rows = vec![0.0; tokens * info.channels()];
            frame.decode_plane_into(&views[plane], layer, side, None, &mut rows).unwrap();
            numbers.extend(rows);
        }
        assert!(out.read() == bytes_of(ELEMENT, &numbers), "seed {seed}: decoded");
    }
}
