//! Sequences that take the slots of others while the batch continues compute the same as on the CPU. Without
//! a GPU these tests are skipped, which `GPU_TESTS=require` turns into a failure.

use std::sync::{Arc, Mutex};

use kv_llama::Sampling;
use kv_llama::serve::{Client, Engine, Finish, Part, Request, Scheduler, Token};
use kv_llama_gpu::{Batch, Error};
use kv_methods::{Method, Prepared, Profile};
use kv_model::{Model, Rope};
use kv_reference::eval::score_text;

use crate::support::{decoder, divergence, gpu, model, profile};

/// Logits on the CPU of the tokens that follow a prompt, which comes in chunks.
fn on_cpu(
    model: &Arc<Model>,
    spec: &str,
    profile: &Profile,
    prompt: &[&[u32]],
    run: &[u32],
) -> Vec<Vec<f32>> {
    let method: Method = spec.parse().unwrap();
    let rope = Arc::new(Rope::new(&model.config, 2048));
    let Prepared { model, mut cache } = method.prepare(model, &rope, profile).unwrap();
    let mut decoder = kv_llama::Decoder::new(model, rope);
    for chunk in prompt {
        decoder.prefill(chunk, cache.as_mut()).unwrap();
    }
    score_text(&mut decoder, cache.as_mut(), run, None).unwrap().logits
}

#[test]
fn refilled_batches_have_the_logits_of_the_cpu() {
    let Some(gpu) = gpu("refilled places") else { return };
    let (model, tokens) = model();
    let vocab = model.config.vocab_size;
    let [goes_on, ends, comes] = [&tokens[3000..3700], &tokens[4000..4300], &tokens[5000..5500]];
    for spec in [
        "dense:dtype=f16",
        "dense:dtype=f16:pages=32:pool=1248",
        "int4",
        "million",
        "million:pages=64:pool=1300",
        "pqklt",
        "pqklt:pages=64:pool=1300",
        "sq:block=64",
        "hybrid:rows=0.1",
        "pqcache:tokens=128:codebooks=profile",
        "zack:k=1:v=1",
        "cachegen:bits=4",
    ] {
        let profile = profile(&model, &tokens[..2048], &[spec]);
        let mut decoder = decoder(&gpu, &model, spec, &profile, 2, 700);
        let mut logits = [vec![], vec![]];
        let mut steps = |decoder: &mut kv_llama_gpu::Decoder, first: &[u32], second: &[u32]| {
            for (&a, &b) in first.iter().zip(second) {
                decoder.feed(&[a, b]).unwrap();
                decoder.step().unwrap();
                let both = decoder.logits().unwrap();
                logits.iter_mut().zip(both.chunks_exact(vocab)).for_each(|(l, row)| l.push(row.to_vec()));
            }
        };
        decoder.prefill(&[goes_on[..300].to_vec(), ends[..200].to_vec()], 128).unwrap();
        steps(&mut decoder, &goes_on[300..400], &ends[200..]);
        decoder.end(1).unwrap();
        steps(&mut decoder, &goes_on[400..500], &[0; 100]);
        // After steps of the whole batch, in two parts.
        decoder.prefill_one(1, &comes[..200], 150).unwrap();
        decoder.prefill_one(1, &comes[200..300], 150).unwrap();
        steps(&mut decoder, &goes_on[500..699], &comes[300..499]);
        let [first, second] = logits;
        let in_one_piece = spec.split(":pages").next().unwrap();
        let of_first: Vec<&[u32]> = goes_on[..300].chunks(128).collect();
        let of_second = [&comes[..150], &comes[150..200], &comes[200..300]];
        for (name, own, prompt, run) in [
            ("goes on", &first[..], &of_first[..], &goes_on[300..]),
            ("comes", &second[200..], &of_second[..], &comes[300..]),
        ] {
            let apart = divergence(own, &on_cpu(&model, in_one_piece, &profile, prompt, run), run);
            println!("{spec}, which {name}: KL {:.1e}, top-1 {:.4}", apart.kl(), apart.top1());
            assert!(apart.kl() <= 1e-3 && apart.top1() >= 0.97, "{spec}, which {name}: KL {}", apart.kl());
        }
    }
}

