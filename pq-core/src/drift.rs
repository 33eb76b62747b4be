//! When to train again: the error of new vectors against that of the training vectors.

/// Detects that a codebook no longer fits new tokens: compares their encoding error with that of training.
///
/// PQCache keeps the centroids of the prompt for the whole answer. Observe the error of every encoding. When
/// [`ratio`](Self::ratio) has grown, train again on recent tokens from the present centroids
/// ([`Start::From`](crate::Start)), which takes one or two iterations.
///
/// # Examples
/// ```
/// let mut drift = pq_core::Drift::new(2.0, 64.0); // trained error per vector; memory of 64 vectors
/// drift.observe(64.0 * 2.0, 64);
/// assert!((drift.ratio() - 1.0).abs() < 1e-9);
/// drift.observe(640.0 * 6.0, 640);
/// assert!(drift.ratio() > 2.9);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    trained: f64, // squared error per vector
    memory: f64,  // vectors
    recent: f64,  // squared error per vector, exponentially weighted
}

impl Drift {
    /// `trained` is the mean squared error per training vector, `memory` the number of vectors after which
    /// the weight of an observation has decayed to 1/e.
    #[must_use]
    pub const fn new(trained: f64, memory: f64) -> Self {
        Self { trained, memory, recent: trained }
    }

    /// Adds the summed squared error of `n` newly encoded vectors, as [`encode_into`](crate::encode_into)
    /// returns it.
    pub fn observe(&mut self, error: f64, n: usize) {
        if n > 0 {
            let kept = libm::exp(-(n as f64) / self.memory);
            self.recent = kept * self.recent + (1.0 - kept) * error / n as f64;
        }
    }

    /// The recent error per vector divided by that of training: 1 for a codebook that still fits.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        // Without a training error any recent error is an infinite ratio, and none is not a drift.
        if self.recent == self.trained { 1.0 } else { self.recent / self.trained }
    }
}
