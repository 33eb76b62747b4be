use crate::Error;
use crate::error::check_len;

/// Bits of a symbol's probability: every cumulative table ends at `1 << PRECISION`.
pub const PRECISION: u32 = 14;

/// Most symbols of a model, the escape included.
pub const MAX_ALPHABET: usize = 256;

/// One static probability model per channel, borrowed. Symbol `alphabet - 1` is the escape; the symbols before it are the
/// bins `-r..=r`.
#[derive(Clone, Copy, Debug)]
pub struct Models<'a> {
    alphabet: usize,
    cdf: &'a [u16], // (channels, alphabet + 1), each row strictly rising from 0 to 1 << PRECISION
}

impl<'a> Models<'a> {
    /// Checks tables, which may come from outside.
    ///
    /// # Errors
    /// [`Error::BadAlphabet`], [`Error::Length`] or [`Error::BadCdf`].
    pub fn new(channels: usize, alphabet: usize, cdf: &'a [u16]) -> Result<Self, Error> {
        if !(2..=MAX_ALPHABET).contains(&alphabet) || !alphabet.is_multiple_of(2) {
            return Err(Error::BadAlphabet { alphabet });
        }
        check_len("cdf", cdf.len(), channels.checked_mul(alphabet + 1).ok_or(Error::TooLarge)?)?;
        for (channel, row) in cdf.chunks_exact(alphabet + 1).enumerate() {
            let rises = row.windows(2).all(|pair| pair[0] < pair[1]);
            if row[0] != 0 || row[alphabet] != 1 << PRECISION || !rises {
                return Err(Error::BadCdf { channel });
            }
        }
        Ok(Self { alphabet, cdf })
    }

    /// Symbols of every model, the escape included.
    #[must_use]
    pub const fn alphabet(&self) -> usize {
        self.alphabet
    }

    /// The cumulative table of `channel`: (alphabet + 1,).
    ///
    /// # Panics
    /// When there is no such channel.
    #[must_use]
    pub fn row(&self, channel: usize) -> &'a [u16] {
        &self.cdf[channel * (self.alphabet + 1)..][..self.alphabet + 1]
    }
}

/// Turns counts into a cumulative table: every symbol keeps at least 1, what rounding leaves over goes to the first most
/// frequent symbol. Integers only, so that every machine makes the same table.
#[cfg(feature = "alloc")]
pub(crate) fn cdf_from_counts(counts: &[u64], cdf: &mut [u16]) {
    let total: u64 = counts.iter().sum::<u64>().max(1);
    let free = (1_u64 << PRECISION) - counts.len() as u64;
    let share = |count: u64| 1 + (u128::from(free) * u128::from(count) / u128::from(total)) as u64;
    let used: u64 = counts.iter().map(|&count| share(count)).sum();
    let top = (0..counts.len()).rev().max_by_key(|&s| counts[s]).unwrap_or(0);
    let mut cumulative = 0;
    for (s, &count) in counts.iter().enumerate() {
        cdf[s] = cumulative as u16;
        cumulative += share(count) + if s == top { (1 << PRECISION) - used } else { 0 };
    }
    cdf[counts.len()] = cumulative as u16;
}

#[cfg(all(test, feature = "alloc"))]
mod tests {
    use super::*;

    #[test]
    fn tables_from_any_counts_are_valid() {
        for counts in [[0, 0, 0, 0], [1, 0, 0, 0], [u64::MAX / 8; 4], [3, 1_000_000, 2, 0]] {
            let mut cdf = [0; 5];
            cdf_from_counts(&counts, &mut cdf);
            Models::new(1, 4, &cdf).unwrap();
        }
    }
}
