//! Measured times of a prompt's layer and of a k-means iteration on a device, kept in a file, and the number
//! of iterations that follows from them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use half::{bf16, f16};
use kv_gpu::Element;
use kv_gpu::pq::{Train, TrainArguments, TrainShape};
use pq_core::{ClusteringCost, PqShape};
use serde::{Deserialize, Serialize};

use super::cache::DenseCache;
use super::memory::Buffer;
use super::{Decoder, Gpu, Weights, driver, hashed};
use crate::method::cost::{LayerShape, check_fit};
use crate::method::{Iterations, Method, Resolved, Retrieval};
use crate::model::{Config, LayerAttention};
use crate::{Error, Result, files};

/// The share of a layer's time that training may take. A prefill leaves no multiprocessor idle, so training
/// adds to its time, unlike in PQCache, which trains on the host.
const SHARE: f64 = 1.0 / 16.0;

/// Default lengths of the timed prompts, in tokens.
const LENGTHS: [usize; 4] = [1024, 2048, 4096, 8192];

/// Layers of the timed model, and its vocabulary: the products of a layer dwarf everything else.
const LAYERS: usize = 2;
const VOCABULARY: usize = 512;

/// Iterations per timed run, and runs, of which the fastest counts.
const ITERATIONS: usize = 8;
const RUNS: usize = 3;

/// The times of one device, for layers and a quantizer of one shape, as kept in a file.
///
/// # Source
/// PQCache (arXiv 2407.12820), 3.3.
#[derive(Debug, Serialize, Deserialize)]
pub struct DeviceClustering {
    device: String,
    shape: LayerShape,
    /// The measurements.
    pub times: Vec<LayerTimes>,
    iteration: [f64; 2],
    layer: [f64; 3],
}

/// Seconds at one length of the prompt.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LayerTimes {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// A layer of the prompt.
    pub layer: f64,
    /// An iteration of k-means over all heads of a layer, with a key of each token.
    pub iteration: f64,
}

/// Measures the device's times if the method's iterations follow from a file that is missing or invalid.
/// Returns a message about the new file.
///
/// # Errors
/// Those of running a model and of writing the file.
pub fn profile_clustering(gpu: &Arc<Gpu>, method: &Method, config: &Config) -> Result<Option<String>> {
    let method = method.fitted(config)?;
    // Methods that the device does not support are rejected by `method_cache`, or run on the CPU.
    let Ok(Some(retrieval)) = method.device_retrieval(config) else { return Ok(None) };
    let Some(Iterations::Profile(path)) = &retrieval.training else { return Ok(None) };
    let Ok(element) = method.device_element() else { return Ok(None) };
    if Weights::check(config).is_err() {
        return Ok(None);
    }
    let (name, shape) = (device_name(gpu)?, LayerShape::new(config, retrieval.quantizer));
    let path = beside(path, &name, &shape);
    let why = match load(&path, &name, &shape) {
        Ok(_) => return Ok(None),
        Err(Error::Io { .. }) if !path.exists() => String::new(),
        Err(e) => format!(", since {e}"),
    };
    measure(gpu, config, element, (name, shape), retrieval.quantizer, &LENGTHS)?.write(&path)?;
    Ok(Some(format!("the device's times of layers and clustering are now in {}{why}", path.display())))
}

impl DeviceClustering {
    /// Measures layers of a model's shape, and the training of a method's codebooks, on prompts of these
    /// lengths.
    ///
    /// # Errors
    /// [`Error::Argument`] for a method that trains nothing on the prompt, for a shape that the device does
    /// not support, and for prompts with fewer tokens than a codebook has centroids; those of running a
    /// model; of `pq-core` for lengths that are too few or too close for a fit.
    pub fn measure(gpu: &Arc<Gpu>, method: &Method, config: &Config, lengths: &[usize]) -> Result<Self> {
        let quantizer = method.prompt_quantizer(config)?;
        Weights::check(config)?;
        let of = (device_name(gpu)?, LayerShape::new(config, quantizer));
        measure(gpu, config, method.device_element()?, of, quantizer, lengths)
    }

    /// The number of training iterations, from 1 to 25, for a prompt of `n` tokens.
    #[must_use]
    pub fn iterations(&self, n: usize) -> usize {
        self.cost().of(n)
    }

    /// Writes the file that `iterations=FILE` reads on this device, next to `file`. Returns its path.
    ///
    /// # Errors
    /// Those of writing it.
    pub fn write_beside(&self, file: &Path) -> Result<PathBuf> {
        let path = beside(file, &self.device, &self.shape);
        self.write(&path)?;
        Ok(path)
    }

