//! Backends and random values, for all tests.

use svd_core::{Backend, Element};

pub fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| backend.is_available())
}

/// Random values in -1..1 from a seed.
pub fn random<E: Element>(seed: u64, len: usize) -> Vec<E> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| E::from_f32(2.0 * rng.f32() - 1.0)).collect()
}
