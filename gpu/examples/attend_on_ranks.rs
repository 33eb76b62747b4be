//! ZACK's decode step: keys and values are projected to what their rotations keep, each head at its own ranks, and queries attend
//! to that.
//!
//! `cargo run --release -p kv-gpu --example attend_on_ranks`

use cudarc::driver::DevicePtr;
use half::f16;
use kv_gpu::svd::{Attend, AttendArguments, AttendShape, Project, ProjectArguments, ProjectShape};
use kv_gpu::{Device, Element};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (group, n, dim, ranks) = (4, 4096, 128, [40_u32, 96]); // keys and values alike here
    let heads = ranks.len();
    let device = Device::open(0).map_err(|error| error.to_string())?;
    let stream = device.stream();
    let number = |i: usize| f16::from_f32((i as f32 * 0.37).sin());
    let rows = stream.clone_htod(&(0..heads * n * dim).map(number).collect::<Vec<f16>>())?;
    let kept = stream.alloc_zeros::<f16>(n * ranks.iter().sum::<u32>() as usize)?;
    let offsets = [0, u64::from(ranks[0])];
    for (head, &rank) in ranks.iter().enumerate() {
        let rank = rank as usize;
        // The first columns of the unit matrix; a calibrated head has those of svd_core::Rotation::store_map.
        let columns: Vec<f32> = (0..dim * rank).map(|i| f32::from(i / rank == i % rank)).collect();
        let columns = stream.clone_htod(&columns)?;
        let project = Project::new(&device, ProjectShape { dim, rank, element: Element::F16 })?;
        let arguments = ProjectArguments {
            heads: 1,
            n,
            rows: rows.device_ptr(stream).0 + (head * n * dim * 2) as u64,
            strides: [n * dim, dim],
            columns: columns.device_ptr(stream).0,
            out: kept.device_ptr(stream).0 + offsets[head] * n as u64 * 2,
        };
        // SAFETY: device buffers of the shapes that the arguments name, kept until the stream has been waited for.
        unsafe { project.launch(stream.cu_stream(), &arguments)? };
        stream.synchronize()?;
    }
    let attend = Attend::new(&device, AttendShape { dim, element: Element::F16 })?;
    let queries = stream.clone_htod(&(0..heads * group * dim).map(number).collect::<Vec<f16>>())?;
    let (lengths, ranks_there) = (stream.clone_htod(&[n as u32])?, stream.clone_htod(&ranks)?);
    let offsets = stream.clone_htod(&offsets)?;
    let workspace = stream.alloc_zeros::<u8>(attend.workspace_len(1, heads, group))?;
    let out = stream.alloc_zeros::<f16>(heads * group * dim)?;
    let rank_sum = ranks.iter().sum::<u32>() as usize;
    let arguments = AttendArguments {
        batch: 1,
        heads,
        group,
        capacity: n,
        keys: kept.device_ptr(stream).0,
        values: kept.device_ptr(stream).0,
        queries: queries.device_ptr(stream).0,
        lengths: lengths.device_ptr(stream).0,
        key_ranks: ranks_there.device_ptr(stream).0,
        value_ranks: ranks_there.device_ptr(stream).0,
        key_offsets: offsets.device_ptr(stream).0,
        value_offsets: offsets.device_ptr(stream).0,
        key_rank_sum: rank_sum,
        value_rank_sum: rank_sum,
        scale: 1.0 / (dim as f32).sqrt(),
        out: out.device_ptr(stream).0,
        log_sum_exp: 0,
        workspace: workspace.device_ptr(stream).0,
    };
    // SAFETY: as above.
    unsafe { attend.launch(stream.cu_stream(), &arguments)? };
    println!("{:?}", &stream.clone_dtoh(&out)?[..8]);
    Ok(())
}
