//! MILLION's decode step: queries attend to codes of keys and values.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves, numbers};
use half::f16;
use kv_gpu::Element;
use kv_gpu::pq::{Attend, AttendArguments, AttendShape, CodeLayout, Paging, Side, TILE};
use pq_core::{CodebookBuf, Codes, PqShape, TrainOptions, encode_into, train};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, group, n, quantizer) = (2, 4, 1000, PqShape::new(128, 64, 8)?);
    // Codes and codebooks of pq-core; here they are the same for keys, values and all heads.
    let rows = numbers(n * 128);
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
    let (queries, lengths) = (gpu.upload(&halves(heads * group * 128))?, gpu.upload(&[n as u32])?);
    let (element, paging) = (Element::F16, Paging::Contiguous);
    let (addends, norms, exact_fp8) = (false, false, false);
    let shape =
        AttendShape { keys: quantizer, values: quantizer, group, element, paging, addends, norms, exact_fp8 };
    let attend = Attend::new(&gpu, shape)?;
    let workspace = gpu.zeros::<u8>(attend.workspace_len(1, heads))?;
    let out = gpu.zeros::<f16>(heads * group * 128)?;
    let arguments = AttendArguments {
        batch: 1,
        heads,
        tiles: n.div_ceil(TILE),
        key_codes: key_codes.pointer,
        value_codes: value_codes.pointer,
        key_table: key_table.pointer,
        value_table: value_table.pointer,
        queries: queries.pointer.cast(),
        lengths: lengths.pointer,
        pages: None,
        addends: None,
        norms: None,
        exact: None,
        exact_factors: None,
        scale: 1.0 / 128_f32.sqrt(),
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
