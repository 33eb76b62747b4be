use pq_core::{Codebook, encode_into};

use crate::Result;

/// Appends the packed codes of rows (n, dim).
pub(crate) fn append_codes(codebook: &Codebook<'_>, rows: &[f32], codes: &mut Vec<u8>) -> Result<()> {
    let (start, shape) = (codes.len(), codebook.shape());
    codes.resize(start + rows.len() / shape.dim() * shape.code_size(), 0);
    Ok(encode_into(codebook, rows, &mut codes[start..])?)
}
