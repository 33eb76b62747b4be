//! Hybrid attention: coarse codes of all tokens and the exact rows of the best ones in one softmax.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, halves, numbers};
use half::f16;
use kv_gpu::Element;
use kv_gpu::pq::{CodeLayout, ExactRows, Hybrid, HybridArguments, HybridShape, RowIndex, Side, TILE};
use pq_core::{CodebookBuf, Codes, GroupRule, PqShape, TrainOptions, encode_into, train};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, group, n, k, quantizer) = (2, 4, 1000, 10, PqShape::new(128, 16, 8)?);
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
    let halves_of_rows: Vec<f16> = rows.iter().map(|&x| f16::from_f32(x)).collect();
    let exact = gpu.upload(&halves_of_rows.repeat(heads))?; // (heads, n, dim), keys and values alike
    let queries = gpu.upload(&halves(heads * group * 128))?;
    let (lengths, ks) = (gpu.upload(&[n as u32])?, gpu.upload(&[k as u32])?);
    let selected = gpu.zeros::<u32>(heads * k)?;
    let shape = HybridShape {
        keys: quantizer,
        values: quantizer,
        group,
        element: Element::F16,
        rule: GroupRule::SumOfSoftmax,
        paged: false,
        addends: false,
        key_norms: false,
        value_norms: false,
        mean_errors: false,
        adaptive: false,
    };
    let hybrid = Hybrid::new(&gpu, shape)?;
    let workspace = gpu.zeros::<u8>(hybrid.workspace_len(1, heads, n.next_multiple_of(TILE)))?;
    let out = gpu.zeros::<f16>(heads * group * 128)?;
    let arguments = HybridArguments {
        batch: 1,
        heads,
        tiles: n.div_ceil(TILE),
        key_codes: key_codes.pointer,
        value_codes: value_codes.pointer,
        key_table: key_table.pointer,
        value_table: value_table.pointer,
        key_errors: None,
        key_norms: None,
        value_norms: None,
        mean_errors: None,
        queries: queries.pointer.cast(),
        code_queries: None,
        lengths: lengths.pointer,
        pages: None,
        addends: None,
        ks: ks.pointer,
        bound: None,
        selected: selected.pointer,
        selected_len: k,
        rows: ExactRows {
            keys: exact.pointer.cast(),
            values: exact.pointer.cast(),
            capacity: n,
            index: RowIndex::Token,
            arriving: false,
        },
        exact: None,
        scale: 1.0 / 128_f32.sqrt(),
        out: out.pointer.cast(),
        log_sum_exp: None,
        pdl: false,
        workspace: workspace.pointer,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read. Rows
    // in host memory are fetched between the two launches.
    unsafe {
        hybrid.select(gpu.stream().cu_stream(), &arguments)?;
        hybrid.attend(gpu.stream().cu_stream(), &arguments)?;
    }
    println!("{:?}\n{:.3?} ...", &gpu.read(&selected)?[..k], &gpu.read(&out)?[..6]);
    Ok(())
}
