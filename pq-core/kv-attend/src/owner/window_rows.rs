use core::ops::Range;

use alloc::vec::Vec;

use crate::{Element, Error, Rows, Window};

/// The exact rows of one side (keys or values) of a head: the first tokens (sinks), and the recent ones.
#[derive(Clone, Debug)]
pub struct WindowRows<E> {
    dim: usize,
    sinks: Vec<E>,
    recent: Vec<E>, // after `start` elements that have left
    start: usize,
}

/// Where tokens go when new ones arrive: the same for both sides of a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moves {
    /// New tokens that become sinks.
    pub to_sinks: usize,
    /// Oldest recent tokens that leave the window.
    pub leaving: usize,
    /// New tokens that leave the window at once, after those.
    pub passing: Range<usize>,
    /// New tokens that become recent ones.
    pub to_recent: Range<usize>,
}

impl Moves {
    /// What happens when `n` tokens arrive at a window that holds `recent`, out of `len` tokens of the cache.
    #[must_use]
    pub const fn new(window: &Window, len: usize, recent: usize, n: usize) -> Self {
        let to_sinks = window.to_sinks(len, n);
        let evicted = window.to_evict(recent + n - to_sinks);
        let leaving = if evicted < recent { evicted } else { recent };
        let passed = to_sinks + evicted - leaving;
        Self { to_sinks, leaving, passing: to_sinks..passed, to_recent: passed..n }
    }

    /// Tokens that leave the window.
    #[must_use]
    pub const fn evicted(&self) -> usize {
        self.leaving + self.passing.end - self.passing.start
    }
}

impl<E: Element> WindowRows<E> {
    /// No rows of `dim` elements, at least 1.
    #[must_use]
    pub const fn new(dim: usize) -> Self {
        Self { dim, sinks: Vec::new(), recent: Vec::new(), start: 0 }
    }

    /// Elements of a row.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// The first tokens' rows, without gaps.
    #[must_use]
    pub fn sinks(&self) -> &[E] {
        &self.sinks
    }

    /// The recent tokens' rows, without gaps.
    #[must_use]
    pub fn recent(&self) -> &[E] {
        &self.recent[self.start..]
    }

    /// Bytes of all rows.
    #[must_use]
    pub fn size(&self) -> usize {
        size_of_val(self.sinks()) + size_of_val(self.recent())
    }

    /// Takes `new` rows in, and passes those that leave the window to `evict`, in order.
    ///
    /// # Errors
    /// Those of `evict`; [`Error::TooShort`] if there are fewer rows than `moves` counts.
    pub fn push<T: From<Error>>(
        &mut self,
        new: Rows<'_, E>,
        moves: &Moves,
        mut evict: impl FnMut(Rows<'_, E>) -> Result<(), T>,
    ) -> Result<(), T> {
        self.sinks.extend(new.slice(0..moves.to_sinks)?.iter().flatten());
        evict(Rows::contiguous(&self.recent()[..moves.leaving * self.dim], self.dim)?)?;
        self.forget(moves.leaving);
        evict(new.slice(moves.passing.clone())?)?;
        self.recent.extend(new.slice(moves.to_recent.clone())?.iter().flatten());
        Ok(())
    }

    /// Forgets the oldest `n` recent rows. Rows move to the front only when half of the memory is free, so
    /// that a token's share is one move, and the window stays in one piece.
    fn forget(&mut self, n: usize) {
        self.start += n * self.dim;
        if self.start >= self.recent.len() - self.start {
            self.recent.drain(..self.start);
            self.start = 0;
        }
    }

    /// Keeps the first `sinks` and the oldest `recent` rows.
    pub fn truncate(&mut self, sinks: usize, recent: usize) {
        self.sinks.truncate(sinks * self.dim);
        self.recent.truncate(self.start + recent * self.dim);
    }

    /// Writes the elements of all rows, without their number.
    pub fn write(&self, writer: &mut super::Writer) {
        writer.elements(self.sinks.iter().chain(self.recent()).copied());
    }

    /// Reads `sinks` and `recent` rows of `dim` elements that [`write`](Self::write) wrote.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::Truncated`].
    pub fn read(
        reader: &mut super::Reader<'_>,
        dim: usize,
        [sinks, recent]: [usize; 2],
    ) -> Result<Self, Error> {
        let mut rows = |n: usize| reader.elements(n.checked_mul(dim).ok_or(Error::TooLarge)?);
        Ok(Self { dim, sinks: rows(sinks)?, recent: rows(recent)?, start: 0 })
    }
}

impl Window {
    /// Whether a cache with this window can hold `sinks`, `evicted` and `recent` tokens.
    #[must_use]
    pub const fn can_hold(&self, sinks: usize, evicted: usize, recent: usize) -> bool {
        let batch = if self.batch == 0 { 1 } else { self.batch };
        sinks <= self.sinks
            && recent <= self.recent.saturating_add(batch - 1)
            && (sinks == self.sinks || (evicted == 0 && recent == 0))
    }
}
