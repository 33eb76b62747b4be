//! A checkpoint before its weights are read: what a run can be checked against first.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Quoted;
use crate::gguf::Gguf;
use crate::model::{check_context, check_tokens, name_of, tokenizer_of};
use crate::tensors::SafetensorsFiles;
use crate::{ChatTemplate, Config, Model, Tokenizer};
use crate::{Error, Result};

/// A checkpoint on disk whose header has been read. The tokenizer is read when it is first asked for, the
/// weights by [`Self::load`].
pub struct Checkpoint {
    /// The model's name: the file's or folder's.
    pub name: String,
    /// The shape of the model, as the header states it.
    pub config: Config,
    path: PathBuf,
    gguf: Option<Gguf>, // none for a folder
    tokenizer: OnceCell<Option<Arc<Tokenizer>>>,
}

impl Checkpoint {
    /// Reads `config.json` of a Hugging Face folder, or the header of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::File`], naming the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self> {
        let (config, gguf) = if path.is_dir() {
            if let Some(name) = gguf_alone_in(path) {
                return Err(Error::file(
                    path,
                    format!("holds no config.json: give its file {}", Quoted(&name)),
                ));
            }
            (Config::from_folder(path)?, None)
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            return Err(Error::file(path, "give the folder that holds it with config.json"));
        } else {
            let gguf = Gguf::open(path)?;
            (gguf.config()?, Some(gguf))
        };
        Ok(Self { name: name_of(path), config, path: path.to_owned(), gguf, tokenizer: OnceCell::new() })
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// As [`Model::tokenizer`]; [`Error::Io`] or [`Error::File`] for a tokenizer that cannot be read.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        tokenizer_of(&self.name, self.read_tokenizer()?)
    }

    /// The chat template.
    ///
    /// # Errors
    /// [`Error::Argument`] for a model without one, [`Error::Feature`] in a build without the feature
    /// `tokenizers`; [`Error::Io`] or [`Error::File`] for one that cannot be read.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        let template = match &self.gguf {
            Some(gguf) => ChatTemplate::of_gguf(gguf)?,
            None => ChatTemplate::of_folder(&self.path)?,
        };
        template.ok_or_else(|| match cfg!(feature = "tokenizers") {
            true => Error::argument(format!("model {} has no chat template", self.name)),
            false => Error::Feature { what: "a chat", feature: "tokenizers" },
        })
    }

    fn read_tokenizer(&self) -> Result<Option<&Arc<Tokenizer>>> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer.as_ref());
        }
        let tokenizer = match &self.gguf {
            Some(gguf) => Tokenizer::of_gguf(gguf)?,
            None => Tokenizer::of_folder(&self.path)?,
        };
        Ok(self.tokenizer.get_or_init(|| tokenizer.map(Arc::new)).as_ref())
    }

    /// Rejects tokens outside the vocabulary.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        check_tokens(&self.config, tokens)
    }

    /// Rejects lengths beyond the model's context.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_context(&self, tokens: usize) -> Result<()> {
        check_context(&self.name, &self.config, tokens)
    }

    /// Reads the weights, and the tokenizer unless it has been read.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn load(self) -> Result<Model> {
        let tokenizer = self.read_tokenizer()?.cloned();
        let Self { name, config, path, gguf, .. } = self;
        match gguf {
            Some(gguf) => Model::assemble((name, &path), config, tokenizer, &gguf),
            None => Model::assemble((name, &path), config, tokenizer, &SafetensorsFiles::open(&path)?),
        }
    }
}

/// The name of a GGUF file in a folder that is no Hugging Face folder.
fn gguf_alone_in(dir: &Path) -> Option<String> {
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "gguf");
    let mut files = dir.read_dir().ok()?.filter_map(|entry| Some(entry.ok()?.path())).filter(is_gguf);
    let first = files.next()?;
    (!dir.join("config.json").exists()).then(|| name_of(&first))
}
