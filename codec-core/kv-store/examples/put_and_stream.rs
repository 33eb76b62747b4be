//! An engine stores keys and values of its own, finds the longest stored prefix of another prompt, and
//! streams it before a deadline: from a folder, or with feature `s3` from the argument `s3://BUCKET/PATH`.

use codec_core::{FitOptions, LayerRows, ModelInfo, Place, PlaneBuf, Plans, Profile, StreamPolicy};
use kv_store::{Grid, KvStore, Options, Space, StoreLink, encode_chunk};
use kv_stream::{ChunkFrame, Payload, PrefillTime, RealClock, RequestChunk, Speeds, serve_into};

const MODEL: ModelInfo = ModelInfo { model_id: 7, layers: 4, heads: 2, head_dim: 64, keys_rotated: true };
const PLACE: Place<'_> = Place::nhd(MODEL.heads, MODEL.head_dim);
const ROW: usize = MODEL.channels();
const PLANE: usize = 2_500 * ROW; // the engine's cache is (layers, 2, 2500, heads, head_dim)

/// The engine's prefill: keys and values of these tokens of a prompt.
fn prefill(cache: &mut [f32], prompt: &[u32], tokens: std::ops::Range<usize>) -> kv_stream::Result<()> {
    for (i, plane) in cache.chunks_exact_mut(PLANE).enumerate() {
        let value = |at: usize| (prompt[at / ROW] as f32 + (at % ROW * i) as f32).sin();
        (tokens.start * ROW..tokens.end * ROW).for_each(|at| plane[at] = value(at));
    }
    Ok(())
}

fn layers(cache: &[f32]) -> Vec<LayerRows<'_, f32>> {
    let layers = cache.chunks_exact(2 * PLANE).map(|layer| layer.split_at(PLANE));
    layers.map(|(keys, values)| LayerRows { keys, values }).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::temp_dir().join("put_and_stream").display().to_string();
    let store = KvStore::open(&std::env::args().nth(1).unwrap_or(folder), Options::default())?;
    let (context, mut cache) = ((0..2_350).collect::<Vec<u32>>(), vec![0.0; 2 * MODEL.layers * PLANE]);
    prefill(&mut cache, &context, 0..context.len())?;
    let fit = |rows: &[f32]| PlaneBuf::fit(rows, ROW, None, &FitOptions::default());
    let profile = Profile::fit(MODEL, 1, 500, &layers(&cache), &PLACE, |_, _, _, rows| fit(rows))?;
    let space = Space::new("the model's name and revision", &profile, Grid { chunk: 500, tail: 100 })?;
    for key in space.chunks(&context) {
        let place = Place { first_token: key.tokens.start, ..PLACE };
        let object = encode_chunk(&profile, &key, &layers(&cache), &place)?;
        println!("tokens {:?}: {:?}", key.tokens, store.put_chunk(&space, &key, object.into())?);
    }
    let prompt = [&context[..2_100], &[1, 2, 3]].concat();
    let found = store.find(&space, &prompt)?;
    let take = |chunk: RequestChunk, payload| {
        let tokens = found[chunk.index].key().tokens.clone();
        let Payload::Level(level, bytes) = payload else { return prefill(&mut cache, &prompt, tokens) };
        let frame = ChunkFrame::parse(&profile, &bytes, &tokens, level)?;
        let place = Place { first_token: tokens.start, ..PLACE };
        let mut layers = cache.chunks_exact_mut(2 * PLANE).map(|layer| layer.split_at_mut(PLANE)).enumerate();
        layers.try_for_each(|(i, (keys, values))| frame.layer_to(i, None, &place, keys, values))
    };
    let clock = RealClock(std::time::Instant::now());
    let mut link = StoreLink::new(&store, &space, &found, clock);
    // Half a second, on a machine that computes 500 tokens per second.
    let policy = StreamPolicy { slo: 0.5, first_level: 0, prior: None, plans: Plans::TextFirst };
    let speeds = Speeds { prefill: PrefillTime { linear: 2e-3, quadratic: 0.0 }, decode_rate: 1e8 };
    let costs = [link.costs(&speeds)];
    let trace = serve_into(&mut link, take, clock, &costs, &kv_stream::Options::adaptive(policy))?;
    println!("{:?} tokens loaded and recomputed in {:.3} s", trace.tokens(1), trace.seconds());
    Ok(())
}
