//! The tokenizer of a build without the feature `tokenizers`: no model has one.

use std::path::Path;

use crate::gguf::Gguf;
use crate::{Message, Result};

/// Text to tokens and back: without the feature `tokenizers` there is no value of this type.
pub enum Tokenizer {}

impl Tokenizer {
    pub(crate) fn of_folder(_: &Path) -> Result<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn of_gguf(_: &Gguf) -> Result<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn stop_tokens(&self) -> &[u32] {
        match *self {}
    }

    /// # Errors
    /// None: there is no tokenizer.
    pub fn has_two_bos(&self, _: &[u32]) -> Result<bool> {
        match *self {}
    }

    /// # Errors
    /// None: there is no tokenizer.
    pub fn encode(&self, _: &str) -> Result<Vec<u32>> {
        match *self {}
    }

    /// # Errors
    /// None: there is no tokenizer.
    pub fn encode_chat(&self, _: &str) -> Result<Vec<u32>> {
        match *self {}
    }

    /// # Errors
    /// None: there is no tokenizer.
    pub fn encode_piece(&self, _: &str) -> Result<Vec<u32>> {
        match *self {}
    }

    /// # Errors
    /// None: there is no tokenizer.
    pub fn decode(&self, _: &[u32]) -> Result<String> {
        match *self {}
    }

    /// Nothing: there is no tokenizer.
    #[must_use]
    pub fn words(&self) -> Vec<u32> {
        match *self {}
    }

    /// Nothing: there is no tokenizer.
    #[must_use]
    pub fn token_id(&self, _: &str) -> Option<u32> {
        match *self {}
    }
}

/// A model's chat template: without the feature `tokenizers` there is none.
#[derive(Debug)]
pub enum ChatTemplate {}

impl ChatTemplate {
    pub(crate) fn of_folder(_: &Path) -> Result<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn of_gguf(_: &Gguf) -> Result<Option<Self>> {
        Ok(None)
    }

    /// # Errors
    /// None: there is no template.
    pub fn render(&self, _: &[Message], _: bool) -> Result<String> {
        match *self {}
    }

    /// # Errors
    /// As [`Self::render`].
    pub fn left_out<'a>(&self, _: &'a [Message]) -> Result<Option<&'a Message>> {
        match *self {}
    }
}

/// The text of tokens as they arrive: without the feature `tokenizers` there is none.
pub struct TextStream<'a>(&'a Tokenizer);

impl<'a> TextStream<'a> {
    /// A stream at the beginning of a text.
    #[must_use]
    pub const fn new(tokenizer: &'a Tokenizer) -> Self {
        Self(tokenizer)
    }

    /// # Errors
    /// None: there is no tokenizer.
    pub fn push(&mut self, _: u32) -> Result<String> {
        match *self.0 {}
    }

    /// # Errors
    /// None: there is no tokenizer.
    pub fn bytes(&self, _: u32) -> Result<Vec<u8>> {
        match *self.0 {}
    }

    /// Nothing: there is no tokenizer.
    #[must_use]
    pub fn finish(self) -> String {
        match *self.0 {}
    }
}
