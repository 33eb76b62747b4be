//! A model in parts, a rank each, computes what it computes in one piece. Ranks share the device, and
//! exchange rows in memory of the host; where there are two devices, they also exchange them by NCCL.

use std::sync::Arc;

use kv_device::Gpu;
use kv_llama_gpu::ranks::{Communicator, HostMemory, Rank, run};
use kv_llama_gpu::{Decoder, Error as LoopError, WeightLayout, Weights};
use kv_methods::{Method, Profile};
use kv_model::Model;
use kv_reference::device::rank_cache;

use crate::support::{cosine, decoder, gpu, model, profile, skip};

const RANKS: usize = 2;

/// Tokens of the prompts, and picked after them.
const PROMPT: usize = 300;
const PICKED: usize = 24;

/// Ranks of one device.
fn on_one_device() -> Vec<Rank> {
    let rank = |communicator| Rank {
        gpu: Arc::new(Gpu::open(0).unwrap()),
        communicator: Arc::new(communicator) as Arc<dyn Communicator>,
    };
    HostMemory::ranks(RANKS).into_iter().map(rank).collect()
}

/// Ranks of as many devices.
#[cfg(feature = "nccl")]
fn by_nccl(test: &str) -> Option<Vec<Rank>> {
    let gpus: Result<Vec<_>, _> = (0..RANKS).map(|i| Gpu::open(i).map(Arc::new)).collect();
    let gpus = gpus.map_err(|e| skip(test, &e)).ok()?;
    let communicators =
        kv_llama_gpu::ranks::Nccl::ranks(&gpus.iter().map(|gpu| &**gpu).collect::<Vec<_>>()).unwrap();
    let rank = |(gpu, communicator)| Rank { gpu, communicator: Arc::new(communicator) };
    Some(gpus.into_iter().zip(communicators).map(rank).collect())
}

fn of_rank(rank: &Rank, model: &Arc<Model>, method: &str, profile: &Profile, batch: usize) -> Decoder {
    let method: Method = method.parse().unwrap();
    let element = method.device_element().unwrap();
    let of = (&model.config, rank.shard());
    let capacity = PROMPT + PICKED + 1;
    let cache = rank_cache(&rank.gpu, &method, of, element, Some(profile), batch, capacity).unwrap();
    let model = method.device_model(model, profile).unwrap();
    let weights = Arc::new(
        Weights::shard_of(&rank.gpu, &model, element, WeightLayout::of_batch(batch), rank.shard()).unwrap(),
    );
    Decoder::of_rank(rank.gpu.clone(), weights, cache, batch, rank.communicator.clone()).unwrap()
}

/// The logits after prompts of two sequences, and those after more steps, which feed given tokens.
fn computed(decoder: &mut Decoder, tokens: &[u32]) -> Result<Vec<Vec<f32>>, LoopError> {
    let (prompts, fed) = tokens.split_at(2 * PROMPT);
    decoder.prefill(&prompts.chunks(PROMPT).map(<[u32]>::to_vec).collect::<Vec<_>>(), 128)?;
    let mut logits = vec![decoder.logits()?];
    for tokens in fed.chunks_exact(2).take(PICKED) {
        decoder.feed(tokens)?;
        decoder.step()?;
        logits.push(decoder.logits()?);
    }
    Ok(logits)
}

fn ranks_compute_what_one_does(gpu: &Arc<Gpu>, ranks: impl Fn() -> Vec<Rank>) {
    let (model, tokens) = model();
    let tokens = &tokens[2048..];
    for method in
        ["dense:dtype=f16", "dense:dtype=bf16", "int4", "million:window=16", "pqklt", "sq", "hybrid", "zack"]
    {
        let profile = profile(&model, &tokens[..1024], &[method]);
        let whole =
            computed(&mut decoder(gpu, &model, method, &profile, 2, PROMPT + PICKED + 1), tokens).unwrap();
        let parts =
            run(ranks(), |rank| computed(&mut of_rank(rank, &model, method, &profile, 2), tokens)).unwrap();
        assert_eq!(parts[0], parts[1], "{method}: all ranks have the same logits");
        let worst = parts[0].iter().zip(&whole).map(|(a, b)| cosine(a, b)).fold(1.0, f64::min);
        println!("{method}: cosine {worst:.7}");
        assert!(worst >= 0.999, "{method}: cosine {worst}");
    }
}

#[test]
fn ranks_of_one_device_compute_what_one_does() {
    let Some(gpu) = gpu("ranks") else { return };
    ranks_compute_what_one_does(&gpu, on_one_device);
}

