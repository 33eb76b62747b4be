//! The owning caches: attention on sinks, codes and window is that of a plain softmax in f64, and nothing
//! depends on how tokens were divided among appends, on the layout, on threads, or on having been saved.

use std::sync::Arc;

use half::{bf16, f16};
use pq_core::*;
use proptest::prelude::*;

use super::support::{backends, random};

const HEADS: usize = 3;
const GROUP: usize = 2;
const DIM: usize = 8;
const DIM_V: usize = 6;

fn books() -> Vec<Arc<HeadBooks>> {
    let shapes = [PqShape::new(DIM, 4, 4).unwrap(), PqShape::new(DIM_V, 2, 5).unwrap()];
    let book =
        |shape: PqShape, seed| CodebookBuf::new(shape, &random::<f32>(seed, shape.codebook_len())).unwrap();
    (0..HEADS as u64).map(|h| Arc::new(HeadBooks::new(book(shapes[0], h), book(shapes[1], h + 9)))).collect()
}

/// `n` tokens of all heads, tokens first.
fn tokens<E: Element>(seed: u64, n: usize) -> (Vec<E>, Vec<E>) {
    (random(seed, n * HEADS * DIM), random(seed ^ 1, n * HEADS * DIM_V))
}

fn append<E: Element>(cache: &mut LayerCache<E>, keys: &[E], values: &[E]) {
    let keys = Rows::contiguous(keys, HEADS * DIM).unwrap();
    cache.append(keys, Rows::contiguous(values, HEADS * DIM_V).unwrap()).unwrap();
}

fn attend<E: Element>(cache: &LayerCache<E>, backend: Backend, queries: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; HEADS * GROUP * DIM_V];
    let (queries, workspace) = (Rows::from(queries), &mut Workspace::default());
    attend_batch_into_with(backend, &[cache], &Attention::scaled(0.7), queries, workspace, &mut out).unwrap();
    out
}

