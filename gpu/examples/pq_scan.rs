//! Scores of all tokens: computes the lookup tables of a step's queries, then sums their entries over the
//! codes.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, numbers};
use kv_gpu::VectorElement;
use kv_gpu::pq::{Lut, LutArguments, LutShape, Scan, ScanArguments, ScanShape};
use pq_core::PqShape;

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, group, n, quantizer) = (2, 4, 1000, PqShape::new(64, 4, 8)?);
    let queries = gpu.upload(&numbers(heads * group * 64))?; // (batch, heads, group, dim)
    let centroids = gpu.upload(&numbers(heads * quantizer.codebook_len()))?; // from `Train`
    let codes = gpu.upload(&vec![0x5a_u8; heads * quantizer.codes_len(n)])?; // from `EncodeGeneric`
    let lengths = gpu.upload(&[n as u32])?;
    let luts = gpu.zeros::<f32>(heads * group * quantizer.lut_len())?;
    let scores = gpu.zeros::<f32>(heads * group * n)?;
    let tables = LutArguments {
        batch: 1,
        heads,
        queries: queries.pointer.cast(),
        scale: 1.0 / 64_f32.sqrt(),
        centroids: centroids.pointer,
        luts: luts.pointer,
    };
    let sums = ScanArguments {
        batch: 1,
        heads,
        capacity: n,
        luts: luts.pointer,
        codes: codes.pointer,
        lengths: lengths.pointer,
        scores: scores.pointer,
    };
    let lut = Lut::new(&gpu, LutShape { quantizer, group, element: VectorElement::F32 })?;
    let scan = Scan::new(&gpu, ScanShape { quantizer, group })?;
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { lut.launch(gpu.stream().cu_stream(), &tables)? };
    // SAFETY: as above.
    unsafe { scan.launch(gpu.stream().cu_stream(), &sums)? };
    println!("{:.3?} ...", &gpu.read(&scores)?[..6]);
    Ok(())
}
