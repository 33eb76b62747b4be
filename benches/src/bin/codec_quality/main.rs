//! Quality per byte of the codec on a real model: the size of frames against the entropy of their symbols,
//! the gain of each part of the format at equal steps, and the divergence of a model whose whole context was
//! encoded and decoded. Besides the methods of `kv` it accepts `published`, CacheGen as published.
//!
//! Prints one JSON object; `peers/codec.py` makes the tables.

mod published;

use std::path::PathBuf;

use codec_core::{Frame, FrameInfo, Plane, Side, encode_frame};
use kv_llama::{logits, prefill};
use kv_methods::{Method, Profile, calibrated};
use kv_model::{Config, Model, Rope};
use kv_reference::Result;
use kv_reference::eval::Divergence;
use published::Published;

/// Leading tokens that stay exact, as in every method of `kv`.
const SINKS: usize = 4;

/// First scored position.
const SCORED: usize = 256;

/// Bytes of a frame's header and of the index checksum.
const HEADER: usize = 64 + 4;

/// Tokens per chunk in LMCache.
const LMCACHE_CHUNK: usize = 256;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, text, calibration, windows, length, methods] = &arguments[..] else {
        return Err("usage: codec_quality MODEL TEXT CALIBRATION_TOKENS WINDOWS LENGTH METHODS".into());
    };
    let model = Model::load(&PathBuf::from(model))?;
    let text = std::fs::read_to_string(text)?;
    let (calibration, windows, length) =
        (calibration.parse::<usize>()?, windows.parse::<usize>()?, length.parse::<usize>()?);
    let tokens = model.tokenizer()?.encode(&text)?;
    if tokens.len() < calibration + windows * length {
        return Err(format!("the text has {} tokens", tokens.len()).into());
    }
    let (published, methods): (Vec<&str>, Vec<&str>) =
        methods.split(',').partition(|spec| Published::parse(spec).is_some());
    let methods = if methods.is_empty() { vec![] } else { Method::parse_list(&methods.join(","))? };
    let rope = Rope::new(&model.config, calibration.max(length));
    let profile = calibrated(&model, &rope, &tokens[..calibration], &methods)?;
    let windows: Vec<&[u32]> = tokens[calibration..].chunks_exact(length).take(windows).collect();
    let dense: Vec<Vec<f32>> =
        windows.iter().map(|w| scored_logits(&model, &rope, w, None)).collect::<Result<_>>()?;
    let scored = Scored { model: &model, rope: &rope, windows: &windows, dense: &dense };
    let mut rows = vec![];
    for method in &methods {
        rows.push(scored.row(&profile, method)?);
    }
    if !published.is_empty() {
        // Windows at the positions of the scored ones.
        let sample: Vec<&[u32]> = tokens[..calibration].chunks_exact(length).collect();
        let sample = published::sample(&model, &rope, &sample)?;
        for spec in published {
            let Some(setting) = Published::parse(spec).transpose()? else { continue };
            let mut coder = published::Coder::new(setting, &model, &rope, &sample);
            rows.push(scored.published_row(spec, &mut coder)?);
        }
    }
    let result = serde_json::json!({
        "model": model.name,
        "length": length,
        "windows": windows.len(),
        "dense": scored.divergence(|_, _, _| Ok(()))?.perplexity(),
        "plain": plain_groups(&model, &rope, windows[0])?,
        "rows": rows,
    });
    println!("{result}");
    Ok(())
}

/// The scored windows, with the original model's logits.
struct Scored<'a> {
    model: &'a Model,
    rope: &'a Rope,
    windows: &'a [&'a [u32]],
    dense: &'a [Vec<f32>],
}

