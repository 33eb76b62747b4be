//! ZACK's prefill: causal attention on projected keys and values.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves};
use half::f16;
use kv_gpu::Element;
use kv_gpu::svd::{AttendShape, Prefill, PrefillArguments};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (n, dim, rank) = (512, 64, 40); // one head
    let keys = gpu.upload(&halves(n * rank))?; // (batch, head, n, rank), from `Project`; here also the values
    let queries = gpu.upload(&halves(n * dim))?; // (batch, n, query head, dim), only the key rank is read
    let (ranks, lengths) = (gpu.upload(&[rank as u32])?, gpu.upload(&[n as u32])?);
    let offsets = gpu.upload(&[0_u64])?;
    let out = gpu.zeros::<f16>(n * dim)?;
    let prefill = Prefill::new(&gpu, AttendShape { dim, element: Element::F16 })?;
    let workspace = gpu.zeros::<u8>(prefill.workspace_len())?;
    let arguments = PrefillArguments {
        batch: 1,
        heads: 1,
        group: 1,
        capacity: n,
        max_count: n,
        keys: keys.pointer.cast(),
        values: keys.pointer.cast(),
        queries: queries.pointer.cast(),
        strides: [n * dim, dim, dim],
        lengths: lengths.pointer,
        counts: lengths.pointer, // all tokens are of this prompt
        key_ranks: ranks.pointer,
        value_ranks: ranks.pointer,
        key_offsets: offsets.pointer,
        value_offsets: offsets.pointer,
        key_rank_sum: rank,
        value_rank_sum: rank,
        pages: None,
        window: None,
        padded: false, // rows take `rank` elements
        scale: 1.0 / (dim as f32).sqrt(),
        out: out.pointer.cast(),
        workspace: workspace.pointer,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { prefill.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{:.3?} ...", &gpu.read(&out)?[..4]); // the first query sees the first value alone
    Ok(())
}
