//! Arbitrary rows, ranks, budgets and work lists: an error or a result, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use svd_core::*;

type Input = (u8, Vec<f32>, Vec<f32>, f64, [u32; 4], Vec<(u32, u16)>);

fuzz_target!(|input: Input| {
    let (dim, stored, probes, fraction, sizes, work) = input;
    calibrate(usize::from(dim % 40), &stored, &probes, fraction, sizes[0] as usize);
    attend(usize::from(dim % 7) + 1, sizes, &stored, &probes);
    schedule(sizes.map(|x| x as usize), &work);
});

fn calibrate(dim: usize, stored: &[f32], probes: &[f32], fraction: f64, multiple: usize) {
    let (Ok(mut a), Ok(mut b)) = (Gram::<PostRope>::new(dim), Gram::new(dim)) else { return };
    let row_len = dim + multiple % 3;
    let stored_rows = Rows::new(stored, stored.len() / row_len, row_len, row_len).unwrap();
    let _ = stored_rows.columns(multiple % 2, dim).map(|rows| a.add_rows(rows));
    let _ = Rows::contiguous(probes, dim).map(|rows| b.add_rows(rows));
    sums(stored, probes, fraction);
    for rotation in [
        Rotation::score_optimal(&a, &b),
        Rotation::stacked(&a, &b),
        Rotation::principal(&a),
        Rotation::query_metric(&a.centred(), &b),
    ]
    .into_iter()
    .flatten()
    {
        let maps = rotation.basis().iter().chain(rotation.dual());
        assert!(maps.copied().all(|x| (x as f32).is_finite()), "a map is infinite in f32");
        let _ = balanced_order(rotation.sigma(), multiple);
        let budget = Budget::Fraction(fraction);
        let _ = ranks_by_loss(&[rotation.sigma()], &[fraction], budget, multiple);
        let _ = ranks_by_removal(&[rotation.sigma()], budget, multiple);
        let Ok(rank) = rank_for_removal(rotation.sigma(), fraction) else { continue };
        assert!((1..=dim).contains(&rank));
        let _ = Rows::contiguous(probes, probes.len() / dim).map(|weight| rotation.fold_basis(weight, rank));
        let _ = Rows::contiguous(probes, dim).map(|weight| rotation.fold_output(weight, rank));
        let error = rotation.score_error(&a, &b, rank).unwrap();
        assert!(error >= 0.0, "{error}");
        if stored.len() >= dim {
            rotation
                .basis_map(rank)
                .unwrap()
                .view()
                .project_into(Rows::from(&stored[..dim]), RowsMut::from(&mut vec![0.0_f32; rank][..]))
                .unwrap();
        }
    }
    // Arbitrary values as a profile's rotation, and as a spectrum.
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| x.into()).collect() };
    let square = dim * dim;
    if stored.len() >= square && probes.len() >= dim {
        if let Ok(rotation) =
            Rotation::from_parts(wide(&stored[..square]), wide(&stored[..square]), wide(&probes[..dim]))
        {
            let _ = rotation.score_error(&a, &b, dim);
            let _ = rotation.dual_map(dim);
        }
    }
    let spectrum = wide(probes);
    let _ = ranks_by_removal(&[&spectrum], Budget::Bytes { per_token: multiple, per_component: 2 }, 1);
}

/// Arbitrary values as externally computed sums.
fn sums(matrix: &[f32], sums: &[f32], factor: f64) {
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().take(4).map(|&x| f64::from(x) * factor).collect() };
    let gram = |rows| Gram::<PostRope>::from_sums(2, rows, &wide(matrix), &wide(&sums[..sums.len().min(2)]));
    for rows in [0, 1, 1 << 40, u64::MAX] {
        let Ok(mut gram) = gram(rows) else { continue };
        let rotation = Rotation::score_optimal(&gram, &gram.centred()).unwrap();
        let maps = rotation.basis().iter().chain(rotation.dual());
        assert!(maps.copied().all(|x| (x as f32).is_finite()), "a map is infinite in f32");
        assert!(rotation.score_error(&gram, &gram, 1).unwrap() >= 0.0);
        let _ = gram.merge(&gram.clone());
    }
}

fn attend(group: usize, sizes: [u32; 4], stored: &[f32], probes: &[f32]) {
    let len = |size: u32, of: usize| (size as usize % 97).min(of);
    let (queries, keys) = (&probes[..len(sizes[0], probes.len())], &stored[..len(sizes[1], stored.len())]);
    let values = &stored[..len(sizes[2], stored.len())];
    let (mut out, mut stats) = (vec![0.0; sizes[3] as usize % 61], vec![SoftmaxStats::EMPTY; group]);
    let [dim_k, stride, shift, position] = sizes.map(|size| (size >> 8) as usize % 33);
    let rows = |data, dim| Rows::new(data, stride, dim, dim + shift % 3);
    let (Ok(keys), Ok(values)) = (rows(keys, dim_k), rows(values, out.len() / group)) else { return };
    let Ok(tokens) = ExactTokens::new(keys, values) else { return };
    let options = |i: usize| probes.get(i).copied();
    let attention = Attention { scale: options(0).unwrap_or(1.0), softcap: options(1), window: Some(shift) };
    let list = sizes.map(|size| size >> 24);
    let mut scratch = vec![0.0; queries.len()];
    let all = [Ok(tokens), Ok(tokens.first_query(position)), tokens.chosen(&list), tokens.heads(shift)];
    for tokens in all.into_iter().flatten() {
        for attention in [attention, Attention::default()] {
            let queries = Rows::from(queries);
            let _ = attend_exact_into(&attention, queries, &tokens, &mut scratch, &mut out, &mut stats);
        }
    }
}

fn schedule([processors, per_task, granule, shift]: [usize; 4], work: &[(u32, u16)]) {
    let shift = shift % 40;
    let heads: Vec<DecodeHead> = work
        .iter()
        .map(|&(tokens, cost)| DecodeHead { tokens: (tokens as usize) << shift, cost: cost.into() })
        .collect();
    let processors = processors % 70_000;
    if let Ok(plan) = schedule_decode(&heads, processors, TaskCost { per_task, granule }) {
        assert_eq!(
            plan.tasks().iter().map(|task| task.len).sum::<usize>(),
            heads.iter().map(|head| head.tokens).sum()
        );
        assert_eq!(plan.processors().count(), processors);
    }
    let heads: Vec<PrefillHead> = work
        .iter()
        .map(|&(tokens, cost)| PrefillHead {
            rows: tokens as usize % 4096,
            tokens: tokens as usize,
            cost: cost.into(),
        })
        .collect();
    let rules =
        PrefillRules { row_block: granule % 512, granule: granule % 65, per_task, causal: shift % 2 == 0 };
    if let Ok(plan) = schedule_prefill(&heads, processors, rules) {
        assert_eq!(
            plan.tasks().iter().map(|task| task.len).sum::<usize>(),
            heads.iter().map(|head| head.rows).sum()
        );
    }
}
