//! Encodes keys, and selects a step's tokens by their codes.

use cudarc::driver::CudaStream;
use half::f16;
use kv_gpu::pq::{
    CodeLayout, Encode, EncodeArguments, EncodeGeneric, EncodeGenericArguments, EncodeGenericShape,
    EncodeShape, Lut, LutArguments, LutShape, Paging, Search, SearchArguments, SearchShape, Select,
    SelectArguments, SelectShape, Side, TILE,
};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel};
use pq_core::{CodebookBuf, GroupRule, PqShape};

use super::Shape;
use crate::cache::row_store;
use crate::gpu::Gpu;
use crate::hashed::fill_codes;
use crate::memory::Buffer;
use crate::{Error, Result};

/// Alignment of a layer's codes in bytes.
const ALIGNMENT: usize = 256;

/// Bytes of shared memory that the driver reserves for two blocks.
const RESERVED_SHARED_MEMORY: usize = 2 << 10;

/// Codes and codebooks of the keys of all layers, and their kernels.
///
/// `pq::Select` finds the tokens if it supports the shape of the codes, else `pq::Search`.
pub(super) struct KeyIndex {
    form: Form,
    codes: Buffer<u8>,      // (layer, (batch, heads, codes of `stored` keys), padded)
    centroids: Buffer<f32>, // (layer, books, heads, m, ksub, dsub)
    layer_len: usize,       // bytes of a layer's codes, padded
    quantizer: PqShape,
    shape: Shape,
}

/// The shapes of the kernels.
pub(super) struct Kernels {
    pub quantizer: PqShape,
    pub group: usize,
    pub element: Element,
}

impl Kernels {
    const fn select(&self) -> SelectShape {
        let &Self { quantizer: keys, group, element } = self;
        SelectShape {
            keys,
            group,
            element,
            rule: GroupRule::SumOfSoftmax,
            paged: false,
            addends: false,
            key_norms: false,
        }
    }

    fn encode(&self) -> EncodeShape {
        let (quantizer, element) = (self.quantizer, self.element.into());
        EncodeShape { quantizer, side: Side::Keys, element, paging: Paging::Contiguous }
    }

    const fn search(&self) -> SearchShape {
        SearchShape { quantizer: self.quantizer, group: self.group, rule: GroupRule::SumOfSoftmax }
    }

    fn lut(&self) -> LutShape {
        LutShape { quantizer: self.quantizer, group: self.group, element: self.element.into() }
    }

    fn encode_any(&self) -> EncodeGenericShape {
        EncodeGenericShape { quantizer: self.quantizer, element: self.element.into() }
    }

    /// Rejects a quantizer that neither form of the index supports.
    pub fn check(&self) -> Result<()> {
        if self.select().check().is_ok() {
            return Ok(self.encode().program().map(drop)?);
        }
        self.search().program((9, 0), usize::MAX)?;
        self.lut().program()?;
        Ok(self.encode_any().program().map(drop)?)
    }
}

enum Form {
    Tiles(Box<Tiles>),
    Scan(Box<Scan>),
}

struct Tiles {
    select: Select,
    encode: Encode,
    tabulate: Kernel,
    layout: CodeLayout,
    tables: Buffer<f16>, // (layer, books, heads, table_len)
    workspace: Buffer<u8>,
    tiles: usize, // of a head
}

struct Scan {
    lut: Lut,
    search: Search,
    encode: EncodeGeneric,
    luts: Buffer<f32>,  // (batch, heads, group, m, ksub)
    found: Buffer<u32>, // (batch,)
    workspace: Buffer<u8>,
}

/// Keys to encode, of sequences from `first` on that share codebooks.
pub(super) struct KeysToEncode {
    pub first: usize,
    pub batch: usize,
    pub max_count: usize,
    /// Elements (batch, heads, `max_count`, head_dim) with the strides.
    pub vectors: DevicePtr<AnyElement>,
    pub strides: [usize; 3],
    /// Tokens after the sinks, (batch,).
    pub firsts: DevicePtr<u32>,
    pub counts: DevicePtr<u32>,
}

/// The search of a step.
pub(super) struct Wanted {
    pub queries: DevicePtr<AnyElement>, // (batch, heads, group, head_dim)
    pub lengths: DevicePtr<u32>,        // (batch,): coded tokens
    pub ks: DevicePtr<u32>,             // (batch,)
    pub tokens: DevicePtr<u32>,         // (batch, heads, most), written
}

#[derive(Clone, Copy)]
#[repr(C)]
struct TabulateArguments {
    centroids: DevicePtr<f32>,
    table: DevicePtr<u32>,
    m: u32,
    ksub: u32,
    pairs: u32,
}

const _: () = assert!(size_of::<TabulateArguments>() == 32);

