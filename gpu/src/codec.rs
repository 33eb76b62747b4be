//! Operations of `codec-core`.

mod decode;
mod encode;
mod planes;
mod transform;

pub use decode::{Decode, DecodeArguments};
pub use encode::{Encode, EncodeArguments};
pub use planes::{CodecShape, Planes};

use crate::Error;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};

/// Where the rows of planes lie on the device: numbers (tokens, heads, head_dim) with strides, so that both the order of tokens, heads
/// and that of heads, tokens go, in pages or not.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Numbers from a token to the next, within a page where there are pages.
    pub token_stride: usize,
    /// Numbers from a head to the next.
    pub head_stride: usize,
    /// The place of the frame's first token.
    pub first_token: usize,
    /// Where the tokens lie, when compiled for pages.
    pub pages: Option<TokenPages>,
}

/// Tokens in pages.
#[derive(Clone, Copy, Debug)]
pub struct TokenPages {
    /// `u32` (pages,): the page of each part of the sequence.
    pub table: DevicePtr<u32>,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Numbers from a page to the next.
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
    /// At pointers (planes of the launch,) on the device.
    const fn each(pointers: DevicePtr<DevicePtr<AnyElement>>) -> Self {
        Self { each: Some(pointers), all: None, stride: 0 }
    }
}

impl Place {
    /// The kernel's form, for `tokens` tokens.
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
