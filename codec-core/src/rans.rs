//! Interleaved range-ANS (rANS): 32 lanes, each a coder with its own models, in one stream.
//!
//! A lane's state is below 2^32; words have 16 bits. In a row (one token), every lane first decodes its
//! symbol; then, in lane order, the lanes whose state fell below 2^16 read a word (renormalization). If any
//! lane has low bits, both steps repeat for them. The lanes can thus decode together in a warp or a vector,
//! and no lane depends on the models of others.
//!
//! The encoder works backwards. Its states start at 0, and must be 0 again after the last row is decoded. In
//! the last `warmup` rows no words are read; before them, 2^16 is added to states below 2^16. The stream
//! starts with the encoder's final states, each with its length.
//!
//! N.B. At two bits per symbol, a tile of 256 tokens is 46 bytes (2 %) larger than that of one range coder.
//! States of fixed four bytes would add 20 bytes. A word count per lane would avoid the warm-up, but costs as
//! much as it saves.

#[cfg(feature = "alloc")]
mod encode;

use crate::model::slots::{MAX_SYMBOLS, PRECISION, SLOTS};
use crate::model::tables::{ESCAPE, KEY_BITS, LANES, Row, TileTables};
use crate::simd::{Kernel, REFILL_BYTES, Simd};
use crate::{Backend, Error};

#[cfg(feature = "alloc")]
pub(crate) use encode::{encode, put_words};

/// States below this bound read a word.
const LOW: u32 = 1 << 16;

/// Decodes the rows of one tile in order.
pub(crate) struct Decoder<'a, const C: usize> {
    tables: &'a TileTables<C>,
    backend: Backend,
    states: [u32; LANES],
    contexts: Row,
    words: &'a [u8],
    warmup: usize,
    carrying: u32, // one bit per lane: LOW is subtracted when the warm-up rows begin
    left: usize,   // rows not decoded yet
}

impl<'a, const C: usize> Decoder<'a, C> {
    pub fn new(
        tables: &'a TileTables<C>,
        backend: Backend,
        rows: usize,
        bytes: &'a [u8],
    ) -> Result<Self, Error> {
        let (&[low, high, carrying @ ..], rest) = bytes.split_first_chunk::<6>().ok_or(Error::Truncated)?;
        let warmup = usize::from(u16::from_le_bytes([low, high]));
        let carrying = u32::from_le_bytes(carrying);
        if warmup > rows {
            return Err(Error::Corrupt);
        }
        let (states, words) = read_states(tables.lanes, rest)?;
        Ok(Self { tables, backend, states, contexts: [0; LANES], words, warmup, carrying, left: rows })
    }

    /// Decodes the next rows.
    pub fn decode(&mut self, rows: &mut [Row]) -> Result<(), Error> {
        let with_words = self.left.saturating_sub(self.warmup).min(rows.len());
        let (first, last) = rows.split_at_mut(with_words);
        self.run(first, true)?;
        self.left -= first.len();
        if self.left == self.warmup && self.carrying != 0 {
            self.drop_carried()?;
        }
        self.run(last, false)?;
        self.left -= last.len();
        Ok(())
    }

    /// Checks that the stream ends after the last row.
    pub fn finish(self) -> Result<(), Error> {
        if !self.words.is_empty() {
            return Err(Error::TrailingBytes);
        }
        if self.states[..self.tables.lanes].iter().any(|&state| state != 0) {
            return Err(Error::Corrupt);
        }
        Ok(())
    }

    fn drop_carried(&mut self) -> Result<(), Error> {
        for (lane, state) in self.states.iter_mut().enumerate() {
            if self.carrying >> lane & 1 == 1 {
                *state = state.checked_sub(LOW).ok_or(Error::Corrupt)?;
            }
        }
        self.carrying = 0;
        Ok(())
    }

