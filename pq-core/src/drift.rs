/// Whether codebooks still fit the tokens that arrive: the error of newly encoded tokens against that of training.
///
/// PQCache keeps the centroids of the prompt for the whole answer. Feed every encoding's error in; when
/// [`ratio`](Self::ratio) has grown, train again from the present centroids on recent tokens
/// ([`Start::From`](crate::Start)), which costs an iteration or two.
///
/// # Examples
/// ```
/// let mut drift = pq_core::Drift::new(2.0, 64.0); // two units of squared error per vector; remembers about 64 vectors
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
    /// From the mean squared error per training vector, and the number of vectors after which an observation has lost 1 - 1/e
    /// of its weight.
    #[must_use]
    pub const fn new(trained: f64, memory: f64) -> Self {
        Self { trained, memory, recent: trained }
    }

    /// Takes in the summed squared error of `n` newly encoded vectors, as [`encode_into`](crate::encode_into) returns it.
    pub fn observe(&mut self, error: f64, n: usize) {
        if n > 0 {
            let kept = libm::exp(-(n as f64) / self.memory);
            self.recent = kept * self.recent + (1.0 - kept) * error / n as f64;
        }
    }

    /// Error per vector now over that of training; 1 for codebooks that fit as well as they did.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        // Codebooks without error have drifted as soon as there is any.
        if self.recent == self.trained { 1.0 } else { self.recent / self.trained }
    }
}
