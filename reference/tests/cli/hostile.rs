//! Truncated, corrupt, mismatched and hostile files and arguments: one line on standard error and exit code
//! 2.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::kv::{copy, fixture, kv, refused, run};
#[cfg(target_os = "linux")]
use crate::support::kv::{kv_after, one_line};

/// Runs `kv logits` on a model.
fn model_refused(case: &str, model: &Path, what: &str) {
    refused(case, &["logits", "--model", model.to_str().unwrap(), "--tokens", "1,2"], what);
}

/// Replaces a text in a file of a copied fixture.
fn edited(name: &str, file: &str, from: &str, to: &str) -> tempfile::TempDir {
    let folder = copy(name);
    let path = folder.path().join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{file} has no {from}");
    std::fs::write(path, text.replace(from, to)).unwrap();
    folder
}

/// A copied fixture whose configuration has these entries, of JSON, too or instead.
fn configured(name: &str, entries: &str) -> tempfile::TempDir {
    fn merge(into: &mut Value, from: Value) {
        match (into, from) {
            (Value::Object(into), Value::Object(from)) => {
                from.into_iter()
                    .for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value));
            }
            (into, from) => *into = from,
        }
    }
    let folder = copy(name);
    let path = folder.path().join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    merge(&mut config, serde_json::from_str(entries).unwrap());
    std::fs::write(path, config.to_string()).unwrap();
    folder
}

