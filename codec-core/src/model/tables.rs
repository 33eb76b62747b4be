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

/// Bits of a key below its slot.
pub const KEY_BITS: u32 = 3;

/// The largest key of a slot. Every symbol has a key: its first slot, then the lowest bits of its number. The
/// smallest distance from a symbol's key to the largest key of a slot is that of the slot's symbol, and gives
/// both the distance of the slots and the symbol's lowest bits.
pub const fn last_key(slot: u16) -> u16 {
    slot << KEY_BITS | ((1 << KEY_BITS) - 1)
}

/// The slot of a key.
pub const fn slot_of(key: u16) -> u16 {
    key >> KEY_BITS
}

/// The key of a symbol.
const fn key(symbol: usize, start: u16) -> u16 {
    start << KEY_BITS | (symbol as u16 & ((1 << KEY_BITS) - 1))
}

/// The models of one tile with `C` contexts, transposed so that vectors load a symbol of all lanes at once.
pub(crate) struct TileTables<const C: usize> {
    /// Keys, (symbol, lane); the first slot is [`SLOTS`] after a lane's last symbol. Vectors read two rows
    /// past the end.
    pub keys: [[Row; MAX_SYMBOLS + 2]; C],
    /// Low bits of every lane.
    pub low_bits: [u32; LANES],
    /// The escape symbol of every lane, (context, lane); [`NO_ESCAPE`] in unused lanes.
    pub escape: [Row; C],
    /// Channels of the tile; lanes after them code one symbol without bits.
    pub lanes: usize,
    /// The largest number of symbols of a lane.
    pub symbols: usize,
}

/// The keys of lanes without symbols.
const NO_SYMBOLS: [Row; MAX_SYMBOLS + 2] = {
    let mut keys = [[0; LANES]; MAX_SYMBOLS + 2];
    let mut symbol = 0;
    while symbol < keys.len() {
        keys[symbol] = [key(symbol, SLOTS); LANES];
        symbol += 1;
    }
    keys
};

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
            keys: [NO_SYMBOLS; C],
            low_bits: [0; LANES],
            escape: [[NO_ESCAPE; LANES]; C],
            lanes,
            symbols: 1,
        };
        // An unused lane has one symbol, which takes no bits.
        tables.keys.iter_mut().for_each(|keys| keys[0] = [0; LANES]);
        tables
    }

    fn set(&mut self, lane: usize, context: usize, low_bits: u32, starts: Starts<'_>) {
        let symbols = starts.symbols();
        for (symbol, (row, &start)) in self.keys[context].iter_mut().zip(&starts.0[..symbols]).enumerate() {
            row[lane] = key(symbol, start);
        }
        self.low_bits[lane] = low_bits;
        self.escape[context][lane] = (symbols - 1) as u16;
        self.symbols = self.symbols.max(symbols);
    }

    /// Slots of a lane's symbol: the first one, and the one after the last.
    #[inline(always)]
    pub fn slots(&self, context: usize, symbol: usize, lane: usize) -> (u32, u32) {
        let keys = &self.keys[context];
        (slot_of(keys[symbol][lane]).into(), slot_of(keys[symbol + 1][lane]).into())
    }

    /// The symbol of a lane whose slots contain `slot`.
    #[inline(always)]
    pub fn find(&self, context: usize, lane: usize, slot: u32) -> usize {
        let keys = &self.keys[context][1..self.symbols];
        keys.iter().filter(|row| u32::from(slot_of(row[lane])) <= slot).count()
    }

    /// Whether any lane has low bits.
    pub fn any_low_bits(&self) -> bool {
        self.low_bits.iter().any(|&bits| bits > 0)
    }

    /// Removes the low bits of all lanes, if they have the same number of them, and returns it.
    pub fn take_low_bits(&mut self) -> Option<u32> {
        let bits = self.low_bits[0];
        let equal = bits > 0 && self.low_bits[..self.lanes].iter().all(|&other| other == bits);
        equal.then(|| {
            self.low_bits = [0; LANES];
            bits
        })
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
