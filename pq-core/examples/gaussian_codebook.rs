//! Makes `src/gaussian_codebook.bin`: k-means of Gaussians, for 4 to 8 bits and subspaces of 1, 2, 4, 8 and 16
//! components. `cargo run --release -p pq-core --example gaussian_codebook > pq-core/src/gaussian_codebook.bin`
//!
//! The scalar backend, a seed and `libm` make the same bytes on every machine; a test makes some of them again.

use half::f16;
use pq_core::{Backend, Error, PqShape, Start, TrainOptions, train_with};
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for nbits in 4..=8 {
        for dsub in [1, 2, 4, 8, 16] {
            let table: Vec<u8> = trained(dsub, nbits)?.iter().flat_map(|x| x.to_le_bytes()).collect();
            std::io::stdout().write_all(&table)?;
        }
    }
    Ok(())
}

/// The centroids (ksub, dsub) of one subspace, in `f16`: k-means of 512 Gaussian vectors per centroid.
///
/// # Errors
/// Those of the shape and of training.
pub fn trained(dsub: usize, nbits: u32) -> Result<Vec<f16>, Error> {
    let options = TrainOptions { iterations: 64, start: Start::PlusPlus, seed: 0x6b76, ..Default::default() };
    let vectors = gaussians((512 << nbits) * dsub);
    let trained = train_with(Backend::Scalar, PqShape::new(dsub, 1, nbits)?, &vectors, &options)?;
    Ok(trained.centroids.into_iter().map(f16::from_f32).collect())
}

/// `len`, an even number, independent Gaussians (Box, Muller, "A Note on the Generation of Random Normal
/// Deviates", 1958), from uniform numbers of SplitMix64.
fn gaussians(len: usize) -> Vec<f32> {
    let mut state = 0_u64;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    };
    let pairs = (0..len / 2).flat_map(|_| {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - uniform())); // 1 - u is above 0
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * uniform());
        [(radius * cos) as f32, (radius * sin) as f32]
    });
    pairs.collect()
}
