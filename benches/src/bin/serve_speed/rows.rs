//! The rows of a result, and their table for the terminal.

use kv_benches::cli;
use serde::Serialize;

use super::run::{Arrivals, Run};
use super::statistics::{Agreement, Record, Summary};

/// One method at one rate. Latencies in seconds, of requests whose answers are whole.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The method's spec.
    pub method: String,
    /// Requests a second; none where each came when the one before had its answer.
    pub rate: Option<f64>,
    /// The cache of the method.
    #[serde(flatten)]
    pub cache: Cache,
    /// Requests that came.
    pub came: usize,
    /// Requests whose answers are whole.
    pub whole: usize,
    /// Requests that failed.
    pub failed: usize,
    /// Why the first of them did.
    pub failure: Option<String>,
    /// Seconds of the run.
    pub seconds: f64,
    /// Seconds per token of an answer, from its arrival on.
    pub normalized: Option<Summary>,
    /// Seconds to the first token.
    pub first_token: Option<Summary>,
    /// Mean seconds between the tokens of an answer.
    pub between_tokens: Option<Summary>,
    /// Whole answers a second.
    pub requests_per_second: f64,
    /// Tokens a second, those of answers that were cut off included.
    pub tokens_per_second: f64,
    /// Most sequences that ran at once.
    pub largest_batch: usize,
    /// Most tokens that they had.
    pub most_tokens: usize,
    /// How often a request was put back since memory was short.
    pub put_back: u64,
    /// How far answers are those of requests that ran alone.
    pub agreement: Option<Agreement>,
}

/// Sizes of a cache.
#[derive(Clone, Debug, Serialize)]
pub struct Cache {
    /// Sequences, at most.
    pub places: usize,
    /// Tokens of all of them together, if it is paged.
    pub pool: Option<usize>,
    /// Bytes of device memory; none on the CPU, where nothing is limited.
    pub device_bytes: Option<usize>,
    /// Bytes of host memory that the device reads.
    pub host_bytes: Option<usize>,
}

impl Row {
    /// That of a run; `alone` is what the same requests got one by one.
    pub fn of(
        method: String,
        arrivals: Arrivals,
        cache: &Cache,
        run: &Run,
        alone: Option<&[Record]>,
    ) -> Self {
        let records = &run.records;
        let summary = |of: fn(&Record) -> Option<f64>| Summary::of(records.iter().filter_map(of).collect());
        let whole = records.iter().filter(|record| record.end.is_some()).count();
        let tokens: usize = records.iter().map(|record| record.tokens.len()).sum();
        let failures = || records.iter().filter_map(|record| record.failure.clone());
        Self {
            method,
            rate: match arrivals {
                Arrivals::OneByOne => None,
                Arrivals::Poisson(rate) => Some(rate),
            },
            cache: cache.clone(),
            came: records.len(),
            whole,
            failed: failures().count(),
            failure: failures().next(),
            seconds: run.seconds,
            normalized: summary(Record::normalized),
            first_token: summary(Record::first_token),
            between_tokens: summary(Record::between_tokens),
            requests_per_second: whole as f64 / run.seconds,
            tokens_per_second: tokens as f64 / run.seconds,
            largest_batch: run.largest_batch,
            most_tokens: run.most_tokens,
            put_back: run.put_back,
            agreement: alone.and_then(|alone| Agreement::of(alone, records)),
        }
    }
}

const COLUMNS: [&str; 13] = [
    "method",
    "rate",
    "came",
    "whole",
    "failed",
    "ms/token",
    "p99",
    "first, ms",
    "p99",
    "tokens/s",
    "batch",
    "put back",
    "alike",
];

/// The table, for the terminal.
pub fn table(rows: &[Row]) -> String {
    let ms = |summary: Option<Summary>, of: fn(Summary) -> f64| {
        summary.map_or("-".into(), |summary| format!("{:.1}", 1e3 * of(summary)))
    };
    let cells = |row: &Row| {
        [
            row.method.replace(':', " "),
            row.rate.map_or("one by one".into(), |rate| rate.to_string()),
            row.came.to_string(),
            row.whole.to_string(),
            row.failed.to_string(),
            ms(row.normalized, |of| of.mean),
            ms(row.normalized, |of| of.p99),
            ms(row.first_token, |of| of.mean),
            ms(row.first_token, |of| of.p99),
            format!("{:.0}", row.tokens_per_second),
            row.largest_batch.to_string(),
            row.put_back.to_string(),
            row.agreement.map_or("-".into(), |agreement| format!("{:.3}", agreement.share)),
        ]
    };
    cli::table(COLUMNS, rows.iter().map(cells))
}
