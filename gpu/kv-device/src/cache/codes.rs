//! Codes of all tokens of a batch, and their encoding.

mod mean_errors;
pub(crate) mod prepare;

use cudarc::driver::CudaStream;
use half::f16;
use kv_attend::owner::{Pair, Side};
use kv_gpu::pq::{CodeLayout, Encode, EncodeArguments, EncodeShape, Pages as PageTable, Paging, TILE};
use kv_gpu::{DevicePtr, Element, VectorElement};
use pq_core::{CodebookBuf, PqShape};

use super::eviction::Evictions;
use super::key_means::KeyMeans;
use super::pages::Pages;
use super::row_transform::RowTransform;
use super::span::Span;
use super::window::WindowShape;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_CODES, fill_codes, random_codebooks};
use crate::memory::Buffer;
use crate::plan::Heads;
use crate::rows::{Chunk, Rows};
use crate::shape::CacheShape;
use crate::{Error, Result};
use mean_errors::ValueErrors;
use prepare::RowKernels;
pub(super) use prepare::Transform;

/// Key and value codes of all tokens after the sinks, in the tiles of `pq::Attend` and `pq::Hybrid`.
pub(super) struct TokenCodes {
    pub layouts: Pair<CodeLayout>,
    pub tiles: usize,                 // per head, in a page or a sequence
    pub pages: Option<Pages>,         // of tokens after the sinks; none if each sequence has room for all
    pub transform: Option<Transform>, // of the rows and codebooks; none if rows are coded untransformed
    encoders: Pair<Encode>,
    codes: Pair<Buffer<u8>>,          // (layer, pages or batch, heads, tiles, tile_len)
    tables: Pair<Buffer<f16>>,        // (layer, heads, table_len)
    centroids: Pair<Buffer<f32>>,     // (layer, heads, m, ksub, dsub)
    norms: Pair<Option<Buffer<f16>>>, // (layer, pages or batch, heads, tiles, TILE)
    value_errors: Option<ValueErrors>, // if their means are kept
    kernels: Pair<Option<RowKernels>>, // if rows are prepared before coding
    prepared: Option<Buffer<u16>>,    // (heads, tokens, head_dim): the prepared rows of a chunk
    span: Span,                       // that a chunk encodes
    shape: WindowShape,
}

