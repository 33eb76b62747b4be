//! Interleaved range-ANS: 32 lanes, each its own coder with its own models, in one stream.
//!
//! A lane's state is below 2^32; words are 16 bits. In a row (one token), every lane first decodes its symbol and, in lane
//! order, those whose state fell below 2^16 take a word; then the same again for the low bits, if any lane has some. Lanes
//! that decode together are thus a warp or a vector, and no lane needs to know the others' models.
//!
//! A state starts at 0 in the encoder, which works backwards, and must be 0 again when everything is decoded. In the last
//! `warmup` rows no words are taken; before them, states that would be below 2^16 carry 2^16 more. The states after the last
//! row are written with their lengths. A tile of 32 lanes so begins with about 60 bytes that carry nothing, where a start at
//! 2^16 and states of four bytes would be 96.

#[cfg(feature = "alloc")]
use alloc::vec;
#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use crate::model::{PRECISION, SLOTS};
use crate::simd::{Kernel, Simd};
use crate::tables::{ESCAPE, LANES, Row, TileTables};
use crate::{Backend, Error};

/// States below take a word.
const LOW: u32 = 1 << 16;

/// Decodes the rows of one tile in order.
pub(crate) struct Decoder<'a, const C: usize> {
    tables: &'a TileTables<C>,
    backend: Backend,
    states: [u32; LANES],
    contexts: Row,
    words: &'a [u8],
    warmup: usize,
    carrying: u32, // one bit a lane: takes LOW away when the warm-up begins
    left: usize,   // rows
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

    /// Checks that the stream ended where the rows did.
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

/// Returns the words that are left.
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

    /// The symbol of a lane is the number of its starts at or below its slot: eight comparisons of all lanes at a time, until
    /// no lane has more. Floor at 32 lanes: 4 operations a symbol compared, about 30 for a state and its refill.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> Self::Output {
        /// Most that a row takes, twice a word for each lane, and what the last load reads beyond it.
        const ROW_BYTES: usize = 2 * 2 * LANES + 64;
        if C > 1 {
            return self.scalar();
        }
        let starts = &self.tables.starts[0];
        let escape = s.load(&self.tables.escape[0]);
        let low_bits = s.load_wide(&self.tables.low_bits);
        let any_low_bits = self.tables.any_low_bits();
        let escaped = s.splat(ESCAPE);
        let mut states = s.load_wide(self.states);
        let mut words = self.words;
        // The last rows read from a copy, behind which there is room.
        let mut tail = [0; 2 * ROW_BYTES];
        let mut in_tail = false;
        let mut at = words.as_ptr();
        let mut left = words.len() as isize;
        for row in &mut *self.rows {
            if self.refill && !in_tail && left < ROW_BYTES as isize {
                words = &words[words.len() - left as usize..];
                tail[..words.len()].copy_from_slice(words);
                at = tail.as_ptr();
                in_tail = true;
            }
            let slots = s.slots(states);
            let (mut symbol, mut start, mut end) = (s.splat(0), s.splat(0), s.load(&starts[1]));
            for bounds in starts[1..].windows(AT_ONCE + 1).step_by(AT_ONCE) {
                if !s.any(s.at_least(slots, s.load(&bounds[0]))) {
                    break;
                }
                for pair in bounds.windows(2) {
                    let beyond = s.at_least(slots, s.load(&pair[0]));
                    start = s.select(beyond, s.load(&pair[0]), start);
                    end = s.select(beyond, s.load(&pair[1]), end);
                    symbol = s.count(beyond, symbol);
                }
            }
            states = s.advance(states, s.sub(end, start), s.sub(slots, start));
            if self.refill {
                // SAFETY: fewer than ROW_BYTES are read before `left` is looked at again.
                let used = unsafe { s.refill(&mut states, at) };
                at = at.wrapping_add(used);
                left -= used as isize;
            }
            let escapes = s.at_least(symbol, escape);
            if any_low_bits {
                (states, symbol) = s.take_low_bits(states, symbol, low_bits);
                if self.refill {
                    // SAFETY: as above.
                    let used = unsafe { s.refill(&mut states, at) };
                    at = at.wrapping_add(used);
                    left -= used as isize;
                }
            }
            s.store(row, s.select(escapes, escaped, symbol));
            if left < 0 {
                return Err(Error::Truncated);
            }
        }
        s.store_wide(self.states, states);
        Ok(&self.words[self.words.len() - left as usize..])
    }
}

