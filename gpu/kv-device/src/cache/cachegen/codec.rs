//! In-place coding of rows: to a bitstream and back.

use std::ops::Range;

use codec_core::{FrameInfo, LANES, PlaneBuf};
use kv_attend::owner::Pair;
use kv_gpu::codec::{
    Decode, DecodeArguments, Encode, EncodeArguments, Index, IndexArguments, Place, Planes, Rope as Angles,
};
use kv_gpu::{AnyElement, DevicePtr, Element, VectorElement};

use crate::cache::dense::DenseCache;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::rotate::{Direction, KeyRows, Rotate, decoder};
use crate::rows::Rows;
use crate::shape::CacheShape;
use crate::{Error, Result};

/// Maximum tokens of a layer that are coded at once: they bound the memory.
const PIECE: usize = 8192;

/// Tokens of a block of a frame, as on the CPU. Pieces end with whole blocks.
const BLOCK: usize = 256;

/// Bytes after a frame that the decoder may read, and the alignment of payloads.
const PADDING: usize = 3;
const ALIGNMENT: usize = 8;

/// Codes rows of a dense cache: a frame per layer, with the same payload as the CPU's. It stays on the
/// device, and nothing waits for the host.
pub(super) struct Codec {
    layers: Vec<LayerCodec>,
    rotate: Rotate,
    index: Index,
    angles: [Buffer<f32>; 2], // (capacity, head_dim / 2)
    rows: Buffer<u64>,        // (batch, layer, keys and values): addresses
    slots: Buffer<u8>,
    workspace: Buffer<u8>,
    lengths: Buffer<u16>,       // (tiles,)
    frame: Buffer<u8>,          // its payload is aligned
    payload_bytes: Buffer<u64>, // (1,)
    counts: Buffer<u64>,        // (2,): bytes of all frames, and 1 + the last tile that could not be coded
    heads: usize,
    head_dim: usize,
    capacity: usize,
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

impl Codec {
    /// Codes the rows of `cache` with the planes of every layer.
    ///
    /// # Errors
    /// [`Error::Gpu`], also for planes that the device cannot encode.
    pub fn new(gpu: &Gpu, shape: &CacheShape, planes: &[Pair<PlaneBuf>], cache: &DenseCache) -> Result<Self> {
        let &CacheShape { layers: n_layers, heads, head_dim, element, batch, capacity, .. } = shape;
        let layer = |planes| LayerCodec::new(gpu, element, planes, head_dim);
        let layers = planes.iter().map(layer).collect::<Result<Vec<_>>>()?;
        let rows = (0..batch).flat_map(|sequence| (0..n_layers).map(move |layer| (sequence, layer)));
        let rows = rows.flat_map(|(sequence, layer)| {
            let Rows { keys, values, .. } = cache.rows_of(layer, sequence);
            [keys.address(), values.address()]
        });
        let info = FrameInfo::new(1, heads, head_dim, PIECE.min(capacity));
        let workspace = |layer: &LayerCodec| {
            layer.encode.workspace_len(&info, 1).max(layer.decode.workspace_len(&info, 1, info.blocks()))
        };
        let workspace = layers.iter().map(workspace).max().unwrap_or(0);
        let slots = Encode::slots_len(&info, 1);
        let angles = (0..capacity).flat_map(|pos| shape.frequencies.iter().map(move |f| pos as f64 * f));
        let (sin, cos): (Vec<f32>, Vec<f32>) =
            angles.map(|angle| (angle.sin() as f32, angle.cos() as f32)).unzip();
        let codec = Self {
            rotate: Rotate::new(gpu, element, heads, head_dim)?,
            angles: [Buffer::of(gpu, &cos)?, Buffer::of(gpu, &sin)?],
            rows: Buffer::of(gpu, &rows.collect::<Vec<_>>())?,
            index: Index::new(gpu.device())?,
            slots: Buffer::zeros(gpu, slots)?,
            workspace: Buffer::zeros(gpu, workspace)?,
            lengths: Buffer::zeros(gpu, 2 * info.blocks() * info.channels().div_ceil(LANES))?,
            frame: Buffer::zeros(gpu, payload_at(&info) + slots + PADDING)?,
            payload_bytes: Buffer::zeros(gpu, 1)?,
            counts: Buffer::zeros(gpu, 2)?,
            layers,
            heads,
            head_dim,
            capacity,
        };
        gpu.synchronize()?; // tables and planes are copied
        Ok(codec)
    }

