//! Steps with quantized weights, whose products are of integers, next to products of the same numbers in
//! single precision.

use std::path::Path;
use std::sync::Arc;

use kv_llama::ops::log_softmax;
use kv_llama::{Decoder, ExactCache};
use kv_model::{AttentionWeights, FeedForwardWeights, Layer, Linear, Matrix, Model, Rope};

/// The model with all matrices in another form.
fn map(model: &Model, form: impl Fn(&Matrix) -> Matrix) -> Model {
    let linear = |linear: &Linear| Linear { weight: form(&linear.weight), bias: linear.bias.clone() };
    let layer = |layer: &Layer| {
        let (attention, feed_forward) = ((*layer.attention).clone(), (*layer.feed_forward).clone());
        let [q, k, v, o] = [&attention.q, &attention.k, &attention.v, &attention.o].map(linear);
        let [gate, up, down] = [&feed_forward.gate, &feed_forward.up, &feed_forward.down].map(linear);
        Layer {
            attention: Arc::new(AttentionWeights { q, k, v, o, ..attention }),
            feed_forward: Arc::new(FeedForwardWeights { gate, up, down, ..feed_forward }),
        }
    };
    Model {
        embedding: Arc::new(form(&model.embedding)),
        output: Arc::new(form(&model.output)),
        layers: model.layers.iter().map(layer).collect(),
        ..model.clone()
    }
}

/// Log-probabilities after each token of a text, token by token.
fn log_probabilities(model: &Arc<Model>, tokens: &[u32]) -> Vec<Vec<f64>> {
    let rope = Arc::new(Rope::new(&model.config, tokens.len()));
    let mut cache = ExactCache::new(&model.config, &rope);
    let mut decoder = Decoder::new(model.clone(), rope);
    tokens.iter().map(|&token| log_softmax(decoder.step(token, &mut cache).unwrap())).collect()
}

#[test]
fn fixed_point_changes_no_probabilities() {
    const TOKENS: usize = 128;
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets");
    let model = Model::load(&assets.join("tiny-llama-12m")).unwrap();
    let text = std::fs::read_to_string(assets.join("sotu-heldout.txt")).unwrap();
    let tokens = model.tokenizer().unwrap().encode(&text[..8 * TOKENS]).unwrap();
    let blocks = Arc::new(map(&model, |matrix| matrix.to_q8_0().unwrap()));
    let floats = map(&blocks, |matrix| Matrix::new(matrix.to_f32().into_owned(), matrix.n_in()));
    let [p, q] = [&Arc::new(floats), &blocks].map(|model| log_probabilities(model, &tokens[..TOKENS]));
    let divergence =
        |(p, q): (&Vec<f64>, &Vec<f64>)| -> f64 { p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum() };
    let mean = p.iter().zip(&q).map(divergence).sum::<f64>() / TOKENS as f64;
    println!("KL of fixed point against single precision: {mean:.1e}");
    assert!(mean < 1e-7, "{mean}");
}
