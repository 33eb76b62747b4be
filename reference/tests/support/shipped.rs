//! The shipped model and its text.

use std::path::Path;
use std::sync::Arc;

use kv_model::Model;

/// The model, and the tokens of the first bytes of the text that it has not been trained on.
pub fn shipped(bytes: usize) -> (Arc<Model>, Vec<u32>) {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let model = Model::load(&assets.join("tiny-llama-12m")).unwrap();
    let text = std::fs::read_to_string(assets.join("sotu-heldout.txt")).unwrap();
    let tokens = model.tokenizer().unwrap().encode(&text[..bytes.min(text.len())]).unwrap();
    (Arc::new(model), tokens)
}
