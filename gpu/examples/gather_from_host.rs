//! PQCache's fetch: keys and values of chosen tokens come from pinned host memory.
//!
//! `cargo run --release -p kv-gpu --example gather_from_host`

use cudarc::driver::DevicePtr;
use half::f16;
use kv_gpu::Device;
use kv_gpu::pq::{Gather, GatherArguments};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (n, dim, wanted) = (10_000, 128, [3_u32, 700, 9_999]);
    let device = Device::open(0).map_err(|error| error.to_string())?;
    let stream = device.stream();
    // SAFETY: written before it is read.
    let mut host = unsafe { device.context().alloc_pinned::<f16>(n * dim)? };
    for (i, x) in host.as_mut_slice()?.iter_mut().enumerate() {
        *x = f16::from_f32((i / dim) as f32);
    }
    let rows = stream.clone_htod(&wanted)?;
    let (keys, values) = (stream.alloc_zeros::<f16>(3 * dim)?, stream.alloc_zeros::<f16>(3 * dim)?);
    let gather = Gather::new(&device, dim * size_of::<f16>())?;
    let arguments = GatherArguments {
        heads: 1,
        keys: host.as_ptr()? as u64, // under unified addressing the device's address, too
        values: host.as_ptr()? as u64,
        head_rows: n,
        rows: rows.device_ptr(stream).0,
        places: 0,
        counts: 0,
        list_len: wanted.len(),
        keys_out: keys.device_ptr(stream).0,
        values_out: values.device_ptr(stream).0,
        out_len: wanted.len(),
    };
    // SAFETY: memory of the shapes that the arguments name, kept until the stream has been waited for.
    unsafe { gather.launch(stream.cu_stream(), &arguments)? };
    let keys = stream.clone_dtoh(&keys)?;
    println!("{:?}", keys.iter().step_by(dim).collect::<Vec<_>>()); // 3, 700, 9999 rounded to halves
    Ok(())
}
