//! Encodes keys with any quantizer, 12 bits included, in the layout that `pq-core`, `Search`, `Scan` and
//! `AttendGeneric` read.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, numbers};
use kv_gpu::VectorElement;
use kv_gpu::pq::{EncodeGeneric, EncodeGenericArguments, EncodeGenericShape};
use pq_core::{Codes, PqShape};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, n, quantizer) = (2, 1000, PqShape::new(64, 16, 12)?);
    let vectors = gpu.upload(&numbers(heads * n * 64))?; // (batch, heads, n, dim)
    let centroids = gpu.upload(&numbers(heads * quantizer.codebook_len()))?; // `Train` makes better ones
    let (firsts, counts) = (gpu.upload(&[0_u32])?, gpu.upload(&[n as u32])?);
    let codes = gpu.zeros::<u8>(heads * quantizer.codes_len(n))?;
    let arguments = EncodeGenericArguments {
        batch: 1,
        heads,
        max_count: n,
        vectors: vectors.pointer.cast(),
        strides: [heads * n * 64, n * 64, 64],
        centroids: centroids.pointer,
        firsts: firsts.pointer,
        counts: counts.pointer,
        capacity: n,
        codes: codes.pointer,
    };
    let encode = EncodeGeneric::new(&gpu, EncodeGenericShape { quantizer, element: VectorElement::F32 })?;
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { encode.launch(gpu.stream().cu_stream(), &arguments)? };
    let codes = gpu.read(&codes)?;
    let of_head = Codes::new(quantizer, n, &codes[..quantizer.codes_len(n)])?;
    println!("token 0 of head 0: {:?}", of_head.iter_vector(0).collect::<Vec<_>>());
    Ok(())
}
