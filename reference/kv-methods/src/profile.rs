//! What calibration leaves for runs: codebooks, rotations and models, with the model that they belong to.

#[cfg(test)]
mod forged;
mod numbers;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kv_model::{Model, files};
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};
use sha2::{Digest, Sha256};

use crate::calibrate::CalibrationText;
use crate::{Error, Result};

/// The format's name in the file. It changes with the meaning of the entries.
const FORMAT: &str = "kv-profile-3";

/// The results of calibration for one model: codebooks, rotations, probability models.
///
/// It is stored as a safetensors file. Entries are named `method/setting/k or v/layer/head/part`, for a
/// bitstream `method/setting/planes`; the metadata hold the model's name and hash, a checksum, the texts that
/// it was calibrated on, and the number of positions that its keys were rotated to. Equal entries from the
/// same tokens for the same model give equal bytes.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    floats: BTreeMap<String, Vec<f32>>,
    bytes: BTreeMap<String, Vec<u8>>,
    kinds: Vec<KindOfText>,   // calibrated on
    positions: Option<usize>, // calibrated for
}

/// The first tokens of a text, of one kind, that a profile was calibrated on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindOfText {
    /// The text's name.
    pub name: String,
    /// Number of tokens.
    pub tokens: usize,
    sha256: String, // of their little-endian bytes, in hexadecimal
}

impl KindOfText {
    fn new(name: &str, tokens: &[u32]) -> Self {
        Self { name: name.into(), tokens: tokens.len(), sha256: digest(tokens) }
    }
}

fn digest(tokens: &[u32]) -> String {
    let mut hasher = Sha256::new();
    tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    hex(hasher)
}

fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Profile {
    /// A profile without entries, to be calibrated on `text` for positions up to `positions`.
    pub(crate) fn new(text: &CalibrationText, positions: usize) -> Self {
        let kinds = text.kinds.iter().map(|kind| KindOfText::new(&kind.name, &kind.tokens)).collect();
        Self { kinds, positions: Some(positions), ..Self::default() }
    }

    /// The texts that it was calibrated on, one of each kind; none for [`Self::default`].
    #[must_use]
    pub fn kinds(&self) -> &[KindOfText] {
        &self.kinds
    }

    /// The number of positions that it was calibrated for, from the first one on: its codes of keys after
    /// RoPE know no later ones. `None` for [`Self::default`].
    #[must_use]
    pub fn positions(&self) -> Option<usize> {
        self.positions
    }

    /// A warning if a run over `positions` positions goes beyond those that it was calibrated for.
    #[must_use]
    pub fn beyond(&self, positions: usize) -> Option<String> {
        let known = self.positions.filter(|&known| known < positions)?;
        Some(format!(
            "the profile was calibrated for {known} positions, and the run has {positions}: codes of keys after \
             RoPE lose quality beyond them; calibrate again (kv calibrate)"
        ))
    }

    /// A warning if a run from token `start` of a text sees tokens that the profile was calibrated on. A
    /// profile that was calibrated on more tokens than the text has gives none.
    #[must_use]
    pub fn overlap(&self, text: &[u32], start: usize) -> Option<String> {
        let is_seen = |kind: &&KindOfText| {
            start < kind.tokens
                && text.get(..kind.tokens).is_some_and(|beginning| digest(beginning) == kind.sha256)
        };
        self.kinds.iter().find(is_seen).map(|kind| {
            format!(
                "the profile was calibrated on the first {} tokens of this text, and the run begins at token \
                 {start}: the methods have seen what they are measured on",
                kind.tokens
            )
        })
    }

    /// Adds an entry of finite floats; what reads it checks its length and its numbers.
    pub(crate) fn put_floats(&mut self, key: String, values: Vec<f32>) {
        self.floats.insert(key, values);
    }

    /// Adds an entry of bytes, in a format with its own checks.
    pub(crate) fn put_bytes(&mut self, key: String, values: Vec<u8>) {
        self.bytes.insert(key, values);
    }

    /// Bytes of an entry.
    pub(crate) fn bytes(&self, key: &str) -> Result<&[u8]> {
        self.bytes.get(key).map(Vec::as_slice).ok_or_else(|| missing(key))
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.floats.len() + self.bytes.len()
    }

    /// Whether it holds no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// [`kv_model::Error::Io`] when it cannot be written; an existing profile is then unchanged.
    pub fn save(&self, path: &Path, model: &Model) -> Result<()> {
        let mut metadata = json!({
            "format": FORMAT, "model_name": model.name, "model_hash": model.hash, "sha256": self.checksum(),
        });
        // Metadata are strings.
        metadata["texts"] = self.texts().into();
        if let Some(positions) = self.positions {
            metadata["positions"] = positions.to_string().into();
        }
        // `safetensors` writes metadata in hash-map order, which differs from run to run.
        let (mut header, mut data) = (Map::from_iter([("__metadata__".to_owned(), metadata)]), vec![]);
        for (key, dtype, len, bytes) in self.entries() {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(key.into(), json!({ "dtype": dtype, "shape": [len], "data_offsets": offsets }));
            data.extend_from_slice(&bytes);
        }
        let mut header = serde_json::to_vec(&header).map_err(|e| Error::file(path, e))?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat();
        Ok(files::write_atomically(path, &file)?)
    }

    /// The texts that it was calibrated on, as JSON.
    fn texts(&self) -> String {
        serde_json::json!(self.kinds).to_string()
    }

    /// Name, type, length and bytes of every entry, in the order of the file: floats come first, so that they
    /// are aligned.
    fn entries(&self) -> impl Iterator<Item = (&str, Dtype, usize, Cow<'_, [u8]>)> {
        let floats = self.floats.iter().map(|(key, x)| {
            let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
            (key.as_str(), Dtype::F32, x.len(), Cow::from(bytes))
        });
        floats.chain(self.bytes.iter().map(|(key, x)| (key.as_str(), Dtype::U8, x.len(), Cow::from(x))))
    }

    /// SHA-256 over names, types, lengths and bytes of all entries, and over the texts and the number of
    /// positions, in hexadecimal.
    fn checksum(&self) -> String {
        let mut hasher = Sha256::new();
        for (key, dtype, len, bytes) in self.entries() {
            hasher.update(format!("{} {key} {dtype:?} {len} ", key.len()));
            hasher.update(bytes);
        }
        hasher.update(self.texts());
        if let Some(positions) = self.positions {
            hasher.update(format!(" {positions}"));
        }
        hex(hasher)
    }

    /// Reads a profile of `model`.
    ///
    /// # Errors
    /// Those of [`ProfileFile::read`] and [`ProfileFile::of`].
    pub fn load(path: &Path, model: &Model) -> Result<Self> {
        ProfileFile::read(path)?.of(model)
    }
}

/// A profile in a file, of any model: what it holds is known before the model's weights are read.
pub struct ProfileFile {
    path: PathBuf,
    model_name: String,
    model_hash: String,
    profile: Profile,
}

