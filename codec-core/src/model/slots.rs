//! The slots of one model's symbols: `1 << PRECISION` slots in all, and each symbol has the number that its
//! probability is a multiple of.

/// Bits of a probability. Every cumulative table ends at `1 << PRECISION`.
pub const PRECISION: u32 = 12;

/// The largest number of symbols of a model, including the escape.
pub const MAX_SYMBOLS: usize = 64;

/// Slots that the symbols of a model share.
pub(crate) const SLOTS: u16 = 1 << PRECISION;

/// First slots of the symbols of one model, [`MAX_SYMBOLS`] entries.
#[derive(Clone, Copy)]
pub(crate) struct Starts<'a>(pub &'a [u16]);

impl Starts<'_> {
    pub fn symbols(self) -> usize {
        self.0.partition_point(|&start| start < SLOTS)
    }
}

/// An owned table of first slots.
#[derive(Clone, Copy)]
pub(crate) struct Distribution(pub [u16; MAX_SYMBOLS]);

impl Distribution {
    pub const EMPTY: Self = Self([SLOTS; MAX_SYMBOLS]);

    /// Turns the first `n` counts into slots. Every symbol gets at least one; symbol 0 also gets the
    /// remainder of rounding. Integer arithmetic gives the same table on every machine.
    pub const fn from_counts(counts: &[u64; MAX_SYMBOLS], n: usize) -> Self {
        let free = SLOTS as u64 - n as u64;
        let mut total = 0;
        let mut s = 0;
        while s < n {
            total += counts[s] as u128;
            s += 1;
        }
        if total == 0 {
            total = 1;
        }
        let mut starts = Self::EMPTY.0;
        let mut end = SLOTS;
        while s > 0 {
            s -= 1;
            end -= 1 + (free as u128 * counts[s] as u128 / total) as u16;
            starts[s] = end;
        }
        starts[0] = 0;
        Self(starts)
    }

    #[cfg(test)]
    pub fn symbols(&self) -> usize {
        Starts(&self.0).symbols()
    }

    #[cfg(test)]
    pub fn width(&self, symbol: usize) -> u16 {
        self.0.get(symbol + 1).unwrap_or(&SLOTS) - self.0[symbol]
    }
}