/// Prompts that come in parts, of two sequences at once, while a third one steps: the first part's last token
/// runs in a step, that of the second part does not, as no step follows.
#[test]
fn prompts_in_parts_between_steps_have_the_logits_of_the_cpu() {
    let Some(gpu) = gpu("prompts in parts") else { return };
    let (model, tokens) = model();
    let [goes_on, long, short] = [&tokens[3000..3400], &tokens[4000..4500], &tokens[5000..5150]];
    for spec in [
        "dense:dtype=f16",
        "dense:dtype=f16:pages=32:pool=1248",
        "int4",
        "million",
        "million:pages=64:pool=1300",
        "pqklt",
        "sq:block=64",
        "hybrid:rows=0.1",
        "zack:k=1:v=1",
    ] {
        let profile = profile(&model, &tokens[..2048], &[spec]);
        let mut batch = Batch::new(decoder(&gpu, &model, spec, &profile, 3, 600)).unwrap();
        let mut logits = vec![];
        let part = |place, tokens, is_last| Part { place, tokens, is_last };
        batch.prefill(&[part(0, &goes_on[..100], true)]).unwrap();
        batch.step(&[(0, goes_on[100])]).unwrap();
        batch.prefill(&[part(1, &long[..128], false)]).unwrap();
        batch.step(&[(0, goes_on[101])]).unwrap();
        batch.prefill(&[part(1, &long[128..256], false)]).unwrap();
        batch.prefill(&[part(1, &long[256..300], true), part(2, &short[..90], true)]).unwrap();
        for i in 0..50 {
            batch.step(&[(0, goes_on[102 + i]), (1, long[300 + i]), (2, short[90 + i])]).unwrap();
            logits.push([0, 1, 2].map(|place| batch.logits(place).unwrap()));
        }
        let in_one_piece = spec.split(":pages").next().unwrap();
        let of_long = [&long[..127], &long[127..128], &long[128..255], &long[255..300]];
        for (place, prompt, run) in [
            (0, &[&goes_on[..100], &goes_on[100..101], &goes_on[101..102]][..], &goes_on[102..153]),
            (1, &of_long[..], &long[300..351]),
            (2, &[&short[..90]][..], &short[90..141]),
        ] {
            let own: Vec<Vec<f32>> = logits.iter().map(|all| all[place].clone()).collect();
            let apart = divergence(&own, &on_cpu(&model, in_one_piece, &profile, prompt, run), run);
            println!("{spec}, place {place}: KL {:.1e}, top-1 {:.4}", apart.kl(), apart.top1());
            assert!(apart.kl() <= 1e-3 && apart.top1() >= 0.95, "{spec}, place {place}: KL {}", apart.kl());
        }
    }
}

#[test]
fn a_second_step_between_parts_is_refused() {
    let Some(gpu) = gpu("parts and steps") else { return };
    let (model, tokens) = model();
    let decoder = decoder(&gpu, &model, "dense:dtype=f16", &Profile::default(), 2, 256);
    let mut batch = Batch::new(decoder).unwrap();
    batch.prefill(&[Part { place: 0, tokens: &tokens[..10], is_last: true }]).unwrap();
    batch.prefill(&[Part { place: 1, tokens: &tokens[..1], is_last: false }]).unwrap();
    batch.step(&[(0, 5)]).unwrap(); // nothing of the prompt has run
    batch.prefill(&[Part { place: 1, tokens: &tokens[1..9], is_last: false }]).unwrap();
    batch.step(&[(0, 5)]).unwrap();
    let error = batch.step(&[(0, 5)]).unwrap_err();
    assert!(matches!(error, Error::Argument(_)), "{error}");
}

#[test]
fn prompts_for_one_place_are_refused_by_name() {
    let Some(gpu) = gpu("refused places") else { return };
    let (model, tokens) = model();
    let spec = "dense:dtype=f16:pages=32:pool=96";
    let mut decoder = decoder(&gpu, &model, spec, &Profile::default(), 2, 256);
    decoder.prefill(&[tokens[..40].to_vec(), tokens[..20].to_vec()], 32).unwrap();
    let before = decoder.logits().unwrap();
    for (sequence, prompt) in [(2, &tokens[..3]), (1, &[][..]), (1, &[u32::MAX]), (1, &tokens[..237])] {
        let error = decoder.prefill_one(sequence, prompt, 32).unwrap_err();
        assert!(matches!(error, Error::Argument(_)), "{error}");
    }
    assert!(matches!(decoder.prefill_one(1, &tokens[..3], 0), Err(Error::Argument(_))));
    let twice = [(1, &tokens[..3]), (1, &tokens[3..6])];
    assert!(matches!(decoder.prefill_some(&twice, 32), Err(Error::Argument(_))));
    let error = decoder.prefill_one(1, &tokens[..40], 32).unwrap_err();
    assert!(matches!(error, Error::Device(kv_device::Error::Pages { .. })), "{error}");
    assert_eq!(decoder.logits().unwrap(), before);
}

