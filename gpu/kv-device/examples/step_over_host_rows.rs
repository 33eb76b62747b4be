//! A prompt goes from an engine's pages to PQCache, then to hybrid attention, with exact rows in memory of
//! the host. Each query head of the step after it asks for one token: nearly all weight is on its value.

#[path = "common/engine.rs"]
mod engine;

use engine::{DIM, Engine, GROUP, HEADS, PAGE, Result, TOKENS};
use kv_attend::owner::{Pair, Side};
use kv_device::plan::{HybridPlan, Plan, Retrieval, RowForm, RowHome, Training, TransformedHead};
use kv_device::{Buffer, CacheShape, Chunk, Gpu, Sequences};
use pq_core::{CodebookBuf, PqShape, TokenBudget, TrainOptions, Window, train};

fn main() -> Result<()> {
    let (engine, frequencies) = (Engine::new()?, vec![0.0; DIM / 2]); // a model without RoPE
    let (element, window) = (kv_gpu::Element::F16, Window { sinks: 4, recent: 64, batch: 1 });
    let (layers, heads, group, head_dim, batch, capacity) = (1, HEADS, GROUP, DIM, 1, 8192);
    let shape = CacheShape { layers, heads, group, head_dim, frequencies, element, window, batch, capacity };
    let (budget, home, resident) = (TokenBudget::Ratio(0.1), RowHome::Host, 1024);
    let training = Some(Training { iterations: 5, max_keys: 4096 }); // on the prompt
    let pqcache = Retrieval { quantizer: PqShape::new(DIM, 8, 8)?, budget, training, home, resident };
    let form = RowForm { rotated_mean: false, norms: Pair::of(|_| None) };
    let code = PqShape::new(DIM, 32, 8)?;
    let quantizers = Pair::of(|_| code);
    let hybrid = HybridPlan { quantizers, form, mean_errors: true, budget, bound: None, home, resident };
    let keys = engine.rows((0..TOKENS).map(|token| (0, Side::Keys, token))); // one codebook will do
    let book = CodebookBuf::new(code, &train(code, &keys, &TrainOptions::default())?.centroids)?;
    let head = TransformedHead::untransformed(Pair::of(|_| book.clone()), DIM);
    let gpu = Gpu::on_stream(engine.stream.clone(), 1 << 30)?;
    for plan in [Plan::Retrieval(pqcache, None), Plan::Hybrid(hybrid, Some(vec![vec![head; HEADS]]))] {
        let mut cache = plan.build(&gpu, &shape)?;
        let prompt = Chunk { sequence: 0, position: 0, count: TOKENS };
        let rows = cache.chunk_rows(&gpu, 0, &prompt)?;
        (0..TOKENS).step_by(PAGE).try_for_each(|token| engine.copy(token, PAGE, &rows, token))?;
        // SAFETY: the rows of the prompt are written, and nothing else uses them.
        unsafe { cache.turn_stored(&gpu, 0, &prompt, &rows) }?;
        cache.append(&gpu, 0, &prompt)?;
        cache.set_lengths(&gpu, &[TOKENS])?;
        let (rows, mapping) = (cache.rows(0)?, cache.slot_mapping());
        let (exact, slot) = (mapping.exact(TOKENS + 1), mapping.slot(TOKENS));
        let state = [TOKENS, exact, TOKENS + 1 - exact, slot].map(|number| number as u32);
        let state = Buffer::of(&gpu, &state)?; // one number each: the batch has one sequence
        let at = |i| state.pointer().offset(i);
        let sequences = Sequences { positions: at(0), exact_lengths: at(1), coded_lengths: at(2) };
        let (queries, out) =
            (Buffer::of(&gpu, &engine.queries())?, Buffer::zeros(&gpu, HEADS * GROUP * DIM)?);
        // SAFETY: the numbers are those of the sequence, its rows are written, and buffers outlive the step.
        unsafe {
            cache.before_step(&gpu, &sequences)?;
            engine.copy(0, 1, &rows, slot)?; // the new token is the first one again
            if let Some(basis) = cache.transform() {
                basis.step(&gpu, 0, &sequences, queries.pointer(), &rows, (at(3), 1))?;
            }
            cache.attend(&gpu, 0, &sequences, queries.pointer().cast(), out.pointer().cast())?;
        }
        let mut found = vec![0; out.len()];
        out.read_into(&gpu, &mut found)?;
        println!("{} rows fetched from {} bytes of the host", cache.fetched_rows(&gpu)?, cache.host_bytes());
        assert!(engine.largest_error(&found) < 0.03, "an output is not the value that its query asks for");
    }
    Ok(())
}
