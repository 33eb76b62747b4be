//! PQCache's fetch: keys and values of chosen tokens come from pinned host memory.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result};
use half::f16;
use kv_gpu::DevicePtr;
use kv_gpu::pq::{Gather, GatherArguments};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (n, dim, wanted) = (10_000, 128, [3_u32, 700, 9_999]);
    // SAFETY: written before it is read.
    let mut host = unsafe { gpu.context().alloc_pinned::<f16>(n * dim)? };
    for (i, x) in host.as_mut_slice()?.iter_mut().enumerate() {
        *x = f16::from_f32((i / dim) as f32);
    }
    // Under unified addressing the host address is also the device address.
    let pinned = DevicePtr::new(host.as_ptr()? as u64).ok_or("no memory")?;
    let rows = gpu.upload(&wanted)?;
    let (keys, values) = (gpu.zeros::<f16>(3 * dim)?, gpu.zeros::<f16>(3 * dim)?);
    let arguments = GatherArguments {
        heads: 1,
        keys: pinned,
        values: pinned,
        head_rows: n,
        rows: rows.pointer,
        places: None,
        counts: None,
        list_len: wanted.len(),
        keys_out: keys.pointer.cast(),
        values_out: values.pointer.cast(),
        out_len: wanted.len(),
        prefetch: None,
    };
    let gather = Gather::new(&gpu, dim * size_of::<f16>())?;
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { gather.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{:?}", gpu.read(&keys)?.iter().step_by(dim).collect::<Vec<_>>()); // 3, 700, 9999 as halves
    Ok(())
}
