//! A model in parts, a rank each, computes what it computes in one piece. Ranks share the device, and
//! exchange rows in memory of the host; where there are two devices, they also exchange them by NCCL.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use kv_device::Gpu;
use kv_gpu::{DevicePtr, Element};
use kv_llama_gpu::ranks::{Batches, Communicator, Exchange, HostMemory, Lockstep, Rank, Shard};
use kv_llama_gpu::{Batch, Decoder, Error as LoopError, WeightLayout, Weights};
use kv_methods::{Method, Profile};
use kv_model::{AttentionWeights, Layer, Linear, Matrix, Model};
use kv_reference::device::{rank_cache, rank_decoder};
use kv_reference::{Error, Result};

use crate::refill::batched;
use crate::support::{assert_same_but_for_a_near_tie, cosine, decoder, gpu, model, profile, skip};

/// Tokens of the prompts, and picked after them.
const PROMPT: usize = 300;
const PICKED: usize = 24;

/// What a failure may take.
const SOON: Duration = Duration::from_secs(10);

/// Ranks of one device.
fn on_one_device(ranks: usize) -> Vec<Rank> {
    Rank::open(&vec![0; ranks], Exchange::HostMemory, usize::MAX).unwrap()
}

/// Ranks of two devices.
#[cfg(feature = "nccl")]
fn by_nccl(test: &str) -> Option<Vec<Rank>> {
    let gpus = [0, 1].map(|i| Gpu::open(i).map(drop));
    gpus.into_iter().collect::<std::result::Result<(), _>>().map_err(|e| skip(test, &e)).ok()?;
    Some(Rank::open(&[0, 1], Exchange::Nccl, usize::MAX).unwrap())
}

/// The shipped model with every query head twice, of which `W_O` adds a quarter and three: it computes what
/// the shipped one does, and has eight query heads for two KV heads.
fn with_query_heads_twice(model: &Model) -> Arc<Model> {
    let (mut wide, head_dim) = (model.clone(), model.config.head_dim);
    wide.config.n_heads *= 2;
    let numbers = |matrix: &Matrix, rows: usize| {
        let mut numbers = vec![0.0; rows * matrix.n_in()];
        matrix.rows_into(0, &mut numbers);
        numbers
    };
    for layer in &mut wide.layers {
        let AttentionWeights { norm, q, k, v, o, .. } = &*layer.attention;
        let rows = numbers(&q.weight, q.n_out());
        let heads = rows.chunks_exact(head_dim * q.n_in());
        let queries = heads.flat_map(|head| [head, head].concat()).collect();
        let columns = numbers(&o.weight, o.n_out());
        let part = |head: &[f32], part: f32| head.iter().map(|x| part * x).collect::<Vec<_>>();
        let heads = columns.chunks_exact(head_dim);
        let parts = heads.flat_map(|head| [part(head, 0.25), part(head, 0.75)].concat()).collect();
        let linear = |numbers, n_in, bias: &Option<Vec<f32>>| Linear {
            weight: Matrix::new(numbers, n_in),
            bias: bias.clone(),
        };
        assert!(q.bias.is_none());
        let attention = AttentionWeights {
            norm: norm.clone(),
            q: linear(queries, q.n_in(), &None),
            k: k.clone(),
            v: v.clone(),
            o: linear(parts, 2 * o.n_in(), &o.bias),
            q_norm: None,
            k_norm: None,
        };
        *layer = Layer { attention: Arc::new(attention), feed_forward: layer.feed_forward.clone() };
    }
    Arc::new(wide)
}

/// Decoders of ranks.
fn decoders(
    ranks: Vec<Rank>,
    model: &Arc<Model>,
    method: &str,
    profile: &Profile,
    (batch, capacity): (usize, usize),
) -> Lockstep<Decoder> {
    let (method, profile): (Method, _) = (method.parse().unwrap(), profile.clone());
    let model = method.device_model(model, &profile).unwrap();
    let make = move |rank: &Rank| rank_decoder(rank, &method, &model, &profile, (batch, capacity));
    Lockstep::start(ranks, make).unwrap()
}

