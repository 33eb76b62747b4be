//! Loads frames of stored contexts: copies them to the device and decodes them into the rows of a cache.
//!
//! Copies and decoding overlap: while some layers are decoded, the next ones, or those of the next frame, are
//! copied on a stream of their own. If decoding keeps up with the link, a load takes as long as the copy plus
//! the decoding of [`LAYERS`] layers. A frame that arrives over a network is decoded from its
//! first layers on. Checksums are compared on the device, on a third stream, since host threads that compare
//! them slow the copies down; a frame is complete when all have been compared. Nothing reads the rows of a
//! frame before that, so decoding needs no further synchronization.
//!
//! A `DenseCache` has the rows of all layers, so frames are decoded into it directly. The other caches take
//! rows layer by layer and cannot give them back, so a frame is decoded to staging rows of the loader, and
//! the cache takes them once the whole frame is verified.

mod buffers;
mod launch;
mod staging;

use std::collections::VecDeque;
use std::sync::Arc;

use codec_core::{Frame, Profile, Side};
use cudarc::driver::{CudaEvent, CudaStream};
use kv_gpu::codec::{Check, Decode, Planes};
use kv_gpu::{AnyElement, DevicePtr, Element, VectorElement};
use kv_stream::{Bytes, ChunkFrame};

use buffers::{DecodeStream, FrameBuffers};
pub use launch::Stages;
use launch::{Part, Place, parts};
pub use staging::Staging;

use crate::gpu::{Gpu, driver};
use crate::host_memory::HostWord;
use crate::memory::Buffer;
use crate::rotate::{Rotate, decoder};
use crate::rows::{Chunk, Rows};
use crate::{Error, Result};

/// Frames that may be on their way at once.
pub const FRAMES: usize = 3;

/// Streams that decode: kernels for the tiles of one part and for the transforms of another one use different
/// units, and the last blocks of one leave room for the next.
const STREAMS: usize = 4;

/// Layers that are copied, and then decoded, at once. With more of them decoding ends later after the copy;
/// with fewer, gaps between copies and launches take longer.
const LAYERS: usize = 8;

/// Decodes the frames of a codec profile on the device.
pub struct Loader {
    gpu: Arc<Gpu>,
    element: Element,
    profile: Arc<Profile>,
    levels: Vec<Level>,
    rotate: Option<Rotate>, // of keys before RoPE, if the decoder of a level does not rotate them
    check: Check,
    copies: Arc<CudaStream>,
    checks: Arc<CudaStream>,
    decode_streams: Vec<DecodeStream>, // STREAMS
    slots: Vec<FrameBuffers>,          // FRAMES
    rows: Vec<DevicePtr<AnyElement>>,  // (layer, 2): keys, then values
    rows_on_device: Buffer<u64>,       // their addresses
    begun: VecDeque<Begun>,
    arriving: Option<Arriving>,
    next: usize, // slot
}

/// A frame of which some bytes have arrived, in the next slot.
struct Arriving {
    chunk: Chunk,
    level: usize,
    clears: u64,
    bytes: Bytes, // those that have
    place: Place,
    parts: VecDeque<Part>, // that are still to be copied
    in_place: bool,
}

impl Arriving {
    /// Whether it is one of a frame, in the same memory.
    fn is_of(&self, chunk: Chunk, level: usize, bytes: &Bytes, to: &Destination<'_>) -> bool {
        (self.chunk, self.level, self.clears, self.in_place) == (chunk, level, to.clears, to.rows.is_some())
            && (self.bytes.as_ptr(), true) == (bytes.as_ptr(), self.bytes.len() <= bytes.len())
    }
}

/// The planes of a level and the kernels for them.
struct Level {
    planes: Planes,
    words: Buffer<u32>,
    decode: Decode,
}

/// A frame on its way.
struct Begun {
    chunk: Chunk,
    slot: usize,
    is_staged: bool,
    clears: u64,
    done: Vec<CudaEvent>, // decoding on every stream, and the checks
    _bytes: Bytes,        // which are copied
}

