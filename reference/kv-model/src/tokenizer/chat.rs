//! Chat templates: the text of a conversation as a model was trained on it, by the Jinja template of its
//! checkpoint, with the options and functions that transformers gives them.

mod json;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use chrono::Local;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, ErrorKind, Output, State, context};

use super::from_folder::Settings;
use crate::error::Quoted;
use crate::gguf::Gguf;
use crate::{Error, Message, Result, files};

/// A model's chat template.
///
/// A template is a program of the checkpoint. Its steps, the bytes of the texts that it makes and the
/// elements that its loops visit are limited together, and so is the JSON of `tojson`. Lists that it adds to
/// each other or puts into each other are not: minijinja (3.1) adds lists for nothing until they are read,
/// and then takes memory and time for all elements at once, which double with every `x + x`. Nothing in the
/// process can stop that: a program that renders templates of strangers limits the time and the memory of a
/// process, as `kv generate` does.
///
/// # Examples
/// ```no_run
/// use kv_model::{Checkpoint, Message};
///
/// let checkpoint = Checkpoint::open("Qwen2.5-0.5B-Instruct".as_ref())?;
/// let text = checkpoint.chat_template()?.render(&[Message::new("user", "Why is the sky blue?")], true)?;
/// let tokens = checkpoint.tokenizer()?.encode_chat(&text)?;
/// # Ok::<(), kv_model::Error>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf, // of the file that holds it, for messages
    environment: Environment<'static>,
    tokens: BTreeMap<&'static str, String>, // the texts of special tokens by the names that templates know
}

/// The name of the template in its environment.
const NAME: &str = "chat template";

/// Steps of a template, of which a message takes about a hundred, and 64 bytes of a text or two elements of a
/// list another one.
const MOST_STEPS: u64 = 2_000_000;

/// The special tokens that templates ask for.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl ChatTemplate {
    /// That of a folder: `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`. `None` if it
    /// has none.
    pub(crate) fn of_folder(dir: &Path) -> Result<Option<Self>> {
        /// Ten times the longest templates.
        const MOST: usize = 1 << 20;
        let (config, map) =
            (Settings::read(dir, "tokenizer_config.json")?, Settings::read(dir, "special_tokens_map.json")?);
        let path = dir.join("chat_template.jinja");
        let (path, source) = if files::exists(&path)? {
            let (source, more) = files::read_text_start(&path, MOST)?;
            if more {
                return Err(Error::file(&path, format!("has more than {MOST} bytes")));
            }
            (path, source)
        } else {
            match config.chat_template()? {
                Some(source) => (dir.join("tokenizer_config.json"), source),
                None => return Ok(None),
            }
        };
        let mut tokens = BTreeMap::new();
        for (key, file) in TOKENS.into_iter().flat_map(|key| [(key, &map), (key, &config)]) {
            tokens.extend(file.tokens(key)?.first().map(|token| (key, (*token).to_owned())));
        }
        Self::parse(path, source, tokens).map(Some)
    }

    /// That of a GGUF file's metadata. `None` if it has none.
    pub(crate) fn of_gguf(gguf: &Gguf) -> Result<Option<Self>> {
        let source = gguf.text_or("tokenizer.chat_template", "")?;
        if source.is_empty() {
            return Ok(None);
        }
        let texts = gguf.texts("tokenizer.ggml.tokens")?;
        let mut tokens = BTreeMap::new();
        for (key, name) in TOKENS.map(|key| (key, key.trim_end_matches("_token"))) {
            let name = if name == "unk" { "unknown" } else { name };
            let ids = gguf.token_ids(&format!("tokenizer.ggml.{name}_token_id"))?;
            let text = ids.first().and_then(|&id| texts.get(id as usize));
            tokens.extend(text.map(|text| (key, text.clone())));
        }
        Self::parse(gguf.path().to_owned(), source, tokens).map(Some)
    }

    fn parse(path: PathBuf, source: String, tokens: BTreeMap<&'static str, String>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| template_error(&path, &e))?);
        environment.set_fuel(Some(MOST_STEPS));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(python_formatter);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        let template = environment.add_template_owned(NAME, without_generation_tags(&source));
        template.map_err(|e| template_error(&path, &e))?;
        Ok(Self { path, environment, tokens })
    }

    /// The text of a conversation, with the beginning of the assistant's next message if
    /// `add_generation_prompt`.
    ///
    /// # Errors
    /// [`Error::File`] when the template fails, or refuses the conversation.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let (messages, tokens) = (Value::from(Serde(messages)), Value::from(Serde(&self.tokens)));
        let given = context! { messages, add_generation_prompt, ..tokens };
        let rendered = self.environment.get_template(NAME).and_then(|template| template.render(given));
        rendered.map_err(|e| template_error(&self.path, &e))
    }
}

