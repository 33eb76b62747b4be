//! The models of a tile, transposed so that one load reads a symbol of all 32 lanes.

use crate::Models;
use crate::model::slots::{MAX_SYMBOLS, SLOTS, Starts};
use crate::model::{CONTEXTS, family_model};

/// Channels of a tile, one per lane.
pub const LANES: usize = 32;

/// One code of each lane.
pub type Row = [u16; LANES];

/// The code of a bin that is not in the alphabet.
pub const ESCAPE: u16 = u16::MAX;

/// The symbol of no lane. It is positive, since some instruction sets compare signed integers only.
const NO_ESCAPE: u16 = 0x7fff;

/// The models of one tile with `C` contexts, transposed so that vectors load a symbol of all lanes at once.
pub(crate) struct TileTables<const C: usize> {
    /// First slots, (symbol, lane); [`SLOTS`] after a lane's last symbol. Vectors read two rows past the end.
    pub starts: [[Row; MAX_SYMBOLS + 2]; C],
    /// Low bits of every lane.
    pub low_bits: [u32; LANES],
    /// The escape symbol of every lane, (context, lane); [`NO_ESCAPE`] in unused lanes.
    pub escape: [Row; C],
    /// Channels of the tile; lanes after them code one symbol without bits.
    pub lanes: usize,
    /// The largest number of symbols of a lane.
    pub symbols: usize,
}

impl<const C: usize> TileTables<C> {
    /// The models of channels `first..first + lanes`.
    pub fn new(models: &Models<'_>, first: usize, lanes: usize) -> Self {
        let mut tables = Self::empty(lanes);
        for lane in 0..lanes {
            for context in 0..C {
                let (low_bits, starts) = models.channel(first + lane, context);
                tables.set(lane, context, low_bits, starts);
            }
        }
        tables
    }

    fn empty(lanes: usize) -> Self {
        let mut tables = Self {
            starts: [[[SLOTS; LANES]; MAX_SYMBOLS + 2]; C],
            low_bits: [0; LANES],
            escape: [[NO_ESCAPE; LANES]; C],
            lanes,
            symbols: 1,
        };
        // An unused lane has one symbol, which takes no bits.
        tables.starts.iter_mut().for_each(|starts| starts[0] = [0; LANES]);
        tables
    }

    fn set(&mut self, lane: usize, context: usize, low_bits: u32, starts: Starts<'_>) {
        let symbols = starts.symbols();
        for (row, &start) in self.starts[context].iter_mut().zip(&starts.0[..symbols]) {
            row[lane] = start;
        }
        self.low_bits[lane] = low_bits;
        self.escape[context][lane] = (symbols - 1) as u16;
        self.symbols = self.symbols.max(symbols);
    }

    /// Slots of a lane's symbol: the first one, and the one after the last.
    #[inline(always)]
    pub fn slots(&self, context: usize, symbol: usize, lane: usize) -> (u32, u32) {
        let starts = &self.starts[context];
        (starts[symbol][lane].into(), starts[symbol + 1][lane].into())
    }

    /// The symbol of a lane whose slots contain `slot`.
    #[inline(always)]
    pub fn find(&self, context: usize, lane: usize, slot: u32) -> usize {
        self.starts[context][1..self.symbols].iter().filter(|row| u32::from(row[lane]) <= slot).count()
    }

    /// Whether any lane has low bits.
    pub fn any_low_bits(&self) -> bool {
        self.low_bits.iter().any(|&bits| bits > 0)
    }

    /// The context of the token after a code.
    #[inline(always)]
    pub const fn context_after(code: u16, low_bits: u32) -> usize {
        let symbol = (code >> low_bits) as usize;
        if C < CONTEXTS || symbol == 0 || code == ESCAPE { 0 } else { 2 - symbol % 2 }
    }
}

impl TileTables<1> {
    /// The tile's own models, one family per lane.
    pub fn of_families(families: &[u8]) -> Self {
        let mut tables = Self::empty(families.len());
        for (lane, &family) in families.iter().enumerate() {
            let (low_bits, starts) = family_model(family);
            tables.set(lane, 0, low_bits, starts);
        }
        tables
    }
}
