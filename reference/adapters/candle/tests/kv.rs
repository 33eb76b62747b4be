//! Greedy tokens of candle's Llama on the repository's model are those of `kv generate`, for the dense cache
//! and for codes with the codebooks and bases of `kv calibrate`. The program is `$KV`, or that of the
//! repository's target folder; without one the test prints that it was skipped.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use kv_attend::Window;
use kv_candle::llama::{Config, Llama};
use kv_candle::{Dense, Kv, PqCache, SqCache};
use kv_owners::sq::{Basis, Bits};
use pq_core::{CodebookBuf, HeadBooks, PqShape};

const TOKENS: usize = 48;
/// Byte offsets and lengths of prompts in the text.
const PROMPTS: [(usize, usize); 4] = [(0, 600), (3_000, 1_500), (9_000, 2_500), (20_000, 4_000)];

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder of the repository's model.
fn folder() -> PathBuf {
    reference().join("assets/tiny-llama-12m")
}

fn kv() -> Option<PathBuf> {
    let target = reference().join("../target");
    let built = ["release", "debug"].map(|kind| target.join(kind).join("kv"));
    std::env::var_os("KV").map(PathBuf::from).into_iter().chain(built).find(|path| path.exists())
}

fn run(kv: &Path, arguments: &[&str]) {
    let output = Command::new(kv).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn generate<C: Kv>(llama: &Llama, prompt: &[u32], mut caches: Vec<C>) -> Vec<u32> {
    let (mut tokens, mut input, mut position) = (vec![], prompt.to_vec(), 0);
    while tokens.len() < TOKENS {
        let ids = Tensor::new(&input[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let logits = llama.forward(&ids, position, &mut caches).unwrap();
        position += input.len();
        let next = logits.argmax(D::Minus1).unwrap().to_vec1::<u32>().unwrap()[0];
        if next == 0 {
            break; // the end of the text
        }
        tokens.push(next);
        input = vec![next];
    }
    tokens
}

/// The codebooks and bases of `kv calibrate`, by the names of its file.
struct Profile(HashMap<String, Tensor>);

impl Profile {
    fn part(&self, name: &str) -> Vec<f32> {
        self.0[name].flatten_all().unwrap().to_vec1().unwrap()
    }

    fn scalar(&self, config: &Config, bits: &Bits) -> Vec<SqCache> {
        let window = Window { sinks: 4, recent: 64, batch: 64 };
        let head = |layer, head| {
            let part = |part: &str| self.part(&format!("sq/64/{layer}/{head}/{part}"));
            let basis = Basis {
                block: 64,
                mean: part("mean"),
                basis: part("basis"),
                dual: part("dual"),
                sigma: part("sigma"),
                value_mean: part("value-mean"),
                value_scale: part("value-scale")[0],
            };
            basis.head(&config.frequencies(), bits).unwrap()
        };
        (0..config.layers()).map(|layer| SqCache::new(&[head(layer, 0), head(layer, 1)], window)).collect()
    }

    fn product(&self, config: &Config) -> Vec<PqCache> {
        let window = Window { sinks: 4, recent: 64, batch: 1 };
        let book = |side: &str, layer: usize, head: usize| {
            let centroids = self.part(&format!("million/64x8/8/0/{side}/{layer}/{head}/centroids"));
            CodebookBuf::new(PqShape::new(config.head_dim(), 64, 8).unwrap(), &centroids).unwrap()
        };
        let books = |layer, head| Arc::new(HeadBooks::new(book("k", layer, head), book("v", layer, head)));
        (0..config.layers()).map(|layer| PqCache::new(&[books(layer, 0), books(layer, 1)], window)).collect()
    }
}

#[test]
fn greedy_tokens_are_those_of_kv() {
    let Some(kv) = kv() else {
        println!("SKIPPED: `kv` is not built, and $KV does not name it");
        return;
    };
    let config = std::fs::read_to_string(folder().join("config.json")).unwrap();
    let config: Config = serde_json::from_str(&config).unwrap();
    let weights = candle_core::safetensors::load(folder().join("model.safetensors"), &Device::Cpu).unwrap();
    let llama = Llama::load(VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu), &config).unwrap();
    let tokenizer = tokenizers::Tokenizer::from_file(folder().join("tokenizer.json")).unwrap();
    let text = std::fs::read_to_string(reference().join("assets/sotu-heldout.txt")).unwrap();

    let scratch = std::env::temp_dir().join(format!("kv-candle-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let path = |name: &str| scratch.join(name).display().to_string();
    run(&kv, &["calibrate", &path("profile"), "--tokens", "2048", "--methods", "sq:block=64,million"]);
    let profile = Profile(candle_core::safetensors::load(path("profile"), &Device::Cpu).unwrap());

    let methods =
        ["dense:dtype=f32", "sq:block=64:exact=f32", "sq:k=4:v=4:block=64:exact=f32", "million:exact=f32"];
    let mut differences = vec![];
    for (first, len) in PROMPTS {
        let prompt = text[first..first + len].trim();
        std::fs::write(path("prompt"), prompt).unwrap();
        let ids = tokenizer.encode(prompt, false).unwrap().get_ids().to_vec();
        for method in methods {
            let tokens = TOKENS.to_string();
            let arguments = ["generate", "--file", &path("prompt"), "--method", method, "--tokens", &tokens];
            let outputs = ["--profile", &path("profile"), "--device", "cpu", "--json", &path("json")];
            let outputs = if method.starts_with("dense") { &outputs[2..] } else { &outputs[..] };
            run(&kv, &[&arguments[..], outputs].concat());
            let json: serde_json::Value =
                serde_json::from_str(&std::fs::read_to_string(path("json")).unwrap()).unwrap();
            let expected: Vec<u32> = serde_json::from_value(json["tokens"].clone()).unwrap();
            let found = match method {
                "dense:dtype=f32" => generate(&llama, &ids, vec![Dense::default(); config.layers()]),
                "million:exact=f32" => generate(&llama, &ids, profile.product(&config)),
                "sq:block=64:exact=f32" => generate(&llama, &ids, profile.scalar(&config, &Bits::uniform(3))),
                _ => generate(&llama, &ids, profile.scalar(&config, &Bits::uniform(4))),
            };
            println!("{method}, {} tokens of prompt: {} of {}", ids.len(), found.len(), expected.len());
            if found != expected {
                differences.push((method, ids.len(), found, expected));
            }
        }
    }
    std::fs::remove_dir_all(&scratch).unwrap();
    assert!(differences.is_empty(), "{differences:?}");
}
