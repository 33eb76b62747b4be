//! What a request asks for.

use std::hash::{BuildHasher, Hasher, RandomState};

use kv_llama::Sampling;
use kv_model::Message;
use serde::Deserialize;

use super::error::ApiError;
use super::fields::Fields;

/// A checked request, which knows neither the model nor its context.
pub struct Question {
    pub prompt: Prompt,
    /// The name of the model, if the request has one.
    pub model: Option<String>,
    /// Tokens to generate, at most; none for as many as the context has room for.
    pub most: Option<usize>,
    pub sampling: Sampling,
    pub stop: Vec<String>,
    pub log_probabilities: Option<usize>,
    pub stream: bool,
    /// Whether a stream ends with counts of tokens.
    pub include_usage: bool,
}

/// What is to be continued.
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Chat(Vec<Message>),
}

/// Default tokens of a completion.
const DEFAULT_TOKENS: usize = 16;

/// Messages of a conversation, at most, and bytes that a template writes for them: it runs once for each to see
/// that it leaves none out, and must end in time.
const MOST_MESSAGES: usize = 256;
const MOST_WRITTEN: usize = 128 << 20;

/// Most likely tokens whose log-probabilities may be asked for.
const MOST_LIKELY: usize = 20;

/// Stop strings, at most, and their bytes.
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 1024;

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a string or a list of token ids")]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a string or a list of strings")]
enum StopField {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageField {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "content must be a string or a list of parts with a text")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    #[serde(rename = "type")]
    kind: PartKind,
    text: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum PartKind {
    Text,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl Question {
    /// That of `/v1/completions`.
    pub fn of_completion(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let prompt = match fields.required("prompt")? {
            PromptField::Text(text) => Prompt::Text(text),
            PromptField::Tokens(tokens) => Prompt::Tokens(tokens),
        };
        let log_probabilities = fields.take("logprobs")?;
        let mut question = Self::common(fields, prompt, log_probabilities)?;
        question.most.get_or_insert(DEFAULT_TOKENS);
        Ok(question)
    }

    /// That of `/v1/chat/completions`.
    pub fn of_chat(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let messages: Vec<MessageField> = fields.required("messages")?;
        if messages.is_empty() || messages.len() > MOST_MESSAGES {
            return Err(ApiError::field("messages", format!("must be 1 to {MOST_MESSAGES}")));
        }
        let text = |content| match content {
            Content::Text(text) => text,
            Content::Parts(parts) => {
                parts.into_iter().map(|Part { kind: PartKind::Text, text }| text).collect()
            }
        };
        let messages = messages.into_iter().map(|message| Message::new(message.role, text(message.content)));
        let messages: Vec<Message> = messages.collect();
        let bytes: usize = messages.iter().map(|message| message.role.len() + message.content.len()).sum();
        if messages.len().saturating_mul(bytes) > MOST_WRITTEN {
            let what = format!("{} messages of together {bytes} bytes are too many", messages.len());
            return Err(ApiError::field("messages", what));
        }
        let prompt = Prompt::Chat(messages);
        let (is_asked, top) = (fields.take("logprobs")?.unwrap_or(false), fields.take("top_logprobs")?);
        if top.is_some() && !is_asked {
            return Err(ApiError::field("top_logprobs", "needs logprobs"));
        }
        Self::common(fields, prompt, is_asked.then_some(top.unwrap_or(0)))
    }

    /// The fields that both have.
    fn common(
        mut fields: Fields,
        prompt: Prompt,
        log_probabilities: Option<usize>,
    ) -> Result<Self, ApiError> {
        if log_probabilities.is_some_and(|n| n > MOST_LIKELY) {
            return Err(ApiError::field("logprobs", format!("must be at most {MOST_LIKELY} tokens")));
        }
        // Clients send these with the values that change nothing.
        fields.neutral("n", 1)?;
        fields.neutral("best_of", 1)?;
        fields.neutral("echo", false)?;
        fields.neutral("frequency_penalty", 0)?;
        fields.neutral("presence_penalty", 0)?;
        let _: Option<String> = fields.take("user")?; // says who asks
        let (most, also) = (fields.take("max_tokens")?, fields.take("max_completion_tokens")?);
        if most.is_some() && also.is_some() && most != also {
            return Err(ApiError::field("max_tokens", "differs from max_completion_tokens"));
        }
        let most = most.or(also);
        if most == Some(0) {
            return Err(ApiError::field("max_tokens", "must be at least 1"));
        }
        let stream = fields.take("stream")?.unwrap_or(false);
        let options: Option<StreamOptions> = fields.take("stream_options")?;
        if options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "needs stream"));
        }
        let question = Self {
            prompt,
            model: fields.take("model")?,
            most,
            sampling: sampling(&mut fields)?,
            stop: stop(&mut fields)?,
            log_probabilities,
            stream,
            include_usage: options.unwrap_or_default().include_usage.unwrap_or(false),
        };
        fields.finish()?;
        Ok(question)
    }
}

/// The sampling; by default a draw at temperature 1 with a seed of its own.
fn sampling(fields: &mut Fields) -> Result<Sampling, ApiError> {
    let temperature = fields.take("temperature")?.unwrap_or(1.0);
    let top_p = fields.take("top_p")?.unwrap_or(1.0);
    let any = || RandomState::new().build_hasher().finish();
    let seed = fields.take("seed")?.map_or_else(any, |seed: i64| seed as u64);
    let top_k: i64 = fields.take("top_k")?.unwrap_or(0);
    // -1 is vLLM's word for all.
    let top_k = match usize::try_from(top_k.max(0)) {
        Ok(k) if top_k >= -1 => k,
        _ => return Err(ApiError::field("top_k", "must be a number of tokens, or 0 or -1 for all")),
    };
    let min_p = fields.take("min_p")?.unwrap_or(0.0);
    let penalty = fields.take("repetition_penalty")?.unwrap_or(1.0);
    let sampling = Sampling::new(temperature, top_p, seed);
    let sampling = sampling.and_then(|sampling| sampling.with_min_p(min_p));
    let sampling = sampling.and_then(|sampling| sampling.with_repetition_penalty(penalty));
    sampling.map(|sampling| sampling.with_top_k(top_k)).map_err(|e| ApiError::invalid(e.to_string()))
}

/// The stop strings.
fn stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stop = match fields.take("stop")? {
        None => vec![],
        Some(StopField::One(string)) => vec![string],
        Some(StopField::Many(strings)) => strings,
    };
    match stop.len() <= MOST_STOPS && stop.iter().all(|string| (1..=LONGEST_STOP).contains(&string.len())) {
        true => Ok(stop),
        false => {
            let what = format!("must be at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} bytes");
            Err(ApiError::field("stop", what))
        }
    }
}