    fn run(&mut self, rows: &mut [Row], refill: bool) -> Result<(), Error> {
        let Self { tables, ref mut states, ref mut contexts, words, .. } = *self;
        let kernel = DecodeRows { tables, states, contexts, words, rows, refill };
        self.words = self.backend.run(kernel)?;
        Ok(())
    }
}

/// Decodes rows and returns the words not consumed.
struct DecodeRows<'a, 'b, const C: usize> {
    tables: &'a TileTables<C>,
    states: &'b mut [u32; LANES],
    contexts: &'b mut Row,
    words: &'a [u8],
    rows: &'b mut [Row],
    refill: bool,
}

impl<'a, const C: usize> Kernel for DecodeRows<'a, '_, C> {
    type Output = Result<&'a [u8], Error>;

    fn scalar(mut self) -> Self::Output {
        let low_bits = self.tables.any_low_bits();
        for row in &mut *self.rows {
            for (lane, code) in row.iter_mut().enumerate() {
                let context = usize::from(self.contexts[lane]);
                let slot = self.states[lane] & u32::from(SLOTS - 1);
                let symbol = self.tables.find(context, lane, slot);
                let (start, end) = self.tables.slots(context, symbol, lane);
                self.states[lane] = (end - start) * (self.states[lane] >> PRECISION) + slot - start;
                let (bits, escaped) = (self.tables.low_bits[lane], self.tables.escape[context][lane]);
                *code = if symbol as u16 == escaped { ESCAPE } else { (symbol as u16) << bits };
                self.contexts[lane] = TileTables::<C>::context_after(*code, bits) as u16;
                if self.refill {
                    refill(&mut self.states[lane], &mut self.words)?;
                }
            }
            if low_bits {
                for (lane, code) in row.iter_mut().enumerate() {
                    let bits = self.tables.low_bits[lane];
                    *code |= (self.states[lane] & ((1 << bits) - 1)) as u16; // an escape stays one
                    self.states[lane] >>= bits;
                    if self.refill {
                        refill(&mut self.states[lane], &mut self.words)?;
                    }
                }
            }
        }
        Ok(self.words)
    }

    /// All lanes take the distances from the keys of eight symbols at a time to their slot's last key, until
    /// no lane has a higher symbol. The smallest distance is that of the lane's symbol; that of the next
    /// symbol, which wraps around, is the largest. Floor for a register of lanes: 3 operations per symbol,
    /// and about 30 for the state update and the renormalization.
    ///
    /// N.B. Comparing slots with first slots, selecting both bounds and counting takes 4 to 5 operations.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> Self::Output {
        if C > 1 {
            return self.scalar();
        }
        let mut rows = VectorRows {
            s,
            keys: &self.tables.keys[0],
            escape: s.load(&self.tables.escape[0]),
            low_bits: s.load_wide(&self.tables.low_bits),
            any_low_bits: self.tables.any_low_bits(),
            refill: self.refill,
            states: s.load_wide(self.states),
        };
        let (done, used) = rows.decode(self.rows, self.words, self.words.len())?;
        let (mut words, rest) = (&self.words[used..], &mut self.rows[done..]);
        if !rest.is_empty() {
            // The last rows read from a padded copy, since vector loads reach past the words of a row.
            let mut tail = [0; 2 * ROW_BYTES];
            tail[..words.len()].copy_from_slice(words);
            let (_, used) = rows.decode(rest, &tail, words.len())?;
            words = &words[used..];
        }
        s.store_wide(self.states, rows.states);
        Ok(words)
    }
}

/// Bytes that a row may load: two words per lane, and the excess of the last vector load.
const ROW_BYTES: usize = 2 * LANES + REFILL_BYTES;

/// The registers of the vector implementation.
struct VectorRows<'a, S: Simd> {
    s: S,
    keys: &'a [Row; MAX_SYMBOLS + 2],
    escape: S::Row,
    low_bits: S::Wide,
    any_low_bits: bool,
    refill: bool,
    states: S::Wide,
}

