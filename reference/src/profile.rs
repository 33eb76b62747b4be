use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::model::Model;
use crate::{Error, Result};

/// The format's name in the file; it changes when what the entries mean changes.
const FORMAT: &str = "kv-profile-1";

/// What calibration has made for one model: codebooks, rotations, probability models. One safetensors file.
///
/// Entries are named `method/setting/k or v/layer/head/part`; the model's name and hash are in the file's metadata.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    floats: BTreeMap<String, Vec<f32>>,
    bytes: BTreeMap<String, Vec<u8>>,
}

impl Profile {
    /// Adds numbers. They must be finite; the methods check shapes when they read them.
    pub(crate) fn put_floats(&mut self, key: String, values: Vec<f32>) {
        self.floats.insert(key, values);
    }

    /// Adds bytes that carry their own checks.
    pub(crate) fn put_bytes(&mut self, key: String, values: Vec<u8>) {
        self.bytes.insert(key, values);
    }

    /// Numbers of an entry.
    pub(crate) fn floats(&self, key: &str) -> Result<&[f32]> {
        self.floats.get(key).map(Vec::as_slice).ok_or_else(|| missing(key))
    }

    /// Bytes of an entry.
    pub(crate) fn bytes(&self, key: &str) -> Result<&[u8]> {
        self.bytes.get(key).map(Vec::as_slice).ok_or_else(|| missing(key))
    }

    /// Entries it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.floats.len() + self.bytes.len()
    }

    /// Whether nothing has been calibrated.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the file.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn save(&self, path: &Path, model: &Model) -> Result<()> {
        let floats = self.floats.iter().map(|(key, x)| {
            let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
            (key, Dtype::F32, x.len(), Cow::from(bytes))
        });
        let bytes = self.bytes.iter().map(|(key, x)| (key, Dtype::U8, x.len(), Cow::from(x)));
        let entries: Vec<_> = floats.chain(bytes).collect();
        let views = entries
            .iter()
            .map(|(key, dtype, len, bytes)| Ok((key.as_str(), TensorView::new(*dtype, vec![*len], bytes)?)))
            .collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>()
            .map_err(|e| Error::file(path, e))?;
        let metadata = [("format", FORMAT), ("model_name", &model.name), ("model_hash", &model.hash)]
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
        safetensors::serialize_to_file(views, Some(HashMap::from(metadata)), path)
            .map_err(|e| Error::file(path, e))
    }

    /// Reads a file that was made for `model`.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::File`] for what is no profile, [`Error::Profile`] for another model's, which is named.
    pub fn load(path: &Path, model: &Model) -> Result<Self> {
        let file = crate::files::read(path)?;
        let (_, header) = SafeTensors::read_metadata(&file).map_err(|e| Error::file(path, e))?;
        let metadata = header.metadata().as_ref();
        let field = |key: &str| metadata.and_then(|m| m.get(key)).map_or("", String::as_str);
        if field("format") != FORMAT {
            return Err(Error::file(path, format!("is no profile of format {FORMAT}")));
        }
        if field("model_hash") != model.hash {
            let (theirs, ours) = (field("model_name"), &model.name);
            let short = |hash: &str| hash.chars().take(12).collect::<String>();
            let (a, b) = (short(field("model_hash")), short(&model.hash));
            return Err(Error::Profile(format!(
                "{} was made for {theirs} ({a}), not for {ours} ({b})",
                path.display()
            )));
        }
        let tensors = SafeTensors::deserialize(&file).map_err(|e| Error::file(path, e))?;
        let mut profile = Self::default();
        for (key, view) in tensors.tensors() {
            match view.dtype() {
                Dtype::F32 => {
                    let values: Vec<f32> =
                        view.data().as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)).collect();
                    if values.iter().any(|x| !x.is_finite()) {
                        return Err(Error::file(path, format!("entry `{key}` holds a NaN or an infinity")));
                    }
                    profile.floats.insert(key, values);
                }
                Dtype::U8 => {
                    profile.bytes.insert(key, view.data().to_vec());
                }
                other => return Err(Error::file(path, format!("entry `{key}` is {other:?}"))),
            }
        }
        Ok(profile)
    }
}

fn missing(key: &str) -> Error {
    Error::Profile(format!("holds no `{key}`: run `kv calibrate` with the method that needs it"))
}
