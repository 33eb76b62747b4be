//! Times of decode steps and prompts, and their table for the terminal.

use kv_benches::cli;
use serde::Serialize;

/// One method at one context and batch. Times in milliseconds, on the device's clock.
#[derive(Clone, Debug, Serialize)]
pub struct StepTimes {
    /// The method's spec.
    pub method: String,
    /// Tokens that a step attends to.
    pub context: usize,
    /// Sequences.
    pub batch: usize,
    /// Layout of the weights.
    pub layout: String,
    /// Capacity of the cache's rows in tokens.
    pub capacity: usize,
    /// Median of a step.
    pub step_ms: f32,
    /// Mean of a step, including work between steps, such as encoding.
    pub mean_ms: f32,
    /// Throughput of the whole batch.
    pub tokens_per_second: f32,
    /// Bytes of weights that a step reads.
    pub weight_bytes: usize,
    /// Bytes of the cache that a step reads.
    pub cache_bytes: usize,
    /// Bytes of the whole cache on the device.
    pub device_bytes: usize,
    /// Bytes of the cache in host memory.
    pub host_bytes: usize,
    /// Exact rows (a token's key and value) that a step reads for one head, on average, if steps decide how
    /// many.
    pub chosen_rows: Option<f64>,
    /// Rows (a token's key and value of one head) that a step reads from the host, on average.
    pub fetched_rows: f64,
    /// Bytes of these rows.
    pub fetched_bytes: f64,
    /// Time in which the device copies the bytes of a step.
    pub floor_ms: f64,
    /// Products with weights alone, with norms, RoPE, SwiGLU and residual sums.
    pub products_ms: f32,
    /// Attention alone.
    pub attention_ms: f32,
    /// Embedding and the choice of tokens alone.
    pub rest_ms: f32,
    /// Times to the first and the second tokens on the host, for a batch of prompts as long as the context.
    pub prompt: Option<PromptTimes>,
}

/// Times of the prompts of a batch, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct PromptTimes {
    /// Tokens per chunk.
    pub chunk: usize,
    /// Time until all first tokens are on the host.
    pub first_token_ms: f64,
    /// Time until all second tokens are on the host.
    pub second_token_ms: f64,
}

/// The times of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Times {
    /// The model's name.
    pub model: String,
    /// Ranks, each with a part of the model: bytes and rows are those of one.
    pub ranks: usize,
    /// Copy rate of the device, reads and writes both counted.
    pub copy_bytes_per_second: f64,
    /// One for each method, context and batch.
    pub rows: Vec<StepTimes>,
}

const COLUMNS: [&str; 18] = [
    "method",
    "context",
    "batch",
    "ms/step",
    "mean",
    "tokens/s",
    "GB read",
    "floor, ms",
    "over floor",
    "GB device",
    "GB host",
    "rows a head",
    "rows fetched",
    "products",
    "attention",
    "rest",
    "first token, ms",
    "second",
];

fn cells(row: &StepTimes) -> [String; 18] {
    [
        row.method.replace(':', " "),
        row.context.to_string(),
        row.batch.to_string(),
        format!("{:.3}", row.step_ms),
        format!("{:.3}", row.mean_ms),
        format!("{:.0}", row.tokens_per_second),
        format!("{:.2}", (row.weight_bytes + row.cache_bytes) as f64 / 1e9),
        format!("{:.3}", row.floor_ms),
        format!("{:.2}", f64::from(row.step_ms) / row.floor_ms),
        format!("{:.2}", row.device_bytes as f64 / 1e9),
        format!("{:.2}", row.host_bytes as f64 / 1e9),
        row.chosen_rows.map_or("-".into(), |rows| format!("{rows:.1}")),
        format!("{:.0}", row.fetched_rows),
        format!("{:.3}", row.products_ms),
        format!("{:.3}", row.attention_ms),
        format!("{:.3}", row.rest_ms),
        row.prompt.as_ref().map_or("-".into(), |prompt| format!("{:.1}", prompt.first_token_ms)),
        row.prompt.as_ref().map_or("-".into(), |prompt| format!("{:.1}", prompt.second_token_ms)),
    ]
}

impl Times {
    /// The table, for the terminal.
    pub fn table(&self) -> String {
        cli::table(COLUMNS, self.rows.iter().map(cells))
    }
}
