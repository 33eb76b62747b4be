//! Offloaded exact rows, of which a decode step reads a few: in memory, or in files behind a block cache.

mod blocks;
mod file;
mod format;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use kv_llama::{Fetched, Footprint};

use super::{FetchCounter, Geometry, Sums};
use crate::Result;
pub(crate) use blocks::BlockRule;
use blocks::{HeadBlocks, HeadFile};
use file::{Layout, RecordFiles};
pub(crate) use format::RowFormat;

/// Where offloaded rows are stored.
#[derive(Clone, Debug)]
pub(crate) struct Offload {
    pub folder: PathBuf,
    pub blocks: BlockRule,
}

/// Rotated keys and values of one layer, which attention gathers by token list.
///
/// Results do not depend on the storage: attention adds the same records in the same order.
#[derive(Clone)]
pub(crate) struct OffloadedRows {
    geometry: Geometry,
    format: RowFormat,
    len: usize,
    place: Place,
    counter: FetchCounter,
}

enum Place {
    Memory(Vec<Vec<u32>>), // per head: (len, words)
    Disk { files: RecordFiles, blocks: Vec<Mutex<HeadBlocks>> },
}

/// A clone shares the records on disk and starts with an empty block cache.
impl Clone for Place {
    fn clone(&self) -> Self {
        match self {
            Self::Memory(heads) => Self::Memory(heads.clone()),
            Self::Disk { files, blocks } => {
                let blocks = blocks.iter().map(|blocks| Mutex::new(lock(blocks).fresh()));
                Self::Disk { files: files.clone(), blocks: blocks.collect() }
            }
        }
    }
}

impl OffloadedRows {
    /// Creates empty storage; on disk, for at most `capacity` tokens.
    ///
    /// # Errors
    /// [`kv_model::Error::Io`] when no file can be created in the folder.
    pub fn new(
        geometry: Geometry,
        format: RowFormat,
        offload: Option<&Offload>,
        capacity: usize,
    ) -> Result<Self> {
        let heads = 0..geometry.n_kv_heads;
        let place = match offload {
            None => Place::Memory(heads.map(|_| vec![]).collect()),
            Some(Offload { folder, blocks }) => Place::Disk {
                files: RecordFiles::new(folder, Layout { words: format.words(geometry.head_dim), capacity })?,
                blocks: heads.map(|_| Mutex::new(HeadBlocks::new(*blocks))).collect(),
            },
        };
        Ok(Self { geometry, format, len: 0, place, counter: FetchCounter::default() })
    }

    /// The dimensions of the rows.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of one head's key of a token.
    pub fn key_bytes(&self) -> usize {
        self.format.row_bytes(self.geometry.head_dim) / 2
    }

    /// Counts bytes that were read to score tokens.
    pub fn count_scored(&self, bytes: usize) {
        self.counter.add(Fetched { scored_bytes: bytes as u64, ..Fetched::default() });
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    fn words(&self) -> usize {
        self.format.words(self.geometry.head_dim)
    }

    /// Appends rows (n, n_kv_heads * head_dim). After an error the contents are unchanged.
    pub fn push(&mut self, k: &[f32], v: &[f32]) -> Result<()> {
        let Geometry { n_kv_heads, head_dim, .. } = self.geometry;
        let (len, kv_dim, format) = (self.len, self.geometry.kv_dim(), self.format);
        let mut records = vec![];
        for head in 0..n_kv_heads {
            records.clear();
            for (k, v) in k.chunks_exact(kv_dim).zip(v.chunks_exact(kv_dim)) {
                format.push(
                    &k[head * head_dim..][..head_dim],
                    &v[head * head_dim..][..head_dim],
                    &mut records,
                );
            }
            match &mut self.place {
                Place::Memory(heads) => heads[head].extend_from_slice(&records),
                Place::Disk { files, .. } => files.write(head, len, &records)?,
            }
        }
        self.len += k.len() / kv_dim;
        Ok(())
    }

    /// Drops the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        let words = self.words();
        match &mut self.place {
            Place::Memory(heads) => heads.iter_mut().for_each(|records| records.truncate(len * words)),
            Place::Disk { files, blocks } => {
                files.truncate(len);
                blocks.iter().for_each(|blocks| lock(blocks).truncate(len));
            }
        }
        self.len = self.len.min(len);
    }

    /// One head's key of token `t`.
    pub fn key(&self, head: usize, t: usize, key: &mut [f32]) -> Result<()> {
        let words = self.words();
        match &self.place {
            Place::Memory(heads) => self.format.key(&heads[head][t * words..][..words], key),
            Place::Disk { files, .. } => {
                let mut record = vec![0; words];
                files.read(head, t..t + 1, &mut record)?;
                self.format.key(&record, key);
            }
        }
        Ok(())
    }

    /// One head's values (n, head_dim) of tokens.
    pub fn values(&self, head: usize, tokens: Range<usize>) -> Result<Vec<f32>> {
        let (dim, words) = (self.geometry.head_dim, self.words());
        let mut read;
        let records = match &self.place {
            Place::Memory(heads) => &heads[head][tokens.start * words..tokens.end * words],
            Place::Disk { files, .. } => {
                read = vec![0; tokens.len() * words];
                files.read(head, tokens.clone(), &mut read)?;
                &read[..]
            }
        };
        let mut values = vec![0.0; tokens.len() * dim];
        let rows = records.chunks_exact(words).zip(values.chunks_exact_mut(dim));
        rows.for_each(|(record, value)| self.format.value(record, value));
        Ok(values)
    }

    /// Adds the attention of one head's scaled queries (group, head_dim) on the rows of `tokens`, ascending.
    pub fn attend(&self, head: usize, tokens: &[u32], q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let words = self.words();
        let mut fetched = Fetched { attentions: 1, rows: tokens.len() as u64, ..Fetched::default() };
        let row_bytes = self.format.row_bytes(self.geometry.head_dim) as u64;
        match &self.place {
            Place::Memory(heads) => self.format.attend(&heads[head], tokens, q, sums)?,
            Place::Disk { files, blocks } => {
                let (mut blocks, file) = (lock(&blocks[head]), HeadFile { files, head, words });
                let (records, rows, hits) = blocks.fetch(file, tokens)?;
                self.format.attend(records, rows, q, sums)?;
                fetched.hits = hits as u64;
                fetched.loaded_bytes = blocks.update(file, tokens, self.len)? as u64 * row_bytes;
            }
        }
        fetched.bytes = (fetched.rows - fetched.hits) * row_bytes;
        self.counter.add(fetched);
        Ok(())
    }

    /// Counts of the rows that attention has read.
    pub fn fetched(&self) -> Fetched {
        self.counter.get()
    }

    /// Bytes of the offloaded rows, and of their copies in the block cache.
    pub fn footprint(&self) -> Footprint {
        let bytes = self.format.row_bytes(self.geometry.head_dim) * self.geometry.n_kv_heads * self.len;
        let working = match &self.place {
            Place::Memory(_) => 0,
            Place::Disk { blocks, .. } => blocks.iter().map(|blocks| lock(blocks).bytes()).sum(),
        };
        Footprint { offloaded: bytes, working, ..Footprint::default() }
    }
}

/// After a panic the cache is reset: its directory may list a block that was not loaded.
fn lock(blocks: &Mutex<HeadBlocks>) -> MutexGuard<'_, HeadBlocks> {
    blocks.lock().unwrap_or_else(|poisoned| {
        let mut guard = poisoned.into_inner();
        *guard = guard.fresh();
        blocks.clear_poison();
        guard
    })
}
