//! Tokenizers of GGUF files: llama.cpp's rules, flag by flag.

#![cfg(feature = "tokenizers")]
#![allow(clippy::unwrap_used)] // helpers of tests, too

#[path = "support/gguf.rs"]
mod gguf;

use gguf::{Gguf, string};
use kv_model::{Model, Result, TextStream};

/// The types of tokens.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

fn load(gguf: &Gguf) -> Result<Model> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gguf.write(&path);
    Model::load(&path)
}

fn vocabulary(kind: &str, tokens: &[(&str, i32)]) -> Gguf {
    let mut gguf = Gguf::without_tokenizer(tokens.len());
    gguf.text("tokenizer.ggml.model", kind);
    let texts: Vec<u8> = tokens.iter().flat_map(|(token, _)| string(token.as_bytes())).collect();
    gguf.list("tokenizer.ggml.tokens", 8, tokens.len(), &texts);
    gguf.ints("tokenizer.ggml.token_type", &tokens.iter().map(|(_, kind)| *kind).collect::<Vec<_>>());
    gguf
}

/// Byte-level BPE over `a` to `z`, a space and angle brackets; `zq` is a token that no merge makes.
fn byte_level(pre: Option<&str>, special: i32) -> Gguf {
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let mut tokens: Vec<(&str, i32)> = letters.iter().map(|letter| (letter.as_str(), NORMAL)).collect();
    tokens.extend(["Ġ", "<", ">", "th", "the", "zq"].map(|token| (token, NORMAL)));
    tokens.extend([("<s>", CONTROL), ("<think>", special)]);
    tokens.extend(["ð", "Ł", "ĺ", "Ģ"].map(|byte| (byte, NORMAL))); // F0 9F 98 80
    let mut gguf = vocabulary("gpt2", &tokens);
    let merges: Vec<u8> = ["t h", "th e"].iter().flat_map(|merge| string(merge.as_bytes())).collect();
    gguf.list("tokenizer.ggml.merges", 8, 2, &merges);
    pre.into_iter().for_each(|pre| gguf.text("tokenizer.ggml.pre", pre));
    gguf
}

const THE: u32 = 30;
const ZQ: u32 = 31;
const S: u32 = 32;
const THINK: u32 = 33;

/// sentencepiece over `a`, `b` and spaces.
fn sentencepiece(special: i32) -> Gguf {
    let tokens = [
        ("<unk>", UNKNOWN),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        ("<0x0A>", BYTE),
        ("\u{2581}", NORMAL),
        ("a", NORMAL),
        ("b", NORMAL),
        ("\u{2581}a", NORMAL),
        ("ab", NORMAL),
        ("\u{2581}ab", NORMAL),
        ("<think>", special),
    ];
    let mut gguf = vocabulary("llama", &tokens);
    let scores = [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0_f32];
    let bytes: Vec<u8> = scores.iter().flat_map(|score| score.to_le_bytes()).collect();
    gguf.list("tokenizer.ggml.scores", 6, scores.len(), &bytes);
    gguf
}

fn encode(mut gguf: Gguf, edit: impl FnOnce(&mut Gguf), text: &str) -> Vec<u32> {
    edit(&mut gguf);
    load(&gguf).unwrap().tokenizer().unwrap().encode(text).unwrap()
}

/// Changes a file.
type Edit<'a> = &'a dyn Fn(&mut Gguf);

fn both(gguf: &mut Gguf, one: Edit<'_>, other: Edit<'_>) {
    one(gguf);
    other(gguf);
}

#[test]
fn bos_and_eos_of_byte_level_vocabularies() {
    let bos = |gguf: &mut Gguf| gguf.int("tokenizer.ggml.bos_token_id", S);
    let eos = |gguf: &mut Gguf| gguf.int("tokenizer.ggml.eos_token_id", S);
    let adds = |name: &'static str, flag: bool| {
        move |gguf: &mut Gguf| gguf.flag(&format!("tokenizer.ggml.add_{name}_token"), flag)
    };
    let the = |pre: Option<&str>, edit: Edit<'_>| encode(byte_level(pre, CONTROL), edit, "the");
    // By the pre-tokenizer, where the file does not say.
    for pre in ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"] {
        assert_eq!(the(Some(pre), &bos), [S, THE], "{pre}");
    }
    let without =
        ["default", "gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", "smaug-bpe", "gpt-4o", "deepseek-v3"];
    for pre in without.map(Some).into_iter().chain([None]) {
        assert_eq!(the(pre, &bos), [THE], "{pre:?}");
        assert_eq!(the(pre, &|gguf| both(gguf, &bos, &adds("bos", true))), [S, THE], "{pre:?}");
    }
    assert_eq!(the(Some("llama-bpe"), &|gguf| both(gguf, &bos, &adds("bos", false))), [THE]);
    // llama.cpp's numbers, where the file names no token or one outside the vocabulary.
    assert_eq!(the(Some("llama-bpe"), &|_| {}), [11, THE]);
    assert_eq!(the(Some("llama-bpe"), &|gguf| gguf.int("tokenizer.ggml.bos_token_id", 99)), [11, THE]);
    assert_eq!(the(None, &|gguf| both(gguf, &eos, &adds("eos", true))), [THE, S]);
}