/// Attention in f64 of a query at `position` over head `h`'s tokens: exact sinks and window, decoded rows in
/// between.
fn expected<E: Element>(
    cache: &HeadCache<E>,
    h: usize,
    [keys, values]: [&[E]; 2],
    queries: &[f32],
    attention: &Attention,
    position: usize,
) -> Vec<f64> {
    let end = cache.len().min(position + 1);
    let seen = attention.window.map_or(0, |window| (position + 1).saturating_sub(window))..end;
    let column = |rows: &[E], dim: usize| -> Vec<f32> {
        rows.chunks_exact(HEADS * dim)
            .flat_map(|row| row[h * dim..][..dim].iter().map(|x| x.to_f32()))
            .collect()
    };
    let (mut keys, mut values) = (column(keys, DIM), column(values, DIM_V));
    let middle = cache.sinks()..cache.sinks() + cache.compressed();
    let coded = cache.store().books();
    let (key_codes, value_codes) = (cache.store().keys(), cache.store().values());
    decode_into(&coded.keys(), &key_codes, 0, &mut keys[middle.start * DIM..middle.end * DIM]).unwrap();
    decode_into(&coded.values(), &value_codes, 0, &mut values[middle.start * DIM_V..middle.end * DIM_V])
        .unwrap();
    let mut out = vec![];
    for query in queries[h * GROUP * DIM..][..GROUP * DIM].chunks_exact(DIM) {
        let score = |t: usize| -> f64 {
            let products = query.iter().zip(&keys[t * DIM..]).map(|(&q, &k)| f64::from(q) * f64::from(k));
            let score = f64::from(attention.scale) * products.sum::<f64>();
            attention.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let weights: Vec<f64> = seen.clone().map(|t| score(t).exp()).collect();
        let sum: f64 = weights.iter().sum();
        out.extend((0..DIM_V).map(|d| {
            let values = values.iter().skip(seen.start * DIM_V + d).step_by(DIM_V);
            weights.iter().zip(values).map(|(w, &v)| w * f64::from(v)).sum::<f64>()
                / sum.max(f64::MIN_POSITIVE)
        }));
    }
    out
}

fn check<E: Element>(cache: &LayerCache<E>, keys: &[E], values: &[E], queries: &[f32]) {
    for backend in backends() {
        let out = attend(cache, backend, queries);
        for (h, out) in out.chunks_exact(GROUP * DIM_V).enumerate() {
            let (attention, position) = (Attention::scaled(0.7), cache.len());
            let expected = expected(&cache.heads()[h], h, [keys, values], queries, &attention, position);
            for (x, y) in out.iter().zip(&expected) {
                assert!((f64::from(*x) - y).abs() < 2e-4, "{backend:?}, head {h}: {x} {y}");
            }
        }
    }
}

fn windows() -> impl Strategy<Value = Window> {
    (0_usize..6, 0_usize..20, 0_usize..70).prop_map(|(sinks, recent, batch)| Window { sinks, recent, batch })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn attention_is_over_sinks_codes_and_window(
        window in windows(), seed: u64, n in 0_usize..300, first in 0_usize..300, kept in 0_usize..400,
    ) {
        let (keys, values) = tokens::<f32>(seed, n);
        let queries = random::<f32>(seed ^ 2, HEADS * GROUP * DIM);
        let mut cache = LayerCache::new(&books(), window).unwrap();
        let first = first.min(n);
        append(&mut cache, &keys[..first * HEADS * DIM], &values[..first * HEADS * DIM_V]);
        // Some are rejected again.
        cache.truncate(kept);
        let kept = kept.min(first);
        prop_assert_eq!(cache.len(), kept);
        let again = |rows: &[f32], dim: usize| [&rows[..kept * dim], &rows[first * dim..]].concat();
        let (keys, values) = (again(&keys, HEADS * DIM), again(&values, HEADS * DIM_V));
        append(&mut cache, &keys[kept * HEADS * DIM..], &values[kept * HEADS * DIM_V..]);
        prop_assert_eq!(cache.len(), kept + n - first);
        let head = &cache.heads()[0];
        prop_assert_eq!(head.sinks(), window.sinks.min(cache.len()));
        prop_assert!(head.recent() < window.recent + window.batch.max(1));
        let rows = (head.sinks() + head.recent()) * (DIM + DIM_V) * 4;
        let codes = head.compressed().div_ceil(BLOCK) * 8 * (4 * 4 + 2 * 5);
        prop_assert_eq!(cache.size(), HEADS * (rows + codes));
        check(&cache, &keys, &values, &queries);
    }

    #[test]
    fn several_query_tokens_attend_causally(
        window in windows(),
        seed: u64,
        n in 1_usize..300,
        query_tokens in prop_oneof![Just(1_usize), 2_usize..40],
        sees in prop::option::of(1_usize..200),
        softcap in prop::option::of(0.5_f32..4.0),
        gap in 0_usize..3,
    ) {
        let query_tokens = query_tokens.min(n);
        let (keys, values) = tokens::<f32>(seed, n);
        let books = books();
        let mut caches = [LayerCache::new(&books, window).unwrap(), LayerCache::new(&books, window).unwrap()];
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
                let len = cache.len();
                let rows = [&keys[..len * HEADS * DIM], &values[..len * HEADS * DIM_V]];
                let expected = expected(&cache.heads()[h], h, rows, queries.row(row), &attention, position);
                for (x, y) in out.iter().zip(&expected) {
                    prop_assert!((f64::from(*x) - y).abs() < 2e-4, "{:?}, row {}: {} {}", backend, i, x, y);
                }
            }
        }
    }

    #[test]
    fn the_state_depends_on_the_tokens_alone(
        window in windows(), seed: u64, cuts in prop::collection::vec(1_usize..90, 1..8),
    ) {
        let n = cuts.iter().sum();
        let (keys, values) = tokens::<f16>(seed, n);
        let books = books();
        let mut whole = LayerCache::new(&books, window).unwrap();
        append(&mut whole, &keys, &values);
        let empty = || LayerCache::new(&books, window).unwrap();
        let (mut parts, mut one_by_one, mut restored, mut at) = (empty(), empty(), empty(), 0);
        for cut in cuts {
            let [k_row, v_row] = [HEADS * DIM, HEADS * DIM_V];
            let (k, v) = (&keys[at * k_row..(at + cut) * k_row], &values[at * v_row..(at + cut) * v_row]);
            append(&mut parts, k, v);
            k.chunks(HEADS * DIM).zip(v.chunks(HEADS * DIM_V)).for_each(|(k, v)| append(&mut one_by_one, k, v));
            restored = LayerCache::from_bytes(&restored.to_bytes(), &books).unwrap();
            append(&mut restored, k, v);
            at += cut;
        }
        let mut heads_first = LayerCache::new(&books, window).unwrap();
        let transposed = |rows: &[f16], dim: usize| -> Vec<f16> {
            (0..HEADS).flat_map(|h| (0..n).flat_map(move |t| rows[(t * HEADS + h) * dim..][..dim].to_vec())).collect()
        };
        let (k, v) = (transposed(&keys, DIM), transposed(&values, DIM_V));
        heads_first.append_heads(Rows::contiguous(&k, DIM).unwrap(), Rows::contiguous(&v, DIM_V).unwrap()).unwrap();
        let queries = random::<f32>(seed ^ 2, HEADS * GROUP * DIM);
        for other in [&parts, &one_by_one, &restored, &heads_first, &whole.clone()] {
            prop_assert_eq!(other.to_bytes(), whole.to_bytes());
            for backend in backends() {
                let bits = |cache| attend(cache, backend, &queries).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                prop_assert_eq!(bits(other), bits(&whole));
            }
        }
        check(&whole, &keys, &values, &queries);
    }
}

