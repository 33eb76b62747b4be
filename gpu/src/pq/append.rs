//! Encoding of the few tokens of a step: lanes are vectors, and warps divide the subspaces.

use cudarc::driver::sys::CUstream;
use kv_attend::owner::Side;
use pq_core::PqShape;

use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::attend::Pages;
use crate::pq::layout::{CodeLayout, Paging};
use crate::{Device, Error, Program, VectorElement};

/// Compile-time shape of [`Append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendShape {
    /// Quantizer of the keys.
    pub keys: PqShape,
    /// Quantizer of the values.
    pub values: PqShape,
    /// Element type of the vectors.
    pub element: VectorElement,
    /// Whether and how the codes are paged.
    pub paging: Paging,
}

impl AppendShape {
    fn layouts(&self) -> Result<[CodeLayout; 2], Error> {
        let layout = |quantizer, side| CodeLayout::of(quantizer, side, self.paging);
        Ok([layout(self.keys, Side::Keys)?, layout(self.values, Side::Values)?])
    }

    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        Ok(program(&self.layouts()?, self.element, self.paging))
    }
}

/// Pointers and sizes of one launch of [`Append`].
#[derive(Clone, Copy, Debug)]
pub struct AppendArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Maximum number of new vectors of a sequence.
    pub max_count: usize,
    /// Elements (batch, heads, `max_count`, dim): keys, with the strides below and a contiguous last
    /// dimension.
    pub keys: DevicePtr<AnyElement>,
    /// Elements (batch, heads, `max_count`, dim): values, with the same strides.
    pub values: DevicePtr<AnyElement>,
    /// Strides of sequences, heads and vectors in elements.
    pub strides: [usize; 3],
    /// `f32` (heads, m, ksub, dsub): the codebooks of the keys.
    pub key_centroids: DevicePtr<f32>,
    /// `f32` (heads, m, ksub, dsub): the codebooks of the values.
    pub value_centroids: DevicePtr<f32>,
    /// `u32` (batch,): the position of the first new vector in its sequence. Earlier tokens keep their codes.
    pub firsts: DevicePtr<u32>,
    /// `u32` (batch,): the number of new vectors of each sequence.
    pub counts: DevicePtr<u32>,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]), written at the new tokens.
    pub key_codes: DevicePtr<u8>,
    /// Bytes (pages or batch, heads, tiles, [`CodeLayout::tile_len`]), written at the new tokens.
    pub value_codes: DevicePtr<u8>,
    /// Capacity of a page (or of a sequence, without pages) in tiles, or in half tiles with
    /// [`Paging::HalfTiles`].
    pub tiles: usize,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read the centroids *before* they wait for it, so that kernel must not write these.
    pub pdl: bool,
}

/// `pq_core::encode_into` of the keys and values that a step appends to its sequences, in one launch, into
/// the tiles that [`Attend`](super::Attend) reads. The codes are those of [`Encode`](super::Encode).
///
/// # Cost
/// ksub * dim multiply-adds per vector, spread over all subspaces: one token takes a few microseconds. For
/// more than about `ksub / 2` tokens per sequence, `Encode` is faster.
pub struct Append {
    kernel: AppendKernel,
    paging: Paging,
}

const OPERATION: Operation = Operation("pq::Append");

impl Append {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AppendShape) -> Result<Self, Error> {
        let kernel = AppendKernel::new(device, &shape.layouts()?, shape.element, shape.paging)?;
        Ok(Self { kernel, paging: shape.paging })
    }

    /// Launches the encoding on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer but `keys` and `values`
    /// aligned to 16 bytes. For every sequence, `firsts + counts` does not exceed the capacity of the
    /// sequence or of its pages, the count does not exceed `max_count`, and every page number refers to an
    /// existing page: the kernel does not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &AppendArguments) -> Result<(), Error> {
        let a = arguments;
        if self.paging.has_pages() != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        let keys = AppendSide { vectors: a.keys, centroids: a.key_centroids, codes: a.key_codes };
        let values = AppendSide { vectors: a.values, centroids: a.value_centroids, codes: a.value_codes };
        let tokens = NewTokens {
            batch: a.batch,
            heads: a.heads,
            max_count: a.max_count,
            strides: a.strides,
            firsts: a.firsts,
            counts: a.counts,
            tiles: a.tiles,
            pages: a.pages,
        };
        // SAFETY: the caller's contract; the kernel has two sides.
        unsafe { self.kernel.launch(OPERATION, stream, [keys, values], &tokens, a.pdl) }
    }
}

