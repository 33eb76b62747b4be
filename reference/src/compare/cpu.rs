//! Methods on the CPU.

use kv_llama::Decoder;
use kv_methods::Prepared;

use super::run::{Measured, Progress, Run};
use crate::Result;
use crate::eval::{RetrievalTask, SharedPrompt, answer_questions, score_text};

/// The scores of methods on a text, by index. The prompt is run once, exactly; logits are compared with those
/// of the dense 32-bit cache.
pub(super) fn score(
    run: &Run<'_>,
    methods: &[usize],
    (prompt, decoded): (&[u32], &[u32]),
    progress: &dyn Progress,
) -> Result<Vec<(usize, Measured)>> {
    if methods.is_empty() {
        return Ok(vec![]);
    }
    let Run { model, rope, profile, .. } = run;
    progress.message("dense prefill");
    let prompt = SharedPrompt::run(model, rope, prompt, methods.iter().map(|&index| &run.methods[index]))?;
    progress.message("dense reference");
    let mut dense = prompt.fill(&"dense".parse()?, model, rope, profile)?;
    let mut decoder = Decoder::new((*model).clone(), rope.clone());
    let reference = score_text(&mut decoder, dense.cache.as_mut(), decoded, None)?.logits;
    let measured = methods.iter().map(|&index| {
        let method = &run.methods[index];
        progress.message(&method.spec());
        let Prepared { model, mut cache } = prompt.fill(method, model, rope, profile)?;
        let mut decoder = Decoder::new(model.clone(), rope.clone());
        let scores = score_text(&mut decoder, cache.as_mut(), decoded, Some(&reference))?;
        progress.advance();
        let config = &model.config;
        let measured = Measured {
            scores,
            tokens: cache.seq_len(),
            footprint: cache.footprint(),
            fetched: cache.fetched().per_step(config.n_layers * config.n_kv_heads),
            fits: cache.fits(),
        };
        Ok((index, measured))
    });
    measured.collect()
}

/// The number of a task's questions that each method answers, by index.
pub(super) fn find(
    run: &Run<'_>,
    methods: &[usize],
    task: &RetrievalTask,
    progress: &dyn Progress,
) -> Result<Vec<(usize, usize)>> {
    if methods.is_empty() {
        return Ok(vec![]);
    }
    let Run { model, rope, profile, .. } = run;
    let prompt =
        SharedPrompt::run(model, rope, &task.prompt, methods.iter().map(|&index| &run.methods[index]))?;
    let found = methods.iter().map(|&index| {
        let method = &run.methods[index];
        progress.message(&method.spec());
        let Prepared { model, cache } = prompt.fill(method, model, rope, profile)?;
        let hits = answer_questions(&mut Decoder::new(model, rope.clone()), cache.as_ref(), task)?;
        progress.advance();
        Ok((index, hits))
    });
    found.collect()
}
