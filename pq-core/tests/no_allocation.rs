//! A decode step does not allocate: lookup tables, scan, search, re-ranking, attention on codes, on the
//! window and on both (hybrid), the scores of a rotated mean, encoding and decoding of a token.

#![allow(clippy::unwrap_used)]

use allocation_counter::measure;
use pq_core::*;

#[test]
fn a_decode_step_does_not_allocate() {
    let (n, group, dim) = (3000, 4, 64);
    for nbits in [4, 6, 8, 12] {
        let shape = PqShape::new(dim, 16, nbits).unwrap();
        let centroids: Vec<f32> = (0..shape.codebook_len()).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut storage = vec![0.0; shape.codebook_storage_len()];
        let codebook = Codebook::new(shape, &centroids, &mut storage).unwrap();
        let mut bytes: Vec<u8> = (0..shape.codes_len(n)).map(|i| (i * 31) as u8).collect();
        let queries: Vec<f32> = (0..group * dim).map(|i| (i as f32 * 0.11).cos() / 8.0).collect();
        let window: Vec<f32> = (0..64 * dim).map(|i| (i as f32 * 0.23).sin()).collect();
        let mut tables = vec![0.0; group * shape.lut_len()];
        let mut integers = vec![0; shape.quantized_lut_len(LutPrecision::U8)];
        let mut scratch = vec![0.0; attend_scratch_len(shape, group)];
        let (mut floats, mut scores) = (vec![0.0; SearchScratch::len(group, n)], vec![0.0; n]);
        let (mean, frequencies) = (vec![0.5; dim], vec![0.25; dim / 2]);
        let mean = RopeMeanBuf::new(&mean, &frequencies).unwrap();
        let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
        let mut hybrid_floats = vec![0.0; HybridScratch::len(shape, group, n)];
        let mut hybrid_stats = vec![SoftmaxStats::EMPTY; group];
        let search = Search { k: n / 10, sinks: 4, recent: 64, rule: GroupRule::SumOfSoftmax };
        let mut tokens = vec![0; search.found(n)];

        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            let allocated = measure(|| {
                encode_into_with(backend, &codebook, &window[..dim], n - 1, &mut bytes).unwrap();
                let codes = Codes::new(shape, n, &bytes).unwrap();
                let luts = lut_into_with(backend, &codebook, &queries, &mut tables).unwrap();
                let lut = luts.lut(0);
                let quantized =
                    QuantizedLut::new_with(backend, &lut, LutPrecision::U8, &mut integers).unwrap();
                scan_quantized_into_with(backend, &quantized, &codes, &mut scores).unwrap();
                let mut found = SearchScratch::new(n, &mut floats, &mut stats).unwrap();
                search_into_with(backend, &luts, &codes, &search, &mut found, &mut tokens).unwrap();
                let mut found = SearchScratch::new(64, &mut floats, &mut stats).unwrap();
                let rerank = Rerank { k: 8, rule: search.rule };
                rerank_into_with(backend, &queries, &window, &rerank, &mut found, &mut tokens).unwrap();
                mean.view().scores_into_with(backend, &queries[..dim], 5, &mut scores).unwrap();
                decode_into(&codebook, &codes, n - 1, &mut out[..dim]).unwrap();
                out.fill(0.0);
                stats.fill(SoftmaxStats::EMPTY);
                let coded = CodedTokens::new(codes, codes, codebook).unwrap();
                attend_into_with(backend, &luts, &coded, &mut scratch, &mut out, &mut stats).unwrap();
                let hybrid = Hybrid { rows: RowBudget::Share(0.01), ..Hybrid::default() };
                let mut step = HybridScratch::new(shape, n, &mut hybrid_floats, &mut hybrid_stats).unwrap();
                let k =
                    hybrid_select_into_with(backend, &luts, &coded, &hybrid, &mut step, &mut tokens).unwrap();
                hybrid_attend_into_with(backend, &coded, &tokens[..k], &mut step, &mut out, &mut stats)
                    .unwrap();
                let window = ExactTokens::contiguous(&window, dim, &window, dim).unwrap();
                let (attention, queries) = (Attention::default(), Rows::from(&queries[..]));
                attend_exact_into_with(
                    backend,
                    &attention,
                    queries,
                    &window,
                    &mut scores,
                    &mut out,
                    &mut stats,
                )
                .unwrap();
            });
            assert_eq!(allocated.count_total, 0, "{backend:?} at {nbits} bits");
        }
    }
}

/// With feature `rayon` the thread pool allocates.
#[cfg(not(feature = "rayon"))]
#[test]
fn a_cache_attends_without_allocating() {
    let (heads, group, dim, n) = (2, 4, 16, 300);
    let shape = PqShape::new(dim, 4, 6).unwrap();
    let rows: Vec<f32> = (0..n * heads * dim).map(|i| (i as f32 * 0.37).sin()).collect();
    let rows = Rows::contiguous(&rows, heads * dim).unwrap();
    let options = TrainOptions { iterations: 2, ..Default::default() };
    let books = HeadBooks::train_layer(rows, rows, heads, [shape; 2], &options).unwrap();
    let mut cache = LayerCache::new(&books, Window { sinks: 4, recent: 32, batch: 16 }).unwrap();
    cache.append(rows, rows).unwrap();
    let (attention, queries) = (Attention::default(), vec![0.25_f32; heads * group * dim]);
    let (mut workspace, mut out) = (Workspace::default(), vec![0.0; queries.len()]);
    let queries = Rows::contiguous(&queries, queries.len()).unwrap();
    cache.attend_into(&attention, queries, &mut workspace, &mut out).unwrap();
    let allocated = measure(|| {
        cache.attend_into(&attention, queries, &mut workspace, &mut out).unwrap();
    });
    assert_eq!(allocated.count_total, 0);
}

/// The same with scalar codes.
#[cfg(not(feature = "rayon"))]
#[test]
fn a_cache_of_scalar_codes_attends_without_allocating() {
    use pq_core::sq::{HeadTransform, Shape, TransformParts};
    let (group, dim, n) = (4, 16, 300);
    let shape = Shape::uniform(dim, 2).unwrap();
    let square = vec![0.1; dim * dim];
    let transform = HeadTransform::new(&TransformParts {
        frequencies: &[0.1; 8],
        mean: &[1.0; 16],
        basis: &square,
        dual: &square,
        keys: shape,
        values: shape,
        block: 64,
        mean_error: true,
    });
    let rows: Vec<f32> = (0..n * dim).map(|i| (i as f32 * 0.37).sin()).collect();
    let rows = Rows::contiguous(&rows, dim).unwrap();
    let window = Window { sinks: 4, recent: 32, batch: 1 };
    let mut cache = sq::LayerCache::new(&[transform.unwrap().into()], window).unwrap();
    cache.append(rows, rows).unwrap();
    let (attention, queries) = (Attention::default(), vec![0.25_f32; group * dim]);
    let (mut workspace, mut out) = (Workspace::default(), vec![0.0; queries.len()]);
    let queries = Rows::contiguous(&queries, queries.len()).unwrap();
    cache.attend_into(&attention, queries, &mut workspace, &mut out).unwrap();
    let allocated = measure(|| {
        cache.attend_into(&attention, queries, &mut workspace, &mut out).unwrap();
    });
    assert_eq!(allocated.count_total, 0);
}
