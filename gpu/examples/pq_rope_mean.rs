//! Keys coded without their rotated mean: the mean's part of the scores, then attention that adds it.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves, numbers};
use half::f16;
use kv_gpu::Element;
use kv_gpu::pq::{
    Addends, Attend, AttendArguments, AttendShape, CodeLayout, Paging, RopeMeanScores,
    RopeMeanScoresArguments, RopeMeanScoresShape, Side, TILE,
};
use pq_core::{CodebookBuf, Codes, PqShape, RopeMeanBuf, TrainOptions, encode_into, train};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (dim, heads, group, n, element) = (128, 2, 4, 1000, Element::F16);
    let scale = 1.0 / (dim as f32).sqrt();
    // Keys after RoPE, minus the rotated mean. Here they are also the values.
    let frequencies: Vec<f32> = (0..dim / 2).map(|i| 5e5_f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let (mean, mut rows) = (numbers(dim), numbers(n * dim));
    RopeMeanBuf::new(&mean, &frequencies)?.view().subtract(0, &mut rows)?;
    let quantizer = PqShape::new(dim, 64, 8)?;
    let codebook =
        CodebookBuf::new(quantizer, &train(quantizer, &rows, &TrainOptions::default())?.centroids)?;
    let mut codes = vec![0; quantizer.codes_len(n)];
    encode_into(&codebook.view(), &rows, 0, &mut codes)?;
    let on_device = |side| -> Result<_> {
        let layout = CodeLayout::new(quantizer, side)?;
        let mut tiles = vec![0; n.div_ceil(TILE) * layout.tile_len()];
        layout.pack_into(&Codes::new(quantizer, n, &codes)?, &mut tiles)?;
        let mut table = vec![f16::ZERO; layout.table_len()];
        layout.table_into(&codebook.view(), &mut table)?;
        Ok((gpu.upload(&tiles.repeat(heads))?, gpu.upload(&table.repeat(heads))?))
    };
    let ((key_codes, key_table), (value_codes, value_table)) =
        (on_device(Side::Keys)?, on_device(Side::Values)?);
    let (queries, lengths) = (gpu.upload(&halves(heads * group * dim))?, gpu.upload(&[n as u32])?);
    let (means, frequencies) = (gpu.upload(&mean.repeat(heads))?, gpu.upload(&frequencies)?);

    let tiles = n.div_ceil(TILE);
    let addends = gpu.zeros::<f16>(heads * tiles * group * TILE)?;
    let scores = RopeMeanScores::new(&gpu, RopeMeanScoresShape { dim, group, element })?;
    let arguments = RopeMeanScoresArguments {
        batch: 1,
        heads,
        tiles,
        means: means.pointer,
        frequencies: frequencies.pointer,
        first: 0,
        queries: queries.pointer.cast(),
        lengths: lengths.pointer,
        scale,
        addends: addends.pointer,
        pdl: false,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { scores.launch(gpu.stream().cu_stream(), &arguments)? };

    let (keys, values, paging) = (quantizer, quantizer, Paging::Contiguous);
    let (norms, exact_fp8) = (false, false);
    let shape = AttendShape { keys, values, group, element, paging, addends: true, norms, exact_fp8 };
    let attend = Attend::new(&gpu, shape)?;
    let workspace = gpu.zeros::<u8>(attend.workspace_len(1, heads))?;
    let out = gpu.zeros::<f16>(heads * group * dim)?;
    let arguments = AttendArguments {
        batch: 1,
        heads,
        tiles,
        key_codes: key_codes.pointer,
        value_codes: value_codes.pointer,
        key_table: key_table.pointer,
        value_table: value_table.pointer,
        queries: queries.pointer.cast(),
        lengths: lengths.pointer,
        pages: None,
        addends: Some(Addends { values: addends.pointer, tiles }),
        norms: None,
        exact: None,
        exact_factors: None,
        scale,
        out: out.pointer.cast(),
        log_sum_exp: None,
        pdl: true,
        workspace: workspace.pointer,
    };
    // SAFETY: as above.
    unsafe { attend.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{:.3?} ...", &gpu.read(&out)?[..6]);
    Ok(())
}
