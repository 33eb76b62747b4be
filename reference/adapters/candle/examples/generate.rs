//! A Llama of candle's that continues a text on scalar codes of 4 bits:
//!
//! ```sh
//! cargo run --release --example generate -- MODEL_FOLDER TEXT_FILE
//! ```
//!
//! The bases are fitted to the beginning of the text; a program would fit them once per model and save them.

use candle_core::{D, DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use kv_attend::Window;
use kv_candle::llama::{Config, Llama};
use kv_candle::{Recorder, SqCache};
use kv_owners::sq::Bits;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, folder, text] = &arguments[..] else { return Err(Error::msg("usage: MODEL_FOLDER TEXT_FILE")) };
    let config = std::fs::read_to_string(format!("{folder}/config.json"))?;
    let config: Config = serde_json::from_str(&config).map_err(Error::wrap)?;
    let weights = candle_core::safetensors::load(format!("{folder}/model.safetensors"), &Device::Cpu)?;
    let llama = Llama::load(VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu), &config)?;
    let tokenizer =
        tokenizers::Tokenizer::from_file(format!("{folder}/tokenizer.json")).map_err(Error::wrap)?;
    let text = tokenizer.encode(std::fs::read_to_string(text)?, false).map_err(Error::wrap)?;
    let forward = |tokens: &[u32], position| {
        Ok::<_, Error>((Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?, position))
    };

    let prompt = &text.get_ids()[..text.len().min(2048)];
    let mut recorders = vec![Recorder::default(); config.layers()];
    let (tokens, position) = forward(prompt, 0)?;
    llama.forward(&tokens, position, &mut recorders)?;
    let window = Window { sinks: 4, recent: 64, batch: 64 };
    let frequencies = config.frequencies();
    let mut caches = vec![];
    for recorder in &recorders {
        let bases = recorder.bases(&frequencies, 64)?.into_iter();
        let heads: Vec<_> = bases
            .map(|basis| basis.head(&frequencies, &Bits::default()).map_err(kv_candle::Error::from))
            .collect::<kv_candle::Result<_>>()?;
        caches.push(SqCache::new(&heads, window));
    }

    let (mut input, mut position, mut output) = (prompt.to_vec(), 0, vec![]);
    for _ in 0..64 {
        let (tokens, at) = forward(&input, position)?;
        let next = llama.forward(&tokens, at, &mut caches)?.argmax(D::Minus1)?.to_vec1::<u32>()?;
        position += input.len();
        output.extend(&next);
        input = next;
    }
    println!("{}", tokenizer.decode(&output, false).map_err(Error::wrap)?);
    let exact = 2 * 2 * position * config.layers(); // of 16 bits, per component
    let bytes: usize = caches.iter().map(SqCache::size).sum();
    eprintln!(
        "{position} tokens in {bytes} bytes, {:.1} bytes a component of 2",
        bytes as f64 * 2.0 / exact as f64
    );
    Ok(())
}
