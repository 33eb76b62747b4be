//! Encodes tokens that leave the window into the tiles that `Attend` reads.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves};
use kv_gpu::VectorElement;
use kv_gpu::pq::{CodeLayout, Encode, EncodeArguments, EncodeShape, Paging, Side, TILE};
use pq_core::{PqShape, TrainOptions, train};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, tiles, side, quantizer) = (2, 64, Side::Keys, PqShape::new(128, 64, 8)?);
    let (first, count) = (40_u32, 1000_u32); // after the 40 tokens that already have codes
    let rows = halves(heads * count as usize * 128); // (batch, heads, count, dim)
    let trained = train(quantizer, &rows, &TrainOptions::default())?; // here: one codebook for all heads
    let layout = CodeLayout::new(quantizer, side)?;
    let codes = gpu.zeros::<u8>(heads * tiles * layout.tile_len())?;
    let vectors = gpu.upload(&rows)?;
    let centroids = gpu.upload(&trained.centroids.repeat(heads))?;
    let (firsts, counts) = (gpu.upload(&[first])?, gpu.upload(&[count])?);
    let shape = EncodeShape { quantizer, side, element: VectorElement::F16, paging: Paging::Contiguous };
    let arguments = EncodeArguments {
        batch: 1,
        heads,
        max_count: count as usize,
        vectors: vectors.pointer.cast(),
        strides: [heads * count as usize * 128, count as usize * 128, 128],
        centroids: centroids.pointer,
        firsts: firsts.pointer,
        counts: counts.pointer,
        codes: codes.pointer,
        tiles,
        pages: None,
    };
    let background = gpu.background_stream()?; // decoding does not wait for it
    background.join(gpu.stream())?;
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { Encode::new(&gpu, shape)?.launch(background.cu_stream(), &arguments)? };
    gpu.stream().join(&background)?;
    let used = (first + count) as usize;
    println!(
        "{} of {} tokens have codes: {:?} ...",
        used,
        tiles * TILE,
        &gpu.read(&codes)?[layout.tile_len()..][..8]
    );
    Ok(())
}
