//! The chunks that a batch still needs, and what they cost.

use codec_core::ChunkSizes;

use crate::ChunkCost;

/// The chunks that a batch's requests still need.
pub(super) struct Waiting<'a> {
    pub requests: &'a [Vec<ChunkCost>],
    pub next: Vec<usize>, // the index of each request's next chunk
}

impl<'a> Waiting<'a> {
    /// The requests that are not complete.
    pub fn incomplete(&self) -> impl Iterator<Item = usize> {
        (0..self.requests.len()).filter(|&request| self.next[request] < self.requests[request].len())
    }

    /// The request with the fewest chunks; ties go to the first.
    pub fn emptiest(&self) -> Option<usize> {
        self.incomplete().min_by_key(|&request| self.next[request])
    }

    /// The request that lacks the fewest chunks; ties go to the first.
    pub fn fullest(&self) -> Option<usize> {
        self.incomplete().min_by_key(|&request| self.requests[request].len() - self.next[request])
    }

    pub fn chunk(&self, request: usize) -> &'a ChunkCost {
        &self.requests[request][self.next[request]]
    }

    /// The next chunk of `first`, then all others by index.
    pub fn means(&self, first: usize) -> Vec<Mean> {
        let longest = self.requests.iter().map(Vec::len).max().unwrap_or(0); // chunks
        let others = (0..longest).map(|index| {
            let waits = |&request: &usize| self.next[request] + usize::from(request == first) <= index;
            let chunks = self.incomplete().filter(waits);
            chunks.filter_map(|request| self.requests[request].get(index)).collect::<Vec<_>>()
        });
        let all = std::iter::once(vec![self.chunk(first)]).chain(others);
        all.filter(|chunks| !chunks.is_empty()).map(|chunks| Mean::of(&chunks)).collect()
    }
}

/// The mean costs of chunks of one index.
pub(super) struct Mean {
    levels: Vec<u64>,
    decode: f64,
    recompute: f64,
    requests: usize,
}

impl Mean {
    fn of(chunks: &[&ChunkCost]) -> Self {
        let n = chunks.len();
        let mean =
            |cost: fn(&ChunkCost) -> f64| chunks.iter().map(|chunk| cost(chunk)).sum::<f64>() / n as f64;
        let level = |level| chunks.iter().map(|chunk| chunk.levels[level]).sum::<u64>().div_ceil(n as u64);
        let levels = (0..chunks[0].levels.len()).map(level).collect();
        let (decode, recompute) = (mean(|chunk| chunk.decode), mean(|chunk| chunk.recompute));
        Self { levels, decode, recompute, requests: n }
    }

    pub fn sizes(&self, pace: f64) -> ChunkSizes<'_> {
        let &Self { ref levels, decode, recompute, requests } = self;
        ChunkSizes { levels, decode, text: 0, recompute: recompute * pace, requests }
    }
}
