//! What an engine adds to its loop: one `LayerCache` per layer after the prefill, then an append and an
//! attend per layer and decode step. Prints the error against exact attention.

use pq_core::{
    Attention, Error, ExactTokens, HeadBooks, LayerCache, PqShape, Rows, SoftmaxStats, TrainOptions, Window,
    Workspace, attend_exact_into, normalize_all,
};

const LAYERS: usize = 2;
const HEADS: usize = 2;
const GROUP: usize = 4;
const DIM: usize = 64;

/// After the prompt: trains the codebooks of each layer, and caches the prompt's keys and values.
fn prefill(model: &Model, prompt: usize) -> Result<Vec<LayerCache<f32>>, Error> {
    let (shape, window) = (PqShape::new(DIM, 32, 8)?, Window { sinks: 4, recent: 64, batch: 32 });
    let options = TrainOptions { iterations: 8, ..Default::default() };
    let layer = |l| {
        let (keys, values) = (model.rows(l, 0, 0..prompt), model.rows(l, 1, 0..prompt));
        let (keys, values) = (Rows::contiguous(&keys, HEADS * DIM)?, Rows::contiguous(&values, HEADS * DIM)?);
        let books = HeadBooks::train_layer(keys, values, HEADS, [shape; 2], &options)?;
        let mut cache = LayerCache::new(&books, window)?;
        cache.append(keys, values)?;
        Ok(cache)
    };
    (0..LAYERS).map(layer).collect()
}

/// A decode step in one layer: appends the new token, then attends to all tokens.
fn step(
    cache: &mut LayerCache<f32>,
    [query, key, value]: [&[f32]; 3],
    workspace: &mut Workspace,
) -> Result<Vec<f32>, Error> {
    cache.append(Rows::from(key), Rows::from(value))?;
    let mut out = vec![0.0; query.len()];
    let attention = Attention::scaled(1.0 / (DIM as f32).sqrt());
    cache.attend_into(&attention, Rows::from(query), workspace, &mut out)?;
    Ok(out)
}

fn main() -> Result<(), Error> {
    let (model, prompt, steps) = (Model, 1000, 100);
    let mut caches = prefill(&model, prompt)?;
    let mut workspace = Workspace::default();
    for t in prompt..prompt + steps {
        for (l, cache) in caches.iter_mut().enumerate() {
            let [key, value] = [0, 1].map(|side| model.rows(l, side, t..t + 1));
            let query = model.query(l, t);
            let out = step(cache, [&query, &key, &value], &mut workspace)?;
            if t + 1 == prompt + steps {
                let exact = model.exact(l, t + 1, &query)?;
                let error: f32 = out.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum();
                let size: f32 = exact.iter().map(|x| x * x).sum();
                println!("layer {l}: relative error {:.3}, {} bytes", (error / size).sqrt(), cache.size());
            }
        }
    }
    Ok(())
}

/// A stand-in for a model: keys with channels of different scales, some with an offset, and similar
/// neighbouring tokens.
struct Model;

impl Model {
    fn rows(&self, layer: usize, side: usize, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let element = |t: usize, i: usize| {
            let slow = (t as f32 * 0.02 + (i * i + layer) as f32).sin();
            let offset = if side == 0 && i % 21 == 5 { 6.0 } else { 0.0 };
            offset + (slow + noise(t * 8191 + i * 131 + layer * 17 + side)) / (1.0 + (i % DIM) as f32 / 16.0)
        };
        tokens.flat_map(|t| (0..HEADS * DIM).map(move |i| element(t, i))).collect()
    }

    fn query(&self, layer: usize, t: usize) -> Vec<f32> {
        (0..HEADS * GROUP * DIM).map(|i| 2.0 * noise(t * 127 + i * 7919 + layer)).collect()
    }

    /// Exact attention over the first `n` tokens.
    fn exact(&self, layer: usize, n: usize, query: &[f32]) -> Result<Vec<f32>, Error> {
        let [keys, values] = [0, 1].map(|side| self.rows(layer, side, 0..n));
        let (keys, values) = (Rows::contiguous(&keys, HEADS * DIM)?, Rows::contiguous(&values, HEADS * DIM)?);
        let mut out = vec![0.0; query.len()];
        let heads = query.chunks_exact(GROUP * DIM).zip(out.chunks_exact_mut(GROUP * DIM)).enumerate();
        for (h, (query, out)) in heads {
            let tokens = ExactTokens::new(keys.columns(h * DIM, DIM)?, values.columns(h * DIM, DIM)?)?;
            let (mut scratch, mut stats) = (vec![0.0; GROUP * DIM], vec![SoftmaxStats::EMPTY; GROUP]);
            let attention = Attention::scaled(1.0 / (DIM as f32).sqrt());
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
