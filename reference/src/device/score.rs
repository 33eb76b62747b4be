//! Scores text and questions after a prompt, as [`eval`](crate::eval) does on the CPU.

use std::time::Instant;

use kv_llama::ops::argmax;
use kv_llama_gpu::Decoder;
use kv_llama_gpu::ranks::Lockstep;

use crate::eval::{Divergence, Question, RetrievalTask, TextScores};
use crate::{Error, Result};

/// Runs a prompt, `chunk` tokens at once, over the emptied cache of one sequence, feeds `tokens` one by one
/// and scores the prediction of each next one, as [`eval::score_text`](crate::eval::score_text) does.
///
/// # Errors
/// What the decoder returns.
pub fn score_text(
    decoder: &mut Lockstep<Decoder>,
    (prompt, chunk): (&[u32], usize),
    tokens: &[u32],
    reference: Option<&[Vec<f32>]>,
) -> Result<TextScores> {
    let mut divergence = Divergence::default();
    let mut all = vec![];
    let mut seconds = 0.0;
    start(decoder, prompt, chunk)?;
    for (i, pair) in tokens.windows(2).enumerate() {
        let start = Instant::now();
        let logits = logits_of(decoder, pair[0])?;
        seconds += start.elapsed().as_secs_f64();
        divergence.add(&logits, reference.map_or(&logits, |reference| &reference[i]), pair[1]);
        if reference.is_none() {
            all.push(logits);
        }
    }
    let steps = tokens.len().saturating_sub(1).max(1);
    Ok(TextScores { divergence, logits: all, ms_per_token: 1000.0 * seconds / steps as f64 })
}

/// The number of questions answered exactly. The task's prompt runs again before each question: a window that
/// has advanced cannot be restored.
///
/// # Errors
/// What the decoder returns.
pub fn answer_questions(
    decoder: &mut Lockstep<Decoder>,
    chunk: usize,
    task: &RetrievalTask,
) -> Result<usize> {
    let hits = task.questions.iter().map(|question| {
        start(decoder, &task.prompt, chunk)?;
        answers(decoder, question)
    });
    Ok(hits.collect::<Result<Vec<bool>>>()?.into_iter().filter(|&hit| hit).count())
}

/// Whether the greedy continuation of the question is its answer.
fn answers(decoder: &mut Lockstep<Decoder>, question: &Question) -> Result<bool> {
    let Some((&last, ask)) = question.ask.split_last() else {
        return Err(Error::argument("a question without tokens"));
    };
    for &token in ask {
        decoder.call(move |decoder| {
            decoder.feed(&[token])?;
            decoder.step()
        })?;
    }
    let mut token = last;
    for &expected in &question.answer {
        if argmax(&logits_of(decoder, token)?) as u32 != expected {
            return Ok(false);
        }
        token = expected;
    }
    Ok(true)
}

/// Runs a prompt over the emptied cache, and waits for it.
fn start(decoder: &mut Lockstep<Decoder>, prompt: &[u32], chunk: usize) -> Result<()> {
    let prompts = [prompt.to_vec()];
    Ok(decoder.call(move |decoder| {
        decoder.clear()?;
        decoder.prefill(&prompts, chunk)?;
        decoder.logits().map(drop)
    })?)
}

fn logits_of(decoder: &mut Lockstep<Decoder>, token: u32) -> Result<Vec<f32>> {
    Ok(decoder.call(move |decoder| {
        decoder.feed(&[token])?;
        decoder.step()?;
        decoder.logits()
    })?)
}
