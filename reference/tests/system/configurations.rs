//! What a checkpoint's files say about the model, wherever they say it.

use std::fs;
use std::path::Path;

use kv_llama::{logits, prefill};
use kv_model::{Model, Rope, RopeScaling, Yarn};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::support::gguf::Gguf;
use crate::support::kv::copy;

/// Replaces fields of a JSON file, which may be missing.
fn edit(path: &Path, parts: &Value) {
    let mut value: Value = fs::read(path).map_or(json!({}), |bytes| serde_json::from_slice(&bytes).unwrap());
    value.as_object_mut().unwrap().extend(parts.as_object().unwrap().clone());
    fs::write(path, value.to_string()).unwrap();
}

/// Largest difference from the fixture's logits, as a part of the largest logit.
fn error_of(model: &Model, folder: &Path) -> f32 {
    let expected: Value = serde_json::from_slice(&fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let tokens: Vec<u32> = serde_json::from_value(expected["tokens"].clone()).unwrap();
    let right: Vec<Vec<f32>> = serde_json::from_value(expected["logits"].clone()).unwrap();
    let rope = Rope::new(&model.config, tokens.len());
    let hidden = prefill(model, &rope, &tokens, &mut |_, _| Ok(())).unwrap();
    let ours = logits(model, &hidden).unwrap();
    let largest = right.concat().iter().fold(0.0_f32, |a, x| a.max(x.abs()));
    ours.iter().zip(right.concat()).fold(0.0_f32, |a, (x, y)| a.max((x - y).abs())) / largest
}

/// Writes the fixture's tensors under other names or as other types.
fn rewrite(folder: &Path, change: impl Fn(&str, TensorView<'_>) -> (String, Dtype, Vec<usize>, Vec<u8>)) {
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let changed: Vec<_> =
        SafeTensors::deserialize(&bytes).unwrap().iter().map(|(name, tensor)| change(name, tensor)).collect();
    let views = changed
        .iter()
        .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &path).unwrap();
}

fn unchanged(name: &str, tensor: &TensorView<'_>) -> (String, Dtype, Vec<usize>, Vec<u8>) {
    (name.to_owned(), tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())
}

#[test]
fn a_stored_output_matrix_is_used_though_the_configuration_says_tied() {
    let folder = copy("bias-untied");
    edit(&folder.path().join("config.json"), &json!({"tie_word_embeddings": true}));
    let model = Model::load(folder.path()).unwrap();
    assert!(model.output != model.embedding && !model.config.tie_word_embeddings);
    assert!(error_of(&model, folder.path()) < 1e-5);
}

#[test]
fn a_tied_matrix_may_be_stored_as_either() {
    let folder = copy("gqa");
    rewrite(folder.path(), |name, tensor| {
        let renamed = name.replace("model.embed_tokens", "lm_head");
        (renamed, tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())
    });
    let model = Model::load(folder.path()).unwrap();
    assert!(model.config.tie_word_embeddings && error_of(&model, folder.path()) < 1e-5);
    // Then it is no embedding.
    edit(&folder.path().join("config.json"), &json!({"tie_word_embeddings": false}));
    let error = Model::load(folder.path()).err().unwrap().to_string();
    assert!(error.contains("embed_tokens.weight` is missing"), "{error}");
}

#[test]
fn f64_tensors_load() {
    let folder = copy("gqa");
    rewrite(folder.path(), |name, tensor| {
        let numbers = tensor.data().as_chunks::<4>().0.iter().map(|x| f64::from(f32::from_le_bytes(*x)));
        (name.to_owned(), Dtype::F64, tensor.shape().to_vec(), numbers.flat_map(f64::to_le_bytes).collect())
    });
    assert!(error_of(&Model::load(folder.path()).unwrap(), folder.path()) < 1e-5);
}

#[test]
fn quantized_folders_are_refused_by_name() {
    let refused = |folder: &Path| Model::load(folder).err().unwrap().to_string();
    let folder = copy("gqa");
    edit(
        &folder.path().join("config.json"),
        &json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    );
    assert!(refused(folder.path()).contains("quant_method `gptq`"));
    // Without a word in the configuration.
    for part in ["qweight", "weight_packed"] {
        let folder = copy("gqa");
        rewrite(folder.path(), |name, tensor| {
            let name = name.replace("up_proj.weight", &format!("up_proj.{part}"));
            (name, tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())
        });
        assert!(refused(folder.path()).contains(&format!("up_proj.{part}`")), "{part}");
    }
    for dtype in [Dtype::F8_E4M3, Dtype::I8, Dtype::U8] {
        let folder = copy("gqa");
        rewrite(folder.path(), |name, tensor| match name {
            "model.norm.weight" => {
                (name.to_owned(), dtype, tensor.shape().to_vec(), vec![0; tensor.shape()[0]])
            }
            _ => unchanged(name, &tensor),
        });
        assert!(refused(folder.path()).contains(&format!("is of type {dtype:?}")), "{dtype:?}");
    }
    let folder = copy("gqa");
    let weights = folder.path().join("model.safetensors");
    fs::rename(weights, folder.path().join("pytorch_model.bin")).unwrap();
    assert!(refused(folder.path()).contains("pytorch_model.bin must be converted to safetensors"));
}

#[test]
fn ends_of_texts_are_read_from_every_file_of_a_folder() {
    let folder = copy("gqa");
    let ends = || Model::load(folder.path()).unwrap().config.eos_tokens;
    edit(&folder.path().join("config.json"), &json!({"eos_token_id": 7}));
    assert_eq!(ends(), [7]);
    let generation = folder.path().join("generation_config.json");
    edit(&generation, &json!({"eos_token_id": 9}));
    assert_eq!(ends(), [7, 9]);
    edit(&generation, &json!({"eos_token_id": [9, 4, 7]}));
    assert_eq!(ends(), [4, 7, 9]);
    edit(&generation, &json!({"eos_token_id": null}));
    assert_eq!(ends(), [7]);
    edit(&generation, &json!({"eos_token_id": "x"}));
    let error = Model::load(folder.path()).err().unwrap().to_string();
    assert!(error.contains("generation_config.json") && error.contains("eos_token_id"), "{error}");
}

/// RoPE scaling of a GGUF file with these metadata of the architecture.
fn rope(floats: &[(&str, f32)], kind: Option<&str>, divisors: Option<f32>) -> kv_model::Result<RopeScaling> {
    let mut gguf = Gguf::model("llama", &[b"a".to_vec(), b"b".to_vec()], 1);
    for (key, value) in floats {
        gguf.float(&format!("llama.rope.{key}"), *value);
    }
    kind.into_iter().for_each(|kind| gguf.text("llama.rope.scaling.type", kind));
    divisors.into_iter().for_each(|x| gguf.numbers("rope_freqs.weight", &[x]));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gguf.write(&path);
    Model::load(&path).map(|model| model.config.rope_scaling)
}

/// Keys and numbers of a GGUF file.
type Numbers<'a> = &'a [(&'a str, f32)];

#[test]
fn rope_scaling_is_read_from_keys_of_every_age() {
    let linear = |factor| RopeScaling::Linear { factor };
    let cases: [(Numbers<'_>, Option<&str>, RopeScaling); 9] = [
        (&[], None, RopeScaling::None),
        (&[("scale_linear", 4.0)], None, linear(4.0)),
        (&[("scaling.factor", 4.0)], None, linear(4.0)),
        (&[("scaling.factor", 4.0), ("scale_linear", 2.0)], None, linear(4.0)),
        (&[("scale_linear", 4.0)], Some("linear"), linear(4.0)),
        (&[("scaling.factor", 0.0)], Some("linear"), RopeScaling::None),
        (&[("scaling.factor", 4.0)], Some("none"), RopeScaling::None),
        (&[("scaling.attn_factor", 1.0)], Some("linear"), RopeScaling::None),
        (&[], Some("linear"), RopeScaling::None),
    ];
    for (floats, kind, right) in cases {
        assert_eq!(rope(floats, kind, None).unwrap(), right, "{floats:?} {kind:?}");
    }
    let yarn = |floats: &[(&str, f32)]| match rope(floats, Some("yarn"), None).unwrap() {
        RopeScaling::Yarn(yarn) => yarn,
        other => panic!("{other:?}"),
    };
    let paper = Yarn::attention_factor_of(4.0, 1.0);
    for (floats, attention_factor) in [
        (vec![("scaling.factor", 4.0)], paper),
        (vec![("scale_linear", 4.0)], paper),
        (vec![("scaling.factor", 4.0), ("scaling.attn_factor", 0.5)], 0.5 * paper),
        (vec![("scaling.factor", 4.0), ("scaling.yarn_attn_factor", 0.5)], 0.5 * paper),
        (vec![("scaling.factor", 4.0), ("scaling.yarn_log_multiplier", 1.0)], 1.0),
    ] {
        let got = yarn(&floats);
        assert_eq!(
            (got.factor, got.original_max_seq_len, got.beta_fast, got.beta_slow),
            (4.0, 8.0, 32.0, 1.0)
        );
        assert!((got.attention_factor - attention_factor).abs() < 1e-9, "{floats:?}");
    }
    let betas =
        yarn(&[("scaling.factor", 4.0), ("scaling.yarn_beta_fast", 5.0), ("scaling.yarn_beta_slow", 2.0)]);
    assert_eq!((betas.beta_fast, betas.beta_slow), (5.0, 2.0));
    // Divisors come on top of a linear factor.
    assert_eq!(rope(&[], None, Some(8.0)).unwrap(), RopeScaling::Divisors(vec![8.0]));
    assert_eq!(rope(&[("scale_linear", 2.0)], None, Some(8.0)).unwrap(), RopeScaling::Divisors(vec![16.0]));
    let refusals: [(Numbers<'_>, Option<&str>, Option<f32>, &str); 3] = [
        (&[("scaling.factor", 2.0)], Some("yarn"), Some(8.0), "together with yarn"),
        (&[("scaling.attn_factor", 0.5)], Some("linear"), None, "scaling.attn_factor"),
        (&[], Some("longrope"), None, "longrope"),
    ];
    for (floats, kind, divisors, what) in refusals {
        let error = rope(floats, kind, divisors).err().unwrap().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn split_files_and_experts_are_refused_by_their_number() {
    let refused = |edit: &dyn Fn(&mut Gguf)| {
        let mut gguf = Gguf::model("llama", &[b"a".to_vec(), b"b".to_vec()], 1);
        edit(&mut gguf);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        gguf.write(&path);
        Model::load(&path).err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert!(refused(&|gguf| gguf.value("split.count", 2, &[3, 0])).contains("one of 3 files"));
    assert!(refused(&|gguf| gguf.int("llama.expert_count", 8)).contains("8 experts"));
    assert_eq!(refused(&|gguf| gguf.value("split.count", 2, &[1, 0])), "");
    assert_eq!(refused(&|gguf| gguf.int("llama.expert_count", 0)), "");
}
