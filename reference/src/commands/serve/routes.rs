//! The routes of the HTTP server.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream::{self, Stream, StreamExt};
use kv_llama::serve::Request;
use kv_model::{Message, Model};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::sync::mpsc::Receiver;

use super::super::chat::Chat;
use super::super::print_error;
use super::answer::Writer;
use super::engine::Door;
use super::error::{ApiError, json_response};
use super::metrics;
use super::question::{Prompt, Question};
use super::reader::{End, PATIENCE, Part, read};

/// What all requests share.
pub struct Served {
    pub model: Arc<Model>,
    /// The chat template, or why there is none.
    pub chat: kv_reference::Result<Chat>,
    pub context: usize,
    pub door: Door,
}

struct Shared {
    served: Served,
    answers: AtomicU64,
}

/// Bytes of a request's body, at most: several for each token of a long context.
const MOST_BODY: usize = 4 << 20;

/// How long clients may take to read the ends of their answers once a signal has ended the server.
const LINGER: Duration = Duration::from_secs(30);

/// The exit code of a server that a second signal ends.
const INTERRUPTED: i32 = 2;

/// Serves connections until a signal, or `stop`, and the requests that have come until then.
pub async fn run(listener: TcpListener, served: Served, stop: Arc<Notify>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let door = served.door.clone();
    let shared = Arc::new(Shared { served, answers: AtomicU64::new(0) });
    let router = Router::new()
        .route("/health", get(|| async { json_response(StatusCode::OK, &json!({ "status": "ok" })) }))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .fallback(|| async { ApiError::not_found("there is no such route") })
        .method_not_allowed_fallback(|| async { ApiError::method() })
        .layer(DefaultBodyLimit::max(MOST_BODY))
        .with_state(shared);
    let signals = Signals::new()?;
    let drained = Arc::new(Notify::new());
    let draining = drained.clone();
    let server = axum::serve(listener, router).with_graceful_shutdown(async move {
        signals.first_or(&stop).await;
        draining.notify_one();
    });
    tokio::select! {
        served = server => served,
        () = async {
            drained.notified().await;
            door.wait_until_empty().await;
            tokio::time::sleep(LINGER).await;
        } => Ok(()),
    }
}

/// The signals that end the server.
struct Signals(#[cfg(unix)] tokio::signal::unix::Signal);

impl Signals {
    fn new() -> io::Result<Self> {
        #[cfg(unix)]
        return Ok(Self(tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?));
        #[cfg(not(unix))]
        Ok(Self())
    }

    async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = self.0.recv() => {}
        }
        #[cfg(not(unix))]
        let _ = tokio::signal::ctrl_c().await;
    }

    /// Waits for the first signal or `stop`. The second signal then ends the process.
    async fn first_or(mut self, stop: &Notify) {
        tokio::select! {
            () = self.next() => {}
            () = stop.notified() => {}
        }
        tokio::spawn(async move {
            self.next().await;
            print_error("kv: a second signal: requests are left without an end\n");
            std::process::exit(INTERRUPTED);
        });
    }
}

async fn models(State(shared): State<Arc<Shared>>) -> Response {
    let Served { model, context, .. } = &shared.served;
    let model = json!({
        "id": model.name, "object": "model", "created": 0, "owned_by": "kv-reference", "max_model_len": context
    });
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [model] }))
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    metrics::response(shared.served.door.counts(), shared.answers.load(Ordering::Relaxed))
}

type Body = Result<Bytes, BytesRejection>;

async fn completions(State(shared): State<Arc<Shared>>, body: Body) -> Result<Response, ApiError> {
    answer(&shared, Question::of_completion(&bytes(body)?)?).await
}

async fn chat_completions(State(shared): State<Arc<Shared>>, body: Body) -> Result<Response, ApiError> {
    answer(&shared, Question::of_chat(&bytes(body)?)?).await
}

fn bytes(body: Body) -> Result<Bytes, ApiError> {
    body.map_err(|e| match e.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            ApiError::body(e.status(), format!("the body has more than {MOST_BODY} bytes"))
        }
        status => ApiError::body(status, e.body_text()),
    })
}