#[test]
fn a_batch_gives_the_bits_of_its_sequences_on_any_number_of_threads() {
    let (books, window) = (books(), Window { sinks: 2, recent: 8, batch: 4 });
    let caches: Vec<LayerCache<f32>> = [0, 1, 70, 200]
        .into_iter()
        .map(|n| {
            let mut cache = LayerCache::new(&books, window).unwrap();
            let (keys, values) = tokens(n as u64, n);
            append(&mut cache, &keys, &values);
            cache
        })
        .collect();
    let queries = random::<f32>(3, caches.len() * HEADS * GROUP * DIM);
    let each = queries.chunks(HEADS * GROUP * DIM);
    let singles: Vec<f32> = caches
        .iter()
        .zip(each)
        .flat_map(|(cache, queries)| attend(cache, Backend::detect(), queries))
        .collect();
    assert!(singles[..HEADS * GROUP * DIM_V].iter().all(|&x| x == 0.0), "no tokens");
    let batch = || {
        let mut out = vec![f32::NAN; singles.len()];
        let caches: Vec<_> = caches.iter().collect();
        let queries = Rows::contiguous(&queries, HEADS * GROUP * DIM).unwrap();
        let attention = Attention::scaled(0.7);
        attend_batch_into(&caches, &attention, queries, &mut Workspace::default(), &mut out).unwrap();
        out
    };
    assert_eq!(batch(), singles);
    #[cfg(feature = "rayon")]
    for threads in [1, 2, 5, 13] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(batch), singles, "{threads} threads");
    }
}

#[test]
fn bytes_from_elsewhere_are_errors() {
    let (books, window) = (books(), Window { sinks: 2, recent: 8, batch: 4 });
    let mut cache = LayerCache::<f32>::new(&books, window).unwrap();
    let (keys, values) = tokens(5, 30);
    append(&mut cache, &keys, &values);
    let saved = cache.to_bytes();
    let read = |bytes: &[u8]| LayerCache::<f32>::from_bytes(bytes, &books);
    for len in 0..saved.len() {
        assert!(read(&saved[..len]).is_err(), "{len}");
    }
    assert!(matches!(read(&[&saved[..], &[0]].concat()), Err(Error::TrailingBytes { extra: 1, .. })));
    for at in 0..saved.len() {
        for flip in [1, 0x80] {
            let mut changed = saved.clone();
            changed[at] ^= flip;
            if let Ok(mut cache) = read(&changed) {
                cache.truncate(20);
                append(&mut cache, &keys, &values);
                assert_eq!(cache.len(), 50);
            }
        }
    }
    let half = LayerCache::<f16>::from_bytes(&saved, &books);
    assert!(matches!(half, Err(Error::BadField { what: "element type" })));
    let swapped: Vec<_> = books.iter().rev().cloned().collect();
    let other = LayerCache::<f32>::from_bytes(&saved, &swapped);
    assert!(matches!(other, Err(Error::BadField { what: "codebook id" })));
    assert!(matches!(
        LayerCache::<f32>::from_bytes(&saved, &books[1..]),
        Err(Error::Length { what: "heads", .. })
    ));

    let saved = books[0].to_bytes::<f32>();
    assert_eq!(HeadBooks::from_bytes(&saved).unwrap().id(), books[0].id());
    assert!(books.iter().skip(1).all(|other| other.id() != books[0].id()));
    for len in 0..saved.len() {
        assert!(HeadBooks::from_bytes(&saved[..len]).is_err(), "{len}");
    }
}

