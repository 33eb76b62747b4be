//! Output of a command: text to standard output, results to files. Nothing here panics on a write error.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kv_model::files;
use kv_reference::{Error, Result};
#[cfg(feature = "store")]
use kv_store::folder_of;
use serde::Serialize;

/// Standard output, which may be a closed pipe or a full disk: the first error is kept and later text is
/// dropped, so that the command still writes its files.
#[derive(Default)]
pub struct Stdout {
    failure: Option<io::Error>,
}

impl Stdout {
    /// Writes and flushes.
    pub fn print(&mut self, text: impl Display) {
        if self.failure.is_none() {
            let mut out = io::stdout().lock();
            self.failure = write!(out, "{text}").and_then(|()| out.flush()).err();
        }
    }

    /// Whether printing has failed.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// The error to report. A closed pipe is not an error: its reader, such as `head`, has seen enough.
    pub fn failure(self) -> Option<io::Error> {
        self.failure.filter(|e| e.kind() != io::ErrorKind::BrokenPipe)
    }
}

/// Writes to standard error and ignores errors.
pub fn print_error(text: impl Display) {
    let _ = write!(io::stderr(), "{text}");
}

/// The input and output files of a command, which must be distinct.
#[derive(Default)]
pub struct Files(Vec<(&'static str, PathBuf)>);

impl Files {
    /// Adds an input: a file, or the files of a model's folder.
    pub fn reads(&mut self, argument: &'static str, path: &Path) {
        let Ok(entries) = std::fs::read_dir(path) else { return self.owns(argument, path) };
        let weights = |path: &PathBuf| path.extension().is_some_and(|x| x == "safetensors" || x == "json");
        entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(weights)
            .for_each(|path| self.owns(argument, &path));
    }

    /// Adds a file, or a folder in which no output may be.
    pub fn owns(&mut self, argument: &'static str, path: &Path) {
        self.0.push((argument, identity(path)));
    }

    /// Adds a store, if it is a folder.
    #[cfg(feature = "store")]
    pub fn reads_store(&mut self, argument: &'static str, url: &str) -> Result<()> {
        if let Some(folder) = folder_of(url)? {
            self.owns(argument, &folder);
        }
        Ok(())
    }

    /// Checks that an output can be written, before the long work.
    pub fn writes(&mut self, argument: &'static str, path: Option<PathBuf>) -> Result<Output> {
        if let Some(path) = &path {
            if path == Path::new("-") {
                let what = format!(
                    "{argument} -: name a file, since standard output takes the text (./- for one of this name)"
                );
                return Err(Error::Argument(what));
            }
            let identity = identity(path);
            if let Some((other, owned)) = self.0.iter().find(|(_, owned)| identity.starts_with(owned)) {
                let path = path.display();
                return Err(Error::Argument(match *owned == identity {
                    true => format!("{argument} would overwrite {path}, which {other} names or reads"),
                    false => format!("{argument}: {path} is in the folder that {other} names"),
                }));
            }
            files::check_writable(path).map_err(|e| Error::Argument(format!("{argument}: {e}")))?;
            self.0.push((argument, identity));
        }
        Ok(Output(path))
    }
}

/// A canonical path of a file, which may not exist yet.
fn identity(path: &Path) -> PathBuf {
    let folder = |path: &Path| match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new(".").canonicalize(),
        Some(parent) => parent.canonicalize(),
        None => Err(io::ErrorKind::NotFound.into()),
    };
    let absent = || Some(folder(path).ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(absent).unwrap_or_else(|| path.to_owned())
}

/// A file to write atomically at the end, or none.
pub struct Output(Option<PathBuf>);

impl Output {
    /// Writes the result of `bytes`.
    pub fn write(&self, bytes: impl FnOnce(&Path) -> Result<Vec<u8>>) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |path| Ok(files::write_atomically(path, &bytes(path)?)?))
    }

    /// Writes a value as JSON.
    pub fn write_json(&self, value: &impl Serialize) -> Result<()> {
        self.write(|path| {
            let mut text = serde_json::to_vec_pretty(value).map_err(|e| Error::file(path, e))?;
            text.push(b'\n');
            Ok(text)
        })
    }
}
