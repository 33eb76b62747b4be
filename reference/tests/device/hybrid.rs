//! Hybrid attention on a GPU, with exact rows in host or device memory, computes the same as on the CPU.
//! Without a GPU these tests are skipped, which `GPU_TESTS=require` turns into a failure.

use kv_gpu::Element;
use kv_methods::{Method, Profile};
use kv_reference::Error;
use kv_reference::device::method_cache;

use crate::support::{
    batches_generate_what_sequences_do, cosine, decoder, divergence, diverges_as_on_the_cpu, equals_dense,
    gpu, model, on_cpu, profile, prompts_in_chunks_are_whole_prompts, steps_over_hashed_rows, teacher_forced,
};

#[test]
fn it_diverges_as_on_the_cpu() {
    let Some(gpu) = gpu("hybrid logits") else { return };
    for spec in [
        "hybrid",
        "hybrid:keys=rotated:rows=0.02",
        "hybrid:rows=0.1:offloaded=int8",
        "hybrid:rows=0:k=8/4:v=8/8",
        "hybrid:values=trained",
        "hybrid:rows=0:values=trained:norms=off",
        "hybrid:rows=0.1:k=32x4:v=32x4:window=32:sinks=2:rows-on=device:exact=bf16",
        "hybrid:keys=rotated:rows=0.1:k=32x4:v=32x4:window=32:sinks=2:rows-on=device",
        "hybrid:norms=off:mean-error=off",
        "hybrid:keys=rotated:norms=off:rows=0.02",
        "hybrid:rows=0.02:k=8/8:v=8/8:window=32:sinks=2:rows-on=device",
        "hybrid:values=trained:rows=auto",
        "hybrid:rows=auto:rows-on=device",
        "hybrid:rows=auto:bound=0.02:most=0.5",
        "hybrid:k=8/8:v=8/8:norms=off:mean-error=off:keys=rotated:rows=auto:bound=0.01:most=0.1:window=32:sinks=2:\
         rows-on=device",
    ] {
        diverges_as_on_the_cpu(&gpu, spec);
    }
}

#[test]
fn rows_of_every_token_equal_dense() {
    let Some(gpu) = gpu("hybrid with every row") else { return };
    equals_dense(&gpu, "hybrid:rows=1", 0.9998);
    equals_dense(&gpu, "hybrid:keys=rotated:rows=1:window=2:sinks=0:rows-on=device", 0.9998);
    equals_dense(&gpu, "hybrid:rows=auto:bound=1e-9:rows-on=device", 0.9998);
    equals_dense(&gpu, "hybrid:keys=rotated:rows=auto:bound=1e-9", 0.9998);
}

#[test]
fn it_does_not_matter_whose_memory_has_the_rows() {
    let Some(gpu) = gpu("homes of rows") else { return };
    let (model, tokens) = model();
    let run = &tokens[3000..3500];
    for spec in ["hybrid:rows=0.05", "hybrid:rows=auto:bound=0.02:most=0.1"] {
        let profile = profile(&model, &tokens[..2048], &[spec]);
        let logits = |home: &str| {
            let spec = format!("{spec}:rows-on={home}");
            let mut decoder = decoder(&gpu, &model, &spec, &profile, 1, run.len());
            let logits = teacher_forced(&mut decoder, run);
            (logits, decoder.fetched_rows().unwrap(), decoder.selected_rows().unwrap())
        };
        let ((host, fetched, chosen), (device, none, of_device)) = (logits("host"), logits("device"));
        println!("{spec}: {fetched} of {chosen:?} rows fetched");
        assert!(fetched > 0 && none == 0, "{spec}: {fetched} and {none} rows fetched");
        assert!(
            chosen == of_device && chosen.is_none_or(|chosen| chosen > fetched),
            "{spec}: {chosen:?} rows"
        );
        // A fixed share of rows that are in place is taken out of the sums of coded values, where rows that
        // arrive, and those by a bound, hide theirs (`pq::Hybrid`): the same but for rounding, which decides
        // in the layers behind which of two rows at the threshold is chosen. So it does between GPU and CPU.
        let cpu = on_cpu(&model, spec, &profile, run);
        let [between, of_host, of_device] =
            [(&host, &device), (&host, &cpu), (&device, &cpu)].map(|(a, b)| divergence(a, b, run).kl());
        let worst = host.iter().zip(&device).map(|(a, b)| cosine(a, b)).fold(1.0, f64::min);
        println!(
            "{spec}: KL between homes {between:.1e}, cosine {worst:.6}, to the CPU {of_host:.1e} {of_device:.1e}"
        );
        assert!(chosen.is_none() || host == device, "{spec}: other logits");
        assert!(between.max(of_device) <= 1.5 * of_host, "{spec}: KL {between}, {of_host} and {of_device}");
        // As few slots as there may be, of which a step uses as many as its heads choose, more and fewer.
        let (few_slots, more_fetched, _) = logits("host:held=0");
        assert!(few_slots == host && more_fetched > fetched, "{spec}: {more_fetched} rows fetched");
        let (in_8_bits, fetched_in_8_bits, _) = logits("host:offloaded=int8");
        // Rows in 8 bits lose little of what codes lose. Logits of a step that predicts one token with
        // certainty may turn far where rounding chooses other rows: the divergence counts, not the angle.
        let dense = on_cpu(&model, "dense", &Profile::default(), run);
        let [of_rows, of_codes] =
            [(&in_8_bits, &host), (&cpu, &dense)].map(|(a, b)| divergence(a, b, run).kl());
        println!("{spec}: rows in 8 bits: KL {of_rows:.1e}, of the codes {of_codes:.1e}");
        assert!(of_rows <= 0.1 * of_codes, "{spec}: rows in 8 bits: KL {of_rows}, of the codes {of_codes}");
        assert!(in_8_bits != host && fetched_in_8_bits > 0, "{spec}: no rows in 8 bits");
    }
}