impl Scored<'_> {
    /// The divergence of the model when `through` replaces keys and values after the sinks.
    fn divergence(
        &self,
        mut through: impl FnMut(usize, &mut [f32], &mut [f32]) -> Result<()>,
    ) -> Result<Divergence> {
        let first = SINKS * self.model.config.kv_dim();
        let vocab = self.model.config.vocab_size;
        let mut divergence = Divergence::default();
        for (window, dense) in self.windows.iter().zip(self.dense) {
            let mut through =
                |l: usize, k: &mut [f32], v: &mut [f32]| through(l, &mut k[first..], &mut v[first..]);
            let coded = scored_logits(self.model, self.rope, window, Some(&mut through))?;
            for (i, (coded, dense)) in coded.chunks_exact(vocab).zip(dense.chunks_exact(vocab)).enumerate() {
                divergence.add(coded, dense, window[SCORED + i + 1]);
            }
        }
        Ok(divergence)
    }

    fn row(&self, profile: &Profile, method: &Method) -> Result<serde_json::Value> {
        let config = &self.model.config;
        let planes = method.codec_planes(config, profile)?;
        let mut sizes = Sizes::default();
        let divergence = self.divergence(|l, k, v| {
            for (side, rows) in [(Side::Keys, k), (Side::Values, v)] {
                sizes.pass(config, &planes.plane(0, l, side)?.view(), rows)?;
            }
            Ok(())
        })?;
        let numbers = sizes.distortion.numbers as f64;
        let bits = |bytes: usize| 8.0 * bytes as f64 / numbers;
        Ok(serde_json::json!({
            "method": method.spec(),
            "bits256": bits(sizes.bytes_256),
            "bits1024": bits(sizes.bytes_1024),
            "entropy": sizes.entropy / numbers,
            "lmcache": sizes.lmcache / numbers,
            "nmse": sizes.distortion.nmse(),
            "perplexity": divergence.perplexity(),
            "kl": divergence.kl(),
            "top1": divergence.top1(),
        }))
    }

    fn published_row(&self, spec: &str, coder: &mut published::Coder<'_>) -> Result<serde_json::Value> {
        let divergence = self.divergence(|l, k, v| coder.pass(l, k, v))?;
        Ok(serde_json::json!({
            "method": spec,
            "bits": coder.result(),
            "perplexity": divergence.perplexity(),
            "kl": divergence.kl(),
            "top1": divergence.top1(),
        }))
    }
}

type Through<'a> = &'a mut dyn FnMut(usize, &mut [f32], &mut [f32]) -> Result<()>;

/// Logits of the positions from [`SCORED`] on, without the last one.
fn scored_logits(
    model: &Model,
    rope: &Rope,
    window: &[u32],
    mut through: Option<Through<'_>>,
) -> Result<Vec<f32>> {
    let hidden = prefill(model, rope, window, &mut |l, activations| match &mut through {
        Some(through) => Ok(through(l, activations.k, activations.v)?),
        None => Ok(()),
    })?;
    let row = model.config.hidden_size;
    Ok(logits(model, &hidden[SCORED * row..(window.len() - 1) * row])?)
}

/// Sums over all planes of all windows.
#[derive(Default)]
struct Sizes {
    bytes_256: usize,  // of frames with blocks of 256 tokens
    bytes_1024: usize, // of 1,024
    entropy: f64,      // bits: order-0 entropy of the bins, per channel and window
    lmcache: f64,      // bits: size of these bins in LMCache's format
    distortion: Distortion,
}

/// Squared errors of decoded rows.
#[derive(Default)]
struct Distortion {
    numbers: usize,
    error: f64,
    variance: f64, // about the channels' means
}