/// The logits after prompts of two sequences, and those after more steps, which feed given tokens.
fn computed(decoder: &mut Decoder, tokens: &[u32]) -> std::result::Result<Vec<Vec<f32>>, LoopError> {
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

/// The least cosine of rows of logits.
fn worst(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| cosine(a, b)).fold(1.0, f64::min)
}

/// Whether ranks have the logits of one, for every method. Ranks that share a KV head each select rows for
/// their own queries, of which one rank selects those for all: `hybrid` is then another approximation.
fn ranks_compute_what_one_does(gpu: &Arc<Gpu>, model: &Arc<Model>, ranks: impl Fn() -> Vec<Rank>) {
    let tokens: Arc<[u32]> = self::model().1[2048..].into();
    let share = model.config.n_kv_heads < ranks().len();
    for method in [
        "dense:dtype=f16",
        "dense:dtype=bf16",
        "int4",
        "million:window=16",
        "pqklt",
        "sq:block=64",
        "hybrid",
        "zack",
    ] {
        let profile = profile(model, &tokens[..1024], &[method]);
        let sizes = (2, PROMPT + PICKED + 1);
        let mut one = decoder(gpu, model, method, &profile, sizes.0, sizes.1);
        let whole = computed(&mut one, &tokens).unwrap();
        let fed = tokens.clone();
        let parts = decoders(ranks(), model, method, &profile, sizes)
            .each(move |decoder| computed(decoder, &fed))
            .unwrap();
        assert!(parts.iter().all(|part| *part == parts[0]), "{method}: all ranks have the same logits");
        let (worst, least) =
            (worst(&parts[0], &whole), if share && method == "hybrid" { 0.95 } else { 0.999 });
        println!("{method}, {} ranks: cosine {worst:.7}", parts.len());
        assert!(worst >= least, "{method}, {} ranks: cosine {worst}", parts.len());
    }
}

#[test]
fn two_ranks_of_one_device_compute_what_one_does() {
    let Some(gpu) = gpu("ranks") else { return };
    ranks_compute_what_one_does(&gpu, &model().0, || on_one_device(2));
}

/// Two hold each KV head.
#[test]
fn four_ranks_of_one_device_compute_what_one_does() {
    let Some(gpu) = gpu("four ranks") else { return };
    ranks_compute_what_one_does(&gpu, &model().0, || on_one_device(4));
}

/// Four hold each KV head.
#[test]
fn eight_ranks_of_one_device_compute_what_one_does() {
    let Some(gpu) = gpu("eight ranks") else { return };
    ranks_compute_what_one_does(&gpu, &with_query_heads_twice(&model().0), || on_one_device(8));
}

/// The test's own model: twice the query heads compute the same.
#[test]
fn query_heads_twice_compute_what_they_do_once() {
    let Some(gpu) = gpu("query heads twice") else { return };
    let (model, tokens) = model();
    let wide = with_query_heads_twice(&model);
    let of = |model| {
        let none = Profile::default();
        computed(&mut decoder(&gpu, model, "dense:dtype=f16", &none, 2, PROMPT + PICKED + 1), &tokens)
    };
    let worst = worst(&of(&model).unwrap(), &of(&wide).unwrap());
    assert!(worst >= 0.999, "cosine {worst}");
}

/// More sequences than packed weights take.
#[test]
fn ranks_of_one_device_compute_wide_batches() {
    const BATCH: usize = 40;
    let Some(gpu) = gpu("ranks of wide batches") else { return };
    let (model, tokens) = model();
    let wide = with_query_heads_twice(&model);
    let prompts: Arc<[Vec<u32>]> = (0..BATCH).map(|i| tokens[50 * i..][..1 + i].to_vec()).collect();
    let fed: Arc<[u32]> = tokens[..2 * BATCH].into();
    let compute = move |decoder: &mut Decoder| -> std::result::Result<Vec<f32>, LoopError> {
        decoder.prefill(&prompts, 128)?;
        for fed in fed.chunks_exact(BATCH) {
            decoder.feed(fed)?;
            decoder.step()?;
        }
        decoder.logits()
    };
    for (ranks, model) in [(2, &model), (4, &model), (8, &wide)] {
        for method in ["dense:dtype=f16", "million:window=16"] {
            let profile = profile(model, &tokens[..1024], &[method]);
            let whole = compute(&mut decoder(&gpu, model, method, &profile, BATCH, PROMPT)).unwrap();
            let mut parts = decoders(on_one_device(ranks), model, method, &profile, (BATCH, PROMPT));
            let parts = parts.each(compute.clone()).unwrap();
            assert!(parts.iter().all(|part| *part == parts[0]), "{method}: all ranks have the same logits");
            let rows = |logits: &[f32]| {
                logits.chunks_exact(model.config.vocab_size).map(<[f32]>::to_vec).collect::<Vec<_>>()
            };
            let worst = worst(&rows(&parts[0]), &rows(&whole));
            println!("{method}, {ranks} ranks: cosine {worst:.7}");
            assert!(worst >= 0.999, "{method}, {ranks} ranks: cosine {worst}");
        }
    }
}

