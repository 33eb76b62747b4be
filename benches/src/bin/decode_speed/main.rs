//! Times decode steps and prompts of the reference's loop on a GPU: `peers/decode.py` and `peers/offload.py`
//! make the tables.

mod copy_rate;
mod times;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use copy_rate::copy_rate;
use kv_benches::cli::{DeviceArgs, JsonArgs, ModelArgs, check_number};
use kv_device::Timed;
use kv_gpu::Element;
use kv_llama_gpu::ranks::{Exchange, Lockstep, Rank};
use kv_llama_gpu::{Decoder, Part, WeightLayout, Weights};
use kv_methods::Method;
use kv_reference::device::method_cache;
use kv_reference::{Error, Result};
use times::{PromptTimes, StepTimes, Times};

/// Time decode steps on a GPU, and prompts (--chunk)
///
/// For steps the caches are filled with random rows or codes, so that any length is timed at once.
#[derive(Parser)]
#[command(after_help = "Examples:
  decode_speed --random llama-3.1-8b --contexts 8192,131072 --batches 1,6
  decode_speed --random llama-3.1-8b --contexts 131072 --hits 0.5 --methods pqcache:exact=bf16,hybrid:exact=bf16
  decode_speed --random llama-3.1-8b --contexts 32768 --chunk 8192
  decode_speed --random llama-3.1-70b --contexts 32768 --ranks 2

Methods and their settings: kv methods")]
struct Speed {
    #[command(flatten)]
    model: ModelArgs,
    /// Methods to time: cachegen, dense in 16 bits, hybrid, int4, million, pqcache, pqklt, sq and zack run on
    /// the device
    #[arg(long, value_name = "LIST", default_value = "dense:dtype=bf16,million:exact=bf16")]
    methods: String,
    /// Tokens that a step attends to
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [2048])]
    contexts: Vec<usize>,
    /// Sequences of a batch, at most 512
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1])]
    batches: Vec<usize>,
    /// Hold weights in rows for any batch, as batches above 16 do
    #[arg(long)]
    rows: bool,
    /// Fraction of the selected rows that count as resident on the device, 0 to 1: random queries lack the
    /// locality of a model's
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0)]
    hits: f32,
    /// Encode evicted tokens in stream order with the steps, not concurrently
    #[arg(long)]
    synchronous: bool,
    /// Steps to time
    #[arg(long, value_name = "N", default_value_t = 64)]
    steps: usize,
    /// Also time prefills as long as the context, in chunks of N tokens: to the first and to the second token
    #[arg(long, value_name = "N")]
    chunk: Option<NonZeroUsize>,
    /// Write the logits of the first step of every run, after token 1, and with --chunk those after the
    /// prompts: little-endian f32 (batch, vocabulary), one run after the other
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Parts of the model, each on a GPU from number 0 on, which exchange by NCCL; with --random
    #[arg(long, value_name = "N", default_value_t = 1, requires = "random")]
    #[arg(conflicts_with_all = ["device", "device_memory"])]
    ranks: usize,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    json: JsonArgs,
}

fn main() -> Result<()> {
    Speed::parse().run()
}

/// Untimed warm-up steps.
const WARM_UP: usize = 3;

impl Speed {
    fn run(self) -> Result<()> {
        if self.steps == 0 || self.ranks == 0 || self.contexts.contains(&0) || self.batches.contains(&0) {
            return Err(Error::argument("--steps, --ranks, --contexts and --batches must be at least 1"));
        }
        check_number("--hits", self.hits.into(), "a fraction from 0 to 1", |x| (0.0..=1.0).contains(&x))?;
        let methods = Method::parse_list(&self.methods)?;
        self.model.random()?;
        let ranks = match self.ranks {
            1 => vec![Rank::alone(self.device.require_gpu()?)],
            ranks => Rank::open(&(0..ranks).collect::<Vec<_>>(), Exchange::Nccl, usize::MAX)?,
        };
        let (speed, mut ranks) = (Arc::new(self), Lockstep::start(ranks, |rank| Result::Ok(rank.clone()))?);
        let of_rank = speed.clone();
        let (output, logits) = ranks.call(move |rank| of_rank.times(rank, &methods))?;
        println!("{}", output.table());
        speed.json.write(&output)?;
        let path = speed.logits.as_deref();
        path.map_or(Ok(()), |path| std::fs::write(path, logits).map_err(|e| Error::io(path, e)))
    }

    /// Times of all methods, of a rank.
    fn times(&self, rank: &Rank, methods: &[Method]) -> Result<(Times, Vec<u8>)> {
        let mut output = Times {
            model: String::new(),
            ranks: self.ranks,
            copy_bytes_per_second: copy_rate(&rank.gpu)?,
            rows: vec![],
        };
        let mut logits = vec![];
        let mut loaded: Option<Arc<Weights>> = None;
        for method in methods {
            let element = method.device_element()?;
            for (&context, &batch) in self
                .contexts
                .iter()
                .flat_map(|context| self.batches.iter().map(move |batch| (context, batch)))
            {
                if rank.shard().rank() == 0 {
                    eprintln!("{} {context} x {batch}", method.spec());
                }
                let layout = if self.rows { WeightLayout::Rows } else { WeightLayout::of_batch(batch) };
                let suits = |weights: &Arc<Weights>| (weights.element, weights.layout) == (element, layout);
                let weights = match loaded.take().filter(suits) {
                    Some(weights) => weights,
                    None => Arc::new(self.weights(rank, (element, layout), &mut output.model)?),
                };
                output.rows.push(self.row(
                    (rank, &weights),
                    method,
                    (context, batch),
                    output.copy_bytes_per_second,
                    &mut logits,
                )?);
                loaded = Some(weights);
            }
        }
        Ok((output, logits))
    }