/// A device has rows in the bases of their codes, where the components that share a scale differ more than in
/// the model's own: with every row in 8 bits the divergence is 12 times the CPU's.
#[test]
fn every_row_in_8_bits_is_near_dense() {
    let Some(gpu) = gpu("hybrid with every row in 8 bits") else { return };
    let (model, tokens) = model();
    let (run, spec) = (&tokens[3000..3500], "hybrid:rows=1:offloaded=int8");
    let profile = profile(&model, &tokens[..2048], &[spec]);
    let own = teacher_forced(&mut decoder(&gpu, &model, spec, &profile, 1, run.len()), run);
    let [cpu, dense] = [spec, "dense"].map(|spec| on_cpu(&model, spec, &profile, run));
    let [kl, expected] = [own, cpu].map(|logits| divergence(&logits, &dense, run).kl());
    println!("{spec}: KL {kl:.2e} and on the CPU {expected:.2e}");
    assert!(kl <= 20.0 * expected, "{spec}: KL {kl} and on the CPU {expected}");
}

/// Attention takes the rows in the order of their tokens, whatever slots they are in.
#[test]
fn more_rows_that_stay_are_fewer_that_are_fetched() {
    let Some(gpu) = gpu("hybrid rows that stay") else { return };
    let (model, tokens) = model();
    let run = &tokens[3000..3500];
    for spec in ["hybrid:rows=0.05", "hybrid:rows=0.05:offloaded=int8"] {
        let profile = profile(&model, &tokens[..2048], &[spec]);
        let with = |held: usize| {
            let spec = format!("{spec}:held={held}");
            let mut decoder = decoder(&gpu, &model, &spec, &profile, 1, run.len());
            (teacher_forced(&mut decoder, run), decoder.fetched_rows().unwrap())
        };
        let (last_step, twice, more) = (with(0), with(44), with(100));
        println!("{spec}: {}, {} and {} rows fetched", last_step.1, twice.1, more.1);
        assert!(last_step.0 == twice.0 && twice.0 == more.0, "{spec}: other logits");
        assert!(0 < more.1 && more.1 < twice.1 && twice.1 < last_step.1, "{spec}");
    }
}

#[test]
fn prompts_in_chunks_fill_the_cache_as_whole_ones_do() {
    let Some(gpu) = gpu("hybrid prompts") else { return };
    prompts_in_chunks_are_whole_prompts(&gpu, "hybrid:rows=0.05");
    prompts_in_chunks_are_whole_prompts(&gpu, "hybrid:rows=0.05:norms=off:mean-error=off");
    prompts_in_chunks_are_whole_prompts(&gpu, "hybrid:keys=rotated:rows=0.05:rows-on=device:sinks=0");
    prompts_in_chunks_are_whole_prompts(&gpu, "hybrid:rows=0.05:offloaded=int8");
    prompts_in_chunks_are_whole_prompts(&gpu, "hybrid:keys=rotated:rows=0.05:offloaded=int8:exact=bf16");
}

#[test]
fn a_batch_of_different_lengths_generates_what_each_sequence_does() {
    let Some(gpu) = gpu("hybrid batches") else { return };
    let (model, tokens) = model();
    for home in ["host", "device", "host:offloaded=int8"] {
        let spec = format!("hybrid:rows=0.05:exact=bf16:rows-on={home}");
        let profile = profile(&model, &tokens[..2048], &[&*spec]);
        batches_generate_what_sequences_do(&gpu, &model, &tokens, &profile, (&spec, 8));
    }
    for home in ["device", "host", "host:offloaded=int8:most=0.2"] {
        let spec = format!("hybrid:rows=auto:exact=bf16:rows-on={home}");
        let profile = profile(&model, &tokens[..2048], &[&*spec]);
        batches_generate_what_sequences_do(&gpu, &model, &tokens, &profile, (&spec, 8));
    }
}

#[test]
fn rows_that_the_host_has_no_room_for_are_an_error() {
    let Some(gpu) = gpu("hybrid errors") else { return };
    let (model, _) = model();
    let method: Method = "hybrid".parse().unwrap();
    let huge = method_cache(&gpu, &method, &model.config, Element::F16, None, 1, 1 << 31).map(drop);
    assert!(matches!(huge, Err(Error::Device(kv_device::Error::HostMemory { .. }))), "{huge:?}");
}

#[test]
fn hashed_rows_at_full_width() {
    let Some(gpu) = gpu("hybrid hashed weights") else { return };
    let (fetched, _) = steps_over_hashed_rows(&gpu, "hybrid:rows=0.02:exact=bf16");
    assert!(fetched > 0);
}
