//! Times the interleaved rANS coder and other entropy coders on the same symbols; `peers/codec.py` makes the
//! table.
//!
//! Six layers of keys and values, 1,024 channels of 1,000 tokens each: differences to the first token of each
//! group of ten, rounded to 0.5, 1 and 1.5 deviations by layer third (CacheGen's values). The 12-bit tables
//! are counted on 2,000 other tokens and not transmitted. Every coder is checked by a round trip before it is
//! timed. Prints a JSON line per measurement.
//!
//! `codec_speed REPEATS lossless` times lossless frames of 16-bit rows and zstd on the same elements.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

mod data;
mod lossless;
mod peers;

use codec_core::{Backend, LANES, Models, Row, decode_symbols_into_with, encode_symbols_with};
use data::{CHANNELS, Unit};
use kv_benches::median;

fn main() {
    let repeats: usize = std::env::args().nth(1).map_or(5, |x| x.parse().unwrap());
    if std::env::args().nth(2).is_some_and(|what| what == "lossless") {
        return lossless::measure(repeats);
    }
    let units = data::units();
    let n: f64 = units.iter().map(|unit| (unit.tokens * CHANNELS) as f64).sum();
    let entropy: f64 = units.iter().map(Unit::entropy).sum::<f64>() / n;
    println!("{{\"coder\":\"entropy of each channel\",\"bits\":{entropy}}}");
    for backend in Backend::ALL.into_iter().rev().filter(|backend| backend.is_available()) {
        let repeats = if backend == Backend::Scalar { 1 } else { repeats };
        measure(&Lanes(backend), &units, repeats, n);
    }
    for peer in peers::all() {
        measure(peer.as_ref(), &units, repeats.min(3), n);
    }
}

/// A coder of the symbols of a unit: (channels, tokens), one byte each.
trait Coder: Sync {
    fn name(&self) -> String;
    fn encode(&self, unit: &Unit) -> Vec<u8>;
    /// Decodes, in any order of the symbols.
    fn decode(&self, unit: &Unit, bytes: &[u8], out: &mut Decoded);
    /// Asserts that the decoded symbols are those of the unit.
    fn check(&self, unit: &Unit, out: &Decoded) {
        assert!(out.symbols == unit.symbols, "{}", self.name());
    }
}

/// Output of a decoder, in either order.
#[derive(Default, Clone)]
struct Decoded {
    symbols: Vec<u8>, // (channels, tokens)
    rows: Vec<Row>,   // (channels / 32, tokens)
}

fn measure(coder: &dyn Coder, units: &[Unit], repeats: usize, n: f64) {
    let mut out = vec![Decoded::default(); units.len()];
    for (unit, out) in units.iter().zip(&mut out) {
        out.symbols = vec![0; unit.symbols.len()];
        out.rows = vec![[0; LANES]; unit.rows.len()];
    }
    let streams: Vec<Vec<u8>> = units.iter().map(|unit| coder.encode(unit)).collect();
    for ((unit, stream), out) in units.iter().zip(&streams).zip(&mut out) {
        coder.decode(unit, stream, out);
        coder.check(unit, out);
    }
    let bits = 8.0 * streams.iter().map(Vec::len).sum::<usize>() as f64 / n;
    let encode = median(repeats, || {
        units.iter().for_each(|unit| drop(std::hint::black_box(coder.encode(unit))));
    });
    let decode = median(repeats, || {
        units
            .iter()
            .zip(&streams)
            .zip(&mut out)
            .for_each(|((unit, stream), out)| coder.decode(unit, stream, out));
    });
    let half = units.len() / 2;
    let (first, second) = out.split_at_mut(half);
    let part = |range: std::ops::Range<usize>, out: &mut [Decoded]| {
        for ((unit, stream), out) in units[range.clone()].iter().zip(&streams[range]).zip(out) {
            coder.decode(unit, stream, out);
        }
    };
    let two = median(repeats, || {
        std::thread::scope(|scope| {
            let part = &part;
            let (first, second) = (&mut *first, &mut *second);
            scope.spawn(move || part(0..half, first));
            part(half..units.len(), second);
        });
    });
    let rate = |seconds: f64| n / seconds / 1e6;
    println!(
        "{{\"coder\":\"{}\",\"bits\":{bits},\"encode\":{},\"decode\":{},\"decode2\":{}}}",
        coder.name(),
        rate(encode),
        rate(decode),
        rate(two)
    );
}

/// codec-core's interleaved rANS: one stream for 32 channels.
struct Lanes(Backend);

impl Coder for Lanes {
    fn name(&self) -> String {
        format!("codec-core lanes, {:?}", self.0)
    }

    fn encode(&self, unit: &Unit) -> Vec<u8> {
        let mut out = vec![];
        for (tables, rows) in unit.tables().zip(unit.rows.chunks_exact(unit.tokens)) {
            let start = out.len();
            out.extend_from_slice(&[0; 4]);
            encode_symbols_with(self.0, &Models::tables(LANES, tables).unwrap(), rows, &mut out).unwrap();
            let len = (out.len() - start - 4) as u32;
            out[start..start + 4].copy_from_slice(&len.to_le_bytes());
        }
        out
    }

    fn decode(&self, unit: &Unit, mut bytes: &[u8], out: &mut Decoded) {
        for (tables, rows) in unit.tables().zip(out.rows.chunks_exact_mut(unit.tokens)) {
            let (len, rest) = bytes.split_first_chunk::<4>().unwrap();
            let (stream, rest) = rest.split_at(u32::from_le_bytes(*len) as usize);
            decode_symbols_into_with(self.0, &Models::tables(LANES, tables).unwrap(), stream, rows).unwrap();
            bytes = rest;
        }
    }

    fn check(&self, unit: &Unit, out: &Decoded) {
        assert!(out.rows == unit.rows, "{}", self.name());
    }
}
