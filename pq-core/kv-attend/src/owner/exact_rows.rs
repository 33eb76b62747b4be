//! The sinks and the window of a head: exact rows around the tokens that the owner compresses.

use core::ops::Range;

use alloc::vec::Vec;

use super::{Reader, Writer};
use crate::error::check_len;
use crate::{Element, Error, ExactTokens, Rows, Window};

/// The exact key and value rows of a head, or of all heads of a layer next to each other: the first tokens
/// (sinks) and the recent ones. The owner holds the tokens in between, compressed.
///
/// [`Windowed`](super::Windowed) is made of them. An engine needs them alone if its compressed tokens are not
/// a [`Store`](super::Store), or if it keeps the keys of the window before RoPE.
///
/// # Examples
/// ```
/// use kv_attend::owner::ExactRows;
/// use kv_attend::{Error, Rows, Window};
/// let keys = [0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0]; // 6 tokens of one component
/// let rows = Rows::contiguous(&keys, 1)?;
/// let mut exact = ExactRows::new([1, 1], Window { sinks: 1, recent: 2, batch: 1 });
/// let mut compressed = vec![];
/// exact.append(compressed.len(), [rows, rows], |evicted| {
///     let [keys, _] = evicted.sides();
///     compressed.extend(keys.iter().flat_map(|rows| rows.iter().flatten()));
///     Ok::<_, Error>(())
/// })?;
/// assert_eq!((exact.sink_rows()[0], &compressed[..]), (&[0.0][..], &[1.0, 2.0, 3.0][..]));
/// assert_eq!(exact.recent_rows()[0], [4.0, 5.0]);
/// assert_eq!(exact.truncate(3, compressed.len()), 2); // one sink and two compressed tokens
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ExactRows<E> {
    window: Window,
    sides: [Side<E>; 2], // keys, values; as many rows
}

