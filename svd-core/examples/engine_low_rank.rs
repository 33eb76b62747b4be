//! What an engine adds to its loop: calibrated maps when the model is loaded, one `LowRankLayerCache` per
//! layer after the prefill, then an append and an attend per layer and decode step. Prints the error against
//! exact attention at several budgets.

use std::sync::Arc;

use svd_core::{
    Attention, Budget, Error, ExactTokens, HeadMaps, LayerCalibration, LowRankLayerCache, Rows, SoftmaxStats,
    Window, Workspace, attend_exact_into, attend_exact_scratch_len, normalize_all,
};

const HEADS: usize = 2;
const GROUP: usize = 4;
const DIM: usize = 64;
const SCALE: f32 = 0.125;

/// Once per layer of the model: calibrates maps on queries, keys and values of other text, within a budget of
/// `f16` bytes per token.
fn calibrate(text: &Text, bytes: usize) -> Result<Vec<Arc<HeadMaps>>, Error> {
    let mut calibration = LayerCalibration::new(HEADS, GROUP, [DIM, DIM])?;
    for batch in 0..4 {
        let [q, k, v] = text.rows(1000 * batch..1000 * (batch + 1));
        let (keys, values) = (Rows::contiguous(&k, HEADS * DIM)?, Rows::contiguous(&v, HEADS * DIM)?);
        calibration.add(Rows::contiguous(&q, HEADS * GROUP * DIM)?, keys, values)?;
    }
    let rotations = calibration.rotations()?;
    rotations.maps(&rotations.ranks(SCALE, Budget::Bytes { per_token: bytes, per_component: 2 }, 1)?)
}

/// A decode step in one layer: appends the new token, then attends to all tokens.
fn step(
    cache: &mut LowRankLayerCache<f32>,
    [query, key, value]: [&[f32]; 3],
    workspace: &mut Workspace,
) -> Result<Vec<f32>, Error> {
    cache.append(Rows::from(key), Rows::from(value))?;
    let mut out = vec![0.0; query.len()];
    cache.attend_into(&Attention::scaled(SCALE), Rows::from(query), workspace, &mut out)?;
    Ok(out)
}

fn main() -> Result<(), Error> {
    let (text, prompt, steps) = (Text(1), 1000, 100);
    let mut workspace = Workspace::default();
    let [_, k, v] = text.rows(0..prompt);
    let (keys, values) = (Rows::contiguous(&k, HEADS * DIM)?, Rows::contiguous(&v, HEADS * DIM)?);
    for bytes in [512, 384, 256, 128] {
        let maps = calibrate(&Text(2), bytes)?;
        let mut cache = LowRankLayerCache::new(&maps, Window { sinks: 4, recent: 64, batch: 1 })?;
        cache.append(keys, values)?;
        let (mut error, mut size) = (0.0, 0.0);
        for t in prompt..prompt + steps {
            let [query, key, value] = text.rows(t..t + 1);
            let out = step(&mut cache, [&query, &key, &value], &mut workspace)?;
            let exact = text.exact(t + 1, &query)?;
            error += out.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            size += exact.iter().map(|x| x * x).sum::<f32>();
        }
        let ranks: Vec<_> = maps.iter().map(|maps| [maps.keys().rank(), maps.values().rank()]).collect();
        println!(
            "{bytes} of 512 bytes a token: ranks {ranks:?}, relative error {:.3}",
            (error / size).sqrt()
        );
    }
    Ok(())
}

/// A stand-in for a layer of a model on some text: components of decaying scale, mixed so that no channel is
/// small, and keys that match queries.
struct Text(usize);

impl Text {
    /// Queries (tokens, heads, group, dim), keys and values (tokens, heads, dim).
    fn rows(&self, tokens: std::ops::Range<usize>) -> [Vec<f32>; 3] {
        let side = |heads: usize, decay: f32, seed: usize| -> Vec<f32> {
            let row = |t: usize, h: usize| -> Vec<f32> {
                let at = ((self.0 * 7919 + t) * 64 + h) * DIM;
                (0..DIM).map(|d| 3.0 * noise(at + d + seed * 1_000_000_007) * decay.powi(d as i32)).collect()
            };
            let mix = |row: Vec<f32>| (0..DIM).map(move |d| row[d] + 0.5 * row[(d * 7 + 3) % DIM]);
            tokens.clone().flat_map(|t| (0..heads).flat_map(move |h| mix(row(t, h)))).collect()
        };
        [side(HEADS * GROUP, 0.95, 1), side(HEADS, 0.93, 2), side(HEADS, 0.96, 3)]
    }

    /// Exact attention over the first `n` tokens.
    fn exact(&self, n: usize, query: &[f32]) -> Result<Vec<f32>, Error> {
        let [_, k, v] = self.rows(0..n);
        let (keys, values) = (Rows::contiguous(&k, HEADS * DIM)?, Rows::contiguous(&v, HEADS * DIM)?);
        let mut out = vec![0.0; query.len()];
        let heads = query.chunks_exact(GROUP * DIM).zip(out.chunks_exact_mut(GROUP * DIM)).enumerate();
        for (h, (query, out)) in heads {
            let tokens = ExactTokens::new(keys.columns(h * DIM, DIM)?, values.columns(h * DIM, DIM)?)?;
            let mut scratch = vec![0.0; attend_exact_scratch_len(GROUP, DIM)];
            let mut stats = [SoftmaxStats::EMPTY; GROUP];
            let attention = Attention::scaled(SCALE);
            attend_exact_into(&attention, Rows::from(query), &tokens, &mut scratch, out, &mut stats)?;
            normalize_all(&stats, out)?;
        }
        Ok(out)
    }
}

/// A hash as a number in -1..1.
fn noise(i: usize) -> f32 {
    let x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 23) as f32 - 1.0
}
