//! The cache of one KV head of one sequence.

mod attend;

use alloc::sync::Arc;
use alloc::vec::Vec;

use kv_attend::owner::{ExactRows, Head, Reader, Writer};

use crate::{Attention, Backend, Element, Error, HeadMaps, Rows, SoftmaxStats, Window};

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones as
/// exact rows, all others as rows of lower rank, all with elements of type `E`.
///
/// Tokens are appended in order and leave the window in batches, as [`Window`] specifies; stored rows do not
/// depend on how the tokens were divided among appends. Attention runs over all three parts in one softmax.
/// [`LowRankLayerCache`](crate::LowRankLayerCache) holds all heads of a layer.
///
/// # Examples
/// ```
/// use svd_core::{
///     Attention, HeadMaps, LowRankHeadCache, Reduction, Rows, SoftmaxStats, Window, normalize_all,
/// };
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// // Rotated keys and values of a model whose weights are folded: components of decaying scale.
/// let rows: Vec<f32> = (0..200 * 16).map(|i| noise(i) * 0.7_f32.powi((i % 16) as i32)).collect();
/// let rows = Rows::contiguous(&rows, 16)?;
/// let maps = HeadMaps::new(Reduction::folded(16, 8)?, Reduction::folded(16, 10)?);
/// let mut head = LowRankHeadCache::new(maps.into(), Window { sinks: 4, recent: 32, batch: 1 });
/// head.append(rows, rows)?;
/// assert_eq!((head.reduced(), head.size()), (164, 4 * (36 * 32 + 164 * 18)));
///
/// let mut scratch = vec![0.0; head.scratch_len(1, 1)];
/// let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
/// let (attention, query) = (Attention::scaled(0.25), rows.slice(7..8)?);
/// head.attend_into(&attention, query, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LowRankHeadCache<E> {
    maps: Arc<HeadMaps>,
    exact: ExactRows<E>,
    reduced: [Vec<E>; 2], // keys, values: (tokens, rank) each
}

impl<E: Element> LowRankHeadCache<E> {
    /// Creates an empty cache.
    #[must_use]
    pub fn new(maps: Arc<HeadMaps>, window: Window) -> Self {
        let exact = ExactRows::new(maps.dims(), window);
        Self { maps, exact, reduced: [Vec::new(), Vec::new()] }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sinks() + self.reduced() + self.recent()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of sinks, exact tokens at the beginning.
    #[must_use]
    pub fn sinks(&self) -> usize {
        self.exact.sinks()
    }

    /// Number of tokens at lower rank, which follow the sinks.
    #[must_use]
    pub fn reduced(&self) -> usize {
        self.reduced[0].len() / self.maps.keys().rank()
    }

    /// Number of exact tokens at the end.
    #[must_use]
    pub fn recent(&self) -> usize {
        self.exact.recent()
    }

    /// The maps that reduce the tokens between sinks and window.
    #[must_use]
    pub const fn maps(&self) -> &Arc<HeadMaps> {
        &self.maps
    }

    /// Bytes of all rows, without the shared maps.
    #[must_use]
    pub fn size(&self) -> usize {
        self.exact.size() + self.reduced.iter().map(|rows| size_of_val(&rows[..])).sum::<usize>()
    }

    /// The tokens at lower rank as they are stored: keys (tokens, rank) and values (tokens, rank).
    #[must_use]
    pub fn reduced_rows(&self) -> [&[E]; 2] {
        let [keys, values] = &self.reduced;
        [keys, values]
    }

    /// Appends tokens, and reduces the rank of those that leave the window.
    ///
    /// # Shapes
    /// `keys` (n, dim), `values` (n, dim of the values).
    /// # Errors
    /// [`Error::Length`]; the cache is then unchanged.
    /// # Cost
    /// dim * rank multiply-adds for each key or value that leaves the window, none if the rotation is folded.
    pub fn append(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<(), Error> {
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
    ) -> Result<(), Error> {
        backend.check()?;
        let (maps, between, reduced) = (&self.maps, self.reduced(), &mut self.reduced);
        self.exact.append(between, [keys, values], |side, rows| {
            maps.sides()[side].store(backend, rows, &mut reduced[side])
        })?;
        Ok(())
    }

    /// Keeps the first `len` tokens, to drop rejected drafts or to share a prefix with another sequence.
    /// Tokens at lower rank stay so: the window refills from the next token on.
    pub fn truncate(&mut self, len: usize) {
        let reduced = self.exact.truncate(len, self.reduced());
        for (rows, map) in self.reduced.iter_mut().zip(self.maps.sides()) {
            rows.truncate(reduced * map.rank());
        }
    }
}

/// The interface of [`LowRankLayerCache`](crate::LowRankLayerCache) to a head.
impl<E: Element> Head for LowRankHeadCache<E> {
    type Element = E;
    type Shared = HeadMaps;
    type Evicted = ();
    type Error = Error;
    const NAME: &'static str = "a low-rank layer cache";
    const MAGIC: [u8; 4] = *b"SVLC";
    const VERSION: u32 = 1;

    fn new(maps: Arc<HeadMaps>, window: Window) -> Self {
        Self::new(maps, window)
    }

    fn dims(&self) -> [usize; 2] {
        self.maps.dims()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn append_with(&mut self, backend: Backend, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<(), Error> {
        self.append_with(backend, keys, values)
    }

    fn truncate(&mut self, len: usize) {
        self.truncate(len);
    }

    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        self.scratch_len(query_tokens, group)
    }

    fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        self.attend_into_with(backend, attention, queries, scratch, out, stats)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(self.maps.id());
        self.exact.write(writer, self.reduced(), |writer, side| {
            writer.elements(self.reduced[side].iter().copied());
        });
    }

    fn read(reader: &mut Reader<'_>, maps: &Arc<HeadMaps>, window: Window) -> Result<Self, Error> {
        if reader.u64()? != maps.id() {
            return Err(Error::BadField { what: "id of the maps" });
        }
        let mut reduced = [Vec::new(), Vec::new()];
        let exact = ExactRows::read(reader, maps.dims(), window, |reader, side, tokens| {
            let len = tokens.checked_mul(maps.sides()[side].rank()).ok_or(Error::TooLarge)?;
            reduced[side] = reader.elements(len)?;
            Ok::<_, Error>(())
        })?;
        Ok(Self { maps: maps.clone(), exact, reduced })
    }
}