/// The tokens that an append moves out of the window.
#[derive(Clone, Copy, Debug)]
pub struct EvictedRows<'a, E> {
    first: usize,
    sides: [[Rows<'a, E>; 2]; 2], // keys, values: rows of the window, then new ones that skip it
}

impl<'a, E: Element> EvictedRows<'a, E> {
    /// Tokens from position `first` on, keys (n, dim) and values (n, dim of the values), for the
    /// [`Store`](super::Store) of an engine that keeps its exact rows elsewhere.
    ///
    /// # Errors
    /// [`Error::Length`] if there are not as many values as keys.
    pub fn new(first: usize, [keys, values]: [Rows<'a, E>; 2]) -> Result<Self, Error> {
        let n = keys.rows();
        check_len("values", values.rows(), n)?;
        Ok(Self { first, sides: [[keys, keys.slice(n..n)?], [values, values.slice(n..n)?]] })
    }
}

impl<'a, E> EvictedRows<'a, E> {
    /// The position of the first token.
    #[must_use]
    pub const fn first(&self) -> usize {
        self.first
    }

    /// Number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sides[0].iter().map(Rows::rows).sum()
    }

    /// The keys and the values: of each the rows that were in the window, then the new rows that skip it,
    /// maybe none.
    #[must_use]
    pub const fn sides(&self) -> &[[Rows<'a, E>; 2]; 2] {
        &self.sides
    }
}

/// The exact rows of the keys, or of the values.
#[derive(Clone, Debug)]
struct Side<E> {
    dim: usize, // no rows can be appended if 0
    sinks: Vec<E>,
    recent: Vec<E>, // after `start` evicted elements
    start: usize,
}

impl<E: Element> ExactRows<E> {
    /// No rows; `dims` are the components of a key and of a value, at least 1: no other rows can be appended.
    #[must_use]
    pub const fn new([dim, dim_v]: [usize; 2], window: Window) -> Self {
        Self { window, sides: [Side::new(dim), Side::new(dim_v)] }
    }

    /// Components of a key and of a value.
    #[must_use]
    pub const fn dims(&self) -> [usize; 2] {
        [self.sides[0].dim, self.sides[1].dim]
    }

    /// Number of sinks.
    #[must_use]
    pub const fn sinks(&self) -> usize {
        self.sides[0].count(self.sides[0].sinks.len())
    }

    /// Number of recent tokens.
    #[must_use]
    pub fn recent(&self) -> usize {
        self.sides[0].count(self.sides[0].recent().len())
    }

    /// The keys and the values of the sinks, (n, dim) and (n, dim of the values).
    #[must_use]
    pub fn sink_rows(&self) -> [&[E]; 2] {
        self.sides.each_ref().map(|side| &side.sinks[..])
    }

    /// The keys and the values of the recent tokens, (n, dim) and (n, dim of the values).
    #[must_use]
    pub fn recent_rows(&self) -> [&[E]; 2] {
        self.sides.each_ref().map(Side::recent)
    }

    /// Bytes of all rows.
    #[must_use]
    pub fn size(&self) -> usize {
        self.sides.iter().map(|side| size_of_val(&side.sinks[..]) + size_of_val(side.recent())).sum()
    }

    /// Appends tokens, given that the owner holds `between` tokens, and passes those that leave the window to
    /// `evict`, whose result it returns.
    ///
    /// # Errors
    /// [`Error::Length`] if rows do not fit, and the errors of `evict`; nothing is then changed.
    pub fn append<R, T: From<Error>>(
        &mut self,
        between: usize,
        [keys, values]: [Rows<'_, E>; 2],
        evict: impl FnOnce(EvictedRows<'_, E>) -> Result<R, T>,
    ) -> Result<R, T> {
        check_len("values", values.rows(), keys.rows())?;
        check_len("row of keys", keys.components(), self.sides[0].dim)?;
        check_len("row of values", values.components(), self.sides[1].dim)?;
        let (sinks, recent) = (self.sinks(), self.recent());
        let moves = Moves::new(&self.window, sinks + between + recent, recent, keys.rows());
        let [of_keys, of_values] = &self.sides;
        let sides = [of_keys.evicted(keys, &moves)?, of_values.evicted(values, &moves)?];
        let report = evict(EvictedRows { first: sinks + moves.to_sinks + between, sides })?;
        for (side, new) in self.sides.iter_mut().zip([keys, values]) {
            side.push(new, &moves)?;
        }
        Ok(report)
    }

    /// Keeps the first `len` tokens. Returns how many of the owner's `between` remain.
    pub fn truncate(&mut self, len: usize, between: usize) -> usize {
        let sinks = self.sinks().min(len);
        let between = between.min(len - sinks);
        let recent = self.recent().min(len - sinks - between);
        for side in &mut self.sides {
            side.sinks.truncate(sinks * side.dim);
            side.recent.truncate(side.start + recent * side.dim);
        }
        between
    }

    /// The sinks and the recent tokens at their positions in the sequence, given that the owner holds
    /// `between` tokens; queries start at position `first_query`.
    ///
    /// # Errors
    /// [`Error::Zero`] for rows of no components.
    pub fn tokens(&self, between: usize, first_query: usize) -> Result<[ExactTokens<'_, E>; 2], Error> {
        let [keys, values] = &self.sides;
        let sinks = ExactTokens::contiguous(&keys.sinks, keys.dim, &values.sinks, values.dim)?;
        let recent = ExactTokens::contiguous(keys.recent(), keys.dim, values.recent(), values.dim)?;
        let start = self.sinks() + between;
        Ok([sinks.first_query(first_query), recent.starting_at(start).first_query(first_query)])
    }

    /// Writes the token counts, `between` being those of the owner, then the rows of the keys, then those of
    /// the values.
    pub fn write(&self, writer: &mut Writer, between: usize) {
        [self.sinks(), between, self.recent()].into_iter().for_each(|n| writer.usize(n));
        for side in &self.sides {
            writer.elements(side.sinks.iter().chain(side.recent()).copied());
        }
    }

    /// Reads what [`write`](Self::write) wrote, for an owner of `between` tokens.
    ///
    /// # Errors
    /// [`Error::BadField`] for numbers of tokens that the window cannot hold, [`Error::TooLarge`],
    /// [`Error::Truncated`].
    pub fn read(
        reader: &mut Reader<'_>,
        dims: [usize; 2],
        window: Window,
        between: usize,
    ) -> Result<Self, Error> {
        let mut exact = Self::new(dims, window);
        let [sinks, stored, recent] = [reader.usize()?, reader.usize()?, reader.usize()?];
        if stored != between || !window.can_hold(sinks, between, recent) {
            return Err(Error::BadField { what: "number of tokens" });
        }
        for side in &mut exact.sides {
            let mut rows = |n: usize| reader.elements(n.checked_mul(side.dim).ok_or(Error::TooLarge)?);
            (side.sinks, side.recent) = (rows(sinks)?, rows(recent)?);
        }
        Ok(exact)
    }
}

impl<E: Element> Side<E> {
    const fn new(dim: usize) -> Self {
        Self { dim, sinks: Vec::new(), recent: Vec::new(), start: 0 }
    }

    /// The rows that `len` elements make up.
    const fn count(&self, len: usize) -> usize {
        match len.checked_div(self.dim) {
            Some(rows) => rows,
            None => 0,
        }
    }

    /// The rows of the recent tokens, contiguous.
    fn recent(&self) -> &[E] {
        &self.recent[self.start..]
    }

    /// The rows that leave the window when `new` ones are appended.
    fn evicted<'a>(&'a self, new: Rows<'a, E>, moves: &Moves) -> Result<[Rows<'a, E>; 2], Error> {
        let leaving = Rows::contiguous(&self.recent()[..moves.leaving * self.dim], self.dim)?;
        Ok([leaving, new.slice(moves.passing.clone())?])
    }

    /// Appends `new` rows and drops the evicted ones.
    fn push(&mut self, new: Rows<'_, E>, moves: &Moves) -> Result<(), Error> {
        self.sinks.extend(new.slice(0..moves.to_sinks)?.iter().flatten());
        self.forget(moves.leaving);
        self.recent.extend(new.slice(moves.to_recent.clone())?.iter().flatten());
        Ok(())
    }

    /// Drops the oldest `n` recent rows. Rows move to the front only when half of the buffer is free, so that
    /// the amortized cost is one move per token, and the window stays contiguous.
    fn forget(&mut self, n: usize) {
        self.start += n * self.dim;
        if self.start >= self.recent.len() - self.start {
            self.recent.drain(..self.start);
            self.start = 0;
        }
    }
}

/// The moves of an append, the same for both sides of a head.
struct Moves {
    to_sinks: usize,         // new tokens that become sinks
    leaving: usize,          // oldest recent tokens that leave the window
    passing: Range<usize>,   // new tokens that skip the window, after those
    to_recent: Range<usize>, // new tokens that become recent ones
}

impl Moves {
    /// The moves when `n` tokens are appended to a window of `recent` tokens in a cache of `len` tokens.
    const fn new(window: &Window, len: usize, recent: usize, n: usize) -> Self {
        let to_sinks = window.to_sinks(len, n);
        let evicted = window.to_evict(recent + n - to_sinks);
        let leaving = if evicted < recent { evicted } else { recent };
        let passed = to_sinks + evicted - leaving;
        Self { to_sinks, leaving, passing: to_sinks..passed, to_recent: passed..n }
    }
}

impl Window {
    /// Whether a cache with this window can hold `sinks`, `between` and `recent` tokens.
    const fn can_hold(&self, sinks: usize, between: usize, recent: usize) -> bool {
        let batch = if self.batch == 0 { 1 } else { self.batch };
        sinks <= self.sinks
            && recent <= self.recent.saturating_add(batch - 1)
            && (sinks == self.sinks || (between == 0 && recent == 0))
    }
}
