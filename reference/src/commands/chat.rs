//! Conversations in a model's chat template.

use std::time::Duration;

use kv_model::{ChatTemplate, Checkpoint, Message};
use kv_reference::Result;

use super::watchdog::{Limits, watched};

/// What a chat template may take. It is a program that may double a list again and again, which nothing else
/// stops ([`ChatTemplate`]).
const TEMPLATE_LIMITS: Limits = Limits { time: Duration::from_secs(10), memory: 1 << 30 };

/// The chat template of a checkpoint.
pub struct Chat {
    template: ChatTemplate,
    model: String,
}

impl Chat {
    /// That of a checkpoint which has one.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        Ok(Self { template: checkpoint.chat_template()?, model: checkpoint.name.clone() })
    }

    /// The text of a conversation, up to where the model answers, and the first message whose text the
    /// template leaves out. A template that takes more time or memory than conversations do ends the process.
    pub fn text<'a>(&self, messages: &'a [Message]) -> Result<(String, Option<&'a Message>)> {
        let refusal =
            format!("the chat template of {}: more time or memory than a conversation takes", self.model);
        let render = || Ok((self.template.render(messages, true)?, self.template.left_out(messages)?));
        watched(TEMPLATE_LIMITS, refusal, render)
    }

    /// Says that the template leaves a text out.
    pub fn leaves_out(&self) -> String {
        format!("the chat template of {} leaves its text out", self.model)
    }
}