/// Reads the states: for each lane four bits, how many bits more than 16 stand behind its highest one, then those bits,
/// lowest first. Returns the bytes behind them as well.
fn read_states(lanes: usize, bytes: &[u8]) -> Result<([u32; LANES], &[u8]), Error> {
    let (lengths, mut rest) = bytes.split_at_checked(lanes.div_ceil(2)).ok_or(Error::Truncated)?;
    let mut states = [LOW; LANES]; // of lanes without a channel, which never change
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

/// Writes states of 2^16 and more as [`read_states`] reads them.
#[cfg(feature = "alloc")]
fn write_states(states: &[u32], out: &mut Vec<u8>) {
    let below = |state: u32| state.ilog2();
    for pair in states.chunks(2) {
        let nibble = |i: usize| pair.get(i).map_or(0, |&state| below(state) as u8 - 16);
        out.push(nibble(0) | nibble(1) << 4);
    }
    let (mut buffer, mut filled) = (0_u64, 0);
    for &state in states {
        buffer |= u64::from(state & ((1 << below(state)) - 1)) << filled;
        filled += below(state);
        while filled >= 8 {
            out.push(buffer as u8);
            buffer >>= 8;
            filled -= 8;
        }
    }
    if filled > 0 {
        out.push(buffer as u8);
    }
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

/// Appends the stream of `rows` to `out`. A code from its lane's escape on is coded as the escape, with low bits of zero.
#[cfg(feature = "alloc")]
pub(crate) fn encode<const C: usize>(
    tables: &TileTables<C>,
    backend: Backend,
    rows: &[Row],
    out: &mut Vec<u8>,
) {
    let lanes = tables.lanes;
    let mut states = [LOW; LANES]; // of lanes without a channel, which never change
    states[..lanes].fill(0);
    let mut warmup = 0;
    while warmup < rows.len().min(u16::MAX.into()) {
        let Some(next) = encode_without_words(tables, rows, rows.len() - 1 - warmup, &states) else { break };
        states = next;
        warmup += 1;
    }
    let mut carrying = 0_u32;
    for (lane, state) in states.iter_mut().enumerate() {
        if *state < LOW {
            *state += LOW;
            carrying |= 1 << lane;
        }
    }
    let coded = rows.len() - warmup;
    let mut words = vec![0; SLACK + 2 * lanes * coded];
    let (rows, states_mut, all) = (&rows[..coded], &mut states, &mut words[..]);
    let first = backend.run(EncodeRows { tables, rows, states: states_mut, words: all });
    out.extend_from_slice(&(warmup as u16).to_le_bytes());
    out.extend_from_slice(&carrying.to_le_bytes());
    write_states(&states[..lanes], out);
    words[first..].iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

/// Words before the first one that vectors may write over.
#[cfg(feature = "alloc")]
const SLACK: usize = 16;

/// Codes rows last first; words fill their slice from the end. Returns where they begin.
#[cfg(feature = "alloc")]
struct EncodeRows<'a, const C: usize> {
    tables: &'a TileTables<C>,
    rows: &'a [Row],
    states: &'a mut [u32; LANES],
    words: &'a mut [u16], // SLACK and twice a word for every code
}

#[cfg(feature = "alloc")]
impl<const C: usize> Kernel for EncodeRows<'_, C> {
    type Output = usize;

    fn scalar(self) -> usize {
        let Self { tables, rows, states, words } = self;
        let low_bits = tables.any_low_bits();
        let mut first = words.len();
        for t in (0..rows.len()).rev() {
            for lane in (0..tables.lanes).rev().filter(|_| low_bits) {
                let bits = tables.low_bits[lane];
                push(u64::from(states[lane]) << bits >= 1 << 32, &mut states[lane], words, &mut first);
                states[lane] = states[lane] << bits | low(tables, rows, t, lane);
            }
            for lane in (0..tables.lanes).rev() {
                let (start, end) = slots(tables, rows, t, lane);
                let width = end - start;
                push(states[lane] >> (32 - PRECISION) >= width, &mut states[lane], words, &mut first);
                states[lane] = ((states[lane] / width) << PRECISION) + states[lane] % width + start;
            }
        }
        first
    }

    /// Slots are found as the decoder finds symbols, by comparing all lanes with eight symbols at a time; the quotient by a
    /// reciprocal in floats, off by one at most, then corrected.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> usize {
        if C > 1 {
            return self.scalar();
        }
        let Self { tables, rows, states, words } = self;
        let starts = &tables.starts[0];
        let escape = s.load(&tables.escape[0]);
        let (any_low_bits, low_bits) = (tables.any_low_bits(), s.load_wide(&tables.low_bits));
        let base = words.as_mut_ptr();
        let mut first = words.len();
        let mut state = s.load_wide(states);
        for row in rows.iter().rev() {
            let (symbol, low) = s.split(s.load(row), low_bits);
            let symbol = s.min(symbol, escape);
            let escapes = s.at_least(symbol, escape);
            let (mut start, mut end) = (s.splat(0), s.load(&starts[1]));
            let mut next = s.splat(1);
            for bounds in starts[1..].windows(AT_ONCE + 1).step_by(AT_ONCE) {
                if !s.any(s.at_least(symbol, next)) {
                    break;
                }
                for pair in bounds.windows(2) {
                    let reached = s.at_least(symbol, next);
                    start = s.select(reached, s.load(&pair[0]), start);
                    end = s.select(reached, s.load(&pair[1]), end);
                    next = s.sub(next, s.splat(u16::MAX));
                }
            }
            // SAFETY: a row pushes at most two words a lane, for which there is room, and writes over SLACK words before them.
            unsafe {
                if any_low_bits {
                    first -= s.spill(&mut state, s.sub_from_32(low_bits), s.splat_wide(1), base.add(first));
                    state = s.join(state, s.select(escapes, s.splat(0), low), low_bits);
                }
                let width = s.sub(end, start);
                first -= s.spill(&mut state, s.splat_wide(32 - PRECISION), s.widen(width), base.add(first));
                state = s.encode(state, start, width);
            }
        }
        s.store_wide(states, state);
        first
    }
}

