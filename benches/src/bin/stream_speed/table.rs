//! The decisions of a stream as a table for the terminal.

use kv_benches::cli;
use kv_stream::{Event, GBPS, Outcome, Trace};

const COLUMNS: [&str; 10] = [
    "request",
    "chunk",
    "tokens",
    "encoding",
    "why",
    "Gbit/s",
    "asked at",
    "arrived",
    "in the cache",
    "outcome",
];

fn cells(event: &Event) -> [String; 10] {
    let ms = |seconds: f64| format!("{:.1} ms", 1000.0 * seconds);
    [
        event.request.to_string(),
        event.chunk.to_string(),
        event.tokens.to_string(),
        event.encoding.clone(),
        event.reason.to_owned(),
        event.throughput.map_or_else(String::new, |rate| format!("{:.2}", rate / GBPS)),
        ms(event.requested),
        ms(event.arrived),
        event.computed_at.map_or_else(String::new, ms),
        match &event.outcome {
            Outcome::Loaded => "loaded".into(),
            Outcome::Recomputed => "recomputed".into(),
            Outcome::Abandoned => "abandoned".into(),
            Outcome::Failed(what) => format!("failed: {what}"),
            Outcome::Damaged(what) => format!("recomputed: {what}"),
        },
    ]
}

/// One line for each chunk.
pub fn table(trace: &Trace) -> String {
    cli::table(COLUMNS, trace.events.iter().map(cells))
}
