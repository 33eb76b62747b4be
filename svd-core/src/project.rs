use crate::Error;
use crate::error::check_len;

/// The first `out.len()` components of `map^T x`.
///
/// `out[c] = sum over d of x[d] * map[d, c]`, added in `f32` in ascending `d`.
///
/// # Shapes
/// `map` (dim, dim) row-major; `x` (dim,); `out` (rank,), rank at most dim, fully written.
/// # Errors
/// [`Error::Length`] or [`Error::Rank`]; `out` is then untouched.
/// # Cost
/// dim * rank multiply-adds, no allocation.
pub fn project_into(map: &[f32], x: &[f32], out: &mut [f32]) -> Result<(), Error> {
    let (dim, rank) = (x.len(), out.len());
    check_len("map", map.len(), dim.checked_mul(dim).ok_or(Error::TooLarge)?)?;
    if rank > dim {
        return Err(Error::Rank { rank, dim });
    }
    out.fill(0.0);
    if dim == 0 {
        return Ok(());
    }
    for (&x, row) in x.iter().zip(map.chunks_exact(dim)) {
        for (out, &m) in out.iter_mut().zip(row) {
            *out += x * m;
        }
    }
    Ok(())
}
