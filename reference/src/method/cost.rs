//! The time of clustering relative to a layer's prefill on this machine, and the iterations that fit into it.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use pq_core::{ClusteringCost, PqShape, TrainOptions, train_batch};
use serde::{Deserialize, Serialize};

use crate::cache::{BlockRule, ElementType, Geometry, Offload, OffloadedRows, RowFormat};
use crate::forward::{Activations, prefill};
use crate::model::{Config, Model, Rope};
use crate::{Error, Result, files};

/// The times of PQCache's prefill on one machine, for one model and quantizer, as stored in a file.
///
/// # Source
/// PQCache (arXiv 2407.12820), 3.3 and figure 7.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusteringProfile {
    /// The model's name.
    pub model: String,
    /// Number of threads.
    pub threads: usize,
    /// The shape of its layers and of the quantizer.
    pub shape: LayerShape,
    /// The measurements.
    pub times: Vec<PrefillTimes>,
    /// Seconds of an iteration over all heads of a layer: `c[0] + c[1] * n`, fitted.
    pub iteration: [f64; 2],
    /// Seconds of a layer: `c[0] + c[1] * n + c[2] * n^2`, fitted.
    pub layer: [f64; 3],
}

/// The shape that the times of a layer and of its codebooks depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerShape {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) m: usize,
    pub(crate) nbits: usize,
}

impl LayerShape {
    pub(crate) const fn new(config: &Config, quantizer: PqShape) -> Self {
        Self {
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            heads: config.n_heads,
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            m: quantizer.m(),
            nbits: quantizer.nbits() as usize,
        }
    }
}

/// Seconds at one length of the prompt.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PrefillTimes {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// A layer's prefill.
    pub layer: f64,
    /// Writing a layer's keys and values to a file.
    pub offload: f64,
    /// An iteration of k-means over all heads of a layer.
    pub iteration: f64,
    /// A layer's prefill with [`ITERATIONS`] iterations between its keys and the next layer.
    pub in_turn: f64,
    /// The same with the iterations overlapping the following layers, on the same threads.
    pub overlapped: f64,
}

/// Iterations per timing.
pub const ITERATIONS: usize = 4;
/// Number of runs; the fastest counts.
const RUNS: usize = 2;
/// Maximum iterations from a profile; the error hardly falls after them.
const MOST: usize = 25;

impl ClusteringProfile {
    /// Measures on the first tokens of a text. Rows are written to `folder`.
    ///
    /// # Errors
    /// [`Error::Argument`] for fewer than three different lengths, and for a text or a model that is too
    /// short; errors of [`prefill`] and of the folder; of `pq-core` for lengths that are too close for a fit.
    pub fn measure(
        model: &Model,
        tokens: &[u32],
        lengths: &[usize],
        shape: PqShape,
        folder: &Path,
    ) -> Result<Self> {
        let different = lengths.iter().collect::<BTreeSet<_>>().len();
        if different < 3 {
            return Err(Error::Argument(format!("the fit needs three different lengths, not {different}")));
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > tokens.len().min(model.config.max_seq_len) || lengths.contains(&0) {
            let (text, context) = (tokens.len(), model.config.max_seq_len);
            return Err(Error::Argument(format!(
                "lengths of 1 to {longest} tokens: the text has {text}, the context {context}"
            )));
        }
        let bench = Bench { model, rope: &Rope::new(&model.config, longest), shape, folder };
        let times = lengths.iter().map(|&n| bench.times(&tokens[..n])).collect::<Result<Vec<_>>>()?;
        let of = |time: fn(&PrefillTimes) -> f64| -> Vec<(usize, f64)> {
            times.iter().map(|at| (at.tokens, time(at))).collect()
        };
        let ClusteringCost { iteration, layer } =
            ClusteringCost::fit(&of(|at| at.iteration), &of(|at| at.layer))?;
        Ok(Self {
            model: model.name.clone(),
            threads: rayon::current_num_threads(),
            shape: LayerShape::new(&model.config, shape),
            times,
            iteration,
            layer,
        })
    }

    /// Reads a file that holds a profile as JSON.
    ///
    /// # Errors
    /// Errors of [`files::read`], and [`Error::File`] if it is not a profile, or if its fit has a negative
    /// time or takes none.
    pub fn load(path: &Path) -> Result<Self> {
        let profile: Self = serde_json::from_slice(&files::read(path)?).map_err(|e| Error::file(path, e))?;
        check_fit(path, &profile.iteration, &profile.layer)?;
        Ok(profile)
    }

    /// The iterations over `n` tokens that take as long as a layer's prefill, from 1 to 25.
    #[must_use]
    pub fn iterations(&self, n: usize) -> usize {
        ClusteringCost { iteration: self.iteration, layer: self.layer }.iterations(n, 1..=MOST)
    }
}

/// Refuses the fit of a file from which no iterations follow.
pub(crate) fn check_fit(path: &Path, iteration: &[f64; 2], layer: &[f64; 3]) -> Result<()> {
    for (name, seconds) in [("iteration", iteration.as_slice()), ("layer", layer)] {
        if seconds.iter().any(|&c| c < 0.0) || seconds.iter().all(|&c| c == 0.0) {
            let what = format!("`{name}` is {seconds:?}: none may be negative, and not all of them 0");
            return Err(Error::file(path, what));
        }
    }
    Ok(())
}

/// Training iterations: a count, or derived from a profile in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Iterations {
    Count(usize),
    Profile(PathBuf),
}

