//! A step's new token of every sequence and head becomes codes of its key and value, in one launch.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves};
use kv_gpu::VectorElement;
use kv_gpu::pq::{Append, AppendArguments, AppendShape, CodeLayout, Paging, Side};
use pq_core::{PqShape, TrainOptions, train};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (batch, heads, tiles, quantizer) = (3, 8, 64, PqShape::new(128, 64, 8)?);
    let lengths = [40_u32, 1000, 7]; // tokens that have codes
    let rows = halves(1000 * 128);
    let trained = train(quantizer, &rows, &TrainOptions::default())?; // here: one codebook for all heads
    let layout = CodeLayout::new(quantizer, Side::Keys)?;
    let codes = || gpu.zeros::<u8>(batch * heads * tiles * layout.tile_len());
    let (key_codes, value_codes) = (codes()?, codes()?);
    let vectors = gpu.upload(&halves(batch * heads * 128))?; // (batch, heads, 1, dim)
    let centroids = gpu.upload(&trained.centroids.repeat(heads))?;
    let (firsts, counts) = (gpu.upload(&lengths)?, gpu.upload(&[1_u32; 3])?);
    let arguments = AppendArguments {
        batch,
        heads,
        max_count: 1,
        keys: vectors.pointer.cast(),
        values: vectors.pointer.cast(),
        strides: [heads * 128, 128, 128],
        key_centroids: centroids.pointer,
        value_centroids: centroids.pointer,
        firsts: firsts.pointer,
        counts: counts.pointer,
        key_codes: key_codes.pointer,
        value_codes: value_codes.pointer,
        tiles,
        pages: None,
        pdl: false,
    };
    let shape = AppendShape {
        keys: quantizer,
        values: quantizer,
        element: VectorElement::F16,
        paging: Paging::Contiguous,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { Append::new(&gpu, shape)?.launch(gpu.stream().cu_stream(), &arguments)? };
    let mut unpacked = vec![0; quantizer.codes_len(41)];
    layout.unpack_into(&gpu.read(&key_codes)?[..2 * layout.tile_len()], 41, &mut unpacked)?;
    let codes = pq_core::Codes::new(quantizer, 41, &unpacked)?;
    println!("{:?} ...", codes.iter_vector(40).take(8).collect::<Vec<_>>());
    Ok(())
}
