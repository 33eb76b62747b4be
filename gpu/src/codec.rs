//! Operations of `codec-core`: entropy-coded frames.

mod check;
mod decode;
mod encode;
mod index;
mod planes;
mod points;
mod quantize;
mod rope;
mod transform;

pub use check::{Check, CheckArguments};
pub use decode::{Decode, DecodeArguments};
pub use encode::{Encode, EncodeArguments};
pub use index::{Index, IndexArguments};
pub use planes::{CodecShape, Planes};
pub use rope::Rope;

use crate::Error;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};

/// The location of the rows of planes on the device: elements (tokens, heads, head_dim) with strides, so NHD
/// or HND, contiguous or in pages.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Stride of tokens in elements, within a page if there are pages.
    pub token_stride: usize,
    /// Stride of heads in elements.
    pub head_stride: usize,
    /// The position of the frame's first token.
    pub first_token: usize,
    /// The page table, given if and only if the shape is `paged`.
    pub pages: Option<TokenPages>,
}

/// The page table of a sequence of tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenPages {
    /// `u32` (pages,): page numbers in the order of the tokens.
    pub table: DevicePtr<u32>,
    /// Capacity of a page in tokens.
    pub page_tokens: usize,
    /// Stride of pages in elements.
    pub stride: usize,
}

/// `Place` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelPlace {
    token_stride: u64,
    head_stride: u64,
    page_stride: u64,
    pages: Option<DevicePtr<u32>>,
    page_tokens: u32,
    first_token: u32,
}

const _: () = assert!(size_of::<KernelPlace>() == 40);

/// `PlanesAt` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct PlanesAt {
    each: Option<DevicePtr<DevicePtr<AnyElement>>>,
    all: Option<DevicePtr<f32>>,
    stride: u64,
}

const _: () = assert!(size_of::<PlanesAt>() == 24);

impl PlanesAt {
    /// Planes of the launch at one pointer each.
    const fn each(pointers: DevicePtr<DevicePtr<AnyElement>>) -> Self {
        Self { each: Some(pointers), all: None, stride: 0 }
    }
}

impl Place {
    /// Converts to the kernels' structure, for `tokens` tokens.
    fn for_kernel(
        &self,
        operation: Operation,
        shape: &CodecShape,
        tokens: usize,
    ) -> Result<KernelPlace, Error> {
        if shape.paged != self.pages.is_some() {
            return Err(operation.error("pages are given exactly when it is compiled for them"));
        }
        operation.in_32_bits("tokens", self.first_token.saturating_add(tokens))?;
        let (page_tokens, page_stride) = self.pages.map_or((1, 0), |pages| (pages.page_tokens, pages.stride));
        if page_tokens == 0 {
            return Err(operation.error("pages of no tokens"));
        }
        Ok(KernelPlace {
            token_stride: self.token_stride as u64,
            head_stride: self.head_stride as u64,
            page_stride: page_stride as u64,
            pages: self.pages.map(|pages| pages.table),
            page_tokens: operation.in_32_bits("tokens of a page", page_tokens)?,
            first_token: self.first_token as u32,
        })
    }
}
