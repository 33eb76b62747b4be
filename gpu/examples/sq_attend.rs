//! A decode step on scalar codes: keys and values of one head are encoded on the device, and queries attend to
//! them.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, numbers};
use half::f16;
use kv_gpu::Element;
use kv_gpu::sq::{
    Attend, AttendArguments, AttendShape, CodedBlocks, Encode, EncodeShape, IntegerQueries, Queries,
};
use kv_gpu::sq::{QueriesArguments, Side};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (dim, block, blocks, group, value_bits) = (128, 256, 4, 4, 2);
    let n = blocks * block;
    // Components of falling deviation, as the transform of the keys leaves them, get 4 to 0 bits.
    let sigma: Vec<f32> = (0..dim).map(|i| 0.97_f32.powi(i)).collect();
    let keys = pq_core::sq::allot(&sigma, 24, &mut vec![0; sigma.len()])?; // 3 bits on average
    let (dim, key_slots) = (keys.dim(), keys.slots());
    let shape = AttendShape {
        dim,
        key_slots,
        uniform_keys: false,
        value_bits,
        block,
        group,
        element: Element::F16,
        mean_errors: true,
        addends: false,
        paged: false,
    };
    let layout = shape.key_table();
    let mut table = vec![0; layout.table_len()];
    layout.table_into(&keys, &mut table)?;
    let (tables, lengths) = (gpu.upload(&table)?, gpu.upload(&[n as u32])?);

    // Rows that the caller has transformed, here the same for keys and values.
    let (rows, firsts) = (gpu.upload(&numbers(n * dim))?, gpu.upload(&[0_u32])?);
    let (steps, norms) = (gpu.zeros::<u8>(blocks * dim)?, gpu.zeros::<u8>(n)?);
    let (key_words, value_words) =
        (gpu.zeros::<u32>(n / 2 * key_slots)?, gpu.zeros::<u32>(n / 32 * dim * value_bits)?);
    let errors = gpu.zeros::<f16>(blocks * dim)?;
    for keys in [true, false] {
        let side = if keys { Side::Keys { slots: key_slots } } else { Side::Values { bits: value_bits } };
        let encode = Encode::new(&gpu, EncodeShape { dim, side, block, paged: false })?;
        let coded = CodedBlocks {
            batch: 1,
            heads: 1,
            max_rows: n,
            firsts: firsts.pointer,
            counts: lengths.pointer,
            key_tables: keys.then_some(tables.pointer),
            scales: if keys { steps.pointer } else { norms.pointer },
            words: if keys { key_words.pointer } else { value_words.pointer },
            mean_errors: (!keys).then_some(errors.pointer),
            blocks,
            pages: None,
        };
        // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
        unsafe { encode.launch(gpu.stream().cu_stream(), rows.pointer, &coded)? };
    }

    // Queries after RoPE, relative to each block and in the dual of the keys' basis, as integers.
    let queries = gpu.upload(&numbers(group * dim).into_iter().map(f16::from_f32).collect::<Vec<_>>())?;
    let basis: Vec<f32> = (0..dim * dim).map(|i| if i % (dim + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let mut dual = vec![0.0; shape.dual_table().table_len()];
    shape.dual_table().table_into(&basis, &mut dual)?;
    let frequencies: Vec<f32> = (0..dim / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let (duals, frequencies) = (gpu.upload(&dual)?, gpu.upload(&frequencies)?);
    let words = gpu.zeros::<u32>(blocks * group * IntegerQueries::words_len(dim))?;
    let units = gpu.zeros::<f32>(blocks * group * 2)?;
    let integers = IntegerQueries { words: words.pointer, units: units.pointer, blocks };
    let arguments = QueriesArguments {
        batch: 1,
        heads: 1,
        queries: queries.pointer.cast(),
        duals: duals.pointer,
        frequencies: frequencies.pointer,
        first: 0,
        steps: steps.pointer,
        key_tables: tables.pointer,
        lengths: lengths.pointer,
        blocks,
        pages: None,
        scale: 1.0 / (dim as f32).sqrt(),
        out: integers,
        pdl: false,
    };
    // SAFETY: as above.
    unsafe { Queries::new(&gpu, shape)?.launch(gpu.stream().cu_stream(), &arguments)? };

    let attend = Attend::new(&gpu, shape)?;
    let workspace = gpu.zeros::<u8>(attend.workspace_len(1, 1))?;
    let out = gpu.zeros::<f16>(group * dim)?;
    let arguments = AttendArguments {
        batch: 1,
        heads: 1,
        blocks,
        keys: key_words.pointer,
        values: value_words.pointer,
        norms: norms.pointer,
        mean_errors: Some(errors.pointer),
        addends: None,
        key_tables: tables.pointer,
        queries: integers,
        lengths: lengths.pointer,
        pages: None,
        out: out.pointer.cast(),
        log_sum_exp: None,
        pdl: false,
        workspace: workspace.pointer,
    };
    // SAFETY: as above.
    unsafe { attend.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{:.3?} ...", &gpu.read(&out)?[..6]);
    Ok(())
}
