//! The symbols and their models.

use codec_core::{LANES, MAX_SYMBOLS, Row, TABLE_LEN};

const LAYERS: usize = 6;
/// Channels of a unit.
pub const CHANNELS: usize = 1024;
const TOKENS: usize = 1000;
const GROUP: usize = 10;
/// Correlation of neighbouring tokens: the variance of their difference is 2.6 times smaller than that of
/// tokens.
const CORRELATION: f64 = 0.811;

/// The keys or values of a layer.
pub struct Unit {
    /// Size of the alphabet.
    pub alphabet: usize,
    /// Number of tokens, without anchors.
    pub tokens: usize,
    /// (channels, tokens): the difference plus half the alphabet.
    pub symbols: Vec<u8>,
    /// The same symbols as codes of codec-core: (channels / 32, tokens).
    pub rows: Vec<Row>,
    /// Widths of the symbols, which sum to 4096: (channels, alphabet).
    pub widths: Vec<u16>,
    tables: Vec<u16>, // (channels, TABLE_LEN)
}

impl Unit {
    /// Tables for 32 channels each.
    pub fn tables(&self) -> impl Iterator<Item = &[u16]> {
        self.tables.chunks_exact(LANES * TABLE_LEN)
    }

    /// Order-0 entropy of the symbols per channel, in bits.
    pub fn entropy(&self) -> f64 {
        let bits = |channel: &[u8]| {
            let mut counts = [0_u32; 256];
            channel.iter().for_each(|&symbol| counts[usize::from(symbol)] += 1);
            let n = channel.len() as f64;
            let terms =
                counts.iter().filter(|&&count| count > 0).map(|&c| f64::from(c) * (n / f64::from(c)).log2());
            terms.sum::<f64>()
        };
        self.symbols.chunks_exact(self.tokens).map(bits).sum()
    }
}

/// All units: keys and values of every layer.
pub fn units() -> Vec<Unit> {
    let mut normal = Normal(1);
    (0..2 * LAYERS).map(|unit| make([0.5, 1.0, 1.5][unit / 2 * 3 / LAYERS], &mut normal)).collect()
}

fn make(step: f64, normal: &mut Normal) -> Unit {
    let alphabet = if step < 0.75 { 32 } else { 16 };
    let tokens = TOKENS - TOKENS / GROUP;
    let mut unit = Unit {
        alphabet,
        tokens,
        symbols: Vec::with_capacity(CHANNELS * tokens),
        rows: vec![[0; LANES]; CHANNELS / LANES * tokens],
        widths: vec![],
        tables: vec![],
    };
    for channel in 0..CHANNELS {
        let mut counts = vec![0.2; alphabet];
        for _ in 0..2 {
            differences(step, alphabet, normal).for_each(|symbol| counts[usize::from(symbol)] += 1.0);
        }
        let widths = widths(&counts);
        let symbols: Vec<u8> = differences(step, alphabet, normal).collect();
        for (t, &symbol) in symbols.iter().enumerate() {
            unit.rows[channel / LANES * tokens + t][channel % LANES] = outwards(symbol, alphabet);
        }
        let mut table = [4096; TABLE_LEN];
        (table[0], table[1]) = (0, 0);
        let by_code =
            |code: usize| (0..alphabet).find(|&s| usize::from(outwards(s as u8, alphabet)) == code).unwrap();
        for code in 0..alphabet {
            table[code + 2] = table[code + 1] + widths[by_code(code)];
        }
        // The escape, which is never used, takes one slot of the widest symbol.
        let widest = (0..alphabet).max_by_key(|&code| widths[by_code(code)]).unwrap();
        table[widest + 2..alphabet + 2].iter_mut().for_each(|start| *start -= 1);
        assert!(alphabet + 1 < MAX_SYMBOLS);
        unit.symbols.extend(symbols);
        unit.widths.extend(widths);
        unit.tables.extend(table);
    }
    unit
}

/// Maps 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ... (zigzag).
fn outwards(symbol: u8, alphabet: usize) -> u16 {
    let x = i32::from(symbol) - alphabet as i32 / 2;
    ((x << 1) ^ (x >> 31)) as u16
}

/// Differences to the anchors of one channel of a sequence.
fn differences(step: f64, alphabet: usize, normal: &mut Normal) -> impl Iterator<Item = u8> + use<> {
    let mut x = normal.next();
    let scale = (1.0 - CORRELATION * CORRELATION).sqrt();
    let sequence: Vec<f64> = (0..TOKENS)
        .map(|_| {
            let now = x;
            x = CORRELATION * x + scale * normal.next();
            now
        })
        .collect();
    let middle = alphabet as f64 / 2.0;
    (0..TOKENS).filter(|t| t % GROUP != 0).map(move |t| {
        let difference = (sequence[t] - sequence[t / GROUP * GROUP]) / (1.09 * step);
        (difference.round() + middle).clamp(0.0, alphabet as f64 - 1.0) as u8
    })
}

/// Widths that sum to 4096. Slots that remain after rounding go to the symbols that gain most.
fn widths(counts: &[f64]) -> Vec<u16> {
    let total: f64 = counts.iter().sum();
    let free = 4096.0 - counts.len() as f64;
    let mut widths: Vec<u16> = counts.iter().map(|count| (count / total * free) as u16 + 1).collect();
    while widths.iter().sum::<u16>() < 4096 {
        let gain = |i: usize| counts[i] * (1.0 + 1.0 / f64::from(widths[i])).ln();
        let best = (0..counts.len()).max_by(|&i, &j| gain(i).total_cmp(&gain(j))).unwrap();
        widths[best] += 1;
    }
    widths
}

/// Normal numbers (Box and Muller over a xorshift generator).
pub struct Normal(pub u64);

impl Normal {
    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// The next number.
    pub fn next(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}