impl ChatTemplate {
    /// The first message whose text the template leaves out, or whose end it cuts off: most templates drop in
    /// silence what a role that they do not know says. A template may write a text in another way.
    ///
    /// # Errors
    /// As [`Self::render`], which runs once for each message.
    pub fn left_out<'a>(&self, messages: &'a [Message]) -> Result<Option<&'a Message>> {
        /// Ends the text that is looked for: no template has it, as it may have a text as short as `a`.
        const END: &str = "kv-end-of-the-text";
        let mut marked = messages.to_vec();
        for (i, message) in messages.iter().enumerate() {
            marked[i].content += END;
            if !self.render(&marked, true)?.contains(END) {
                return Ok(Some(message));
            }
            marked[i].content.clone_from(&message.content);
        }
        Ok(None)
    }
}

impl Settings {
    /// The chat template: the only one, or that named `default`.
    fn chat_template(&self) -> Result<Option<String>> {
        use serde_json::Value;
        const KEY: &str = "chat_template";
        fn named(template: &Value) -> Option<(&str, &str)> {
            Some((template.get("name")?.as_str()?, template.get("template")?.as_str()?))
        }
        match self.get(KEY) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(source)) => Ok(Some(source.clone())),
            Some(Value::Array(templates)) => {
                let mut templates = templates.iter().filter_map(named);
                let default = templates.find(|(name, _)| *name == "default");
                let error = || self.error(format!("{KEY} has no template named `default`"));
                Ok(Some(default.ok_or_else(error)?.1.to_owned()))
            }
            Some(_) => Err(self.error(format!("{KEY} is neither a text nor a list of named templates"))),
        }
    }
}

/// What is wrong with a template, or what it says is wrong with the conversation.
fn template_error(path: &Path, error: &minijinja::Error) -> Error {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let line = error.line().map_or_else(String::new, |line| format!(", line {line}"));
    Error::file(path, format!("{NAME}{line}: {detail}"))
}

/// A template without the tags around what an assistant says, which mark tokens for training and have no
/// text.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let is_sign = |c: char| c == '-' || c == '+';
        let inner = &tag[2..end];
        let replacement = match inner.trim_matches(is_sign).trim() {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replacement {
            Some(replacement) => {
                let first = if inner.starts_with(is_sign) { &inner[..1] } else { "" };
                let last = if inner.ends_with(is_sign) { &inner[inner.len() - 1..] } else { "" };
                let _ = write!(out, "{{%{first} {replacement} {last}%}}"); // a String takes all
            }
            None => out.push_str(&tag[..end + 2]),
        }
        rest = &tag[end + 2..];
    }
    out.push_str(rest);
    out
}

/// Writes a value as Python does.
fn python_formatter(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> std::result::Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" })?,
        ValueKind::None => out.write_str("None")?,
        _ => minijinja::escape_formatter(out, state, value)?,
    }
    Ok(())
}

/// The template's own refusal.
fn raise_exception(message: &str) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// The local time, as C formats it.
fn strftime_now(format: &str) -> std::result::Result<String, minijinja::Error> {
    let mut out = String::new();
    write!(out, "{}", Local::now().format(format)).map_err(|_| {
        let what = format!("strftime_now: {} is no format of a time", Quoted(format));
        minijinja::Error::new(ErrorKind::InvalidOperation, what)
    })?;
    Ok(out)
}

/// JSON as Python writes it, with what is not ASCII as it is.
fn to_json(value: &Value, options: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let json = json::python_style(value, indent.map(|n| n.min(MOST_INDENT)), MOST_JSON);
    let json = json.map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Value::from_safe_string(json))
}

/// Spaces of a level of JSON.
const MOST_INDENT: usize = 16;

/// Bytes of JSON.
const MOST_JSON: usize = 1 << 24;
