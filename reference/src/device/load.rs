//! Frames of stored contexts, decoded on the device into the rows of a cache.
//!
//! The bytes of some layers are copied while those of the layers before are decoded, and the next frame while
//! this one is: the copy engine has its own stream. Where decoding is as fast as the link, a load takes as
//! long as the copy, and [`LAYERS`] layers of decoding. Frames that come over a network begin when their first
//! layers have arrived. Checksums are compared on threads of the host meanwhile; a frame ends when they have
//! been. Nobody else uses the rows of a frame until it has been loaded, so that decoding needs no order but
//! its own.
//!
//! A cache whose rows of all layers are in place, as the dense one's, is decoded into. Another one takes rows
//! layer by layer, and cannot give them back: there a frame lands in rows of the loader's own, and the cache
//! takes it once it is known to be whole.

mod landing;
mod target;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use bytes::Bytes;
use codec_core::{BlockIndex, Frame, Profile, Side};
use cudarc::driver::{CudaEvent, CudaStream, result};
use kv_gpu::codec::{self, Decode, DecodeArguments, Planes};
use kv_gpu::{AnyElement, DevicePtr, Element, VectorElement};
use rayon::prelude::*;

pub(super) use landing::Landing;
pub use target::StreamTarget;

use super::cache::{Chunk, Rows};
use super::host_memory::HostWord;
use super::memory::Buffer;
use super::rotate::{Direction, KeyRows, Rotate};
use super::{Gpu, driver};
use crate::model::Config;
use crate::stream::frame::ChunkFrame;
use crate::{Error, Result};

/// Frames that may be on their way at once.
pub const FRAMES: usize = 3;

/// Layers that are copied, and then decoded, at once. With more of them decoding ends later after the copy.
const LAYERS: usize = 4;

/// Streams that decode. The tiles of 4 layers in 1,500 tokens of 8 heads are a third of what an H200 runs at
/// once, and the kernels for tiles and transforms use different units.
const LANES: usize = 3;

/// Bytes after a frame that the decoder may read.
const PADDING: usize = 3;

/// Decodes the frames of a codec profile on the device.
pub struct Loader {
    gpu: Arc<Gpu>,
    element: Element,
    profile: Arc<Profile>,
    config: Config,
    levels: Vec<Level>,
    rotate: Option<Rotate>, // of keys that the profile has before RoPE
    copies: Arc<CudaStream>,
    lanes: Vec<Lane>,                 // LANES
    slots: Vec<Slot>,                 // FRAMES
    rows: Vec<DevicePtr<AnyElement>>, // (layer, 2): keys, then values
    rows_on_device: Buffer<DevicePtr<AnyElement>>,
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

/// A stream that decodes.
struct Lane {
    stream: Arc<CudaStream>,
    workspace: Buffer<u8>,
}

/// Room for a frame on the device.
struct Slot {
    frame: Buffer<u8>,
    failed: HostWord, // whether a tile of the frame could not be decoded
    landing: Option<Landing>,
}

/// A frame on its way.
struct Begun {
    chunk: Chunk,
    slot: usize,
    lands: bool,
    clears: u64,
    decoded: Vec<CudaEvent>, // of every lane
    checked: mpsc::Receiver<Result<()>>,
    _bytes: Bytes, // which are copied
}

/// A frame that has been decoded.
pub(super) struct Ended<'a> {
    pub chunk: Chunk,
    /// Where it has landed; none if it is in the cache.
    pub landing: Option<&'a Landing>,
    /// How often the sequences had been emptied when it began.
    pub clears: u64,
}

/// Seconds of the stages of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stages {
    /// Copying the frame to the device.
    pub copy: f64,
    /// Decoding it there.
    pub decode: f64,
    /// Comparing its checksums on the host, which a load does meanwhile.
    pub check: f64,
}

/// Where a frame goes.
pub(super) struct Destination<'a> {
    /// Rows of every layer, up to the frame's last token at least; none for a landing.
    pub rows: Option<&'a [Rows]>,
    /// Cosines and sines (position, head_dim / 2) of the same tokens.
    pub angles: [DevicePtr<f32>; 2],
    /// How often the sequences have been emptied.
    pub clears: u64,
}

/// The rows that a frame is decoded to.
#[derive(Clone, Copy)]
struct Place {
    sides: DevicePtr<DevicePtr<AnyElement>>, // (layers, keys and values): rows (heads, capacity, head_dim)
    capacity: usize,
    first_row: usize, // of the frame's first token
    angles: [DevicePtr<f32>; 2],
}

