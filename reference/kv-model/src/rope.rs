//! Rotary position embeddings: tables of sines and cosines, and their scalings.

use std::sync::Arc;

use crate::{Config, RopeScaling, Yarn};

/// Rotary position embedding: cosines and sines of every position up to a length, for the layout that pairs
/// component `i` with `i + head_dim / 2` (Hugging Face; GGUF rows are reordered to it when they are loaded).
///
/// Some families omit RoPE in some layers (NoPE): [`Self::layer`] is the embedding of one layer, the identity
/// for these.
#[derive(Clone, Debug)]
pub struct Rope {
    frequencies: Vec<f32>, // (half,) radians per position
    half: usize,           // head_dim / 2
    len: usize,            // positions
    cos: Vec<f32>,         // (len, half); empty if all frequencies are zero
    sin: Vec<f32>,         // the same
    nope: Option<Nope>,
}

/// The layers without RoPE.
#[derive(Clone, Debug)]
struct Nope {
    layers: Vec<bool>, // (n_layers,)
    rope: Arc<Rope>,   // theirs
}

impl Rope {
    /// Tables for positions `0..len`. Angles are computed in `f64`.
    #[must_use]
    pub fn new(config: &Config, len: usize) -> Self {
        let frequencies = frequencies(config);
        let angles = (0..len).flat_map(|pos| frequencies.iter().map(move |f| pos as f64 * f));
        let (sin, cos) = angles.map(|angle| (angle.sin() as f32, angle.cos() as f32)).unzip();
        let half = frequencies.len();
        let layers: Vec<bool> = config.attention.iter().map(|layer| !layer.rope).collect();
        let nope = layers.contains(&true).then(|| Nope { layers, rope: Arc::new(Self::still(half, len)) });
        Self { frequencies: frequencies.iter().map(|&f| f as f32).collect(), half, len, cos, sin, nope }
    }

    /// The identity.
    fn still(half: usize, len: usize) -> Self {
        Self { frequencies: vec![0.0; half], half, len, cos: vec![], sin: vec![], nope: None }
    }

    /// The embedding of layer `l`.
    #[must_use]
    pub fn layer(&self, l: usize) -> &Self {
        self.nope_of(l).map_or(self, |rope| rope)
    }

    /// [`Self::layer`] as an owned handle.
    #[must_use]
    pub fn shared_layer(self: &Arc<Self>, l: usize) -> Arc<Self> {
        self.nope_of(l).unwrap_or(self).clone()
    }

    fn nope_of(&self, l: usize) -> Option<&Arc<Self>> {
        self.nope.as_ref().filter(|nope| nope.layers.get(l) == Some(&true)).map(|nope| &nope.rope)
    }

    /// Whether it matches a model of this shape.
    #[must_use]
    pub fn fits(&self, config: &Config) -> bool {
        let layers = |l: usize| self.nope_of(l).is_none() == config.attention[l].rope;
        2 * self.half == config.head_dim && (0..config.attention.len()).all(layers)
    }

    /// Radians per position of every pair: (head_dim / 2,).
    #[must_use]
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// Cosines and sines, (len, head_dim / 2) each.
    #[must_use]
    pub fn tables(&self) -> (&[f32], &[f32]) {
        (&self.cos, &self.sin)
    }

