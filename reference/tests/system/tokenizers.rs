//! A truncated, corrupt or hostile `tokenizer.json` is an error: no panic, no output, no huge allocation.

use std::fs;
use std::path::Path;

use kv_model::{Error, Model, Result, Tokenizer};
use serde_json::{Value, json};

use crate::support::kv::{copy, kv, one_line, refused, refused_within, run, text};

/// A small tokenizer of bytes and one merge; `parts` replace its fields.
fn tokenizer(parts: &Value) -> Value {
    let letters = "abcdefghijklmnopqrstuvwxyz\u{120}\u{2581}".chars().map(String::from);
    let tokens = letters.chain(["ab".into(), "[CLS]".into(), "[UNK]".into()]);
    let vocab: serde_json::Map<_, _> = tokens.enumerate().map(|(id, token)| (token, id.into())).collect();
    let mut all = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": cls(29),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": "[UNK]", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": [["a", "b"]]},
    });
    merge(&mut all, parts);
    all
}

/// The added token, with its number after those of the model.
fn cls(id: u64) -> Value {
    json!([{"id": id, "content": "[CLS]", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}])
}

fn merge(all: &mut Value, parts: &Value) {
    match (all, parts) {
        (Value::Object(all), Value::Object(parts)) if !parts.contains_key("type") => {
            for (key, part) in parts {
                merge(all.entry(key).or_insert(Value::Null), part);
            }
        }
        (all, parts) => *all = parts.clone(),
    }
}

/// Loads a model with this tokenizer.
fn load(folder: &Path, bytes: &[u8]) -> Result<Model> {
    fs::write(folder.join("tokenizer.json"), bytes).unwrap();
    Model::load(folder)
}