/// Runs a request and answers it, whole or in a stream.
async fn answer(shared: &Arc<Shared>, question: Question) -> Result<Response, ApiError> {
    let Served { model, context, door, .. } = &shared.served;
    if question.model.as_ref().is_some_and(|name| *name != model.name) {
        return Err(ApiError::not_found(format!("model: only {} is here", model.name)));
    }
    let ticket = door.enter().ok_or_else(ApiError::overloaded)?;
    let is_chat = matches!(question.prompt, Prompt::Chat(_));
    let (of_task, prompt) = (shared.clone(), question.prompt);
    let prompt = tokio::task::spawn_blocking(move || tokens(&of_task.served, prompt)).await;
    let prompt = prompt.map_err(|e| ApiError::failed(e.to_string()))??;
    let (length, room) = (prompt.len(), context.saturating_sub(prompt.len()));
    let most = question.most.unwrap_or(room);
    if length == 0 {
        return Err(ApiError::field("prompt", "is empty"));
    }
    if room == 0 || most > room {
        let what = format!("the prompt has {length} tokens and {most} may follow, of a context of {context}");
        return Err(ApiError::invalid(what));
    }
    let Question { sampling, log_probabilities, stop, stream, include_usage, .. } = question;
    let events = door.send(Request { prompt, most, sampling, log_probabilities }, ticket);
    let mut parts = read(model.clone(), stop, events, PATIENCE);
    let number = shared.answers.fetch_add(1, Ordering::Relaxed);
    let mut writer = Writer::new(is_chat, number, &model.name, length);
    if stream {
        let events = Chunks { writer, parts: Some(parts), include_usage }.into_stream();
        return Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response());
    }
    let whole = collect(&mut parts).await?;
    Ok(json_response(StatusCode::OK, &writer.whole(&whole)))
}

/// The tokens of a prompt.
fn tokens(served: &Served, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let Served { model, chat, .. } = served;
    let invalid = |e: kv_model::Error| ApiError::invalid(e.to_string());
    let tokenizer = model.tokenizer().map_err(invalid)?;
    match prompt {
        Prompt::Text(text) => tokenizer.encode(&text).map_err(invalid),
        Prompt::Tokens(tokens) => {
            model.check_tokens(&tokens).map_err(|e| ApiError::field("prompt", e))?;
            Ok(tokens)
        }
        Prompt::Chat(messages) => {
            let chat = chat.as_ref().map_err(|e| ApiError::invalid(e.to_string()))?;
            let (text, left_out) = chat.text(&messages).map_err(|e| ApiError::invalid(e.to_string()))?;
            if let Some(Message { role, .. }) = left_out {
                let role: String = role.chars().take(64).collect();
                let what = format!("of a message of {role:?}, {}", chat.leaves_out());
                return Err(ApiError::field("messages", what));
            }
            tokenizer.encode_chat(&text).map_err(invalid)
        }
    }
}

/// All parts of an answer in one.
async fn collect(parts: &mut Receiver<Part>) -> Result<Part, ApiError> {
    let mut whole = Part::default();
    while let Some(part) = parts.recv().await {
        whole.text.push_str(&part.text);
        whole.scored.extend(part.scored);
        match part.end {
            Some(End { finish: Err(e), .. }) => return Err(ApiError::failed(e)),
            Some(end) => return Ok(Part { end: Some(end), ..whole }),
            None => {}
        }
    }
    Err(ApiError::failed("the answer has no end"))
}

/// The events of a stream.
struct Chunks {
    writer: Writer,
    parts: Option<Receiver<Part>>, // until the last one
    include_usage: bool,
}

impl Chunks {
    fn into_stream(self) -> impl Stream<Item = Result<SseEvent, Infallible>> {
        let first = self.writer.role();
        let rest = stream::unfold(self, |mut chunks| async move {
            let part = chunks.parts.as_mut()?.recv().await;
            let (events, is_last) = chunks.events(part);
            if is_last {
                chunks.parts = None;
            }
            Some((stream::iter(events), chunks))
        });
        let events = stream::iter(first.map(event)).chain(rest.flatten());
        events.map(Ok)
    }

    /// The events of a part, and whether they are the last ones.
    fn events(&mut self, part: Option<Part>) -> (Vec<SseEvent>, bool) {
        let done = || SseEvent::default().data("[DONE]");
        let Some(part) = part else { return (vec![], true) };
        match part.end.as_ref().map(|end| &end.finish) {
            None => (vec![event(self.writer.part(&part))], false),
            Some(Err(e)) => (vec![event(ApiError::failed(e.as_str()).json()), done()], true),
            Some(Ok(_)) => {
                let counts = self.include_usage.then(|| event(self.writer.counts(&part)));
                let last = event(self.writer.part(&part));
                ([Some(last), counts, Some(done())].into_iter().flatten().collect(), true)
            }
        }
    }
}

fn event(chunk: Value) -> SseEvent {
    SseEvent::default().data(chunk.to_string())
}
