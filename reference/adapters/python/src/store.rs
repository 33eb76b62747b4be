//! Caches in object stores.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use codec_core::{ChunkSizes, Encoding, Plans, Progress, StreamPolicy};
use kv_store::{AsyncStore, Grid, KvStore, LoadProgress, Options, Put, encode_chunk};
use kv_stream::ChunkFrame;
use pyo3::prelude::*;

use crate::array::{self, Array, Output, for_dtype};
use crate::codec::Profile;
use crate::error::{Error, Result};
use crate::layout::{ContextShape, for_context, with_context_mut};
use crate::pages::{Name, Pages};
use crate::threads::{self, Opened};

/// A folder, memory or bucket that holds caches.
#[pyclass(frozen, module = "kvcodes")]
pub struct Store(Opened<Arc<KvStore>>);

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (url, *, settings=BTreeMap::new(), retry=60.0))]
    fn new(py: Python<'_>, url: &str, settings: BTreeMap<String, String>, retry: f64) -> Result<Self> {
        let retry = Duration::try_from_secs_f64(retry);
        let retry = retry.map_err(|e| Error::argument(format!("retry: {e}")))?;
        let settings: Vec<_> = settings.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        py.detach(|| {
            let (store, root) = kv_store::open_with(url, true, &settings)?;
            let store = AsyncStore::new(store, root, Options { retry, ..Options::default() });
            Ok(Self(Opened::new(Arc::new(KvStore::new(store)?))))
        })
    }

    #[pyo3(signature = (model, profile, *, chunk=1500, tail=100, salt=None))]
    fn space(
        &self,
        model: &str,
        profile: Py<Profile>,
        chunk: usize,
        tail: usize,
        salt: Option<Name>,
    ) -> Result<Space> {
        let space = kv_store::Space::new(model, profile.get().planes(), Grid { chunk, tail })?;
        let space = salt.map_or(space, |salt| space.salted(salt.as_ref()));
        Ok(Space { store: Opened::new(self.0.get()?.clone()), space, profile })
    }

    #[pyo3(signature = (model, order, shape, *, dtype="bf16", part="", profile=None))]
    fn pages(
        &self,
        model: &str,
        order: &str,
        shape: Vec<usize>,
        dtype: &str,
        part: &str,
        profile: Option<Py<Profile>>,
    ) -> Result<Pages> {
        let (dtype, profile) = (array::parse_dtype(dtype)?, profile.as_ref().map(Py::get));
        Pages::open(self.0.get()?.clone(), (model, part), (order, shape), dtype, profile)
    }
}

/// The caches of one model and profile in a store.
#[pyclass(frozen, module = "kvcodes")]
pub struct Space {
    store: Opened<Arc<KvStore>>,
    space: kv_store::Space,
    profile: Py<Profile>,
}

/// Chunks whose transfers are under way at once.
const AHEAD: usize = 4;

/// Seconds that recomputing a chunk takes: a caller who asks for stored rows has not planned to.
const RECOMPUTE: f64 = 1e9;

