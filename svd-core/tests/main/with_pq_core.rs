//! Both crates' names in one scope; their partial results add to one softmax. Every shared name is used here
//! and is one item of `kv-attend`, except `Error`, which each crate defines.

use std::sync::Arc;

use pq_core::*;
use svd_core::*;

#[test]
fn coded_and_low_rank_parts_are_one_softmax() {
    let dim = 4;
    // Two centroids a subspace, and tokens that are centroids: their codes are exact.
    let shape = PqShape::new(dim, 2, 1).unwrap();
    let book = CodebookBuf::new(shape, &[0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 1.0, -1.0]).unwrap();
    let coded = [0.0_f32, 1.0, 1.0, -1.0, 1.0, 0.0, 0.5, 0.5, 1.0, 0.0, 1.0, -1.0];
    let mut bytes = vec![0; shape.codes_len(3)];
    encode_into(&book.view(), &coded, 0, &mut bytes).unwrap();
    let codes = Codes::new(shape, 3, &bytes).unwrap();
    let exact = [0.3_f32, -0.2, 0.9, 0.4, 0.1, 0.8, -0.7, 0.2];
    let query = [0.7_f32, -0.4, 0.2, 0.9];

    let (mut out, mut stats) = (vec![0.0; dim], [SoftmaxStats::default()]);
    let mut tables = vec![0.0; shape.lut_len()];
    let luts = lut_into(&book.view(), &query, &mut tables).unwrap();
    let mut scratch = vec![0.0; attend_scratch_len(shape, 1)];
    let tokens = CodedTokens::new(codes, codes, book.view()).unwrap();
    attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
    let attend = |rows: &[f32], out: &mut [f32], stats: &mut [SoftmaxStats]| {
        let tokens = ExactTokens::contiguous(rows, dim, rows, dim).unwrap();
        let queries = Rows::from(&query[..]);
        attend_exact_into(&Attention::default(), queries, &tokens, &mut [0.0; 4], out, stats).unwrap();
    };
    // At full rank, in the basis of the unit matrix.
    let unit: Vec<f32> = (0..dim * dim).map(|i| f32::from(u8::from(i % (dim + 1) == 0))).collect();
    let mut projected = vec![0.0; exact.len()];
    let rows = Rows::contiguous(&exact, dim).unwrap();
    let projected_rows = RowsMut::contiguous(&mut projected, dim).unwrap();
    Map::new(&unit, dim, dim).unwrap().project_into(rows, projected_rows).unwrap();
    attend(&projected, &mut out, &mut stats);
    normalize_all(&stats, &mut out).unwrap();

    let all = [&coded[..], &exact[..]].concat();
    let (mut expected, mut expected_stats) = (vec![0.0; dim], [SoftmaxStats::EMPTY]);
    attend(&all, &mut expected, &mut expected_stats);
    normalize_all(&expected_stats, &mut expected).unwrap();
    assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{out:?} {expected:?}");
}

const QUERY: [f32; 4] = [0.7, -0.4, 0.2, 0.9];

/// Attention of a query on exact rows.
fn exact<E: Element>(rows: &[E], out: &mut [f32]) {
    let (dim, backend) = (4, Backend::detect());
    let tokens = ExactTokens::contiguous(rows, dim, rows, dim).unwrap();
    let mut scratch = vec![0.0; attend_exact_scratch_len(1, dim)];
    let mut stats = [SoftmaxStats::EMPTY];
    let (attention, queries) = (Attention::scaled(0.5), Rows::from(&QUERY[..]));
    attend_exact_into_with(backend, &attention, queries, &tokens, &mut scratch, out, &mut stats).unwrap();
    normalize_all(&stats, out).unwrap();
}

#[test]
fn caches_of_both_crates_share_window_workspace_and_functions() {
    let (dim, window) = (4, Window { sinks: 1, recent: 2, batch: 1 });
    let shape = PqShape::new(dim, 2, 1).unwrap();
    let book = CodebookBuf::new(shape, &[0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 1.0, -1.0]).unwrap();
    let rows: Vec<f32> = [[0.0, 1.0, 1.0, -1.0], [1.0, 0.0, 0.5, 0.5]].repeat(4).concat();
    let tokens = Rows::contiguous(&rows, dim).unwrap();
    let mut expected = vec![0.0; dim];
    exact(&rows, &mut expected);

    let mut coded = LayerCache::new(&[Arc::new(HeadBooks::new(book.clone(), book))], window).unwrap();
    let full = Reduction::folded(dim, dim).unwrap();
    let maps = [Arc::new(HeadMaps::new(full.clone(), full))];
    let mut low_rank = LowRankLayerCache::new(&maps, window).unwrap();
    coded.append(tokens, tokens).unwrap();
    low_rank.append(tokens, tokens).unwrap();
    let (head, low_rank_head): (&HeadCache<f32>, &LowRankHeadCache<f32>) =
        (&coded.heads()[0], &low_rank.heads()[0]);
    assert_eq!((head.compressed(), low_rank_head.compressed()), (5, 5));

    let (attention, queries) = (Attention::scaled(0.5), Rows::from(&QUERY[..]));
    let (mut workspace, mut outs) = (Workspace::default(), [vec![0.0; dim], vec![0.0; dim]]);
    attend_batch_into(&[&coded], &attention, queries, &mut workspace, &mut outs[0]).unwrap();
    let backend = Backend::detect();
    attend_batch_into_with(backend, &[&low_rank], &attention, queries, &mut workspace, &mut outs[1]).unwrap();
    for out in &outs {
        assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{out:?} {expected:?}");
    }
    let two = Rows::contiguous(&rows[..2 * dim], dim).unwrap();
    coded.truncate(1);
    let error: pq_core::Error =
        coded.attend_into(&attention, two, &mut workspace, &mut [0.0; 8]).unwrap_err();
    assert_eq!(error, pq_core::Error::Attend(AttendError::Causal { queries: 2, tokens: 1 }));
}

#[test]
fn codes_of_errors_are_those_of_the_table() {
    let pq = |error: kv_attend::Error| pq_core::Error::from(error);
    let svd = |error: kv_attend::Error| svd_core::Error::from(error);
    let stride = kv_attend::Error::Stride { row_stride: 1, components: 2 };
    assert_eq!(pq(kv_attend::Error::TooLarge), pq_core::Error::TooLarge);
    assert_eq!(svd(kv_attend::Error::TooLarge), svd_core::Error::TooLarge);
    assert_eq!((pq(stride).code(), svd(stride).code(), stride.code()), (101, 101, 101));
    assert_eq!((pq_core::Error::Tolerance.code(), svd_core::Error::NoConvergence.code()), (207, 307));
    assert_eq!(pq(stride).to_string(), stride.to_string());
}
