//! Backends, shapes and random values, for all tests.

use pq_core::{Backend, Element, PqShape};
use proptest::prelude::*;

pub fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| backend.is_available())
}

/// Random values in -1..1 from a seed, which proptest generates and shrinks faster than vectors.
pub fn random<E: Element>(seed: u64, len: usize) -> Vec<E> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| E::from_f32(2.0 * rng.f32() - 1.0)).collect()
}

/// Random values in -scale..scale.
pub fn scaled(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    random(seed, len).into_iter().map(|x: f32| x * scale).collect()
}

pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    scaled(seed, len, 1e6).iter().map(|&x| x as i64 as u8).collect()
}

pub fn shapes() -> impl Strategy<Value = PqShape> {
    let dsub = prop_oneof![4 => 1_usize..10, 1 => Just(64), 1 => Just(70)];
    (dsub, 1_usize..8, 1_u32..=12).prop_map(|(dsub, m, nbits)| PqShape::new(dsub * m, m, nbits).unwrap())
}
