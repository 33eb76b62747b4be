//! Projects rows to the components that a rotation keeps.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves};
use half::f16;
use kv_gpu::Element;
use kv_gpu::svd::{Project, ProjectArguments, ProjectShape};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, n, dim, rank) = (2, 1000, 128, 40);
    let rows = halves(heads * n * dim); // (heads, n, dim)
    let rows_there = gpu.upload(&rows)?;
    // The first columns of the unit matrix; a calibrated head has those of svd_core::Rotation::basis_map.
    let columns: Vec<f32> = (0..dim * rank).map(|i| f32::from(i / rank == i % rank)).collect();
    let columns = gpu.upload(&columns.repeat(heads))?;
    let out = gpu.zeros::<f16>(heads * n * rank)?;
    let arguments = ProjectArguments {
        heads,
        n,
        rows: rows_there.pointer.cast(),
        strides: [n * dim, dim],
        columns: columns.pointer,
        out: out.pointer.cast(),
        pdl: false,
    };
    let project = Project::new(&gpu, ProjectShape { dim, rank, element: Element::F16 })?;
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { project.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{:.3?} became {:.3?}", &rows[..4], &gpu.read(&out)?[..4]); // the same
    Ok(())
}