#[test]
fn configs() {
    for (case, entries, what) in [
        (
            "another family",
            r#"{"model_type": "gpt2"}"#,
            "model_type `gpt2` is not supported, only llama, mistral, qwen2",
        ),
        ("a window", r#"{"sliding_window": 8}"#, "no sliding_window"),
        ("norms that are not stored", r#"{"model_type": "qwen3"}"#, "q_norm"),
        ("biases that are not stored", r#"{"model_type": "qwen2"}"#, "q_proj.bias"),
        ("no heads", r#"{"num_attention_heads": 0}"#, "num_attention_heads is 0"),
        ("heads that do not divide", r#"{"num_key_value_heads": 3}"#, "do not divide"),
        ("no kv heads", r#"{"num_key_value_heads": 0}"#, "num_key_value_heads is 0"),
        ("an odd head", r#"{"head_dim": 15}"#, "odd"),
        ("a head that is not stored", r#"{"head_dim": 32}"#, "has shape"),
        ("a huge vocabulary", r#"{"vocab_size": 18446744073709551615}"#, "vocab_size"),
        ("a larger vocabulary", r#"{"vocab_size": 97}"#, "has shape"),
        ("too many layers", r#"{"num_hidden_layers": 3}"#, "model.layers.2"),
        ("endless layers", r#"{"num_hidden_layers": 4000000000}"#, "num_hidden_layers"),
        ("a negative size", r#"{"hidden_size": -64}"#, "config.json: hidden_size: invalid value"),
        ("no epsilon", r#"{"rms_norm_eps": 0.0}"#, "rms_norm_eps"),
        ("an end that is a word", r#"{"eos_token_id": "</s>"}"#, "eos_token_id: `\"</s>\"` is no token"),
        ("a negative end", r#"{"eos_token_id": [2, -1]}"#, "eos_token_id: `-1` is no token"),
        ("a start beyond 32 bits", r#"{"bos_token_id": 4294967296}"#, "bos_token_id"),
        ("another activation", r#"{"hidden_act": "relu"}"#, "relu"),
        ("no context", r#"{"max_position_embeddings": 0}"#, "max_position_embeddings"),
        ("an unknown rope", r#"{"rope_parameters": {"rope_type": "longrope"}}"#, "longrope"),
        ("a rope without its factor", r#"{"rope_parameters": {"rope_type": "linear"}}"#, "factor"),
        (
            "a rope that divides by zero",
            r#"{"rope_parameters": {"rope_type": "linear", "factor": 0}}"#,
            "positive",
        ),
        (
            "two ropes",
            r#"{"rope_scaling": {"type": "linear", "factor": 2}}"#,
            "`rope_scaling` differs from `rope_parameters`",
        ),
        ("a rope that is a word", r#"{"rope_scaling": "yarn"}"#, "not an object"),
        ("two bases", r#"{"rope_theta": 0}"#, "`rope_theta` differs"),
    ] {
        model_refused(case, configured("gqa", entries).path(), what);
    }
    for (case, name, entries, what) in [
        ("a window of nothing", "mistral-window", r#"{"sliding_window": 0}"#, "sliding_window is 0"),
        ("a negative window", "mistral-window", r#"{"sliding_window": -5}"#, "config.json"),
        ("a window of null", "qwen2-window", r#"{"sliding_window": null}"#, "there is no sliding_window"),
        (
            "an unknown layer",
            "qwen2-window",
            r#"{"layer_types": ["chunked_attention"]}"#,
            "chunked_attention",
        ),
        (
            "a layer too few",
            "qwen2-window",
            r#"{"layer_types": ["sliding_attention"]}"#,
            "layer_types has no entry for layer 1",
        ),
        ("no interval", "smollm3", r#"{"no_rope_layers": []}"#, "no_rope_layers"),
    ] {
        model_refused(case, configured(name, entries).path(), what);
    }
    for (case, from, to, what) in [
        ("no JSON", "{\n", "", "config.json"),
        ("no family", "\"model_type\": \"llama\",", "", "no model_type"),
    ] {
        model_refused(case, edited("gqa", "config.json", from, to).path(), what);
    }
}

/// Another model's tensors under a configuration without them.
#[test]
fn tensors_that_the_model_does_not_use() {
    let unused = |case: &str, fixture: &str, entries: &str, names: &[&str]| {
        let folder = configured(fixture, entries);
        for name in names {
            model_refused(case, folder.path(), name);
        }
    };
    let llama = r#"{"model_type": "llama"}"#;
    let norms =
        ["a `llama` like this has no use for", "`model.layers.0.self_attn.k_norm.weight`", "and 1 more"];
    unused("Qwen3 as a Llama", "qwen3", llama, &norms);
    let biases = ["`model.layers.0.self_attn.k_proj.bias`", "and 3 more"];
    unused("Qwen2 as a Llama", "qwen2", llama, &biases);
    let bias = ["`model.layers.0.self_attn.k_proj.bias`"];
    unused("biases", "bias-untied", r#"{"attention_bias": false}"#, &bias);
    unused("layers", "gqa", r#"{"num_hidden_layers": 1}"#, &["model.layers.1."]);

    // Old checkpoints also store redundant tensors: rotary frequencies, and the output under tied embeddings.
    let folder = copy("mha");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let output = tensors.tensor("model.embed_tokens.weight").unwrap();
    let frequencies = [0; 32];
    let frequencies =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![8], &frequencies).unwrap();
    let mut all: Vec<(String, _)> = tensors.tensors();
    all.push(("lm_head.weight".into(), output));
    all.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), frequencies));
    safetensors::serialize_to_file(all, None, &path.with_extension("new")).unwrap();
    std::fs::rename(path.with_extension("new"), &path).unwrap();
    let args = ["logits", "--model", folder.path().to_str().unwrap(), "--tokens", "1,2"];
    let output = run("redundant tensors", kv(&args));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn safetensors() {
    let spoil = |case: &str, what: &str, spoil: &dyn Fn(&mut Vec<u8>)| {
        let folder = copy("gqa");
        let path = folder.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        spoil(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        model_refused(case, folder.path(), what);
    };
    spoil("an empty file", "ends after 0 bytes, 8 are needed", &|bytes| bytes.clear());
    spoil("a truncated file", "model.safetensors", &|bytes| bytes.truncate(bytes.len() / 2));
    spoil("a truncated header", "model.safetensors", &|bytes| bytes.truncate(20));
    spoil("a header of 2^63 bytes", "model.safetensors", &|bytes| bytes[7] = 0x80);
    spoil("a header that is no JSON", "model.safetensors", &|bytes| bytes[8] = b'x');
    spoil("a weight that is no number", "NaN", &|bytes| {
        let end = bytes.len();
        bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let text = |case: &str, from: &'static str, to: &'static str, what: &str| {
        spoil(case, what, &move |bytes| {
            let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
            bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        });
    };
    text("a tensor that is missing", "model.norm.weight", "model.nohm.weight", "model.norm.weight");
    text("a tensor of whole numbers", "\"F32\"", "\"I32\"", "of type I32");

    let folder = copy("sharded-f16");
    std::fs::remove_file(folder.path().join("model-00002-of-00003.safetensors")).unwrap();
    model_refused("a shard that is missing", folder.path(), "model-00002");
    let index = "model.safetensors.index.json";
    let folder = edited("sharded-f16", index, "model-00002-of-00003.safetensors", "../../etc/passwd");
    model_refused("a shard outside the folder", folder.path(), "not a plain file name");
    let folder = edited("sharded-f16", index, "weight_map", "weightmap");
    model_refused("an index without its map", folder.path(), index);
    let folder = edited("sharded-f16", index, "model-00001-of", "model-00003-of");
    model_refused("a tensor that is in another shard", folder.path(), "` is not in `model-00003-of-00003.");
    let folder =
        edited("sharded-f16", index, "\"weight_map\": {", "\"weight_map\": {\"a\": \"copy.safetensors\",");
    let [shard, again] =
        ["model-00001-of-00003.safetensors", "copy.safetensors"].map(|x| folder.path().join(x));
    std::fs::copy(shard, again).unwrap();
    model_refused("a tensor in two shards", folder.path(), "copy.safetensors, too");
    let folder = copy("gqa");
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    model_refused("a folder without weights", folder.path(), "holds neither");
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    model_refused("a folder without a config", folder.path(), "config.json");
    model_refused("a folder that is not there", Path::new("/nowhere/at/all"), "/nowhere/at/all");
}

#[test]
fn names_in_messages_are_cut_and_escaped() {
    let name = format!("\u{1b}[31m{}", "a".repeat(1 << 20));
    let json_name = serde_json::to_string(&name).unwrap();
    let folder = copy("gqa");
    let header = |tensor: &str| format!("{{{json_name}:{tensor}}}");
    for (case, header) in [
        ("a tensor behind the end", header(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#)),
        ("an unknown type", format!(r#"{{"a":{{"dtype":{json_name},"shape":[1],"data_offsets":[0,4]}}}}"#)),
    ] {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat();
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        model_refused(case, folder.path(), "model.safetensors");
    }
    for (file, from) in
        [("config.json", "\"llama\""), ("config.json", "\"silu\""), ("config.json", "\"default\"")]
    {
        model_refused(from, edited("gqa", file, from, &json_name).path(), "config.json: ");
    }
    let shard = "\"model-00002-of-00003.safetensors\"";
    let folder = edited("sharded-f16", "model.safetensors.index.json", shard, &json_name.replace('a', "/"));
    model_refused("a shard", folder.path(), "not a plain file name");
    let entry = |key: &str| {
        [&(key.len() as u64).to_le_bytes()[..], key.as_bytes(), &4_u32.to_le_bytes(), &[0; 4]].concat()
    };
    for name in [name.as_str(), &name[..60_000]] {
        let values = [entry(name), entry(name)].concat();
        let bytes = [b"GGUF\x03\0\0\0", &[0; 8][..], &2_u64.to_le_bytes(), &values].concat();
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        model_refused("a key twice", &path, "model.gguf: ");
    }
}

#[test]
fn gguf() {
    let original = std::fs::read(fixture("gguf-q8_0/model.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let spoil = |case: &str, what: &str, spoil: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = original.clone();
        spoil(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        model_refused(case, &path, what);
    };
    spoil("another magic", "not a GGUF file", &|bytes| bytes[0] = b'X');
    spoil("version 9", "version 9", &|bytes| bytes[4] = 9);
    spoil("2^64 tensors", "model.gguf", &|bytes| bytes[8..16].fill(0xff));
    spoil("2^64 metadata", "model.gguf", &|bytes| bytes[16..24].fill(0xff));
    spoil("a text of 2^64 bytes", "ends inside", &|bytes| bytes[24..32].fill(0xff));
    spoil("the magic alone", "ends inside", &|bytes| bytes.truncate(4));
    spoil("half a header", "ends inside", &|bytes| bytes.truncate(400));
    spoil("half the weights", "it is not whole", &|bytes| bytes.truncate(bytes.len() / 2));
    let text = |case: &str, from: &'static str, to: &'static str, what: &str| {
        spoil(case, what, &move |bytes| {
            let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
            bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        });
    };
    text(
        "another architecture",
        "\u{5}\0\0\0\0\0\0\0llama",
        "\u{5}\0\0\0\0\0\0\0gpt-2",
        "architecture `gpt-2` is not supported, only llama",
    );
    text("no block count", "llama.block_count", "llama.block_kount", "llama.block_count");
    text(
        "another architecture's names",
        "llama.context_length",
        "lxxma.context_length",
        "llama.context_length",
    );
    text("a tensor that is missing", "blk.1.attn_q.weight", "blk.1.attn_x.weight", "blk.1.attn_q.weight");
    text("an unknown tokenizer", "smollm", "smollx", "smollx");

    std::fs::write(&path, &original).unwrap();
    model_refused("the folder of a GGUF file", folder.path(), "give its file `model.gguf`");

    // Truncation at any point is an error.
    for cut in (0..original.len()).step_by(original.len() / 40) {
        spoil("a cut file", "", &|bytes| bytes.truncate(cut));
    }
}

#[test]
fn profiles_and_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let gqa = fixture("gqa");
    let gqa = gqa.to_str().unwrap();
    let weights = format!("{gqa}/model.safetensors");
    let nonsense = file("nonsense", b"nonsense");
    let short = file("short.txt", b"too short");
    let new = folder.path().join("new").to_str().unwrap().to_owned();
    let binary = file("binary.txt", &[0xff, 0xfe, 0x80]);
    let long = file("long.txt", &vec![b'a'; 9 << 20]);
    for (case, args, what) in [
        (
            "a profile that is none",
            &["compare", "--profile", &nonsense][..],
            "nonsense: is not a profile of format",
        ),
        ("weights as a profile", &["compare", "--profile", &weights], "not a profile"),
        ("a profile that is not there", &["compare", "--profile", "/nowhere"], "--profile: /nowhere: "),
        ("a text too short", &["compare", "--text", &short], "tokens"),
        ("a text that is no text", &["compare", "--text", &binary], "binary.txt"),
        ("a text that is not there", &["compare", "--text", "/nowhere"], "--text: /nowhere: "),
        ("an unknown method", &["compare", "--methods", "dense,zipcache"], "zipcache"),
        ("an unknown setting", &["compare", "--methods", "int4:bits=3"], "bits"),
        ("a method nearly right", &["compare", "--methods", "densee"], "`densee` (`dense` is one)"),
        ("a method in capitals", &["compare", "--methods", "MILLION"], "(`million` is one)"),
        ("no methods", &["compare", "--methods", ""], "no method is named"),
        ("JSON to standard output", &["compare", "--json", "-"], "--json -: name a file"),
        ("a weight file as a model", &["compare", "--model", &weights], "give the folder"),
        ("a model that is not there", &["compare", "--model", "/nowhere"], "--model: /nowhere: "),
        ("a ratio above one", &["compare", "--methods", "pqcache:ratio=2"], "ratio=2"),
        ("subspaces that do not divide", &["compare", "--methods", "million:k=7x8"], "7 subspaces"),
        (
            "a cache that keeps nothing",
            &["compare", "--context", "64", "--decode", "8", "--methods", "streaming:window=0:sinks=0"],
            "sinks=0 and window=0 leave no token to attend to",
        ),
        ("no context", &["compare", "--context", "0"], "at least one token"),
        ("a context beyond the model's", &["compare", "--context", "20000"], "exceed the context"),
        ("an endless context", &["compare", "--context", "18446744073709551615"], "context"),
        ("JSON to nowhere", &["compare", "--json", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        ("a token outside the vocabulary", &["logits", "--model", gqa, "--tokens", "96"], "token 96"),
        (
            "more tokens than positions",
            &["logits", "--model", gqa, "--tokens", &["1"; 65].join(",")],
            "exceed the context",
        ),
        ("a model without a tokenizer", &["generate", "a", "--model", gqa], "no tokenizer.json"),
        ("an empty prompt", &["generate", ""], "empty"),
        ("a prompt that is not there", &["generate", "--file", "/nowhere"], "--file: /nowhere: "),
        ("a prompt that is no text", &["generate", "-f", &binary], "binary.txt"),
        ("a prompt of 9 MiB", &["generate", "-f", &long], "has more than 8388608 bytes"),
        ("endless tokens", &["generate", "a", "--tokens", "18446744073709551615"], "exceed the context"),
        ("a negative temperature", &["generate", "a", "--temperature", "-1"], "temperature -1"),
        ("a depth outside the prompt", &["eval", "--depths", "1.5"], "--depths: 1.5 is not"),
        ("endless trials", &["eval", "--trials", "1000000000000"], "--trials 1000000000000: "),
        ("too few tokens to calibrate on", &["calibrate", &new, "--tokens", "3"], "too few"),
        (
            "endless tokens to calibrate on",
            &["calibrate", &new, "--tokens", "18446744073709551615"],
            "18446744073709551615 tokens exceed the context of 16384",
        ),
        (
            "more tokens than a text has",
            &["calibrate", &new, "--text", &short, "--tokens", "4096"],
            "--tokens 4096: there are ",
        ),
        ("nothing to calibrate", &["calibrate", &new, "--methods", "dense"], "needs a profile"),
        ("a hub name without an owner", &["fetch", "llama"], "ORG/NAME"),
        ("a hub name that leaves its place", &["fetch", "../.."], "ORG/NAME"),
        ("a hub name that begins with a dot", &["fetch", "a/.b"], "ORG/NAME"),
        ("a hub name with two dots", &["fetch", "a/b..c"], "ORG/NAME"),
        ("a hub name with a query", &["fetch", "a/b?c"], "ORG/NAME"),
        ("a hub name with an escape", &["fetch", "a/b%2f"], "ORG/NAME"),
        ("a hub name with a space", &["fetch", "a/b "], "ORG/NAME"),
        ("a hub name of three parts", &["fetch", "a/b/c"], "ORG/NAME"),
        ("a hub name that ends in a dash", &["fetch", "a/b-"], "ORG/NAME"),
        ("a hub name without a name", &["fetch", "a/"], "ORG/NAME"),
        ("a long hub name", &["fetch", &format!("a/{}", "b".repeat(97))], "ORG/NAME"),
        ("an argument with control characters", &["fetch", "a\x1b[31m\n"], "a\\u{1b}[31m "),
        ("an argument of 100,000 characters", &["compare", "--methods", &"a".repeat(100_000)], "aaa"),
        (
            "JSON to nowhere, after a subcommand",
            &["fetch", "a/b", "--json", "/nowhere/a.json"],
            "/nowhere/a.json",
        ),
    ] {
        refused(case, args, what);
    }
}

#[test]
fn a_profile_of_another_model_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile");
    let profile = profile.to_str().unwrap();
    let kv = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_kv")).args(args).output().unwrap();
    assert!(kv(&["calibrate", profile, "--tokens", "128", "--methods", "cachegen"]).status.success());
    let other = fixture("gguf-sentencepiece/model.gguf");
    let args = ["generate", "the", "--method", "cachegen", "--device", "cpu", "--profile", profile];
    let args = [&args[..], &["--model", other.to_str().unwrap(), "--tokens", "1"]].concat();
    refused("another model", &args, "was made for tiny-llama-12m");
    let bytes = std::fs::read(profile).unwrap();
    for cut in [0, 7, 100, bytes.len() - 1] {
        std::fs::write(profile, &bytes[..cut]).unwrap();
        refused("a cut profile", &["compare", "--profile", profile], "profile");
    }
    let mut near = bytes.clone();
    let at = near.windows(12).position(|window| window == b"model_hash\":").unwrap() + 13;
    near[at + 20] = if near[at + 20] == b'0' { b'1' } else { b'0' };
    let hash = |bytes: &[u8]| String::from_utf8(bytes[at..at + 21].to_vec()).unwrap();
    std::fs::write(profile, &near).unwrap();
    let what = format!("({}), not for tiny-llama-12m ({})", hash(&near), hash(&bytes));
    refused("a hash that differs late", &["compare", "--profile", profile, "--methods", "cachegen"], &what);
    let mut spoilt = bytes;
    let end = spoilt.len();
    spoilt[end - 10] ^= 1; // inside a plane, which carries its own checksum
    std::fs::write(profile, spoilt).unwrap();
    refused("a flipped bit", &["compare", "--profile", profile, "--methods", "cachegen"], "checksum");
}

/// Links that lead nowhere else than to one another are not missing files.
#[cfg(unix)]
#[test]
fn links_in_a_circle() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    std::os::unix::fs::symlink(&a, &b).unwrap();
    std::os::unix::fs::symlink(&b, &a).unwrap();
    let link = a.to_str().unwrap();
    for args in [
        &["logits", "--tokens", "1", "--model", link][..],
        &["compare", "--text", link],
        &["compare", "--profile", link],
        &["compare", "--json", link],
        &["calibrate", link],
        &["generate", "-f", link],
        &["generate", "We", "--device", "cpu", "--method", &format!("pqcache:offload={link}")],
        #[cfg(feature = "store")]
        &["store", "ls", link],
        #[cfg(feature = "store")]
        &["generate", "We", "--device", "cpu", "--kv", link],
    ] {
        refused(&args.join(" "), args, "Too many levels of symbolic links");
    }
}

/// Threads that the system does not start are an error, and sixteen open files are enough.
#[cfg(target_os = "linux")]
#[test]
fn limits_of_threads_and_of_open_files() {
    let threads = "export RAYON_NUM_THREADS=4000";
    let what = "kv: threads: RAYON_NUM_THREADS is 4000, and at most 1024 are started";
    one_line("threads", &run("threads", kv_after(threads, &["methods"])), 2, what);
    let gqa = fixture("gqa");
    let logits = ["logits", "--tokens", "1,2", "--model", gqa.to_str().unwrap()];
    let output = run("files", kv_after("ulimit -n 16", &logits));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[cfg(feature = "cuda")]
#[test]
fn a_device_that_is_not_there() {
    let generate = ["generate", "We", "--tokens", "1", "--device", "cuda:99"];
    refused("a device", &generate, "device: ");
}
