//! Answers in the shape of OpenAI's API: whole ones, and the chunks of streams.

use std::time::{SystemTime, UNIX_EPOCH};

use kv_llama::serve::Finish;
use serde_json::{Value, json};

use super::reader::{Candidate, Part, Scored};

/// Writes the answer to one request.
pub struct Writer {
    is_chat: bool,
    id: String,
    created: u64, // seconds since 1970
    model: String,
    prompt_tokens: usize,
    offset: usize, // characters written so far
}

impl Writer {
    /// A writer of the answer with this number.
    pub fn new(is_chat: bool, number: u64, model: &str, prompt_tokens: usize) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prefix = if is_chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:x}-{number}", since.as_nanos());
        Self { is_chat, id, created: since.as_secs(), model: model.to_owned(), prompt_tokens, offset: 0 }
    }

    /// A whole answer: all parts in one.
    pub fn whole(&mut self, part: &Part) -> Value {
        let mut choice = self.choice(part);
        if self.is_chat {
            choice["message"] = json!({ "role": "assistant", "content": part.text });
        } else {
            choice["text"] = part.text.as_str().into();
        }
        let mut answer =
            self.object(if self.is_chat { "chat.completion" } else { "text_completion" }, vec![choice]);
        answer["usage"] = self.usage(part);
        answer
    }

    /// What the chunks of a conversation begin with.
    pub fn role(&self) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        let choice = json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": null });
        self.is_chat.then(|| self.chunk(vec![choice]))
    }

    /// The chunk of a part.
    pub fn part(&mut self, part: &Part) -> Value {
        let mut choice = self.choice(part);
        if !self.is_chat {
            choice["text"] = part.text.as_str().into();
        } else if part.text.is_empty() {
            choice["delta"] = json!({});
        } else {
            choice["delta"] = json!({ "content": part.text });
        }
        self.chunk(vec![choice])
    }

    /// The chunk with the counts of tokens, after the last part.
    pub fn counts(&self, last: &Part) -> Value {
        let mut chunk = self.chunk(vec![]);
        chunk["usage"] = self.usage(last);
        chunk
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        self.object(if self.is_chat { "chat.completion.chunk" } else { "text_completion" }, choices)
    }

    fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        let Self { id, created, model, .. } = self;
        json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices })
    }

    /// A choice without its text.
    fn choice(&mut self, part: &Part) -> Value {
        let finish = part.end.as_ref().and_then(|end| end.finish.as_ref().ok());
        let reason = finish.map(|finish| match finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
        });
        json!({ "index": 0, "logprobs": self.log_probabilities(&part.scored), "finish_reason": reason })
    }

    fn usage(&self, part: &Part) -> Value {
        let (prompt, tokens) = (self.prompt_tokens, part.end.as_ref().map_or(0, |end| end.tokens));
        json!({ "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens })
    }

    fn log_probabilities(&mut self, scored: &[Scored]) -> Value {
        if scored.is_empty() {
            return Value::Null;
        }
        if self.is_chat {
            let one = |Candidate { bytes, log_probability }: &Candidate, text: String| {
                let logprob = finite(*log_probability);
                json!({ "token": text, "logprob": logprob, "bytes": bytes })
            };
            let content = scored.iter().map(|Scored { token, top }| {
                let mut entry = one(token, token.text());
                entry["top_logprobs"] = top.iter().map(|other| one(other, other.text())).collect();
                entry
            });
            return json!({ "content": content.collect::<Vec<_>>() });
        }
        let tokens: Vec<String> = scored.iter().map(|scored| scored.token.text()).collect();
        let offsets = tokens.iter().map(|text| {
            let offset = self.offset;
            self.offset += text.chars().count();
            offset
        });
        let offsets: Vec<usize> = offsets.collect();
        let own: Vec<Value> = scored.iter().map(|scored| finite(scored.token.log_probability)).collect();
        let top = scored.iter().map(|Scored { token, top }| {
            // As OpenAI's, with the token itself.
            let all = top.iter().chain([token]);
            all.map(|one| (one.text(), finite(one.log_probability))).collect::<serde_json::Map<_, _>>().into()
        });
        let top: Vec<Value> = top.collect();
        json!({ "tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets })
    }
}

/// A logarithm for JSON, which has no infinities.
fn finite(log_probability: f64) -> Value {
    log_probability.max(-9999.0).into()
}
