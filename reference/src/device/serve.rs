use super::Decoder;
use crate::{Error, Result};

/// Runs prompts in the places of a decoder's batch, of which there may be fewer: a prompt that has ended
/// gives its place to the next one while the others go on (continuous batching). What the decoder had is
/// forgotten.
///
/// `push` takes the index of a prompt and its next token, and says whether it wants another one. The tokens of
/// a prompt come in order. Where pages are missing, prompts wait until others have given theirs back.
///
/// # Errors
/// [`Error::Argument`] for a prompt that the decoder does not take, and where one goes on for longer than its
/// place has room; [`Error::Pages`] where those that run need more than there are; those of `push`;
/// [`Error::Blas`] and [`Error::Device`]. The other prompts end with it.
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
        // Places whose next tokens nobody has seen.
        let mut fresh = vec![];
        for place in 0..places.len() {
            if places[place].is_some() || next == prompts.len() {
                continue;
            }
            match decoder.prefill_one(place, &prompts[next], chunk) {
                Ok(()) => places[place] = Some(next),
                Err(Error::Pages { .. }) if places.iter().any(Option::is_some) => break,
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