    /// Number of positions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Rotates every head of `x`, (heads, head_dim), to position `pos < len`.
    ///
    /// # Panics
    /// When `pos >= len`.
    pub fn rotate(&self, x: &mut [f32], pos: usize) {
        if self.cos.is_empty() && pos < self.len {
            return;
        }
        let cos = &self.cos[pos * self.half..][..self.half];
        let sin = &self.sin[pos * self.half..][..self.half];
        for head in x.chunks_exact_mut(2 * self.half) {
            let (low, high) = head.split_at_mut(self.half);
            for (((a, b), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }

    /// Rotates rows (n, heads * head_dim) at positions `first..first + n`.
    ///
    /// # Panics
    /// When `first + n > len`.
    pub fn rotate_rows(&self, rows: &mut [f32], row_len: usize, first: usize) {
        for (i, row) in rows.chunks_exact_mut(row_len).enumerate() {
            self.rotate(row, first + i);
        }
    }

    /// Copies of rows (n, heads * head_dim) at positions all over the context: (copies * n, heads * head_dim).
    ///
    /// The positions are evenly distributed from `first` to the last and have nothing to do with the order of
    /// the rows: they are the multiples of the golden ratio, modulo 1.
    #[must_use]
    pub fn spread(&self, rows: &[f32], row_len: usize, first: usize, copies: usize) -> Vec<f32> {
        const GOLDEN: f64 = 0.618_033_988_749_894_9;
        let positions = (self.len() - first) as f64;
        let mut spread = rows.repeat(copies);
        for (i, row) in spread.chunks_exact_mut(row_len).enumerate() {
            let share = (i as f64 * GOLDEN).fract();
            self.rotate(row, first + (share * positions) as usize);
        }
        spread
    }

    /// A copy of rows, rotated as by [`Self::rotate_rows`].
    ///
    /// # Panics
    /// When `first + n > len`.
    #[must_use]
    pub fn rotated(&self, rows: &[f32], row_len: usize, first: usize) -> Vec<f32> {
        let mut rotated = rows.to_vec();
        self.rotate_rows(&mut rotated, row_len, first);
        rotated
    }
}

/// Radians per position, (head_dim / 2,).
#[must_use]
pub fn frequencies(config: &Config) -> Vec<f64> {
    let plain =
        (0..config.head_dim / 2).map(|i| config.rope_theta.powf(-2.0 * i as f64 / config.head_dim as f64));
    match &config.rope_scaling {
        RopeScaling::None => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
        RopeScaling::Divisors(divisors) => {
            plain.zip(divisors).map(|(f, &divisor)| f / f64::from(divisor)).collect()
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq_len } => plain
            .map(|f| {
                // Full turns in the original context.
                let turns = original_max_seq_len * f / core::f64::consts::TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                f * kept + f / factor * (1.0 - kept)
            })
            .collect(),
        RopeScaling::Yarn(yarn) => {
            let (low, high) = yarn_ramp(yarn, config);
            let stretch = |(i, f)| {
                let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                f * (1.0 - divided) + f / yarn.factor * divided
            };
            plain.enumerate().map(stretch).collect()
        }
    }
}

/// The frequency indices between which YaRN's ramp lies.
fn yarn_ramp(yarn: &Yarn, config: &Config) -> (f64, f64) {
    let dim = config.head_dim as f64;
    // The index of the frequency of this many full turns in the original context.
    let index_of = |turns: f64| {
        let wavelength = yarn.original_max_seq_len / turns;
        dim * (wavelength / core::f64::consts::TAU).ln() / (2.0 * config.rope_theta.ln())
    };
    let (low, high) = (index_of(yarn.beta_fast), index_of(yarn.beta_slow));
    let (low, high) = if yarn.truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min(dim - 1.0));
    // The reference implementations separate equal ends by the same amount.
    if low == high { (low, high + 0.001) } else { (low, high) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Rope;
    use crate::Model;

    /// Every copy of every row has a position of its own, and each eighth of the context its share of the
    /// copies, also of those of the first rows alone.
    #[test]
    fn copies_are_spread_over_the_context() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa");
        let config = &Model::load(&fixture).unwrap().config;
        let (rope, first, n, copies) = (Rope::new(config, 2052), 4, 64, 4);
        let spread = rope.spread(&vec![1.0; n * config.head_dim], config.head_dim, first, copies);
        let position = |row: &[f32]| {
            let is_rotated = |&pos: &usize| {
                let mut ones = vec![1.0; config.head_dim];
                rope.rotate(&mut ones, pos);
                ones == row
            };
            (0..rope.len()).find(is_rotated).unwrap()
        };
        let positions: Vec<usize> = spread.chunks_exact(config.head_dim).map(position).collect();
        assert_eq!(positions.len(), n * copies);
        for part in [&positions[..], &positions[..n], &positions[n..2 * n]] {
            let mut counts = [0; 8];
            part.iter().for_each(|&pos| counts[(pos - first) / 256] += 1);
            assert!(counts.iter().all(|count| part.len().abs_diff(8 * count) <= 16), "{counts:?}");
        }
    }
}
