//! The places of a batch as an engine of continuous batching.

use kv_llama::serve::{Engine, Part};

use super::Decoder;
use crate::{Error, Result};

/// The sequences of a [`Decoder`]'s batch. Tokens are chosen on the host: of a greedy sequence the device's
/// choice is read, of others the logits. Both are read for all sequences at once.
///
/// A step runs the whole batch, so a sequence takes part in it while its prompt comes in parts: the last
/// token of a part is held back, and is fed to a step, or begins the next part if there is none between.
pub struct Batch {
    decoder: Decoder,
    prompts: Vec<Prompt>,              // (batch,)
    choices: Option<Vec<Option<u32>>>, // (batch,), until the next launch
    logits: Option<Vec<f32>>,          // (batch, vocab_size), until the next launch
}

/// How far a sequence's prompt is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Prompt {
    /// It has run, or there is none.
    Whole,
    /// It has more parts, and this token comes before them.
    Held(u32),
    /// It has more parts, and a step has been fed with what came before them.
    Fed,
}

impl Batch {
    /// Empty places. The decoder's previous sequences are discarded.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(mut decoder: Decoder) -> Result<Self> {
        decoder.choose(kv_llama::Sampling::GREEDY);
        decoder.clear()?;
        (0..decoder.batch()).try_for_each(|place| decoder.end(place))?;
        let prompts = vec![Prompt::Whole; decoder.batch()];
        Ok(Self { decoder, prompts, choices: None, logits: None })
    }

    fn check(&self, place: usize) -> Result<()> {
        match place < self.prompts.len() {
            true => Ok(()),
            false => Err(Error::Argument(format!("place {place} of {}", self.prompts.len()))),
        }
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

    fn has_room(&mut self, prompts: &[(usize, usize)]) -> Result<bool> {
        self.decoder.has_room(prompts)
    }

    fn prefill(&mut self, parts: &[Part<'_>]) -> Result<()> {
        parts.iter().try_for_each(|part| self.check(part.place))?;
        if parts.iter().any(|part| part.tokens.is_empty()) {
            return Err(Error::argument("a part of a prompt has no token"));
        }
        let to_run = parts.iter().map(|part| {
            let held = match self.prompts[part.place] {
                Prompt::Held(token) => Some(token),
                Prompt::Whole | Prompt::Fed => None,
            };
            let mut tokens: Vec<u32> = held.into_iter().chain(part.tokens.iter().copied()).collect();
            tokens.truncate(tokens.len() - usize::from(!part.is_last));
            (part.place, tokens)
        });
        let to_run: Vec<(usize, Vec<u32>)> = to_run.filter(|(_, tokens)| !tokens.is_empty()).collect();
        if !to_run.is_empty() {
            let prompts: Vec<(usize, &[u32])> =
                to_run.iter().map(|(place, tokens)| (*place, tokens.as_slice())).collect();
            let all = prompts.iter().map(|(_, tokens)| tokens.len()).sum();
            self.launching().prefill_some(&prompts, all)?;
        }
        for part in parts {
            self.prompts[part.place] = match part.tokens.last() {
                Some(&token) if !part.is_last => Prompt::Held(token),
                _ => Prompt::Whole,
            };
        }
        Ok(())
    }

    fn step(&mut self, tokens: &[(usize, u32)]) -> Result<()> {
        tokens.iter().try_for_each(|&(place, _)| self.check(place))?;
        let mut fed = vec![0; self.places()]; // also to empty places, where nothing reads it
        tokens.iter().for_each(|&(place, token)| fed[place] = token);
        let mut prompts = self.prompts.clone();
        for (place, prompt) in prompts.iter_mut().enumerate() {
            match *prompt {
                Prompt::Held(token) if !self.decoder.has_ended(place) => {
                    (fed[place], *prompt) = (token, Prompt::Fed);
                }
                Prompt::Whole | Prompt::Held(_) => {}
                Prompt::Fed => return Err(Error::argument("two steps between the parts of a prompt")),
            }
        }
        let decoder = self.launching();
        // Also what the device has chosen: a token that it takes for the end of a text stops a sequence.
        decoder.feed(&fed)?;
        decoder.step()?;
        self.prompts = prompts;
        Ok(())
    }

    fn logits(&mut self, place: usize) -> Result<Vec<f32>> {
        self.check(place)?;
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
        self.check(place)?;
        let choices = match self.choices.take() {
            Some(choices) => choices,
            None => self.decoder.choices()?,
        };
        let choice = choices[place];
        self.choices = Some(choices);
        choice.ok_or_else(|| self.decoder.not_finite())
    }

    fn end(&mut self, place: usize) -> Result<()> {
        self.check(place)?;
        self.prompts[place] = Prompt::Whole;
        self.decoder.end(place)
    }

    fn is_short_of_memory(error: &Error) -> bool {
        matches!(error, Error::Device(kv_device::Error::Pages { .. }))
    }
}
