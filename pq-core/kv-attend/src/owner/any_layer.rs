//! The cache of a layer whose element type is chosen at run time, for callers that are not generic: those in
//! other languages, and engines with one tensor type for all elements.

use alloc::sync::Arc;
use alloc::vec::Vec;

use half::{bf16, f16};

use super::{Layer, Store, Workspace};
use crate::{AnyRows, Attention, ElementType, Error, Window, for_any_rows};

/// A [`Store`] of rows of every element type, with the same shared state, report and error for all.
pub trait AnyStore:
    Store<f32>
    + Store<f16, Shared = Shared<Self>, Report = Report<Self>, Error = StoreError<Self>>
    + Store<bf16, Shared = Shared<Self>, Report = Report<Self>, Error = StoreError<Self>>
{
}

impl<S> AnyStore for S where
    S: Store<f32>
        + Store<f16, Shared = Shared<S>, Report = Report<S>, Error = StoreError<S>>
        + Store<bf16, Shared = Shared<S>, Report = Report<S>, Error = StoreError<S>>
{
}

type Shared<S> = <S as Store<f32>>::Shared;
type Report<S> = <S as Store<f32>>::Report;
type StoreError<S> = <S as Store<f32>>::Error;

/// A [`Layer`] whose exact rows are of an [`ElementType`] that is known at run time.
#[derive(Clone, Debug)]
pub enum AnyLayer<S> {
    /// Exact rows of `f32`.
    F32(Layer<S, f32>),
    /// Exact rows of [`half::f16`].
    F16(Layer<S, f16>),
    /// Exact rows of [`half::bf16`].
    Bf16(Layer<S, bf16>),
}

/// Evaluates an expression with the [`Layer`] of an [`AnyLayer`].
macro_rules! for_any_layer {
    ($any:expr, $layer:ident => $result:expr) => {
        match $any {
            AnyLayer::F32($layer) => $result,
            AnyLayer::F16($layer) => $result,
            AnyLayer::Bf16($layer) => $result,
        }
    };
}

impl<S: AnyStore> AnyLayer<S> {
    /// Creates an empty cache with a head for each element of `shared`.
    ///
    /// # Errors
    /// As [`Layer::new`].
    pub fn new(
        element: ElementType,
        shared: &[Arc<Shared<S>>],
        window: Window,
    ) -> Result<Self, StoreError<S>> {
        match element {
            ElementType::F32 => Layer::new(shared, window).map(Self::F32),
            ElementType::F16 => Layer::new(shared, window).map(Self::F16),
            ElementType::Bf16 => Layer::new(shared, window).map(Self::Bf16),
        }
    }

    /// The type of the exact rows, and of those to append.
    #[must_use]
    pub const fn element(&self) -> ElementType {
        match self {
            Self::F32(_) => ElementType::F32,
            Self::F16(_) => ElementType::F16,
            Self::Bf16(_) => ElementType::Bf16,
        }
    }

    /// Number of KV heads.
    #[must_use]
    pub fn heads(&self) -> usize {
        for_any_layer!(self, layer => layer.heads().len())
    }

    /// Components of a key and of a value.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        for_any_layer!(self, layer => layer.heads()[0].dims())
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        for_any_layer!(self, layer => layer.len())
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of compressed tokens of each head.
    #[must_use]
    pub fn compressed(&self) -> usize {
        for_any_layer!(self, layer => layer.heads()[0].compressed())
    }

    /// Bytes of all tokens of all heads, without the shared state.
    #[must_use]
    pub fn size(&self) -> usize {
        for_any_layer!(self, layer => layer.size())
    }

    /// [`Layer::append`]: (n, heads * dim), tokens first (NHD).
    ///
    /// # Errors
    /// As there; [`Error::ElementType`] for rows of another type. The cache is then unchanged.
    pub fn append(&mut self, keys: AnyRows<'_>, values: AnyRows<'_>) -> Result<Report<S>, StoreError<S>> {
        match (self, keys, values) {
            (Self::F32(layer), AnyRows::F32(keys), AnyRows::F32(values)) => layer.append(keys, values),
            (Self::F16(layer), AnyRows::F16(keys), AnyRows::F16(values)) => layer.append(keys, values),
            (Self::Bf16(layer), AnyRows::Bf16(keys), AnyRows::Bf16(values)) => layer.append(keys, values),
            _ => Err(Error::ElementType.into()),
        }
    }

    /// [`Layer::append_heads`]: (heads * n, dim), heads first (HND).
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn append_heads(
        &mut self,
        keys: AnyRows<'_>,
        values: AnyRows<'_>,
    ) -> Result<Report<S>, StoreError<S>> {
        match (self, keys, values) {
            (Self::F32(layer), AnyRows::F32(keys), AnyRows::F32(values)) => layer.append_heads(keys, values),
            (Self::F16(layer), AnyRows::F16(keys), AnyRows::F16(values)) => layer.append_heads(keys, values),
            (Self::Bf16(layer), AnyRows::Bf16(keys), AnyRows::Bf16(values)) => {
                layer.append_heads(keys, values)
            }
            _ => Err(Error::ElementType.into()),
        }
    }

    /// [`Layer::truncate`].
    pub fn truncate(&mut self, len: usize) {
        for_any_layer!(self, layer => layer.truncate(len));
    }

    /// [`Layer::attend_into`], with queries of any element type.
    ///
    /// # Errors
    /// As there.
    pub fn attend_into(
        &self,
        attention: &Attention,
        queries: AnyRows<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), StoreError<S>> {
        for_any_layer!(self, layer => {
            for_any_rows!(queries, queries => layer.attend_into(attention, queries, workspace, out))
        })
    }

    /// [`Layer::to_bytes`].
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        for_any_layer!(self, layer => layer.to_bytes())
    }

    /// [`Layer::to_bytes_checked`].
    #[must_use]
    pub fn to_bytes_checked(&self) -> Vec<u8> {
        for_any_layer!(self, layer => layer.to_bytes_checked())
    }

    /// Reads what a [`Layer`] of any element type wrote.
    ///
    /// # Errors
    /// As [`Layer::from_bytes`].
    pub fn from_bytes(bytes: &[u8], shared: &[Arc<Shared<S>>]) -> Result<Self, StoreError<S>> {
        // The tag of the element follows magic and version.
        match bytes.get(8..12) {
            Some([1, 0, 0, 0]) => Layer::from_bytes(bytes, shared).map(Self::F16),
            Some([2, 0, 0, 0]) => Layer::from_bytes(bytes, shared).map(Self::Bf16),
            _ => Layer::from_bytes(bytes, shared).map(Self::F32),
        }
    }
}
