//! The batches of all ranks as one engine of continuous batching.

use kv_llama::serve::{Engine, Part};

use super::Lockstep;
use crate::{Batch, Error, Result};

/// The [`Batch`] of each rank, all of which run the same sequences.
pub struct Batches {
    ranks: Lockstep<Batch>,
    places: usize,
    capacity: usize,
}

impl Batches {
    /// Batches of the same number of places and capacity.
    ///
    /// # Errors
    /// [`Error::Rank`] of a rank that has failed.
    pub fn new(mut ranks: Lockstep<Batch>) -> Result<Self> {
        let (places, capacity) = ranks.call(|batch| Result::Ok((batch.places(), batch.capacity())))?;
        Ok(Self { ranks, places, capacity })
    }
}

impl Engine for Batches {
    type Error = Error;

    fn places(&self) -> usize {
        self.places
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn has_room(&mut self, prompts: &[(usize, usize)]) -> Result<bool> {
        let prompts = prompts.to_vec();
        self.ranks.call(move |batch| batch.has_room(&prompts))
    }

    fn prefill(&mut self, parts: &[Part<'_>]) -> Result<()> {
        let owned = |part: &Part<'_>| (part.place, part.tokens.to_vec(), part.is_last);
        let parts: Vec<(usize, Vec<u32>, bool)> = parts.iter().map(owned).collect();
        self.ranks.call(move |batch| {
            let parts = parts.iter().map(|&(place, ref tokens, is_last)| Part { place, tokens, is_last });
            batch.prefill(&parts.collect::<Vec<_>>())
        })
    }

    fn step(&mut self, tokens: &[(usize, u32)]) -> Result<()> {
        let tokens = tokens.to_vec();
        self.ranks.call(move |batch| batch.step(&tokens))
    }

    fn logits(&mut self, place: usize) -> Result<Vec<f32>> {
        self.ranks.call(move |batch| batch.logits(place))
    }

    fn most_likely(&mut self, place: usize) -> Result<u32> {
        self.ranks.call(move |batch| batch.most_likely(place))
    }

    fn end(&mut self, place: usize) -> Result<()> {
        self.ranks.call(move |batch| batch.end(place))
    }

    fn is_short_of_memory(error: &Error) -> bool {
        match error {
            Error::Rank { source, .. } => {
                source.downcast_ref::<Error>().is_some_and(Batch::is_short_of_memory)
            }
            error => Batch::is_short_of_memory(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_short_of_memory_as_one_is() {
        let of_rank = |source| Error::Rank { rank: 1, source };
        let pages = || Error::Device(kv_device::Error::Pages { needed: 3, free: 2, pages: 9, page: 16 });
        assert!(Batches::is_short_of_memory(&pages()));
        assert!(Batches::is_short_of_memory(&of_rank(Box::new(pages()))));
        assert!(!Batches::is_short_of_memory(&of_rank(Box::new(Error::argument("no pages")))));
        assert!(!Batches::is_short_of_memory(&of_rank("no pages".into())));
    }
}
