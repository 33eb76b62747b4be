//! Sources of weights: safetensors files (single or sharded) and GGUF, behind one trait. Tensors are
//! requested by their Hugging Face names, with the shape that the configuration implies; nothing else in a
//! file is trusted.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, TryReserveError};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use sha2::{Digest as _, Sha256};

use crate::error::Quoted;
use crate::source::Source;
use crate::{Error, Matrix, Result, files, json};

/// A source of named tensors.
pub(crate) trait Tensors {
    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;
    /// The tensor as `f32`, row-major, if it has exactly this shape.
    fn load(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>>;
    /// The tensor as a matrix, if it has exactly this shape.
    fn load_matrix(&self, name: &str, [n_out, n_in]: [usize; 2]) -> Result<Matrix> {
        Ok(Matrix::new(self.load(name, &[n_out, n_in])?, n_in))
    }
    /// The names of all tensors, as stored.
    fn names(&self) -> Vec<&str>;
    /// The stored name of a tensor.
    fn stored_name(&self, name: &str) -> Option<String> {
        Some(name.to_owned())
    }
    /// Feeds the type, shape and bytes of a tensor, named as stored, to a hash; nothing if there is none.
    fn digest(&self, stored_name: &str, hasher: &mut Sha256) -> Result<()>;
}

/// A source of tensors that records which tensors were requested: an unrequested tensor shows that the
/// checkpoint has another architecture.
pub(crate) struct Tracked<'a> {
    tensors: &'a dyn Tensors,
    asked: RefCell<BTreeSet<String>>, // names in the files
}

impl<'a> Tracked<'a> {
    pub fn new(tensors: &'a dyn Tensors) -> Self {
        Self { tensors, asked: RefCell::default() }
    }

    /// As [`Tensors::contains`]. The tensor counts as requested, whether it is then loaded or not.
    pub fn contains(&self, name: &str) -> bool {
        self.note(name);
        self.tensors.contains(name)
    }

    /// As [`Tensors::load`].
    pub fn load(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        self.note(name);
        self.tensors.load(name, shape)
    }

    /// As [`Tensors::load_matrix`].
    pub fn load_matrix(&self, name: &str, shape: [usize; 2]) -> Result<Matrix> {
        self.note(name);
        self.tensors.load_matrix(name, shape)
    }

    fn note(&self, name: &str) {
        self.asked.borrow_mut().extend(self.tensors.stored_name(name));
    }

    /// Feeds all requested tensors but `without` to a hash, in the order of their names: their order in the
    /// files, and the number of files, make no difference.
    pub fn digest(&self, without: &[&str], hasher: &mut Sha256) -> Result<()> {
        let without: Vec<_> = without.iter().filter_map(|name| self.tensors.stored_name(name)).collect();
        let asked = self.asked.borrow();
        asked.iter().filter(|name| !without.contains(name)).try_for_each(|name| {
            hasher.update(name);
            self.tensors.digest(name, hasher)
        })
    }

    /// Rejects files with unrequested tensors, and names them.
    pub fn finish(&self, path: &Path, family: &str) -> Result<()> {
        const SHOWN: usize = 3;
        let asked = self.asked.borrow();
        let mut left = self.tensors.names();
        left.retain(|name| !asked.contains(*name) && !is_derived(name));
        left.sort_unstable();
        if left.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = left.iter().take(SHOWN).map(|name| Quoted(name).to_string()).collect();
        let more = left.len().checked_sub(SHOWN).filter(|&more| more > 0);
        let more = more.map_or_else(String::new, |more| format!(" and {more} more"));
        let names = names.join(", ");
        let what = format!("holds tensors that a `{family}` like this has no use for: {names}{more}");
        Err(Error::file(path, what))
    }
}

/// Whether a tensor can be derived from the configuration: the rotary frequencies, which old checkpoints
/// store in every layer, and llama.cpp's `rope_freqs`, which the GGUF reader has already used.
fn is_derived(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq") || name == "rope_freqs.weight"
}