/// The tokens that follow prompts of few and of many tokens, which run together or each alone.
fn picked(decoder: &mut Decoder, tokens: &[u32]) -> std::result::Result<Vec<Vec<u32>>, LoopError> {
    let prompts = [tokens[..PROMPT].to_vec(), tokens[1000..1007].to_vec()];
    decoder.prefill(&prompts, 128)?;
    (0..PICKED).try_for_each(|_| decoder.step())?;
    let mut picked = decoder.picked()?;
    decoder.end(1)?;
    decoder.prefill_one(1, &tokens[2000..2020], 128)?;
    (0..PICKED / 2).try_for_each(|_| decoder.step())?;
    picked.extend(decoder.picked()?);
    Ok(picked)
}

#[test]
fn four_and_eight_ranks_of_one_device_pick_the_tokens_of_one() {
    let Some(gpu) = gpu("picks of ranks") else { return };
    let (model, tokens) = model();
    let wide = with_query_heads_twice(&model);
    let tokens: Arc<[u32]> = tokens.into();
    for (ranks, model) in [(4, &model), (8, &wide)] {
        let (method, none) = ("dense:dtype=f16", Profile::default());
        let sizes = (2, PROMPT + 2 * PICKED);
        let whole = picked(&mut decoder(&gpu, model, method, &none, sizes.0, sizes.1), &tokens).unwrap();
        let all = tokens.clone();
        let parts = decoders(on_one_device(ranks), model, method, &none, sizes)
            .each(move |decoder| picked(decoder, &all))
            .unwrap();
        assert!(parts.iter().all(|part| *part == whole), "{ranks} ranks: {parts:?}, one: {whole:?}");
    }
}

/// Continuous batching over ranks, also where prompts are put back for want of pages.
#[test]
fn batches_of_ranks_generate_what_one_does() {
    let Some(gpu) = gpu("batches of ranks") else { return };
    let (model, tokens) = model();
    let prompts: Vec<(Vec<u32>, usize)> =
        (0..6).map(|i| (tokens[600 * i..][..20 + 13 * i].to_vec(), 10 + 5 * i)).collect();
    for method in ["dense:dtype=f16", "dense:dtype=f16:pages=16:pool=160"] {
        let none = Profile::default();
        let alone = Batch::new(decoder(&gpu, &model, method, &none, 3, 200)).unwrap();
        let expected = batched(alone, &model, &prompts, false);
        for (ranks, on_host) in [(2, false), (4, true)] {
            let (of, parsed): (_, Method) = (model.clone(), method.parse().unwrap());
            let make = move |rank: &Rank| {
                let decoder = rank_decoder(rank, &parsed, &of, &Profile::default(), (3, 200))?;
                Result::Ok(Batch::new(decoder)?)
            };
            let batches = Batches::new(Lockstep::start(on_one_device(ranks), make).unwrap()).unwrap();
            let own = batched(batches, &model, &prompts, on_host);
            for ((own, expected), (prompt, _)) in own.iter().zip(&expected).zip(&prompts) {
                let what = format!("{method}, {ranks} ranks");
                assert_eq!(own.len(), expected.len(), "{what}: {own:?} and {expected:?}");
                assert_same_but_for_a_near_tie(&model, prompt, [own, expected], &what);
            }
        }
    }
}