#[test]
fn tokens_that_no_merge_makes() {
    let zq = |pre: &str| encode(byte_level(Some(pre), CONTROL), |_| {}, "zq");
    assert_eq!(zq("qwen2"), [25, 16]);
    assert_eq!(zq("llama-bpe"), [11, ZQ]);
    assert_eq!(zq("tekken"), [11, ZQ]);
    assert_eq!(zq("smaug-bpe"), [25, 16]);
}

#[test]
fn types_of_tokens_in_byte_level_vocabularies() {
    for (kind, whole, shown) in [
        (NORMAL, false, "<think>"),
        (UNKNOWN, true, ""),
        (CONTROL, true, ""),
        (USER_DEFINED, true, "<think>"),
        (UNUSED, false, ""),
    ] {
        let model = load(&byte_level(Some("qwen2"), kind)).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let tokens = tokenizer.encode("a<think>the").unwrap();
        assert_eq!(tokens == [0, THINK, THE], whole, "type {kind}: {tokens:?}");
        assert_eq!(tokenizer.encode_piece("a<think>the").unwrap(), tokens);
        assert_eq!(tokenizer.decode(&[0, THINK, THE]).unwrap(), format!("a{shown}the"), "type {kind}");
    }
}

#[test]
fn flags_of_sentencepiece_vocabularies() {
    let flag = |name: &'static str, flag: bool| {
        move |gguf: &mut Gguf| gguf.flag(&format!("tokenizer.ggml.{name}"), flag)
    };
    let ab = |edit: Edit<'_>| encode(sentencepiece(CONTROL), edit, "ab");
    assert_eq!(ab(&|_| {}), [1, 9]);
    assert_eq!(ab(&flag("add_bos_token", false)), [9]);
    assert_eq!(ab(&flag("add_eos_token", true)), [1, 9, 2]);
    assert_eq!(ab(&flag("add_space_prefix", false)), [1, 8]);
    assert_eq!(ab(&flag("remove_extra_whitespaces", true)), [1, 9]);
    assert_eq!(ab(&|gguf| gguf.int("tokenizer.ggml.bos_token_id", 10)), [10, 9]);
    // llama.cpp keeps runs of spaces whatever the flag says; the prefix stands before the text's own space.
    assert_eq!(
        encode(sentencepiece(CONTROL), flag("remove_extra_whitespaces", true), " a  b"),
        [1, 4, 7, 4, 4, 6]
    );
}

#[test]
fn types_of_tokens_in_sentencepiece_vocabularies() {
    for (kind, shown) in [(CONTROL, ""), (USER_DEFINED, "<think>"), (UNKNOWN, "")] {
        let model = load(&sentencepiece(kind)).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        // A space is put before text at the beginning and after a special token.
        assert_eq!(tokenizer.encode("a<think>ab").unwrap(), [1, 7, 10, 9]);
        assert_eq!(tokenizer.encode_piece("a<think>ab").unwrap(), [5, 10, 9]);
        assert_eq!(tokenizer.decode(&[1, 7, 10, 9]).unwrap(), format!("a{shown} ab"));
        assert_eq!(tokenizer.encode("<s>\na?").unwrap(), [1, 1, 4, 3, 5, 0]);
        assert_eq!(tokenizer.decode(&[3, 5]).unwrap(), "\na");
        assert!(tokenizer.has_two_bos(&tokenizer.encode("<s>a").unwrap()).unwrap());
        assert!(!tokenizer.has_two_bos(&tokenizer.encode("a").unwrap()).unwrap());
    }
    let mut whole = sentencepiece(CONTROL);
    whole.flag("tokenizer.ggml.add_space_prefix", false);
    let model = load(&whole).unwrap();
    assert_eq!(model.tokenizer().unwrap().encode("a<think>ab").unwrap(), [1, 5, 10, 8]);
    assert_eq!(model.tokenizer().unwrap().decode(&[7, 9]).unwrap(), " a ab");
}

