//! MILLION's decode step: values and keys of a prompt become codes on the device, and a query attends to the codes.
//!
//! `cargo run --release -p kv-gpu --example attend_on_codes`

use cudarc::driver::DevicePtr;
use half::f16;
use kv_gpu::pq::{
    Attend, AttendArguments, AttendShape, CodeLayout, Encode, EncodeArguments, EncodeShape, Side, TILE,
};
use kv_gpu::{Device, Element, VectorElement};
use pq_core::{CodebookBuf, PqShape, TrainOptions, train};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (heads, group, n, quantizer) = (2, 4, 4096, PqShape::new(128, 64, 8)?);
    let device = Device::open(0).map_err(|error| error.to_string())?;
    let stream = device.stream();
    let number = |i: usize| f16::from_f32((i as f32 * 0.37).sin());
    let rows: Vec<f16> = (0..heads * n * 128).map(number).collect();
    let trained = train(quantizer, &rows[..n * 128], &TrainOptions::default())?; // here: one codebook for all
    let codebook = CodebookBuf::new(quantizer, &trained.centroids)?;
    let (rows, centroids) = (stream.clone_htod(&rows)?, stream.clone_htod(&trained.centroids.repeat(heads))?);
    let (first, count) = (stream.clone_htod(&[0_u32])?, stream.clone_htod(&[n as u32])?);
    let at = |slice: &cudarc::driver::CudaSlice<u8>| slice.device_ptr(stream).0;

    // Keys and values are the same rows here; their tiles differ.
    let mut encoded = Vec::new();
    for side in [Side::Keys, Side::Values] {
        let layout = CodeLayout::new(quantizer, side)?;
        let codes = stream.alloc_zeros::<u8>(heads * (n / TILE) * layout.tile_len())?;
        let mut table = vec![f16::ZERO; layout.table_len()];
        layout.table_into(&codebook.view(), &mut table)?;
        let encode =
            Encode::new(&device, EncodeShape { quantizer, side, element: VectorElement::F16, paged: false })?;
        let arguments = EncodeArguments {
            batch: 1,
            heads,
            max_count: n,
            vectors: rows.device_ptr(stream).0,
            strides: [heads * n * 128, n * 128, 128],
            centroids: centroids.device_ptr(stream).0,
            firsts: first.device_ptr(stream).0,
            counts: count.device_ptr(stream).0,
            codes: at(&codes),
            tiles: n / TILE,
            pages: None,
        };
        // SAFETY: device buffers of the shapes that the arguments name, kept until the stream has been waited for.
        unsafe { encode.launch(stream.cu_stream(), &arguments)? };
        encoded.push((codes, stream.clone_htod(&table.repeat(heads))?));
    }
    let shape =
        AttendShape { keys: quantizer, values: quantizer, group, element: Element::F16, paged: false };
    let attend = Attend::new(&device, shape)?;
    let queries = stream.clone_htod(&(0..heads * group * 128).map(number).collect::<Vec<f16>>())?;
    let workspace = stream.alloc_zeros::<u8>(attend.workspace_len(1, heads))?;
    let out = stream.alloc_zeros::<f16>(heads * group * 128)?;
    let arguments = AttendArguments {
        batch: 1,
        heads,
        tiles: n / TILE,
        key_codes: at(&encoded[0].0),
        value_codes: at(&encoded[1].0),
        key_table: encoded[0].1.device_ptr(stream).0,
        value_table: encoded[1].1.device_ptr(stream).0,
        queries: queries.device_ptr(stream).0,
        lengths: count.device_ptr(stream).0,
        pages: None,
        exact: None,
        scale: 1.0 / 128_f32.sqrt(),
        out: out.device_ptr(stream).0,
        log_sum_exp: 0,
        overlap: false,
        workspace: at(&workspace),
    };
    // SAFETY: as above.
    unsafe { attend.launch(stream.cu_stream(), &arguments)? };
    println!("{:?}", &stream.clone_dtoh(&out)?[..8]);
    Ok(())
}