#[cfg(feature = "nccl")]
#[test]
fn ranks_by_nccl_compute_what_one_does() {
    let Some(gpu) = gpu("ranks by NCCL") else { return };
    if by_nccl("ranks by NCCL").is_some() {
        ranks_compute_what_one_does(&gpu, &model().0, || by_nccl("ranks by NCCL").unwrap());
    }
}

#[cfg(feature = "nccl")]
#[test]
fn ranks_by_nccl_pick_the_tokens_of_one_in_graphs() {
    let Some(gpu) = gpu("ranks in graphs") else { return };
    let Some(ranks) = by_nccl("ranks in graphs") else { return };
    let (model, tokens) = model();
    let (method, none, sizes) = ("dense:dtype=f16", Profile::default(), (2, PROMPT + 2 * PICKED));
    let whole = picked(&mut decoder(&gpu, &model, method, &none, sizes.0, sizes.1), &tokens).unwrap();
    let parts = decoders(ranks, &model, method, &none, sizes).each(move |decoder| picked(decoder, &tokens));
    assert_eq!(parts.unwrap(), [whole.clone(), whole]);
}

/// Exchanges of a rank, of which one fails.
struct Faulty {
    exchanges: HostMemory,
    left: AtomicUsize, // exchanges before the fault
}

impl Faulty {
    fn count(&self) -> std::result::Result<(), LoopError> {
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            Ok(_) => Ok(()),
            Err(_) => Err(LoopError::Ranks("an illegal address".into())),
        }
    }
}

impl Communicator for Faulty {
    fn shard(&self) -> Shard {
        self.exchanges.shard()
    }

    unsafe fn sum(
        &self,
        stream: CUstream,
        data: DevicePtr<f32>,
        len: usize,
    ) -> std::result::Result<(), LoopError> {
        self.count()?;
        // SAFETY: the caller's contract.
        unsafe { self.exchanges.sum(stream, data, len) }
    }

    unsafe fn gather(
        &self,
        stream: CUstream,
        data: DevicePtr<f32>,
        rows: usize,
        len: usize,
    ) -> std::result::Result<(), LoopError> {
        self.count()?;
        // SAFETY: the caller's contract.
        unsafe { self.exchanges.gather(stream, data, rows, len) }
    }

    fn is_capturable(&self) -> bool {
        self.exchanges.is_capturable()
    }

    fn abort(&self) {
        self.exchanges.abort();
    }
}

/// In a prompt and in a step, of the first, of the last and of a rank between them.
#[test]
fn a_rank_whose_launch_fails_ends_the_others_and_is_named() {
    if gpu("a rank whose launch fails").is_none() {
        return;
    }
    let (model, tokens) = model();
    let (tokens, layers): (Arc<[u32]>, _) = (tokens.into(), model.config.n_layers);
    let gpus = [0; 4].map(|device| Arc::new(Gpu::open(device).unwrap())); // a stream each
    let ranks = |faulty, left| {
        let all = HostMemory::ranks(4).into_iter().zip(&gpus).enumerate().map(|(rank, (exchanges, gpu))| {
            let left = AtomicUsize::new(if rank == faulty { left } else { usize::MAX });
            let communicator: Arc<dyn Communicator> = Arc::new(Faulty { exchanges, left });
            Rank { gpu: gpu.clone(), communicator: Some(communicator) }
        });
        let sizes = (2, PROMPT + PICKED + 1);
        let mut all = decoders(all.collect(), &model, "dense:dtype=f16", &Profile::default(), sizes);
        let (fed, begun) = (tokens.clone(), Instant::now());
        let end = all.each(move |decoder| computed(decoder, &fed).map(drop));
        (all, end, begun)
    };
    // Without a fault: it compiles the kernels, which is no part of a failure.
    ranks(4, 0).1.unwrap();
    // A prompt of six chunks has two sums a layer, the last layer one chunk more; then come two a layer.
    for (faulty, left) in [(0, 0), (3, 3 * layers), (2, 14 * layers + 20), (1, 40 * layers)] {
        let (mut all, failed, begun) = ranks(faulty, left);
        let failed = failed.unwrap_err().to_string();
        assert_eq!(failed, format!("rank {faulty}: an illegal address"));
        assert_eq!(all.call(|decoder| decoder.step()).unwrap_err().to_string(), failed);
        drop(all);
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }
}

