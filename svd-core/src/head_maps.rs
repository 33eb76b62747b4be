//! The rank reduction of one KV head's rows, shared by all sequences.

use alloc::vec::Vec;

use kv_attend::owner::{Reader, Writer};

use crate::error::check_len;
use crate::gram::MOST_DIM;
use crate::{Backend, Element, Error, MapBuf, Rotation, Rows, RowsMut};

const MAGIC: [u8; 4] = *b"SVHM";
const VERSION: u32 = 1;

/// Reduces keys or values of `dim` components to rows of `rank` components.
///
/// Rows are projected when they are stored, or already rotated by the model's weights (folded). Rotated rows
/// are truncated.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduction {
    dim: usize,
    rank: usize,               // 1 to `dim`
    maps: Option<[MapBuf; 2]>, // basis and dual, (dim, rank); `None` if folded
}

impl Reduction {
    /// Rows are stored as `A^T x`, with the first `rank` columns of the rotation's basis `A`; the dual
    /// projects queries and reconstructs outputs.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`], or [`Error::TooLarge`] for more than 8,192 components.
    pub fn projected(rotation: &Rotation, rank: usize) -> Result<Self, Error> {
        let maps = [rotation.basis_map(rank)?, rotation.dual_map(rank)?];
        Ok(Self { maps: Some(maps), ..Self::folded(rotation.dim(), rank)? })
    }

    /// Input rows of `dim` components are already rotated, as after [`Rotation::fold_basis`]; so are queries,
    /// in a model without RoPE. Outputs stay rotated, for a `W_O` after [`Rotation::fold_output`].
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Rank`], or [`Error::TooLarge`] for more than 8,192 components.
    pub const fn folded(dim: usize, rank: usize) -> Result<Self, Error> {
        match rank {
            0 => Err(Error::Zero { what: "rank" }),
            _ if rank > dim => Err(Error::Rank { rank, dim }),
            _ if dim > MOST_DIM => Err(Error::TooLarge),
            _ => Ok(Self { dim, rank, maps: None }),
        }
    }

    /// Components of an input row.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Components of a stored row.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Appends rows (n, dim) to `stored` (.., rank), with elements beyond the range of `E` as the nearest ones.
    /// `convert` rounds those of a folded reduction.
    pub(crate) fn store<R: Element, E: Element>(
        &self,
        backend: Backend,
        rows: Rows<'_, R>,
        stored: &mut Vec<E>,
        convert: impl Fn(&R) -> E,
    ) -> Result<(), Error> {
        match &self.maps {
            None => stored.extend(rows.columns(0, self.rank)?.iter().flatten().map(convert)),
            Some([basis, _]) => {
                let held = stored.len();
                stored.resize(held + rows.rows() * self.rank, E::default());
                let stored = &mut stored[held..];
                basis.view().project_into_with(backend, rows, RowsMut::contiguous(stored, self.rank)?)?;
                stored.iter_mut().for_each(|x| *x = x.saturate());
            }
        }
        Ok(())
    }

    /// The rows of rank `rank` that stand for `rows` (n, dim). An element beyond the range of `E` becomes the
    /// nearest one.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::BackendUnavailable`].
    pub fn reduce<R: Element, E: Element>(
        &self,
        backend: Backend,
        rows: Rows<'_, R>,
    ) -> Result<Vec<E>, Error> {
        backend.check()?;
        check_len("row", rows.components(), self.dim)?;
        let mut reduced = Vec::new();
        self.store(backend, rows, &mut reduced, |x| E::from_f32(x.to_f32()).saturate())?;
        Ok(reduced)
    }

    /// Projects queries (group, dim) to `out` (group, rank), whose products with reduced rows are those of the
    /// queries with the rows.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::PartialRow`], [`Error::BackendUnavailable`].
    pub fn project_queries<Q: Element>(
        &self,
        backend: Backend,
        queries: Rows<'_, Q>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        check_len("row of queries", queries.components(), self.dim)?;
        match &self.maps {
            None => {
                check_len("out", out.len(), queries.rows().saturating_mul(self.rank))?;
                let queries = queries.columns(0, self.rank)?;
                out.iter_mut().zip(queries.iter().flatten()).for_each(|(out, x)| *out = x.to_f32());
                Ok(())
            }
            Some([_, dual]) => {
                dual.view().project_into_with(backend, queries, RowsMut::contiguous(out, self.rank)?)
            }
        }
    }

    /// Reduced rows (n, rank), such as a sum of them, in the space of the rows: themselves if that is folded,
    /// their first `rank` components then; or reconstructed in `full` (n, dim).
    ///
    /// # Errors
    /// [`Error::PartialRow`], [`Error::Length`], [`Error::BackendUnavailable`].
    pub fn reconstruct<'a>(
        &self,
        backend: Backend,
        reduced: &'a [f32],
        full: &'a mut [f32],
    ) -> Result<Rows<'a, f32>, Error> {
        let Some([_, dual]) = &self.maps else { return Ok(Rows::contiguous(reduced, self.rank)?) };
        dual.view().reconstruct_into_with(backend, reduced, full)?;
        Ok(Rows::contiguous(full, self.dim)?)
    }

    fn write(&self, writer: &mut Writer) {
        [self.dim, self.rank].into_iter().for_each(|x| writer.usize(x));
        writer.u32(self.maps.is_some().into());
        for map in self.maps.iter().flatten() {
            writer.elements(map.columns().iter().copied());
        }
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let folded = Self::folded(reader.usize()?, reader.usize()?)?;
        let Self { dim, rank, .. } = folded;
        match reader.u32()? {
            0 => Ok(folded),
            1 => {
                let len = dim.checked_mul(rank).ok_or(Error::TooLarge)?;
                let mut map = || {
                    let columns = reader.elements::<f32>(len)?;
                    match columns.iter().all(|x| x.is_finite()) {
                        true => MapBuf::new(columns, dim, rank),
                        false => Err(Error::NotFinite { what: "map" }),
                    }
                };
                let maps = [map()?, map()?];
                Ok(Self { maps: Some(maps), ..folded })
            }
            _ => Err(Error::BadField { what: "kind of reduction" }),
        }
    }
}

