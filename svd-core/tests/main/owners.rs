//! The owned caches: attention on sinks, rows of lower rank and window is that of a plain softmax in f64, and
//! nothing depends on how tokens were divided among appends, on the layout, on threads, or on having been
//! saved. Bytes of any content are an error or a cache.

use std::sync::Arc;

use half::f16;
use proptest::prelude::*;
use svd_core::*;

use super::support::{backends, random};

const HEADS: usize = 3;
const GROUP: usize = 2;
pub(super) const DIM: usize = 8;
pub(super) const DIM_V: usize = 6;

/// Rows (n, heads * dim) whose components have decaying scales.
pub(super) fn decaying<E: Element>(seed: u64, n: usize, heads: usize, dim: usize) -> Vec<E> {
    let rows = random::<f32>(seed, n * heads * dim).into_iter().enumerate();
    rows.map(|(i, x)| E::from_f32(1.5 * x * 0.8_f32.powi((i % dim) as i32))).collect()
}

/// `n` tokens of all heads, tokens first.
fn tokens<E: Element>(seed: u64, n: usize) -> (Vec<E>, Vec<E>) {
    (decaying(seed, n, HEADS, DIM), decaying(seed ^ 1, n, HEADS, DIM_V))
}

fn rotations() -> LayerRotations {
    let mut calibration = LayerCalibration::new(HEADS, GROUP, [DIM, DIM_V]).unwrap();
    let (keys, values) = tokens::<f32>(77, 200);
    let queries = decaying::<f32>(78, 200, HEADS * GROUP, DIM);
    let rows = |rows, len| Rows::contiguous(rows, len).unwrap();
    let (keys, values) = (rows(&keys, HEADS * DIM), rows(&values, HEADS * DIM_V));
    calibration.add(rows(&queries, HEADS * GROUP * DIM), keys, values).unwrap();
    calibration.rotations().unwrap()
}

/// Different ranks in every head.
const RANKS: [[usize; 2]; HEADS] = [[5, 3], [8, 6], [1, 4]];

pub(super) fn maps(folded: bool) -> Vec<Arc<HeadMaps>> {
    let rotations = rotations();
    if folded { rotations.folded_maps(&RANKS).unwrap() } else { rotations.maps(&RANKS).unwrap() }
}

fn append<E: Element>(cache: &mut LowRankLayerCache<E>, keys: &[E], values: &[E]) {
    let keys = Rows::contiguous(keys, HEADS * DIM).unwrap();
    cache.append(keys, Rows::contiguous(values, HEADS * DIM_V).unwrap()).unwrap();
}

fn attend<E: Element>(
    cache: &LowRankLayerCache<E>,
    backend: Backend,
    attention: &Attention,
    queries: &[f32],
) -> Vec<f32> {
    let mut out = vec![f32::NAN; HEADS * GROUP * DIM_V];
    let (queries, workspace) = (Rows::from(queries), &mut Workspace::default());
    attend_batch_into_with(backend, &[cache], attention, queries, workspace, &mut out).unwrap();
    out
}

fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|x| x.to_bits()).collect()
}

