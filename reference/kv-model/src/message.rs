//! Messages of a conversation.

use serde::{Deserialize, Serialize};

/// A message of a conversation, which a [`ChatTemplate`](crate::ChatTemplate) writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`; templates may know others.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}