/// A frame that has been decoded.
pub struct Ended<'a> {
    /// Its tokens.
    pub chunk: Chunk,
    /// Where it has landed; none if it is in the cache.
    pub staging: Option<&'a Staging>,
    /// How often the sequences had been emptied when it began.
    pub clears: u64,
}

/// Where a frame goes.
pub struct Destination<'a> {
    /// Rows of every layer, up to the frame's last token at least; none for staging rows.
    pub rows: Option<&'a [Rows]>,
    /// Cosines and sines (position, head_dim / 2) of the same tokens.
    pub angles: [DevicePtr<f32>; 2],
    /// How often the sequences have been emptied.
    pub clears: u64,
}

impl Loader {
    /// A loader of frames of this profile into caches with this element.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::Gpu`], also for planes that the device does not decode: anchors and
    /// the range coder.
    pub fn new(gpu: &Arc<Gpu>, profile: &Profile, element: Element) -> Result<Self> {
        let info = profile.info();
        let elements = VectorElement::from(element);
        let level = |level: usize| {
            let sides = |layer| [Side::Keys, Side::Values].map(|side| profile.plane(level, layer, side));
            let planes: Vec<_> = (0..info.layers).flat_map(sides).collect::<std::result::Result<_, _>>()?;
            let planes: Vec<_> = planes.into_iter().map(codec_core::PlaneBuf::view).collect();
            let planes = Planes::pack(&planes, info.head_dim)?;
            let words = Buffer::of(gpu, planes.words())?;
            let shape = planes.shape(elements, false);
            let decode =
                if info.keys_rotated { Decode::new(&gpu.device, shape)? } else { decoder(gpu, shape)? };
            Ok(Level { planes, words, decode })
        };
        let levels: Vec<_> = (0..profile.levels()).map(level).collect::<Result<_>>()?;
        let rotates = !info.keys_rotated && levels.iter().any(|level: &Level| !level.decode.rotates());
        let rotate = || Rotate::new(gpu, element, info.heads, info.head_dim);
        let slot = |_| {
            let (frame, wrong, failed) = (Buffer::zeros(gpu, 0)?, HostWord::new(gpu)?, HostWord::new(gpu)?);
            Ok(FrameBuffers { frame, wrong, failed, staging: None })
        };
        let stream = || gpu.device.context().new_stream().map_err(|e| driver("make a stream", e));
        let on = |_| Ok(DecodeStream { stream: stream()?, workspace: Buffer::zeros(gpu, 0)? });
        let rows = vec![DevicePtr::dangling(); 2 * info.layers];
        Ok(Self {
            gpu: gpu.clone(),
            element,
            profile: Arc::new(profile.clone()),
            levels,
            rotate: rotates.then(rotate).transpose()?,
            check: Check::new(&gpu.device)?,
            copies: stream()?,
            checks: stream()?,
            decode_streams: (0..STREAMS).map(on).collect::<Result<_>>()?,
            slots: (0..FRAMES).map(slot).collect::<Result<_>>()?,
            rows_on_device: Buffer::zeros(gpu, 2 * info.layers)?,
            rows,
            begun: VecDeque::new(),
            arriving: None,
            next: 0,
        })
    }

    /// Whether frames go to caches with this element on this device.
    #[must_use]
    pub fn is_for(&self, gpu: &Arc<Gpu>, element: Element) -> bool {
        Arc::ptr_eq(&self.gpu, gpu) && self.element == element
    }

    /// The profile of the frames.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Tokens of a sequence with the frames that its cache is still to take, and that have begun since it was
    /// emptied last; none if there are none.
    #[must_use]
    pub fn staged_end(&self, sequence: usize, clears: u64) -> Option<usize> {
        let is_of = |b: &&Begun| b.is_staged && b.chunk.sequence == sequence && b.clears == clears;
        self.begun.iter().rev().find(is_of).map(|b| b.chunk.end())
    }