const TEXTS: [&str; 4] =
    ["", "ab", "the abc  of \u{e9}\u{fdfa}", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"];

/// The usual calls of a tokenizer. Errors are counted, panics fail the test.
fn exercise(tokenizer: &Tokenizer) -> usize {
    let mut errors = 0;
    for text in TEXTS {
        let decoded = tokenizer.encode(text).and_then(|tokens| tokenizer.decode(&tokens));
        errors += usize::from(decoded.is_err()) + usize::from(tokenizer.encode_piece(text).is_err());
    }
    let _ = tokenizer.words();
    errors + usize::from(tokenizer.decode(&[0, 5, 29, 1000, u32::MAX]).is_err())
}

#[test]
fn padding_and_truncation_are_not_obeyed() {
    let folder = copy("gqa");
    let encode = |parts: &Value| {
        let model = load(folder.path(), tokenizer(parts).to_string().as_bytes()).unwrap();
        model.tokenizer().unwrap().encode("the ab of all abc").unwrap()
    };
    let plain = encode(&json!({}));
    assert_eq!(plain.len(), 15);
    let padding = |strategy: Value| {
        json!({"padding": {"strategy": strategy, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 3,
            "pad_type_id": 0, "pad_token": "d"}})
    };
    let truncation = |max_length: u64, stride: u64| {
        json!({"truncation": {"direction": "Right", "max_length": max_length, "strategy": "LongestFirst",
            "stride": stride}})
    };
    for parts in [
        padding(json!({"Fixed": 40})),
        padding(json!({"Fixed": 1_000_000_000_u64})),
        padding(json!({"Fixed": 1_u64 << 40})),
        padding(json!("BatchLongest")),
        json!({"padding": "nonsense"}),
        truncation(4, 0),
        truncation(4, 4),
        truncation(0, 7),
    ] {
        assert_eq!(encode(&parts), plain, "{parts}");
    }
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let folder = copy("gqa");
    let whole = tokenizer(&json!({"decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}));
    let whole = whole.to_string();
    assert!(load(folder.path(), whole.as_bytes()).is_ok());
    for cut in 0..whole.len() {
        let error = load(folder.path(), &whole.as_bytes()[..cut]).err().unwrap();
        assert!(matches!(error, Error::File { .. }), "cut at {cut}: {error}");
    }
    // One by process: the library's panic would be seen on standard error.
    let decoder = whole.find("Fuse").unwrap();
    load(folder.path(), &whole.as_bytes()[..decoder]).err().unwrap();
    let args = ["logits", "--tokens", "1", "--model", text(folder.path())];
    refused("cut inside its decoder", &args, "tokenizer.json");
}

/// Files that the library accepts, or rejects with a panic, and whose use may panic.
#[test]
fn what_the_library_panics_on_is_an_error() {
    let split = |kind: &str| json!({"type": kind, "pattern": {"String": "a"}, "behavior": "Removed", "invert": false});
    let template = |single: Value| json!({"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}});
    let normalizer = |value: Value| json!({"normalizer": value});
    let charsmap = |map: &str| normalizer(json!({"type": "Precompiled", "precompiled_charsmap": map}));
    let decoder = |value: Value| json!({"decoder": value});
    let cases = [
        (
            "a template without its special token",
            template(json!([{"SpecialToken": {"id": "[SEP]", "type_id": 0}}])),
        ),
        ("a template of sequence B", template(json!([{"Sequence": {"id": "B", "type_id": 0}}]))),
        ("pieces of no characters", json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}})),
        ("a prefix longer than a token", json!({"model": {"continuing_subword_prefix": "##########"}})),
        ("a prefix that cuts a character", json!({"model": {"continuing_subword_prefix": "\u{e9}\u{e9}"}})),
        ("a character map of three bytes", charsmap("AAAA")),
        ("a character map without a trie", charsmap("AAAAAA==")),
        ("a character map of 8 GiB", charsmap("/P///w==")),
        ("a character map that is not base64", charsmap("!!!!")),
        (
            "a character map that is no text",
            normalizer(json!({"type": "Precompiled", "precompiled_charsmap": 7})),
        ),
        ("a trie that leads out of it", charsmap("BAAAAP////8A")),
        ("an unknown normalizer", normalizer(split("Splat"))),
        (
            "a strip of more than a token",
            decoder(json!({"type": "Strip", "content": "a", "start": 0, "stop": 9})),
        ),
        ("a decoder that is a number", decoder(json!(7))),
        ("a decoder that is a list", decoder(json!([]))),
        ("an unknown token outside the vocabulary", json!({"model": {"unk_token": "[NONE]"}})),
        ("a model that is null", json!({"model": {"type": "BPE"}})),
        ("a model of no vocabulary", json!({"model": {"type": "Unigram", "unk_id": 3, "vocab": []}})),
    ];
    let folder = copy("gqa");
    for (case, parts) in cases {
        let bytes = tokenizer(&parts).to_string();
        let errors = match load(folder.path(), bytes.as_bytes()) {
            Ok(model) => exercise(model.tokenizer().unwrap()),
            Err(_) => 1,
        };
        assert!(errors > 0, "{case}");
        let args = ["generate", TEXTS[2], "--tokens", "1", "--model", text(folder.path())];
        let output = run(case, kv(&args));
        if !output.status.success() {
            one_line(case, &output, 2, "");
        }
    }
}

#[cfg(unix)]
#[test]
fn what_makes_a_short_text_huge_is_refused() {
    let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let long = json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "a".repeat(10_000)});
    let piece = json!({"Sequence": {"id": "A", "type_id": 0}});
    let twice = json!({"type": "TemplateProcessing", "single": [piece, piece], "pair": [piece], "special_tokens": {}});
    let bytes = json!({"type": "ByteLevel"});
    let entry = "////".repeat(30_000); // a replacement of 90,000 bytes behind a trie of none
    let cases = [
        ("normalizer", json!({"type": "Sequence", "normalizers": vec![double.clone(); 40]})),
        ("normalizer", long.clone()),
        ("normalizer", json!({"type": "Prepend", "prepend": "a".repeat(1 << 20)})),
        ("normalizer", json!({"type": "Sequence", "normalizers": vec![bytes; 40]})),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": format!("AAAAAAAA{entry}")})),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "/P///w=="})),
        ("post_processor", json!({"type": "Sequence", "processors": vec![twice; 40]})),
        ("decoder", json!({"type": "Sequence", "decoders": vec![double; 40]})),
        ("decoder", long),
    ];
    let folder = copy("gqa");
    for (part, value) in cases {
        let bytes = tokenizer(&json!({part: value})).to_string();
        fs::write(folder.path().join("tokenizer.json"), bytes).unwrap();
        let args = ["generate", "abab", "--tokens", "1", "--model", text(folder.path())];
        refused_within(part, 2048, &args, part);
    }
}

/// Every kind of part that the library has, for mutations to start from.
fn seeds() -> Vec<Value> {
    let token = json!({"[CLS]": {"id": "[CLS]", "ids": [29], "tokens": ["[CLS]"]}});
    let metaspace =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let replace = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u{2581}"});
    vec![
        json!({}),
        json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"},
            {"type": "Strip", "strip_left": true, "strip_right": true}, {"type": "Prepend", "prepend": "\u{2581}"}, replace]},
            "pre_tokenizer": metaspace, "decoder": metaspace}),
        json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
            {"type": "Split", "pattern": {"Regex": "\\s+|[^a]"}, "behavior": "Isolated", "invert": false},
            {"type": "FixedLength", "length": 2}]},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}}),
        json!({"post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": token},
            "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 1}]}}),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEBAAAAAgAAYQBiAA=="},
            "post_processor": {"type": "BertProcessing", "sep": ["b", 1], "cls": ["[CLS]", 29]},
            "decoder": {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": true}}),
        json!({"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": true,
            "vocab": [["<unk>", 0.0], ["a", -1.5], ["ab", -2.5], ["<0x20>", -3.0]]}, "decoder": {"type": "ByteFallback"},
            "added_tokens": cls(4)}),
        json!({"model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1, "##b": 2}}, "added_tokens": cls(3)}),
    ]
}