impl Loader {
    /// As [`Decoder::loader`](super::Decoder::loader).
    pub(super) fn new(gpu: &Arc<Gpu>, profile: &Profile, config: &Config, element: Element) -> Result<Self> {
        let info = profile.info();
        if !has_shape(profile, config) {
            return Err(Error::Profile("the levels are of a model of another shape".into()));
        }
        let elements = VectorElement::from(element);
        let level = |level: usize| {
            let sides = |layer| [Side::Keys, Side::Values].map(|side| profile.plane(level, layer, side));
            let planes: Vec<_> = (0..info.layers).flat_map(sides).collect::<std::result::Result<_, _>>()?;
            let planes: Vec<_> = planes.into_iter().map(codec_core::PlaneBuf::view).collect();
            let planes = Planes::pack(&planes, info.head_dim)?;
            let words = Buffer::of(gpu, planes.words())?;
            let decode = Decode::new(&gpu.device, planes.shape(elements, false))?;
            Ok(Level { planes, words, decode })
        };
        let rotate = || Rotate::new(gpu, element, info.heads, info.head_dim);
        let slot = |_| Ok(Slot { frame: Buffer::zeros(gpu, 0)?, failed: HostWord::new(gpu)?, landing: None });
        let stream = || gpu.device.context().new_stream().map_err(|e| driver("make a stream", e));
        let lane = |_| Ok(Lane { stream: stream()?, workspace: Buffer::zeros(gpu, 0)? });
        let rows = vec![DevicePtr::dangling(); 2 * info.layers];
        Ok(Self {
            gpu: gpu.clone(),
            element,
            profile: Arc::new(profile.clone()),
            config: config.clone(),
            levels: (0..profile.levels()).map(level).collect::<Result<_>>()?,
            rotate: (!info.keys_rotated).then(rotate).transpose()?,
            copies: stream()?,
            lanes: (0..LANES).map(lane).collect::<Result<_>>()?,
            slots: (0..FRAMES).map(slot).collect::<Result<_>>()?,
            rows_on_device: Buffer::of(gpu, &rows)?,
            rows,
            begun: VecDeque::new(),
            arriving: None,
            next: 0,
        })
    }

    /// Whether frames go to caches of such a model with this element on this device.
    pub(super) fn is_for(&self, gpu: &Arc<Gpu>, config: &Config, element: Element) -> bool {
        Arc::ptr_eq(&self.gpu, gpu) && self.element == element && has_shape(&self.profile, config)
    }

    /// Tokens of a sequence with the frames that its cache is still to take, and that have begun since it was
    /// emptied last; none if there are none.
    pub(super) fn landing_end(&self, sequence: usize, clears: u64) -> Option<usize> {
        let is_of = |b: &&Begun| b.lands && b.chunk.sequence == sequence && b.clears == clears;
        self.begun.iter().rev().find(is_of).map(|b| b.chunk.end())
    }

