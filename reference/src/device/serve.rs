//! Continuous batching.

use super::Decoder;
use crate::{Error, Result};

/// Runs prompts with continuous batching: when a sequence ends, its slot in the decoder's batch goes to the
/// next prompt while the others continue. The decoder's previous sequences are discarded.
///
/// `push` takes the index of a prompt and its next token, and returns whether it wants another one. The
/// tokens of a prompt come in order. If pages are missing, prompts wait until others have freed theirs.
///
/// # Errors
/// [`Error::Argument`] for a prompt that the decoder does not accept, and for a sequence that outgrows its
/// slot; [`kv_device::Error::Pages`] if the running sequences need more than there are; those of `push`;
/// [`Error::Blas`] and [`Error::Device`]. An error ends all prompts.
pub fn serve(
    decoder: &mut Decoder,
    prompts: &[Vec<u32>],
    chunk: usize,
    mut push: impl FnMut(usize, u32) -> Result<bool>,
) -> Result<()> {
    decoder.clear()?;
    let mut places: Vec<Option<usize>> = vec![None; decoder.batch()];
    (0..places.len()).try_for_each(|place| decoder.end(place))?;
    let mut next = 0;
    loop {
        // Slots whose next tokens have not been pushed yet.
        let mut fresh = vec![];
        for place in 0..places.len() {
            if places[place].is_some() || next == prompts.len() {
                continue;
            }
            match decoder.prefill_one(place, &prompts[next], chunk) {
                Ok(()) => places[place] = Some(next),
                Err(Error::Device(kv_device::Error::Pages { .. })) if places.iter().any(Option::is_some) => {
                    break;
                }
                Err(e) => return Err(e),
            }
            fresh.push(place);
            next += 1;
        }
        if fresh.is_empty() {
            if places.iter().all(Option::is_none) {
                return Ok(());
            }
            decoder.step()?;
            fresh = (0..places.len()).collect();
        }
        let tokens = decoder.next_tokens()?;
        for place in fresh {
            if let Some(prompt) = places[place]
                && !push(prompt, tokens[place])?
            {
                decoder.end(place)?;
                places[place] = None;
            }
        }
    }
}
