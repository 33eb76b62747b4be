//! A cache of token blocks in fast memory, in front of slow memory that holds all keys and values.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// The eviction policy of a [`BlockCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// Evicts the block whose last use is oldest.
    LeastRecentlyUsed,
    /// Evicts the block with the fewest uses; of those, the one whose last use is oldest.
    LeastFrequentlyUsed,
}

/// A block to copy into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Index of the block, which starts at token `block * block_len`.
    pub block: u32,
    /// Destination slot in `0..capacity`.
    pub slot: u32,
    /// The block that it replaces, if any.
    pub evicted: Option<u32>,
}

/// The location of a cached token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Position in the sequence, as it was requested.
    pub token: u32,
    /// Its row in the cache's memory: `slot * block_len + offset in the block`.
    pub row: usize,
}

/// Counters of a [`BlockCache`] since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Tokens that were in the cache.
    pub hits: u64,
    /// Tokens that were not in the cache.
    pub misses: u64,
    /// Blocks to load that [`BlockCache::update`] returned.
    pub loads: u64,
}

impl CacheStatistics {
    /// The hit rate over all tokens; 0 before the first.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    block: u32,
    used: u64, // step of the last use
    uses: u64,
}

/// The directory of a cache of token blocks; the caller owns the rows.
///
/// A decode step looks its tokens up, fetches the misses, and then [`update`](Self::update)s the cache with
/// the blocks that contain most of its tokens. Blocks with few of them would displace more useful ones.
///
/// # Source
/// PQCache (arXiv 2407.12820), 3.4: 128 tokens per block, 32 blocks, least frequently used.
/// # Examples
/// ```
/// use pq_core::{BlockCache, Eviction};
/// let mut cache = BlockCache::new(128, 2, Eviction::LeastFrequentlyUsed);
/// let wanted = [0, 5, 130, 131, 900];
/// let (mut hits, mut misses) = (vec![], vec![]);
/// cache.look_up(&wanted, &mut hits, &mut misses);
/// assert_eq!(misses, wanted);
/// assert_eq!(cache.update(&wanted, 2).len(), 2); // blocks 0 and 1
/// cache.look_up(&wanted, &mut hits, &mut misses);
/// assert_eq!((hits.len(), &misses[..]), (4, &[900][..]));
/// ```
#[derive(Clone, Debug)]
pub struct BlockCache {
    block_len: usize, // tokens, at least 1
    capacity: usize,  // blocks
    eviction: Eviction,
    slots: Vec<Slot>,
    slot_of: BTreeMap<u32, usize>, // block -> index in `slots`
    step: u64,
    statistics: CacheStatistics,
}

impl BlockCache {
    /// An empty cache for `capacity` blocks of `block_len` tokens; a `block_len` of 0 counts as 1.
    #[must_use]
    pub fn new(block_len: usize, capacity: usize, eviction: Eviction) -> Self {
        Self {
            block_len: block_len.max(1),
            capacity,
            eviction,
            slots: Vec::new(),
            slot_of: BTreeMap::new(),
            step: 0,
            statistics: CacheStatistics::default(),
        }
    }

    /// The counters since creation.
    #[must_use]
    pub const fn statistics(&self) -> CacheStatistics {
        self.statistics
    }

    /// Divides the tokens into hits and misses, in order, and overwrites both lists.
    pub fn look_up(&mut self, tokens: &[u32], hits: &mut Vec<Hit>, misses: &mut Vec<u32>) {
        hits.clear();
        misses.clear();
        for &token in tokens {
            match self.slot_of.get(&self.block_of(token)) {
                Some(&slot) => {
                    // Cannot overflow: there are no more slots than simultaneously cached blocks.
                    let row = slot * self.block_len + token as usize % self.block_len;
                    hits.push(Hit { token, row });
                }
                None => misses.push(token),
            }
        }
        self.statistics.hits += hits.len() as u64;
        self.statistics.misses += misses.len() as u64;
    }

    /// Ends a step: marks the `k_cache` blocks that contain most of its tokens as used, and returns those of
    /// them that the caller has to load. Of blocks with equally many tokens the lower comes first.
    ///
    /// Leave out the tokens of the last block while it grows: a row appended later would be a hit in a slot
    /// that does not hold it. After a failed load, start with an empty cache: the directory already lists the
    /// block.
    pub fn update(&mut self, tokens: &[u32], k_cache: usize) -> Vec<Load> {
        self.step += 1;
        let mut counts = BTreeMap::new();
        for &token in tokens {
            *counts.entry(self.block_of(token)).or_insert(0_usize) += 1;
        }
        let mut blocks: Vec<(u32, usize)> = counts.into_iter().collect();
        blocks.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
        blocks.truncate(k_cache.min(self.capacity));
        // Cached blocks are marked first, so that no block of this step evicts another.
        for (block, _) in &blocks {
            if let Some(&slot) = self.slot_of.get(block) {
                self.slots[slot].used = self.step;
                self.slots[slot].uses += 1;
            }
        }
        let missing = blocks.into_iter().filter(|(block, _)| !self.slot_of.contains_key(block));
        let missing: Vec<u32> = missing.map(|(block, _)| block).collect();
        missing.into_iter().filter_map(|block| self.insert(block)).collect()
    }