#[test]
fn mutated_files_never_panic() {
    const VALUES: [&str; 12] = [
        "null",
        "0",
        "1",
        "4000",
        "18446744073709551615",
        "-1",
        "\"\"",
        "\"a\"",
        "[]",
        "{}",
        "true",
        "\"\u{e9}\"",
    ];
    let folder = copy("gqa");
    let mut random = fastrand::Rng::with_seed(1);
    let mut loaded = 0;
    for seed in seeds() {
        let whole = tokenizer(&seed).to_string();
        assert!(load(folder.path(), whole.as_bytes()).is_ok(), "{seed}");
        for _ in 0..150 {
            let mut bytes = whole.clone().into_bytes();
            if random.usize(..3) == 0 {
                let at = random.usize(..bytes.len());
                bytes[at] = b"{}[]\",:0a\\"[random.usize(..10)];
            } else {
                // Another value for a key, or in a list.
                let starts: Vec<usize> =
                    (1..bytes.len()).filter(|&i| b":,[".contains(&bytes[i - 1])).collect();
                let start = starts[random.usize(..starts.len())];
                let len = serde_json::Deserializer::from_slice(&bytes[start..]).into_iter::<Value>();
                let mut values = len;
                let Some(Ok(_)) = values.next() else { continue };
                let end = start + values.byte_offset();
                bytes.splice(start..end, VALUES[random.usize(..VALUES.len())].bytes());
            }
            if let Ok(model) = load(folder.path(), &bytes)
                && let Ok(tokenizer) = model.tokenizer()
            {
                exercise(tokenizer);
                loaded += 1;
            }
        }
    }
    assert!(loaded > 100, "only {loaded} mutants load");
}

/// Tokens that `tokenizer.json` does not have, in the other files of a folder: as transformers reads them.
#[test]
fn tokens_of_other_files_are_known() {
    let added = |content: &str, special: bool| {
        json!({"content": content, "special": special, "lstrip": false, "rstrip": false, "normalized": false,
            "single_word": false})
    };
    let with = |file: &str, value: &Value| {
        let folder = copy("gqa");
        fs::write(folder.path().join(file), value.to_string()).unwrap();
        load(folder.path(), tokenizer(&json!({})).to_string().as_bytes())
    };
    let encode = |model: &Model, text: &str| model.tokenizer().unwrap().encode(text).unwrap();
    let decoder =
        json!({"added_tokens_decoder": {"32": added("<|x|>", true), "31": added("<think>", false)}});
    let model = with("tokenizer_config.json", &decoder).unwrap();
    assert_eq!(encode(&model, "a<think>b<|x|>ab"), [0, 31, 1, 32, 28]);
    assert_eq!(model.tokenizer().unwrap().decode(&[0, 31, 32, 1]).unwrap(), "a<think>b");
    let model = with("added_tokens.json", &json!({"<think>": 31, "<a>": 32})).unwrap();
    assert_eq!(encode(&model, "a<a>b<think>"), [0, 32, 1, 31]);
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        for (key, token) in [
            ("pad_token", json!("<|y|>")),
            ("pad_token", added("<|y|>", true)),
            ("additional_special_tokens", json!(["<|y|>"])),
            ("extra_special_tokens", json!({"image": "<|y|>"})),
        ] {
            let model = with(file, &json!({key: token})).unwrap();
            assert_eq!(encode(&model, "a<|y|>b"), [0, 31, 1], "{file}: {token}");
            assert_eq!(model.tokenizer().unwrap().decode(&[0, 31, 1]).unwrap(), "ab", "{file}: {token}");
        }
        // Ends of texts, by key and by name. The fixture's own is 2.
        assert_eq!(with(file, &json!({"eos_token": "ab"})).unwrap().config.eos_tokens, [2, 28], "{file}");
        let model = with(file, &json!({"additional_special_tokens": ["<|im_end|>"]})).unwrap();
        assert_eq!(model.config.eos_tokens, [2, 31], "{file}");
    }
    for (file, value, what) in [
        (
            "tokenizer_config.json",
            json!({"added_tokens_decoder": {"50": added("<think>", false)}}),
            "number 50",
        ),
        (
            "tokenizer_config.json",
            json!({"added_tokens_decoder": {"x": added("<think>", false)}}),
            "`x` is not a number",
        ),
        ("tokenizer_config.json", json!({"added_tokens_decoder": {"31": 7}}), "token 31"),
        ("special_tokens_map.json", json!([1, 2]), "expected a map"),
    ] {
        let error = with(file, &value).err().unwrap().to_string();
        assert!(error.contains(what), "{error}");
    }
    let folder = copy("gqa");
    fs::write(folder.path().join("added_tokens.json"), "{").unwrap();
    let error = load(folder.path(), tokenizer(&json!({})).to_string().as_bytes()).err().unwrap();
    assert!(error.to_string().contains("added_tokens.json"), "{error}");
}