    /// Replaces the rows of these tokens by their reconstruction from a frame per layer.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn code(&mut self, gpu: &Gpu, span: &Span) -> Result<()> {
        if span.tokens.is_empty() {
            return Ok(());
        }
        self.rotate(gpu, Direction::Back, span)?;
        for layer in span.layers.clone() {
            for start in span.tokens.clone().step_by(PIECE) {
                self.code_piece(gpu, (span.sequence, layer), start..span.tokens.end.min(start + PIECE))?;
            }
            if !self.layers[layer].decode.rotates() {
                self.rotate(gpu, Direction::Forward, &Span { layers: layer..layer + 1, ..span.clone() })?;
            }
        }
        Ok(())
    }

    /// The bytes of the frames since the last call. Waits for them.
    ///
    /// # Errors
    /// [`Error::Rows`] for rows that were not finite, or too large for their steps: their tiles are undefined
    /// now;
    /// [`Error::Gpu`].
    pub fn finish(&mut self, gpu: &Gpu) -> Result<usize> {
        let mut counts = [0; 2];
        self.counts.read_into(gpu, &mut counts)?;
        self.counts.fill(gpu, 0)?;
        match counts {
            [bytes, 0] => Ok(bytes as usize),
            _ => Err(Error::Rows),
        }
    }

    /// The pointers of a layer of a sequence.
    fn rows(&self, sequence: usize, layer: usize) -> DevicePtr<DevicePtr<AnyElement>> {
        self.rows.pointer().offset(2 * (sequence * self.layers.len() + layer)).cast()
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

    /// Encodes and decodes tokens of a layer, whose keys the decoder rotates if it can.
    fn code_piece(&self, gpu: &Gpu, (sequence, layer): (usize, usize), tokens: Range<usize>) -> Result<()> {
        let first_token = tokens.start;
        let info = FrameInfo {
            first_token: first_token as u64,
            block_tokens: BLOCK,
            ..FrameInfo::new(1, self.heads, self.head_dim, tokens.len())
        };
        let (token_stride, head_stride) = (self.head_dim, self.capacity * self.head_dim);
        let place = Place { token_stride, head_stride, first_token, pages: None };
        let (rows, payload) = (self.rows(sequence, layer), self.frame.pointer().offset(payload_at(&info)));
        let frame = self.frame.pointer().offset(payload_at(&info) - info.head_len());
        let (failed, layer) = (self.counts.pointer().offset(1).cast(), &self.layers[layer]);
        let encode = EncodeArguments {
            planes: layer.words.pointer(),
            layers: 0..1,
            rows,
            place,
            slots: self.slots.pointer(),
            workspace: self.workspace.pointer(),
            lengths: self.lengths.pointer(),
            payload,
            capacity: Encode::slots_len(&info, 1),
            payload_bytes: self.payload_bytes.pointer(),
            failed,
        };
        let (lengths, frame_bytes) = (self.lengths.pointer(), self.counts.pointer());
        let index = IndexArguments { lengths, frame, frame_bytes };
        let angles = self.angles.each_ref().map(|x| x.pointer().offset(first_token * self.head_dim / 2));
        let decode = DecodeArguments {
            frame,
            planes: layer.words.pointer(),
            layers: 0..1,
            blocks: 0..info.blocks(),
            out: rows,
            place,
            rope: layer.decode.rotates().then_some(Angles { cos: angles[0], sin: angles[1] }),
            workspace: self.workspace.pointer(),
            failed,
        };
        // SAFETY: the buffers have the lengths of `new` for pieces as large, and all work on them is on this
        // stream; the rows and angles are those of the tokens, and the words those of the planes. `failed` is
        // the low word of its count, since devices are little-endian.
        unsafe {
            layer.encode.launch(gpu.stream(), &info, &layer.planes, &encode)?;
            self.index.launch(gpu.stream(), &info, &index)?;
            layer.decode.launch_indexed(gpu.stream(), &info, &layer.planes, &decode)?;
        }
        Ok(())
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let words: usize = self.layers.iter().map(|layer| layer.words.bytes()).sum();
        let angles: usize = self.angles.iter().map(Buffer::bytes).sum();
        let stream = self.lengths.bytes() + self.slots.bytes() + self.frame.bytes();
        words + angles + stream + self.workspace.bytes() + self.rows.bytes()
    }
}

/// Offset of a frame's payload in its buffer.
const fn payload_at(info: &FrameInfo) -> usize {
    info.head_len().next_multiple_of(ALIGNMENT)
}

impl LayerCodec {
    fn new(gpu: &Gpu, element: Element, planes: &Pair<PlaneBuf>, head_dim: usize) -> Result<Self> {
        let planes = Planes::pack(&[planes.keys.view(), planes.values.view()], head_dim)?;
        let shape = planes.shape(VectorElement::from(element), false);
        Ok(Self {
            words: Buffer::of(gpu, planes.words())?,
            encode: Encode::new(&gpu.device, shape)?,
            decode: decoder(gpu, shape)?,
            planes,
        })
    }
}