    fn weights(
        &self,
        rank: &Rank,
        (element, layout): (Element, WeightLayout),
        name: &mut String,
    ) -> Result<Weights> {
        let weights = match self.model.random()? {
            Some(random) => Weights::random_shard(&rank.gpu, random, element, layout, rank.shard())?,
            None => Weights::of(&rank.gpu, &self.model.load()?, element, layout)?,
        };
        name.clone_from(&weights.name);
        Ok(weights)
    }

    fn row(
        &self,
        (rank, weights): (&Rank, &Arc<Weights>),
        method: &Method,
        (context, batch): (usize, usize),
        copy_rate: f64,
        logits: &mut Vec<u8>,
    ) -> Result<StepTimes> {
        let capacity = (context + self.steps + WARM_UP).next_multiple_of(64);
        let (config, element) = (&weights.config, weights.element);
        let mut cache = method_cache(&rank.gpu, method, config, element, None, batch, capacity)?;
        cache.force_hits(self.hits);
        if self.synchronous {
            cache.encode_synchronously();
        }
        let mut decoder = Decoder::of_rank(rank, weights.clone(), cache, batch)?;
        let mut prompt_logits = vec![];
        let prompt = self.chunk.map(|chunk| {
            let prompts = prompts(batch, context, weights.config.vocab_size);
            time_prompts(&mut decoder, &prompts, chunk.get(), &mut prompt_logits)
        });
        let prompt = prompt.transpose()?;
        decoder.fill_random(context - 1)?;
        decoder.step()?;
        if self.logits.is_some() {
            let step = decoder.logits()?;
            logits.extend(step.iter().chain(&prompt_logits).flat_map(|x| x.to_le_bytes()));
        }
        for _ in 1..WARM_UP {
            decoder.step()?;
        }
        let (fetched, chosen) = (decoder.fetched_rows()?, decoder.selected_rows()?);
        let mut times = decoder.time(self.steps)?;
        let fetched_rows = (decoder.fetched_rows()? - fetched) as f64 / self.steps as f64;
        let heads = weights.config.n_layers * weights.config.n_kv_heads * batch;
        let per_head = |rows: u64| rows as f64 / (self.steps * heads) as f64;
        let chosen_rows = decoder.selected_rows()?.zip(chosen).map(|(rows, before)| per_head(rows - before));
        let mean_ms = times.iter().sum::<f32>() / times.len() as f32;
        times.sort_by(f32::total_cmp);
        let step_ms = times[times.len() / 2];
        let parts = [Part::Products, Part::Attention, Part::Rest].map(|part| decoder.time_part(part, 9));
        let [products_ms, attention_ms, rest_ms] = parts;
        let cache = decoder.cache();
        let (weight_bytes, cache_bytes) = (weights.step_bytes(), cache.step_bytes(context));
        Ok(StepTimes {
            method: method.spec(),
            context,
            batch,
            layout: format!("{:?}", weights.layout),
            capacity,
            step_ms,
            mean_ms,
            tokens_per_second: 1000.0 * batch as f32 / mean_ms,
            weight_bytes,
            cache_bytes,
            device_bytes: cache.bytes(),
            host_bytes: cache.host_bytes(),
            chosen_rows,
            fetched_rows,
            fetched_bytes: fetched_rows * cache.fetched_row_bytes() as f64,
            floor_ms: 1000.0 * (weight_bytes + cache_bytes) as f64 / copy_rate,
            products_ms: products_ms?,
            attention_ms: attention_ms?,
            rest_ms: rest_ms?,
            prompt,
        })
    }
}

/// Reproducible prompts: token i of sequence s is 7919 i + s modulo the vocabulary.
fn prompts(batch: usize, len: usize, vocab: usize) -> Vec<Vec<u32>> {
    let prompt = |s: usize| (0..len).map(|i| ((7919 * i + s) % vocab) as u32).collect();
    (0..batch).map(prompt).collect()
}

/// Times prefills into an empty cache, after a warm-up chunk and step.
fn time_prompts(
    decoder: &mut Decoder,
    prompts: &[Vec<u32>],
    chunk: usize,
    logits: &mut Vec<f32>,
) -> Result<PromptTimes> {
    let firsts: Vec<Vec<u32>> = prompts.iter().map(|p| p[..chunk.min(p.len())].to_vec()).collect();
    decoder.prefill(&firsts, chunk)?;
    decoder.step()?;
    decoder.clear()?;
    decoder.picked()?; // waits
    let start = Instant::now();
    decoder.prefill(prompts, chunk)?;
    decoder.picked()?;
    let first_token_ms = start.elapsed().as_secs_f64() * 1e3;
    logits.extend(decoder.logits()?);
    let second = Instant::now();
    decoder.step()?;
    decoder.picked()?;
    let second_token_ms = first_token_ms + second.elapsed().as_secs_f64() * 1e3;
    Ok(PromptTimes { chunk, first_token_ms, second_token_ms })
}