/// A batch runs for longer than a sequence's capacity, as long as sequences end.
#[test]
fn a_batch_outlives_its_sequences() {
    let Some(gpu) = gpu("long batches") else { return };
    let (model, tokens) = model();
    let mut decoder = decoder(&gpu, &model, "dense:dtype=f16", &Profile::default(), 2, 64);
    decoder.prefill(&[tokens[..3].to_vec(), tokens[..20].to_vec()], 32).unwrap();
    for i in 1..12 {
        decoder.end(i % 2).unwrap();
        decoder.prefill_one(i % 2, &tokens[10 * i..][..1 + i], 32).unwrap();
        (0..25).for_each(|_| decoder.step().unwrap());
    }
    let error = (0..64).find_map(|_| decoder.step().err()).unwrap();
    assert!(matches!(error, Error::Argument(_)), "{error}");
}

/// What a client has been given.
struct Reader {
    tokens: Arc<Mutex<Vec<u32>>>,
    most: usize,
}

impl Client<Error> for Reader {
    fn take(&mut self, token: Token) -> bool {
        let mut tokens = self.tokens.lock().unwrap();
        tokens.push(token.id);
        tokens.len() < self.most
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn end(self, end: Result<Finish, Error>) {
        end.unwrap();
    }
}

/// The greedy texts of up to so many tokens after prompts that come at once.
pub fn batched(
    engine: impl Engine<Error = Error>,
    model: &Model,
    prompts: &[(Vec<u32>, usize)],
    logits: bool,
) -> Vec<Vec<u32>> {
    let mut scheduler = Scheduler::new(engine, model.config.eos_tokens.clone(), 64);
    let log_probabilities = logits.then_some(0);
    let texts = prompts.iter().map(|(prompt, most)| {
        let (prompt, most, tokens) = (prompt.clone(), *most, Arc::default());
        let reader = Reader { tokens: Arc::clone(&tokens), most };
        let request = Request { prompt, most: most + 1, sampling: Sampling::GREEDY, log_probabilities };
        scheduler.add(request, reader).unwrap();
        tokens
    });
    let texts: Vec<Arc<Mutex<Vec<u32>>>> = texts.collect();
    while scheduler.round().unwrap() {}
    texts.into_iter().map(|text| std::mem::take(&mut *text.lock().unwrap())).collect()
}

/// A batch fed from a queue generates the same as the prompts in batches of their own, also where prompts are
/// put back: three of them need up to 24 pages, and there are ten. So does one whose tokens the host chooses.
#[test]
fn more_prompts_than_places_take_turns() {
    let Some(gpu) = gpu("queued prompts") else { return };
    let (model, tokens) = model();
    let prompts: Vec<(Vec<u32>, usize)> =
        (0..7).map(|i| (tokens[600 * i..][..20 + 13 * i].to_vec(), 10 + 5 * i)).collect();
    for spec in ["dense:dtype=f16", "dense:dtype=f16:pages=16:pool=160"] {
        let new = |batch| {
            let decoder = decoder(&gpu, &model, spec, &Profile::default(), batch, 200);
            Batch::new(decoder).unwrap()
        };
        let queued = batched(new(3), &model, &prompts, false);
        let on_host = batched(new(3), &model, &prompts, true);
        for (i, prompt) in prompts.iter().enumerate() {
            let alone = &batched(new(1), &model, std::slice::from_ref(prompt), false)[0];
            // Attention of a batch sums in another order: a near tie may give another token.
            for (name, queued) in [("queued", &queued[i]), ("on the host", &on_host[i])] {
                let same = queued.iter().zip(alone).take_while(|(a, b)| a == b).count();
                println!("{spec}, prompt {i}, {name}: {same} of {} tokens alike", alone.len());
                assert!(same >= alone.len().min(8), "{spec}, prompt {i}, {name}: {queued:?} and {alone:?}");
            }
        }
    }
}