/// Attention in f64 of a query at `position` over head `h`'s tokens: exact sinks and window, `A_r B_r^T` of
/// the rows in between.
fn expected<E: Element>(
    (cache, h, folded): (&LowRankHeadCache<E>, usize, bool),
    attention: &Attention,
    (keys, values): (&[E], &[E]),
    queries: &[f32],
    position: usize,
) -> Vec<f64> {
    let rotations = rotations();
    let middle = cache.sinks()..cache.sinks() + cache.compressed();
    let side = |rows: &[E], s: usize, dim: usize| -> Vec<Vec<f64>> {
        let (rotation, rank) = (&rotations.heads()[h][s], RANKS[h][s]);
        let rows = Rows::contiguous(rows, HEADS * dim).unwrap().columns(h * dim, dim).unwrap();
        let row = |(t, row): (usize, &[E])| -> Vec<f64> {
            let row: Vec<f64> = row.iter().map(|x| x.to_f32().into()).collect();
            if !middle.contains(&t) {
                return row;
            }
            if folded && s == 1 {
                return row.iter().enumerate().map(|(d, &x)| if d < rank { x } else { 0.0 }).collect();
            }
            let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
            let column =
                |c: usize| rotation.basis().iter().skip(c).step_by(dim).copied().collect::<Vec<f64>>();
            let low: Vec<f64> = (0..rank).map(|c| product(&row, &column(c))).collect();
            rotation.dual().chunks_exact(dim).map(|b| product(&low, b)).collect()
        };
        rows.iter().enumerate().map(row).collect()
    };
    let (keys, values) = (side(keys, 0, DIM), side(values, 1, DIM_V));
    let end = cache.len().min(position + 1);
    let seen = attention.window.map_or(0, |window| (position + 1).saturating_sub(window))..end;
    let mut out = vec![];
    for query in queries[h * GROUP * DIM..][..GROUP * DIM].chunks_exact(DIM) {
        let score = |t: usize| -> f64 {
            let product: f64 = query.iter().zip(&keys[t]).map(|(&q, &k)| f64::from(q) * k).sum();
            let score = f64::from(attention.scale) * product;
            attention.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let weights: Vec<f64> = seen.clone().map(|t| score(t).exp()).collect();
        let sum: f64 = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let values = &values[seen.start..];
        out.extend((0..DIM_V).map(|d| weights.iter().zip(values).map(|(w, v)| w * v[d]).sum::<f64>() / sum));
    }
    out
}

fn windows() -> impl Strategy<Value = Window> {
    (0_usize..6, 0_usize..20, 0_usize..40).prop_map(|(sinks, recent, batch)| Window { sinks, recent, batch })
}

fn check<E: Element>(
    window: Window,
    (seed, n, first, kept): (u64, usize, usize, usize),
    attention: &Attention,
    folded: bool,
    tolerance: f64,
) {
    let (mut keys, mut values) = tokens::<E>(seed, n);
    let queries = random::<f32>(seed ^ 2, HEADS * GROUP * DIM);
    let mut cache = LowRankLayerCache::new(&maps(folded), window).unwrap();
    let (first, kept) = (first.min(n), kept.min(first.min(n)));
    append(&mut cache, &keys[..first * HEADS * DIM], &values[..first * HEADS * DIM_V]);
    // Some are rejected again.
    cache.truncate(kept);
    assert_eq!(cache.len(), kept);
    append(&mut cache, &keys[first * HEADS * DIM..], &values[first * HEADS * DIM_V..]);
    keys.drain(kept * HEADS * DIM..first * HEADS * DIM);
    values.drain(kept * HEADS * DIM_V..first * HEADS * DIM_V);
    assert_eq!(cache.len(), kept + n - first);
    let elements: usize = cache
        .heads()
        .iter()
        .zip(RANKS)
        .map(|(head, [key, value])| {
            (head.sinks() + head.recent()) * (DIM + DIM_V) + head.compressed() * (key + value)
        })
        .sum();
    assert_eq!(cache.size(), elements * size_of::<E>());
    let last = cache.len().saturating_sub(1);
    for backend in backends() {
        let out = attend(&cache, backend, attention, &queries);
        for (h, out) in out.chunks_exact(GROUP * DIM_V).enumerate() {
            let head = (&cache.heads()[h], h, folded);
            for (x, y) in out.iter().zip(&expected(head, attention, (&keys, &values), &queries, last)) {
                assert!((f64::from(*x) - y).abs() < tolerance, "{backend:?}, head {h}: {x} {y}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn attention_is_over_sinks_reduced_rows_and_window(
        window in windows(), sizes in (any::<u64>(), 0_usize..150, 0_usize..150, 0_usize..200),
        softcap in proptest::option::of(0.5_f32..5.0), sliding in proptest::option::of(1_usize..200), folded: bool,
    ) {
        let attention = Attention { softcap, window: sliding, ..Attention::scaled(0.7) };
        check::<f32>(window, sizes, &attention, folded, 1e-4);
        check::<f16>(window, sizes, &attention, folded, 2e-2);
    }

    #[test]
    fn several_query_tokens_attend_causally(
        window in windows(),
        seed: u64,
        n in 1_usize..150,
        query_tokens in prop_oneof![Just(1_usize), 2_usize..80],
        sees in proptest::option::of(1_usize..150),
        softcap in proptest::option::of(0.5_f32..5.0),
        gap in 0_usize..3,
        folded: bool,
    ) {
        let query_tokens = query_tokens.min(n);
        let (keys, values) = tokens::<f32>(seed, n);
        let maps = maps(folded);
        let mut caches = [(); 2].map(|()| LowRankLayerCache::new(&maps, window).unwrap());
        append(&mut caches[0], &keys, &values);
        // The other sequence is the first tokens of the same one, as many as the queries need.
        append(&mut caches[1], &keys[..query_tokens * HEADS * DIM], &values[..query_tokens * HEADS * DIM_V]);
        let attention = Attention { scale: 0.7, softcap, window: sees };
        let (row, rows) = (HEADS * GROUP * DIM, 2 * query_tokens);
        let queries = random::<f32>(seed ^ 2, rows * (row + gap));
        let queries = Rows::new(&queries, rows, row, row + gap).unwrap();
        for backend in backends() {
            let mut out = vec![f32::NAN; rows * HEADS * GROUP * DIM_V];
            let (caches, mut workspace) = ([&caches[0], &caches[1]], Workspace::default());
            attend_batch_into_with(backend, &caches, &attention, queries, &mut workspace, &mut out).unwrap();
            for (i, out) in out.chunks_exact(GROUP * DIM_V).enumerate() {
                let (row, h) = (i / HEADS, i % HEADS);
                let cache = caches[row / query_tokens];
                let position = cache.len() - query_tokens + row % query_tokens;
                let held = (&keys[..cache.len() * HEADS * DIM], &values[..cache.len() * HEADS * DIM_V]);
                let head = (&cache.heads()[h], h, folded);
                let expected = expected(head, &attention, held, queries.row(row), position);
                for (x, y) in out.iter().zip(&expected) {
                    prop_assert!((f64::from(*x) - y).abs() < 1e-4, "{:?}, row {}: {} {}", backend, i, x, y);
                }
            }
        }
    }

    /// Drafts are appended, rejected and appended again: the window then has room for them, so that no token
    /// is compressed between the queries.
    #[test]
    fn several_query_tokens_are_one_at_a_time(
        seed: u64, n in 1_usize..100, query_tokens in 1_usize..40, sinks in 0_usize..6, more in 0_usize..30,
        sees in proptest::option::of(1_usize..100), folded: bool,
    ) {
        let query_tokens = query_tokens.min(n);
        let (keys, values) = tokens::<f16>(seed, n);
        let (first, window) = (n - query_tokens, Window { sinks, recent: query_tokens + more, batch: 1 });
        let mut at_once = LowRankLayerCache::new(&maps(folded), window).unwrap();
        append(&mut at_once, &keys, &values);
        at_once.truncate(first);
        let one_by_one = at_once.clone();
        append(&mut at_once, &keys[first * HEADS * DIM..], &values[first * HEADS * DIM_V..]);
        prop_assert_eq!(at_once.heads()[0].compressed(), one_by_one.heads()[0].compressed());
        let attention = Attention { window: sees, ..Attention::scaled(0.7) };
        let queries = random::<f32>(seed ^ 2, query_tokens * HEADS * GROUP * DIM);
        let rows = Rows::contiguous(&queries, HEADS * GROUP * DIM).unwrap();
        for backend in backends() {
            let mut out = vec![f32::NAN; query_tokens * HEADS * GROUP * DIM_V];
            let (mut cache, workspace) = (one_by_one.clone(), &mut Workspace::default());
            attend_batch_into_with(backend, &[&at_once], &attention, rows, workspace, &mut out).unwrap();
            for (i, out) in out.chunks_exact(HEADS * GROUP * DIM_V).enumerate() {
                let t = first + i;
                let (k, v) = (&keys[t * HEADS * DIM..], &values[t * HEADS * DIM_V..]);
                append(&mut cache, &k[..HEADS * DIM], &v[..HEADS * DIM_V]);
                let alone = attend(&cache, backend, &attention, rows.row(i));
                for (x, y) in out.iter().zip(&alone) {
                    prop_assert!((x - y).abs() < 2e-5, "{:?}, token {}: {} {}", backend, t, x, y);
                }
            }
        }
    }

    #[test]
    fn nothing_depends_on_appends_layouts_threads_or_saving(
        window in windows(), seed: u64, cuts in proptest::collection::vec(0_usize..40, 0..6), folded: bool,
    ) {
        let n: usize = cuts.iter().sum();
        let (keys, values) = tokens::<f16>(seed, n + 3);
        let queries = random::<f32>(seed ^ 2, HEADS * GROUP * DIM);
        let maps = maps(folded);
        let attention = Attention::scaled(0.7);
        for backend in backends() {
            let rows = |from: usize, to: usize| {
                let part = |rows, len: usize| Rows::contiguous(rows, len).unwrap().slice(from..to).unwrap();
                (part(&keys, HEADS * DIM), part(&values, HEADS * DIM_V))
            };
            let mut at_once = LowRankLayerCache::new(&maps, window).unwrap();
            let (all_keys, all_values) = rows(0, n);
            at_once.append_with(backend, all_keys, all_values).unwrap();
            let mut in_parts = LowRankLayerCache::new(&maps, window).unwrap();
            let mut from = 0;
            for cut in &cuts {
                let (keys, values) = rows(from, from + cut);
                in_parts.append_with(backend, keys, values).unwrap();
                from += cut;
            }
            let mut restored = LowRankLayerCache::<f16>::from_bytes(&in_parts.to_bytes(), &maps).unwrap();
            prop_assert_eq!(restored.to_bytes(), in_parts.to_bytes());
            prop_assert_eq!(restored.to_bytes(), at_once.to_bytes());
            // The next steps are the same in all of them.
            for t in n..n + 3 {
                let (keys, values) = rows(t, t + 1);
                for cache in [&mut at_once, &mut in_parts, &mut restored] {
                    cache.append_with(backend, keys, values).unwrap();
                }
                let out = attend(&at_once, backend, &attention, &queries);
                prop_assert_eq!(bits(&attend(&in_parts, backend, &attention, &queries)), bits(&out));
                prop_assert_eq!(bits(&attend(&restored, backend, &attention, &queries)), bits(&out));
            }
        }
        // Heads first.
        let heads_first = |rows: &[f16], dim: usize| -> Vec<f16> {
            let rows = Rows::contiguous(rows, HEADS * dim).unwrap();
            (0..HEADS).flat_map(|h| rows.columns(h * dim, dim).unwrap().iter().flatten()).copied().collect()
        };
        let (hnd_keys, hnd_values) = (heads_first(&keys, DIM), heads_first(&values, DIM_V));
        let mut hnd = LowRankLayerCache::new(&maps, window).unwrap();
        let rows = |rows, dim| Rows::contiguous(rows, dim).unwrap();
        hnd.append_heads(rows(&hnd_keys, DIM), rows(&hnd_values, DIM_V)).unwrap();
        let mut nhd = LowRankLayerCache::new(&maps, window).unwrap();
        append(&mut nhd, &keys, &values);
        prop_assert_eq!(hnd.to_bytes(), nhd.to_bytes());
    }

    #[test]
    fn any_bytes_are_an_error_or_a_cache(
        seed: u64, n in 0_usize..40, window in windows(),
        changes in proptest::collection::vec((0_usize..1 << 16, any::<u8>()), 0..4), cut in 0_usize..1 << 16,
    ) {
        let maps = maps(false);
        let mut cache = LowRankLayerCache::<f32>::new(&maps, window).unwrap();
        let (keys, values) = tokens(seed, n);
        append(&mut cache, &keys, &values);
        // Mostly in the header, where bytes matter.
        let mutate = |bytes: &mut Vec<u8>| {
            for &(at, byte) in &changes {
                let at = if at % 2 == 0 { at % 80 } else { at };
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            if cut % 3 == 0 {
                bytes.truncate(cut % (bytes.len() + 1));
            }
        };
        let mut bytes = cache.to_bytes();
        mutate(&mut bytes);
        if let Ok(mut cache) = LowRankLayerCache::<f32>::from_bytes(&bytes, &maps) {
            prop_assert_eq!(cache.to_bytes(), bytes);
            let queries = random::<f32>(seed, HEADS * GROUP * DIM);
            attend(&cache, Backend::Scalar, &Attention::default(), &queries);
            let (keys, values) = tokens(seed ^ 5, 3);
            append(&mut cache, &keys, &values);
            cache.truncate(n / 2);
        }
        let mut bytes = maps[0].to_bytes();
        mutate(&mut bytes);
        if let Ok(maps) = HeadMaps::from_bytes(&bytes) {
            prop_assert_eq!(maps.to_bytes(), bytes);
        }
    }
}

#[cfg(feature = "serde")]
#[test]
fn serde_carries_the_saved_bytes() {
    let maps = HeadMaps::new(Reduction::folded(4, 2).unwrap(), Reduction::folded(3, 3).unwrap());
    let json = serde_json::to_string(&maps).unwrap();
    assert_eq!(serde_json::from_str::<HeadMaps>(&json).unwrap(), maps);
    assert!(serde_json::from_str::<HeadMaps>("[1, 2, 3]").is_err());
}

/// A cache saved in the middle of decoding continues with the same bits at any number of threads, and with
/// the same values, up to rounding, on another backend.
#[test]
fn a_restored_cache_decodes_on() {
    let (window, maps) = (Window { sinks: 4, recent: 16, batch: 8 }, maps(false));
    let (keys, values) = tokens::<f16>(5, 200);
    let attention = Attention::scaled(0.7);
    let decode = |cache: &mut LowRankLayerCache<f16>, backend: Backend| -> Vec<f32> {
        (100..200)
            .flat_map(|t| {
                let row = |rows, len: usize| Rows::contiguous(rows, len).unwrap().slice(t..t + 1).unwrap();
                cache.append_with(backend, row(&keys, HEADS * DIM), row(&values, HEADS * DIM_V)).unwrap();
                attend(cache, backend, &attention, &random(t as u64, HEADS * GROUP * DIM))
            })
            .collect()
    };
    let mut cache = LowRankLayerCache::new(&maps, window).unwrap();
    append(&mut cache, &keys[..100 * HEADS * DIM], &values[..100 * HEADS * DIM_V]);
    let saved = (cache.to_bytes(), maps.iter().map(|maps| maps.to_bytes()).collect::<Vec<_>>());
    let expected = decode(&mut cache, Backend::Scalar);
    for backend in backends() {
        let mut first: Option<Vec<u32>> = None;
        for threads in [1, 2, 5] {
            let maps: Vec<_> =
                saved.1.iter().map(|bytes| Arc::new(HeadMaps::from_bytes(bytes).unwrap())).collect();
            let mut restored = LowRankLayerCache::from_bytes(&saved.0, &maps).unwrap();
            let out = on_threads(threads, || decode(&mut restored, backend));
            for (x, y) in out.iter().zip(&expected) {
                assert!((x - y).abs() < 1e-3, "{backend:?}, {threads} threads: {x} {y}");
            }
            assert_eq!(
                *first.get_or_insert_with(|| bits(&out)),
                bits(&out),
                "{backend:?}, {threads} threads"
            );
        }
    }
}

#[cfg(feature = "rayon")]
fn on_threads<T: Send>(threads: usize, run: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
}

#[cfg(not(feature = "rayon"))]
fn on_threads<T>(_: usize, run: impl FnOnce() -> T) -> T {
    run()
}

/// A batch is its sequences one by one, and a large group its queries one by one.
#[test]
fn a_batch_and_a_large_group_are_their_parts() {
    let (window, maps) = (Window { sinks: 2, recent: 4, batch: 1 }, maps(false));
    let caches: Vec<LowRankLayerCache<f32>> = [0, 3, 50]
        .into_iter()
        .map(|n| {
            let mut cache = LowRankLayerCache::new(&maps, window).unwrap();
            let (keys, values) = tokens(n as u64, n);
            append(&mut cache, &keys, &values);
            cache
        })
        .collect();
    let attention = Attention::scaled(0.7);
    let (queries_len, out_len) = (HEADS * GROUP * DIM, HEADS * GROUP * DIM_V);
    let queries = random::<f32>(9, 3 * queries_len);
    let mut out = vec![f32::NAN; 3 * out_len];
    let mut workspace = Workspace::default();
    let all: Vec<&LowRankLayerCache<f32>> = caches.iter().collect();
    let rows = Rows::contiguous(&queries, queries_len).unwrap();
    attend_batch_into(&all, &attention, rows, &mut workspace, &mut out).unwrap();
    for (i, cache) in caches.iter().enumerate() {
        let mut alone = vec![f32::NAN; out_len];
        let queries = rows.slice(i..i + 1).unwrap();
        cache.attend_into(&attention, queries, &mut workspace, &mut alone).unwrap();
        assert_eq!(bits(&alone), bits(&out[i * out_len..][..out_len]));
    }
    assert!(out[..out_len].iter().all(|&x| x == 0.0)); // no tokens
    let group = 130;
    let head = &caches[2].heads()[0];
    let queries = random::<f32>(4, group * DIM);
    let mut scratch = vec![0.0; head.scratch_len(1, group)];
    let (mut out, mut stats) = (vec![0.0; group * DIM_V], vec![SoftmaxStats::EMPTY; group]);
    head.attend_into(&attention, Rows::from(&queries[..]), &mut scratch, &mut out, &mut stats).unwrap();
    for (query, (out, stats)) in queries.chunks(DIM).zip(out.chunks(DIM_V).zip(&stats)) {
        let (mut alone, mut alone_stats) = (vec![0.0; DIM_V], [SoftmaxStats::EMPTY]);
        let query = Rows::from(query);
        head.attend_into(&attention, query, &mut scratch, &mut alone, &mut alone_stats).unwrap();
        for (x, y) in out.iter().zip(&alone).chain([(&stats.sum, &alone_stats[0].sum)]) {
            assert!((x - y).abs() < 1e-4 * (1.0 + y.abs()), "{x} {y}");
        }
    }
}

#[test]
fn bad_input_is_an_error() {
    let (window, maps) = (Window { sinks: 2, recent: 4, batch: 1 }, maps(false));
    let mut cache = LowRankLayerCache::<f32>::new(&maps, window).unwrap();
    let (keys, values) = tokens(1, 10);
    append(&mut cache, &keys, &values);
    let saved = cache.to_bytes();
    let (k, v) =
        (Rows::contiguous(&keys, HEADS * DIM).unwrap(), Rows::contiguous(&values, HEADS * DIM_V).unwrap());
    assert!(matches!(cache.append(v, k), Err(Error::Length { what: "row of keys", .. })));
    assert!(matches!(cache.append(k, v.slice(0..9).unwrap()), Err(Error::Length { what: "values", .. })));
    assert!(cache.append_heads(k, v).is_err());
    assert_eq!(cache.to_bytes(), saved);
    let mut workspace = Workspace::default();
    let mut run = |attention: &Attention, queries: usize, out: usize| {
        let queries = vec![0.5_f32; queries];
        cache.attend_into(attention, Rows::from(&queries[..]), &mut workspace, &mut vec![0.0; out])
    };
    let (queries, out) = (HEADS * GROUP * DIM, HEADS * GROUP * DIM_V);
    assert_eq!(run(&Attention::default(), queries, out), Ok(()));
    assert!(matches!(run(&Attention::default(), queries - 1, out), Err(Error::PartialRow { .. })));
    assert!(matches!(run(&Attention::default(), queries, out + 1), Err(Error::Length { .. })));
    assert!(matches!(run(&Attention::scaled(f32::NAN), queries, out), Err(Error::Attend(_))));
    assert_eq!(run(&Attention::default(), 0, 0), Ok(()));
    let many = vec![0.5_f32; 11 * queries];
    let many = Rows::contiguous(&many, queries).unwrap();
    assert_eq!(
        cache.attend_into(&Attention::default(), many, &mut Workspace::default(), &mut vec![0.0; 11 * out]),
        Err(Error::Attend(AttendError::Causal { queries: 11, tokens: 10 }))
    );
    let read = |bytes: &[u8]| LowRankLayerCache::<f32>::from_bytes(bytes, &maps);
    assert!(matches!(read(b"PQLC"), Err(Error::BadMagic { what: "a low-rank layer cache" })));
    assert!(matches!(read(&saved[..saved.len() - 1]), Err(Error::Truncated { .. })));
    assert!(matches!(read(&[&saved[..], &[0]].concat()), Err(Error::TrailingBytes { extra: 1, .. })));
    let mut newer = saved.clone();
    newer[4] = 9;
    assert!(matches!(read(&newer), Err(Error::Version { version: 9, .. })));
    let half = LowRankLayerCache::<f16>::from_bytes(&saved, &maps);
    assert!(matches!(half, Err(Error::BadField { what: "element type" })));
    let other = rotations().maps(&[[1, 1]; HEADS]).unwrap();
    let other = LowRankLayerCache::<f32>::from_bytes(&saved, &other);
    assert!(matches!(other, Err(Error::BadField { what: "id of the maps" })));
    assert!(matches!(LowRankLayerCache::<f32>::from_bytes(&saved, &maps[..2]), Err(Error::Length { .. })));
    // A token count that would need exabytes.
    let mut huge = saved;
    huge[52..60].fill(0x0f);
    assert!(read(&huge).is_err());
    assert!(LowRankLayerCache::<f32>::new(&[], window).is_err());
    let unlike = [
        maps[0].clone(),
        Arc::new(HeadMaps::new(Reduction::folded(4, 2).unwrap(), maps[0].values().clone())),
    ];
    assert!(matches!(LowRankLayerCache::<f32>::new(&unlike, window), Err(Error::Length { .. })));
    assert!(Reduction::folded(4, 0).is_err() && Reduction::folded(4, 5).is_err());
}

/// With a checksum every turned bit is found; without one most are read as other values.
#[test]
fn turned_bits_of_checked_bytes_are_errors() {
    let maps = maps(false);
    let mut cache = LowRankLayerCache::<f16>::new(&maps, Window { sinks: 2, recent: 8, batch: 4 }).unwrap();
    let (keys, values) = tokens(5, 30);
    append(&mut cache, &keys, &values);
    let of_cache = |bytes: &[u8]| Ok(LowRankLayerCache::<f16>::from_bytes(bytes, &maps)?.to_bytes());
    let of_maps = |bytes: &[u8]| Ok(HeadMaps::from_bytes(bytes)?.to_bytes());
    type Read<'a> = &'a dyn Fn(&[u8]) -> Result<Vec<u8>, Error>;
    let all: [(Vec<u8>, Vec<u8>, Read<'_>); 2] = [
        (cache.to_bytes(), cache.to_bytes_checked(), &of_cache),
        (maps[0].to_bytes(), maps[0].to_bytes_checked(), &of_maps),
    ];
    for (plain, checked, read) in &all {
        assert_eq!(checked.len(), plain.len() + 4);
        assert_eq!((read(plain).as_ref(), read(checked).as_ref()), (Ok(plain), Ok(plain)));
        for bit in (0..8 * checked.len()).filter(|bit| *bit < 256 || bit % 13 == 0) {
            let mut changed = checked.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&changed).is_err(), "bit {bit} of {}", 8 * checked.len());
        }
        let mut changed = checked.clone();
        changed[plain.len() - 1] ^= 1;
        assert!(matches!(read(&changed), Err(Error::BadChecksum { .. })));
        assert!((0..checked.len()).all(|len| read(&checked[..len]).is_err()));
    }
}
