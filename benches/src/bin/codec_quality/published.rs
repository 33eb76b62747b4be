//! CacheGen as published (5.2 of the paper) and the ablations of its figure 15.
//!
//! Keys after RoPE and values are coded in groups of ten tokens: the first is the anchor, the others are
//! differences to the decoded anchor. Each row is scaled by its own largest magnitude, stored as bf16
//! (vector-wise quantization): anchors to 8 bits, differences to bins that are two and three times as wide in
//! the second and the last third of the layers. An arithmetic coder (constriction's range coder, 24 bits)
//! codes both under tables counted on other text: one table per layer, channel and kind, one per layer, or
//! one for all. The fixed-width code is the quantization without an entropy coder.

use constriction::stream::model::DefaultContiguousCategoricalEntropyModel as Table;
use constriction::stream::queue::{DefaultRangeDecoder, DefaultRangeEncoder};
use constriction::stream::{Decode, Encode};
use half::bf16;
use kv_llama::prefill;
use kv_model::{Config, Model, Rope};
use kv_reference::{Error, Result};

use crate::{Distortion, SINKS};

/// Tokens per group.
const GROUP: usize = 10;

/// Levels of an anchor on each side of zero.
const ANCHOR_LEVELS: f32 = 127.0;

/// The weight of a wider group's table in a narrower one's, in symbols.
const PRIOR: f64 = 32.0;

/// Bytes of a stream's length.
const LENGTH: usize = 4;

/// One setting: `published:levels=32:delta=anchor|mean|none:bins=thirds|uniform:keys=rotated|plain`.
#[derive(Clone, Copy)]
pub struct Published {
    levels: f32, // of a difference, on each side of zero, in the first layers
    delta: Delta,
    layered: bool, // bins grow by layer third
    rotated: bool, // keys after RoPE
}

/// The reference of the differences.
#[derive(Clone, Copy, PartialEq)]
enum Delta {
    Anchor,
    Mean, // of the channel, over the sample
    None,
}

impl Published {
    /// Reads a setting; `None` if it is that of a method of `kv`.
    pub fn parse(spec: &str) -> Option<Result<Self>> {
        let settings = spec.strip_prefix("published")?;
        let mut published = Self { levels: 32.0, delta: Delta::Anchor, layered: true, rotated: true };
        for setting in settings.split(':').skip(1) {
            match setting.split_once('=') {
                Some(("levels", n)) if n.parse::<u8>().is_ok_and(|n| n > 0) => {
                    published.levels = n.parse::<u8>().map_or(1.0, f32::from);
                }
                Some(("delta", "anchor")) => published.delta = Delta::Anchor,
                Some(("delta", "mean")) => published.delta = Delta::Mean,
                Some(("delta", "none")) => published.delta = Delta::None,
                Some(("bins", "thirds")) => published.layered = true,
                Some(("bins", "uniform")) => published.layered = false,
                Some(("keys", "rotated")) => published.rotated = true,
                Some(("keys", "plain")) => published.rotated = false,
                _ => return Some(Err(Error::Argument(format!("{spec}: unknown setting {setting}")))),
            }
        }
        Some(Ok(published))
    }

    /// The bin width of a difference in layer `l`, relative to the largest magnitude of its row.
    fn step(self, l: usize, config: &Config) -> f32 {
        let third = if self.layered { 1 + 3 * l / config.n_layers } else { 1 };
        third as f32 / self.levels
    }

    /// Quantizes rows (n, channels) and replaces them by the decoded rows.
    fn quantize(self, step: f32, mean: &[f32], rows: &mut [f32]) -> Symbols {
        let mut symbols = Symbols::default();
        if self.delta == Delta::Anchor {
            for group in rows.chunks_mut(GROUP * mean.len()) {
                let (anchor, rest) = group.split_at_mut(mean.len());
                quantize_row(anchor, 1.0 / ANCHOR_LEVELS, &mut symbols.anchors);
                rest.chunks_exact_mut(mean.len())
                    .for_each(|row| quantize_difference(row, anchor, step, &mut symbols.differences));
            }
        } else {
            let zero = vec![0.0; mean.len()];
            let base = if self.delta == Delta::Mean { mean } else { &zero };
            rows.chunks_exact_mut(mean.len())
                .for_each(|row| quantize_difference(row, base, step, &mut symbols.differences));
        }
        symbols
    }
}