    /// Begins to load a frame of the chunk's tokens at this level. After an error the rows of these tokens
    /// are undefined, and no other ones. For `stages` decoding waits for the whole copy, and the checks for
    /// decoding.
    ///
    /// # Errors
    /// [`Error::Argument`] if too many frames are on their way, or one of these or later tokens;
    /// [`Error::Codec`] and
    /// [`Error::Stream`] for bytes that are no frame of these tokens, of this level and profile;
    /// [`Error::Gpu`].
    /// # Safety
    /// The rows and angles of the destination exist until the frame has [ended](Self::end), and nothing else
    /// uses these rows.
    pub unsafe fn begin(
        &mut self,
        chunk: Chunk,
        level: usize,
        bytes: Bytes,
        to: &Destination<'_>,
        stages: Option<&mut Stages>,
    ) -> Result<()> {
        let profile = self.profile.clone();
        let frame = ChunkFrame::parse(&profile, &bytes, &(chunk.position..chunk.end()), level)?;
        let frame = *frame.frame();
        let mut arriving = self.arriving(chunk, level, &bytes, &frame, to)?;
        let begin = || {
            match stages {
                None => {
                    self.launch(&mut arriving, &frame, &bytes)?;
                    self.check(&frame)?;
                }
                Some(stages) => self.launch_in_stages(&mut arriving, &frame, &bytes, stages)?,
            }
            let join = |on: &DecodeStream| join(&self.gpu.stream, &on.stream);
            // What follows sees the rows in the cache.
            self.decode_streams.iter().filter(|_| arriving.in_place).try_for_each(join)?;
            let streams = self.decode_streams.iter().map(|on| &on.stream).chain([&self.checks]);
            let event = |stream: &Arc<CudaStream>| {
                stream.record_event(None).map_err(|e| driver("record an event", e))
            };
            streams.map(event).collect::<Result<Vec<_>>>()
        };
        match begin() {
            Ok(done) => {
                let Arriving { chunk, clears, in_place, .. } = arriving;
                let (slot, is_staged) = (self.next, !in_place);
                self.begun.push_back(Begun { chunk, slot, is_staged, clears, done, _bytes: bytes });
                self.next = (slot + 1) % FRAMES;
                Ok(())
            }
            Err(e) => {
                self.wait()?; // the bytes are freed next
                Err(e)
            }
        }
    }

    /// Begins with the first bytes of a frame: its header and index, and what layers there are. The whole
    /// frame begins later, in the same memory, or another one in its place.
    ///
    /// # Errors
    /// As [`Self::begin`]; [`Error::Codec`] also for less than the header and index.
    /// # Safety
    /// As [`Self::begin`].
    pub unsafe fn begin_start(
        &mut self,
        chunk: Chunk,
        level: usize,
        bytes: Bytes,
        to: &Destination<'_>,
    ) -> Result<()> {
        let profile = self.profile.clone();
        let frame = ChunkFrame::parse_start(&profile, &bytes, &(chunk.position..chunk.end()), level)?;
        let mut arriving = self.arriving(chunk, level, &bytes, frame.frame(), to)?;
        let launched = self.launch(&mut arriving, frame.frame(), &bytes);
        arriving.bytes = bytes;
        self.arriving = Some(arriving);
        launched
    }