impl Space {
    /// Decodes the longest stored prefix to `out`, each chunk at the level that `choose` returns, and returns
    /// its number of tokens and the levels.
    fn fill(
        &self,
        py: Python<'_>,
        tokens: &[u32],
        out: &Bound<'_, PyAny>,
        ahead: usize,
        mut choose: impl FnMut(&LoadProgress<'_>) -> usize + Send,
    ) -> Result<(usize, Vec<usize>)> {
        let (mut out, profile) = (Output::any(out, &[])?, self.profile.get());
        let shape = ContextShape::of(out.array(), "out")?;
        profile.check(shape)?;
        py.detach(|| {
            let store = self.store.get()?;
            let (found, mut levels) = (store.find(&self.space, tokens)?, vec![]);
            let end = found.last().map_or(0, |chunk| chunk.key().tokens.end);
            if end > shape.tokens {
                return Err(Error::argument(format!("out of {} tokens, a prefix of {end}", shape.tokens)));
            }
            for_dtype!(out.array().dtype(), E => with_context_mut::<E, _>(&mut out, shape, |mut layers, place| {
                let choose = |progress: &LoadProgress<'_>| Encoding::Level(choose(progress));
                store.load(&self.space, &found, ahead, choose, |arrival| {
                    let Encoding::Level(level) = arrival.encoding else { unreachable!("a level was chosen") };
                    levels.push(level);
                    let frame = ChunkFrame::parse(profile.planes(), &arrival.frame, &arrival.tokens, level)?;
                    let place = codec_core::Place { first_token: arrival.tokens.start, ..place };
                    for (layer, [keys, values]) in layers.iter_mut().enumerate() {
                        frame.layer_to(layer, None, &place, keys, values)?;
                    }
                    Ok::<_, Error>(())
                })
            }))?;
            Ok((end, levels))
        })
    }
}

#[pymethods]
impl Space {
    /// Stores a context and returns the number of chunks that were not there.
    fn put(&self, py: Python<'_>, tokens: Vec<u32>, rows: &Bound<'_, PyAny>) -> Result<usize> {
        let (rows, profile) = (Array::get(rows)?, self.profile.get());
        let shape = ContextShape::of(&rows, "rows")?;
        profile.check(shape)?;
        if shape.tokens != tokens.len() {
            return Err(Error::argument(format!(
                "rows of {} tokens for {} tokens",
                shape.tokens,
                tokens.len()
            )));
        }
        py.detach(|| {
            let (store, mut stored) = (self.store.get()?, 0);
            for key in self.space.chunks(&tokens) {
                let encode = || {
                    for_context!(&rows, shape, E, planes, place => {
                        let place = codec_core::Place { first_token: key.tokens.start, ..place };
                        Ok(encode_chunk(profile.planes(), &key, planes, &place)?)
                    })
                };
                let put = store.put_chunk(&self.space, &key, threads::run(encode)?.into())?;
                stored += usize::from(put != Put::Present);
            }
            Ok(stored)
        })
    }

    /// Tokens of the longest stored prefix.
    fn find(&self, py: Python<'_>, tokens: Vec<u32>) -> Result<usize> {
        py.detach(|| {
            let found = self.store.get()?.find(&self.space, &tokens)?;
            Ok(found.last().map_or(0, |chunk| chunk.key().tokens.end))
        })
    }

    /// Decodes the longest stored prefix and returns its number of tokens.
    #[pyo3(signature = (tokens, out, *, level=0))]
    fn load(&self, py: Python<'_>, tokens: Vec<u32>, out: &Bound<'_, PyAny>, level: usize) -> Result<usize> {
        self.fill(py, &tokens, out, AHEAD, |_| level).map(|(end, _)| end)
    }

    /// As `load`, with the levels that are expected to arrive in `seconds`.
    #[pyo3(signature = (tokens, out, seconds, *, first_level=None))]
    fn stream(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        out: &Bound<'_, PyAny>,
        seconds: f64,
        first_level: Option<usize>,
    ) -> Result<(usize, Vec<usize>)> {
        let levels = self.space.levels();
        let first_level = first_level.unwrap_or_else(|| kv_stream::first_level(seconds, levels));
        let policy = StreamPolicy { slo: seconds, first_level, prior: None, plans: Plans::Uniform };
        let decide = |progress: &LoadProgress<'_>| {
            let left = &progress.chunks[progress.chunk..];
            let sizes: Vec<Vec<u64>> = left.iter().map(|chunk| chunk.sizes().collect()).collect();
            let sizes = sizes.iter().map(|levels| ChunkSizes {
                levels,
                decode: 0.0,
                text: 0,
                recompute: RECOMPUTE,
                requests: 1,
            });
            let measured = progress.last.and_then(|last| last.throughput());
            let elapsed = progress.elapsed.as_secs_f64();
            policy.decide(&sizes.collect::<Vec<_>>(), Progress { measured, elapsed, computing: 0.0 })
        };
        // What `decide` refuses, it refuses for any chunks.
        let check =
            ChunkSizes { levels: &vec![1; levels], decode: 0.0, text: 0, recompute: 0.0, requests: 1 };
        policy.decide(&[check], Progress::default())?;
        self.fill(py, &tokens, out, 1, |progress| match decide(progress).map(|decision| decision.encoding) {
            Ok(Encoding::Level(level)) => level,
            _ => first_level,
        })
    }
}
