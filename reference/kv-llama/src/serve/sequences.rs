//! Sequences on a CPU.

use super::{Engine, Part};
use crate::ops::argmax;
use crate::{Decoder, Error, KvCache, Result};

/// Sequences of a [`Decoder`], each with a cache of its own, which step in turn.
pub struct Sequences {
    decoder: Decoder,
    empty: Box<dyn KvCache>,
    capacity: usize,
    places: Vec<Place>,
}

/// A sequence, if there is one, and its logits until they are taken.
#[derive(Default)]
struct Place {
    cache: Option<Box<dyn KvCache>>,
    after: Option<Result<Vec<f32>>>,
}

impl Sequences {
    /// Room for `places` sequences of at most `capacity` tokens, whose caches begin as copies of `empty`.
    /// See [`Decoder::prefill`] for what it changes that a prompt runs in parts.
    #[must_use]
    pub fn new(decoder: Decoder, empty: Box<dyn KvCache>, (places, capacity): (usize, usize)) -> Self {
        let places = (0..places).map(|_| Place::default()).collect();
        Self { decoder, empty, capacity, places }
    }
}

impl Engine for Sequences {
    type Error = Error;

    fn places(&self) -> usize {
        self.places.len()
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    /// Memory of the host is not limited.
    fn has_room(&mut self, _: &[(usize, usize)]) -> Result<bool> {
        Ok(true)
    }

    fn prefill(&mut self, parts: &[Part<'_>]) -> Result<()> {
        for &Part { place, tokens, .. } in parts {
            let Place { cache, after } = find(&mut self.places, place)?;
            // What went wrong in an earlier part is told at the end of the prompt.
            if !matches!(after, Some(Err(_))) {
                let cache = cache.get_or_insert_with(|| self.empty.clone_box());
                *after = Some(self.decoder.prefill(tokens, cache.as_mut()).map(<[f32]>::to_vec));
            }
        }
        Ok(())
    }

    fn step(&mut self, tokens: &[(usize, u32)]) -> Result<()> {
        for &(place, token) in tokens {
            let Place { cache, after } = find(&mut self.places, place)?;
            let cache = cache.as_mut().ok_or_else(|| Error::Argument(format!("place {place} is empty")))?;
            *after = Some(self.decoder.step(token, cache.as_mut()).map(<[f32]>::to_vec));
        }
        Ok(())
    }

    fn logits(&mut self, place: usize) -> Result<Vec<f32>> {
        let none = || Err(Error::Argument(format!("no logits in place {place}")));
        find(&mut self.places, place)?.after.take().unwrap_or_else(none)
    }

    fn most_likely(&mut self, place: usize) -> Result<u32> {
        Ok(argmax(&self.logits(place)?) as u32)
    }

    fn end(&mut self, place: usize) -> Result<()> {
        *find(&mut self.places, place)? = Place::default();
        Ok(())
    }

    fn is_short_of_memory(_: &Error) -> bool {
        false
    }
}

fn find(places: &mut [Place], place: usize) -> Result<&mut Place> {
    let count = places.len();
    places.get_mut(place).ok_or_else(|| Error::Argument(format!("place {place} of {count}")))
}
