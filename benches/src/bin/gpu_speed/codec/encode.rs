//! Encoding of frames.

use codec_core::assemble_frame;
use kv_gpu::codec::{Encode, EncodeArguments};

use super::Case;

impl Case<'_> {
    /// Launches of `layers` layers each, all of which keep their tiles.
    pub fn encode(&self, layers: usize, load: &str) {
        let (watch, info) = (self.watch, &self.info);
        let kernel = Encode::new(&watch.gpu, self.shape).unwrap();
        let numbers = watch.upload(&self.rows.repeat(2 * info.layers));
        let (rows, planes) = (self.pointers(&numbers), watch.upload(self.planes.words()));
        let slots_len = Encode::slots_len(info, layers);
        let tiles = 2 * layers * info.blocks() * info.channels() / codec_core::LANES;
        let count = info.layers / layers;
        let (slots, payload) = (watch.zeros(count * slots_len), watch.zeros(count * slots_len));
        let workspace = watch.zeros(kernel.workspace_len(info, layers));
        let lengths = watch.zeros(count * tiles);
        let payload_bytes = watch.zeros::<u64>(count);
        let failed = watch.zeros::<u32>(1);
        let launch = |i| EncodeArguments {
            planes: watch.pointer(&planes),
            layers: i * layers..(i + 1) * layers,
            rows: watch.pointer(&rows).offset(2 * i * layers).cast(),
            place: self.place(),
            slots: watch.pointer(&slots).offset(i * slots_len),
            workspace: watch.pointer(&workspace),
            lengths: watch.pointer(&lengths).offset(i * tiles),
            payload: watch.pointer(&payload).offset(i * slots_len),
            capacity: slots_len,
            payload_bytes: watch.pointer(&payload_bytes).offset(i),
            failed: watch.pointer(&failed),
        };
        let launches: Vec<_> = (0..count).map(launch).collect();
        let us = watch.time(count, |i, stream| {
            // SAFETY: the buffers have the shapes that the arguments require, and outlive the launch.
            unsafe { kernel.launch(stream, info, &self.planes, &launches[i]) }
        });
        assert_eq!(watch.download(&failed), [0]);
        let (payload, payload_bytes) = (watch.download(&payload), watch.download(&payload_bytes));
        let parts = payload.chunks_exact(slots_len).zip(payload_bytes);
        let payload = parts.map(|(part, len)| &part[..len as usize]).collect::<Vec<_>>().concat();
        let mut assembled = vec![];
        assemble_frame(info, self.planes.ids(), &watch.download(&lengths), &payload, &mut assembled).unwrap();
        assert!(assembled == self.bytes, "other bytes than the CPU's");
        self.report("codec encode", load, layers, us);
    }
}
