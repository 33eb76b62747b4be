//! Where weights come from: safetensors files (one or sharded) and GGUF, behind one trait. Tensors are asked for by their
//! Hugging Face names and with the shape that the configuration implies; everything else about a file is distrusted.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// A source of named tensors.
pub(crate) trait Tensors {
    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;
    /// The tensor as `f32`, row-major, if it has exactly this shape.
    fn load(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>>;
    /// Feeds the files' bytes to a hash.
    fn digest(&self, hasher: &mut Sha256);
}

/// Maps a file into memory.
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    // SAFETY: the map is read-only and private. A file that another process truncates while we read it would fault; that
    // is the accepted contract of every loader that maps weights.
    unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))
}

/// `model.safetensors`, or the shards that `model.safetensors.index.json` names.
pub(crate) struct SafetensorsFiles {
    files: Vec<(PathBuf, Mmap)>,
    file_of: HashMap<String, usize>, // tensor name -> index into `files`
}

impl SafetensorsFiles {
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let paths = if single.exists() { vec![single] } else { shards(dir)? };
        let files: Vec<_> =
            paths.into_iter().map(|path| map(&path).map(|map| (path, map))).collect::<Result<_>>()?;
        let mut file_of = HashMap::new();
        for (i, (path, map)) in files.iter().enumerate() {
            let tensors = SafeTensors::deserialize(map).map_err(|e| Error::file(path, e))?;
            file_of.extend(tensors.names().into_iter().map(|name| (name.to_owned(), i)));
        }
        Ok(Self { files, file_of })
    }
}

impl Tensors for SafetensorsFiles {
    fn contains(&self, name: &str) -> bool {
        self.file_of.contains_key(name)
    }

    fn load(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(&file) = self.file_of.get(name) else {
            return Err(Error::file(&self.files[0].0, format!("tensor `{name}` is missing")));
        };
        let (path, map) = &self.files[file];
        let tensors = SafeTensors::deserialize(map).map_err(|e| Error::file(path, e))?;
        let tensor = tensors.tensor(name).map_err(|e| Error::file(path, e))?;
        if tensor.shape() != shape {
            let what =
                format!("tensor `{name}` has shape {:?}, the config asks for {shape:?}", tensor.shape());
            return Err(Error::file(path, what));
        }
        let values = floats(tensor.dtype(), tensor.data()).ok_or_else(|| {
            Error::file(path, format!("tensor `{name}` is {:?}, not a float type", tensor.dtype()))
        })?;
        check_finite(path, name, values)
    }

    fn digest(&self, hasher: &mut Sha256) {
        self.files.iter().for_each(|(_, map)| hasher.update(map));
    }
}

/// Refuses NaN and infinities, which would surface only as nonsense much later.
pub(crate) fn check_finite(path: &Path, name: &str, values: Vec<f32>) -> Result<Vec<f32>> {
    if values.iter().all(|x| x.is_finite()) {
        Ok(values)
    } else {
        Err(Error::file(path, format!("tensor `{name}` holds a NaN or an infinity")))
    }
}

fn shards(dir: &Path) -> Result<Vec<PathBuf>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let path = dir.join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            Error::file(dir, "holds neither model.safetensors nor model.safetensors.index.json")
        }
        _ => Error::io(&path, e),
    })?;
    let index: Index = serde_json::from_str(&text).map_err(|e| Error::file(&path, e))?;
    let mut names: Vec<String> = index.weight_map.into_values().collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return Err(Error::file(&path, "names no shards"));
    }
    // A shard is a plain file name: the index must not reach out of its folder.
    match names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        Some(name) => Err(Error::file(&path, format!("shard `{name}` is not a plain file name"))),
        None => Ok(names.iter().map(|name| dir.join(name)).collect()),
    }
}

fn floats(dtype: Dtype, data: &[u8]) -> Option<Vec<f32>> {
    match dtype {
        Dtype::F32 => Some(data.as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)).collect()),
        Dtype::F16 => {
            Some(data.as_chunks::<2>().0.iter().map(|&x| half::f16::from_le_bytes(x).to_f32()).collect())
        }
        Dtype::BF16 => {
            Some(data.as_chunks::<2>().0.iter().map(|&x| half::bf16::from_le_bytes(x).to_f32()).collect())
        }
        _ => None,
    }
}
