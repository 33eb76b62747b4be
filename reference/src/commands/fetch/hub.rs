//! The client of the Hugging Face Hub. It shows its own progress.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Repo, RepoType};
use kv_reference::{Error, Result};

use crate::commands::print_error;

/// The folder of a model's files: its config, its tokenizer and its safetensors, below `cache`.
pub fn fetch(cache: &Path, id: &str) -> Result<PathBuf> {
    std::fs::create_dir_all(cache).map_err(|e| Error::io(cache, e))?;
    let _lock = lock(cache)?;
    let error = |e: ApiError| Error::Argument(format!("{id}: {e}"));
    let hub = cache.join("hub");
    let repo = Repo::model(id.to_owned());
    let blobs = hub.join(repo.folder_name()).join("blobs");
    let api = ApiBuilder::from_env().with_cache_dir(hub).build().map_err(error)?;
    let info = api.repo(repo).info().map_err(error)?;
    if info.sha.is_empty() || !info.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Error::Argument(format!("{id}: the hub names no commit")));
    }
    // All files come from one commit, even if an earlier call has fetched some of them and the Hub has
    // changed since.
    let repo = api.repo(Repo::with_revision(id.to_owned(), RepoType::Model, info.sha));
    let files = info.siblings;
    let needed = |name: &str| {
        matches!(name, "config.json" | "tokenizer.json" | "model.safetensors.index.json")
            || (name.ends_with(".safetensors") && !name.contains('/'))
    };
    let mut folder = None;
    for file in files.iter().filter(|file| needed(&file.rfilename)) {
        let path = get(&repo, &file.rfilename, &blobs).map_err(error)?;
        folder = path.parent().map(Path::to_owned);
    }
    folder.ok_or_else(|| Error::Argument(format!("{id} holds no safetensors model")))
}

/// Downloads a file of the Hub. An interrupted download is resumed; one that the Hub cannot resume, since it
/// is complete or belongs to another file, is restarted.
fn get(repo: &ApiRepo, name: &str, blobs: &Path) -> std::result::Result<PathBuf, ApiError> {
    let found = repo.get(name);
    match &found {
        Err(ApiError::InvalidResume) => {}
        Err(ApiError::RequestError(e)) if e.to_string().contains("status code 416") => {}
        _ => return found,
    }
    for entry in std::fs::read_dir(blobs)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "part") {
            std::fs::remove_file(path)?;
        }
    }
    repo.get(name)
}

/// Locks the folder against other fetching processes, waiting for its turn. The system releases the lock of a
/// process however it ends.
fn lock(cache: &Path) -> Result<File> {
    let path = cache.join(".lock");
    let error = |e| Error::io(&path, e);
    let file = File::create(&path).map_err(error)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            print_error("kv: waits for another kv fetch\n");
            file.lock().map_err(error)?;
        }
        Err(TryLockError::Error(e)) => return Err(error(e)),
    }
    Ok(file)
}