impl KeyIndex {
    /// Empty codes; `codebooks` per layer and head, for all sequences.
    pub fn new(
        gpu: &Gpu,
        element: Element,
        quantizer: PqShape,
        codebooks: &[Vec<CodebookBuf>],
        shape: Shape,
    ) -> Result<Self> {
        let Shape { n_layers, batch, books, heads, group, stored, .. } = shape;
        let of_books = |layer: &Vec<CodebookBuf>| -> Vec<f32> {
            layer.iter().flat_map(CodebookBuf::centroids).collect::<Vec<f32>>().repeat(books)
        };
        let centroids: Vec<f32> = codebooks.iter().flat_map(of_books).collect();
        let kernels = Kernels { quantizer, group, element };
        let (form, of_head) = match Select::new(&gpu.device, kernels.select()) {
            Ok(select) => {
                let layout = CodeLayout::new(quantizer, Side::Keys)?;
                let (tiles, per_step) = (stored.div_ceil(TILE), batch / books);
                let tiled = Tiles {
                    workspace: Buffer::zeros(gpu, select.workspace_len(per_step, heads, tiles * TILE))?,
                    select,
                    encode: Encode::new(&gpu.device, kernels.encode())?,
                    tabulate: gpu.device.kernel(&row_store::program(), "tabulate", 0)?,
                    tables: Buffer::zeros(gpu, n_layers * books * heads * layout.table_len())?,
                    layout,
                    tiles,
                };
                (Form::Tiles(Box::new(tiled)), tiles * layout.tile_len())
            }
            Err(kv_gpu::Error::Unsupported { .. }) => {
                let scan = Scan::new(gpu, &kernels, &shape)?;
                (Form::Scan(Box::new(scan)), quantizer.codes_len(stored))
            }
            Err(e) => return Err(Error::from(e)),
        };
        let layer_len = (batch * heads * of_head).next_multiple_of(ALIGNMENT);
        let index = Self {
            form,
            codes: Buffer::zeros(gpu, n_layers * layer_len)?,
            centroids: Buffer::of(gpu, &centroids)?,
            layer_len,
            quantizer,
            shape,
        };
        (0..n_layers * books).try_for_each(|book| index.tabulate(&gpu.stream, book))?;
        Ok(index)
    }

    /// Codebooks of a layer's heads for a sequence, to be trained; [`Self::adopt`] then puts them into use.
    pub fn centroids(&self, layer: usize, sequence: usize) -> DevicePtr<f32> {
        self.centroids
            .pointer()
            .offset(self.book(layer, sequence) * self.shape.heads * self.quantizer.codebook_len())
    }

    /// Makes the search use the codebooks of a layer for a sequence.
    pub fn adopt(&self, stream: &CudaStream, layer: usize, sequence: usize) -> Result<()> {
        self.tabulate(stream, self.book(layer, sequence))
    }

    const fn book(&self, layer: usize, sequence: usize) -> usize {
        layer * self.shape.books + if self.shape.books == 1 { 0 } else { sequence }
    }

