//! The encoder of interleaved rANS, which writes a tile's words from the last row to the first.

use alloc::vec;
use alloc::vec::Vec;

use super::{AT_ONCE, LOW};
use crate::Backend;
use crate::model::slots::PRECISION;
use crate::model::tables::{LANES, Row, TileTables};
use crate::simd::{Kernel, SPILL_WORDS, Simd};

/// Appends the stream of `rows` to `out`. A code from its lane's escape on is encoded as the escape with low
/// bits of zero.
pub(crate) fn encode<const C: usize>(
    tables: &TileTables<C>,
    backend: Backend,
    rows: &[Row],
    out: &mut Vec<u8>,
) {
    let lanes = tables.lanes;
    let mut states = [LOW; LANES]; // unused lanes keep this state
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
    let per_code = if tables.any_low_bits() { 2 } else { 1 };
    let mut words = vec![0; SPILL_WORDS + per_code * lanes * coded];
    let (rows, states_mut, all) = (&rows[..coded], &mut states, &mut words[..]);
    let first = backend.run(EncodeRows { tables, rows, states: states_mut, words: all });
    out.extend_from_slice(&(warmup as u16).to_le_bytes());
    out.extend_from_slice(&carrying.to_le_bytes());
    write_states(&states[..lanes], out);
    put_words(&words[first..], out);
}

/// Appends words.
pub(crate) fn put_words(words: &[u16], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + 2 * words.len(), 0);
    let bytes = out[start..].as_chunks_mut::<2>().0;
    bytes.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
}

/// Encodes rows from the last to the first and fills `words` from the end. Returns the index of the first
/// word.
struct EncodeRows<'a, const C: usize> {
    tables: &'a TileTables<C>,
    rows: &'a [Row],
    states: &'a mut [u32; LANES],
    words: &'a mut [u16], // SPILL_WORDS, and for every code one, or two if there are low bits
}

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

    /// As in the decoder, all lanes compare with eight symbols at a time to select slots. The quotient uses a
    /// float reciprocal, which is off by at most one and then corrected.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> usize {
        if C > 1 {
            return self.scalar();
        }
        let Self { tables, rows, states, words } = self;
        let keys = &tables.keys[0];
        // Codes of unused lanes become symbol 0, which takes no bits.
        let mut escape = tables.escape[0];
        escape[tables.lanes..].fill(0);
        let escape = s.load(&escape);
        let (any_low_bits, low_bits) = (tables.any_low_bits(), s.load_wide(&tables.low_bits));
        let mut first = words.len();
        let mut state = s.load_wide(states);
        for row in rows.iter().rev() {
            let (symbol, low) = s.split(s.load(row), low_bits);
            let symbol = s.min(symbol, escape);
            let escapes = s.at_least(symbol, escape);
            let (mut start, mut end) = (s.splat(0), s.load(&keys[1]));
            let mut next = s.splat(1);
            for bounds in keys[1..].windows(AT_ONCE + 1).step_by(AT_ONCE) {
                if !s.any(s.at_least(symbol, next)) {
                    break;
                }
                for pair in bounds.windows(2) {
                    let reached = s.at_least(symbol, next);
                    start = s.select(reached, s.load(&pair[0]), start);
                    end = s.select(reached, s.load(&pair[1]), end);
                    next = s.add(next, s.splat(1));
                }
            }
            if any_low_bits {
                let below = s.sub_from_32(low_bits);
                first -= s.spill(&mut state, below, s.splat_wide(1), &mut words[..first]);
                state = s.join(state, s.select(escapes, s.splat(0), low), low_bits);
            }
            let start = s.slots_of(start);
            let width = s.sub(s.slots_of(end), start);
            let above = s.splat_wide(32 - PRECISION);
            first -= s.spill(&mut state, above, s.widen(width), &mut words[..first]);
            state = s.encode(state, start, width);
        }
        s.store_wide(states, state);
        first
    }
}

/// The states after encoding row `t`, or none if a lane would have to write a word.
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

fn push(needed: bool, state: &mut u32, words: &mut [u16], first: &mut usize) {
    if needed {
        *first -= 1;
        words[*first] = *state as u16;
        *state >>= 16;
    }
}

/// The symbol of a lane in row `t`, and its context.
fn symbol<const C: usize>(tables: &TileTables<C>, rows: &[Row], t: usize, lane: usize) -> (usize, u16) {
    let bits = tables.low_bits[lane];
    let context = if t == 0 { 0 } else { TileTables::<C>::context_after(rows[t - 1][lane], bits) };
    (context, (rows[t][lane] >> bits).min(tables.escape[context][lane]))
}

/// The slots of that symbol.
fn slots<const C: usize>(tables: &TileTables<C>, rows: &[Row], t: usize, lane: usize) -> (u32, u32) {
    let (context, symbol) = symbol(tables, rows, t, lane);
    tables.slots(context, symbol.into(), lane)
}

/// The low bits of a lane in row `t`, zero for an escape.
fn low<const C: usize>(tables: &TileTables<C>, rows: &[Row], t: usize, lane: usize) -> u32 {
    let (context, symbol) = symbol(tables, rows, t, lane);
    let mask = (1 << tables.low_bits[lane]) - 1;
    if symbol == tables.escape[context][lane] { 0 } else { u32::from(rows[t][lane]) & mask }
}

/// Writes states of at least 2^16 in the layout that `read_states` reads.
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
