//! Probability models of channels: families named by one byte, and explicit tables.

#[cfg(feature = "alloc")]
pub(crate) mod cost;
pub(crate) mod family;
pub(crate) mod slots;
pub(crate) mod tables;

use crate::Error;
use crate::error::check_len;
use slots::{MAX_SYMBOLS, SLOTS, Starts};

/// Length of a table in [`Models::tables`]: the number of low bits, then the first slot of every symbol.
pub const TABLE_LEN: usize = 1 + MAX_SYMBOLS;

/// Tables of a channel with contexts: after symbol 0, after a negative bin, and after a positive bin.
pub(crate) const CONTEXTS: usize = 3;

/// The largest number of low bits. A code, which is symbol and low bits, is below 2^16 - 1.
const MAX_LOW_BITS: u16 = 11;

/// The static probability models of a plane's channels, borrowed and checked.
///
/// A bin is split into low bits, which are coded with equal probabilities, and the rest: rests `0, -1, 1, -2,
/// 2, ...` are the symbols `0, 1, 2, 3, 4, ...`. The last symbol of a model is the escape. A code is `symbol
/// << low_bits | low`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Models<'a> {
    pub(crate) channels: usize,
    pub(crate) kind: Kind<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind<'a> {
    Families(&'a [u8]),
    Tables(&'a [u16]),
    ContextTables(&'a [u16]),
}

impl<'a> Models<'a> {
    /// One byte per channel names one of 256 distributions: Gaussian, logistic, Laplace, or Student's t with
    /// four degrees of freedom, each with 64 standard deviations.
    #[must_use]
    pub const fn families(families: &'a [u8]) -> Self {
        Self { channels: families.len(), kind: Kind::Families(families) }
    }

    /// Explicit tables, (channels, [`TABLE_LEN`]): the number of low bits, then the first slot of every
    /// symbol. First slots start at 0 and increase; after the last symbol they are `1 << PRECISION`.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::BadModel`].
    pub fn tables(channels: usize, tables: &'a [u16]) -> Result<Self, Error> {
        check_tables(channels, 1, tables)?;
        Ok(Self { channels, kind: Kind::Tables(tables) })
    }

    /// Explicit tables, (channels, 3, [`TABLE_LEN`]). The previous token selects the table: the first one
    /// after symbol 0, an escape or no token, the second one after a negative bin, the third one after a
    /// positive bin. The three tables of a channel have the same number of low bits.
    ///
    /// # Errors
    /// As [`Self::tables`].
    pub fn context_tables(channels: usize, tables: &'a [u16]) -> Result<Self, Error> {
        check_tables(channels, CONTEXTS, tables)?;
        Ok(Self { channels, kind: Kind::ContextTables(tables) })
    }

    /// Number of channels.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.channels
    }

    /// Tables per channel: 1, or 3 if the model of a bin depends on the previous one.
    #[must_use]
    pub const fn contexts(&self) -> usize {
        match self.kind {
            Kind::ContextTables(_) => CONTEXTS,
            _ => 1,
        }
    }

    /// The table of a channel in context `context`, in the layout of [`Self::tables`].
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn table(&self, channel: usize, context: usize) -> Result<[u16; TABLE_LEN], Error> {
        if channel >= self.channels || context >= self.contexts() {
            return Err(Error::OutOfBounds { what: "channel or context" });
        }
        Ok(as_table(self.channel(channel, context)))
    }

    /// The shape of a channel's family (0 for tables), and the standard deviation of bins that its first
    /// table expects.
    ///
    /// The encoder decides from them whether a tile is coded under its own families, and under which.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    #[cfg(feature = "alloc")]
    pub fn expectation(&self, channel: usize) -> Result<(usize, f64), Error> {
        if channel >= self.channels {
            return Err(Error::OutOfBounds { what: "channel" });
        }
        Ok((self.shape(channel), cost::deviation_under(self.channel(channel, 0))))
    }

    /// Adds everything that determines the meaning of a stream to a checksum.
    pub(crate) fn hash(&self, hasher: &mut crc32fast::Hasher) {
        match self.kind {
            Kind::Families(families) => {
                hasher.update(&[0]);
                hasher.update(families);
            }
            Kind::Tables(tables) | Kind::ContextTables(tables) => {
                hasher.update(&[self.contexts() as u8]);
                tables.iter().for_each(|x| hasher.update(&x.to_le_bytes()));
            }
        }
    }

    /// The shape of a channel's family, 0 for tables.
    #[cfg(feature = "alloc")]
    pub(crate) fn shape(&self, channel: usize) -> usize {
        match self.kind {
            Kind::Families(families) => family::shape(families[channel]),
            _ => 0,
        }
    }

    /// Low bits and symbols of a channel in context `context`.
    pub(crate) fn channel(&self, channel: usize, context: usize) -> (u32, Starts<'a>) {
        match self.kind {
            Kind::Families(families) => family_model(families[channel]),
            Kind::Tables(tables) | Kind::ContextTables(tables) => {
                let table = &tables[(channel * self.contexts() + context) * TABLE_LEN..][..TABLE_LEN];
                (table[0].into(), Starts(&table[1..]))
            }
        }
    }
}

fn check_tables(channels: usize, contexts: usize, tables: &[u16]) -> Result<(), Error> {
    let per_channel = contexts * TABLE_LEN;
    check_len("tables", tables.len(), channels.checked_mul(per_channel).ok_or(Error::TooLarge)?)?;
    for (channel, tables) in tables.chunks_exact(per_channel).enumerate() {
        for table in tables.chunks_exact(TABLE_LEN) {
            let starts = &table[1..];
            let end = starts.partition_point(|&start| start < SLOTS);
            let valid = table[0] <= MAX_LOW_BITS
                && table[0] == tables[0]
                && end >= 2
                && (end - 1) << table[0] < usize::from(u16::MAX)
                && starts[0] == 0
                && starts[..end].windows(2).all(|pair| pair[0] < pair[1])
                && starts[end..].iter().all(|&start| start == SLOTS);
            if !valid {
                return Err(Error::BadModel { channel });
            }
        }
    }
    Ok(())
}

/// The table of a family, in the layout of [`Models::tables`].
#[must_use]
pub fn family_table(family: u8) -> [u16; TABLE_LEN] {
    as_table(family_model(family))
}

fn as_table((low_bits, Starts(starts)): (u32, Starts<'_>)) -> [u16; TABLE_LEN] {
    let mut table = [low_bits as u16; TABLE_LEN];
    table[1..].copy_from_slice(starts);
    table
}

/// Low bits and symbols of a family.
pub(crate) fn family_model(family: u8) -> (u32, Starts<'static>) {
    (family::shift(family), Starts(&family::distribution(family).0))
}

#[cfg(test)]
mod tests {
    use super::slots::Distribution;
    use super::*;

    fn as_table(low_bits: u32, distribution: &Distribution) -> [u16; TABLE_LEN] {
        super::as_table((low_bits, Starts(&distribution.0)))
    }

    #[test]
    fn tables_from_any_counts_are_valid() {
        for few in [[0, 0, 0, 0], [1, 0, 0, 0], [u64::MAX; 4], [3, 1_000_000, 2, 0]] {
            let mut counts = [0; MAX_SYMBOLS];
            counts[..4].copy_from_slice(&few);
            for n in [2, 4, MAX_SYMBOLS] {
                let table = as_table(8, &Distribution::from_counts(&counts, n));
                Models::tables(1, &table).unwrap();
            }
        }
    }

    #[test]
    fn every_family_is_a_valid_table() {
        for family in 0..=255 {
            Models::tables(1, &family_table(family)).unwrap();
        }
    }

    #[test]
    fn broken_tables_are_errors() {
        let good = as_table(0, &Distribution::from_counts(&[1; MAX_SYMBOLS], 8));
        for (at, value) in [(0, 12), (1, 1), (2, 0), (3, 0), (8, 4097), (40, 4095), (2, 4096)] {
            let mut table = good;
            table[at] = value;
            assert_eq!(Models::tables(1, &table), Err(Error::BadModel { channel: 0 }), "{at}");
        }
        let tables = [good, good, as_table(1, &Distribution::EMPTY)].concat();
        assert_eq!(Models::context_tables(1, &tables), Err(Error::BadModel { channel: 0 }));
        assert!(matches!(Models::tables(2, &good), Err(Error::Length { .. })));
    }
}
