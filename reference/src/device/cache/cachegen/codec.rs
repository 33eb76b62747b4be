//! Rows to a bitstream and back, where they are.

use std::ops::Range;

use codec_core::{Frame, FrameInfo, LANES, PlaneBuf, assemble_frame};
use kv_gpu::codec::{Decode, DecodeArguments, Encode, EncodeArguments, Place, Planes};
use kv_gpu::{AnyElement, DevicePtr, Element, VectorElement};

use crate::device::Gpu;
use crate::device::cache::{DenseCache, Rows};
use crate::device::host_memory::HostBytes;
use crate::device::memory::Buffer;
use crate::device::rotate::{Direction, KeyRows, Rotate};
use crate::model::{Config, Rope};
use crate::side::Pair;
use crate::{Error, Result};

/// Tokens of a layer that are coded at once, at most, or of all layers together: they bound the memory.
const PIECE: usize = 8192;

/// Tokens of a block of a frame, as on the CPU. Pieces end with whole blocks.
const BLOCK: usize = 256;

/// Bytes after a frame that the decoder may read, and the alignment of frames in a buffer.
const PADDING: usize = 3;
const ALIGNMENT: usize = 8;

/// Codes rows of a dense cache: a frame for each layer, with the bytes that the CPU's have.
///
/// The index of a frame, without which it cannot be decoded, has checksums of its blocks, and the host makes
/// it: so the bits come to the host, and the decoder's stream waits. Nobody reads the bits again.
pub(super) struct Codec {
    layers: Vec<LayerCodec>,
    rotate: Rotate,
    angles: [Buffer<f32>; 2],            // (capacity, head_dim / 2)
    rows: Buffer<DevicePtr<AnyElement>>, // (batch, layer, keys and values)
    slots: Buffer<u8>,                   // of a layer
    workspace: Buffer<u8>,               // of a layer
    lengths: Buffer<u16>,                // (layers of the piece, tiles)
    payloads: Buffer<u8>,                // (layers of the piece, room for the payload)
    payload_bytes: Buffer<u64>,          // (layer,)
    failed: Buffer<u32>, // (1,): what kernels of this piece, or of the last one, could not code
    frames: Buffer<u8>,  // of the layers of the piece, aligned
    host_payloads: HostBytes, // as `payloads`, without gaps
    host_frames: Vec<u8>, // as `frames`; the memory stays, since new pages take longer than what fills them
    heads: usize,
    head_dim: usize,
    capacity: usize,
}

/// Where the frame of a layer is in `frames`, and its payload in `payloads`.
struct Coded {
    frame: Range<usize>,
    payload: Range<usize>,
}

/// The planes of a layer and the kernels for them.
struct LayerCodec {
    planes: Planes,
    words: Buffer<u32>,
    encode: Encode,
    decode: Decode,
}

/// Consecutive tokens of one sequence in consecutive layers.
#[derive(Clone)]
pub(super) struct Span {
    pub sequence: usize,
    pub layers: Range<usize>,
    pub tokens: Range<usize>,
}

/// What the buffers for a piece need. Every layer of a piece has equally many tiles.
#[derive(Clone, Copy)]
struct Sizes {
    slots: usize,
    tiles: usize, // a multiple of four, so that each layer's lengths are aligned
    frame: usize,
}

impl Sizes {
    fn of(info: &FrameInfo) -> Self {
        let tiles = 2 * info.blocks() * info.channels().div_ceil(LANES);
        Self {
            slots: Encode::slots_len(info, info.layers).next_multiple_of(ALIGNMENT),
            tiles: tiles.next_multiple_of(4),
            frame: (info.max_frame_len() + PADDING).next_multiple_of(ALIGNMENT),
        }
    }
}

/// Tokens of a piece of as many layers.
const fn piece(layers: usize) -> usize {
    let tokens = PIECE / layers / BLOCK * BLOCK;
    if tokens < BLOCK { BLOCK } else { tokens }
}

