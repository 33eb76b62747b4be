use indicatif::ProgressBar;

use super::{Measured, Place, Shared};
use crate::Result;
use crate::eval::{SharedPrompt, answer_questions, score_text};
use crate::forward::Decoder;
use crate::method::{Method, Prepared};

/// Prompts that have been run once, exactly, and the dense cache's logits after them.
pub(super) struct Bench<'a> {
    shared: &'a Shared<'a>,
    prompt: SharedPrompt,
    needles: Option<SharedPrompt>,
    reference: Vec<Vec<f32>>, // of the dense 32-bit cache at every decoded position
}

impl<'a> Bench<'a> {
    pub fn new(shared: &'a Shared<'a>, progress: &ProgressBar) -> Result<Self> {
        let &Shared { model, ref rope, ref profile, prompt, decoded, ref needles, .. } = shared;
        progress.set_message("dense prefill");
        let run = |tokens: &[u32]| SharedPrompt::run(model, rope, tokens);
        let needles = needles.as_ref().map(|task| run(&task.prompt)).transpose()?;
        let prompt = run(prompt)?;
        progress.set_message("dense reference");
        let mut dense = prompt.fill(&"dense".parse()?, model, rope, profile)?;
        let mut decoder = Decoder::new(model.clone(), rope.clone());
        let reference = score_text(&mut decoder, dense.cache.as_mut(), decoded, None)?.logits;
        Ok(Self { shared, prompt, needles, reference })
    }

    pub fn measure(&self, method: &Method, progress: &ProgressBar) -> Result<Measured> {
        let Shared { model, rope, profile, decoded, needles, .. } = self.shared;
        progress.set_message(method.spec());
        let fill = |prompt: &SharedPrompt| prompt.fill(method, model, rope, profile);
        let Prepared { model, mut cache } = fill(&self.prompt)?;
        let mut decoder = Decoder::new(model.clone(), rope.clone());
        let scores = score_text(&mut decoder, cache.as_mut(), decoded, Some(&self.reference))?;
        progress.inc(1);
        let found = self.needles.as_ref().zip(needles.as_ref()).map(|(prompt, task)| -> Result<_> {
            answer_questions(&mut decoder, fill(prompt)?.cache.as_ref(), task)
        });
        let found = found.transpose()?;
        progress.inc(1);
        Ok(Measured {
            place: Place::Cpu,
            scores,
            tokens: cache.seq_len(),
            footprint: cache.footprint(),
            fetched: cache.fetched().per_step(model.config.n_layers * model.config.n_kv_heads),
            found,
        })
    }
}
