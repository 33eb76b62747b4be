//! The text of an answer, where it ends, and what is said about its prompt.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::support::gguf::{Gguf, string};
use crate::support::kv::{kv, one_line, run, text};

/// A model that only says its token 0: the first byte of an emoji. It takes `<s>` for BOS.
fn says_f0(path: &Path, edit: impl FnOnce(&mut Gguf)) {
    let mut gguf = Gguf::without_tokenizer(3);
    gguf.text("tokenizer.ggml.model", "gpt2");
    gguf.text("tokenizer.ggml.pre", "llama-bpe");
    let tokens: Vec<u8> = ["ð", "a", "<s>"].iter().flat_map(|token| string(token.as_bytes())).collect();
    gguf.list("tokenizer.ggml.tokens", 8, 3, &tokens);
    gguf.ints("tokenizer.ggml.token_type", &[1, 1, 3]);
    gguf.list("tokenizer.ggml.merges", 8, 0, &[]);
    gguf.int("tokenizer.ggml.bos_token_id", 2);
    edit(&mut gguf);
    gguf.write(path);
}

/// Standard output, standard error, and the JSON of an answer of up to three tokens.
fn answer(prompt: &str, edit: impl FnOnce(&mut Gguf)) -> (String, String, Value) {
    answer_with(&[prompt], edit)
}

/// The same for a prompt and options.
fn answer_with(prompt: &[&str], edit: impl FnOnce(&mut Gguf)) -> (String, String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let output = generate(folder.path(), prompt, edit);
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{stderr}");
    (stdout, stderr, serde_json::from_slice(&std::fs::read(folder.path().join("json")).unwrap()).unwrap())
}

/// Runs the model on a prompt and options, with its file and its JSON in a folder.
fn generate(folder: &Path, prompt: &[&str], edit: impl FnOnce(&mut Gguf)) -> Output {
    let (path, json) = (folder.join("model.gguf"), folder.join("json"));
    says_f0(&path, edit);
    let args = ["--model", text(&path), "--tokens", "3", "--json", text(&json)];
    let args = [&["generate"], prompt, &args[..], &["--device", "cpu", "--method", "dense"]].concat();
    run("generate", kv(&args))
}

#[test]
fn an_answer_that_ends_inside_a_character_keeps_its_tail() {
    let (stdout, stderr, json) = answer("a", |_| {});
    assert_eq!(stdout, "\u{fffd}\u{fffd}\u{fffd}\n");
    assert_eq!(json["text"], "\u{fffd}\u{fffd}\u{fffd}");
    assert_eq!((json["tokens"].as_array().unwrap().len(), json["prompt_tokens"].as_u64()), (3, Some(2)));
    assert!(!stderr.contains("BOS"), "{stderr}");
}

#[test]
fn an_answer_stops_at_every_token_that_a_key_names() {
    for name in ["eos", "eot", "eom"] {
        let (stdout, _, json) = answer("a", |gguf| gguf.int(&format!("tokenizer.ggml.{name}_token_id"), 0));
        assert_eq!(
            (stdout.as_str(), &json["tokens"], &json["text"]),
            ("\n", &Value::Array(vec![]), &"".into()),
            "{name}"
        );
    }
}

#[test]
fn a_second_bos_is_pointed_out() {
    let (_, stderr, json) = answer("<s>a", |_| {});
    assert!(stderr.contains("BOS token twice") && json["prompt_tokens"] == 3, "{stderr}");
}

#[test]
fn a_chat_is_written_by_the_model_s_template() {
    const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}a";
    let answer = |options: &[&str]| {
        let (_, stderr, json) = answer_with(options, |gguf| gguf.text("tokenizer.chat_template", TEMPLATE));
        assert!(!stderr.contains("BOS"), "{stderr}"); // the template's is the only one
        (json["prompt"].clone(), json["prompt_tokens"].clone())
    };
    assert_eq!(answer(&["a", "--chat"]), ("<s>aa".into(), 3.into()));
    assert_eq!(answer(&["a", "--chat", "--system", "aa"]), ("<s>aaaa".into(), 5.into()));
    assert_eq!(answer(&["a"]), ("a".into(), 2.into()));
}

/// Options whose text the model would not read are refused: most templates drop a role that they do not know.
#[test]
fn a_template_that_drops_a_text_is_pointed_out() {
    const USER: &str =
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}a";
    const NOBODY: &str = "{{ bos_token }}a";
    for (template, options, what) in [
        (USER, &["a", "--system", "a"][..], "--system has no effect with --chat: the chat template of "),
        (NOBODY, &["a"], "the prompt has no effect with --chat: the chat template of "),
        ("{{ messages[0].content[:4] }}", &["aaaaa"], "the prompt has no effect with --chat"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let options = [options, &["--chat"]].concat();
        let output = generate(folder.path(), &options, |gguf| gguf.text("tokenizer.chat_template", template));
        one_line(template, &output, 2, what);
        assert!(output.stderr.ends_with(b"leaves its text out\n"));
    }
    answer_with(&["a", "--chat"], |gguf| gguf.text("tokenizer.chat_template", USER));
}

/// A list of 2^34 elements, which minijinja makes of 34 additions.
#[cfg(target_os = "linux")] // which says how much memory a process has
#[test]
fn a_template_that_takes_all_memory_is_stopped() {
    let template = "{% set x = [0] %}".to_owned() + &"{% set x = x + x %}".repeat(34) + "{{ x }}";
    let folder = tempfile::tempdir().unwrap();
    let begin = std::time::Instant::now();
    let output =
        generate(folder.path(), &["a", "--chat"], |gguf| gguf.text("tokenizer.chat_template", &template));
    one_line("34 doublings", &output, 2, "the chat template of ");
    assert!(begin.elapsed().as_secs() < 30, "{:?}", begin.elapsed());
}
