//! Continuous batching.

use std::collections::VecDeque;

use super::Decoder;
use crate::{Error, Result};

/// A prompt, waiting or running, and the tokens that have followed it.
struct Request {
    prompt: usize,
    pushed: Vec<u32>,
}

/// Runs prompts with continuous batching: when a sequence ends, its place in the decoder's batch goes to the
/// next prompt while the others continue. The decoder's previous sequences are discarded.
///
/// `push` takes the index of a prompt and its next token, and returns whether it wants another one. The
/// tokens of a prompt come in order. If pages are missing, prompts wait until others have freed theirs; if
/// they are missing for the next step, the running prompt that came last is put back: its pages go to the
/// others, and later it runs again, as a prompt with the tokens that it has got (the recomputation of vLLM,
/// arXiv 2309.06180, 4.5).
///
/// # Errors
/// [`Error::Argument`] for a prompt that the decoder does not accept, and for a sequence that outgrows its
/// place; [`kv_device::Error::Pages`] for a sequence that needs more pages than there are; those of `push`;
/// [`Error::Blas`] and [`Error::Device`]. An error ends all prompts.
pub fn serve(
    decoder: &mut Decoder,
    prompts: &[Vec<u32>],
    chunk: usize,
    mut push: impl FnMut(usize, u32) -> Result<bool>,
) -> Result<()> {
    decoder.clear()?;
    (0..decoder.batch()).try_for_each(|place| decoder.end(place))?;
    let mut running: Vec<Option<Request>> = (0..decoder.batch()).map(|_| None).collect();
    let mut waiting: VecDeque<Request> =
        (0..prompts.len()).map(|prompt| Request { prompt, pushed: vec![] }).collect();
    loop {
        // Places whose next tokens have not been pushed yet.
        let mut fresh = admit(decoder, prompts, chunk, &mut running, &mut waiting)?;
        if fresh.is_empty() {
            if running.iter().all(Option::is_none) {
                return Ok(());
            }
            step(decoder, &mut running, &mut waiting)?;
            fresh = (0..running.len()).collect();
        }
        let tokens = decoder.next_tokens()?;
        for place in fresh {
            let Some(request) = &mut running[place] else { continue };
            request.pushed.push(tokens[place]);
            if !push(request.prompt, tokens[place])? {
                decoder.end(place)?;
                running[place] = None;
            }
        }
    }
}

/// Gives idle places to waiting requests, in order, as far as there are pages. Returns these places.
fn admit(
    decoder: &mut Decoder,
    prompts: &[Vec<u32>],
    chunk: usize,
    running: &mut [Option<Request>],
    waiting: &mut VecDeque<Request>,
) -> Result<Vec<usize>> {
    let mut admitted = vec![];
    for place in 0..running.len() {
        if running[place].is_some() {
            continue;
        }
        let Some(request) = waiting.pop_front() else { break };
        let tokens = [&prompts[request.prompt][..], &request.pushed].concat();
        match decoder.prefill_one(place, &tokens, chunk) {
            Ok(()) => {
                running[place] = Some(request);
                admitted.push(place);
            }
            Err(Error::Device(kv_device::Error::Pages { .. })) if running.iter().any(Option::is_some) => {
                waiting.push_front(request);
                break;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(admitted)
}

/// Launches a step of the running requests. While there are no pages for their next tokens, the one that came
/// last is put back. It then needs at least as many pages as it had, of which others have taken some, so it
/// waits until others end: each step is a token for all that run.
fn step(
    decoder: &mut Decoder,
    running: &mut [Option<Request>],
    waiting: &mut VecDeque<Request>,
) -> Result<()> {
    loop {
        let stepped = decoder.step();
        let Err(Error::Device(kv_device::Error::Pages { .. })) = stepped else { return stepped };
        let requests =
            running.iter().enumerate().filter_map(|(place, of)| Some((of.as_ref()?.prompt, place)));
        let (Some((_, last)), true) = (requests.clone().max(), requests.count() > 1) else { return stepped };
        decoder.end(last)?;
        if let Some(request) = running[last].take() {
            waiting.push_front(request);
        }
    }
}
