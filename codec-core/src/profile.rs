use alloc::vec;
use alloc::vec::Vec;

use crate::error::check_len;
use crate::model::cdf_from_counts;
use crate::quant::bin;
use crate::{Error, MAX_ALPHABET, Plane, Predictor};

const MAGIC: [u8; 4] = *b"KVCP";
const VERSION: u8 = 1;

/// An owned [`Plane`]: fitted once to a model's keys or values of a layer, then shared by all its sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct PlaneProfile {
    predictor: Predictor,
    mean: Vec<f32>, // (channels,)
    step: Vec<f32>, // (channels,)
    alphabet: usize,
    cdf: Vec<u16>, // (channels, alphabet + 1)
}

impl PlaneProfile {
    /// Fits means, steps and one probability model per channel to sample rows.
    ///
    /// A channel's step is `bin_size` times the standard deviation of what the predictor leaves over. The alphabet covers
    /// the largest residual seen, up to [`MAX_ALPHABET`]; beyond it there is an escape code.
    ///
    /// # Shapes
    /// `rows` (tokens, channels), finite, at least two tokens.
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`], [`Error::NotFinite`], [`Error::BadStep`].
    /// # Source
    /// CacheGen (SIGCOMM 2024), 5.2: bins relative to the deviation, models per layer and channel.
    pub fn fit(rows: &[f32], channels: usize, predictor: Predictor, bin_size: f32) -> Result<Self, Error> {
        if channels == 0 {
            return Err(Error::Zero { what: "channels" });
        }
        let tokens = rows.len() / channels;
        check_len("rows", rows.len(), tokens * channels)?;
        if tokens < 2 {
            return Err(Error::Zero { what: "number of sample tokens beyond the first" });
        }
        if rows.iter().any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "rows" });
        }
        if !(bin_size.is_finite() && bin_size > 0.0) {
            return Err(Error::BadStep { channel: 0 });
        }
        let mean: Vec<f32> = (0..channels).map(|c| column_mean(rows, channels, c)).collect();
        let residuals = residuals(rows, channels, predictor, &mean)?;
        let step: Vec<f32> = (0..channels)
            .map(|c| {
                let square: f64 = column(&residuals, channels, c).map(|x| f64::from(x) * f64::from(x)).sum();
                let sigma = libm::sqrt(square * channels as f64 / residuals.len() as f64) as f32;
                (bin_size * sigma).clamp(1e-12, f32::MAX)
            })
            .collect();
        let bins: Vec<i32> = residuals.iter().enumerate().map(|(i, &x)| bin(x, step[i % channels])).collect();
        let largest = bins.iter().map(|b| b.unsigned_abs() as usize).max().unwrap_or(0);
        let reach = largest.clamp(1, MAX_ALPHABET / 2 - 1);
        let alphabet = 2 * reach + 2;
        let mut cdf = vec![0; channels * (alphabet + 1)];
        for (c, cdf) in cdf.chunks_exact_mut(alphabet + 1).enumerate() {
            let mut counts = vec![0_u64; alphabet];
            for &b in bins.iter().skip(c).step_by(channels) {
                counts[if b.unsigned_abs() as usize <= reach {
                    (b + reach as i32) as usize
                } else {
                    alphabet - 1
                }] += 1;
            }
            smooth(&mut counts);
            cdf_from_counts(&counts, cdf);
        }
        Ok(Self { predictor, mean, step, alphabet, cdf })
    }

    /// The borrowed form that encoding and decoding take.
    ///
    /// # Errors
    /// None for a profile that [`Self::fit`] or [`Self::from_bytes`] made; the checks of [`Plane::new`] run again.
    pub fn plane(&self) -> Result<Plane<'_>, Error> {
        Plane::new(self.predictor, &self.mean, &self.step, self.alphabet, &self.cdf)
    }

    /// The profile as bytes: magic, version, predictor, sizes, means, steps, tables, CRC-32; little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(20 + 8 * self.mean.len() + 2 * self.cdf.len());
        out.extend_from_slice(&MAGIC);
        let (tag, group) = self.predictor.tag();
        out.extend_from_slice(&[VERSION, tag]);
        out.extend_from_slice(&group.to_le_bytes());
        out.extend_from_slice(&(self.mean.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.alphabet as u32).to_le_bytes());
        self.mean.iter().chain(&self.step).for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        self.cdf.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        let checksum = crc32fast::hash(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Reads and checks what [`Self::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::BadMagic`], [`Error::BadVersion`], [`Error::BadChecksum`], [`Error::BadPredictor`],
    /// [`Error::Length`], [`Error::TooLarge`], or what [`Plane::new`] finds.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or(Error::Truncated)?;
        let (header, rest) = body.split_first_chunk::<16>().ok_or(Error::Truncated)?;
        if header[..4] != MAGIC {
            return Err(Error::BadMagic);
        }
        if header[4] != VERSION {
            return Err(Error::BadVersion { version: header[4] });
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
            return Err(Error::BadChecksum);
        }
        let predictor = Predictor::from_tag(header[5], u16::from_le_bytes([header[6], header[7]]))?;
        let channels = u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
        let alphabet = u32::from_le_bytes([header[12], header[13], header[14], header[15]]) as usize;
        if alphabet > MAX_ALPHABET {
            return Err(Error::BadAlphabet { alphabet });
        }
        let per_channel = 8 + 2 * (alphabet + 1);
        check_len("profile", rest.len(), channels.checked_mul(per_channel).ok_or(Error::TooLarge)?)?;
        let (floats, tables) = rest.split_at(8 * channels);
        let floats: Vec<f32> = floats.as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)).collect();
        let (mean, step) = floats.split_at(channels);
        let cdf = tables.as_chunks::<2>().0.iter().map(|&x| u16::from_le_bytes(x)).collect();
        let profile = Self { predictor, mean: mean.to_vec(), step: step.to_vec(), alphabet, cdf };
        profile.plane()?;
        Ok(profile)
    }

    /// Numbers per token.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.mean.len()
    }
}

fn column(rows: &[f32], channels: usize, c: usize) -> impl Iterator<Item = f32> {
    rows.iter().skip(c).step_by(channels).copied()
}

fn column_mean(rows: &[f32], channels: usize, c: usize) -> f32 {
    let sum: f64 = column(rows, channels, c).map(f64::from).sum();
    (sum * channels as f64 / rows.len() as f64) as f32
}

/// What the predictor leaves over, in rows of `channels`. Anchors are taken unquantized: their 8 bits move a model little.
fn residuals(rows: &[f32], channels: usize, predictor: Predictor, mean: &[f32]) -> Result<Vec<f32>, Error> {
    let difference = |(x, p): (&f32, &f32)| x - p;
    match predictor {
        Predictor::Mean => {
            Ok(rows.chunks_exact(channels).flat_map(|row| row.iter().zip(mean).map(difference)).collect())
        }
        Predictor::Anchor { group: 0 } => Err(Error::Zero { what: "group" }),
        Predictor::Anchor { group } => {
            let mut out = Vec::with_capacity(rows.len());
            for rows in rows.chunks(usize::from(group) * channels) {
                let (anchor, rest) = rows.split_at(channels);
                out.extend(
                    rest.chunks_exact(channels).flat_map(|row| row.iter().zip(anchor).map(difference)),
                );
            }
            // Groups of one token leave nothing over; the tables are then never used.
            if out.is_empty() {
                out.resize(channels, 0.0);
            }
            Ok(out)
        }
    }
}

/// Adds a sixteenth of the counts of the two neighbours, and one: bins not seen in the sample keep a likely place.
fn smooth(counts: &mut [u64]) {
    let escape = counts.len() - 1;
    let mut previous = 0;
    for s in 0..escape {
        let next = if s + 1 < escape { counts[s + 1] } else { 0 };
        let current = counts[s];
        counts[s] = 16 * current + previous + next + 1;
        previous = current;
    }
    counts[escape] = 16 * counts[escape] + 1;
}