/// Symbols compared between two looks whether any lane has a higher one.
const AT_ONCE: usize = 8;

/// The states before row `t`, or none if one would need a word.
#[cfg(feature = "alloc")]
fn encode_without_words<const C: usize>(
    tables: &TileTables<C>,
    rows: &[Row],
    t: usize,
    states: &[u32; LANES],
) -> Option<[u32; LANES]> {
    let mut states = *states;
    for (lane, state) in states[..tables.lanes].iter_mut().enumerate() {
        let with_low = u64::from(*state) << tables.low_bits[lane] | u64::from(low(tables, rows, t, lane));
        let (start, end) = slots(tables, rows, t, lane);
        let width = u64::from(end - start);
        let next = ((with_low / width) << PRECISION) + with_low % width + u64::from(start);
        *state = u32::try_from(next).ok().filter(|_| with_low < 1 << 32)?;
    }
    Some(states)
}

#[cfg(feature = "alloc")]
fn push(needed: bool, state: &mut u32, words: &mut [u16], first: &mut usize) {
    if needed {
        *first -= 1;
        words[*first] = *state as u16;
        *state >>= 16;
    }
}

/// The symbol of a lane in row `t`, and its context.
#[cfg(feature = "alloc")]
fn symbol<const C: usize>(tables: &TileTables<C>, rows: &[Row], t: usize, lane: usize) -> (usize, u16) {
    let bits = tables.low_bits[lane];
    let context = if t == 0 { 0 } else { TileTables::<C>::context_after(rows[t - 1][lane], bits) };
    (context, (rows[t][lane] >> bits).min(tables.escape[context][lane]))
}

/// The slots of that symbol.
#[cfg(feature = "alloc")]
fn slots<const C: usize>(tables: &TileTables<C>, rows: &[Row], t: usize, lane: usize) -> (u32, u32) {
    let (context, symbol) = symbol(tables, rows, t, lane);
    tables.slots(context, symbol.into(), lane)
}

/// The low bits of a lane in row `t`; those of an escape are zero.
#[cfg(feature = "alloc")]
fn low<const C: usize>(tables: &TileTables<C>, rows: &[Row], t: usize, lane: usize) -> u32 {
    let (context, symbol) = symbol(tables, rows, t, lane);
    let mask = (1 << tables.low_bits[lane]) - 1;
    if symbol == tables.escape[context][lane] { 0 } else { u32::from(rows[t][lane]) & mask }
}
