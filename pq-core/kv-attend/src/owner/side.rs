//! Keys and values: the two sides of a KV cache.

use core::ops::{Index, IndexMut};

/// A side of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

impl Side {
    /// Both, keys first.
    pub const ALL: [Self; 2] = [Self::Keys, Self::Values];

    /// `keys` or `values`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Values => "values",
        }
    }

    /// `k` or `v`.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Keys => 'k',
            Self::Values => 'v',
        }
    }
}

/// A value for the keys and one for the values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pair<T> {
    /// For the keys.
    pub keys: T,
    /// For the values.
    pub values: T,
}

impl<T> Pair<T> {
    /// Both values.
    pub const fn new(keys: T, values: T) -> Self {
        Self { keys, values }
    }

    /// Builds both.
    pub fn of(mut make: impl FnMut(Side) -> T) -> Self {
        Self { keys: make(Side::Keys), values: make(Side::Values) }
    }

    /// Builds both, up to the first error.
    ///
    /// # Errors
    /// Those of `make`.
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

#[cfg(feature = "serde")]
impl serde_core::Serialize for Side {
    fn serialize<S: serde_core::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit_variant("Side", *self as u32, self.name())
    }
}