    /// Writes the tables of a set of codebooks.
    fn tabulate(&self, stream: &CudaStream, book: usize) -> Result<()> {
        let Form::Tiles(tiles) = &self.form else { return Ok(()) };
        let (heads, quantizer) = (self.shape.heads, self.quantizer);
        let arguments = TabulateArguments {
            centroids: self.centroids.pointer().offset(book * heads * quantizer.codebook_len()),
            table: tiles.tables.pointer().offset(book * heads * tiles.layout.table_len()).cast(),
            m: quantizer.m() as u32,
            ksub: quantizer.ksub() as u32,
            pairs: (quantizer.dsub() / 2) as u32,
        };
        let grid = Grid::new([quantizer.ksub(), heads, 1])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`.
        Ok(unsafe { tiles.tabulate.launch(stream.cu_stream(), grid, 64, false, &arguments) }?)
    }

    /// Codes of a layer from a sequence on.
    fn codes(&self, layer: usize, sequence: usize) -> DevicePtr<u8> {
        let of_sequence = self.shape.heads * self.head_len(self.shape.stored);
        self.codes.pointer().offset(layer * self.layer_len + sequence * of_sequence)
    }

    /// Bytes of the codes of `tokens` tokens of a head.
    pub fn head_len(&self, tokens: usize) -> usize {
        match &self.form {
            Form::Tiles(tiles) => tokens.div_ceil(TILE) * tiles.layout.tile_len(),
            Form::Scan(_) => self.quantizer.codes_len(tokens),
        }
    }

    /// Encodes keys of a layer. The rows exist, there is room for the tokens' codes, and no other stream uses
    /// these codes.
    pub fn encode(&self, stream: &CudaStream, layer: usize, keys: &KeysToEncode) -> Result<()> {
        let &KeysToEncode { first, batch, max_count, vectors, strides, firsts, counts } = keys;
        let (centroids, codes) = (self.centroids(layer, first), self.codes(layer, first));
        let heads = self.shape.heads;
        match &self.form {
            Form::Tiles(tiled) => {
                let arguments = EncodeArguments {
                    batch,
                    heads,
                    max_count,
                    vectors,
                    strides,
                    centroids,
                    firsts,
                    counts,
                    codes,
                    tiles: tiled.tiles,
                    pages: None,
                };
                // SAFETY: the buffers have the lengths of `new`; keys and room are the caller's.
                Ok(unsafe { tiled.encode.launch(stream.cu_stream(), &arguments) }?)
            }
            Form::Scan(scan) => {
                let arguments = EncodeGenericArguments {
                    batch,
                    heads,
                    max_count,
                    vectors,
                    strides,
                    centroids,
                    firsts,
                    counts,
                    capacity: self.shape.stored,
                    codes,
                };
                // SAFETY: as above.
                Ok(unsafe { scan.encode.launch(stream.cu_stream(), &arguments) }?)
            }
        }
    }

    /// Launches the search for a layer's tokens. Codes are complete up to the lengths.
    pub fn find(&self, gpu: &Gpu, layer: usize, wanted: &Wanted) -> Result<()> {
        match &self.form {
            Form::Tiles(tiles) => self.select(gpu, tiles, layer, wanted),
            Form::Scan(scan) => self.scan(gpu, scan, layer, wanted),
        }
    }

    fn select(&self, gpu: &Gpu, tiles: &Tiles, layer: usize, wanted: &Wanted) -> Result<()> {
        let Shape { batch, books, heads, group, head_dim, most, .. } = self.shape;
        // Sequences with codebooks of their own are searched one after the other.
        for first in (0..batch).step_by(batch / books) {
            let table = self.book(layer, first) * heads * tiles.layout.table_len();
            let queries = first * heads * group * head_dim;
            let arguments = SelectArguments {
                batch: batch / books,
                heads,
                tiles: tiles.tiles,
                codes: self.codes(layer, first),
                table: tiles.tables.pointer().offset(table),
                norms: None,
                errors: None,
                queries: wanted.queries.cast::<u16>().offset(queries).cast(),
                lengths: wanted.lengths.offset(first),
                pages: None,
                addends: None,
                ks: wanted.ks.offset(first),
                selected: wanted.tokens.offset(first * heads * most),
                selected_len: most,
                scale: 1.0 / (head_dim as f32).sqrt(),
                pdl: true,
                workspace: tiles.workspace.pointer(),
            };
            // SAFETY: the buffers have the lengths of `new`; the caller keeps lengths within the capacity.
            // What precedes writes neither tables nor lengths; `StepBudget` has written `ks` without PDL. The
            // background stream writes codes of later tokens.
            unsafe { tiles.select.launch(gpu.stream(), &arguments) }?;
        }
        Ok(())
    }

    fn scan(&self, gpu: &Gpu, scan: &Scan, layer: usize, wanted: &Wanted) -> Result<()> {
        let Shape { batch, books, heads, head_dim, stored, most, .. } = self.shape;
        let lut = LutArguments {
            // Heads of sequences that have codebooks of their own are heads of one sequence.
            batch: batch / books,
            heads: books * heads,
            queries: wanted.queries,
            scale: 1.0 / (head_dim as f32).sqrt(),
            centroids: self.centroids(layer, 0),
            luts: scan.luts.pointer(),
        };
        let search = SearchArguments {
            batch,
            heads,
            capacity: stored,
            luts: scan.luts.pointer(),
            codes: self.codes(layer, 0),
            lengths: wanted.lengths,
            ks: wanted.ks,
            sinks: 0,
            recent: 0,
            workspace: scan.workspace.pointer(),
            tokens: wanted.tokens,
            tokens_len: most,
            counts: scan.found.pointer(),
            stats: None,
            pdl: true,
        };
        // SAFETY: as above. The tables are launched without PDL, so that queries and `ks` are complete when
        // they start; they write neither codes nor lengths nor `ks`.
        unsafe {
            scan.lut.launch(gpu.stream(), &lut)?;
            scan.search.launch(gpu.stream(), &search)?;
        }
        Ok(())
    }

    /// Bytes of shared memory that a block of encoding takes next to the steps.
    pub fn background_shared_memory(&self) -> usize {
        match &self.form {
            Form::Tiles(_) => 0,
            Form::Scan(scan) => scan.encode.shared_memory() + RESERVED_SHARED_MEMORY,
        }
    }

    /// Fills the codes with hashed ones.
    pub fn fill_random(&self, gpu: &Gpu, tensor: u32) -> Result<()> {
        fill_codes(gpu, &self.codes, tensor)
    }

    /// Bytes of codes.
    pub const fn code_bytes(&self) -> usize {
        self.codes.bytes()
    }

    /// Bytes of codebooks.
    pub fn book_bytes(&self) -> usize {
        let tables = if let Form::Tiles(tiles) = &self.form { tiles.tables.bytes() } else { 0 };
        self.centroids.bytes() + tables
    }
}

impl Scan {
    fn new(gpu: &Gpu, kernels: &Kernels, shape: &Shape) -> Result<Self> {
        let (&Kernels { quantizer, .. }, &Shape { batch, heads, group, stored, .. }) = (kernels, shape);
        let device = &gpu.device;
        let search = Search::new(device, kernels.search())?;
        Ok(Self {
            lut: Lut::new(device, kernels.lut())?,
            encode: EncodeGeneric::new(device, kernels.encode_any())?,
            luts: Buffer::zeros(gpu, batch * heads * group * quantizer.lut_len())?,
            found: Buffer::zeros(gpu, batch)?,
            workspace: Buffer::zeros(gpu, search.workspace_len(batch, heads, stored))?,
            search,
        })
    }
}
