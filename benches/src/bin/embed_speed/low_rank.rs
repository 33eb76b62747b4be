//! `svd-core`: interleaved heads against contiguous rows, and the owning cache against plain slices.

use std::sync::Arc;

use half::f16;
use svd_core::*;

use super::{DIM, backends, least};

fn rotation(rows: Rows<'_, f32>) -> Rotation {
    let mut gram = Gram::<NoRope>::new(DIM).unwrap();
    gram.add_rows(rows).unwrap();
    Rotation::score_optimal(&gram, &gram).unwrap()
}

/// Moments and projection of one head of interleaved rows, against contiguous rows.
pub fn layouts(rows: &[f32]) {
    const HEADS: usize = 8;
    println!(
        "\n## svd-core: tokens first (NHD) against heads first (HND)\n\n\
         512 keys of one of {HEADS} heads: microseconds, and the factor.\n"
    );
    println!("| what | backend | HND | NHD |\n| --- | --- | --- | --- |");
    let interleaved = Rows::contiguous(rows, HEADS * DIM).unwrap().columns(3 * DIM, DIM).unwrap();
    let gathered: Vec<f32> = interleaved.iter().flatten().copied().collect();
    let contiguous = Rows::contiguous(&gathered, DIM).unwrap();
    let map = rotation(contiguous).basis_map(64).unwrap();
    for backend in backends() {
        let mut grams: Vec<Box<dyn FnMut()>> = vec![];
        let mut projections: Vec<Box<dyn FnMut()>> = vec![];
        for rows in [contiguous, interleaved] {
            grams.push(Box::new(move || {
                let mut gram = Gram::<NoRope>::new(DIM).unwrap();
                gram.add_rows_with(backend, rows).unwrap();
            }));
            let (map, mut out) = (map.view(), vec![f16::ZERO; rows.rows() * 64]);
            projections.push(Box::new(move || {
                let out = RowsMut::contiguous(&mut out, 64).unwrap();
                map.project_into_with(backend, rows, out).unwrap();
            }));
        }
        for (what, mut cases) in [("Gram", grams), ("projection to rank 64", projections)] {
            let seconds = least(100, &mut cases);
            let factor = seconds[1] / seconds[0];
            println!("| {what} | {backend:?} | {:.0} | {factor:.2}x |", seconds[0] * 1e6);
        }
    }
}

/// `LowRankLayerCache` against direct calls on slices.
pub fn cache(rows: &[f32]) {
    println!(
        "\n## svd-core: LowRankLayerCache against the bare slices\n\n\
         One head of 4,096 tokens in `f16` (4 sinks, 64 recent), 4 queries; microseconds, and the factor.\n"
    );
    println!("| ranks, values, backend | slices | LowRankLayerCache |\n| --- | --- | --- |");
    let rotation = rotation(Rows::contiguous(rows, DIM).unwrap());
    let rows: Vec<f16> = rows.iter().map(|&x| f16::from_f32(x)).collect();
    let all = Rows::contiguous(&rows, DIM).unwrap();
    for [key_rank, value_rank] in [[64, 64], [96, 48]] {
        for folded in [true, false] {
            let keys = Reduction::projected(&rotation, key_rank).unwrap();
            let values = match folded {
                true => Reduction::folded(DIM, value_rank).unwrap(),
                false => Reduction::projected(&rotation, value_rank).unwrap(),
            };
            let maps = [Arc::new(HeadMaps::new(keys, values))];
            let mut cache = LowRankLayerCache::new(&maps, Window { sinks: 4, recent: 64, batch: 1 }).unwrap();
            cache.append(all, all).unwrap();
            for backend in backends() {
                let (seconds, difference) = compare(backend, &rotation, &cache, &rows, folded);
                assert!(difference < 1e-5, "the two differ by {difference}");
                let (factor, values) = (seconds[1] / seconds[0], if folded { "folded" } else { "projected" });
                let slices = seconds[0] * 1e6;
                println!("| {key_rank}, {value_rank}, {values}, {backend:?} | {slices:.1} | {factor:.3}x |");
            }
        }
    }
}

/// Times of the slices and of the cache, and the largest difference of their outputs.
fn compare(
    backend: Backend,
    rotation: &Rotation,
    cache: &LowRankLayerCache<f16>,
    rows: &[f16],
    folded: bool,
) -> (Vec<f64>, f32) {
    const GROUP: usize = 4;
    let head = &cache.heads()[0];
    let (key_rank, value_rank) = (head.store().maps().keys().rank(), head.store().maps().values().rank());
    let (query_map, value_map) =
        (rotation.dual_map(key_rank).unwrap(), rotation.dual_map(value_rank).unwrap());
    let [keys, values] = head.store().rows();
    let reduced = ExactTokens::contiguous(keys, key_rank, values, value_rank).unwrap();
    let recent = &rows[rows.len() - head.recent() * DIM..];
    let queries: Vec<f32> = rows[..GROUP * DIM].iter().map(|x| x.to_f32() / 16.0).collect();
    let attention = Attention::scaled(1.0 / (DIM as f32).sqrt());
    let (mut expected, mut out) = (vec![0.0; GROUP * DIM], vec![0.0; GROUP * DIM]);
    let (mut projected, mut scratch) = (vec![0.0; GROUP * key_rank], vec![0.0; GROUP * DIM]);
    let (mut sums, mut full) = (vec![0.0; GROUP * value_rank], vec![0.0; GROUP * DIM]);
    let mut workspace = Workspace::default();
    let mut slices = || {
        expected.fill(0.0);
        sums.fill(0.0);
        let (mut stats, mut other) = ([SoftmaxStats::EMPTY; GROUP], [SoftmaxStats::EMPTY; GROUP]);
        for rows in [&rows[..4 * DIM], recent] {
            let tokens = ExactTokens::contiguous(rows, DIM, rows, DIM).unwrap();
            let queries = Rows::from(&queries[..]);
            attend_exact_into_with(
                backend,
                &attention,
                queries,
                &tokens,
                &mut scratch,
                &mut expected,
                &mut stats,
            )
            .unwrap();
        }
        let rotated = RowsMut::contiguous(&mut projected, key_rank).unwrap();
        let rows = Rows::contiguous(&queries, DIM).unwrap();
        query_map.view().project_into_with(backend, rows, rotated).unwrap();
        let queries = Rows::from(&projected[..]);
        attend_exact_into_with(backend, &attention, queries, &reduced, &mut scratch, &mut sums, &mut other)
            .unwrap();
        let (part, dim) = if folded {
            (&sums, value_rank)
        } else {
            value_map.view().reconstruct_into_with(backend, &sums, &mut full).unwrap();
            (&full, DIM)
        };
        let parts = part.chunks_exact(dim).zip(expected.chunks_exact_mut(DIM));
        for ((part, out), (stats, other)) in parts.zip(stats.iter_mut().zip(other)) {
            let scale = stats.absorb(other, out);
            out.iter_mut().zip(part).for_each(|(out, x)| *out += scale * x);
        }
        normalize_all(&stats, &mut expected).unwrap();
    };
    let mut owned = || {
        let queries = Rows::from(&queries[..]);
        attend_batch_into_with(backend, &[cache], &attention, queries, &mut workspace, &mut out).unwrap();
    };
    let seconds = least(200, &mut [Box::new(&mut slices), Box::new(&mut owned)]);
    let difference = expected.iter().zip(&out).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    (seconds, difference)
}