    /// Begins to load a frame of the chunk's tokens at this level. Its checksums are compared meanwhile. After
    /// an error the rows of these tokens are undefined, and no other ones. For `stages` they are compared
    /// here, and decoding waits for the whole copy.
    ///
    /// # Errors
    /// As [`Decoder::begin_load`](super::Decoder::begin_load).
    pub(super) fn begin(
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
                None => self.launch(&mut arriving, &frame, &bytes)?,
                Some(stages) => self.launch_in_stages(&mut arriving, &frame, &bytes, stages)?,
            }
            let join = |lane: &Lane| join(&self.gpu.stream, &lane.stream);
            // What follows sees the rows in the cache.
            self.lanes.iter().filter(|_| arriving.in_place).try_for_each(join)?;
            let event =
                |lane: &Lane| lane.stream.record_event(None).map_err(|e| driver("record an event", e));
            self.lanes.iter().map(event).collect::<Result<Vec<_>>>()
        };
        match begin() {
            Ok(decoded) => {
                let (answer, checked) = mpsc::channel();
                let same = bytes.clone();
                // Nobody waits for the answer of a frame that is dropped.
                rayon::spawn(move || drop(answer.send(check_sums(&same))));
                let Arriving { chunk, clears, in_place, .. } = arriving;
                let (slot, lands) = (self.next, !in_place);
                self.begun.push_back(Begun { chunk, slot, lands, clears, decoded, checked, _bytes: bytes });
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
    /// As [`Decoder::begin_load`](super::Decoder::begin_load).
    pub(super) fn begin_start(
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
        self.make_room(self.next, level, frame, total, to.rows.is_none())?;
        self.slots[self.next].failed.set(0);
        let place = self.place(self.next, frame, to)?;
        if to.rows.is_none() {
            // The cache may still be taking what has landed there before.
            self.lanes.iter().try_for_each(|lane| join(&lane.stream, &self.gpu.stream))?;
        }
        let in_place = to.rows.is_some();
        Ok(Arriving { chunk, level, clears: to.clears, bytes: bytes.clone(), place, parts, in_place })
    }

    /// Drops a frame of which the first bytes have begun.
    pub(super) fn forget_start(&mut self) -> Result<()> {
        // Its bytes are freed when nothing copies them.
        self.arriving.is_some().then(|| self.wait()).transpose()?;
        self.arriving = None;
        Ok(())
    }

    /// The chunks of the frames on their way, in order, that are decoded into the cache, which has not been
    /// emptied since.
    pub(super) fn in_place(&self, clears: u64) -> Vec<Chunk> {
        self.begun.iter().filter(|b| !b.lands && b.clears == clears).map(|b| b.chunk).collect()
    }

    /// Waits for the oldest frame. After an error no frame is on its way.
    ///
    /// # Errors
    /// As [`Decoder::end_load`](super::Decoder::end_load).
    pub(super) fn end(&mut self) -> Result<Ended<'_>> {
        let Some(begun) = self.begun.pop_front() else {
            return Err(Error::argument("no frame is on its way"));
        };
        let Begun { chunk, slot, lands, clears, .. } = begun;
        let wait = |event: &CudaEvent| event.synchronize().map_err(|e| driver("wait for a frame", e));
        let ended = begun.decoded.iter().try_for_each(wait);
        let ended = ended.and_then(|()| begun.checked.recv().unwrap_or_else(|_| Err(unchecked())));
        let ended = ended.and_then(|()| match self.slots[slot].failed.get() {
            0 => Ok(()),
            _ => Err(codec_core::Error::Corrupt.into()),
        });
        match ended {
            Ok(()) => {
                let landing = self.slots[slot].landing.as_ref().filter(|_| lands);
                Ok(Ended { chunk, landing, clears })
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
        let streams = self.lanes.iter().map(|lane| &lane.stream).chain([&self.copies]);
        let waited = streams.map(|stream| stream.synchronize().map_err(|e| driver("wait for a frame", e)));
        // For all of them, whatever one says.
        waited.fold(self.gpu.synchronize(), Result::and)
    }

    /// Makes a slot and the workspaces large enough.
    fn make_room(
        &mut self,
        slot: usize,
        level: usize,
        frame: &Frame<'_>,
        bytes: usize,
        lands: bool,
    ) -> Result<()> {
        let (info, decode) = (frame.info(), &self.levels[level].decode);
        let workspace = decode.workspace_len(info, LAYERS.min(info.layers), info.blocks());
        let fits = |buffer: &Buffer<u8>, len| buffer.len() >= len;
        let (bytes, tokens) = (bytes + PADDING, info.tokens);
        let has_landing = |slot: &Slot| slot.landing.as_ref().is_some_and(|rows| rows.capacity() >= tokens);
        let has_landing = !lands || has_landing(&self.slots[slot]);
        if has_landing
            && fits(&self.slots[slot].frame, bytes)
            && self.lanes.iter().all(|lane| fits(&lane.workspace, workspace))
        {
            return Ok(());
        }
        // Frames of a level have about the same length: an eighth more is room for the next ones.
        self.wait()?;
        if !fits(&self.slots[slot].frame, bytes) {
            self.slots[slot].frame = Buffer::zeros(&self.gpu, bytes + bytes / 8)?;
        }
        if !has_landing {
            self.slots[slot].landing = None; // before there is another one
            self.slots[slot].landing = Some(Landing::new(&self.gpu, &self.config, tokens)?);
        }
        for lane in self.lanes.iter_mut().filter(|lane| !fits(&lane.workspace, workspace)) {
            lane.workspace = Buffer::zeros(&self.gpu, workspace)?;
        }
        self.gpu.synchronize() // before another stream writes to what has just been cleared
    }

    /// Copies and decodes those layers of a frame that are among its first bytes, some at a time.
    fn launch(&self, arriving: &mut Arriving, frame: &Frame<'_>, bytes: &[u8]) -> Result<()> {
        while let Some(part) = arriving.parts.front().filter(|part| part.bytes.end <= bytes.len()) {
            let lane = self.lane(part);
            self.copy(part.bytes.start, &bytes[part.bytes.clone()])?;
            join(&lane.stream, &self.copies)?;
            self.decode(lane, arriving.level, frame, part.layers.clone(), &arriving.place)?;
            arriving.parts.pop_front();
        }
        Ok(())
    }

    /// The same for a whole frame, first the copies.
    fn launch_in_stages(
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
            self.decode(self.lane(&part), arriving.level, frame, part.layers, &arriving.place)?;
        }
        self.wait()?;
        let decoded = Instant::now();
        check_sums(bytes)?;
        stages.copy = (copied - start).as_secs_f64();
        stages.decode = (decoded - copied).as_secs_f64();
        stages.check = decoded.elapsed().as_secs_f64();
        Ok(())
    }

    /// The stream that decodes a part.
    fn lane(&self, part: &Part) -> &Lane {
        &self.lanes[part.layers.start / LAYERS % LANES]
    }

    /// Where a frame is decoded to.
    fn place(&mut self, slot: usize, frame: &Frame<'_>, to: &Destination<'_>) -> Result<Place> {
        let angles = to.angles;
        let Some(all) = to.rows else {
            let landing = self.slots[slot].landing.as_ref();
            let landing = landing.ok_or_else(|| Error::argument("no rows for a frame"))?;
            let (sides, capacity) = (landing.sides(), landing.capacity());
            return Ok(Place { sides, capacity, first_row: 0, angles });
        };
        let rows: Vec<_> = all.iter().flat_map(|rows| [rows.keys, rows.values]).collect();
        if rows != self.rows {
            self.wait()?;
            self.rows_on_device.write(&self.gpu, &rows)?;
            self.gpu.synchronize()?;
            self.rows = rows;
        }
        let capacity = all.first().map_or(0, |rows| rows.capacity);
        let first_row = frame.info().first_token as usize;
        Ok(Place { sides: self.rows_on_device.pointer(), capacity, first_row, angles })
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

    /// Decodes layers of a frame that has been copied so far, and rotates their keys.
    fn decode(
        &self,
        lane: &Lane,
        level: usize,
        frame: &Frame<'_>,
        layers: Range<usize>,
        &Place { sides, capacity, first_row, angles }: &Place,
    ) -> Result<()> {
        let (info, Slot { frame: on_device, failed, .. }) = (frame.info(), &self.slots[self.next]);
        let Level { planes, words, decode } = &self.levels[level];
        let (position, stream) = (info.first_token as usize, lane.stream.cu_stream());
        let place = codec::Place {
            token_stride: info.head_dim,
            head_stride: capacity * info.head_dim,
            first_token: first_row,
            pages: None,
        };
        let out = sides.offset(2 * layers.start);
        let arguments = DecodeArguments {
            frame: on_device.pointer(),
            planes: words.pointer(),
            layers: layers.clone(),
            blocks: 0..info.blocks(),
            out,
            place,
            workspace: lane.workspace.pointer(),
            failed: failed.pointer(),
        };
        // SAFETY: the bytes of the frame up to these layers have been copied, and the slot has PADDING more.
        // The rows have all tokens of the frame, which the decoder or `make_room` checks. The workspace has
        // room for LAYERS layers.
        unsafe { decode.launch(stream, frame, planes, &arguments) }?;
        let Some(rotate) = &self.rotate else { return Ok(()) };
        let keys = KeyRows {
            rows: out,
            layers: layers.len(),
            capacity,
            tokens: position..position + info.tokens,
            first_row,
            angles,
        };
        // SAFETY: the rows are those that have just been written, and there are angles for all positions of
        // the cache.
        unsafe { rotate.launch(stream, Direction::Forward, &keys) }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Buffers and bytes are freed next; an error of the device has been reported by what caused it.
        let _ = self.wait();
    }
}

/// Whether a profile is of a model of this shape.
fn has_shape(profile: &Profile, config: &Config) -> bool {
    let info = profile.info();
    (info.layers, info.heads, info.head_dim) == (config.n_layers, config.n_kv_heads, config.head_dim)
}

/// Layers that are copied and decoded at once.
struct Part {
    layers: Range<usize>,
    bytes: Range<usize>, // of the frame: the first part has its header and index
}

/// The parts of a frame.
fn parts(frame: &Frame<'_>) -> Result<VecDeque<Part>> {
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

/// Compares the checksums of all blocks of a frame.
fn check_sums(bytes: &[u8]) -> Result<()> {
    let frame = Frame::parse(bytes, usize::MAX)?;
    let (layers, blocks) = (frame.info().layers, frame.info().blocks());
    (0..layers * blocks).into_par_iter().try_for_each(|i| {
        let (layer, block) = (i / blocks, i % blocks);
        frame.check_block(BlockIndex { layer, side: Side::Keys, block })?;
        Ok(frame.check_block(BlockIndex { layer, side: Side::Values, block })?)
    })
}

/// Makes what follows on a stream wait for another one.
fn join(stream: &CudaStream, other: &CudaStream) -> Result<()> {
    stream.join(other).map_err(|e| driver("join streams", e))
}

fn unchecked() -> Error {
    Error::Stream("the thread that compares checksums has ended".into())
}
