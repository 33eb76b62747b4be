//! PQCache's step: keys get a codebook and codes on the device, and a group of query heads finds the tokens it will attend to.
//!
//! `cargo run --release -p kv-gpu --example search_tokens`

use cudarc::driver::DevicePtr;
use kv_gpu::pq::*;
use kv_gpu::{Device, VectorElement};
use pq_core::{GroupRule, PqShape};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (heads, group, n, quantizer) = (2, 4, 8192, PqShape::new(64, 2, 6)?);
    let (dim, element) = (quantizer.dim(), VectorElement::F32);
    let device = Device::open(0).map_err(|error| error.to_string())?;
    let stream = device.stream();
    let number = |i: usize| (i as f32 * 0.37).sin() + (i as f32 * 0.0113).cos();
    let keys = stream.clone_htod(&(0..heads * n * dim).map(number).collect::<Vec<f32>>())?;
    let keys = keys.device_ptr(stream).0;

    let train = Train::new(&device, TrainShape { quantizer, element })?;
    let starts: Vec<u32> = (0..quantizer.ksub()).map(|i| (i * n / quantizer.ksub()) as u32).collect();
    let starts = stream.clone_htod(&starts)?;
    let centroids = stream.alloc_zeros::<f32>(heads * quantizer.codebook_len())?;
    let centroids = centroids.device_ptr(stream).0;
    let scratch = stream.alloc_zeros::<u8>(train.workspace_len(heads, n))?;
    let (strides, iterations, tolerance) = ([n * dim, dim], 10, 1e-3);
    let (starts, workspace) = (starts.device_ptr(stream).0, scratch.device_ptr(stream).0);
    let train_arguments = TrainArguments {
        sets: heads,
        n,
        vectors: keys,
        strides,
        starts,
        centroids,
        errors: 0,
        iterations,
        tolerance,
        workspace,
    };
    let encode = EncodeAny::new(&device, EncodeAnyShape { quantizer, element })?;
    let (zero, all, ks) =
        (stream.clone_htod(&[0_u32])?, stream.clone_htod(&[n as u32])?, stream.clone_htod(&[100_u32])?);
    let lengths = all.device_ptr(stream).0;
    let codes = stream.alloc_zeros::<u8>(heads * quantizer.codes_len(n))?;
    let codes = codes.device_ptr(stream).0;
    let firsts = zero.device_ptr(stream).0;
    let encode_arguments = EncodeAnyArguments {
        batch: 1,
        heads,
        max_count: n,
        vectors: keys,
        strides: [heads * n * dim, n * dim, dim],
        centroids,
        firsts,
        counts: lengths,
        capacity: n,
        codes,
    };
    // A step: tables from the queries, then the search.
    let lut = Lut::new(&device, LutShape { quantizer, group, element })?;
    let queries =
        stream.clone_htod(&(0..heads * group * dim).map(|i| number(i * 7)).collect::<Vec<f32>>())?;
    let (queries, scale) = (queries.device_ptr(stream).0, 1.0 / (dim as f32).sqrt());
    let luts = stream.alloc_zeros::<f32>(heads * group * quantizer.lut_len())?;
    let luts = luts.device_ptr(stream).0;
    let lut_arguments = LutArguments { batch: 1, heads, queries, scale, centroids, luts };
    let search = Search::new(&device, SearchShape { quantizer, group, rule: GroupRule::SumOfSoftmax })?;
    let scratch = stream.alloc_zeros::<u8>(search.workspace_len(1, heads, n))?;
    let (tokens_len, counts) = (100 + 4 + 64, stream.alloc_zeros::<u32>(1)?);
    let tokens = stream.alloc_zeros::<u32>(heads * tokens_len)?;
    let search_arguments = SearchArguments {
        batch: 1,
        heads,
        capacity: n,
        luts,
        codes,
        lengths,
        ks: ks.device_ptr(stream).0,
        sinks: 4,
        recent: 64,
        workspace: scratch.device_ptr(stream).0,
        tokens: tokens.device_ptr(stream).0,
        tokens_len,
        counts: counts.device_ptr(stream).0,
        stats: 0,
    };
    let stream_handle = stream.cu_stream();
    // SAFETY: memory of the shapes that the arguments name, kept until the stream has been waited for.
    unsafe {
        train.launch(stream_handle, &train_arguments)?;
        encode.launch(stream_handle, &encode_arguments)?;
        lut.launch(stream_handle, &lut_arguments)?;
        search.launch(stream_handle, &search_arguments)?;
    }
    let tokens = stream.clone_dtoh(&tokens)?;
    println!("head 0: {:?} ...", &tokens[..12]); // 0, 1, 2, 3, then the first that were chosen
    Ok(())
}