#[test]
fn wrong_metadata_are_refused_by_their_keys() {
    let refused = |edit: Edit<'_>| {
        let mut gguf = byte_level(None, CONTROL);
        edit(&mut gguf);
        load(&gguf).err().unwrap().to_string()
    };
    let cases: [(&str, Edit<'_>); 4] = [
        ("add_bos_token", &|gguf| gguf.int("tokenizer.ggml.add_bos_token", 1)),
        ("tokenizer.ggml.pre", &|gguf| gguf.int("tokenizer.ggml.pre", 1)),
        ("bos_token_id", &|gguf| gguf.flag("tokenizer.ggml.bos_token_id", true)),
        ("`llama-4000`", &|gguf| gguf.text("tokenizer.ggml.pre", "llama-4000")),
    ];
    for (key, edit) in cases {
        assert!(refused(edit).contains(key), "{key}");
    }
    let mut few = Gguf::model("llama", &[b"a".to_vec(), b"b".to_vec()], 1);
    assert!(load(&few).is_ok());
    few = vocabulary("llama", &[("a", NORMAL), ("b", NORMAL)]);
    assert!(load(&few).is_ok(), "scores are not needed");
    few.list("tokenizer.ggml.scores", 6, 1, &[0; 4]);
    let error = load(&few).err().unwrap().to_string();
    assert!(error.contains("`tokenizer.ggml.scores` has 1 entries for 2 tokens"), "{error}");
}

#[test]
fn ends_of_texts_are_those_that_keys_and_names_say() {
    let ends = |tokens: &[(&str, i32)], edit: Edit<'_>| {
        let mut gguf = vocabulary("llama", tokens);
        edit(&mut gguf);
        load(&gguf).unwrap().config.eos_tokens
    };
    let plain = [("a", NORMAL), ("b", NORMAL), ("c", NORMAL)];
    assert!(ends(&plain, &|_| {}).is_empty());
    for name in ["eos", "eot", "eom", "fim_pad"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        assert_eq!(ends(&plain, &|gguf| gguf.int(&key, 1)), [1], "{name}");
        assert_eq!(ends(&plain, &|gguf| gguf.ints(&key, &[2, 0, -1, 7])), [0, 2], "{name}");
        assert!(ends(&plain, &|gguf| gguf.int(&key, u32::MAX)).is_empty(), "{name}");
    }
    let two = |gguf: &mut Gguf| {
        gguf.int("tokenizer.ggml.eos_token_id", 2);
        gguf.int("tokenizer.ggml.eot_token_id", 0);
    };
    assert_eq!(ends(&plain, &two), [0, 2]);
    let named = [("a", NORMAL), ("<|im_end|>", CONTROL), ("<|eot_id|>", NORMAL), ("</s>", CONTROL)];
    assert_eq!(ends(&named, &|_| {}), [1, 2, 3]);
}

#[test]
fn streamed_text_is_linear_and_loses_nothing() {
    let model = load(&byte_level(Some("qwen2"), CONTROL)).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let [f0, x9f, x98, x80] = [34, 35, 36, 37];
    let stream = |tokens: &[u32]| {
        let mut stream = TextStream::new(tokenizer);
        let mut parts: Vec<String> = tokens.iter().map(|&token| stream.push(token).unwrap()).collect();
        parts.push(stream.finish());
        assert_eq!(tokenizer.decode(tokens).unwrap(), parts.concat());
        parts
    };
    assert_eq!(stream(&[0, f0, x9f, x98, x80, 1]), ["a", "", "", "", "\u{1f600}", "b", ""]);
    assert_eq!(stream(&[0, f0, x9f]), ["a", "", "", "\u{fffd}"]);
    assert_eq!(stream(&[f0, S, x9f, x98, x80]), ["", "", "", "", "\u{1f600}", ""]);
    assert_eq!(stream(&[f0, 0, x80, f0]), ["", "\u{fffd}a", "\u{fffd}", "", "\u{fffd}"]);
    let many = [x80, f0].repeat(200_000);
    let start = std::time::Instant::now();
    assert_eq!(tokenizer.decode(&many).unwrap().chars().count(), many.len());
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed()); // decoding all for each token: an hour
}