impl<S: Simd> VectorRows<'_, S> {
    /// Decodes rows while [`ROW_BYTES`] can be loaded; only `len` bytes are words. Returns the rows decoded
    /// and bytes consumed.
    #[inline(always)]
    fn decode(&mut self, rows: &mut [Row], words: &[u8], len: usize) -> Result<(usize, usize), Error> {
        let s = self.s;
        let (mut states, mut used) = (self.states, 0);
        let mut done = 0;
        for row in rows {
            if self.refill && words.len() - used < ROW_BYTES {
                break;
            }
            let slots = s.slots(states);
            let key = s.last_keys(slots);
            let (mut nearest, mut next, mut group) = (key, key, s.splat(0));
            for (first, keys) in (0_u16..).step_by(AT_ONCE).zip(self.keys[1..].chunks_exact(AT_ONCE)) {
                if first > 0 {
                    let beyond = s.at_least(slots, s.slots_of(s.load(&self.keys[usize::from(first)])));
                    if !s.any(beyond) {
                        break;
                    }
                    group = s.select(beyond, s.splat(first), group);
                }
                for symbol in keys {
                    let distance = s.sub(key, s.load(symbol));
                    nearest = s.min(nearest, distance);
                    next = s.max(next, distance);
                }
            }
            let offset = s.slots_of(nearest);
            let symbol = s.add(group, s.sub(s.last_keys(offset), nearest));
            // From this slot to the end of the symbol's slots.
            let left = s.add(s.slots_of(s.sub(s.splat(u16::MAX), next)), s.splat(1));
            states = s.advance(states, s.add(offset, left), offset);
            if self.refill {
                used += s.refill(&mut states, &words[used..]);
            }
            let escapes = s.at_least(symbol, self.escape);
            let mut symbol = symbol;
            if self.any_low_bits {
                (states, symbol) = s.take_low_bits(states, symbol, self.low_bits);
                if self.refill {
                    used += s.refill(&mut states, &words[used..]);
                }
            }
            s.store(row, s.select(escapes, s.splat(ESCAPE), symbol));
            if used > len {
                return Err(Error::Truncated);
            }
            done += 1;
        }
        self.states = states;
        Ok((done, used))
    }
}

/// Reads the states: for each lane four bits, which are the position of its highest one bit minus 16, then
/// the bits below it, lowest first. Also returns the bytes that follow.
fn read_states(lanes: usize, bytes: &[u8]) -> Result<([u32; LANES], &[u8]), Error> {
    let (lengths, mut rest) = bytes.split_at_checked(lanes.div_ceil(2)).ok_or(Error::Truncated)?;
    let mut states = [LOW; LANES]; // unused lanes keep this state
    let (mut buffer, mut filled) = (0_u64, 0);
    for (lane, state) in states[..lanes].iter_mut().enumerate() {
        let below = 16 + u32::from(lengths[lane / 2] >> (4 * (lane % 2)) & 15);
        while filled < below {
            let (&byte, after) = rest.split_first().ok_or(Error::Truncated)?;
            buffer |= u64::from(byte) << filled;
            filled += 8;
            rest = after;
        }
        *state = 1 << below | buffer as u32 & ((1 << below) - 1);
        buffer >>= below;
        filled -= below;
    }
    if buffer == 0 { Ok((states, rest)) } else { Err(Error::Corrupt) }
}

#[inline(always)]
fn refill(state: &mut u32, words: &mut &[u8]) -> Result<(), Error> {
    if *state < LOW {
        let (word, rest) = words.split_first_chunk::<2>().ok_or(Error::Truncated)?;
        *state = *state << 16 | u32::from(u16::from_le_bytes(*word));
        *words = rest;
    }
    Ok(())
}

/// Symbols compared between two checks whether any lane has a higher one.
pub(super) const AT_ONCE: usize = 1 << KEY_BITS;