    fn write(&self, path: &Path) -> Result<()> {
        let json = serde_json::to_vec_pretty(self).map_err(|e| Error::file(path, e))?;
        files::write_atomically(path, &json)
    }

    fn cost(&self) -> Resolved {
        let layer = self.layer.map(|c| SHARE * c);
        Resolved::Cost(ClusteringCost { iteration: self.iteration, layer })
    }
}

/// The number of training iterations of a method on a device; none if it trains nothing.
///
/// # Errors
/// Those of reading the file that [`profile_clustering`] has written.
pub(super) fn iterations(gpu: &Gpu, config: &Config, retrieval: &Retrieval) -> Result<Option<Resolved>> {
    Ok(Some(match &retrieval.training {
        None => return Ok(None),
        Some(Iterations::Count(count)) => Resolved::Count(*count),
        Some(Iterations::Profile(path)) => {
            let (name, shape) = (device_name(gpu)?, LayerShape::new(config, retrieval.quantizer));
            load(&beside(path, &name, &shape), &name, &shape)?.cost()
        }
    }))
}

fn device_name(gpu: &Gpu) -> Result<String> {
    gpu.device.context().name().map_err(|e| driver("read the device's name", e))
}

/// The file of a device and a shape, next to that of the CPU's times: `cost.json` has
/// `cost.NVIDIA-H200.4096x14336.32x8x128.16x8.json` next to it.
fn beside(path: &Path, device: &str, shape: &LayerShape) -> PathBuf {
    let &LayerShape { hidden, intermediate, heads, kv_heads, head_dim, m, nbits } = shape;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let device: String = device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let layer = format!("{hidden}x{intermediate}.{heads}x{kv_heads}x{head_dim}.{m}x{nbits}");
    path.with_file_name(format!("{stem}.{device}.{layer}.json"))
}

/// The files of all devices and shapes next to `file`, which runs with `iterations=FILE` read.
#[must_use]
pub fn device_files(file: &Path) -> Vec<PathBuf> {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let is_of_device = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let rest = name.strip_prefix(&*stem).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".json"));
        let is_size = |n: &str| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit());
        let is_shape = |part: &str| part.split('x').count() > 1 && part.split('x').all(is_size);
        rest.and_then(|rest| rest.split_once('.'))
            .is_some_and(|(_, shape)| shape.split('.').count() == 3 && shape.split('.').all(is_shape))
    };
    // The folder of a bare name is the working folder.
    let folder = file.with_file_name(".");
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_of_device).collect()
}

/// Reads a file of this device and shape.
fn load(path: &Path, device: &str, shape: &LayerShape) -> Result<DeviceClustering> {
    let read: DeviceClustering =
        serde_json::from_slice(&files::read(path)?).map_err(|e| Error::file(path, e))?;
    if (read.device.as_str(), &read.shape) != (device, shape) {
        return Err(Error::file(path, format!("was measured on {} for {:?}", read.device, read.shape)));
    }
    check_fit(path, &read.iteration, &read.layer)?;
    Ok(read)
}

/// Times layers with hashed weights, and training on hashed keys.
fn measure(
    gpu: &Arc<Gpu>,
    config: &Config,
    element: Element,
    (device, shape): (String, LayerShape),
    quantizer: PqShape,
    lengths: &[usize],
) -> Result<DeviceClustering> {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if let Some(short) = lengths.iter().find(|&&n| n < quantizer.ksub()) {
        let values = quantizer.ksub();
        return Err(Error::Argument(format!("{short} tokens train no codes of {values} values")));
    }
    let config = Config {
        n_layers: LAYERS,
        vocab_size: VOCABULARY,
        attention: vec![LayerAttention::FULL; LAYERS],
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        eos_tokens: vec![],
        ..config.clone()
    };
    let weights = Arc::new(Weights::hashed(gpu, "a layer", config.clone(), element)?);
    let cache = DenseCache::new(gpu, &config, element, 1, longest + 1)?;
    let mut decoder = Decoder::new(gpu.clone(), weights, Box::new(cache), 1)?;
    let training = Training::new(gpu, &config, element, quantizer, longest)?;
    let times = lengths.iter().map(|&tokens| -> Result<LayerTimes> {
        let prompt: Vec<u32> = (0..tokens).map(|i| (i % VOCABULARY) as u32).collect();
        let layers = fastest(gpu, || {
            decoder.clear()?;
            decoder.prefill(std::slice::from_ref(&prompt), tokens)
        })?;
        let one = fastest(gpu, || training.launch(gpu, tokens, 1))?;
        let all = fastest(gpu, || training.launch(gpu, tokens, 1 + ITERATIONS))?;
        let iteration = (all - one).max(0.0) / ITERATIONS as f64;
        Ok(LayerTimes { tokens, layer: layers / LAYERS as f64, iteration })
    });
    let times = times.collect::<Result<Vec<_>>>()?;
    let of = |time: fn(&LayerTimes) -> f64| -> Vec<(usize, f64)> {
        times.iter().map(|at| (at.tokens, time(at))).collect()
    };
    let ClusteringCost { iteration, layer } =
        ClusteringCost::fit(&of(|at| at.iteration), &of(|at| at.layer))?;
    Ok(DeviceClustering { device, shape, times, iteration, layer })
}