impl TokenCodes {
    /// Empty codes; `codebooks`, or hashed ones. Pages have whole tiles.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(
        gpu: &Gpu,
        shape: &CacheShape,
        quantizers: Pair<PqShape>,
        codebooks: Option<Heads<Pair<CodebookBuf>>>,
        transform: Option<Transform>,
        pages: Option<Pages>,
    ) -> Result<Self> {
        let &CacheShape { layers, batch, heads, head_dim, element, capacity, .. } = shape;
        if pages.as_ref().is_some_and(|pages| !pages.page().is_multiple_of(TILE)) {
            return Err(Error::Argument(format!("pages of codes have a multiple of {TILE} tokens")));
        }
        let has_norms = |side| transform.as_ref().is_some_and(|transform| transform.norms[side].is_some());
        let codebooks = match codebooks {
            Some(codebooks) => codebooks,
            None => random_codebooks(layers, heads, quantizers, Pair::of(has_norms))?,
        };
        let books = |side: Side| codebooks.iter().flatten().map(move |pair| &pair[side]);
        let paging = paging(pages.is_some());
        let encoder = |side: Side| Encode::new(&gpu.device, encoder(quantizers, side, element, paging));
        let layouts = Pair::try_of(|side| CodeLayout::new(quantizers[side], side))?;
        let tiles = pages.as_ref().map_or(capacity, Pages::page).div_ceil(TILE).max(1);
        let places = pages.as_ref().map_or(batch, Pages::count);
        let all_tiles = layers * places * heads * tiles;
        let kernels = |side| match &transform {
            Some(transform) => transform.kernels(gpu, element, head_dim, side),
            None => Ok(None),
        };
        let norms = |side| has_norms(side).then(|| Buffer::zeros(gpu, all_tiles * TILE)).transpose();
        Ok(Self {
            kernels: Pair::try_of(kernels)?,
            norms: Pair::try_of(norms)?,
            value_errors: None,
            prepared: None,
            encoders: Pair::try_of(encoder)?,
            codes: Pair::try_of(|side| Buffer::zeros(gpu, all_tiles * layouts[side].tile_len()))?,
            tables: Pair::try_of(|side| tables(gpu, &layouts[side], books(side)))?,
            centroids: Pair::try_of(|side| {
                Buffer::of(gpu, &books(side).flat_map(CodebookBuf::centroids).collect::<Vec<f32>>())
            })?,
            span: Span::new(gpu)?,
            layouts,
            tiles,
            pages,
            transform,
            shape: WindowShape::new(shape),
        })
    }

    /// Codes of a layer from a sequence on, or of all pages.
    pub fn of(&self, side: Side, layer: usize, sequence: usize) -> DevicePtr<u8> {
        let len = self.shape.heads * self.tiles * self.layouts[side].tile_len();
        self.codes[side].pointer().offset(self.place(layer, sequence) * len)
    }

    /// Index of a layer's first codes from a sequence on, in sequences or pages.
    fn place(&self, layer: usize, sequence: usize) -> usize {
        match &self.pages {
            Some(pages) => layer * pages.count(),
            None => layer * self.shape.batch + sequence,
        }
    }

    /// The page table from a sequence on.
    pub fn page_table(&self, sequence: usize) -> Option<PageTable> {
        self.pages.as_ref().map(|pages| pages.table(sequence))
    }

    /// Tables of a layer.
    pub fn table(&self, side: Side, layer: usize) -> DevicePtr<f16> {
        self.tables[side].pointer().offset(layer * self.shape.heads * self.layouts[side].table_len())
    }

    /// Encodes the evicted tokens of a layer, staged as elements (batch, heads, ring, head_dim), which may be
    /// modified.
    pub fn encode_evicted(
        &self,
        stream: &CudaStream,
        layer: usize,
        staged: Pair<DevicePtr<u16>>,
        evictions: &Evictions,
    ) -> Result<()> {
        let WindowShape { batch, heads, head_dim, ring, .. } = self.shape;
        for side in Side::ALL {
            self.prepare_evicted(stream, (side, layer), staged[side], evictions)?;
            let arguments = EncodeArguments {
                batch,
                max_count: ring,
                vectors: staged[side].cast(),
                strides: [heads * ring * head_dim, ring * head_dim, head_dim],
                firsts: evictions.firsts(layer),
                counts: evictions.counts(layer),
                ..self.arguments(side, layer, 0)
            };
            // SAFETY: the buffers have the lengths of `new`. The plan counts at most a ring of tokens, whose
            // codes fit since they come before tokens that fit. Attention reads only codes before `firsts`
            // until the layer's next eviction, which waits for this.
            unsafe { self.encoders[side].launch(stream.cu_stream(), &arguments) }?;
            if side == Side::Values {
                self.sum_errors(stream, layer, 0, arguments)?;
            }
        }
        Ok(())
    }

    /// Prepares [`Self::encode_chunk`], for any layer.
    pub fn begin_chunk(&mut self, gpu: &Gpu, chunk: &Chunk) -> Result<()> {
        self.open_prepared(gpu, chunk)?;
        let (first, count) = self.shape.stored_by(chunk);
        self.span.write(gpu, first, count)
    }

    /// Encodes the tokens of a layer stored at a chunk's end, from the rows of all tokens of its sequence.
    pub fn encode_chunk(&self, stream: &CudaStream, layer: usize, chunk: &Chunk, rows: Rows) -> Result<()> {
        let (head_dim, (_, count)) = (self.shape.head_dim, self.shape.stored_by(chunk));
        for side in Side::ALL {
            let (vectors, capacity) = self.prepare_chunk(stream, (side, layer), chunk, rows)?;
            let arguments = EncodeArguments {
                batch: 1,
                max_count: count,
                vectors: vectors.cast(),
                strides: [0, capacity * head_dim, head_dim],
                firsts: self.span.first(),
                counts: self.span.count(),
                ..self.arguments(side, layer, chunk.sequence)
            };
            // SAFETY: the rows have all tokens from the first on, whose codes fit since the tokens do;
            // attention and the next chunk wait for this.
            unsafe { self.encoders[side].launch(stream.cu_stream(), &arguments) }?;
            if side == Side::Values {
                self.sum_errors(stream, layer, chunk.sequence, arguments)?;
            }
        }
        Ok(())
    }

    /// The destination of a layer's codes from a sequence on.
    fn arguments(&self, side: Side, layer: usize, sequence: usize) -> EncodeArguments {
        let (heads, codebook) = (self.shape.heads, self.layouts[side].shape().codebook_len());
        EncodeArguments {
            batch: 0,
            heads,
            max_count: 0,
            vectors: DevicePtr::dangling(),
            strides: [0; 3],
            centroids: self.centroids[side].pointer().offset(layer * heads * codebook),
            firsts: DevicePtr::dangling(),
            counts: DevicePtr::dangling(),
            codes: self.of(side, layer, sequence),
            tiles: self.tiles,
            pages: self.page_table(sequence),
        }
    }

    /// Fills the codes with hashed ones, and norms with 10.6, which is two equal bytes and about the norm of
    /// a row of 128 components of variance 1.
    pub fn fill_random(&self, gpu: &Gpu) -> Result<()> {
        self.norms.iter().flatten().try_for_each(|norms| norms.fill(gpu, 0x49))?;
        Side::ALL
            .into_iter()
            .try_for_each(|side| fill_codes(gpu, &self.codes[side], RANDOM_CODES + side as u32))
    }

    /// Bytes of the codes, and norms, of `tokens` tokens in every sequence.
    pub fn bytes_of(&self, tokens: usize) -> usize {
        let WindowShape { n_layers, batch, heads, .. } = self.shape;
        let tiles = tokens.div_ceil(self.pages.as_ref().map_or(TILE, Pages::page));
        let tiles = if self.pages.is_some() { tiles * self.tiles } else { tiles };
        let norms = self.norms.iter().flatten().count() * TILE * size_of::<f16>();
        let tile = self.layouts.iter().map(CodeLayout::tile_len).sum::<usize>() + norms;
        let means = self.value_errors.as_ref().map_or(0, |errors| errors.bytes_of(&self.shape, tokens));
        n_layers * batch * heads * tiles * tile + means
    }

    /// Bytes of all codes, and of the buffers to encode and read them.
    pub fn bytes(&self) -> usize {
        let codes: usize = self.codes.iter().map(Buffer::bytes).sum();
        let norms = self.norms.iter().flatten().map(Buffer::bytes).sum::<usize>();
        let prepared = self.prepared.as_ref().map_or(0, Buffer::bytes);
        let errors = self.value_errors.as_ref().map_or(0, ValueErrors::bytes);
        codes + norms + errors + prepared + self.working_bytes() + self.pages.as_ref().map_or(0, Pages::bytes)
    }

    /// Bytes of a step's scratch memory for reading codes, and of sums that are not means yet.
    pub fn working_bytes(&self) -> usize {
        let errors = self.value_errors.as_ref().map_or(0, ValueErrors::working_bytes);
        self.means().map_or(0, KeyMeans::working_bytes) + errors
    }

    /// Bytes of codebooks, tables and transforms.
    pub fn shared_bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(Buffer::bytes).sum();
        let transform = self.transform.as_ref().map_or(0, Transform::bytes);
        tables + self.centroids.iter().map(Buffer::bytes).sum::<usize>() + transform
    }

    /// The means subtracted from keys before coding.
    pub fn means(&self) -> Option<&KeyMeans> {
        self.transform.as_ref().and_then(|transform| transform.means.as_ref())
    }

    /// The factor of a side's rows before they are divided by their norms, if they are.
    fn gain(&self, side: Side) -> f32 {
        self.transform.as_ref().and_then(|transform| transform.norms[side]).unwrap_or(1.0)
    }

    /// How rows come.
    pub fn row_transform(&self) -> Option<RowTransform<'_>> {
        let Transform { bases, means, .. } = self.transform.as_ref()?;
        Some(RowTransform { bases, means: means.as_ref() })
    }
}

/// The layout of codes in pages or not.
pub(crate) const fn paging(is_paged: bool) -> Paging {
    if is_paged { Paging::Tiles } else { Paging::Contiguous }
}

/// The encoder of a side.
fn encoder(quantizers: Pair<PqShape>, side: Side, element: Element, paging: Paging) -> EncodeShape {
    EncodeShape { quantizer: quantizers[side], side, element: VectorElement::from(element), paging }
}

/// Rejects quantizers that the encoders do not support.
pub(crate) fn check_encoders(quantizers: Pair<PqShape>, element: Element, paging: Paging) -> Result<()> {
    Side::ALL.into_iter().try_for_each(|side| {
        let checked = encoder(quantizers, side, element, paging).program();
        Ok(checked.map(drop)?)
    })
}

/// The tables of codebooks.
fn tables<'a>(
    gpu: &Gpu,
    layout: &CodeLayout,
    codebooks: impl Iterator<Item = &'a CodebookBuf>,
) -> Result<Buffer<f16>> {
    let mut all = vec![];
    for codebook in codebooks {
        let mut table = vec![f16::ZERO; layout.table_len()];
        layout.table_into(&codebook.view(), &mut table)?;
        all.extend(table);
    }
    Buffer::of(gpu, &all)
}
