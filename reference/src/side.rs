//! Keys and values: the two sides of a KV cache.

use std::ops::{Index, IndexMut};

/// A side of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

impl Side {
    /// Keys first: the order of profile entries and of planes.
    pub(crate) const ALL: [Self; 2] = [Self::Keys, Self::Values];

    /// Its name in a sentence.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Values => "values",
        }
    }

    /// Its letter in the names of a profile's entries.
    pub(crate) const fn letter(self) -> char {
        match self {
            Self::Keys => 'k',
            Self::Values => 'v',
        }
    }
}

impl From<Side> for codec_core::Side {
    fn from(side: Side) -> Self {
        match side {
            Side::Keys => Self::Keys,
            Side::Values => Self::Values,
        }
    }
}

impl From<codec_core::Side> for Side {
    fn from(side: codec_core::Side) -> Self {
        match side {
            codec_core::Side::Keys => Self::Keys,
            codec_core::Side::Values => Self::Values,
        }
    }
}

#[cfg(feature = "cuda")]
impl From<Side> for kv_gpu::pq::Side {
    fn from(side: Side) -> Self {
        match side {
            Side::Keys => Self::Keys,
            Side::Values => Self::Values,
        }
    }
}

/// A value for the keys and one for the values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pair<T> {
    pub keys: T,
    pub values: T,
}

impl<T> Pair<T> {
    pub const fn new(keys: T, values: T) -> Self {
        Self { keys, values }
    }

    /// Builds both.
    pub fn of(mut make: impl FnMut(Side) -> T) -> Self {
        Self { keys: make(Side::Keys), values: make(Side::Values) }
    }

    /// Builds both, up to the first error.
    pub fn try_of<E>(mut make: impl FnMut(Side) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { keys: make(Side::Keys)?, values: make(Side::Values)? })
    }

    /// Keys, then values.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.keys, &self.values].into_iter()
    }

    /// Keys, then values.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        [&mut self.keys, &mut self.values].into_iter()
    }
}

impl<T> Index<Side> for Pair<T> {
    type Output = T;

    fn index(&self, side: Side) -> &T {
        match side {
            Side::Keys => &self.keys,
            Side::Values => &self.values,
        }
    }
}

impl<T> IndexMut<Side> for Pair<T> {
    fn index_mut(&mut self, side: Side) -> &mut T {
        match side {
            Side::Keys => &mut self.keys,
            Side::Values => &mut self.values,
        }
    }
}
