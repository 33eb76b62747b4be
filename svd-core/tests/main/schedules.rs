//! Schedules cover everything once, report their true cost, and are near the ideal.

use proptest::prelude::*;
use svd_core::{
    DecodeHead, Error, PrefillHead, PrefillRules, Schedule, TaskCost, schedule_decode, schedule_prefill,
};

/// Checks that tasks tile `lens` at multiples of `granule`, and that the busiest processor costs the
/// makespan.
fn check(
    schedule: &Schedule,
    lens: &[usize],
    granule: usize,
    processors: usize,
    cost: impl Fn(&svd_core::Task) -> u64,
) -> Result<(), TestCaseError> {
    let mut tasks = schedule.tasks().to_vec();
    tasks.sort_by_key(|task| (task.head, task.first));
    let mut next = vec![0; lens.len()];
    for task in &tasks {
        prop_assert_eq!(task.first, next[task.head]);
        prop_assert!(task.len > 0 && task.first % granule == 0);
        next[task.head] += task.len;
    }
    prop_assert_eq!(&next[..], lens);
    let ranges: Vec<_> = schedule.processors().collect();
    prop_assert_eq!(ranges.len(), processors);
    prop_assert_eq!(ranges.last().unwrap().end, tasks.len());
    let loads = ranges.into_iter().map(|range| schedule.tasks()[range].iter().map(&cost).sum::<u64>());
    prop_assert_eq!(loads.max().unwrap(), schedule.makespan());
    prop_assert!(schedule.makespan() as f64 >= schedule.ideal());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn decode_covers_every_token_once(
        heads in prop::collection::vec((0_usize..5000, 0_usize..256), 0..40),
        processors in 1_usize..140,
        per_task in 0_usize..4096,
        granule in 1_usize..130,
    ) {
        let heads: Vec<DecodeHead> = heads.into_iter().map(|(tokens, cost)| DecodeHead { tokens, cost }).collect();
        let schedule = schedule_decode(&heads, processors, TaskCost { per_task, granule }).unwrap();
        let lens: Vec<usize> = heads.iter().map(|head| head.tokens).collect();
        check(&schedule, &lens, granule, processors, |task| (task.len * heads[task.head].cost + per_task) as u64)?;
    }

    #[test]
    fn prefill_covers_every_row_once(
        heads in prop::collection::vec((0_usize..900, 0_usize..900, 0_usize..256), 0..20),
        processors in 1_usize..140,
        per_task in 0_usize..4096,
        row_block in 1_usize..300,
        granule in 1_usize..40,
        causal in any::<bool>(),
    ) {
        let heads: Vec<PrefillHead> =
            heads.into_iter().map(|(rows, more, cost)| PrefillHead { rows, tokens: rows + more, cost }).collect();
        let rules = PrefillRules { row_block, granule, per_task, causal };
        let schedule = schedule_prefill(&heads, processors, rules).unwrap();
        let lens: Vec<usize> = heads.iter().map(|head| head.rows).collect();
        check(&schedule, &lens, granule, processors, |task| {
            let head = &heads[task.head];
            let pairs: usize = (task.first..task.first + task.len)
                .map(|row| if causal { head.tokens - head.rows + row + 1 } else { head.tokens })
                .sum();
            (pairs * head.cost + per_task) as u64
        })?;
    }
}

/// Uneven ranks, as in the paper's tables: a coefficient of variation of 0.45, multiples of 16.
fn ranks(n: usize, seed: u64) -> Vec<usize> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| 16 * (2.0 + (14.0 * rng.f64()).round()) as usize).collect()
}

#[test]
fn decode_is_within_a_tenth_of_the_ideal() {
    let model = TaskCost { per_task: 2048, granule: 64 };
    for processors in [108, 132] {
        for (batch, longest) in [(1, 32_768), (2, 32_768), (8, 32_768), (32, 8192), (64, 4096)] {
            let (costs, lengths) = (ranks(8, 1), ranks(batch, 2));
            let heads: Vec<DecodeHead> = lengths
                .iter()
                .flat_map(|&length| {
                    let tokens = if batch == 1 { longest } else { longest * length / 256 };
                    costs.iter().map(move |&cost| DecodeHead { tokens, cost })
                })
                .collect();
            let schedule = schedule_decode(&heads, processors, model).unwrap();
            let ratio = schedule.makespan() as f64 / schedule.ideal();
            assert!(ratio <= 1.10, "{batch} sequences on {processors}: {ratio:.3}");
        }
    }
}