impl Iterations {
    /// The file with the CPU's profile.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Count(_) => None,
            Self::Profile(path) => Some(path),
        }
    }

    /// Reads the profile, if there is one, for a model and codebooks of this shape.
    pub fn resolve(&self, config: &Config, shape: PqShape) -> Result<Resolved> {
        let path = match self {
            Self::Count(iterations) => return Ok(Resolved::Count(*iterations)),
            Self::Profile(path) => path,
        };
        let profile = ClusteringProfile::load(path)?;
        if profile.shape != LayerShape::new(config, shape) {
            return Err(Error::file(
                path,
                format!("was measured on {} for {:?}", profile.model, profile.shape),
            ));
        }
        let (iteration, layer) = (profile.iteration, profile.layer);
        Ok(Resolved::Cost(ClusteringCost { iteration, layer }))
    }
}

/// [`Iterations`] after reading the profile.
#[derive(Clone, Copy)]
pub(crate) enum Resolved {
    Count(usize),
    Cost(ClusteringCost),
}

impl Resolved {
    /// Iterations for the codebooks of a prompt of `n` tokens.
    pub fn of(self, n: usize) -> usize {
        match self {
            Self::Count(iterations) => iterations,
            Self::Cost(cost) => cost.iterations(n, 1..=MOST),
        }
    }

    /// Iterations for codebooks of `n` keys, one per `step` tokens of a prompt.
    #[cfg(feature = "cuda")]
    pub fn of_keys(self, n: usize, step: usize) -> usize {
        match self {
            Self::Count(iterations) => iterations,
            Self::Cost(ClusteringCost { iteration, layer: [constant, linear, square] }) => {
                let step = step as f64;
                let layer = [constant, step * linear, step * step * square];
                ClusteringCost { iteration, layer }.iterations(n, 1..=MOST)
            }
        }
    }
}

impl FromStr for Iterations {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse::<f64>() {
            Ok(_) => match text.parse() {
                Ok(count @ 1..=4096) => Ok(Self::Count(count)),
                _ => Err("must be a whole number from 1 to 4096 or a file of `kv cost`".into()),
            },
            Err(_) => Ok(Self::Profile(text.into())),
        }
    }
}

impl Display for Iterations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Count(count) => count.fmt(f),
            Self::Profile(path) => path.display().fmt(f),
        }
    }
}

struct Bench<'a> {
    model: &'a Model,
    rope: &'a Rope,
    shape: PqShape,
    folder: &'a Path,
}

impl Bench<'_> {
    fn times(&self, tokens: &[u32]) -> Result<PrefillTimes> {
        let config = &self.model.config;
        let (layers, kv_dim) = (config.n_layers as f64, config.kv_dim());
        let rotated = |l: usize, k: &[f32]| self.rope.layer(l).rotated(k, kv_dim, 0);
        let mut middle = None;
        prefill(self.model, self.rope, tokens, &mut |l, activations| {
            if l == config.n_layers / 2 {
                middle = Some((rotated(l, activations.k), activations.v.to_vec()));
            }
            Ok(())
        })?;
        let (keys, values) = middle.unwrap_or_default();
        let blocks = BlockRule {
            capacity: 0,
            block_len: 1,
            k_cache: 0,
            eviction: pq_core::Eviction::LeastRecentlyUsed,
        };
        let offload = Offload { folder: self.folder.to_owned(), blocks };
        let format = RowFormat::Exact(ElementType::F16);
        Ok(PrefillTimes {
            tokens: tokens.len(),
            layer: fastest(|| prefill(self.model, self.rope, tokens, &mut |_, _| Ok(())).map(drop))? / layers,
            offload: fastest(|| {
                OffloadedRows::new(Geometry::of(config), format, Some(&offload), tokens.len())?
                    .push(&keys, &values)
            })?,
            iteration: fastest(|| self.train(&keys))? / ITERATIONS as f64,
            in_turn: fastest(|| {
                let mut train = |l, activations: Activations<'_>| self.train(&rotated(l, activations.k));
                prefill(self.model, self.rope, tokens, &mut train).map(drop)
            })? / layers,
            overlapped: fastest(|| {
                thread::scope(|scope| {
                    let mut trainings = vec![];
                    prefill(self.model, self.rope, tokens, &mut |l, activations| {
                        let keys = rotated(l, activations.k);
                        trainings.push(scope.spawn(move || self.train(&keys)));
                        Ok(())
                    })?;
                    trainings.into_iter().try_for_each(|training: ScopedJoinHandle<'_, Result<()>>| {
                        training.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                    })
                })
            })? / layers,
        })
    }

    /// Trains codebooks of all heads on a layer's rotated keys.
    fn train(&self, keys: &[f32]) -> Result<()> {
        let geometry = Geometry::of(&self.model.config);
        let rows: Vec<Vec<f32>> =
            (0..geometry.n_kv_heads).map(|head| geometry.head_rows(head, keys)).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let options = TrainOptions { iterations: ITERATIONS, ..Default::default() };
        train_batch(self.shape, &rows, &options)?;
        Ok(())
    }
}

