//! The sequences of a batch: appending prompts to them, and ending them.

use kv_device::{Allocating, Buffer};

use super::prompt::Prompt;
use super::{Decoder, Part};
use crate::{Error, Result};

impl Decoder {
    /// Empties all sequences.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn clear(&mut self) -> Result<()> {
        self.clears += 1;
        self.cache.clear(&self.gpu)?;
        self.place(&vec![0; self.batch])
    }

    /// Appends a prompt to each sequence, wherever it ends, and picks the tokens that follow; the next step
    /// feeds those. At most `chunk` tokens run at once, of one sequence or of several (or 32, if those are
    /// more). The residual streams of eight times as many are held, 4 bytes per component.
    ///
    /// The tokens of a chunk attend to each other exactly, and to earlier tokens as the cache stores them. A
    /// token that has been picked and not fed is not in the cache: a prompt that is to follow it begins with
    /// it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a wrong number of prompts, an empty prompt, tokens outside the vocabulary,
    /// more tokens than the cache has room for, or empty chunks, and [`kv_device::Error::Pages`] if the cache
    /// has no pages for them; nothing has changed then. [`Error::Blas`] without cuBLASLt; [`Error::Device`].
    pub fn prefill(&mut self, prompts: &[Vec<u32>], chunk: usize) -> Result<()> {
        if prompts.len() != self.batch {
            let (given, batch) = (prompts.len(), self.batch);
            return Err(Error::Argument(format!("{given} prompts for {batch} sequences")));
        }
        let starts = self.lengths()?;
        let prompts = starts.into_iter().zip(prompts).enumerate();
        let prompts: Vec<Prompt> =
            prompts.map(|(sequence, (start, tokens))| Prompt { sequence, start, tokens }).collect();
        self.check_prompts(&prompts, chunk)?;
        let ends: Vec<usize> = prompts.iter().map(Prompt::end).collect();
        let gpu = self.gpu.clone();
        self.cache.reserve(&gpu, &ends)?;
        self.run_prompts(&prompts, chunk)?;
        self.cache.set_lengths(&gpu, &ends)?;
        // For the last tokens: the rest of the last layer, as in a step.
        self.place(&ends.iter().map(|&end| end as u32 - 1).collect::<Vec<_>>())?;
        self.longest += 1;
        self.lengths = Some(ends);
        self.launch_after_attention(self.weights.layers.len() - 1)?;
        self.launch_end(&[Part::Products, Part::Rest])
    }

    /// As [`Self::prefill`] for one sequence: appends a prompt to it, or restarts it with the prompt if it
    /// has ended ([`Self::end`]). The others keep their tokens, logits and picks, and the next step continues
    /// all of them.
    ///
    /// # Errors
    /// As [`Self::prefill`], and [`Error::Argument`] for a sequence that does not exist.
    pub fn prefill_one(&mut self, sequence: usize, prompt: &[u32], chunk: usize) -> Result<()> {
        self.prefill_some(&[(sequence, prompt)], chunk)
    }

    /// As [`Self::prefill_one`] for several sequences, each with its prompt, which run together.
    ///
    /// # Errors
    /// As [`Self::prefill_one`], and [`Error::Argument`] for two prompts of a sequence.
    pub fn prefill_some(&mut self, prompts: &[(usize, &[u32])], chunk: usize) -> Result<()> {
        let mut lengths = self.lengths()?;
        self.check_sequences(prompts.iter().map(|prompt| prompt.0))?;
        let prompts = prompts.iter();
        let prompts: Vec<Prompt> = prompts
            .map(|&(sequence, tokens)| Prompt { sequence, start: lengths[sequence], tokens })
            .collect();
        self.check_prompts(&prompts, chunk)?;
        prompts.iter().for_each(|prompt| lengths[prompt.sequence] = prompt.end());
        let gpu = self.gpu.clone();
        self.cache.reserve(&gpu, &lengths)?;
        self.run_prompts(&prompts, chunk)?;
        for prompt in &prompts {
            let (sequence, end) = (prompt.sequence, prompt.end());
            self.cache.set_length(&gpu, sequence, end)?;
            self.sequences.positions.write_at(&gpu, sequence, &[end as u32 - 1])?;
            self.sequences.running.write_at(&gpu, sequence, &[1])?;
            self.picks.restart(&gpu, sequence..sequence + 1)?;
            self.ended[sequence] = false;
            self.longest = self.longest.max(end);
            self.lengths.iter_mut().for_each(|lengths| lengths[sequence] = end);
        }
        self.launch_after_attention(self.weights.layers.len() - 1)?;
        self.pick_for(prompts.iter().map(|prompt| prompt.sequence))
    }

    /// Computes the logits of some sequences and picks their next tokens. The activations of the other
    /// sequences are unused, since a step begins with new ones; their logits are still those of the last
    /// step.
    fn pick_for(&mut self, sequences: impl Iterator<Item = usize>) -> Result<()> {
        let (gpu, vocab) = (&*self.gpu, self.weights.config.vocab_size);
        let logits = &self.activations.logits;
        let all = match self.logits_of_all.take() {
            Some(all) => all,
            None => {
                let _purpose = Allocating::new("prompts");
                Buffer::zeros(gpu, logits.len())?
            }
        };
        self.launch_logits(all.pointer())?;
        for sequence in sequences {
            logits.copy(gpu, sequence * vocab, &all, sequence * vocab, vocab)?;
            self.picks.launch(gpu, &self.sequences, logits.pointer(), sequence..sequence + 1)?;
        }
        self.logits_of_all = Some(all);
        Ok(())
    }

    /// Whether a paged cache has pages for these sequences at these lengths, next to the others.
    pub(crate) fn has_room(&mut self, longer: &[(usize, usize)]) -> Result<bool> {
        let mut lengths = self.lengths()?;
        longer.iter().for_each(|&(sequence, length)| lengths[sequence] = length);
        let gpu = self.gpu.clone();
        match self.cache.reserve(&gpu, &lengths) {
            Ok(()) => Ok(true), // those that are not used are taken back by the next prompt or step
            Err(kv_device::Error::Pages { .. }) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Empties one sequence. It is idle, and its logits are undefined, until it gets a prompt
    /// ([`Self::prefill_one`], [`Self::prefill`]); the pages of a paged cache become free. Its picked tokens
    /// can be read until then.
    ///
    /// # Errors
    /// [`Error::Argument`] for a sequence that does not exist; [`Error::Device`].
    pub fn end(&mut self, sequence: usize) -> Result<()> {
        self.check_sequences([sequence].into_iter())?;
        self.cache.end(&self.gpu, sequence)?;
        self.ended[sequence] = true;
        self.lengths.iter_mut().for_each(|lengths| lengths[sequence] = 0);
        self.sequences.positions.write_at(&self.gpu, sequence, &[0])?;
        Ok(self.sequences.running.write_at(&self.gpu, sequence, &[0])?)
    }

    /// Whether a sequence is idle until it gets a prompt.
    pub(crate) fn has_ended(&self, sequence: usize) -> bool {
        self.ended[sequence]
    }

    /// Refuses sequences that do not exist or are named twice.
    fn check_sequences(&self, mut sequences: impl Iterator<Item = usize>) -> Result<()> {
        let mut named = vec![false; self.batch];
        sequences.try_for_each(|sequence| match named.get_mut(sequence) {
            Some(named) if !*named => {
                *named = true;
                Ok(())
            }
            Some(_) => Err(Error::Argument(format!("sequence {sequence} is named twice"))),
            None => Err(Error::Argument(format!("sequence {sequence} of a batch of {}", self.batch))),
        })
    }

    fn check_prompts(&self, prompts: &[Prompt], chunk: usize) -> Result<()> {
        if chunk == 0 || prompts.is_empty() || prompts.iter().any(|prompt| prompt.tokens.is_empty()) {
            return Err(Error::argument("no prompts, an empty one, or chunks of no tokens"));
        }
        prompts.iter().try_for_each(|prompt| self.check_tokens(prompt.tokens))?;
        let capacity = self.cache.capacity();
        match prompts.iter().find(|prompt| prompt.end() > capacity) {
            Some(Prompt { start, tokens, .. }) => Err(Error::Argument(format!(
                "{} tokens after {start} in a cache of {capacity} tokens",
                tokens.len()
            ))),
            None => Ok(()),
        }
    }

    /// Sets the position of every sequence.
    pub(super) fn place(&mut self, positions: &[u32]) -> Result<()> {
        self.longest = positions.iter().copied().max().unwrap_or(0) as usize;
        self.lengths = Some(positions.iter().map(|&position| position as usize).collect());
        self.sequences.positions.write(&self.gpu, positions)?;
        self.ended.fill(false);
        self.sequences.running.write(&self.gpu, &vec![1; self.batch])?;
        self.picks.restart(&self.gpu, 0..self.batch)
    }

    /// Lengths of all sequences. Waits for steps.
    pub(super) fn lengths(&self) -> Result<Vec<usize>> {
        if let Some(lengths) = &self.lengths {
            return Ok(lengths.clone());
        }
        let mut positions = vec![0; self.batch];
        self.sequences.positions.read_into(&self.gpu, &mut positions)?;
        Ok(positions.into_iter().map(|position: u32| position as usize).collect())
    }

    pub(super) fn run_those_not_ended(&self) -> Result<()> {
        let running: Vec<u32> = self.ended.iter().map(|&ended| u32::from(!ended)).collect();
        Ok(self.sequences.running.write(&self.gpu, &running)?)
    }
}
