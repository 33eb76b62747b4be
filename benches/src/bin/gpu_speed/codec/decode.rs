//! Decoding of frames.

use std::ops::Range;

use codec_core::{BlockIndex, Frame, RopeTable, Side};
use cudarc::driver::CudaSlice;
use cudarc::driver::result::memcpy_htod_async;
use half::bf16;
use kv_gpu::codec::{Decode, DecodeArguments, Rope};

use super::Case;

/// Layers that are copied at a time.
const PART: usize = 4;

/// The memory that decoding reads and writes.
struct Buffers {
    frame: CudaSlice<u8>,
    planes: CudaSlice<u32>,
    numbers: CudaSlice<bf16>,
    out: CudaSlice<u64>,
    workspace: CudaSlice<u8>,
    failed: CudaSlice<u32>,
}

impl Case<'_> {
    /// Launches of `layers` layers each, with RoPE of their keys, too, if the shape allows it; where these are
    /// several parts, also beside their copy.
    pub fn decode(&self, layers: usize, load: &str) {
        let watch = self.watch;
        self.decode_with(&Decode::new(&watch.gpu, self.shape).unwrap(), layers, load);
        if self.shape.supports_rope() {
            let rotating = Decode::rotating(&watch.gpu, self.shape).unwrap();
            self.decode_with(&rotating, layers, &format!("{load}, RoPE of the keys"));
        }
        if layers > PART {
            self.decode_beside_copy(load);
        }
    }

    fn decode_with(&self, kernel: &Decode, layers: usize, load: &str) {
        let (watch, frame) = (self.watch, self.frame());
        let buffers = self.buffers(kernel, layers);
        let table = self.rope_table();
        let [cos, sin] = table.each_ref().map(|numbers| watch.upload(numbers));
        let rope = Rope { cos: watch.pointer(&cos), sin: watch.pointer(&sin) };
        let rope = kernel.rotates().then_some(rope);
        let launches = self.launches(&buffers, layers, rope);
        let us = watch.time(launches.len(), |i, stream| {
            // SAFETY: the buffers have the shapes that the arguments require, and outlive the launch.
            unsafe { kernel.launch(stream, &frame, &self.planes, &launches[i]) }
        });
        assert_eq!(watch.download(&buffers.failed), [0]);
        let numbers = watch.download(&buffers.numbers);
        self.check(&frame, Side::Values, None, &numbers);
        let [cos, sin] = &table;
        let table = RopeTable::halves(self.info.head_dim, cos, sin).unwrap();
        self.check(&frame, Side::Keys, rope.map(|_| &table), &numbers);
        self.report("codec decode", load, layers, us);
    }

    /// Cosines and sines of the tokens' positions.
    fn rope_table(&self) -> [Vec<f32>; 2] {
        let (tokens, head_dim) = (self.info.tokens, self.info.head_dim);
        let frequency = |i: usize| 5e5_f64.powf(-2.0 * i as f64 / head_dim as f64);
        let angle = |at: usize| (at / (head_dim / 2)) as f64 * frequency(at % (head_dim / 2));
        let numbers = |f: fn(f64) -> f64| (0..tokens * head_dim / 2).map(|at| f(angle(at)) as f32).collect();
        [numbers(f64::cos), numbers(f64::sin)]
    }

    /// From pinned memory, copied and decoded part by part: the copy of a part overlaps the decoding of the
    /// previous one.
    fn decode_beside_copy(&self, load: &str) {
        let (watch, frame, info) = (self.watch, self.frame(), &self.info);
        let kernel = Decode::new(&watch.gpu, self.shape).unwrap();
        let buffers = self.buffers(&kernel, PART);
        let launches = self.launches(&buffers, PART, None);
        // SAFETY: written before it is read.
        let mut host = unsafe { watch.gpu.context().alloc_pinned::<u8>(self.bytes.len()) }.unwrap();
        host.as_mut_slice().unwrap().copy_from_slice(&self.bytes);
        let host = host.as_slice().unwrap();
        let there = watch.pointer(&buffers.frame);
        let copy = |range: Range<usize>, stream| {
            let to = there.offset(range.start).address();
            // SAFETY: the buffer has room for all bytes of the frame.
            unsafe { memcpy_htod_async(to, &host[range], stream) }.unwrap();
        };
        let range = |layers: &Range<usize>| {
            let block = |layer, side, block| frame.block_range(BlockIndex { layer, side, block }).unwrap();
            let start = if layers.start == 0 { 0 } else { block(layers.start, Side::Keys, 0).start };
            start..block(layers.end - 1, Side::Values, info.blocks() - 1).end
        };
        let stream = watch.gpu.stream();
        let copies = watch.gpu.context().new_stream().unwrap();
        let copied = watch.replay(|| copy(0..host.len(), stream.cu_stream()));
        let both = watch.replay(|| {
            copies.join(stream).unwrap();
            for launch in &launches {
                copy(range(&launch.layers), copies.cu_stream());
                stream.join(&copies).unwrap();
                // SAFETY: as in `decode`.
                unsafe { kernel.launch(stream.cu_stream(), &frame, &self.planes, launch) }.unwrap();
            }
        });
        let shape = format!("{load}, in {} parts beside their copy", launches.len());
        watch.report_with_floor("codec decode", &shape, host.len() as f64, both, copied);
    }

    fn frame(&self) -> Frame<'_> {
        Frame::parse(&self.bytes, self.info.elements()).unwrap()
    }

    /// For launches of `layers` layers each.
    fn buffers(&self, kernel: &Decode, layers: usize) -> Buffers {
        let (watch, info) = (self.watch, &self.info);
        let numbers = watch.zeros(info.elements());
        Buffers {
            frame: watch.upload(&[&self.bytes[..], &[0; 3]].concat()),
            planes: watch.upload(self.planes.words()),
            out: self.pointers(&numbers),
            numbers,
            workspace: watch.zeros(kernel.workspace_len(info, layers, info.blocks())),
            failed: watch.zeros(1),
        }
    }

    fn launches(&self, buffers: &Buffers, layers: usize, rope: Option<Rope>) -> Vec<DecodeArguments> {
        let (watch, info) = (self.watch, &self.info);
        let launch = |first| DecodeArguments {
            frame: watch.pointer(&buffers.frame),
            planes: watch.pointer(&buffers.planes),
            layers: first..first + layers,
            blocks: 0..info.blocks(),
            out: watch.pointer(&buffers.out).offset(2 * first).cast(),
            place: self.place(),
            rope,
            workspace: watch.pointer(&buffers.workspace),
            failed: watch.pointer(&buffers.failed),
        };
        (0..info.layers).step_by(layers).map(launch).collect()
    }

    /// Compares a plane of the last layer with the CPU.
    fn check(&self, frame: &Frame<'_>, side: Side, rope: Option<&RopeTable<'_>>, numbers: &[bf16]) {
        let (info, plane) = (&self.info, self.plane.view());
        let mut expected = vec![0.0; self.rows.len()];
        frame.decode_plane_into(&plane, info.layers - 1, side, rope, &mut expected).unwrap();
        let planes_after = usize::from(side == Side::Keys);
        let got = &numbers[numbers.len() - (1 + planes_after) * expected.len()..][..expected.len()];
        assert!(got.chunks_exact(info.head_dim).zip(expected.chunks_exact(info.head_dim)).all(
            |(got, row)| {
                // On tensor cores: one unit in the last place at the scale of the row's largest value
                // (FORMAT.md).
                let largest = row.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
                let tolerance = if plane.parts().transform.is_some() { largest / 128.0 } else { 0.0 };
                let error = |got: &bf16, x: f32| (got.to_f32() - bf16::from_f32(x).to_f32()).abs();
                got.iter().zip(row).all(|(got, &x)| error(got, x) <= tolerance)
            }
        ));
    }
}
