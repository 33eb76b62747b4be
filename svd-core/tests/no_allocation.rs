//! A decode step allocates nothing: projection of query and key, attention on the projected rows; nor does
//! the attention of an owned head.

#![allow(clippy::unwrap_used)]

use allocation_counter::measure;
use svd_core::*;

#[test]
fn a_decode_step_allocates_nothing() {
    let (n, group, dim, rank) = (1000, 4, 64, 40);
    let columns = vec![0.1; dim * rank];
    let map = Map::new(&columns, dim, rank).unwrap();
    let queries = vec![0.5_f32; group * dim];
    let mut projected = vec![0.0; group * rank];
    let (keys, values) = (vec![half::bf16::ONE; n * rank], vec![half::bf16::ONE; n * rank]);
    let mut scratch = vec![0.0; attend_exact_scratch_len(group, rank)];
    let (mut out, mut stats) = (vec![0.0; group * rank], vec![SoftmaxStats::EMPTY; group]);
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let allocated = measure(|| {
            let rows = Rows::contiguous(&queries, dim).unwrap();
            map.project_into_with(backend, rows, RowsMut::contiguous(&mut projected, rank).unwrap()).unwrap();
            let tokens = ExactTokens::contiguous(&keys, rank, &values, rank).unwrap();
            let (attention, projected) = (Attention::scaled(0.125), Rows::from(&projected[..]));
            attend_exact_into_with(
                backend,
                &attention,
                projected,
                &tokens,
                &mut scratch,
                &mut out,
                &mut stats,
            )
            .unwrap();
            normalize_all(&stats, &mut out).unwrap();
        });
        assert_eq!(allocated.count_total, 0, "{backend:?}");
    }
}

#[test]
fn an_owned_head_attends_without_allocating() {
    let (n, group, dim, window) = (300, 4, 64, Window { sinks: 4, recent: 32, batch: 1 });
    let mut gram = Gram::<NoRope>::new(dim).unwrap();
    let rows: Vec<f32> = (0..n * dim).map(|i| (i as f32 * 0.37).sin()).collect();
    let rows = Rows::contiguous(&rows, dim).unwrap();
    gram.add_rows(rows).unwrap();
    let rotation = Rotation::score_optimal(&gram, &gram).unwrap();
    let maps = [40, 24].map(|rank| Reduction::projected(&rotation, rank).unwrap());
    let [keys, values] = maps;
    let mut head = LowRankHeadCache::new(HeadMaps::new(keys, values).into(), window);
    head.append(rows, rows).unwrap();
    let queries = vec![0.5_f32; group * dim];
    let queries = Rows::from(&queries[..]);
    let mut scratch = vec![0.0; head.scratch_len(1, group)];
    let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let attention = Attention::scaled(0.125);
        let allocated = measure(|| {
            head.attend_into_with(backend, &attention, queries, &mut scratch, &mut out, &mut stats).unwrap();
        });
        assert_eq!(allocated.count_total, 0, "{backend:?}");
    }
}
