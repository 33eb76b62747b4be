//! A decode step's attention after 4,096 tokens of the shape of Llama 3.1 8B (32 query heads, 8 KV heads of 128), in
//! `f32`, next to candle's own on the same tensors; prints JSON. `RAYON_NUM_THREADS=1` for one thread:
//!
//! ```sh
//! RAYON_NUM_THREADS=1 cargo run --release --example speed > speed.json
//! ```
//!
//! Times are medians of alternated rounds. A step appends a token and attends to all. `candle, concatenated` is
//! without the append, whose concatenation copies all tokens; `candle, flash` is `candle_nn::attention::flash_attn`,
//! also without an append, on tensors with tokens first, which it needs.

use std::time::Instant;

use candle_core::{Device, Error, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use kv_attend::Window;
use kv_candle::{Dense, Kv, PqCache, Recorder, SqCache};
use kv_owners::sq::Bits;
use pq_core::{PqShape, TrainOptions};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const TOKENS: usize = 4096;
const ROUNDS: usize = 15;

/// Rows (1, heads, n, DIM), whose components have scales of their own.
fn tensor(seed: u32, heads: usize, n: usize) -> Result<Tensor> {
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8e6 - 1.0
    };
    let row = (0..heads * n * DIM)
        .map(|i| (noise() + noise()) / (1.0 + (i % DIM) as f32 / 16.0))
        .collect::<Vec<_>>();
    Tensor::from_vec(row, (1, heads, n, DIM), &Device::Cpu)
}

fn main() -> Result<()> {
    let (q, k, v) = (tensor(1, HEADS, TOKENS)?, tensor(2, KV_HEADS, TOKENS)?, tensor(3, KV_HEADS, TOKENS)?);
    let step = |seed| {
        Ok::<_, Error>([
            tensor(seed, HEADS, 1)?,
            tensor(seed + 1, KV_HEADS, 1)?,
            tensor(seed + 2, KV_HEADS, 1)?,
        ])
    };

    // Codes are fitted to the first quarter; what they lose is not measured here.
    let mut recorder = Recorder::default();
    let part = |x: &Tensor| x.narrow(2, 0, TOKENS / 4);
    recorder.attend_new(&part(&q)?, &part(&k)?, &part(&v)?)?;
    let frequencies: Vec<f32> = (0..DIM / 2).map(|i| 5e5_f32.powf(-2.0 * i as f32 / DIM as f32)).collect();
    let heads = recorder.bases(&frequencies, 256)?.into_iter();
    let heads =
        heads.map(|basis| basis.head(&frequencies, &Bits::uniform(4)).map_err(kv_candle::Error::from));
    let heads = heads.collect::<kv_candle::Result<Vec<_>>>()?;
    let training = TrainOptions { iterations: 4, max_vectors: Some(1024), ..TrainOptions::default() };
    let books = recorder.books([PqShape::new(DIM, 64, 8).map_err(Error::wrap)?; 2], &training)?;
    let window = Window { sinks: 4, recent: 64, batch: 64 };
    let (mut sq, mut pq) = (SqCache::new(&heads, window), PqCache::new(&books, window));
    sq.append(&k, &v)?;
    pq.append(&k, &v)?;
    let mut dense = Dense::default();
    dense.attend_new(&step(7)?[0], &k, &v)?; // one query, to fill it
    let first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let (k_flash, v_flash) = (first(&k)?, first(&v)?);
    let scale = 1.0 / (DIM as f32).sqrt();

    let mut seconds = [const { vec![] }; 5];
    for round in 0..ROUNDS {
        let [q, k_new, v_new] = step(100 + 10 * round as u32)?;
        let mut time = |i: usize, run: &mut dyn FnMut() -> Result<()>| -> Result<()> {
            let start = Instant::now();
            run()?;
            seconds[i].push(start.elapsed().as_secs_f64());
            Ok(())
        };
        let mut copy = dense.clone();
        time(0, &mut || copy.attend_new(&q, &k_new, &v_new).map(drop))?;
        // Its first call concatenates nothing.
        time(1, &mut || Dense::default().attend_new(&q, &k, &v).map(drop))?;
        let q_flash = first(&q)?;
        time(2, &mut || {
            flash_attn::<f32>(&q_flash, &k_flash, &v_flash, scale, AttnMask::None, None, None).map(drop)
        })?;
        time(3, &mut || sq.attend_new(&q, &k_new, &v_new).map(drop))?;
        time(4, &mut || pq.attend_new(&q, &k_new, &v_new).map(drop))?;
    }
    let names = ["candle", "candle, concatenated", "candle, flash", "sq, 4 bits", "million, 64x8"];
    let dense_bytes = 2 * 4 * TOKENS * KV_HEADS * DIM;
    let bytes = [dense_bytes, dense_bytes, dense_bytes, sq.size(), pq.size()];
    let mut medians = vec![];
    for times in &mut seconds {
        times.sort_by(f64::total_cmp);
        medians.push(times[ROUNDS / 2]);
    }
    let rows = names.iter().zip(&medians).zip(bytes).map(|((name, &median), bytes)| {
        serde_json::json!({
            "name": name, "ms": 1e3 * median, "bytes": bytes,
            "candle / this": medians[0] / median, "candle, flash / this": medians[2] / median,
        })
    });
    let threads = std::env::var("RAYON_NUM_THREADS").unwrap_or_else(|_| "all".into());
    let result = serde_json::json!({
        "shape": { "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "tokens": TOKENS, "dtype": "f32" },
        "threads": threads, "rounds": ROUNDS, "candle": "0.11.1", "rows": rows.collect::<Vec<_>>(),
    });
    println!("{}", serde_json::to_string_pretty(&result).map_err(Error::wrap)?);
    Ok(())
}
