//! Attention on codes of any quantizer, here with a bias for every token.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, numbers};
use kv_gpu::pq::{AttendGeneric, AttendGenericArguments, AttendGenericShape};
use pq_core::PqShape;

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, group, n, quantizer) = (2, 4, 1000, PqShape::new(80, 5, 7)?);
    let luts = gpu.upload(&numbers(heads * group * quantizer.lut_len()))?; // from `Lut`
    let codes = gpu.upload(&vec![0x5a_u8; heads * quantizer.codes_len(n)])?; // from `EncodeGeneric`
    let centroids = gpu.upload(&numbers(heads * quantizer.codebook_len()))?;
    let lengths = gpu.upload(&[n as u32])?;
    let bias: Vec<f32> = (0..heads * group * n).map(|i| (i % n) as f32 * 1e-3).collect(); // recency bias
    let bias = gpu.upload(&bias)?;
    let (out, log_sum_exp) = (gpu.zeros::<f32>(heads * group * 80)?, gpu.zeros::<f32>(heads * group)?);
    let arguments = AttendGenericArguments {
        batch: 1,
        heads,
        capacity: n,
        luts: luts.pointer,
        key_codes: codes.pointer,
        value_codes: codes.pointer,
        centroids: centroids.pointer,
        lengths: lengths.pointer,
        key_scales: None,
        value_scales: None,
        bias: Some(bias.pointer),
        out: out.pointer,
        log_sum_exp: Some(log_sum_exp.pointer),
    };
    let attend = AttendGeneric::new(&gpu, AttendGenericShape { keys: quantizer, values: quantizer, group })?;
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { attend.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{:.3?} ...; {:.3?}", &gpu.read(&out)?[..4], gpu.read(&log_sum_exp)?);
    Ok(())
}
