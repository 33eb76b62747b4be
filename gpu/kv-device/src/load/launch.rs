//! Copies, checks and decodes a frame, some layers at a time.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use codec_core::{BlockIndex, Frame, Side};
use cudarc::driver::result;
use kv_gpu::codec::{self, CheckArguments, DecodeArguments, Rope};
use kv_gpu::{AnyElement, DevicePtr};

use super::buffers::{DecodeStream, FrameBuffers};
use super::{Arriving, Destination, LAYERS, Level, Loader, STREAMS, join};
use crate::gpu::driver;
use crate::rotate::{Direction, KeyRows};
use crate::{Error, Result};

/// Layers that are copied and decoded at once.
pub(super) struct Part {
    layers: Range<usize>,
    pub bytes: Range<usize>, // of the frame: the first part has its header and index
}

/// The parts of a frame.
pub(super) fn parts(frame: &Frame<'_>) -> Result<VecDeque<Part>> {
    let (layers, blocks) = (frame.info().layers, frame.info().blocks());
    let mut start = 0;
    let part = |first: usize| {
        let layers = first..layers.min(first + LAYERS);
        let last = BlockIndex { layer: layers.end - 1, side: Side::Values, block: blocks.saturating_sub(1) };
        let end = frame.block_range(last)?.end;
        let bytes = std::mem::replace(&mut start, end)..end;
        Ok(Part { layers, bytes })
    };
    (0..layers).step_by(LAYERS).map(part).collect()
}

/// Seconds of the stages of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stages {
    /// Copying the frame to the device.
    pub copy: f64,
    /// Decoding it there.
    pub decode: f64,
    /// Comparing its checksums there.
    pub check: f64,
}

/// The rows that a frame is decoded to.
#[derive(Clone, Copy)]
pub(super) struct Place {
    sides: DevicePtr<DevicePtr<AnyElement>>, // (layers, keys and values): rows (heads, capacity, head_dim)
    capacity: usize,
    first_row: usize, // of the frame's first token
    angles: [DevicePtr<f32>; 2],
}

impl Loader {
    /// Copies and decodes those layers of a frame that are among its first bytes, some at a time.
    pub(super) fn launch(&self, arriving: &mut Arriving, frame: &Frame<'_>, bytes: &[u8]) -> Result<()> {
        while let Some(part) = arriving.parts.front().filter(|part| part.bytes.end <= bytes.len()) {
            let decode_stream = self.decode_stream(part);
            self.copy(part.bytes.start, &bytes[part.bytes.clone()])?;
            join(&decode_stream.stream, &self.copies)?;
            self.decode(decode_stream, arriving.level, frame, part.layers.clone(), &arriving.place)?;
            arriving.parts.pop_front();
        }
        Ok(())
    }

    /// The same for a whole frame, and its checks, one stage after the other.
    pub(super) fn launch_in_stages(
        &self,
        arriving: &mut Arriving,
        frame: &Frame<'_>,
        bytes: &[u8],
        stages: &mut Stages,
    ) -> Result<()> {
        let parts = std::mem::take(&mut arriving.parts);
        self.wait()?;
        let start = Instant::now();
        parts.iter().try_for_each(|part| self.copy(part.bytes.start, &bytes[part.bytes.clone()]))?;
        self.wait()?;
        let copied = Instant::now();
        for part in parts {
            self.decode(self.decode_stream(&part), arriving.level, frame, part.layers, &arriving.place)?;
        }
        self.wait()?;
        let decoded = Instant::now();
        self.check(frame)?;
        self.wait()?;
        stages.copy = (copied - start).as_secs_f64();
        stages.decode = (decoded - copied).as_secs_f64();
        stages.check = decoded.elapsed().as_secs_f64();
        Ok(())
    }

    /// The stream that decodes a part.
    fn decode_stream(&self, part: &Part) -> &DecodeStream {
        &self.decode_streams[part.layers.start / LAYERS % STREAMS]
    }

