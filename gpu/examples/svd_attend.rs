//! ZACK's decode step: queries attend to projected keys and values; each head has its own ranks.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves};
use half::f16;
use kv_gpu::Element;
use kv_gpu::svd::{Attend, AttendArguments, AttendShape};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, group, n, dim) = (2, 4, 4096, 128);
    let (key_ranks, value_ranks) = ([40_u32, 96], [64_u32, 128]);
    let sums = [key_ranks, value_ranks].map(|ranks| ranks.iter().sum::<u32>() as usize);
    // (batch, head, n, rank of the head), from `Project`; queries are projected with the rotation's dual map.
    let (keys, values) = (gpu.upload(&halves(n * sums[0]))?, gpu.upload(&halves(n * sums[1]))?);
    let queries = gpu.upload(&halves(heads * group * dim))?;
    let lengths = gpu.upload(&[n as u32])?;
    let (key_offsets, value_offsets) =
        (gpu.upload(&[0, u64::from(key_ranks[0])])?, gpu.upload(&[0, u64::from(value_ranks[0])])?);
    let (key_ranks, value_ranks) = (gpu.upload(&key_ranks)?, gpu.upload(&value_ranks)?);
    let attend = Attend::new(&gpu, AttendShape { dim, element: Element::F16 })?;
    let workspace = gpu.zeros::<u8>(attend.workspace_len(1, heads, group))?;
    let out = gpu.zeros::<f16>(heads * group * dim)?; // only the value rank of a head is written
    let arguments = AttendArguments {
        batch: 1,
        heads,
        group,
        capacity: n,
        keys: keys.pointer.cast(),
        values: values.pointer.cast(),
        pages: None,
        queries: queries.pointer.cast(),
        lengths: lengths.pointer,
        key_ranks: key_ranks.pointer,
        value_ranks: value_ranks.pointer,
        key_offsets: key_offsets.pointer,
        value_offsets: value_offsets.pointer,
        key_rank_sum: sums[0],
        value_rank_sum: sums[1],
        scale: 1.0 / (dim as f32).sqrt(),
        out: out.pointer.cast(),
        log_sum_exp: None,
        pdl: false,
        workspace: workspace.pointer,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { attend.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{:.3?} ...", &gpu.read(&out)?[..6]);
    Ok(())
}
