//! Strided views of rows: one head of a cache in any layout, without a copy.

use core::ops::Range;

use half::{bf16, f16};

use crate::Error;
use crate::error::check_at_least;

/// Rows of `components` elements each, `row_stride` elements apart: the keys of one head in a cache of any
/// layout, without a copy.
///
/// Contiguous rows (HND) are a [`Rows::contiguous`]. One head of (tokens, heads, head_dim) (NHD) is a range
/// of the [`columns`](Self::columns) of rows that hold all heads. `Rows::from` makes a slice a single row.
///
/// # Examples
/// ```
/// use kv_attend::Rows;
/// let keys = [0.0_f32, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]; // 2 tokens of 2 heads of 2 components
/// let head = Rows::contiguous(&keys, 4)?.columns(2, 2)?; // the second head
/// assert_eq!((head.rows(), head.row(1)), (2, &[12.0, 13.0][..]));
/// # Ok::<(), kv_attend::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, E> {
    data: &'a [E], // ends with or after the last row
    rows: usize,
    components: usize, // at most `row_stride`
    row_stride: usize,
}

impl<'a, E> Rows<'a, E> {
    /// The first `rows` rows of `data`; elements after the last row are ignored.
    ///
    /// # Errors
    /// [`Error::Zero`] for no components, [`Error::Stride`], [`Error::TooShort`], [`Error::TooLarge`].
    pub const fn new(
        data: &'a [E],
        rows: usize,
        components: usize,
        row_stride: usize,
    ) -> Result<Self, Error> {
        match check_rows(data.len(), rows, components, row_stride) {
            Ok(()) => Ok(Self { data, rows, components, row_stride }),
            Err(error) => Err(error),
        }
    }

    /// All rows of `data`, without gaps.
    ///
    /// # Errors
    /// [`Error::Zero`] for no components, [`Error::PartialRow`].
    pub const fn contiguous(data: &'a [E], components: usize) -> Result<Self, Error> {
        match count_rows(data.len(), components) {
            Ok(rows) => Ok(Self { data, rows, components, row_stride: components }),
            Err(error) => Err(error),
        }
    }

    /// The `components` elements of every row from element `first` on.
    ///
    /// # Errors
    /// [`Error::Zero`] for no components, [`Error::TooShort`] if a row ends before.
    pub fn columns(self, first: usize, components: usize) -> Result<Self, Error> {
        check_columns(self.components, first, components)?;
        let data = self.data.get(first..).unwrap_or_default(); // out of range only if there are no rows
        Ok(Self { data, components, ..self })
    }

    /// Rows `range.start` to `range.end - 1`.
    ///
    /// # Errors
    /// [`Error::TooShort`] if there are fewer rows, or if the range ends before it starts.
    pub fn slice(self, range: Range<usize>) -> Result<Self, Error> {
        check_at_least("rows", self.rows, range.end)?;
        check_at_least("the range up to its end", range.end, range.start)?;
        let rows = range.end - range.start;
        let data = if rows == 0 { &[] } else { &self.data[range.start * self.row_stride..] };
        Ok(Self { data, rows, ..self })
    }

    /// Number of rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    #[must_use]
    pub const fn components(&self) -> usize {
        self.components
    }

    /// Elements from the start of one row to the start of the next.
    #[must_use]
    pub const fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Row `i`.
    ///
    /// # Panics
    /// If `i` is not below [`rows`](Self::rows).
    #[must_use]
    pub fn row(&self, i: usize) -> &'a [E] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        &self.data[i * self.row_stride..][..self.components]
    }

    /// All rows in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = &'a [E]> {
        (0..self.rows).map(move |i| self.row(i))
    }

    /// The elements of all rows, if they are contiguous.
    #[must_use]
    pub fn as_slice(&self) -> Option<&'a [E]> {
        let gapless = self.row_stride == self.components || self.rows <= 1;
        gapless.then(|| &self.data[..self.rows * self.components])
    }

    /// The memory from the first element of the first row on.
    pub(crate) const fn data(&self) -> &'a [E] {
        self.data
    }
}

