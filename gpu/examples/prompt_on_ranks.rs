//! ZACK's prompt: second moments of keys for the rotation, then causal attention on what the rotation keeps.
//!
//! `cargo run --release -p kv-gpu --example prompt_on_ranks`

use cudarc::driver::DevicePtr;
use half::f16;
use kv_gpu::svd::{AttendShape, Gram, GramArguments, GramShape, Prefill, PrefillArguments};
use kv_gpu::{Device, Element};
use svd_core::{PostRope, Rotation};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (n, dim, element) = (512, 64, Element::F16);
    let device = Device::open(0).map_err(|error| error.to_string())?;
    let stream = device.stream();
    let number = |i: usize| f16::from_f32((i as f32 * 0.37).sin());
    let keys = stream.clone_htod(&(0..n * dim).map(number).collect::<Vec<f16>>())?;
    let gram = Gram::new(&device, GramShape { dim, element })?;
    let (matrix, sums) = (stream.alloc_zeros::<f64>(dim * dim)?, stream.alloc_zeros::<f64>(dim)?);
    let scratch = stream.alloc_zeros::<u8>(gram.workspace_len(1))?;
    let arguments = GramArguments {
        heads: 1,
        n,
        rows: keys.device_ptr(stream).0,
        strides: [n * dim, dim],
        matrices: matrix.device_ptr(stream).0,
        sums: sums.device_ptr(stream).0,
        workspace: scratch.device_ptr(stream).0,
    };
    // SAFETY: memory of the shapes that the arguments name, kept until the stream has been waited for.
    unsafe { gram.launch(stream.cu_stream(), &arguments)? };
    let (matrix, sums) = (stream.clone_dtoh(&matrix)?, stream.clone_dtoh(&sums)?);
    let moments = svd_core::Gram::<PostRope>::from_sums(dim, n as u64, &matrix, &sums)?;
    let rotation = Rotation::principal(&moments)?; // `Project` applies its maps
    println!("strongest directions: {:.1?}", &rotation.sigma()[..4]);

    // Unrotated keys of 40 components stand for the projected ones here, and for the values and queries, too.
    let prefill = Prefill::new(&device, AttendShape { dim, element })?;
    let (rank, lengths, zero) =
        (stream.clone_htod(&[40_u32])?, stream.clone_htod(&[n as u32])?, stream.clone_htod(&[0_u64])?);
    let out = stream.alloc_zeros::<f16>(n * dim)?;
    let keys = keys.device_ptr(stream).0;
    let (rank, lengths, zero) =
        (rank.device_ptr(stream).0, lengths.device_ptr(stream).0, zero.device_ptr(stream).0);
    let arguments = PrefillArguments {
        batch: 1,
        heads: 1,
        group: 1,
        capacity: n,
        max_count: n,
        keys,
        values: keys,
        queries: keys,
        strides: [n * dim, dim, dim],
        lengths,
        counts: lengths,
        key_ranks: rank,
        value_ranks: rank,
        key_offsets: zero,
        value_offsets: zero,
        key_rank_sum: 40,
        value_rank_sum: 40,
        scale: 1.0 / (dim as f32).sqrt(),
        out: out.device_ptr(stream).0,
    };
    // SAFETY: as above.
    unsafe { prefill.launch(stream.cu_stream(), &arguments)? };
    println!("{:?} ...", &stream.clone_dtoh(&out)?[..4]); // the first query sees the first value alone
    Ok(())
}
