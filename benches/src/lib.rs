//! Shared by the benches.

pub mod cli;

use std::path::Path;
use std::time::Instant;

/// Median seconds of `repeats` runs.
pub fn median(repeats: usize, mut run: impl FnMut()) -> f64 {
    let mut seconds: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[repeats / 2]
}

/// Reads a file of little-endian `f32`.
///
/// # Errors
/// I/O errors of reading the file.
pub fn floats(path: &Path) -> std::io::Result<Vec<f32>> {
    Ok(std::fs::read(path)?.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
}

/// Rows (n, dim) that resemble keys: every channel has its own scale, some are outliers with an offset, and
/// neighbouring tokens are correlated.
#[must_use]
pub fn keys(n: usize, dim: usize) -> Vec<f32> {
    let mut state = 1_u64;
    let mut noise = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut row = vec![0.0_f32; dim];
    let mut rows = Vec::with_capacity(n * dim);
    for _ in 0..n {
        for (d, x) in row.iter_mut().enumerate() {
            *x = 0.8 * *x + noise() / (1.0 + d as f32 / 16.0);
        }
        rows.extend(row.iter().enumerate().map(|(d, x)| if d % 21 == 5 { 3.0 * x + 8.0 } else { *x }));
    }
    rows
}