impl ProfileFile {
    /// Reads a profile.
    ///
    /// # Errors
    /// [`kv_model::Error::Io`]; [`kv_model::Error::File`] for a file that is not a profile or is damaged.
    pub fn read(path: &Path) -> Result<Self> {
        let file = files::read(path)?;
        let (_, header) = SafeTensors::read_metadata(&file)
            .map_err(|e| Error::file(path, format!("is not a profile of format {FORMAT}: {e}")))?;
        let metadata = header.metadata().as_ref();
        let field = |key: &str| metadata.and_then(|m| m.get(key)).map_or("", String::as_str);
        if field("format") != FORMAT {
            return Err(Error::file(path, format!("is not a profile of format {FORMAT}")));
        }
        let tensors = SafeTensors::deserialize(&file).map_err(|e| Error::file(path, e))?;
        let kinds = serde_json::from_str(field("texts"));
        let kinds = kinds.map_err(|e| Error::file(path, format!("names its texts wrongly: {e}")))?;
        let positions = match field("positions") {
            "" => None,
            number => {
                let wrong = |e| Error::file(path, format!("names its positions wrongly: {e}"));
                Some(number.parse().map_err(wrong)?)
            }
        };
        let mut profile = Profile { kinds, positions, ..Profile::default() };
        for (key, view) in tensors.tensors() {
            match view.dtype() {
                Dtype::F32 => {
                    let values: Vec<f32> =
                        view.data().as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)).collect();
                    profile.floats.insert(key, values);
                }
                Dtype::U8 => {
                    profile.bytes.insert(key, view.data().to_vec());
                }
                other => return Err(Error::file(path, format!("entry `{key}` is {other:?}"))),
            }
        }
        if field("sha256") != profile.checksum() {
            return Err(Error::file(path, "is damaged: its contents do not have the checksum that it names"));
        }
        if let Some((key, _)) =
            profile.floats.iter().find(|(_, values)| values.iter().any(|x| !x.is_finite()))
        {
            return Err(Error::file(path, format!("entry `{key}` holds a NaN or an infinity")));
        }
        let (model_name, model_hash) = (field("model_name").to_owned(), field("model_hash").to_owned());
        Ok(Self { path: path.to_owned(), model_name, model_hash, profile })
    }

    /// Its entries.
    #[must_use]
    pub const fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The profile of `model`.
    ///
    /// # Errors
    /// [`Error::Profile`], naming both models, for another model's profile.
    pub fn of(self, model: &Model) -> Result<Profile> {
        if self.model_hash == model.hash {
            return Ok(self.profile);
        }
        let [a, b] = different_starts([&self.model_hash, &model.hash]);
        Err(Error::Profile(format!(
            "{} was made for {} ({a}), not for {} ({b})",
            self.path.display(),
            self.model_name,
            model.name
        )))
    }
}

/// The starts of two hashes that differ: twelve characters, or as many as tell them apart.
fn different_starts(hashes: [&str; 2]) -> [String; 2] {
    let same = hashes[0].chars().zip(hashes[1].chars()).take_while(|(a, b)| a == b).count();
    hashes.map(|hash| hash.chars().take(12.max(same + 1)).collect())
}

fn missing(key: &str) -> Error {
    Error::MissingEntry(key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_over_calibration_tokens_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        let model = crate::fixture::model();
        let text: Vec<u32> = (0..100).collect();
        let saved = |profile: Profile| {
            profile.save(&path, &model).unwrap();
            Profile::load(&path, &model).unwrap()
        };
        let other: Vec<u32> = (100..150).collect();
        let mixed = CalibrationText::mixed(&[("other", &other), ("text", &text)], 80);
        let profile = saved(Profile::new(&mixed, 100));
        let mut damaged = std::fs::read(&path).unwrap();
        let number = damaged.windows(5).position(|bytes| bytes == b"\"100\"").unwrap();
        damaged[number..number + 5].copy_from_slice(b"\"1e2\"");
        std::fs::write(&path, damaged).unwrap();
        let error = Profile::load(&path, &model).unwrap_err().to_string();
        assert!(error.contains("names its positions wrongly"), "{error}");
        let kinds: Vec<_> = profile.kinds().iter().map(|kind| (kind.name.as_str(), kind.tokens)).collect();
        assert_eq!(kinds, [("other", 40), ("text", 40)]);
        let warning = profile.overlap(&text, 39).unwrap();
        assert!(warning.contains("the first 40 tokens") && warning.contains("at token 39"), "{warning}");
        assert_eq!((profile.overlap(&text, 40), profile.overlap(&text[..39], 0)), (None, None));
        assert_eq!(profile.overlap(&text[1..], 0), None, "another text");
        assert!(profile.overlap(&other, 0).is_some());
        assert_eq!(saved(Profile::default()).overlap(&text, 0), None, "no text");
        let warning = profile.beyond(101).unwrap();
        assert!(warning.contains("for 100 positions") && warning.contains("has 101"), "{warning}");
        assert_eq!((profile.positions(), profile.beyond(100)), (Some(100), None));
        assert_eq!(saved(Profile::default()).beyond(usize::MAX), None, "no positions");
    }
}
