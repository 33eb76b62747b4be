//! Operations of `codec-core`.

mod decode;
mod encode;
mod planes;
mod transform;

pub use decode::{Decode, DecodeArguments};
pub use encode::{Encode, EncodeArguments};
pub use planes::{CodecShape, Planes};

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
    pub table: u64,
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
    pages: u64,
    page_tokens: u32,
    first_token: u32,
}

/// `PlanesAt` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct PlanesAt {
    each: u64,
    all: u64,
    stride: u64,
}

impl PlanesAt {
    /// At pointers (planes of the launch,) on the device.
    const fn each(pointers: u64) -> Self {
        Self { each: pointers, all: 0, stride: 0 }
    }
}

impl Place {
    /// The kernel's form, for `tokens` tokens.
    fn for_kernel(&self, shape: &CodecShape, tokens: usize) -> Result<KernelPlace, &'static str> {
        if shape.paged != self.pages.is_some() {
            return Err("compiled with pages or without, and called otherwise");
        }
        let fits = |size: usize| u32::try_from(size).is_ok();
        if !fits(self.first_token.saturating_add(tokens)) {
            return Err("more tokens than 32 bits count");
        }
        let pages = self.pages.unwrap_or(TokenPages { table: 0, page_tokens: 1, stride: 0 });
        if pages.page_tokens == 0 || !fits(pages.page_tokens) {
            return Err("pages of no tokens, or of more than 32 bits count");
        }
        Ok(KernelPlace {
            token_stride: self.token_stride as u64,
            head_stride: self.head_stride as u64,
            page_stride: pages.stride as u64,
            pages: pages.table,
            page_tokens: pages.page_tokens as u32,
            first_token: self.first_token as u32,
        })
    }
}