/// The reductions of the keys and of the values of one head, shared by the caches of all sequences through an
/// [`Arc`](alloc::sync::Arc). [`LayerRotations::maps`](crate::LayerRotations::maps) returns those of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadMaps {
    keys: Reduction,
    values: Reduction,
    id: u64,
}

impl HeadMaps {
    /// Combines the reductions of the keys and of the values.
    #[must_use]
    pub fn new(keys: Reduction, values: Reduction) -> Self {
        // FNV-1a.
        let id = saved(&keys, &values).finish().into_iter().fold(0xcbf2_9ce4_8422_2325, |id: u64, byte| {
            (id ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        Self { keys, values, id }
    }

    /// The reduction of the keys.
    #[must_use]
    pub const fn keys(&self) -> &Reduction {
        &self.keys
    }

    /// The reduction of the values.
    #[must_use]
    pub const fn values(&self) -> &Reduction {
        &self.values
    }

    /// A hash of the maps, by which a saved cache recognizes them.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// The reductions of the keys and of the values.
    pub(crate) const fn sides(&self) -> [&Reduction; 2] {
        [&self.keys, &self.values]
    }

    /// Bytes of the maps.
    #[must_use]
    pub fn size(&self) -> usize {
        let maps = self.sides().into_iter().flat_map(|side| side.maps.iter().flatten());
        maps.map(|map| size_of_val(map.columns())).sum()
    }

    /// Components of a key and of a value.
    pub(crate) const fn dims(&self) -> [usize; 2] {
        [self.keys.dim, self.values.dim]
    }

    /// Both reductions as bytes, which keep every bit.
    ///
    /// # Examples
    /// ```
    /// use svd_core::{HeadMaps, Reduction};
    /// let maps = HeadMaps::new(Reduction::folded(128, 96)?, Reduction::folded(128, 80)?);
    /// assert_eq!(HeadMaps::from_bytes(&maps.to_bytes())?, maps);
    /// # Ok::<(), svd_core::Error>(())
    /// ```
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        saved(&self.keys, &self.values).finish()
    }

    /// [`to_bytes`](Self::to_bytes) with a checksum, which [`from_bytes`](Self::from_bytes) compares: without it
    /// most single wrong bits are read as other values.
    #[must_use]
    pub fn to_bytes_checked(&self) -> Vec<u8> {
        saved(&self.keys, &self.values).finish_checked()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) or [`to_bytes_checked`](Self::to_bytes_checked) wrote.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`],
    /// [`Error::BadChecksum`], [`Error::BadField`], [`Error::NotFinite`], or the error of a bad rank.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new("the maps of a head", MAGIC, VERSION, bytes)?;
        let sides = [Reduction::read(&mut reader)?, Reduction::read(&mut reader)?];
        reader.finish()?;
        let [keys, values] = sides;
        Ok(Self::new(keys, values))
    }
}

/// The serialized reductions of the keys and of the values.
fn saved(keys: &Reduction, values: &Reduction) -> Writer {
    let mut writer = Writer::new(MAGIC, VERSION);
    [keys, values].into_iter().for_each(|side| side.write(&mut writer));
    writer
}

#[cfg(feature = "serde")]
kv_attend::serde_as_bytes!(HeadMaps: HeadMaps::to_bytes);
