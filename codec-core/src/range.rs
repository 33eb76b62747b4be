//! Schindler's range coder with carry propagation, as in LZMA: an arithmetic coder that writes bytes.
//!
//! The encoder's interval is `low .. low + range`. Bytes that a carry out of `low` could still change are
//! held back.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use crate::Error;

/// Renormalization shifts in a byte if the range is below this bound.
const TOP: u32 = 1 << 24;

#[cfg(feature = "alloc")]
pub(crate) struct Encoder<'a> {
    out: &'a mut Vec<u8>,
    low: u64, // below 1 << 33; bit 32 is the carry
    range: u32,
    held: u8,       // the last byte that a carry may increment
    held_ff: usize, // number of 0xff bytes after it
    started: bool,  // whether `held` is a real byte
}

#[cfg(feature = "alloc")]
impl<'a> Encoder<'a> {
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, low: 0, range: u32::MAX, held: 0, held_ff: 0, started: false }
    }

    /// Codes the interval `start..start + width` of `0..1 << bits`; `width > 0`, `bits <= 16`.
    pub fn encode(&mut self, start: u32, width: u32, bits: u32) {
        let unit = self.range >> bits;
        self.low += u64::from(unit) * u64::from(start);
        self.range = unit * width;
        while self.range < TOP {
            self.range <<= 8;
            self.shift_low();
        }
    }

    pub fn finish(mut self) {
        for _ in 0..4 {
            self.shift_low();
        }
        self.emit_held(0);
    }

    fn shift_low(&mut self) {
        if self.low < 0xff00_0000 || self.low > u64::from(u32::MAX) {
            let carry = (self.low >> 32) as u8;
            self.emit_held(carry);
            self.held = (self.low >> 24) as u8;
            self.started = true;
        } else {
            self.held_ff += 1;
        }
        self.low = (self.low & 0x00ff_ffff) << 8;
    }

    fn emit_held(&mut self, carry: u8) {
        if self.started {
            self.out.push(self.held.wrapping_add(carry));
        }
        let filler = 0xff_u8.wrapping_add(carry);
        self.out.extend(core::iter::repeat_n(filler, self.held_ff));
        self.held_ff = 0;
    }
}

pub(crate) struct Decoder<'a> {
    bytes: &'a [u8],
    code: u32, // position inside the interval, below `range`
    range: u32,
}

impl<'a> Decoder<'a> {
    pub fn new(bytes: &'a [u8]) -> Result<Self, Error> {
        let (head, rest) = bytes.split_first_chunk::<4>().ok_or(Error::Truncated)?;
        Ok(Self { bytes: rest, code: u32::from_be_bytes(*head), range: u32::MAX })
    }

    /// Decodes `bits` bits of equal probabilities.
    pub fn decode_bits(&mut self, bits: u32) -> Result<u32, Error> {
        let unit = self.range >> bits;
        let value = (self.code / unit).min((1 << bits) - 1);
        self.consume(unit, value, 1)?;
        Ok(value)
    }

    /// Decodes a symbol: `find` returns the symbol whose slots contain a slot below `1 << bits`, and its
    /// slots.
    pub fn decode(
        &mut self,
        bits: u32,
        find: impl FnOnce(u32) -> (usize, (u32, u32)),
    ) -> Result<usize, Error> {
        let unit = self.range >> bits;
        let slot = (self.code / unit).min((1 << bits) - 1);
        let (symbol, (start, end)) = find(slot);
        self.consume(unit, start, end - start)?;
        Ok(symbol)
    }

    /// Checks that all bytes have been consumed.
    pub fn finish(self) -> Result<(), Error> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Error::TrailingBytes) }
    }

    fn consume(&mut self, unit: u32, start: u32, width: u32) -> Result<(), Error> {
        self.code -= unit * start; // start <= code / unit
        self.range = unit * width;
        while self.range < TOP {
            let (&byte, rest) = self.bytes.split_first().ok_or(Error::Truncated)?;
            self.bytes = rest;
            self.code = self.code.wrapping_shl(8) | u32::from(byte);
            self.range <<= 8;
        }
        Ok(())
    }
}