/// More sequences than packed weights take.
#[test]
fn ranks_of_one_device_compute_wide_batches() {
    const BATCH: usize = 40;
    let Some(gpu) = gpu("ranks of wide batches") else { return };
    let (model, tokens) = model();
    let prompts: Vec<Vec<u32>> = (0..BATCH).map(|i| tokens[50 * i..][..1 + i].to_vec()).collect();
    for method in ["dense:dtype=f16", "million:window=16"] {
        let profile = profile(&model, &tokens[..1024], &[method]);
        let compute = |decoder: &mut Decoder| -> Result<Vec<f32>, LoopError> {
            decoder.prefill(&prompts, 128)?;
            decoder.feed(&tokens[..BATCH])?;
            decoder.step()?;
            decoder.feed(&tokens[BATCH..2 * BATCH])?;
            decoder.step()?;
            decoder.logits()
        };
        let whole = compute(&mut decoder(&gpu, &model, method, &profile, BATCH, PROMPT)).unwrap();
        let of_rank = |rank: &Rank| compute(&mut of_rank(rank, &model, method, &profile, BATCH));
        let parts = run(on_one_device(), of_rank).unwrap();
        assert_eq!(parts[0], parts[1], "{method}: all ranks have the same logits");
        let worst = parts[0]
            .chunks_exact(model.config.vocab_size)
            .zip(whole.chunks_exact(model.config.vocab_size))
            .map(|(a, b)| cosine(a, b))
            .fold(1.0, f64::min);
        println!("{method}: cosine {worst:.7}");
        assert!(worst >= 0.999, "{method}: cosine {worst}");
    }
}

#[cfg(feature = "nccl")]
#[test]
fn ranks_by_nccl_compute_what_one_does() {
    let Some(gpu) = gpu("ranks by NCCL") else { return };
    if by_nccl("ranks by NCCL").is_some() {
        ranks_compute_what_one_does(&gpu, || by_nccl("ranks by NCCL").unwrap());
    }
}

#[cfg(feature = "nccl")]
#[test]
fn ranks_by_nccl_pick_the_tokens_of_one_in_graphs() {
    let Some(gpu) = gpu("ranks in graphs") else { return };
    let Some(ranks) = by_nccl("ranks in graphs") else { return };
    let (model, tokens) = model();
    let picked = |decoder: &mut Decoder| {
        decoder.prefill(&[tokens[..PROMPT].to_vec()], 128)?;
        (0..PICKED).try_for_each(|_| decoder.step())?;
        decoder.picked()
    };
    let method = "dense:dtype=f16";
    let none = Profile::default();
    let whole = picked(&mut decoder(&gpu, &model, method, &none, 1, PROMPT + PICKED + 1)).unwrap();
    let parts = run(ranks, |rank| picked(&mut of_rank(rank, &model, method, &none, 1))).unwrap();
    assert_eq!(parts, [whole.clone(), whole]);
}

#[test]
fn a_rank_that_fails_ends_the_others_and_is_named() {
    if gpu("a rank that fails").is_none() {
        return;
    }
    let (model, tokens) = model();
    let mut sets = vec![on_one_device()];
    #[cfg(feature = "nccl")]
    sets.extend(by_nccl("a rank that fails, NCCL"));
    for ranks in sets {
        let failed = run(ranks, |rank| {
            let mut decoder = of_rank(rank, &model, "dense:dtype=f16", &Profile::default(), 2);
            if rank.shard().rank() == 1 {
                return Err(LoopError::Argument("as the test wants".into()));
            }
            computed(&mut decoder, &tokens).map(drop)
        });
        assert_eq!(failed.unwrap_err().to_string(), "rank 1: as the test wants");
    }
}

#[test]
fn models_that_cannot_be_divided_are_refused_by_name() {
    let (model, _) = model();
    let shard = kv_llama_gpu::ranks::Shard::new(2, 3).unwrap();
    let error = shard.config(&model.config).unwrap_err().to_string();
    assert!(error.contains("KV heads are not divisible among 3 ranks"), "{error}");
    assert!(kv_llama_gpu::ranks::Shard::new(3, 3).is_err());
    if let Some(gpu) = gpu("weights of a rank") {
        let shard = kv_llama_gpu::ranks::Shard::new(0, 2).unwrap();
        let weights =
            Weights::shard_of(&gpu, &model, kv_gpu::Element::F16, WeightLayout::Packed, shard).unwrap();
        let method = "dense:dtype=f16".parse().unwrap();
        let of = (&model.config, shard);
        let cache = rank_cache(&gpu, &method, of, kv_gpu::Element::F16, None, 1, 64).unwrap();
        assert!(Decoder::new(gpu, Arc::new(weights), cache, 1).is_err(), "a rank without the others");
    }
}
