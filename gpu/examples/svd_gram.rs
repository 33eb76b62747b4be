//! Second moments of keys, and the rotation computed from them.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves};
use kv_gpu::Element;
use kv_gpu::svd::{Gram, GramArguments, GramShape};
use svd_core::{PostRope, Rotation};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, n, dim) = (2, 4096, 128);
    let rows = gpu.upload(&halves(heads * n * dim))?; // (heads, n, dim)
    let matrices = gpu.zeros::<f64>(heads * dim * dim)?; // launches add to the sums: one per chunk
    let sums = gpu.zeros::<f64>(heads * dim)?;
    let gram = Gram::new(&gpu, GramShape { dim, element: Element::F16 })?;
    let workspace = gpu.zeros::<u8>(gram.workspace_len(heads))?;
    let arguments = GramArguments {
        heads,
        n,
        rows: rows.pointer.cast(),
        strides: [n * dim, dim],
        matrices: matrices.pointer,
        sums: sums.pointer,
        workspace: workspace.pointer,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { gram.launch(gpu.stream().cu_stream(), &arguments)? };
    let (matrices, sums) = (gpu.read(&matrices)?, gpu.read(&sums)?);
    let moments = svd_core::Gram::<PostRope>::from_sums(dim, n as u64, &matrices[..dim * dim], &sums[..dim])?;
    println!("strongest directions of head 0: {:.1?}", &Rotation::principal(&moments)?.sigma()[..4]);
    Ok(())
}
