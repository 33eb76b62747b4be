//! Other coders: constriction under the same models, zstd on the symbols, and the coder of torchac, CacheGen
//! and LMCache.

use constriction::stream::model::{ContiguousCategoricalEntropyModel, ContiguousLookupDecoderModel};
use constriction::stream::queue::{
    DefaultRangeDecoder, DefaultRangeEncoder, RangeDecoder, SmallRangeEncoder,
};
use constriction::stream::stack::{AnsCoder, DefaultAnsCoder};
use constriction::stream::{Decode, Encode};

use crate::data::{CHANNELS, Unit};
use crate::{Coder, Decoded};

pub fn all() -> Vec<Box<dyn Coder>> {
    vec![
        Box::new(Range24),
        Box::new(Range12),
        Box::new(Ans24),
        Box::new(Ans12),
        Box::new(Bitwise),
        Box::new(Zstd(1)),
        Box::new(Zstd(3)),
    ]
}

type Precise = ContiguousCategoricalEntropyModel<u32, Vec<u32>, 24>;
type Short = ContiguousCategoricalEntropyModel<u16, Vec<u16>, 12>;
type LookUp = ContiguousLookupDecoderModel<u16, Vec<u16>, Box<[u16]>, 12>;

fn precise(unit: &Unit, channel: usize) -> Precise {
    let widths = widths(unit, channel).iter().map(|&width| u32::from(width) << 12);
    Precise::from_nonzero_fixed_point_probabilities(widths, false).unwrap()
}

fn short(unit: &Unit, channel: usize) -> Short {
    Short::from_nonzero_fixed_point_probabilities(widths(unit, channel).iter().copied(), false).unwrap()
}

fn look_up(unit: &Unit, channel: usize) -> LookUp {
    LookUp::from_nonzero_fixed_point_probabilities(widths(unit, channel).iter().copied(), false).unwrap()
}

fn widths(unit: &Unit, channel: usize) -> &[u16] {
    &unit.widths[channel * unit.alphabet..][..unit.alphabet]
}

fn channels(
    unit: &Unit,
) -> impl DoubleEndedIterator<Item = (usize, impl DoubleEndedIterator<Item = usize> + '_)> {
    (0..CHANNELS).map(|channel| {
        let symbols = &unit.symbols[channel * unit.tokens..][..unit.tokens];
        (channel, symbols.iter().map(|&symbol| usize::from(symbol)))
    })
}

fn fill<E: std::fmt::Debug>(out: &mut [u8], symbols: impl Iterator<Item = Result<usize, E>>) {
    out.iter_mut().zip(symbols).for_each(|(out, symbol)| *out = symbol.unwrap() as u8);
}

