//! Caches in object stores.

use std::sync::Arc;

use codec_core::Encoding;
use kv_store::{Grid, KvStore, Options, Put, encode_chunk};
use kv_stream::ChunkFrame;
use pyo3::prelude::*;

use crate::array::{Array, Output, for_dtype};
use crate::codec::Profile;
use crate::error::{Error, Result};
use crate::layout::{ContextShape, for_context, with_context_mut};
use crate::threads;

/// A folder or memory that holds caches.
#[pyclass(frozen, module = "kvcodes")]
pub struct Store(Arc<KvStore>);

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, url: &str) -> Result<Self> {
        py.detach(|| Ok(Self(Arc::new(KvStore::open(url, Options::default())?))))
    }

    #[pyo3(signature = (model, profile, *, chunk=1500, tail=100))]
    fn space(&self, model: &str, profile: Py<Profile>, chunk: usize, tail: usize) -> Result<Space> {
        let space = kv_store::Space::new(model, profile.get().planes(), Grid { chunk, tail })?;
        Ok(Space { store: self.0.clone(), space, profile })
    }
}

/// The caches of one model and profile in a store.
#[pyclass(frozen, module = "kvcodes")]
pub struct Space {
    store: Arc<KvStore>,
    space: kv_store::Space,
    profile: Py<Profile>,
}

/// Chunks whose transfers are under way at once.
const AHEAD: usize = 4;

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
            threads::run(|| {
                for_context!(&rows, shape, E, planes, place => {
                    let mut stored = 0;
                    for key in self.space.chunks(&tokens) {
                        let place = codec_core::Place { first_token: key.tokens.start, ..place };
                        let object = encode_chunk(profile.planes(), &key, planes, &place)?;
                        let put = self.store.put_chunk(&self.space, &key, object.into())?;
                        stored += usize::from(put != Put::Present);
                    }
                    Ok(stored)
                })
            })
        })
    }

    /// Tokens of the longest stored prefix.
    fn find(&self, py: Python<'_>, tokens: Vec<u32>) -> Result<usize> {
        py.detach(|| {
            let found = self.store.find(&self.space, &tokens)?;
            Ok(found.last().map_or(0, |chunk| chunk.key().tokens.end))
        })
    }

    /// Decodes the longest stored prefix and returns its number of tokens.
    #[pyo3(signature = (tokens, out, *, level=0))]
    fn load(&self, py: Python<'_>, tokens: Vec<u32>, out: &Bound<'_, PyAny>, level: usize) -> Result<usize> {
        let (mut out, profile) = (Output::any(out, &[])?, self.profile.get());
        let shape = ContextShape::of(out.array(), "out")?;
        profile.check(shape)?;
        py.detach(|| {
            let found = self.store.find(&self.space, &tokens)?;
            let end = found.last().map_or(0, |chunk| chunk.key().tokens.end);
            if end > shape.tokens {
                return Err(Error::argument(format!("out of {} tokens, a prefix of {end}", shape.tokens)));
            }
            for_dtype!(out.array().dtype(), E => with_context_mut::<E, _>(&mut out, shape, |mut layers, place| {
                self.store.load(&self.space, &found, AHEAD, |_| Encoding::Level(level), |arrival| {
                    let frame = ChunkFrame::parse(profile.planes(), &arrival.frame, &arrival.tokens, level)?;
                    let place = codec_core::Place { first_token: arrival.tokens.start, ..place };
                    for (layer, [keys, values]) in layers.iter_mut().enumerate() {
                        frame.layer_to(layer, None, &place, keys, values)?;
                    }
                    Ok::<_, Error>(())
                })
            }))?;
            Ok(end)
        })
    }
}