/// Seconds of the fastest of [`RUNS`] runs.
fn fastest(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/fixtures/gqa");
        let mut model = Model::load(&folder).unwrap();
        model.config.max_seq_len = 256;
        model
    }

    fn profile(model: &Model) -> ClusteringProfile {
        let tokens: Vec<u32> = (0..256).map(|i| i % 96).collect();
        let shape = PqShape::new(model.config.head_dim, 2, 4).unwrap();
        let rows = tempfile::tempdir().unwrap();
        let measure =
            |lengths: &[usize]| ClusteringProfile::measure(model, &tokens, lengths, shape, rows.path());
        assert!(matches!(measure(&[64, 128, 64]), Err(Error::Argument(_))), "two lengths fit no square");
        assert!(matches!(measure(&[64, 128, 257]), Err(Error::Argument(_))));
        assert!(matches!(measure(&[0, 64, 128]), Err(Error::Argument(_))));
        measure(&[64, 128, 192, 256]).unwrap()
    }

    #[test]
    fn iterations_follow_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cost.json");
        let model = model();
        let mut profile = profile(&model);
        assert!(profile.times.iter().all(|at| at.layer > 0.0 && at.iteration > 0.0 && at.offload > 0.0));
        // A layer of 1 us per token and 1 ns per squared token; iterations of 1 us per token.
        (profile.iteration, profile.layer) = ([0.0, 1e-6], [0.0, 1e-6, 1e-9]);
        files::write_atomically(&path, &serde_json::to_vec(&profile).unwrap()).unwrap();
        let (shape, config) = (PqShape::new(16, 2, 4).unwrap(), &model.config);
        let iterations = Iterations::Profile(path.clone());
        let resolved = iterations.resolve(config, shape).unwrap();
        let follow = |n| (resolved.of(n), profile.iterations(n));
        assert_eq!([100, 4000, 9000, 100_000].map(follow), [(1, 1), (5, 5), (10, 10), (25, 25)]);
        assert_eq!(Iterations::Count(7).resolve(config, shape).unwrap().of(9), 7);
        #[cfg(feature = "cuda")]
        assert_eq!(
            [(4000, 1), (2000, 2), (1000, 100)].map(|(n, step)| resolved.of_keys(n, step)),
            [5, 10, 25]
        );
        let refused = |config: &Config, shape, what: &str| {
            let Err(e @ Error::File { .. }) = iterations.resolve(config, shape) else {
                panic!("{what} is accepted")
            };
            assert!(e.to_string().contains(what), "{e}");
        };
        for other in [PqShape::new(16, 4, 4).unwrap(), PqShape::new(16, 2, 5).unwrap()] {
            refused(config, other, "was measured on gqa");
        }
        refused(&Config { hidden_size: 128, ..config.clone() }, shape, "was measured on gqa");
        let good = serde_json::to_string(&profile).unwrap();
        for text in ["", "{}", "[1]", &good.replace("1e-6", "1e999")] {
            std::fs::write(&path, text).unwrap();
            refused(config, shape, "");
        }
        for (iteration, layer, what) in [
            ([0.0, 1e-6], [-1.0, 0.0, 0.0], "`layer` is [-1.0, 0.0, 0.0]"),
            ([0.0, 1e-6], [0.0; 3], "`layer`"),
            ([1.0, -1e-6], [1.0; 3], "`iteration`"),
            ([0.0; 2], [1.0; 3], "`iteration`"),
        ] {
            let bad = ClusteringProfile { iteration, layer, ..profile.clone() };
            std::fs::write(&path, serde_json::to_string(&bad).unwrap()).unwrap();
            refused(config, shape, what);
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(iterations.resolve(config, shape), Err(Error::Io { .. })));
    }

    #[test]
    fn a_number_of_iterations_is_no_file() {
        assert_eq!("10".parse(), Ok(Iterations::Count(10)));
        assert_eq!("a/cost.json".parse(), Ok(Iterations::Profile("a/cost.json".into())));
        for text in ["0", "-1", "1.5", "4097", "nan", "1e3"] {
            assert!(text.parse::<Iterations>().is_err(), "{text}");
        }
    }
}