impl Codec {
    /// Codes the rows of `cache` with the planes of every layer.
    ///
    /// # Errors
    /// [`Error::Device`], also for planes that the device does not encode.
    pub fn new(
        gpu: &Gpu,
        config: &Config,
        element: Element,
        planes: &[Pair<PlaneBuf>],
        cache: &DenseCache,
        (batch, capacity): (usize, usize),
    ) -> Result<Self> {
        let (n_layers, heads, head_dim) = (config.n_layers, config.n_kv_heads, config.head_dim);
        let layer = |planes| LayerCodec::new(gpu, element, planes, head_dim);
        let layers = planes.iter().map(layer).collect::<Result<Vec<_>>>()?;
        let rows = (0..batch).flat_map(|sequence| (0..n_layers).map(move |layer| (sequence, layer)));
        let rows = rows.flat_map(|(sequence, layer)| {
            let Rows { keys, values, .. } = cache.rows_of(layer, sequence);
            [keys, values]
        });
        // Buffers for a piece of one layer, and for one of all of them.
        let infos = [1, n_layers]
            .map(|layers| (layers, FrameInfo::new(1, heads, head_dim, piece(layers).min(capacity))));
        let most = |len: &dyn Fn(usize, &FrameInfo) -> usize| {
            infos.iter().map(|(layers, info)| len(*layers, info)).max().unwrap_or(0)
        };
        let workspace = |info: &FrameInfo| {
            let of = |layer: &LayerCodec| {
                layer.encode.workspace_len(info, 1).max(layer.decode.workspace_len(info, 1, info.blocks()))
            };
            layers.iter().map(of).max().unwrap_or(0)
        };
        let payloads = most(&|layers, info| layers * Sizes::of(info).slots);
        let rope = Rope::new(config, capacity);
        let (cos, sin) = rope.tables();
        let codec = Self {
            rotate: Rotate::new(gpu, element, heads, head_dim)?,
            angles: [Buffer::of(gpu, cos)?, Buffer::of(gpu, sin)?],
            rows: Buffer::of(gpu, &rows.collect::<Vec<_>>())?,
            slots: Buffer::zeros(gpu, most(&|_, info| Sizes::of(info).slots))?,
            workspace: Buffer::zeros(gpu, most(&|_, info| workspace(info)))?,
            lengths: Buffer::zeros(gpu, most(&|layers, info| layers * Sizes::of(info).tiles))?,
            payloads: Buffer::zeros(gpu, payloads)?,
            payload_bytes: Buffer::zeros(gpu, n_layers)?,
            failed: Buffer::zeros(gpu, 1)?,
            frames: Buffer::zeros(gpu, most(&|layers, info| layers * Sizes::of(info).frame))?,
            host_payloads: HostBytes::zeros(gpu, payloads)?,
            host_frames: vec![],
            layers,
            heads,
            head_dim,
            capacity,
        };
        gpu.synchronize()?; // tables and planes are copied
        Ok(codec)
    }

    /// Replaces the rows of these tokens by what a frame for each layer makes of them; returns the bytes of
    /// the frames.
    ///
    /// # Errors
    /// [`Error::Cache`] for rows that are not finite or too large for their steps: keys are then rotated, and
    /// the rows of the span otherwise as they were; [`Error::Device`].
    pub fn code(&mut self, gpu: &Gpu, span: Span) -> Result<usize> {
        let step = piece(span.layers.len());
        let starts = span.tokens.clone().step_by(step);
        let pieces = starts.map(|start| {
            let tokens = start..span.tokens.end.min(start + step);
            self.code_piece(gpu, &Span { tokens, ..span.clone() })
        });
        pieces.sum()
    }

    fn code_piece(&mut self, gpu: &Gpu, span: &Span) -> Result<usize> {
        self.rotate(gpu, Direction::Back, span)?;
        let coded = self.encode(gpu, span).and_then(|coded| self.decode(gpu, span, &coded));
        self.rotate(gpu, Direction::Forward, span)?;
        coded
    }

    /// The pointers of a layer of a sequence.
    fn rows(&self, sequence: usize, layer: usize) -> DevicePtr<DevicePtr<AnyElement>> {
        self.rows.pointer().offset(2 * (sequence * self.layers.len() + layer))
    }

    fn rotate(&self, gpu: &Gpu, direction: Direction, span: &Span) -> Result<()> {
        let [cos, sin] = &self.angles;
        let keys = KeyRows {
            rows: self.rows(span.sequence, span.layers.start),
            layers: span.layers.len(),
            capacity: self.capacity,
            tokens: span.tokens.clone(),
            first_row: span.tokens.start,
            angles: [cos.pointer(), sin.pointer()],
        };
        // SAFETY: the tokens are within the capacity, for which there are rows and angles. All work on them
        // is on this stream.
        unsafe { self.rotate.launch(gpu.stream(), direction, &keys) }
    }

    /// The frame of every layer, and where the tokens are in the rows.
    fn info(&self, span: &Span) -> (FrameInfo, Place) {
        let (first_token, tokens) = (span.tokens.start, span.tokens.len());
        let info = FrameInfo {
            first_token: first_token as u64,
            block_tokens: BLOCK,
            ..FrameInfo::new(1, self.heads, self.head_dim, tokens)
        };
        let (token_stride, head_stride) = (self.head_dim, self.capacity * self.head_dim);
        (info, Place { token_stride, head_stride, first_token, pages: None })
    }

