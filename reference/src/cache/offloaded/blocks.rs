//! The block cache of one head: records in memory of which the rest is on disk.

use pq_core::{BlockCache, Eviction, Hit};

use super::file::RecordFiles;
use crate::Result;

/// The sizes and the rule of a block cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRule {
    /// Tokens that stay in memory per layer and head, in whole blocks.
    pub capacity: usize,
    /// Tokens of a block.
    pub block_len: usize,
    /// Blocks that a step may bring in: those with most of its tokens.
    pub k_cache: usize,
    pub eviction: Eviction,
}

impl BlockRule {
    fn directory(&self) -> BlockCache {
        BlockCache::new(self.block_len, self.capacity / self.block_len, self.eviction)
    }
}

/// Records of one head: blocks that stay, then what the last step has missed.
#[derive(Debug)]
pub(super) struct HeadBlocks {
    rule: BlockRule,
    directory: BlockCache,
    used: usize,       // slots that have held a block
    records: Vec<u32>, // (used * block_len + misses of the last step, words)
    rows: Vec<u32>,    // for every token of the last fetch, in its order, the index of its record
    hits: Vec<Hit>,
    misses: Vec<u32>,
}

/// Where one head's records are.
#[derive(Clone, Copy)]
pub(super) struct HeadFile<'a> {
    pub files: &'a RecordFiles,
    pub head: usize,
    pub words: usize, // of a record
}

impl HeadBlocks {
    pub fn new(rule: BlockRule) -> Self {
        let directory = rule.directory();
        Self { rule, directory, used: 0, records: vec![], rows: vec![], hits: vec![], misses: vec![] }
    }

    /// An empty cache with the same rule.
    pub fn fresh(&self) -> Self {
        Self::new(self.rule)
    }

    /// Bytes of the records that it holds.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.records[..])
    }

    /// The records of `tokens`, ascending, with the index of each one's, and how many were here already.
    pub fn fetch(&mut self, file: HeadFile<'_>, tokens: &[u32]) -> Result<(&[u32], &[u32], usize)> {
        self.directory.look_up(tokens, &mut self.hits, &mut self.misses);
        let first_miss = self.used * self.rule.block_len;
        self.records.resize((first_miss + self.misses.len()) * file.words, 0);
        let mut place = &mut self.records[first_miss * file.words..];
        for run in self.misses.chunk_by(|a, b| a + 1 == *b) {
            let (records, rest) = place.split_at_mut(run.len() * file.words);
            let start = run[0] as usize;
            file.files.read(file.head, start..start + run.len(), records)?;
            place = rest;
        }
        let (mut hits, mut miss) = (self.hits.iter().peekable(), first_miss as u32);
        self.rows.clear();
        for &token in tokens {
            match hits.next_if(|hit| hit.token == token) {
                Some(hit) => self.rows.push(hit.row as u32),
                None => {
                    self.rows.push(miss);
                    miss += 1;
                }
            }
        }
        Ok((&self.records, &self.rows, self.hits.len()))
    }

    /// Brings in the blocks that hold most of `tokens`, of `n` in the file, and returns how many records it
    /// has read. A block that is not full yet would miss the tokens that come into it, so it stays out.
    pub fn update(&mut self, file: HeadFile<'_>, tokens: &[u32], n: usize) -> Result<usize> {
        let block_len = self.rule.block_len;
        let in_full_blocks = tokens.partition_point(|&token| (token as usize) < n / block_len * block_len);
        let loads = self.directory.update(&tokens[..in_full_blocks], self.rule.k_cache);
        for load in &loads {
            let (first, slot) = (load.block as usize * block_len, load.slot as usize);
            self.used = self.used.max(slot + 1);
            let end = self.used * block_len * file.words;
            self.records.resize(self.records.len().max(end), 0);
            let records = &mut self.records[slot * block_len * file.words..][..block_len * file.words];
            if let Err(error) = file.files.read(file.head, first..first + block_len, records) {
                // The directory has the block already: its slot must not be taken for its rows.
                *self = self.fresh();
                return Err(error);
            }
        }
        Ok(loads.len() * block_len)
    }

    /// Forgets the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.directory.truncate(len);
    }
}