    /// Removes the blocks that contain token `n` or a later one, when the sequence is truncated to `n`
    /// tokens.
    pub fn truncate(&mut self, n: usize) {
        let block_len = self.block_len;
        let is_kept = |block: u32| (block as usize).saturating_add(1).saturating_mul(block_len) <= n;
        // A slot's index is its address, so the slots of removed blocks stay in the list, unused.
        for slot in &mut self.slots {
            if !is_kept(slot.block) {
                *slot = Slot { used: 0, uses: 0, ..*slot };
            }
        }
        self.slot_of.retain(|&block, _| is_kept(block));
    }

    fn block_of(&self, token: u32) -> u32 {
        (token as usize / self.block_len) as u32
    }

    /// Inserts `block`, unless every slot holds a block of this step.
    fn insert(&mut self, block: u32) -> Option<Load> {
        let fresh = Slot { block, used: self.step, uses: 1 };
        let (slot, evicted) = match self.slots.iter().position(|slot| slot.used == 0) {
            Some(unused) => (unused, None),
            None if self.slots.len() < self.capacity => (self.slots.len(), None),
            None => {
                let order = |slot: &Slot| match self.eviction {
                    Eviction::LeastRecentlyUsed => (0, slot.used),
                    Eviction::LeastFrequentlyUsed => (slot.uses, slot.used),
                };
                let old = self.slots.iter().enumerate().filter(|(_, slot)| slot.used < self.step);
                let (slot, _) = old.min_by_key(|(_, slot)| order(slot))?;
                (slot, Some(self.slots[slot].block))
            }
        };
        if let Some(old) = evicted {
            self.slot_of.remove(&old);
        }
        if slot == self.slots.len() {
            self.slots.push(fresh);
        } else {
            self.slots[slot] = fresh;
        }
        self.slot_of.insert(block, slot);
        self.statistics.loads += 1;
        Some(Load { block, slot: slot as u32, evicted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(cache: &mut BlockCache, blocks: &[u32]) -> Vec<u32> {
        let tokens: Vec<u32> = blocks.iter().map(|b| b * 4).collect();
        cache.update(&tokens, 8).iter().map(|load| load.block).collect()
    }

    #[test]
    fn the_least_recent_leaves() {
        let mut cache = BlockCache::new(4, 2, Eviction::LeastRecentlyUsed);
        assert_eq!(loaded(&mut cache, &[0, 1]), [0, 1]);
        assert_eq!(loaded(&mut cache, &[0]), []);
        let loads = cache.update(&[8], 1);
        assert_eq!(loads, [Load { block: 2, slot: 1, evicted: Some(1) }]);
    }

    #[test]
    fn the_least_frequent_leaves() {
        let mut cache = BlockCache::new(4, 2, Eviction::LeastFrequentlyUsed);
        for _ in 0..3 {
            loaded(&mut cache, &[0]);
        }
        loaded(&mut cache, &[1]);
        assert_eq!(cache.update(&[8], 1), [Load { block: 2, slot: 1, evicted: Some(1) }]);
    }

    #[test]
    fn a_step_never_displaces_its_own_blocks() {
        let mut cache = BlockCache::new(4, 2, Eviction::LeastRecentlyUsed);
        assert_eq!(loaded(&mut cache, &[5, 6, 7]).len(), 2);
        assert_eq!(cache.statistics().loads, 2);
        assert!(BlockCache::new(4, 0, Eviction::LeastRecentlyUsed).update(&[1, 2], 3).is_empty());
    }

    #[test]
    fn truncated_blocks_are_no_hits() {
        let mut cache = BlockCache::new(4, 3, Eviction::LeastRecentlyUsed);
        loaded(&mut cache, &[0, 1, 2]);
        cache.truncate(6); // cuts block 1
        let (mut hits, mut misses) = (Vec::new(), Vec::new());
        cache.look_up(&[3, 4, 8], &mut hits, &mut misses);
        assert_eq!((hits, misses), (Vec::from([Hit { token: 3, row: 3 }]), Vec::from([4, 8])));
        let loads = cache.update(&[4], 1);
        assert_eq!(loads, [Load { block: 1, slot: 1, evicted: None }]);
    }

    #[test]
    fn the_slots_of_truncated_blocks_are_the_first_to_be_reused() {
        for block_len in [4, usize::MAX] {
            let mut cache = BlockCache::new(block_len, 2, Eviction::LeastRecentlyUsed);
            for _ in 0..3 {
                assert_eq!(cache.update(&[3], 1), [Load { block: 0, slot: 0, evicted: None }]);
                let (mut hits, mut misses) = (Vec::new(), Vec::new());
                cache.look_up(&[3], &mut hits, &mut misses);
                assert_eq!(hits, [Hit { token: 3, row: 3 }]);
                cache.truncate(0);
            }
        }
    }
}
