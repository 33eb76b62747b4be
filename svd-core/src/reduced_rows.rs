//! The tokens of one KV head of one sequence at lower rank.

mod attend;

use alloc::sync::Arc;
use alloc::vec::Vec;

use kv_attend::owner::{EvictedRows, Queries, Reader, Store, Writer};

use crate::{Backend, Element, Error, HeadMaps, SoftmaxStats};

/// The keys and values of one head of one sequence as rows of lower rank, with elements of type `E`, between
/// the sinks and the window of a [`LowRankHeadCache`](crate::LowRankHeadCache).
#[derive(Clone, Debug)]
pub struct ReducedRows<E> {
    maps: Arc<HeadMaps>,
    rows: [Vec<E>; 2], // keys, values: (tokens, rank) each
}

impl<E> ReducedRows<E> {
    /// The maps that reduce the tokens.
    #[must_use]
    pub const fn maps(&self) -> &Arc<HeadMaps> {
        &self.maps
    }

    /// The rows as they are stored: keys (tokens, rank) and values (tokens, rank).
    #[must_use]
    pub fn rows(&self) -> [&[E]; 2] {
        let [keys, values] = &self.rows;
        [keys, values]
    }
}

/// What [`LowRankHeadCache`](crate::LowRankHeadCache) needs.
impl<E: Element> Store<E> for ReducedRows<E> {
    type Shared = HeadMaps;
    type Report = ();
    type Error = Error;
    const NAME: &'static str = "a low-rank layer cache";
    const MAGIC: [u8; 4] = *b"SVLC";
    const VERSION: u32 = 2;
    const QUERIES: usize = attend::QUERIES;

    fn new(maps: Arc<HeadMaps>) -> Self {
        Self { maps, rows: [Vec::new(), Vec::new()] }
    }

    fn dims(&self) -> [usize; 2] {
        self.maps.dims()
    }

    fn len(&self) -> usize {
        self.rows[0].len() / self.maps.keys().rank()
    }

    fn size(&self) -> usize {
        self.rows.iter().map(|rows| size_of_val(&rows[..])).sum()
    }

    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>) -> Result<(), Error> {
        for ((parts, map), stored) in evicted.sides().iter().zip(self.maps.sides()).zip(&mut self.rows) {
            parts.iter().try_for_each(|&rows| map.store(backend, rows, stored))?;
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) {
        for (rows, map) in self.rows.iter_mut().zip(self.maps.sides()) {
            rows.truncate(len * map.rank());
        }
    }

    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        attend::scratch_len(&self.maps, query_tokens.saturating_mul(group))
    }

    fn attend_into(
        &self,
        backend: Backend,
        queries: &Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        attend::attend_into(self, backend, queries, scratch, out, stats)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(self.maps.id());
        writer.usize(self.len());
        self.rows.iter().for_each(|rows| writer.elements(rows.iter().copied()));
    }

    fn read(reader: &mut Reader<'_>, maps: &Arc<HeadMaps>) -> Result<Self, Error> {
        if reader.u64()? != maps.id() {
            return Err(Error::BadField { what: "id of the maps" });
        }
        let tokens = reader.usize()?;
        let len = |rank: usize| tokens.checked_mul(rank).ok_or(Error::TooLarge);
        let [keys, values] = [len(maps.keys().rank())?, len(maps.values().rank())?];
        let rows = [reader.elements(keys)?, reader.elements(values)?];
        Ok(Self { maps: maps.clone(), rows })
    }
}