/// `model.safetensors`, or the shards listed in `model.safetensors.index.json`.
pub(crate) struct SafetensorsFiles {
    files: Vec<Shard>,
    file_of: HashMap<String, usize>, // tensor name -> index into `files`
}

/// A file and its parsed header.
struct Shard {
    source: Source,
    header: Metadata,
    data_start: u64, // tensor offsets count from here
}

impl Shard {
    fn open(path: &Path) -> Result<Self> {
        const LONGEST_HEADER: u64 = 100_000_000; // the format's own limit
        let source = Source::open(path)?;
        let length = source.read(0..8)?.iter().rev().fold(0, |length, &byte| length << 8 | u64::from(byte));
        if length > LONGEST_HEADER {
            return Err(source.error(format!("claims a header of {length} bytes")));
        }
        let data_start = 8 + length;
        // `Metadata` checks that the tensors follow each other without gaps and have the lengths that their
        // shapes imply.
        let header: Metadata = json::parse(&source.read(8..data_start)?).map_err(|e| source.error(e))?;
        if header.data_len() as u64 != source.len() - data_start {
            return Err(source.error(format!(
                "holds {} bytes of tensors, its header describes {}",
                source.len() - data_start,
                header.data_len()
            )));
        }
        Ok(Self { source, header, data_start })
    }
}

impl SafetensorsFiles {
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let index = if files::exists(&single)? { None } else { Some(Index::open(dir)?) };
        let paths = index.as_ref().map_or_else(|| vec![single], |index| index.shards(dir));
        let files = paths.iter().map(|path| Shard::open(path)).collect::<Result<Vec<_>>>()?;
        let mut file_of: HashMap<String, usize> = HashMap::new();
        for (i, Shard { source, header, .. }) in files.iter().enumerate() {
            for name in header.offset_keys() {
                if let Some(&other) = file_of.get(&name) {
                    let other = files[other].source.path().display();
                    return Err(source.error(format!("tensor {} is in {other}, too", Quoted(&name))));
                }
                file_of.insert(name, i);
            }
        }
        let files = Self { files, file_of };
        index.map_or(Ok(()), |index| index.check(&files))?;
        Ok(files)
    }

    /// Why there is no tensor of this name. Quantized checkpoints store several others in its place.
    fn missing(&self, name: &str) -> String {
        let stem = name.trim_end_matches("weight");
        let parts = ["qweight", "weight_packed", "weight_scale", "SCB"];
        match parts.iter().map(|part| format!("{stem}{part}")).find(|part| self.file_of.contains_key(part)) {
            Some(part) => format!("tensor `{name}` is stored quantized, as `{part}`: this is not supported"),
            None => format!("tensor `{name}` is missing"),
        }
    }
}

impl Tensors for SafetensorsFiles {
    fn contains(&self, name: &str) -> bool {
        self.file_of.contains_key(name)
    }

    fn load(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let shard = self.file_of.get(name).map(|&file| &self.files[file]);
        let Some((shard, info)) = shard.and_then(|shard| Some((shard, shard.header.info(name)?))) else {
            return Err(self.files[0].source.error(self.missing(name)));
        };
        let source = &shard.source;
        let convert: fn(&[u8]) -> std::result::Result<Vec<f32>, TryReserveError> = match info.dtype {
            Dtype::F64 => |bytes| floats(bytes, |x| f64::from_le_bytes(x) as f32),
            Dtype::F32 => |bytes| floats(bytes, f32::from_le_bytes),
            Dtype::F16 => |bytes| floats(bytes, |x| half::f16::from_le_bytes(x).to_f32()),
            Dtype::BF16 => |bytes| floats(bytes, |x| half::bf16::from_le_bytes(x).to_f32()),
            other => {
                let what = "only F64, F32, F16 and BF16 are supported";
                return Err(source.error(format!("tensor `{name}` is of type {other:?}: {what}")));
            }
        };
        if info.shape != shape {
            let what = format!("tensor `{name}` has shape {:?}, the config asks for {shape:?}", info.shape);
            return Err(source.error(what));
        }
        let (start, end) = info.data_offsets;
        let bytes = source.read(shard.data_start + start as u64..shard.data_start + end as u64)?;
        let values = convert(&bytes).map_err(|e| source.error(format!("tensor `{name}`: {e}")))?;
        check_finite(source.path(), name, values)
    }

