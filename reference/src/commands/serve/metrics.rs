//! What a server does, in the text format of Prometheus.

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use kv_llama::serve::Counts;

/// Version 0.0.4 of the format.
const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A response of these counts, and of the answers that have begun.
pub fn response(counts: Counts, answers: u64) -> Response {
    ([(CONTENT_TYPE, FORMAT)], text(counts, answers)).into_response()
}

fn text(Counts { running, waiting, tokens, put_back }: Counts, answers: u64) -> String {
    let [running, waiting, tokens] = [running, waiting, tokens].map(|n| n as u64);
    [
        ("requests_running", "gauge", "Requests whose sequences run.", running),
        ("requests_waiting", "gauge", "Requests that wait for a place.", waiting),
        ("cached_tokens", "gauge", "Tokens of the sequences that run.", tokens),
        ("requests_put_back_total", "counter", "Requests put back because memory was short.", put_back),
        ("answers_total", "counter", "Answers that have begun.", answers),
    ]
    .map(|(name, kind, help, n)| format!("# HELP kv_{name} {help}\n# TYPE kv_{name} {kind}\nkv_{name} {n}\n"))
    .concat()
}
