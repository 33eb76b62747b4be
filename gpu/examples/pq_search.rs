//! PQCache's step: a group of query heads selects the tokens to attend to.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::{Gpu, Result, numbers};
use kv_gpu::pq::{Search, SearchArguments, SearchShape};
use pq_core::{GroupRule, PqShape, pack_codes_into};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let (heads, group, n, quantizer) = (2, 4, 8192, PqShape::new(64, 2, 6)?);
    let luts = gpu.upload(&numbers(heads * group * quantizer.lut_len()))?; // from `Lut`
    let of_tokens: Vec<u8> = (0..n * 2).map(|i| (i * i % 61) as u8).collect();
    let mut codes = vec![0; quantizer.codes_len(n)];
    pack_codes_into(quantizer, &of_tokens, &mut codes)?; // `EncodeGeneric` makes them on the device
    let codes = gpu.upload(&codes.repeat(heads))?;
    let (lengths, ks) = (gpu.upload(&[n as u32])?, gpu.upload(&[100_u32])?);
    let (sinks, recent) = (4, 64);
    let tokens_len = 100 + sinks + recent;
    let (tokens, counts) = (gpu.zeros::<u32>(heads * tokens_len)?, gpu.zeros::<u32>(1)?);
    let search = Search::new(&gpu, SearchShape { quantizer, group, rule: GroupRule::SumOfSoftmax })?;
    let workspace = gpu.zeros::<u8>(search.workspace_len(1, heads, n))?;
    let arguments = SearchArguments {
        batch: 1,
        heads,
        capacity: n,
        luts: luts.pointer,
        codes: codes.pointer,
        lengths: lengths.pointer,
        ks: ks.pointer,
        sinks,
        recent,
        workspace: workspace.pointer,
        tokens: tokens.pointer,
        tokens_len,
        counts: counts.pointer,
        stats: None,
        pdl: false,
    };
    // SAFETY: the buffers have the shapes that the arguments name, and live until the results are read.
    unsafe { search.launch(gpu.stream().cu_stream(), &arguments)? };
    println!("{} tokens: {:?} ...", gpu.read(&counts)?[0], &gpu.read(&tokens)?[..12]); // 4 sinks first
    Ok(())
}
