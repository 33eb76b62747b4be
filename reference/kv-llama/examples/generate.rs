//! Continues a text with the shipped model of 12 million parameters: `cargo example generate`.

use std::path::Path;
use std::sync::Arc;

use kv_llama::{Decoder, ExactCache, KvCache, Result, Sampler, Sampling};
use kv_model::{Model, Rope};

fn main() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-llama-12m");
    let model = Arc::new(Model::load(&folder)?);
    let tokenizer = model.tokenizer()?;
    let mut tokens = tokenizer.encode("The state of the Union is")?;

    let rope = Arc::new(Rope::new(&model.config, tokens.len() + 40)); // positions
    let mut cache = ExactCache::new(&model.config, &rope);
    let mut decoder = Decoder::new(model.clone(), rope);
    let mut sampler = Sampler::new(Sampling::new(0.7, 0.9, 1)?);

    let mut next = sampler.sample(decoder.prefill(&tokens, &mut cache)?);
    for _ in 0..40 {
        tokens.push(next);
        if model.config.eos_tokens.contains(&next) {
            break;
        }
        next = sampler.sample(decoder.step(next, &mut cache)?);
    }
    println!("{}", tokenizer.decode(&tokens)?);
    println!("{} tokens in {} bytes", cache.seq_len(), cache.footprint().kept);
    Ok(())
}
