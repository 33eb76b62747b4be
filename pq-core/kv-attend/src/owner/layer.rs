//! The cache of a layer: the caches of its heads, filled and cut together.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::store::{check_dims, count};
use super::{Reader, Store, Windowed, Writer};
use crate::error::check_len;
use crate::{Backend, Element, Error, Rows, Window};

/// The keys and values of all heads of a layer of one sequence.
///
/// With feature `rayon`, appends and attention divide the heads among the threads; results do not depend on
/// their number.
#[derive(Clone, Debug)]
pub struct Layer<S, E> {
    heads: Vec<Windowed<S, E>>, // at least one; all have the same window, dimensions and number of tokens
    window: Window,
}

impl<S: Store<E>, E: Element> Layer<S, E> {
    /// Creates an empty cache with a head for each element of `shared`.
    ///
    /// # Errors
    /// [`Error::Zero`] for no head, [`Error::Length`] when the heads differ in their dimensions.
    pub fn new(shared: &[Arc<S::Shared>], window: Window) -> Result<Self, S::Error> {
        Self::from_heads(shared.iter().map(|shared| Windowed::new(shared.clone(), window)).collect(), window)
    }

    fn from_heads(heads: Vec<Windowed<S, E>>, window: Window) -> Result<Self, S::Error> {
        let first = heads.first().ok_or(Error::Zero { what: "number of heads" })?;
        for head in &heads {
            check_dims(head.dims(), first.dims())?;
            check_len("tokens of a head", head.len(), first.len())?;
        }
        Ok(Self { heads, window })
    }

    /// The caches of the heads.
    #[must_use]
    pub fn heads(&self) -> &[Windowed<S, E>] {
        &self.heads
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heads[0].len()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all tokens of all heads, without the shared state.
    #[must_use]
    pub fn size(&self) -> usize {
        self.heads.iter().map(Windowed::size).sum()
    }

    /// Appends tokens to all heads. Returns the report on the tokens that left the window.
    ///
    /// # Shapes
    /// `keys` (n, heads * dim), `values` (n, heads * dim of the values): tokens first (NHD). For heads first
    /// (HND), [`append_heads`](Self::append_heads).
    /// # Errors
    /// [`Error::Length`]; the cache is then unchanged.
    /// # Cost
    /// That of the append of each head.
    pub fn append(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<S::Report, S::Error> {
        self.append_with(Backend::detect(), keys, values)
    }

    /// [`append`](Self::append) on a given backend.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::BackendUnavailable`].
    pub fn append_with(
        &mut self,
        backend: Backend,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<S::Report, S::Error> {
        let [dim, dim_v] = self.heads[0].dims();
        check_len("row of keys", keys.components(), self.heads.len() * dim)?;
        check_len("row of values", values.components(), self.heads.len() * dim_v)?;
        check_len("values", values.rows(), keys.rows())?;
        self.append_each(backend, |h| Ok((keys.columns(h * dim, dim)?, values.columns(h * dim_v, dim_v)?)))
    }

    /// [`append`](Self::append) of rows with heads first (HND).
    ///
    /// # Shapes
    /// `keys` (heads * n, dim), `values` (heads * n, dim of the values).
    /// # Errors
    /// [`Error::PartialRow`] or [`Error::Length`]; the cache is then unchanged.
    pub fn append_heads(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<S::Report, S::Error> {
        let [dim, dim_v] = self.heads[0].dims();
        let n = count("keys", keys.rows(), self.heads.len())?;
        check_len("values", values.rows(), keys.rows())?;
        check_len("row of keys", keys.components(), dim)?;
        check_len("row of values", values.components(), dim_v)?;
        self.append_each(Backend::detect(), |h| {
            Ok((keys.slice(h * n..(h + 1) * n)?, values.slice(h * n..(h + 1) * n)?))
        })
    }

    fn append_each<'a>(
        &mut self,
        backend: Backend,
        rows: impl Fn(usize) -> Result<(Rows<'a, E>, Rows<'a, E>), Error> + Sync,
    ) -> Result<S::Report, S::Error> {
        let append = |(h, head): (usize, &mut Windowed<S, E>)| {
            let (keys, values) = rows(h)?;
            head.append_with(backend, keys, values)
        };
        // One thread does without rayon's, so that a process of a single thread needs no others.
        #[cfg(feature = "rayon")]
        if rayon::current_num_threads() > 1 {
            use rayon::prelude::*;
            let evicted: Vec<_> = self.heads.par_iter_mut().enumerate().map(append).collect();
            return evicted.into_iter().collect();
        }
        self.heads.iter_mut().enumerate().map(append).collect()
    }

    /// Keeps the first `len` tokens of every head, to drop rejected drafts or to share a prefix with another
    /// sequence. No token is lost, but compressed tokens stay compressed, also those that would be exact in a
    /// cache that never held more than `len` tokens: the window refills from the next token on.
    pub fn truncate(&mut self, len: usize) {
        self.heads.iter_mut().for_each(|head| head.truncate(len));
    }

    /// Serializes the cache, without the shared state.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.saved().finish()
    }

    /// [`to_bytes`](Self::to_bytes) with a checksum, which [`from_bytes`](Self::from_bytes) compares: without
    /// it most single wrong bits are read as other values.
    #[must_use]
    pub fn to_bytes_checked(&self) -> Vec<u8> {
        self.saved().finish_checked()
    }

    fn saved(&self) -> Writer {
        let mut writer = Writer::new(S::MAGIC, S::VERSION);
        writer.tag::<E>();
        writer.window(self.window);
        writer.usize(self.heads.len());
        self.heads.iter().for_each(|head| head.write(&mut writer));
        writer
    }

    /// Reads what [`to_bytes`](Self::to_bytes) or [`to_bytes_checked`](Self::to_bytes_checked) wrote;
    /// `shared` must be the codebooks or maps of the saved cache.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`],
    /// [`Error::BadChecksum`];
    /// [`Error::BadField`] for another element type, other codebooks or maps, or numbers of tokens that a
    /// window cannot hold; [`Error::Length`] for another number of heads, or heads that differ in length.
    pub fn from_bytes(bytes: &[u8], shared: &[Arc<S::Shared>]) -> Result<Self, S::Error> {
        let mut reader = Reader::new(S::NAME, S::MAGIC, S::VERSION, bytes)?;
        reader.tag::<E>()?;
        let window = reader.window()?;
        check_len("heads", reader.usize()?, shared.len())?;
        let heads = shared.iter().map(|shared| Windowed::read(&mut reader, shared, window));
        let heads = heads.collect::<Result<_, S::Error>>()?;
        reader.finish()?;
        Self::from_heads(heads, window)
    }
}
