//! Backends and random values, for all tests.

use svd_core::{Backend, Element};

pub fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| backend.is_available())
}

/// Random values in -1..1 from a seed.
pub fn random<E: Element>(seed: u64, len: usize) -> Vec<E> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        E::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}
