//! The places of a batch as an engine of continuous batching.

use kv_llama::serve::Engine;

use super::Decoder;
use crate::{Error, Result};

/// The sequences of a [`Decoder`]'s batch. Tokens are chosen on the host: of a greedy sequence the device's
/// choice is read, of others the logits. Both are read for all sequences at once.
pub struct Batch {
    decoder: Decoder,
    chunk: usize,
    choices: Option<Vec<Option<u32>>>, // (batch,), until the next launch
    logits: Option<Vec<f32>>,          // (batch, vocab_size), until the next launch
}

impl Batch {
    /// Empty places. The decoder's previous sequences are discarded; a prompt runs whole, `chunk` tokens at
    /// once, while the other sequences wait.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(mut decoder: Decoder, chunk: usize) -> Result<Self> {
        decoder.choose(kv_llama::Sampling::GREEDY);
        decoder.clear()?;
        (0..decoder.batch()).try_for_each(|place| decoder.end(place))?;
        Ok(Self { decoder, chunk, choices: None, logits: None })
    }

    /// The decoder, whose results are about to change.
    fn launching(&mut self) -> &mut Decoder {
        (self.choices, self.logits) = (None, None);
        &mut self.decoder
    }
}

impl Engine for Batch {
    type Error = Error;

    fn places(&self) -> usize {
        self.decoder.batch()
    }

    fn capacity(&self) -> usize {
        self.decoder.cache().capacity()
    }

    fn prefill(&mut self, place: usize, tokens: &[u32]) -> Result<usize> {
        let chunk = self.chunk;
        self.launching().prefill_one(place, tokens, chunk)?;
        Ok(tokens.len())
    }

    fn step(&mut self, tokens: &[(usize, u32)]) -> Result<()> {
        let mut fed = vec![0; self.places()]; // also to empty places, where nothing reads it
        tokens.iter().for_each(|&(place, token)| fed[place] = token);
        let decoder = self.launching();
        // Also what the device has chosen: a token that it takes for the end of a text stops a sequence.
        decoder.feed(&fed)?;
        decoder.step()
    }

    fn logits(&mut self, place: usize) -> Result<Vec<f32>> {
        let logits = match self.logits.take() {
            Some(logits) => logits,
            None => self.decoder.unchecked_logits()?,
        };
        let vocab = logits.len() / self.places();
        let row = logits[place * vocab..][..vocab].to_vec();
        self.logits = Some(logits);
        self.decoder.check_finite(row.iter().all(|x| x.is_finite()))?;
        Ok(row)
    }

    fn most_likely(&mut self, place: usize) -> Result<u32> {
        let choices = match self.choices.take() {
            Some(choices) => choices,
            None => self.decoder.choices()?,
        };
        let choice = choices[place];
        self.choices = Some(choices);
        choice.ok_or_else(|| self.decoder.not_finite())
    }

    fn end(&mut self, place: usize) -> Result<()> {
        self.decoder.end(place)
    }

    fn is_short_of_memory(error: &Error) -> bool {
        matches!(error, Error::Device(kv_device::Error::Pages { .. }))
    }
}