/// The symbols of rows, (n, channels) of each kind.
#[derive(Default)]
struct Symbols {
    anchors: Vec<i32>,
    differences: Vec<i32>,
}

/// Quantizes a row to steps of `relative` of its largest magnitude; leaves the decoded row.
fn quantize_row(row: &mut [f32], relative: f32, symbols: &mut Vec<i32>) {
    let largest = row.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let step = bf16::from_f32(largest).to_f32() * relative;
    let levels = levels(relative) as f32;
    for x in row {
        let symbol = if step > 0.0 { (*x / step).round_ties_even().clamp(-levels, levels) } else { 0.0 };
        *x = symbol * step;
        symbols.push(symbol as i32);
    }
}

/// [`quantize_row`] of a row minus `base`.
fn quantize_difference(row: &mut [f32], base: &[f32], relative: f32, symbols: &mut Vec<i32>) {
    row.iter_mut().zip(base).for_each(|(x, base)| *x -= base);
    quantize_row(row, relative, symbols);
    row.iter_mut().zip(base).for_each(|(x, base)| *x += base);
}

/// The largest symbol at a relative bin width.
fn levels(relative: f32) -> usize {
    (1.0 / relative).round() as usize
}

/// Keys before RoPE and values of a window, (n, channels) for each layer and side, without the sinks.
pub type WindowRows = Vec<[Vec<f32>; 2]>;

/// Keys and values of windows of calibration text.
pub fn sample(model: &Model, rope: &Rope, windows: &[&[u32]]) -> Result<Vec<WindowRows>> {
    let rows = |window: &&[u32]| {
        let (mut rows, first) = (vec![], SINKS * model.config.kv_dim());
        prefill(model, rope, window, &mut |_, activations| {
            rows.push([activations.k[first..].to_vec(), activations.v[first..].to_vec()]);
            Ok(())
        })?;
        Ok(rows)
    };
    windows.iter().map(rows).collect()
}

/// A setting with its tables, and the sums over its coded data.
pub struct Coder<'a> {
    setting: Published,
    config: &'a Config,
    rope: &'a Rope,
    means: Vec<Vec<f32>>, // (layer, side): of the coded rows' channels
    anchors: Counts,
    differences: Counts,
    bits: Bits,
    distortion: Distortion,
}

/// Sums of bits.
#[derive(Default)]
struct Bits {
    scales: usize,
    fixed: usize,        // without a coder
    anchors: [usize; 3], // by [`Group::ALL`]
    differences: [usize; 3],
    raw_anchors: usize,
}

