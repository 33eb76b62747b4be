//! Rows as their codes hold them, for the loss that codes cause: of one head, (n, dim).

use half::f16;
use kv_owners::sq::{Basis, Bits, CodedKeys};
use pq_core::sq::{
    Keys, Shape, Values, decode_keys_into, decode_values_into, encode_keys_into, encode_values_into,
    mean_error_into, rotate_by,
};
use svd_core::Hadamard;

use crate::Result;

/// Replaces keys before RoPE, of a sequence from the start of a block on. `frequencies` are those of RoPE.
pub(super) fn decode_keys(basis: &Basis, frequencies: &[f32], bits: &Bits, rows: &mut [f32]) -> Result<()> {
    let dim = basis.sigma.len();
    let CodedKeys { shape, basis: map, dual, .. } = basis.coded_keys(bits.key_slots(dim)?)?;
    for rows in rows.chunks_mut(basis.block * dim) {
        let n = rows.len() / dim;
        let position = |i: usize| i as i64 - (basis.block / 2) as i64;
        let mut components = vec![0.0; rows.len()];
        for (i, (row, components)) in
            rows.chunks_exact_mut(dim).zip(components.chunks_exact_mut(dim)).enumerate()
        {
            row.iter_mut().zip(&basis.mean).for_each(|(x, mean)| *x -= mean);
            rotate_by(frequencies, position(i), row)?;
            for (x, map) in row.iter().zip(map.chunks_exact(dim)) {
                components.iter_mut().zip(map).for_each(|(sum, a)| *sum += x * a);
            }
        }
        let (mut steps, mut words) = (vec![0; dim], vec![0; shape.words_len(n)]);
        encode_keys_into(&shape, &components, &mut steps, &mut words)?;
        decode_keys_into(&Keys::new(shape, n, &steps, &words)?, &mut components)?;
        for (i, (row, components)) in rows.chunks_exact_mut(dim).zip(components.chunks_exact(dim)).enumerate()
        {
            for (x, dual) in row.iter_mut().zip(dual.chunks_exact(dim)) {
                *x = components.iter().zip(dual).map(|(c, a)| c * a).sum();
            }
            rotate_by(frequencies, -position(i), row)?;
            row.iter_mut().zip(&basis.mean).for_each(|(x, mean)| *x += mean);
        }
    }
    Ok(())
}

/// Replaces values. Where blocks keep the mean of their errors, each row has it.
pub(super) fn decode_values(basis: &Basis, bits: &Bits, rows: &mut [f32]) -> Result<()> {
    let (mean, scale) = (&basis.value_mean, basis.value_scale);
    let dim = mean.len();
    let (shape, hadamard) = (Shape::uniform(dim, bits.values)?, Hadamard::new(dim)?);
    for rows in rows.chunks_mut(basis.block * dim) {
        let n = rows.len() / dim;
        for row in rows.chunks_exact_mut(dim) {
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x = (*x - mean) / scale);
        }
        hadamard.forward(rows)?;
        let (mut norms, mut words) = (vec![0; n], vec![0; shape.words_len(n)]);
        encode_values_into(&shape, rows, &mut norms, &mut words)?;
        let values = Values::new(shape, &norms, &words)?;
        let mut error = vec![f16::ZERO; dim];
        if bits.mean_error {
            mean_error_into(&values, rows, &mut error)?;
        }
        decode_values_into(&values, rows)?;
        for row in rows.chunks_exact_mut(dim) {
            row.iter_mut().zip(&error).for_each(|(x, error)| *x += error.to_f32());
        }
        hadamard.inverse(rows)?;
        for row in rows.chunks_exact_mut(dim) {
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x = *x * scale + mean);
        }
    }
    Ok(())
}
