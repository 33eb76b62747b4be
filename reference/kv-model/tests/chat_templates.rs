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

/// What is limited of the values that a template makes.
#[test]
fn texts_and_lists_that_grow_without_end_are_errors() {
    let doubled = |expression: &str, times: usize| format!("{{% set x = {expression} %}}").repeat(times);
    let text = "{% set x = 'ab' %}".to_owned() + &doubled("x + x", 40);
    let joined = "{% set x = 'ab' %}".to_owned() + &doubled("x ~ x", 40);
    let list = "{% set x = [0] %}".to_owned() + &doubled("x + x", 25);
    let nested = "{% set x = 0 %}".to_owned() + &doubled("[x, x]", 40);
    for (source, what) in [
        (text, "fuel"),
        (joined, "fuel"),
        (list.clone() + "{% for y in x %}{% endfor %}", "fuel"),
        (list.clone() + "{{ x | list | length }}", "fuel"),
        (list + "{{ x | tojson }}", "more than 16777216 bytes of JSON"),
        (nested + "{{ x | tojson(indent=2) }}", "more than 16777216 bytes of JSON"),
    ] {
        let dir = folder(&[("chat_template.jinja", &source)]);
        let error = render(dir.path(), &[Message::new("user", "Hi")], true).unwrap_err().to_string();
        assert!(error.contains(what), "{source}: {error}");
    }
}

#[test]
fn a_message_that_a_template_leaves_out_is_named() {
    let conversation =
        [Message::new("system", "a"), Message::new("user", " a "), Message::new("assistant", "b")];
    let left_out = |source: &str| {
        let dir = folder(&[("chat_template.jinja", source)]);
        let template = Checkpoint::open(dir.path()).unwrap().chat_template().unwrap();
        template.left_out(&conversation).unwrap().map(|message| message.role.clone())
    };
    let all = "{% for m in messages %}{{ m.content | trim | tojson }}{% endfor %}";
    assert_eq!(left_out(all), None);
    for role in ["system", "user", "assistant"] {
        let others =
            format!("{{% for m in messages if m.role != '{role}' %}}a{{{{ m.content }}}}{{% endfor %}}");
        assert_eq!(left_out(&others).as_deref(), Some(role));
    }
    assert_eq!(left_out("{% for m in messages %}{{ m.content[:3] }}{% endfor %}").as_deref(), Some("system"));
}