/// With a checksum every turned bit is found; without one most are read as other values.
#[test]
fn turned_bits_of_checked_bytes_are_errors() {
    let (books, window) = (books(), Window { sinks: 2, recent: 8, batch: 4 });
    let mut cache = LayerCache::<f16>::new(&books, window).unwrap();
    let (keys, values) = tokens(5, 30);
    append(&mut cache, &keys, &values);
    let codes = cache.heads()[0].store().keys();
    let codes = CodesBuf::from_packed(codes.shape(), codes.n(), codes.bytes().to_vec()).unwrap();
    let book = CodebookBuf::new(books[0].keys().shape(), &vec![0.5; books[0].keys().shape().codebook_len()]);
    let book = book.unwrap();
    type Read<'a> = Box<dyn Fn(&[u8]) -> Result<Vec<u8>, Error> + 'a>;
    let of_cache = |bytes: &[u8]| Ok(LayerCache::<f16>::from_bytes(bytes, &books)?.to_bytes());
    let of_books = |bytes: &[u8]| Ok(HeadBooks::from_bytes(bytes)?.to_bytes::<f32>());
    let all: [(Vec<u8>, Vec<u8>, Read<'_>); 4] = [
        (cache.to_bytes(), cache.to_bytes_checked(), Box::new(of_cache)),
        (books[0].to_bytes::<f32>(), books[0].to_bytes_checked::<f32>(), Box::new(of_books)),
        (
            codes.to_bytes(),
            codes.to_bytes_checked(),
            Box::new(|bytes| Ok(CodesBuf::from_bytes(bytes)?.to_bytes())),
        ),
        (
            book.to_bytes::<f32>(),
            book.to_bytes_checked::<f32>(),
            Box::new(|bytes| Ok(CodebookBuf::from_bytes(bytes)?.to_bytes::<f32>())),
        ),
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
        assert!(read(&[&checked[..], &[0]].concat()).is_err());
    }
}

#[test]
fn arguments_that_do_not_fit_change_nothing() {
    let books = books();
    let mut cache = LayerCache::<f32>::new(&books, Window { sinks: 2, recent: 8, batch: 4 }).unwrap();
    let (keys, values) = tokens::<f32>(5, 30);
    let [k, v] =
        [(&keys, HEADS * DIM), (&values, HEADS * DIM_V)].map(|(x, row)| Rows::contiguous(x, row).unwrap());
    assert!(matches!(cache.append(k, k), Err(Error::Length { what: "row of values", .. })));
    assert!(matches!(cache.append(k, v.slice(0..29).unwrap()), Err(Error::Length { what: "values", .. })));
    assert!(matches!(cache.append_heads(k, v), Err(Error::Length { what: "row of keys", .. })));
    let narrow = Rows::contiguous(&keys[..4 * DIM], DIM).unwrap();
    assert!(matches!(cache.append_heads(narrow, narrow), Err(Error::PartialRow { what: "keys", .. })));
    assert!(cache.is_empty());
    assert!(matches!(
        LayerCache::<f32>::new(&[], Window { sinks: 0, recent: 0, batch: 0 }),
        Err(Error::Zero { .. })
    ));
    let shapes = [PqShape::new(DIM, 4, 4).unwrap(); 2];
    let none = HeadBooks::train_layer(k, k, 0, shapes, &TrainOptions::default()).map(drop);
    assert_eq!(none, Err(Error::Zero { what: "number of heads" }));
    let mut out = [7.0; HEADS * DIM_V];
    let mut workspace = Workspace::default();
    let mut attend = |attention: Attention, queries: &[f32], out: &mut [f32]| {
        cache.attend_into(&attention, Rows::from(queries), &mut workspace, out)
    };
    let one = Attention::default();
    assert!(matches!(attend(one, &keys[..5], &mut out), Err(Error::PartialRow { .. })));
    assert!(matches!(attend(one, &keys[..2 * HEADS * DIM], &mut out), Err(Error::Length { .. })));
    assert_eq!(attend(one, &[], &mut []), Ok(()));
    let query = &keys[..HEADS * DIM];
    for (attention, what) in [
        (Attention::scaled(f32::NAN), "scale"),
        (Attention { softcap: Some(-1.0), ..one }, "softcap"),
        (Attention { softcap: Some(f32::INFINITY), ..one }, "softcap"),
    ] {
        let error = attend(attention, query, &mut out);
        assert_eq!(error, Err(Error::Attend(AttendError::Attention { what })));
    }
    let nothing = Attention { window: Some(0), ..one };
    assert_eq!(attend(nothing, query, &mut out), Err(Error::Zero { what: "window" }));
    let two = Rows::contiguous(&keys[..2 * HEADS * DIM], HEADS * DIM).unwrap();
    assert_eq!(
        cache.attend_into(&one, two, &mut workspace, &mut [0.0; 2 * HEADS * DIM_V]),
        Err(Error::Attend(AttendError::Causal { queries: 2, tokens: 0 }))
    );
    // No sequences have no outputs.
    let none = Rows::contiguous(&keys[..0], HEADS * DIM).unwrap();
    assert_eq!(attend_batch_into::<HeadCodes, f32, f32>(&[], &one, none, &mut workspace, &mut []), Ok(()));
    assert!(matches!(
        attend_batch_into::<HeadCodes, f32, f32>(&[], &one, none, &mut workspace, &mut out),
        Err(Error::Length { what: "out", .. })
    ));
    assert_eq!(out, [7.0; HEADS * DIM_V]);
    let head = &cache.heads()[0];
    let (mut scratch, mut stats) = (vec![0.0; head.scratch_len(1, 1) - 1], [SoftmaxStats::EMPTY]);
    let query = Rows::from(&keys[..DIM]);
    let short = head.attend_into(&one, query, &mut scratch, &mut out[..DIM_V], &mut stats);
    assert!(matches!(short, Err(Error::TooShort { .. })));

    // A head without queries has nothing to do, with coded tokens as without.
    let query = Rows::from(&keys[..0]);
    for _ in 0..2 {
        assert_eq!(cache.heads()[0].attend_into(&one, query, &mut [], &mut [], &mut []), Ok(()));
        cache.append(k, v).unwrap();
    }
    assert!(cache.heads()[0].compressed() > 0);
}

#[test]
fn a_layer_of_any_element_type_is_the_layer_of_that_type() {
    fn check<E: Element>(element: ElementType, other: ElementType)
    where
        for<'a> AnyRows<'a>: From<Rows<'a, E>>,
    {
        let (window, (keys, values)) = (Window { sinks: 1, recent: 5, batch: 4 }, tokens::<E>(3, 40));
        let (k, v) = (
            Rows::contiguous(&keys, HEADS * DIM).unwrap(),
            Rows::contiguous(&values, HEADS * DIM_V).unwrap(),
        );
        let mut layer = LayerCache::<E>::new(&books(), window).unwrap();
        let mut any = AnyLayer::<HeadCodes>::new(element, &books(), window).unwrap();
        layer.append(k, v).unwrap();
        any.append(k.into(), v.into()).unwrap();
        let mut foreign = AnyLayer::<HeadCodes>::new(other, &books(), window).unwrap();
        let refused = foreign.append(k.into(), v.into()).map(drop).unwrap_err();
        assert_eq!((refused.code(), foreign.len()), (105, 0));
        layer.truncate(37);
        any.truncate(37);
        assert_eq!((any.element(), any.heads(), any.dims()), (element, HEADS, [DIM, DIM_V]));
        assert_eq!((any.len(), any.size(), any.to_bytes()), (37, layer.size(), layer.to_bytes()));

        let restored = AnyLayer::<HeadCodes>::from_bytes(&layer.to_bytes_checked(), &books()).unwrap();
        assert_eq!(restored.element(), element);
        let queries = random::<f32>(9, HEADS * GROUP * DIM);
        let mut out = vec![0.0; HEADS * GROUP * DIM_V];
        let queries_any = AnyRows::F32(Rows::from(&queries[..]));
        restored
            .attend_into(&Attention::scaled(0.7), queries_any, &mut Workspace::default(), &mut out)
            .unwrap();
        assert_eq!(out, attend(&layer, Backend::detect(), &queries));
    }
    check::<f32>(ElementType::F32, ElementType::F16);
    check::<f16>(ElementType::F16, ElementType::Bf16);
    check::<bf16>(ElementType::Bf16, ElementType::F32);
}

/// One head's tokens: (n, DIM) and (n, DIM_V).
fn head_rows(n: usize) -> (Vec<f32>, Vec<f32>) {
    (random(31, n * DIM), random(32, n * DIM_V))
}

fn coded(books: &Arc<HeadBooks>, keys: &[f32], values: &[f32]) -> HeadCodes {
    let mut codes = HeadCodes::new(books.clone());
    let keys = Rows::contiguous(keys, DIM).unwrap();
    codes.append(Backend::detect(), keys, Rows::contiguous(values, DIM_V).unwrap()).unwrap();
    codes
}

#[test]
fn codes_without_a_cache_attend_to_any_range_as_a_cache_with_a_sliding_window_does() {
    let (books, n) = (&books()[0], 150);
    let (keys, values) = head_rows(n);
    let codes = coded(books, &keys, &values);
    let mut cache = HeadCache::<f32>::new(books.clone(), Window { sinks: 0, recent: 0, batch: 1 });
    cache.append(Rows::contiguous(&keys, DIM).unwrap(), Rows::contiguous(&values, DIM_V).unwrap()).unwrap();
    assert_eq!((cache.compressed(), cache.size()), (codes.len(), codes.size()));
    let queries: Vec<f32> = random(33, GROUP * DIM);
    for (backend, first) in backends().flat_map(|backend| [0, 1, 63, 64, 65, 149].map(|t| (backend, t))) {
        let attention = Attention { window: Some(n - first), ..Attention::scaled(1.0) };
        let mut scratch = vec![f32::NAN; cache.scratch_len(1, GROUP)];
        let (mut of_codes, mut of_cache) = ([0.0; GROUP * DIM_V], [0.0; GROUP * DIM_V]);
        let mut stats = [[SoftmaxStats::EMPTY; GROUP]; 2];
        let out = (&mut of_codes, &mut stats[0]);
        codes.attend_into(backend, &queries, first..n, None, &mut scratch, out.0, out.1).unwrap();
        let (out, rows) = ((&mut of_cache, &mut stats[1]), Rows::from(&queries[..]));
        cache.attend_into_with(backend, &attention, rows, &mut scratch, out.0, out.1).unwrap();
        assert_eq!(stats[0], stats[1]);
        assert_eq!(of_codes, of_cache, "{backend:?} from {first}");
    }
}

#[test]
fn codes_know_how_well_they_fit() {
    let books = &books()[0];
    let (keys, values) = head_rows(90);
    let mut codes = coded(books, &keys[..60 * DIM], &values[..60 * DIM_V]);
    assert_eq!(codes.fits(), None); // of these codebooks, nothing is expected
    let expected = kv_attend::owner::Pair::new(0.25, 0.5);
    let books = &Arc::new(HeadBooks::clone(books).with_expected_errors(expected));
    codes = coded(books, &keys[..60 * DIM], &values[..60 * DIM_V]);
    codes.truncate(50); // those that are dropped count, too
    let more = [Rows::contiguous(&keys[60 * DIM..], DIM), Rows::contiguous(&values[60 * DIM_V..], DIM_V)];
    let [more_keys, more_values] = more.map(Result::unwrap);
    codes.append(Backend::detect(), more_keys, more_values).unwrap();
    let all = coded(books, &keys, &values);
    let fits = codes.fits().unwrap();
    for (fit, (book, codes, rows, expected)) in fits
        .iter()
        .zip([(books.keys(), all.keys(), &keys, 0.25), (books.values(), all.values(), &values, 0.5)])
    {
        let mut decoded = vec![0.0; rows.len()];
        decode_into(&book, &codes, 0, &mut decoded).unwrap();
        let sum = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let lost = sum(&mut rows.iter().zip(&decoded).map(|(x, decoded)| x - decoded));
        let found = lost / sum(&mut rows.iter().copied());
        assert!((fit.found - found).abs() < 1e-6 * found, "{fit:?}: {found}");
        assert_eq!((fit.expected, fit.tokens), (expected, 90));
    }
    codes.truncate(0);
    assert_eq!(codes.fits().unwrap().keys.tokens, 0);
    assert_eq!(codes.fits().unwrap().keys.found, 0.0);
}

#[test]
fn trained_books_expect_the_error_of_other_vectors() {
    let rows: Vec<f32> = random(34, 4000 * DIM);
    let rows = Rows::contiguous(&rows, DIM).unwrap();
    let (some, others) = (rows.slice(0..800).unwrap(), rows.slice(800..4000).unwrap());
    let shape = PqShape::new(DIM, 4, 6).unwrap();
    for max_vectors in [None, Some(600)] {
        let options = TrainOptions { max_vectors, ..TrainOptions::default() };
        let books = HeadBooks::train_layer(some, some, 1, [shape; 2], &options).unwrap();
        let mut codes = HeadCodes::new(books[0].clone());
        codes.append(Backend::detect(), others, others).unwrap();
        let fits = codes.fits().unwrap();
        assert!(fits.iter().all(|fit| (fit.ratio() - 1.1).abs() < 0.1), "{fits:?}");
    }
}

#[test]
fn arguments_that_do_not_fit_codes_are_errors() {
    let (keys, values) = head_rows(70);
    let mut codes = coded(&books()[0], &keys, &values);
    let rows = |n: usize, dim: usize| Rows::contiguous(&keys[..n * dim], dim).unwrap();
    for (keys, values) in [(rows(2, DIM), rows(1, DIM_V)), (rows(1, DIM + 1), rows(1, DIM_V))] {
        assert!(codes.append(Backend::detect(), keys, values).is_err());
    }
    assert!(codes.append(Backend::detect(), rows(1, DIM), rows(1, DIM_V + 1)).is_err());
    assert_eq!((codes.len(), codes.values().n()), (70, 70));
    let attend = |q: usize, range, softcap, scratch: usize, out: usize| {
        let (mut scratch, mut out) = (vec![0.0; scratch], vec![7.0; out]);
        let (stats, queries) = (&mut [SoftmaxStats::EMPTY; 1], &vec![1.0; q]);
        let done = codes.attend_into(Backend::Scalar, queries, range, softcap, &mut scratch, &mut out, stats);
        assert!(done.is_ok() || (out.iter().all(|&x| x == 7.0) && stats[0] == SoftmaxStats::EMPTY));
        done.is_ok()
    };
    let enough = coded(&books()[0], &[], &[]).scratch_len(1);
    assert!(attend(DIM, 0..70, None, enough, DIM_V) && attend(DIM, 70..70, None, enough, DIM_V));
    assert!(attend(DIM, 3..70, Some(2.0), enough, DIM_V));
    assert!(!attend(DIM + 1, 0..70, None, enough, DIM_V) && !attend(DIM, 0..71, None, enough, DIM_V));
    assert!(!attend(DIM, 3..70, None, enough - 1, DIM_V) && !attend(DIM, 0..70, None, enough, DIM_V + 1));
    assert!(!attend(DIM, 0..70, Some(-1.0), enough, DIM_V));
}