impl<'a> Coder<'a> {
    /// Counts the tables of a setting.
    pub fn new(setting: Published, model: &'a Model, rope: &'a Rope, sample: &[WindowRows]) -> Self {
        let config = &model.config;
        let (channels, planes) = (config.kv_dim(), 2 * config.n_layers);
        let mut means = vec![vec![0.0; channels]; planes];
        let finest = levels(setting.step(0, config));
        let counts = |levels| Counts::new(levels, planes, channels);
        let (anchors, differences) = (counts(ANCHOR_LEVELS as usize), counts(finest));
        let (bits, distortion) = (Bits::default(), Distortion::default());
        let rows = |window: &WindowRows, plane: usize| {
            let mut rows = window[plane / 2][plane % 2].clone();
            setting.turn(rope, config, plane, &mut rows, false);
            rows
        };
        for (plane, mean) in means.iter_mut().enumerate() {
            let n = sample.iter().map(|window| window[0][0].len() / channels).sum::<usize>() as f32;
            for row in sample.iter().map(|window| rows(window, plane)) {
                for row in row.chunks_exact(channels) {
                    mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x / n);
                }
            }
        }
        let mut coder = Self { setting, config, rope, means, anchors, differences, bits, distortion };
        for window in sample {
            for plane in 0..planes {
                let step = setting.step(plane / 2, config);
                let symbols = setting.quantize(step, &coder.means[plane], &mut rows(window, plane));
                coder.anchors.add(plane, &symbols.anchors);
                coder.differences.add(plane, &symbols.differences);
            }
        }
        coder
    }

    /// Codes keys before RoPE and values of layer `l` (n, channels), and replaces them by the decoded ones.
    pub fn pass(&mut self, l: usize, k: &mut [f32], v: &mut [f32]) -> Result<()> {
        for (plane, rows) in [(2 * l, k), (2 * l + 1, v)] {
            let (original, channels) = (rows.to_vec(), self.config.kv_dim());
            let step = self.setting.step(l, self.config);
            self.setting.turn(self.rope, self.config, plane, rows, false);
            let symbols = self.setting.quantize(step, &self.means[plane], rows);
            self.setting.turn(self.rope, self.config, plane, rows, true);
            self.distortion.add(&original, rows, channels);
            let width = (2 * levels(step) + 1).next_power_of_two().ilog2() as usize;
            self.bits.scales += 16 * rows.len() / channels;
            self.bits.raw_anchors += 8 * symbols.anchors.len();
            self.bits.fixed += 8 * symbols.anchors.len() + width * symbols.differences.len();
            for (i, group) in Group::ALL.into_iter().enumerate() {
                self.bits.anchors[i] += self.anchors.coded_bits(group, plane, &symbols.anchors)?;
                self.bits.differences[i] +=
                    self.differences.coded_bits(group, plane, &symbols.differences)?;
            }
        }
        Ok(())
    }

    /// Bits per element of each way to code the same symbols, and their error.
    pub fn result(&self) -> serde_json::Value {
        let Bits { scales, fixed, anchors, differences, raw_anchors } = &self.bits;
        let per_number = |bits: usize| (bits + scales) as f64 / self.distortion.numbers as f64;
        serde_json::json!({
            "fixed": per_number(*fixed),
            "global": per_number(anchors[0] + differences[0]),
            "layer": per_number(anchors[1] + differences[1]),
            "channel": per_number(anchors[2] + differences[2]),
            "raw_anchors": per_number(raw_anchors + differences[2]),
            "nmse": self.distortion.nmse(),
        })
    }
}

impl Published {
    /// Rotates the rows of a plane to their positions, or back, if its keys are coded after RoPE.
    fn turn(self, rope: &Rope, config: &Config, plane: usize, rows: &mut [f32], back: bool) {
        if !self.rotated || plane % 2 == 1 {
            return;
        }
        // With its halves swapped, a head rotates the other way.
        let exchange = |rows: &mut [f32]| {
            for head in rows.chunks_exact_mut(config.head_dim) {
                let (low, high) = head.split_at_mut(config.head_dim / 2);
                low.swap_with_slice(high);
            }
        };
        if back {
            exchange(rows);
        }
        rope.layer(plane / 2).rotate_rows(rows, config.kv_dim(), SINKS);
        if back {
            exchange(rows);
        }
    }
}

/// Symbols that share a table.
#[derive(Clone, Copy)]
enum Group {
    All,
    Layer, // keys and values separately
    Channel,
}

impl Group {
    const ALL: [Self; 3] = [Self::All, Self::Layer, Self::Channel];
}

/// Counts of symbols.
struct Counts {
    levels: usize, // symbols are -levels..=levels
    channels: usize,
    all: Vec<u32>,             // (symbols,)
    by_plane: Vec<Vec<u32>>,   // (planes, symbols)
    by_channel: Vec<Vec<u32>>, // (planes * channels, symbols)
}

impl Counts {
    fn new(levels: usize, planes: usize, channels: usize) -> Self {
        let zeros = vec![0; 2 * levels + 1];
        let by_plane = vec![zeros.clone(); planes];
        Self { levels, channels, by_plane, by_channel: vec![zeros.clone(); planes * channels], all: zeros }
    }

    fn index(&self, symbol: i32) -> usize {
        (symbol + self.levels as i32) as usize
    }

    /// Counts symbols (n, channels).
    fn add(&mut self, plane: usize, symbols: &[i32]) {
        for (i, &symbol) in symbols.iter().enumerate() {
            let (symbol, channel) = (self.index(symbol), plane * self.channels + i % self.channels);
            self.all[symbol] += 1;
            self.by_plane[plane][symbol] += 1;
            self.by_channel[channel][symbol] += 1;
        }
    }

