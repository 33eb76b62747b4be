//! Codebooks for the keys of two heads.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, numbers};
use kv_gpu::VectorElement;
use kv_gpu::pq::{Train, TrainArguments, TrainShape};
use pq_core::PqShape;

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, n, quantizer) = (2, 8192, PqShape::new(64, 2, 6)?);
    let keys = gpu.upload(&numbers(heads * n * 64))?; // (heads, n, dim)
    let starts: Vec<u32> = (0..quantizer.ksub()).map(|i| (i * n / quantizer.ksub()) as u32).collect();
    let starts = gpu.upload(&starts)?;
    let centroids = gpu.zeros::<f32>(heads * quantizer.codebook_len())?;
    let errors = gpu.zeros::<f64>(heads * quantizer.m())?;
    let train = Train::new(&gpu, TrainShape { quantizer, element: VectorElement::F32 })?;
    let workspace = gpu.zeros::<u8>(train.workspace_len(heads, n))?;
    let arguments = TrainArguments {
        sets: heads,
        n,
        vectors: keys.pointer.cast(),
        strides: [n * 64, 64],
        starts: Some(starts.pointer),
        centroids: centroids.pointer,
        errors: Some(errors.pointer),
        iterations: 10,
        tolerance: 1e-3,
        workspace: workspace.pointer,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { train.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("squared errors of heads and subspaces: {:.1?}", gpu.read(&errors)?);
    Ok(())
}