/// Inputs and outputs of one side of a launch.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AppendSide {
    pub vectors: DevicePtr<AnyElement>,
    pub centroids: DevicePtr<f32>,
    pub codes: DevicePtr<u8>,
}

/// The new tokens of a batch and the location of their codes.
pub(super) struct NewTokens {
    pub batch: usize,
    pub heads: usize,
    pub max_count: usize,
    pub strides: [usize; 3],
    pub firsts: DevicePtr<u32>,
    pub counts: DevicePtr<u32>,
    pub tiles: usize,
    pub pages: Option<Pages>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    sides: [AppendSide; 2],
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    strides: [u64; 3],
    batch: u32,
    heads: u32,
    max_count: u32,
    group: u32,
    page_tiles: u32,
    max_pages: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 120);

/// `WARPS` of the kernel.
const WARPS: usize = 4;
/// Maximum vectors of a warp: one per lane.
const MAX_GROUP: usize = 32;
/// Warps that occupy a multiprocessor. Beyond that, a warp gets more than one vector.
const SM_WARPS: usize = 32;

/// The kernel for one or two sides: few vectors, split over sequences, heads and subspaces.
pub(super) struct AppendKernel {
    kernel: Kernel,
    sides: usize,
    codes: usize, // stored codes of a vector, of the side that has more
    device_warps: usize,
}

/// The kernel for one or two sides.
pub(super) fn program(sides: &[CodeLayout], element: VectorElement, paging: Paging) -> Program {
    let mut defines = vec![("ELEMENT".to_owned(), element as usize)];
    for (name, layout) in ["FIRST", "SECOND"].into_iter().zip(sides) {
        let shape = layout.shape();
        let of_side = [
            ("KEYS", usize::from(layout.side() == Side::Keys)),
            ("M", shape.m()),
            ("DSUB", shape.dsub()),
            ("NBITS", shape.nbits() as usize),
        ];
        defines.extend(of_side.map(|(constant, value)| (format!("{name}_{constant}"), value)));
    }
    let defines: Vec<(&str, usize)> = defines.iter().map(|(name, value)| (&**name, *value)).collect();
    paging.define(Program::new(source!("pq_append.cu"), &defines))
}

impl AppendKernel {
    pub(super) fn new(
        device: &Device,
        sides: &[CodeLayout],
        element: VectorElement,
        paging: Paging,
    ) -> Result<Self, Error> {
        Ok(Self {
            kernel: device.kernel(&program(sides, element, paging), "pq_append", 0)?,
            sides: sides.len(),
            codes: sides.iter().map(|layout| layout.shape().dim() / layout.components()).max().unwrap_or(1),
            device_warps: device.sm_count() * SM_WARPS,
        })
    }

    /// Launches it.
    ///
    /// # Safety
    /// As [`Append::launch`], for as many of `sides` as the kernel has.
    pub(super) unsafe fn launch(
        &self,
        operation: Operation,
        stream: CUstream,
        sides: [AppendSide; 2],
        tokens: &NewTokens,
        pdl: bool,
    ) -> Result<(), Error> {
        let t = tokens;
        if t.batch == 0 || t.heads == 0 || t.max_count == 0 {
            return Ok(());
        }
        if t.tiles == 0 {
            return Err(operation.error("no room for a tile"));
        }
        let vectors = operation.in_32_bits("vectors", t.batch.saturating_mul(t.max_count))? as usize;
        let warps = self.sides.saturating_mul(self.codes).saturating_mul(t.heads); // of a group of vectors
        let group = vectors.saturating_mul(warps).div_ceil(self.device_warps).clamp(1, MAX_GROUP);
        let blocks = vectors.div_ceil(group).saturating_mul(self.codes / WARPS);
        let grid =
            operation.grid(&[("blocks of codes", blocks), ("heads", t.heads), ("sides", self.sides)])?;
        let kernel_arguments = KernelArguments {
            sides,
            firsts: t.firsts,
            counts: t.counts,
            pages: t.pages.map(|pages| pages.table),
            strides: t.strides.map(|stride| stride as u64),
            batch: t.batch as u32,
            heads: t.heads as u32,
            max_count: t.max_count as u32,
            group: group as u32,
            page_tiles: operation.in_32_bits("tiles", t.tiles)?,
            max_pages: operation.in_32_bits("pages", t.pages.map_or(0, |pages| pages.max_pages))?,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, (WARPS * 32) as u32, pdl, &kernel_arguments) }
    }
}