impl Distortion {
    /// Adds rows (n, channels) and their decoded form.
    fn add(&mut self, rows: &[f32], decoded: &[f32], channels: usize) {
        self.numbers += rows.len();
        self.error += rows.iter().zip(decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        for c in 0..channels {
            let column: Vec<f64> = rows.iter().skip(c).step_by(channels).map(|&x| f64::from(x)).collect();
            let mean = column.iter().sum::<f64>() / column.len() as f64;
            self.variance += column.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
        }
    }

    /// The squared error relative to the variance.
    fn nmse(&self) -> f64 {
        self.error / self.variance
    }
}

impl Sizes {
    /// Encodes rows, adds to the sums, and replaces the rows by the decoded ones.
    fn pass(&mut self, config: &Config, plane: &Plane<'_>, rows: &mut [f32]) -> Result<()> {
        let channels = config.kv_dim();
        let info = FrameInfo {
            first_token: SINKS as u64,
            block_tokens: 1024,
            ..FrameInfo::new(1, config.n_kv_heads, config.head_dim, rows.len() / channels)
        };
        // The frame has the plane twice, as keys and as values, so half of its bytes count. One header serves
        // all layers.
        let encode = |info: &FrameInfo| -> Result<(Vec<u8>, usize)> {
            let mut bytes = vec![];
            encode_frame(info, &[*plane; 2], &[&*rows; 2], &mut bytes)?;
            let len = (bytes.len() - HEADER) / 2 + HEADER / (2 * config.n_layers);
            Ok((bytes, len))
        };
        self.bytes_1024 += encode(&info)?.1;
        let info = FrameInfo { block_tokens: 256, ..info };
        let (bytes, len) = encode(&info)?;
        self.bytes_256 += len;
        let bins: Vec<i32> = rows
            .chunks(256 * channels)
            .map(|rows| plane.bins(rows))
            .collect::<std::result::Result<Vec<_>, _>>()?
            .concat();
        for c in 0..channels {
            let column = |rows: &[i32]| rows.iter().skip(c).step_by(channels).copied().collect::<Vec<_>>();
            self.entropy += entropy(&column(&bins));
            for chunk in bins.chunks(LMCACHE_CHUNK * channels) {
                // A table of 33 entries of 16 bits and a length of 32 bits for each channel.
                self.lmcache += entropy(&column(chunk)) + 33.0 * 16.0 + 32.0;
            }
        }
        self.lmcache += 16.0 * info.tokens as f64; // a scale for each token
        let mut decoded = vec![0.0; rows.len()];
        Frame::parse(&bytes, info.elements())?.decode_plane_into(plane, 0, Side::Keys, None, &mut decoded)?;
        self.distortion.add(rows, &decoded, channels);
        rows.copy_from_slice(&decoded);
        Ok(())
    }
}

/// Error, relative to the variance, of uniform quantization with 2 to 4 bits between minimum and maximum of
/// 64 tokens of a channel, for the keys (before RoPE) and values of a window.
fn plain_groups(model: &Model, rope: &Rope, window: &[u32]) -> Result<Vec<serde_json::Value>> {
    const GROUP: usize = 64;
    let channels = model.config.kv_dim();
    let (mut errors, mut variance) = ([0.0; 3], 0.0);
    prefill(model, rope, window, &mut |_, activations| {
        for rows in [&*activations.k, &*activations.v] {
            let rows = &rows[SINKS * channels..];
            for c in 0..channels {
                let column: Vec<f64> = rows.iter().skip(c).step_by(channels).map(|&x| f64::from(x)).collect();
                let column = &column[..column.len() / GROUP * GROUP];
                let mean = column.iter().sum::<f64>() / column.len() as f64;
                variance += column.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
                for group in column.chunks(GROUP) {
                    let low = group.iter().copied().fold(f64::INFINITY, f64::min);
                    let high = group.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    for (error, bits) in errors.iter_mut().zip(2..) {
                        let step = ((high - low) / f64::from((1 << bits) - 1)).max(f64::MIN_POSITIVE);
                        let missed = |x: &f64| (((x - low) / step).round() * step + low - x).powi(2);
                        *error += group.iter().map(missed).sum::<f64>();
                    }
                }
            }
        }
        Ok(())
    })?;
    // A minimum and a step of 16 bits each, per group.
    let side = 32.0 / GROUP as f64;
    let row = |(error, bits): (&f64, u32)| serde_json::json!({ "bits": f64::from(bits) + side, "nmse": error / variance });
    Ok(errors.iter().zip(2..).map(row).collect())
}

/// Order-0 entropy of the symbols, in bits.
fn entropy(symbols: &[i32]) -> f64 {
    let mut counts = std::collections::HashMap::new();
    symbols.iter().for_each(|symbol| *counts.entry(symbol).or_insert(0_u32) += 1);
    let n = symbols.len() as f64;
    counts.values().map(|&count| f64::from(count) * (n / f64::from(count)).log2()).sum()
}
