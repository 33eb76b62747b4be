//! Chat templates of folders, next to what Jinja makes of them with transformers' options:
//! `chat_templates/expected.json`, which `chat_templates/make_expected.py` wrote with jinja2 3.1.6.

#![cfg(feature = "tokenizers")]
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use std::fs;
use std::path::Path;

use kv_model::{Checkpoint, Error, Message};
use serde::Deserialize;
use serde_json::json;

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<Message>,
    prompt: bool,
    text: Option<String>,
    error: Option<String>,
}

const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chat_templates");

/// A folder with these files next to a configuration.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-llama-12m/config.json");
    fs::copy(config, dir.path().join("config.json")).unwrap();
    files.iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
    dir
}

fn render(dir: &Path, messages: &[Message], prompt: bool) -> Result<String, Error> {
    Checkpoint::open(dir)?.chat_template()?.render(messages, prompt)
}

/// The text with today's date replaced by that of the expected texts.
fn with_fixed_date(text: &str) -> String {
    const BEFORE: &str = "Today Date: ";
    match text.split_once(BEFORE).and_then(|(a, b)| Some((a, b.split_once("\n\n")?))) {
        Some((a, (date, b))) => {
            let [day, month, year] = date.split(' ').collect::<Vec<_>>()[..] else { panic!("{date}") };
            assert!((day.len(), month.len(), year.len()) == (2, 3, 4), "{date}");
            format!("{a}{BEFORE}29 Nov 2026\n\n{b}")
        }
        None => text.to_owned(),
    }
}

#[test]
fn templates_render_as_jinja_does() {
    let expected = fs::read_to_string(format!("{HERE}/expected.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&expected).unwrap();
    assert_eq!(cases.len(), 50);
    let tokens = json!({
        "bos_token": {"content": "<s>", "special": true},
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": null,
        "chat_template": "the file goes first",
    });
    for Case { template, messages, prompt, text, error } in cases {
        let source = fs::read_to_string(format!("{HERE}/{template}.jinja")).unwrap();
        let files = [("chat_template.jinja", &*source), ("tokenizer_config.json", &tokens.to_string())];
        match (render(folder(&files).path(), &messages, prompt), text, error) {
            (Ok(got), Some(text), None) => assert_eq!(with_fixed_date(&got), text, "{template}"),
            (Err(Error::File { path, what }), None, Some(error)) => {
                assert!(path.ends_with("chat_template.jinja"), "{}", path.display());
                assert!(what.starts_with("chat template, line ") && what.ends_with(&error), "{what}");
            }
            (got, text, error) => panic!("{template}: {got:?} for {text:?}, {error:?}"),
        }
    }
}

#[test]
fn templates_are_found_where_checkpoints_have_them() {
    let hello = [Message::new("user", "Hi")];
    let of_config = |template: serde_json::Value| {
        let config = json!({"chat_template": template}).to_string();
        render(folder(&[("tokenizer_config.json", &config)]).path(), &hello, false)
    };
    assert_eq!(of_config(json!("{{ messages[0].content }}!")).unwrap(), "Hi!");
    let named = json!([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]);
    assert_eq!(of_config(named).unwrap(), "b");
    let refused = |template| of_config(template).unwrap_err().to_string();
    assert!(refused(json!([{"name": "tool_use", "template": "a"}])).ends_with("no template named `default`"));
    assert!(refused(json!(3)).ends_with("chat_template is neither a text nor a list of named templates"));
    assert!(refused(json!(null)).ends_with("has no chat template"));
    assert!(
        render(folder(&[]).path(), &hello, true).unwrap_err().to_string().ends_with("has no chat template")
    );
}

#[test]
fn templates_that_are_broken_or_do_not_end_are_errors() {
    let refused = |source: &str| {
        let dir = folder(&[("chat_template.jinja", source)]);
        match render(dir.path(), &[Message::new("user", "Hi")], true).unwrap_err() {
            Error::File { what, .. } => what,
            other => panic!("{other}"),
        }
    };
    assert!(refused("\n{% if %}").starts_with("chat template, line 2: "));
    assert!(refused("{% generation %}").starts_with("chat template, line 1: "));
    assert!(refused("{{ no_such_function() }}").contains("no_such_function"));
    assert!(refused("{{ strftime_now('%Q!') }}").ends_with("`%Q!` is no format of a time"));
    assert!(refused("{{ messages | tojson(colour=1) }}").contains("colour"));
    let long = "{% for i in range(9999) %}".repeat(3) + &"{% endfor %}".repeat(3);
    assert!(refused(&long).contains("fuel"), "{}", refused(&long));
}