/// A training of a layer's codebooks on hashed keys.
struct Training {
    train: Train,
    keys: Buffer<u16>, // (heads, longest, head_dim)
    starts: Buffer<u32>,
    centroids: Buffer<f32>,
    workspace: Buffer<u8>,
    heads: usize,
    head_len: usize, // elements of a head's keys
    head_dim: usize,
}

impl Training {
    fn new(gpu: &Gpu, config: &Config, element: Element, quantizer: PqShape, longest: usize) -> Result<Self> {
        let (heads, head_dim) = (config.n_kv_heads, config.head_dim);
        let train = Train::new(&gpu.device, TrainShape { quantizer, element: element.into() })?;
        let key = |i| match (hashed(0, i, 1.0), element) {
            (x, Element::F16) => f16::from_f32(x).to_bits(),
            (x, Element::Bf16) => bf16::from_f32(x).to_bits(),
        };
        let keys: Vec<u16> = (0..(heads * longest * head_dim) as u64).map(key).collect();
        Ok(Self {
            keys: Buffer::of(gpu, &keys)?,
            starts: Buffer::of(gpu, &(0..quantizer.ksub() as u32).collect::<Vec<_>>())?,
            centroids: Buffer::zeros(gpu, heads * quantizer.codebook_len())?,
            workspace: Buffer::zeros(gpu, train.workspace_len(heads, longest))?,
            train,
            heads,
            head_len: longest * head_dim,
            head_dim,
        })
    }

    fn launch(&self, gpu: &Gpu, n: usize, iterations: usize) -> Result<()> {
        let arguments = TrainArguments {
            sets: self.heads,
            n,
            vectors: self.keys.pointer().cast(),
            strides: [self.head_len, self.head_dim],
            starts: Some(self.starts.pointer()),
            centroids: self.centroids.pointer(),
            errors: None,
            iterations,
            tolerance: 0.0,
            workspace: self.workspace.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`; a code has fewer values than there are keys, and `n`
        // is at most the longest.
        Ok(unsafe { self.train.launch(gpu.stream(), &arguments) }?)
    }
}

/// Seconds of the fastest of [`RUNS`], after a run that compiles.
fn fastest(gpu: &Gpu, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for i in 0..=RUNS {
        gpu.synchronize()?;
        let start = Instant::now();
        run()?;
        gpu.synchronize()?;
        if i > 0 {
            best = best.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_of_one_device_and_shape() {
        let folder = tempfile::tempdir().unwrap();
        let shape =
            LayerShape { hidden: 8, intermediate: 16, heads: 4, kv_heads: 2, head_dim: 64, m: 16, nbits: 8 };
        let path = beside(&folder.path().join("cost.json"), "NVIDIA H200", &shape);
        assert_eq!(path.file_name().unwrap(), "cost.NVIDIA-H200.8x16.4x2x64.16x8.json");
        let device = "NVIDIA H200".to_owned();
        let made = DeviceClustering {
            device,
            shape,
            times: vec![],
            iteration: [0.0, 1e-6],
            layer: [0.0, 1e-6, 1e-9],
        };
        files::write_atomically(&path, &serde_json::to_vec(&made).unwrap()).unwrap();
        for other in ["cost.json", "cost.new.json", "cost.run.8.4.2.json", "costs.X.8x16.4x2x64.16x8.json"] {
            std::fs::write(folder.path().join(other), "").unwrap();
        }
        let found = device_files(&folder.path().join("cost.json"));
        assert!(found.len() == 1 && found[0].file_name() == path.file_name(), "{found:?}");
        assert_eq!(load(&path, "NVIDIA H200", &shape).unwrap().layer, made.layer);
        for (device, shape) in [("NVIDIA H100", shape), ("NVIDIA H200", LayerShape { m: 32, ..shape })] {
            let error = load(&path, device, &shape).unwrap_err();
            assert!(error.to_string().contains("was measured on NVIDIA H200"), "{error}");
        }
        for damaged in ["", "{}", "[1]"] {
            std::fs::write(&path, damaged).unwrap();
            assert!(matches!(load(&path, "NVIDIA H200", &shape), Err(Error::File { .. })), "{damaged}");
        }
    }
}
