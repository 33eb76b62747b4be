//! Tensors (batch, heads, tokens, dim) as rows, without a copy where their strides allow.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Storage, StorageRef, Tensor};
use kv_attend::{AnyRows, ElementType, Rows};

use crate::{Error, Result};

/// The sizes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub tokens: usize,
    pub dim: usize,
}

impl Sizes {
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let (batch, heads, tokens, dim) = tensor.dims4()?;
        Ok(Self { batch, heads, tokens, dim })
    }
}

/// Whether tokens or heads come first in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// Rows are (tokens, heads * dim), at the tensor's stride of tokens.
    Tokens,
    /// Rows are (heads * tokens, dim), contiguous.
    Heads,
}

pub fn element(dtype: DType) -> Result<ElementType> {
    match dtype {
        DType::F32 => Ok(ElementType::F32),
        DType::F16 => Ok(ElementType::F16),
        DType::BF16 => Ok(ElementType::Bf16),
        dtype => Err(Error::DType(dtype)),
    }
}

/// Whether the rows of all heads of a token are next to each other: those of a projection, transposed to heads, and
/// those of a single token.
pub fn has_tokens_first(tensor: &Tensor) -> Result<bool> {
    let (sizes, stride) = (Sizes::of(tensor)?, tensor.stride());
    let row = sizes.heads * sizes.dim;
    Ok((sizes.dim == 1 || stride[3] == 1)
        && (sizes.heads == 1 || stride[1] == sizes.dim)
        && (sizes.tokens == 1 || stride[2] >= row))
}

/// The memory of a tensor.
pub struct View<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
    sizes: Sizes,
}

impl<'a> View<'a> {
    pub fn new(tensor: &'a Tensor) -> Result<Self> {
        let (sizes, (storage, layout)) = (Sizes::of(tensor)?, tensor.storage_and_layout());
        Ok(Self { storage, layout, sizes })
    }

    /// The rows of a sequence.
    pub fn rows(&self, order: Order, sequence: usize) -> Result<AnyRows<'_>> {
        let Storage::Cpu(storage) = &*self.storage else { return Err(Error::Device) };
        Ok(match storage {
            CpuStorage::F32(data) => self.of(data, order, sequence)?.into(),
            CpuStorage::F16(data) => self.of(data, order, sequence)?.into(),
            CpuStorage::BF16(data) => self.of(data, order, sequence)?.into(),
            other => return Err(Error::DType(other.dtype())),
        })
    }

    fn of<'d, E>(&self, data: &'d [E], order: Order, sequence: usize) -> Result<Rows<'d, E>> {
        let (Sizes { heads, tokens, dim, .. }, stride) = (self.sizes, self.layout.stride());
        let data = data.get(self.layout.start_offset() + sequence * stride[0]..).unwrap_or_default();
        let (rows, components, stride) = match order {
            Order::Tokens if tokens == 1 => (1, heads * dim, heads * dim),
            Order::Tokens => (tokens, heads * dim, stride[2]),
            Order::Heads => (heads * tokens, dim, dim),
        };
        Ok(Rows::new(data, rows, components, stride).map_err(kv_owners::Error::from)?)
    }
}
