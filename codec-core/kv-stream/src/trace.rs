//! The events of a stream, with the reasons for its decisions.

use codec_core::{Decision, Encoding, Reason, Throughput};

use crate::{ChunkCost, Computed, RequestChunk};

/// A stream from the requests to their full caches. Times are seconds since the requests.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Trace {
    /// For each request: when its cache held the whole context.
    pub loaded: Vec<f64>,
    /// When the last byte arrived; 0 if nothing was transferred.
    pub transferred: f64,
    /// Seconds of decoding and recomputation.
    pub computing: f64,
    /// Bytes that arrived, including those of abandoned transfers.
    pub bytes: u64,
    /// Every decision with its outcome, in order.
    pub events: Vec<Event>,
}

impl Trace {
    pub(super) fn new(arrival: f64, requests: usize, mut events: Vec<Event>) -> Self {
        for event in &mut events {
            for time in [&mut event.computing_from, &mut event.computed_at].into_iter().flatten() {
                *time -= arrival;
            }
        }
        let loaded = |request| {
            let ends = events.iter().filter(|event| event.request == request);
            ends.filter_map(|event| event.computed_at).fold(0.0, f64::max)
        };
        let transfers = events.iter().filter(|event| event.bytes > 0);
        let spans = events.iter().filter_map(|event| Some(event.computed_at? - event.computing_from?));
        Self {
            loaded: (0..requests).map(loaded).collect(),
            transferred: transfers.map(|event| event.arrived).fold(0.0, f64::max),
            computing: spans.sum(),
            bytes: events.iter().map(|event| event.bytes).sum(),
            events,
        }
    }

    /// Tokens loaded at each of the first `levels` levels, and tokens recomputed.
    #[must_use]
    pub fn tokens(&self, levels: usize) -> (Vec<usize>, usize) {
        let (mut loaded, mut recomputed) = (vec![0; levels], 0);
        for event in &self.events {
            match (&event.outcome, event.level) {
                (Outcome::Loaded, Some(level)) if level < levels => loaded[level] += event.tokens,
                (Outcome::Recomputed | Outcome::Damaged(_), _) => recomputed += event.tokens,
                _ => {}
            }
        }
        (loaded, recomputed)
    }

    /// When the last request's cache held its context.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.loaded.iter().copied().fold(0.0, f64::max)
    }
}

/// The outcome of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
pub enum Outcome {
    /// The level was transferred and decoded.
    Loaded,
    /// Keys and values were recomputed from the tokens.
    Recomputed,
    /// Another encoding became better during the transfer.
    Abandoned,
    /// The link failed.
    Failed(String),
    /// The bytes could not be decoded: keys and values were recomputed.
    Damaged(String),
}

/// A decision about a chunk of one request, with its inputs and its outcome.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Event {
    /// The request.
    pub request: usize,
    /// The chunk's index.
    pub chunk: usize,
    /// Its tokens.
    pub tokens: usize,
    /// `text`, or `level N`.
    pub encoding: String,
    /// The reason.
    pub reason: &'static str,
    /// Bytes per second that the decision assumed, if known.
    pub throughput: Option<f64>,
    /// Seconds that the chosen plan was expected to take for all remaining chunks.
    pub expected: Option<f64>,
    /// Chunks that the plan sends as text, from this one on.
    pub text_chunks: usize,
    /// Seconds for all remaining chunks as text.
    pub text_delay: Option<f64>,
    /// Seconds for all remaining chunks at each level.
    pub level_delays: Vec<f64>,
    /// When it was requested.
    pub requested: f64,
    /// When its last byte arrived, or when the transfer ended for another reason.
    pub arrived: f64,
    /// Bytes that arrived.
    pub bytes: u64,
    /// Its outcome.
    pub outcome: Outcome,
    /// When its decoding or recomputation began.
    pub computing_from: Option<f64>,
    /// When its keys and values were in the cache.
    pub computed_at: Option<f64>,
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) level: Option<usize>, // none for text
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) level_bytes: u64,
}

impl Event {
    pub(super) fn new(id: RequestChunk, cost: &ChunkCost, decision: &Decision, now: f64) -> Self {
        let (encoding, outcome, level) = match decision.encoding {
            Encoding::Text => ("text".into(), Outcome::Recomputed, None),
            Encoding::Level(level) => (format!("level {level}"), Outcome::Loaded, Some(level)),
        };
        Self {
            request: id.request,
            chunk: id.index,
            tokens: cost.tokens,
            encoding,
            reason: match decision.reason {
                Reason::InTime => "in time",
                Reason::NoneInTime => "none in time",
                Reason::NoThroughput => "no throughput known",
            },
            throughput: match decision.throughput {
                Throughput::Measured(rate) | Throughput::Prior(rate) => Some(rate),
                Throughput::Unknown => None,
            },
            expected: decision.delay,
            text_chunks: decision.text_chunks,
            text_delay: decision.text_delay,
            level_delays: decision.level_delays.iter().flatten().copied().collect(),
            requested: now,
            arrived: now,
            bytes: 0,
            outcome,
            computing_from: None,
            computed_at: None,
            level,
            level_bytes: level.map_or(0, |level| cost.levels[level]),
        }
    }

    /// Whether it is the source of this chunk's keys and values, which are not computed yet.
    pub(super) fn is_of(&self, chunk: RequestChunk) -> bool {
        let led = matches!(self.outcome, Outcome::Loaded | Outcome::Recomputed) && self.computed_at.is_none();
        led && (self.request, self.chunk) == (chunk.request, chunk.index)
    }

    pub(super) fn computed(&mut self, computed: &Computed) {
        self.computing_from = Some(computed.start);
        self.computed_at = Some(computed.end);
        if let Some(what) = &computed.damaged {
            self.outcome = Outcome::Damaged(what.clone());
        }
    }
}