    /// Where a frame is decoded to.
    pub(super) fn place(&mut self, slot: usize, frame: &Frame<'_>, to: &Destination<'_>) -> Result<Place> {
        let angles = to.angles;
        let Some(all) = to.rows else {
            let staging = self.slots[slot].staging.as_ref();
            let staging = staging.ok_or_else(|| Error::argument("no rows for a frame"))?;
            let (sides, capacity) = (staging.sides(), staging.capacity());
            return Ok(Place { sides, capacity, first_row: 0, angles });
        };
        let rows: Vec<_> = all.iter().flat_map(|rows| [rows.keys, rows.values]).collect();
        if rows != self.rows {
            self.wait()?;
            let addresses: Vec<u64> = rows.iter().map(|rows| rows.address()).collect();
            self.rows_on_device.write(&self.gpu, &addresses)?;
            self.gpu.synchronize()?;
            self.rows = rows;
        }
        let capacity = all.first().map_or(0, |rows| rows.capacity);
        let first_row = frame.info().first_token as usize;
        Ok(Place { sides: self.rows_on_device.pointer().cast(), capacity, first_row, angles })
    }

    /// Copies bytes of a frame to their place in the next slot.
    fn copy(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.gpu.device.context().bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        let to = self.slots[self.next].frame.pointer().offset(at).address();
        // SAFETY: the slot has room for the whole frame, and its last frame has been waited for. `Arriving`
        // and `Begun` keep the bytes until they have been decoded.
        unsafe { result::memcpy_htod_async(to, bytes, self.copies.cu_stream()) }
            .map_err(|e| driver("copy a frame", e))
    }

    /// Compares the checksums of a frame, once it has been copied.
    pub(super) fn check(&self, frame: &Frame<'_>) -> Result<()> {
        join(&self.checks, &self.copies)?;
        let (info, FrameBuffers { frame: on_device, wrong, .. }) = (frame.info(), &self.slots[self.next]);
        let arguments =
            CheckArguments { frame: on_device.pointer(), layers: 0..info.layers, wrong: wrong.pointer() };
        // SAFETY: the stream waits for the frame, and the slot has PADDING bytes more.
        Ok(unsafe { self.check.launch(self.checks.cu_stream(), info, &arguments) }?)
    }

    /// Decodes layers of a frame that has been copied so far, and rotates their keys.
    fn decode(
        &self,
        decode_stream: &DecodeStream,
        level: usize,
        frame: &Frame<'_>,
        layers: Range<usize>,
        &Place { sides, capacity, first_row, angles }: &Place,
    ) -> Result<()> {
        let (info, FrameBuffers { frame: on_device, failed, .. }) = (frame.info(), &self.slots[self.next]);
        let Level { planes, words, decode } = &self.levels[level];
        let (position, stream) = (info.first_token as usize, decode_stream.stream.cu_stream());
        let place = codec::Place {
            token_stride: info.head_dim,
            head_stride: capacity * info.head_dim,
            first_token: first_row,
            pages: None,
        };
        let out = sides.offset(2 * layers.start);
        let [cos, sin] = angles.map(|angles| angles.offset(position * info.head_dim / 2));
        let arguments = DecodeArguments {
            frame: on_device.pointer(),
            planes: words.pointer(),
            layers: layers.clone(),
            blocks: 0..info.blocks(),
            out,
            place,
            rope: decode.rotates().then_some(Rope { cos, sin }),
            workspace: decode_stream.workspace.pointer(),
            failed: failed.pointer(),
        };
        // SAFETY: the bytes of the frame up to these layers have been copied, and the slot has PADDING more.
        // The rows have all tokens of the frame, which the decoder or `reserve` checks. The workspace has
        // room for LAYERS layers. There are angles for all positions of the cache.
        unsafe { decode.launch(stream, frame, planes, &arguments) }?;
        let Some(rotate) = self.rotate.as_ref().filter(|_| !decode.rotates()) else { return Ok(()) };
        let keys = KeyRows {
            rows: out,
            layers: layers.len(),
            capacity,
            tokens: position..position + info.tokens,
            first_row,
            angles,
        };
        // SAFETY: the rows are those that have just been written; the angles are those above.
        unsafe { rotate.launch(stream, Direction::Forward, &keys) }
    }
}