fn bytes_of_u32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn bytes_of_u16(words: &[u16]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words32(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

fn words16(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks::<2>().0.iter().map(|&word| u16::from_le_bytes(word)).collect()
}

struct Range24;
impl Coder for Range24 {
    fn name(&self) -> String {
        "constriction range, 24 bits, one stream per plane".into()
    }
    fn encode(&self, unit: &Unit) -> Vec<u8> {
        let mut encoder = DefaultRangeEncoder::new();
        for (channel, symbols) in channels(unit) {
            encoder.encode_iid_symbols(symbols, &precise(unit, channel)).unwrap();
        }
        bytes_of_u32(&encoder.into_compressed().unwrap())
    }
    fn decode(&self, unit: &Unit, bytes: &[u8], out: &mut Decoded) {
        let mut decoder = DefaultRangeDecoder::from_compressed(words32(bytes)).unwrap();
        for (channel, out) in out.symbols.chunks_exact_mut(unit.tokens).enumerate() {
            fill(out, decoder.decode_iid_symbols(unit.tokens, &precise(unit, channel)));
        }
    }
}

struct Range12;
impl Coder for Range12 {
    fn name(&self) -> String {
        "constriction range, 12 bits, look-up decoder".into()
    }
    fn encode(&self, unit: &Unit) -> Vec<u8> {
        let mut encoder = SmallRangeEncoder::new();
        for (channel, symbols) in channels(unit) {
            encoder.encode_iid_symbols(symbols, &short(unit, channel)).unwrap();
        }
        bytes_of_u16(&encoder.into_compressed().unwrap())
    }
    fn decode(&self, unit: &Unit, bytes: &[u8], out: &mut Decoded) {
        let mut decoder = RangeDecoder::<u16, u32, _>::from_compressed(words16(bytes)).unwrap();
        for (channel, out) in out.symbols.chunks_exact_mut(unit.tokens).enumerate() {
            fill(out, decoder.decode_iid_symbols(unit.tokens, &look_up(unit, channel)));
        }
    }
}

struct Ans24;
impl Coder for Ans24 {
    fn name(&self) -> String {
        "constriction ANS, 24 bits, one stream per plane".into()
    }
    fn encode(&self, unit: &Unit) -> Vec<u8> {
        let mut encoder = DefaultAnsCoder::new();
        for (channel, symbols) in channels(unit).rev() {
            encoder.encode_iid_symbols_reverse(symbols, &precise(unit, channel)).unwrap();
        }
        bytes_of_u32(&encoder.into_compressed().unwrap())
    }
    fn decode(&self, unit: &Unit, bytes: &[u8], out: &mut Decoded) {
        let mut decoder = DefaultAnsCoder::from_compressed(words32(bytes)).unwrap();
        for (channel, out) in out.symbols.chunks_exact_mut(unit.tokens).enumerate() {
            fill(out, decoder.decode_iid_symbols(unit.tokens, &precise(unit, channel)));
        }
    }
}

struct Ans12;
impl Coder for Ans12 {
    fn name(&self) -> String {
        "constriction ANS, 12 bits, look-up decoder".into()
    }
    fn encode(&self, unit: &Unit) -> Vec<u8> {
        let mut encoder = AnsCoder::<u16, u32>::new();
        for (channel, symbols) in channels(unit).rev() {
            encoder.encode_iid_symbols_reverse(symbols, &short(unit, channel)).unwrap();
        }
        bytes_of_u16(&encoder.into_compressed().unwrap())
    }
    fn decode(&self, unit: &Unit, bytes: &[u8], out: &mut Decoded) {
        let mut decoder = AnsCoder::<u16, u32>::from_compressed(words16(bytes)).unwrap();
        for (channel, out) in out.symbols.chunks_exact_mut(unit.tokens).enumerate() {
            fill(out, decoder.decode_iid_symbols(unit.tokens, &look_up(unit, channel)));
        }
    }
}

struct Zstd(i32);
impl Coder for Zstd {
    fn name(&self) -> String {
        format!("zstd -{}, channel-major", self.0)
    }
    fn encode(&self, unit: &Unit) -> Vec<u8> {
        zstd::bulk::compress(&unit.symbols, self.0).unwrap()
    }
    fn decode(&self, _: &Unit, bytes: &[u8], out: &mut Decoded) {
        zstd::bulk::decompress_to_buffer(bytes, &mut out.symbols).unwrap();
    }
}

/// Arithmetic coding bit by bit (Witten, Neal, Cleary 1987) with 16-bit tables. Each channel of 256 tokens
/// has a stream and its 32-bit length, as in the kernels of CacheGen and LMCache. torchac is the same coder
/// with one stream.
struct Bitwise;

const HALF: u32 = 1 << 31;
const QUARTER: u32 = 1 << 30;

/// The interval of the arithmetic coder.
struct Interval {
    low: u32,
    high: u32,
}

impl Interval {
    fn narrow(&mut self, start: u32, end: u32) {
        let span = u64::from(self.high) - u64::from(self.low) + 1;
        let at = |slot: u32| (u64::from(self.low) + ((span * u64::from(slot)) >> 16)) as u32;
        (self.low, self.high) = (at(start), at(end).wrapping_sub(1));
    }

    fn double(&mut self) {
        (self.low, self.high) = (self.low << 1, self.high << 1 | 1);
    }

    /// If the interval lies in the middle half, doubles it around the middle and returns true (underflow).
    fn open(&mut self) -> bool {
        let around = self.low >= QUARTER && self.high < HALF + QUARTER;
        if around {
            (self.low, self.high) = ((self.low << 1) & !HALF, self.high << 1 | HALF | 1);
        }
        around
    }
}

fn starts(unit: &Unit, channel: usize) -> Vec<u32> {
    let mut sum = 0;
    let ends = widths(unit, channel).iter().map(|&width| {
        sum += u32::from(width) << 4;
        sum
    });
    std::iter::once(0).chain(ends).collect()
}

impl Coder for Bitwise {
    fn name(&self) -> String {
        "torchac, CacheGen, LMCache: bit by bit, one stream per channel and 256 tokens".into()
    }

    fn encode(&self, unit: &Unit) -> Vec<u8> {
        let mut out = vec![];
        for (channel, symbols) in unit.symbols.chunks_exact(unit.tokens).enumerate() {
            let starts = starts(unit, channel);
            for symbols in symbols.chunks(256) {
                let (mut bits, mut pending) = (vec![], 0);
                let mut put = |bit: bool, pending: &mut u32| {
                    bits.push(bit);
                    bits.extend(std::iter::repeat_n(!bit, *pending as usize));
                    *pending = 0;
                };
                let mut interval = Interval { low: 0, high: u32::MAX };
                for &symbol in symbols {
                    let symbol = usize::from(symbol);
                    interval.narrow(starts[symbol], starts[symbol + 1]);
                    loop {
                        if interval.high < HALF || interval.low >= HALF {
                            put(interval.low >= HALF, &mut pending);
                            interval.double();
                        } else if interval.open() {
                            pending += 1;
                        } else {
                            break;
                        }
                    }
                }
                pending += 1;
                put(interval.low >= QUARTER, &mut pending);
                let bytes = bits.chunks(8).map(|bits| {
                    bits.iter().enumerate().fold(0, |byte, (i, &bit)| byte | u8::from(bit) << (7 - i))
                });
                out.extend_from_slice(&(bits.len().div_ceil(8) as u32).to_le_bytes());
                out.extend(bytes);
            }
        }
        out
    }

    fn decode(&self, unit: &Unit, mut bytes: &[u8], out: &mut Decoded) {
        for (channel, out) in out.symbols.chunks_exact_mut(unit.tokens).enumerate() {
            let starts = starts(unit, channel);
            for out in out.chunks_mut(256) {
                let (len, rest) = bytes.split_first_chunk::<4>().unwrap();
                let (stream, rest) = rest.split_at(u32::from_le_bytes(*len) as usize);
                bytes = rest;
                let mut at = 0;
                let mut bit = || {
                    let byte = stream.get(at / 8).copied().unwrap_or(0);
                    at += 1;
                    u32::from(byte >> ((8 - at % 8) % 8) & 1)
                };
                let mut value = (0..32).fold(0, |value, _| value << 1 | bit());
                let mut interval = Interval { low: 0, high: u32::MAX };
                for out in out {
                    let span = u64::from(interval.high) - u64::from(interval.low) + 1;
                    let slot = ((u64::from(value - interval.low) + 1) * 65536 - 1) / span;
                    let symbol = starts.partition_point(|&start| u64::from(start) <= slot) - 1;
                    *out = symbol as u8;
                    interval.narrow(starts[symbol], starts[symbol + 1]);
                    loop {
                        if interval.high < HALF || interval.low >= HALF {
                            interval.double();
                            value = value << 1 | bit();
                        } else if interval.open() {
                            value = value.wrapping_sub(QUARTER) << 1 | bit();
                        } else {
                            break;
                        }
                    }
                }
            }
        }
    }
}
