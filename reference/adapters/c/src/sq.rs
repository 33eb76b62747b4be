//! Scalar codes of a layer: the bases of its heads, and the heads at some number of bits.

use std::sync::Arc;

use kv_owners::sq::{Basis, Bits, Head, Samples};

use crate::args;
use crate::error::{Result, call};
use crate::pq::of_head;
use crate::rows::{kvc_rows, rows};
use crate::save::{kvc_bytes, load, save};

/// The bases of all KV heads of a layer: fitted once per model, for any number of bits.
pub struct kvc_bases(Vec<Basis>);

/// The heads of a layer with scalar codes at some number of bits, shared by the caches of all sequences.
pub struct kvc_heads(pub(crate) Vec<Arc<Head>>);

/// Rows of a layer to fit bases to: a few thousand tokens of any text, less the first few.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_samples {
    /// (n, heads * dim).
    pub keys: kvc_rows,
    /// (m, heads * group * dim): the query heads in order.
    pub queries: kvc_rows,
    /// (any, heads * dim of the values).
    pub values: kvc_rows,
    /// Radians per position of each pair of components i and i + dim / 2: (dim / 2,). Zeros for a model without
    /// RoPE. A model that rotates neighbours (2 i, 2 i + 1) is used with its components reordered.
    pub frequencies: *const f32,
    /// dim / 2.
    pub frequencies_len: usize,
    /// Not 0 if keys and queries are after RoPE, as engines cache them; the first row is then at
    /// `first_position`.
    pub rotated: u32,
    /// The position of the first row.
    pub first_position: usize,
}

/// Bits of scalar codes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_bits {
    /// Mean bits per component of a key, in eighths: 0.125 to 8.
    pub keys: f32,
    /// Bits per component of a value: 1 to 8.
    pub values: u32,
    /// Not 0 if blocks keep the mean error of their values, 16 bits a component: worth it up to 2 bits.
    pub mean_error: u32,
}

/// Fits the bases of a layer of `heads` KV heads. Caches code keys in blocks of `block` tokens, 32 to 256 in steps
/// of 32; 64 is usual.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_bases_fit(
    samples: *const kvc_samples,
    heads: usize,
    block: usize,
    bases: *mut *mut kvc_bases,
) -> i32 {
    call(|| {
        let bases = args::out_handle(bases)?;
        let samples = args::get(samples, "samples")?;
        let frequencies = args::slice(samples.frequencies, samples.frequencies_len, "frequencies")?;
        let rotated_from = (samples.rotated != 0).then_some(samples.first_position);
        let keys = rows(&raw const samples.keys, "keys")?;
        let queries = rows(&raw const samples.queries, "queries")?;
        let values = rows(&raw const samples.values, "values")?;
        use kv_attend::AnyRows::{Bf16, F16, F32};
        let fitted = match (keys, queries, values) {
            (F32(keys), F32(queries), F32(values)) => {
                Basis::fit_layer(&Samples { keys, queries, values, frequencies, rotated_from }, heads, block)
            }
            (F16(keys), F16(queries), F16(values)) => {
                Basis::fit_layer(&Samples { keys, queries, values, frequencies, rotated_from }, heads, block)
            }
            (Bf16(keys), Bf16(queries), Bf16(values)) => {
                Basis::fit_layer(&Samples { keys, queries, values, frequencies, rotated_from }, heads, block)
            }
            _ => Err(kv_attend::Error::ElementType.into()),
        };
        bases.write(kvc_bases(fitted?));
        Ok(())
    })
}

/// Frees bases; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_bases_free(bases: *mut kvc_bases) {
    args::free(bases);
}

/// Saves the basis of one head to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_bases_save(
    bases: *const kvc_bases,
    head: usize,
    buffer: *mut u8,
    len: usize,
    written: *mut usize,
) -> i32 {
    call(|| save(&of_head(&args::get(bases, "bases")?.0, head)?.to_bytes(), buffer, len, written))
}

/// Reads the saved bases of `n` heads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_bases_load(
    heads: *const kvc_bytes,
    n: usize,
    bases: *mut *mut kvc_bases,
) -> i32 {
    call(|| {
        let bases = args::out_handle(bases)?;
        bases.write(kvc_bases(load(heads, n, Basis::from_bytes)?));
        Ok(())
    })
}

/// The heads of a layer at some number of bits. The frequencies are those of kvc_samples.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_heads_new(
    bases: *const kvc_bases,
    frequencies: *const f32,
    frequencies_len: usize,
    bits: *const kvc_bits,
    heads: *mut *mut kvc_heads,
) -> i32 {
    call(|| {
        let heads = args::out_handle(heads)?;
        let bases = &args::get(bases, "bases")?.0;
        let frequencies = args::slice(frequencies, frequencies_len, "frequencies")?;
        let kvc_bits { keys, values, mean_error } = *args::get(bits, "bits")?;
        let bits = Bits { keys, values, mean_error: mean_error != 0, widen: false };
        let made: Result<_> = bases.iter().map(|basis| Ok(basis.head(frequencies, &bits)?)).collect();
        heads.write(kvc_heads(made?));
        Ok(())
    })
}

/// Frees heads; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_heads_free(heads: *mut kvc_heads) {
    args::free(heads);
}

/// Saves one head to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_heads_save(
    heads: *const kvc_heads,
    head: usize,
    buffer: *mut u8,
    len: usize,
    written: *mut usize,
) -> i32 {
    call(|| save(&of_head(&args::get(heads, "heads")?.0, head)?.to_bytes(), buffer, len, written))
}

/// Reads `n` saved heads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_heads_load(
    saved: *const kvc_bytes,
    n: usize,
    heads: *mut *mut kvc_heads,
) -> i32 {
    call(|| {
        let heads = args::out_handle(heads)?;
        heads.write(kvc_heads(load(saved, n, Head::from_bytes)?));
        Ok(())
    })
}
