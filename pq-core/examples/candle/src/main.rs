//! A Llama on candle whose decode steps attend to product-quantized keys and values, next to the same Llama
//! with candle's own concatenated tensors:
//!
//! ```sh
//! cargo run --release --manifest-path pq-core/examples/candle/Cargo.toml -- MODEL_FOLDER TEXT_FILE
//! ```

mod llama;

use std::path::Path;

use candle_core::{D, Error, Result, Tensor};
use candle_nn::ops::log_softmax;
use llama::{Dense, Kv, Llama};
use pq_candle::PqLayer;
use pq_core::PqShape;

const PROMPT: usize = 2048;
const DECODED: usize = 192;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, text] = &arguments[..] else {
        return Err(Error::msg("usage: pq-candle MODEL_FOLDER TEXT_FILE"));
    };
    let model = Path::new(model);
    let tokenizer = tokenizers::Tokenizer::from_file(model.join("tokenizer.json")).map_err(Error::wrap)?;
    let text = tokenizer.encode(std::fs::read_to_string(text)?, false).map_err(Error::wrap)?;
    let tokens = text.get_ids().get(..PROMPT + DECODED).ok_or_else(|| Error::msg("the text is too short"))?;
    let llama = Llama::load(model, tokens.len())?;

    let dense = logits(&llama, tokens, Dense::default)?;
    println!("dense     perplexity {:.3}", perplexity(&dense, tokens)?);
    for subspaces in [64, 32, 16] {
        let shape = PqShape::new(llama.config.head_dim, subspaces, 8).map_err(Error::wrap)?;
        let coded = logits(&llama, tokens, || PqLayer::new(shape))?;
        let kl = (dense.exp()? * (&dense - &coded)?)?.sum(D::Minus1)?.mean_all()?.to_scalar::<f32>()?;
        println!("{subspaces:>2} bytes  perplexity {:.3}, KL {kl:.5}", perplexity(&coded, tokens)?);
    }
    Ok(())
}

/// Log-probabilities (DECODED, vocabulary): of the prompt's last token and of each teacher-forced decode step
/// but the last.
fn logits<C: Kv>(llama: &Llama, tokens: &[u32], cache: impl Fn() -> C) -> Result<Tensor> {
    let mut caches: Vec<C> = (0..llama.config.num_hidden_layers).map(|_| cache()).collect();
    let mut rows = vec![llama.forward(&tokens[..PROMPT], 0, &mut caches)?];
    for i in PROMPT..tokens.len() - 1 {
        rows.push(llama.forward(&tokens[i..=i], i, &mut caches)?);
    }
    log_softmax(&Tensor::cat(&rows, 0)?, D::Minus1)
}

fn perplexity(log_probabilities: &Tensor, tokens: &[u32]) -> Result<f32> {
    let next = Tensor::new(&tokens[PROMPT..], log_probabilities.device())?.unsqueeze(1)?;
    Ok((-log_probabilities.gather(&next, 1)?.mean_all()?.to_scalar::<f32>()?).exp())
}