    /// Makes the frames of all layers of a piece, on the host.
    fn encode(&mut self, gpu: &Gpu, span: &Span) -> Result<Vec<Coded>> {
        let (info, place) = self.info(span);
        let sizes = Sizes::of(&info);
        for (i, l) in span.layers.clone().enumerate() {
            let layer = &self.layers[l];
            let arguments = EncodeArguments {
                planes: layer.words.pointer(),
                layers: 0..1,
                rows: self.rows(span.sequence, l),
                place,
                slots: self.slots.pointer(),
                workspace: self.workspace.pointer(),
                lengths: self.lengths.pointer().offset(i * sizes.tiles),
                payload: self.payloads.pointer().offset(i * sizes.slots),
                capacity: sizes.slots,
                payload_bytes: self.payload_bytes.pointer().offset(i),
                failed: self.failed.pointer(),
            };
            // SAFETY: the buffers have the lengths of `new` for pieces as large, and multiples of 8 bytes
            // between those of one layer and the next; the rows are those of the tokens, and the words those
            // of the planes.
            unsafe { layer.encode.launch(gpu.stream(), &info, &layer.planes, &arguments) }?;
        }
        let (mut failed, mut payload_bytes) = ([0], vec![0; span.layers.len()]);
        self.failed.read_into(gpu, &mut failed)?;
        if failed[0] != 0 {
            self.failed.write(gpu, &[0])?;
            let what = "keys or values are not finite, or too large for the steps of their channels";
            return Err(Error::Cache { method: "cachegen", what: what.into() });
        }
        self.payload_bytes.read_into(gpu, &mut payload_bytes)?;
        let mut lengths = vec![0; span.layers.len() * sizes.tiles];
        self.lengths.read_into(gpu, &mut lengths)?;
        let tiles = 2 * info.blocks() * info.channels().div_ceil(LANES);
        let starts = (0..).map(|i| i * sizes.slots);
        let payloads = starts.zip(payload_bytes).map(|(start, bytes)| start..start + bytes as usize);
        let payloads: Vec<Range<usize>> = payloads.collect();
        self.payloads.read_ranges(gpu, &payloads, self.host_payloads.get())?;
        let (mut rest, frames) = (&*self.host_payloads.get(), &mut self.host_frames);
        frames.clear();
        let layers = span.layers.clone().zip(payloads).zip(lengths.chunks_exact(sizes.tiles));
        let coded = layers.map(|((l, payload), lengths)| {
            let (start, own) = (frames.len(), &rest[..payload.len()]);
            rest = &rest[payload.len()..];
            assemble_frame(&info, self.layers[l].planes.ids(), &lengths[..tiles], own, frames)?;
            let frame = start..frames.len();
            frames.resize((frame.end + PADDING).next_multiple_of(ALIGNMENT), 0);
            Ok(Coded { frame, payload })
        });
        coded.collect()
    }

    /// Decodes the frames of all layers of a piece; returns their bytes.
    fn decode(&self, gpu: &Gpu, span: &Span, coded: &[Coded]) -> Result<usize> {
        let (info, place) = self.info(span);
        for (l, Coded { frame, payload }) in span.layers.clone().zip(coded) {
            // The payload is on the device already.
            let (layer, bytes) = (&self.layers[l], &self.host_frames[frame.clone()]);
            let head = bytes.len() - payload.len();
            self.frames.write_at(gpu, frame.start, &bytes[..head])?;
            self.frames.copy(gpu, frame.start + head, &self.payloads, payload.start, payload.len())?;
            let arguments = DecodeArguments {
                frame: self.frames.pointer().offset(frame.start),
                planes: layer.words.pointer(),
                layers: 0..1,
                blocks: 0..info.blocks(),
                out: self.rows(span.sequence, l),
                place,
                workspace: self.workspace.pointer(),
                failed: self.failed.pointer(),
            };
            let frame = Frame::parse(bytes, info.elements())?;
            // SAFETY: as in `encode`; the frame is on the device, with PADDING bytes behind it.
            unsafe { layer.decode.launch(gpu.stream(), &frame, &layer.planes, &arguments) }?;
        }
        Ok(coded.iter().map(|coded| coded.frame.len()).sum())
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let words: usize = self.layers.iter().map(|layer| layer.words.bytes()).sum();
        let angles: usize = self.angles.iter().map(Buffer::bytes).sum();
        let streams = self.lengths.bytes() + self.payloads.bytes() + self.frames.bytes();
        words + angles + streams + self.slots.bytes() + self.workspace.bytes() + self.rows.bytes()
    }
}

impl LayerCodec {
    fn new(gpu: &Gpu, element: Element, planes: &Pair<PlaneBuf>, head_dim: usize) -> Result<Self> {
        let planes = Planes::pack(&[planes.keys.view(), planes.values.view()], head_dim)?;
        let shape = planes.shape(VectorElement::from(element), false);
        Ok(Self {
            words: Buffer::of(gpu, planes.words())?,
            encode: Encode::new(&gpu.device, shape)?,
            decode: Decode::new(&gpu.device, shape)?,
            planes,
        })
    }
}