#[test]
fn a_cut_head_gets_taller_blocks_and_the_last_round_is_shared_out() {
    // Two heads of one length, the second at half the cost: 64 and 128 rows a block, 16 + 8 blocks on 20
    // processors. The four blocks of the second wave are split again.
    let heads = [
        PrefillHead { rows: 1024, tokens: 1024, cost: 256 },
        PrefillHead { rows: 1024, tokens: 1024, cost: 128 },
    ];
    let rules = PrefillRules { row_block: 64, granule: 16, per_task: 0, causal: false };
    let schedule = schedule_prefill(&heads, 20, rules).unwrap();
    let whole: Vec<usize> = (0..2)
        .map(|h| schedule.tasks().iter().filter(|t| t.head == h).map(|t| t.len).max().unwrap())
        .collect();
    assert_eq!(whole, [64, 128]);
    let without = 2.0 * 64.0 * 1024.0 * 256.0; // two rounds
    assert!(
        (schedule.makespan() as f64) < 0.7 * without
            && (schedule.makespan() as f64) < 1.15 * schedule.ideal()
    );
}

#[test]
fn little_or_nothing_to_do() {
    let model = TaskCost { per_task: 1, granule: 64 };
    let nothing = schedule_decode(&[], 3, model).unwrap();
    assert_eq!((nothing.tasks().len(), nothing.makespan(), nothing.processors().count()), (0, 0, 3));
    let empty = DecodeHead { tokens: 0, cost: 128 };
    assert_eq!(schedule_decode(&[empty; 4], 2, model).unwrap().tasks(), []);
    let one = schedule_decode(&[DecodeHead { tokens: 1, cost: 128 }], 132, model).unwrap();
    assert_eq!((one.tasks().len(), one.makespan()), (1, 129));
}

#[test]
fn impossible_arguments_are_errors() {
    let head = DecodeHead { tokens: 10, cost: 10 };
    let model = TaskCost { per_task: 1, granule: 1 };
    assert!(matches!(schedule_decode(&[head], 0, model), Err(Error::Zero { .. })));
    assert_eq!(schedule_decode(&[head], usize::MAX, model), Err(Error::TooLarge));
    assert!(schedule_decode(&[head], 1, TaskCost { granule: 0, ..model }).is_err());
    assert!(schedule_decode(&[head], 4, TaskCost { granule: usize::MAX, ..model }).is_ok());
    assert_eq!(schedule_decode(&[head], 1, TaskCost { per_task: usize::MAX, ..model }), Err(Error::TooLarge));
    let huge = DecodeHead { tokens: usize::MAX, cost: 2 };
    assert_eq!(schedule_decode(&[huge], 1, model), Err(Error::TooLarge));
    let half = DecodeHead { tokens: usize::MAX / 2, cost: 2 };
    assert_eq!(schedule_decode(&[half; 2], 1, model), Err(Error::TooLarge));
    let long = DecodeHead { tokens: usize::MAX / 4, cost: 1 };
    assert_eq!(
        schedule_decode(&[long], 8, TaskCost { granule: 3, ..model }).unwrap().processors().count(),
        8
    );
    let rules = PrefillRules { row_block: 1, granule: 1, per_task: 0, causal: true };
    let prompt = PrefillHead { rows: 11, tokens: 10, cost: 1 };
    assert!(matches!(schedule_prefill(&[prompt], 1, rules), Err(Error::Causal { .. })));
    let prompt = PrefillHead { rows: 1 << 30, tokens: 1 << 30, cost: 1 };
    assert_eq!(schedule_prefill(&[prompt], 1, rules), Err(Error::TooLarge)); // 2^30 blocks
    assert!(schedule_prefill(&[prompt], 1, PrefillRules { row_block: 0, ..rules }).is_err());
}
