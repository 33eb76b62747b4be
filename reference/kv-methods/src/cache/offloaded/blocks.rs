//! The block cache of one head, in front of its records on disk.

use pq_core::{BlockCache, Eviction, Hit};

use super::file::RecordFiles;
use crate::Result;

/// Size and eviction policy of a block cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRule {
    /// Tokens cached in memory per layer and head, in whole blocks.
    pub capacity: usize,
    /// Tokens per block.
    pub block_len: usize,
    /// Maximum blocks loaded per step: those with most of its tokens.
    pub k_cache: usize,
    pub eviction: Eviction,
}

impl BlockRule {
    fn directory(&self) -> BlockCache {
        BlockCache::new(self.block_len, self.capacity / self.block_len, self.eviction)
    }
}

/// Records of one head: the cached blocks, then the misses of the last step.
#[derive(Debug)]
pub(super) struct HeadBlocks {
    rule: BlockRule,
    directory: BlockCache,
    used: usize,       // slots used so far
    records: Vec<u32>, // (used * block_len + misses of the last step, words)
    rows: Vec<u32>,    // index of the record of each token of the last fetch
    hits: Vec<Hit>,
    misses: Vec<u32>,
}

/// The records of one head in a file.
#[derive(Clone, Copy)]
pub(super) struct HeadFile<'a> {
    pub files: &'a RecordFiles,
    pub head: usize,
    pub words: usize, // per record
}

impl HeadBlocks {
    pub fn new(rule: BlockRule) -> Self {
        let directory = rule.directory();
        Self { rule, directory, used: 0, records: vec![], rows: vec![], hits: vec![], misses: vec![] }
    }

    /// An empty cache with the same policy.
    pub fn fresh(&self) -> Self {
        Self::new(self.rule)
    }

    /// Bytes of the cached records.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.records[..])
    }

    /// Fetches `tokens`, ascending. Returns the records, the index of each token's record, and the number of
    /// hits.
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

    /// Loads the blocks that hold most of `tokens`, of `n` in the file, and returns the number of records
    /// read. A block that is not full is not cached, since tokens appended to it later would be missing.
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
                // The directory already lists the block, but its slot holds no valid rows.
                *self = self.fresh();
                return Err(error);
            }
        }
        Ok(loads.len() * block_len)
    }

    /// Drops the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.directory.truncate(len);
    }
}