#[test]
fn a_rank_out_of_memory_ends_the_others_and_is_named() {
    if gpu("a rank out of memory").is_none() {
        return;
    }
    let (model, _) = model();
    // Not enough for the weights of a part, for the cache of a part next to them.
    for (bytes, what) in [(1 << 20, "weights"), (60 << 20, "caches")] {
        let rank = |(rank, exchanges)| {
            let limit = if rank == 2 { bytes } else { usize::MAX };
            let communicator: Arc<dyn Communicator> = Arc::new(exchanges);
            Rank { gpu: Arc::new(Gpu::open_within(0, limit).unwrap()), communicator: Some(communicator) }
        };
        let ranks = HostMemory::ranks(4).into_iter().enumerate().map(rank).collect();
        let (model, method, begun) =
            (model.clone(), "dense:dtype=f16".parse::<Method>().unwrap(), Instant::now());
        let make = move |rank: &Rank| {
            let element = Element::F16;
            let weights = Weights::shard_of(&rank.gpu, &model, element, WeightLayout::Packed, rank.shard())?;
            let of = (&model.config, rank.shard());
            let cache = rank_cache(&rank.gpu, &method, of, element, None, 1, 100_000)?;
            let mut decoder = Decoder::of_rank(rank, Arc::new(weights), cache, 1)?;
            decoder.prefill(&[vec![1; PROMPT]], 128)?;
            Result::Ok(decoder)
        };
        let failed = Lockstep::start(ranks, make).map(drop).unwrap_err();
        assert!(matches!(&failed, Error::LlamaGpu(LoopError::Rank { rank: 2, .. })), "{failed}");
        let line = failed.to_string();
        assert!(line.starts_with("rank 2: ") && line.contains(what) && !line.contains('\n'), "{line}");
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }
}

#[cfg(feature = "nccl")]
#[test]
fn a_rank_by_nccl_that_fails_ends_the_others_and_is_named() {
    let Some(ranks) = by_nccl("a rank that fails, NCCL") else { return };
    let (model, tokens) = model();
    let (sizes, begun) = ((2, PROMPT + PICKED + 1), Instant::now());
    let mut all = decoders(ranks, &model, "dense:dtype=f16", &Profile::default(), sizes);
    let number = Arc::new(AtomicUsize::new(0));
    let failed = all.each(move |decoder| {
        // Whichever comes second.
        if number.fetch_add(1, Ordering::Relaxed) == 1 {
            return Err(LoopError::Argument("as the test wants".into()));
        }
        computed(decoder, &tokens).map(drop)
    });
    let failed = failed.unwrap_err().to_string();
    assert!(failed.starts_with("rank ") && failed.ends_with(": as the test wants"), "{failed}");
    drop(all);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn models_that_cannot_be_divided_are_refused_by_name() {
    let (model, _) = model();
    let refused = |ranks| Shard::new(0, ranks).unwrap().config(&model.config).unwrap_err().to_string();
    assert_eq!(refused(3), "2 KV heads are not divisible among 3 ranks");
    assert_eq!(refused(8), "4 query heads are not divisible among 8 ranks");
    assert!(Shard::new(3, 3).is_err());
    if let Some(gpu) = gpu("weights of a rank") {
        let shard = Shard::new(0, 2).unwrap();
        let weights = Weights::shard_of(&gpu, &model, Element::F16, WeightLayout::Packed, shard).unwrap();
        let method = "dense:dtype=f16".parse().unwrap();
        let cache = rank_cache(&gpu, &method, (&model.config, shard), Element::F16, None, 1, 64).unwrap();
        assert!(Decoder::new(gpu, Arc::new(weights), cache, 1).is_err(), "a rank without the others");
        for order in [&[1, 0][..], &[0, 0], &[0], &[]] {
            let ranks = on_one_device(2);
            let given = order.iter().map(|&rank: &usize| ranks[rank].clone()).collect();
            let refused = Lockstep::start(given, |_| Result::Ok(())).map(drop).unwrap_err().to_string();
            assert!(refused.contains("all those of a model"), "{order:?}: {refused}");
        }
    }
}
