use alloc::vec::Vec;

use crate::SoftmaxStats;

/// Working memory of attention, which grows to what a call needs and keeps it for the next.
///
/// An engine has one for all layers and steps; the caches of `pq-core` and `svd-core` share it.
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    floats: Vec<f32>,
    stats: Vec<SoftmaxStats>,
}

impl Workspace {
    /// At least so much memory: floats of any value, and statistics of no tokens.
    pub fn get(&mut self, floats: usize, stats: usize) -> (&mut [f32], &mut [SoftmaxStats]) {
        if self.floats.len() < floats {
            self.floats.resize(floats, 0.0);
        }
        self.stats.clear();
        self.stats.resize(stats, SoftmaxStats::EMPTY);
        (&mut self.floats[..floats], &mut self.stats)
    }
}