    /// The probabilities of a group's symbols.
    fn probabilities(&self, group: Group, plane: usize, channel: usize) -> Vec<f64> {
        let flat = vec![1.0 / self.all.len() as f64; self.all.len()];
        let all = mixed(&self.all, &flat);
        match group {
            Group::All => all,
            Group::Layer => mixed(&self.by_plane[plane], &all),
            Group::Channel => {
                let layer = mixed(&self.by_plane[plane], &all);
                mixed(&self.by_channel[plane * self.channels + channel], &layer)
            }
        }
    }

    /// The size of the stream of symbols (n, channels), which decodes to them.
    fn coded_bits(&self, group: Group, plane: usize, symbols: &[i32]) -> Result<usize> {
        if symbols.is_empty() {
            return Ok(0);
        }
        let tables: Vec<Table> = (0..self.channels)
            .map(|c| {
                Table::from_floating_point_probabilities_fast(&self.probabilities(group, plane, c), None)
            })
            .collect::<std::result::Result<_, ()>>()
            .map_err(|()| Error::argument("a table without probabilities"))?;
        let failed = || Error::argument("the range coder failed");
        let columns = || symbols.iter().map(|&s| self.index(s)).zip(tables.iter().cycle());
        let mut encoder = DefaultRangeEncoder::new();
        encoder.encode_symbols(columns()).map_err(|_| failed())?;
        let words = encoder.into_compressed().map_err(|_| failed())?;
        let bits = 32 * words.len() + 8 * LENGTH;
        let mut decoder = DefaultRangeDecoder::from_compressed(words).map_err(|_| failed())?;
        for (symbol, table) in columns() {
            if decoder.decode_symbol(table).map_err(|_| failed())? != symbol {
                return Err(failed());
            }
        }
        Ok(bits)
    }
}

/// Counts as probabilities, with a wider group's as a prior of [`PRIOR`] symbols.
fn mixed(counts: &[u32], wider: &[f64]) -> Vec<f64> {
    let n = f64::from(counts.iter().sum::<u32>()) + PRIOR;
    counts.iter().zip(wider).map(|(&count, wider)| (f64::from(count) + PRIOR * wider) / n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_decode_within_half_a_bin() {
        const CHANNELS: usize = 8;
        let rows: Vec<f32> =
            (0..23 * CHANNELS).map(|i| ((i * i) as f32 * 0.37).sin() + i as f32 * 0.01).collect();
        let setting = Published::parse("published:levels=16").unwrap().unwrap();
        let mut decoded = rows.clone();
        let symbols = setting.quantize(1.0 / 16.0, &[0.0; CHANNELS], &mut decoded);
        assert_eq!((symbols.anchors.len(), symbols.differences.len()), (3 * CHANNELS, 20 * CHANNELS));
        for (rows, decoded) in rows.chunks(GROUP * CHANNELS).zip(decoded.chunks(GROUP * CHANNELS)) {
            for (t, (row, out)) in rows.chunks(CHANNELS).zip(decoded.chunks(CHANNELS)).enumerate() {
                let (base, levels) =
                    if t == 0 { (&[0.0; CHANNELS][..], 127.0) } else { (&decoded[..CHANNELS], 16.0) };
                let largest = row.iter().zip(base).fold(0.0_f32, |max, (x, base)| max.max((x - base).abs()));
                // The scale is rounded to bf16.
                let most = largest * (0.5 / levels + 1.0 / 256.0);
                assert!(row.iter().zip(out).all(|(x, out)| (x - out).abs() <= most));
            }
        }
    }

    #[test]
    fn streams_take_what_their_tables_say() {
        let symbols: Vec<i32> =
            (0..6000).map(|i: i32| [0, 0, 1, 0, -1, 0, 2, -3][(i * i % 31) as usize % 8]).collect();
        let mut counts = Counts::new(3, 2, 2);
        counts.add(0, &[-3, 1, 2]);
        counts.add(1, &symbols);
        for group in Group::ALL {
            let cost = |(i, &symbol): (usize, &i32)| {
                -counts.probabilities(group, 1, i % 2)[(symbol + 3) as usize].log2()
            };
            let expected: f64 = symbols.iter().enumerate().map(cost).sum();
            let bits = counts.coded_bits(group, 1, &symbols).unwrap() as f64;
            assert!((bits - expected).abs() <= 0.001 * expected + 128.0, "{bits} {expected}");
        }
    }
}