/// [`Rows`] of any [`Element`](crate::Element). A generic function is compiled again in every crate that
/// calls it: one with long loops converts its rows to these and passes them to a function that is compiled
/// once.
#[derive(Clone, Copy, Debug)]
pub enum AnyRows<'a> {
    /// Rows of `f32`.
    F32(Rows<'a, f32>),
    /// Rows of [`half::f16`].
    F16(Rows<'a, f16>),
    /// Rows of [`half::bf16`].
    Bf16(Rows<'a, bf16>),
}

/// Evaluates an expression with the [`Rows`] of some [`AnyRows`]: it is compiled for each element type.
#[doc(hidden)]
#[macro_export]
macro_rules! for_any_rows {
    ($any:expr, $rows:ident => $result:expr) => {
        match $any {
            $crate::AnyRows::F32($rows) => $result,
            $crate::AnyRows::F16($rows) => $result,
            $crate::AnyRows::Bf16($rows) => $result,
        }
    };
}

/// A slice as a single row.
impl<'a, E> From<&'a [E]> for Rows<'a, E> {
    fn from(row: &'a [E]) -> Self {
        Self { data: row, rows: 1, components: row.len(), row_stride: row.len() }
    }
}

/// Mutable [`Rows`].
///
/// # Examples
/// ```
/// use kv_attend::RowsMut;
/// let mut cache = [0.0_f32; 6]; // 2 tokens of 3 heads of 1 component
/// let mut head = RowsMut::contiguous(&mut cache, 3)?.columns(1, 1)?;
/// head.row_mut(1)[0] = 5.0;
/// assert_eq!(cache, [0.0, 0.0, 0.0, 0.0, 5.0, 0.0]);
/// # Ok::<(), kv_attend::Error>(())
/// ```
#[derive(Debug)]
pub struct RowsMut<'a, E> {
    data: &'a mut [E],
    rows: usize,
    components: usize,
    row_stride: usize,
}

impl<'a, E> RowsMut<'a, E> {
    /// The first `rows` rows of `data`; elements after the last row are ignored.
    ///
    /// # Errors
    /// As for [`Rows::new`].
    pub fn new(data: &'a mut [E], rows: usize, components: usize, row_stride: usize) -> Result<Self, Error> {
        check_rows(data.len(), rows, components, row_stride)?;
        Ok(Self { data, rows, components, row_stride })
    }

    /// All rows of `data`, without gaps.
    ///
    /// # Errors
    /// As for [`Rows::contiguous`].
    pub fn contiguous(data: &'a mut [E], components: usize) -> Result<Self, Error> {
        let rows = count_rows(data.len(), components)?;
        Ok(Self { data, rows, components, row_stride: components })
    }

    /// The `components` elements of every row from element `first` on.
    ///
    /// # Errors
    /// As for [`Rows::columns`].
    pub fn columns(self, first: usize, components: usize) -> Result<Self, Error> {
        check_columns(self.components, first, components)?;
        let data = self.data.get_mut(first..).unwrap_or_default();
        Ok(Self { data, components, ..self })
    }

    /// Number of rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    #[must_use]
    pub const fn components(&self) -> usize {
        self.components
    }

    /// Row `i`.
    ///
    /// # Panics
    /// If `i` is not below [`rows`](Self::rows).
    #[must_use]
    pub fn row_mut(&mut self, i: usize) -> &mut [E] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        &mut self.data[i * self.row_stride..][..self.components]
    }

    /// Reborrows the rows.
    #[must_use]
    pub fn reborrow(&mut self) -> RowsMut<'_, E> {
        RowsMut { data: self.data, ..*self }
    }

    /// Borrows the rows immutably.
    #[must_use]
    pub const fn as_rows(&self) -> Rows<'_, E> {
        Rows { data: self.data, rows: self.rows, components: self.components, row_stride: self.row_stride }
    }
}

/// A slice as a single row.
impl<'a, E> From<&'a mut [E]> for RowsMut<'a, E> {
    fn from(row: &'a mut [E]) -> Self {
        let components = row.len();
        Self { data: row, rows: 1, components, row_stride: components }
    }
}

const fn check_rows(len: usize, rows: usize, components: usize, row_stride: usize) -> Result<(), Error> {
    if components == 0 {
        return Err(Error::Zero { what: "components of a row" });
    }
    if row_stride < components {
        return Err(Error::Stride { row_stride, components });
    }
    if rows == 0 {
        return Ok(());
    }
    let Some(last) = (rows - 1).checked_mul(row_stride) else { return Err(Error::TooLarge) };
    let Some(needed) = last.checked_add(components) else { return Err(Error::TooLarge) };
    if len < needed { Err(Error::TooShort { what: "rows", needed, actual: len }) } else { Ok(()) }
}

const fn count_rows(len: usize, components: usize) -> Result<usize, Error> {
    if components == 0 {
        return Err(Error::Zero { what: "components of a row" });
    }
    if !len.is_multiple_of(components) {
        return Err(Error::PartialRow { what: "rows", row: components, actual: len });
    }
    Ok(len / components)
}

fn check_columns(of: usize, first: usize, components: usize) -> Result<(), Error> {
    if components == 0 {
        return Err(Error::Zero { what: "components of a row" });
    }
    check_at_least("row", of, first.checked_add(components).ok_or(Error::TooLarge)?)
}
