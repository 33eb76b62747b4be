use crate::error::check_len;
use crate::pack::pack_bits;
use crate::{Codebook, Codes, Error};

/// Replaces each subvector by the index of its nearest centroid, and packs the indices.
///
/// The nearest centroid is the first minimum over `c` of `|centroid_c|^2 / 2 - <x, centroid_c>`, summed in `f32` in
/// ascending component order. A NaN or infinite component is treated as 0.
///
/// # Shapes
/// `vectors` (n, dim); `codes` (n, code_size), fully written.
/// # Errors
/// [`Error::Length`]; `codes` is then untouched.
/// # Cost
/// n * ksub * dim multiply-adds, no allocation.
/// # Source
/// Jégou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search", TPAMI 2011.
pub fn encode_into(codebook: &Codebook<'_>, vectors: &[f32], codes: &mut [u8]) -> Result<(), Error> {
    let shape = codebook.shape();
    let n = vectors.len() / shape.dim();
    check_len("vectors", vectors.len(), n * shape.dim())?;
    check_len("codes", codes.len(), n * shape.code_size())?;
    for (vector, packed) in vectors.chunks_exact(shape.dim()).zip(codes.chunks_exact_mut(shape.code_size())) {
        let nearest = vector
            .chunks_exact(shape.dsub())
            .enumerate()
            .map(|(j, x)| nearest_centroid(codebook.subspace(j), x));
        pack_bits(nearest, shape.nbits(), packed);
    }
    Ok(())
}

/// Index of the centroid (of `centroids`, (ksub, dsub)) that is nearest to `x`, (dsub,).
pub(crate) fn nearest_centroid(centroids: &[f32], x: &[f32]) -> usize {
    let mut best = (0, f32::INFINITY);
    for (c, centroid) in centroids.chunks_exact(x.len()).enumerate() {
        let mut half_norm = 0.0;
        let mut ip = 0.0;
        for (&y, &x) in centroid.iter().zip(x) {
            half_norm += y * y;
            ip += if x.is_finite() { x * y } else { 0.0 };
        }
        let distance = 0.5 * half_norm - ip;
        if distance < best.1 {
            best = (c, distance);
        }
    }
    best.0
}

/// Replaces each code by its centroid.
///
/// # Shapes
/// `codes` (n, code_size); `vectors` (n, dim), fully written.
/// # Errors
/// [`Error::ShapeMismatch`] or [`Error::Length`]; `vectors` is then untouched.
/// # Cost
/// One read and one write of `vectors`, no allocation.
pub fn decode_into(codebook: &Codebook<'_>, codes: &Codes<'_>, vectors: &mut [f32]) -> Result<(), Error> {
    let shape = codebook.shape();
    if codes.shape() != shape {
        return Err(Error::ShapeMismatch);
    }
    check_len("vectors", vectors.len(), codes.n() * shape.dim())?;
    for (i, vector) in vectors.chunks_exact_mut(shape.dim()).enumerate() {
        for ((j, x), c) in vector.chunks_exact_mut(shape.dsub()).enumerate().zip(codes.iter_vector(i)) {
            x.copy_from_slice(codebook.centroid(j, c));
        }
    }
    Ok(())
}
