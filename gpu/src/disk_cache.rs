use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::PathBuf;

use crate::compile::nvrtc_version;
use crate::{Error, Program};

/// Compiled kernels in a folder. A file starts with all that its machine code was made from, so that neither a hash that two
/// kernels share nor a file that something else wrote is ever taken for the kernel.
pub(crate) struct DiskCache {
    folder: PathBuf,
}

impl DiskCache {
    pub(crate) const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn locate(&self, program: &Program, architecture: &str) -> Result<(PathBuf, Vec<u8>), Error> {
        let options = program.options(architecture).join(" ");
        let key = format!("kv-gpu {:?}\n{options}\n{}\n\0", nvrtc_version()?, program.text).into_bytes();
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        Ok((self.folder.join(format!("{}-{:016x}.cubin", program.name, hasher.finish())), key))
    }

    /// The kernel, if the folder has it.
    pub(crate) fn get(&self, program: &Program, architecture: &str) -> Result<Option<Vec<u8>>, Error> {
        let (path, key) = self.locate(program, architecture)?;
        let bytes = fs::read(path).unwrap_or_default();
        Ok(bytes.strip_prefix(&*key).filter(|cubin| !cubin.is_empty()).map(<[u8]>::to_vec))
    }

    /// Keeps it, if the folder can be written: a cache that cannot is none.
    pub(crate) fn put(&self, program: &Program, architecture: &str, cubin: &[u8]) -> Result<(), Error> {
        let (path, mut bytes) = self.locate(program, architecture)?;
        bytes.extend_from_slice(cubin);
        // Another process may be reading or writing the same name: it appears whole or not at all.
        let draft = path.with_extension(format!("{}.draft", std::process::id()));
        let written = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&draft, bytes))
            .and_then(|()| fs::rename(&draft, path));
        if written.is_err() {
            let _ = fs::remove_file(draft);
        }
        Ok(())
    }
}