    /// The frame that is arriving, if it is this one; else this one, of which nothing has been copied.
    fn arriving(
        &mut self,
        chunk: Chunk,
        level: usize,
        bytes: &Bytes,
        frame: &Frame<'_>,
        to: &Destination<'_>,
    ) -> Result<Arriving> {
        if let Some(arriving) = self.arriving.take_if(|arriving| arriving.is_of(chunk, level, bytes, to)) {
            return Ok(arriving);
        }
        self.forget_start()?;
        if self.begun.len() == FRAMES {
            return Err(Error::Argument(format!("{FRAMES} frames are on their way: end one first")));
        }
        // A sequence that has been cleared meanwhile begins again: its rows would be written twice at once.
        let overlaps =
            |Begun { chunk: b, .. }: &&Begun| b.sequence == chunk.sequence && b.end() > chunk.position;
        if let Some(Begun { chunk: before, .. }) = self.begun.iter().find(overlaps) {
            return Err(Error::Argument(format!(
                "the tokens {}..{} are on their way: end them first",
                before.position,
                before.end()
            )));
        }
        let parts = parts(frame)?;
        let total = parts.back().map_or(0, |part| part.bytes.end);
        self.reserve(self.next, level, frame, total, to.rows.is_none())?;
        self.slots[self.next].wrong.set(0);
        self.slots[self.next].failed.set(0);
        let place = self.place(self.next, frame, to)?;
        if to.rows.is_none() {
            // The cache may still be taking what has landed there before.
            self.decode_streams.iter().try_for_each(|on| join(&on.stream, &self.gpu.stream))?;
        }
        let in_place = to.rows.is_some();
        Ok(Arriving { chunk, level, clears: to.clears, bytes: bytes.clone(), place, parts, in_place })
    }

    /// Drops a frame of which the first bytes have begun.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn forget_start(&mut self) -> Result<()> {
        // Its bytes are freed when nothing copies them.
        self.arriving.is_some().then(|| self.wait()).transpose()?;
        self.arriving = None;
        Ok(())
    }

    /// The chunks of the frames on their way, in order, that are decoded into the cache, which has not been
    /// emptied since.
    #[must_use]
    pub fn in_place(&self, clears: u64) -> Vec<Chunk> {
        self.begun.iter().filter(|b| !b.is_staged && b.clears == clears).map(|b| b.chunk).collect()
    }

    /// Waits for the oldest frame. After an error no frame is on its way.
    ///
    /// # Errors
    /// [`Error::Codec`] for a frame with a wrong checksum, or that no encoder writes though they are right;
    /// [`Error::Argument`] if none is on its way; [`Error::Gpu`].
    pub fn end(&mut self) -> Result<Ended<'_>> {
        let Some(begun) = self.begun.pop_front() else {
            return Err(Error::argument("no frame is on its way"));
        };
        let Begun { chunk, slot, is_staged, clears, .. } = begun;
        let wait = |event: &CudaEvent| event.synchronize().map_err(|e| driver("wait for a frame", e));
        let ended = begun.done.iter().try_for_each(wait);
        let ended =
            ended.and_then(|()| match (self.slots[slot].wrong.get(), self.slots[slot].failed.get()) {
                (0, 0) => Ok(()),
                (0, _) => Err(codec_core::Error::Corrupt.into()),
                _ => Err(codec_core::Error::BadChecksum.into()),
            });
        match ended {
            Ok(()) => {
                let staging = self.slots[slot].staging.as_ref().filter(|_| is_staged);
                Ok(Ended { chunk, staging, clears })
            }
            Err(e) => {
                let waited = self.wait();
                self.begun.clear();
                self.arriving = None;
                Err(waited.err().unwrap_or(e))
            }
        }
    }

    /// Waits for all streams.
    fn wait(&self) -> Result<()> {
        let streams = self.decode_streams.iter().map(|on| &on.stream).chain([&self.copies, &self.checks]);
        let waited = streams.map(|stream| stream.synchronize().map_err(|e| driver("wait for a frame", e)));
        // For all of them, whatever one says.
        waited.fold(self.gpu.synchronize(), Result::and)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Buffers and bytes are freed next; an error of the device has been reported by what caused it.
        let _ = self.wait();
    }
}

/// Makes what follows on a stream wait for another one.
fn join(stream: &CudaStream, other: &CudaStream) -> Result<()> {
    stream.join(other).map_err(|e| driver("join streams", e))
}