    fn names(&self) -> Vec<&str> {
        self.file_of.keys().map(String::as_str).collect()
    }

    fn digest(&self, stored_name: &str, hasher: &mut Sha256) -> Result<()> {
        let shard = self.file_of.get(stored_name).map(|&file| &self.files[file]);
        let info = shard.and_then(|shard| Some((shard, shard.header.info(stored_name)?)));
        let Some((shard, info)) = info else { return Ok(()) };
        hasher.update(format!(" {:?} {:?} ", info.dtype, info.shape));
        let (start, end) = info.data_offsets;
        shard.source.digest(shard.data_start + start as u64..shard.data_start + end as u64, hasher)
    }
}

/// Rejects NaN and infinities, which would otherwise surface much later.
pub(crate) fn check_finite(path: &Path, name: &str, values: Vec<f32>) -> Result<Vec<f32>> {
    if values.iter().all(|x| x.is_finite()) { Ok(values) } else { Err(not_finite(path, name)) }
}

/// The error of a tensor with a NaN or an infinity.
pub(crate) fn not_finite(path: &Path, name: &str) -> Error {
    Error::file(path, format!("tensor `{name}` holds a NaN or an infinity"))
}

/// The shards of a checkpoint, by the names of their tensors.
struct Index {
    path: PathBuf,
    weight_map: BTreeMap<String, String>,
}

impl Index {
    fn open(dir: &Path) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct Json {
            weight_map: BTreeMap<String, String>,
        }
        let path = dir.join("model.safetensors.index.json");
        if !files::exists(&path)? {
            let neither = "holds neither model.safetensors nor model.safetensors.index.json";
            let pickles = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"];
            return Err(match pickles.iter().find(|name| dir.join(name).exists()) {
                Some(name) => Error::file(dir, format!("{neither}; {name} must be converted to safetensors")),
                None => Error::file(dir, neither),
            });
        }
        let Json { weight_map } = json::read(&path)?;
        if weight_map.is_empty() {
            return Err(Error::file(&path, "names no shards"));
        }
        // A shard is a plain file name: the index must not point outside its folder.
        match weight_map.values().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
            Some(name) => Err(Error::file(&path, format!("shard {} is not a plain file name", Quoted(name)))),
            None => Ok(Self { path, weight_map }),
        }
    }

    fn shards(&self, dir: &Path) -> Vec<PathBuf> {
        let names: BTreeSet<&String> = self.weight_map.values().collect();
        names.into_iter().map(|name| dir.join(name)).collect()
    }

    /// Rejects an index that has a tensor in a file that does not hold it.
    fn check(&self, of: &SafetensorsFiles) -> Result<()> {
        for (tensor, shard) in &self.weight_map {
            let file = of.file_of.get(tensor).map(|&file| of.files[file].source.path());
            if file.and_then(Path::file_name) != Some(shard.as_ref()) {
                let what = format!("tensor {} is not in {}", Quoted(tensor), Quoted(shard));
                return Err(Error::file(&self.path, what));
            }
        }
        Ok(())
    }
}

/// Converts elements of `N` bytes to `f32`.
fn floats<const N: usize>(
    bytes: &[u8],
    to_f32: impl Fn([u8; N]) -> f32,
) -> std::result::Result<Vec<f32>, TryReserveError> {
    let mut out = vec![];
    out.try_reserve_exact(bytes.len() / N)?;
    out.extend(bytes.as_chunks::<N>().0.iter().map(|&x| to_f32(x)));
    Ok(out)
}
