//! The policy on links of known speed.

use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const POLICY: StreamPolicy = StreamPolicy { slo: 2.0, first_level: 1, prior: None, plans: Plans::Uniform };
const TEXT_FIRST: StreamPolicy = StreamPolicy { plans: Plans::TextFirst, ..POLICY };

fn chunks<'a>(n: usize, requests: usize, levels: &'a [u64]) -> Vec<ChunkSizes<'a>> {
    std::vec![ChunkSizes { levels, decode: 0.0, text: 6_000, recompute: 0.5, requests }; n]
}

fn at(measured: f64, elapsed: f64) -> Progress {
    Progress { measured: Some(measured), elapsed, computing: 0.0 }
}

#[test]
fn the_first_chunk_without_knowledge_gets_the_medium_level() {
    let decision = POLICY.decide(&chunks(4, 1, &[400, 200, 100]), Progress::default()).unwrap();
    assert_eq!((decision.encoding, decision.reason), (Encoding::Level(1), Reason::NoThroughput));
    assert_eq!((decision.throughput, decision.delay), (Throughput::Unknown, None));
    // Text that the receiver has is in time at any throughput: 4 * 0.5 s.
    let mut known = chunks(4, 1, &[400, 200, 100]);
    known.iter_mut().for_each(|chunk| chunk.text = 0);
    let decision = POLICY.decide(&known, Progress::default()).unwrap();
    assert_eq!((decision.encoding, decision.reason), (Encoding::Text, Reason::InTime));
    assert_eq!((decision.throughput, decision.delay), (Throughput::Unknown, Some(2.0)));
}

/// 4 chunks in 1.5 s: as text 4 * 0.5 s and more; at 1,000 bytes per second levels take 1.6, 0.8 and 0.4
/// s.
#[test]
fn the_least_lossy_encoding_in_time_is_chosen() {
    let levels = [400, 200, 100];
    let decide = |n, measured, elapsed, requests| {
        let decision = POLICY.decide(&chunks(n, requests, &levels), at(measured, elapsed)).unwrap();
        (decision.encoding, decision.reason)
    };
    assert_eq!(decide(4, 1_000.0, 0.5, 1), (Encoding::Level(1), Reason::InTime));
    assert_eq!(decide(4, 1_000.0, 0.3, 1), (Encoding::Level(0), Reason::InTime));
    assert_eq!(decide(4, 1_000.0, 0.5, 3), (Encoding::Level(2), Reason::InTime));
    assert_eq!(decide(4, 10.0, 0.5, 1), (Encoding::Level(2), Reason::NoneInTime));
    assert_eq!(decide(2, 1e9, 0.5, 1), (Encoding::Text, Reason::InTime));
    assert_eq!(decide(4, 1e9, 1.999_99, 1).0, Encoding::Level(0));
    assert_eq!(decide(1, 1.0, 3.0, 1).1, Reason::NoneInTime);
}

/// The first chunk is loaded by three requests, the second by one: (3 + 1) * 0.4 s.
#[test]
fn every_chunk_counts_its_own_requests() {
    let levels = [400, 100];
    let mut two = chunks(2, 3, &levels);
    two[1].requests = 1;
    let decision = POLICY.decide(&two, at(1_000.0, 0.3)).unwrap();
    assert_eq!(decision.encoding, Encoding::Level(0));
    assert!((decision.level_delays[0].unwrap() - 1.6).abs() < 1e-12);
}

/// As text: 3 * 2 * 6 s of transfers, and the last of the recomputations after them.
#[test]
fn a_decision_explains_itself() {
    let policy = StreamPolicy { prior: Some(1_000.0), ..POLICY };
    let progress = Progress { measured: None, elapsed: 0.5, computing: 0.0 };
    let decision = policy.decide(&chunks(3, 2, &[400, 100]), progress).unwrap();
    assert_eq!(decision.throughput, Throughput::Prior(1_000.0));
    assert_eq!(decision.remaining, 1.5);
    assert_eq!(decision.text_delay, Some(3.0 * 2.0 * 6.0 + 0.5));
    let delays: Vec<f64> = decision.level_delays.iter().flatten().copied().collect();
    assert!(delays.iter().zip([2.4, 0.6]).all(|(a, b)| (a - b).abs() < 1e-12));
    assert_eq!(decision.encoding, Encoding::Level(1));
    assert_eq!((decision.delay, decision.text_chunks), (decision.level_delays[1], 0));
}

/// Text takes 4 * 0.5 s, the only level as long; two chunks of each at the same time take half.
#[test]
fn early_chunks_are_recomputed_while_late_ones_are_transferred() {
    let levels = [500];
    let four: Vec<_> =
        chunks(4, 1, &levels).into_iter().map(|chunk| ChunkSizes { text: 0, ..chunk }).collect();
    let hurry = StreamPolicy { slo: 0.0, first_level: 0, ..TEXT_FIRST };
    let decision = hurry.decide(&four, at(1_000.0, 0.0)).unwrap();
    assert_eq!((decision.encoding, decision.text_chunks), (Encoding::Text, 2));
    assert!((decision.delay.unwrap() - 1.0).abs() < 1e-12);
    assert_eq!((decision.text_delay, decision.level_delays[0]), (Some(2.0), Some(2.0)));
    // As much text as is in time.
    let policy = StreamPolicy { slo: 1.6, ..hurry };
    assert_eq!(policy.decide(&four, at(2_000.0, 0.0)).unwrap().text_chunks, 3);
    // Too slow: three chunks as text, so that the link need only bring the last one.
    let decision = policy.decide(&four, at(1.0, 0.0)).unwrap();
    assert_eq!((decision.reason, decision.text_chunks), (Reason::NoneInTime, 3));
    assert!((decision.delay.unwrap() - 500.0).abs() < 1e-12);
    // While the receiver is busy with earlier chunks, text has to wait.
    let busy = Progress { computing: 2.0, ..at(1_000.0, 0.0) };
    assert_eq!(hurry.decide(&four, busy).unwrap().encoding, Encoding::Level(0));
}

#[test]
fn a_slow_receiver_bounds_the_delay() {
    let levels = [100];
    let slow: Vec<_> =
        chunks(4, 2, &levels).into_iter().map(|chunk| ChunkSizes { decode: 0.3, ..chunk }).collect();
    let decision = StreamPolicy { first_level: 0, ..POLICY }.decide(&slow, at(1_000.0, 0.0)).unwrap();
    // The first transfer, and all decoding.
    assert!((decision.level_delays[0].unwrap() - (0.1 + 8.0 * 0.3)).abs() < 1e-12);
}

#[test]
fn a_late_transfer_is_abandoned_and_a_timely_one_is_not() {
    let levels = [1_000, 100];
    let two = chunks(2, 1, &levels);
    let policy = StreamPolicy { first_level: 0, ..TEXT_FIRST };
    let again = |measured, elapsed, left| {
        let decision = policy.reconsider(&two, 0, left, at(measured, elapsed)).unwrap();
        decision.map(|decision| decision.encoding)
    };
    assert_eq!(again(10_000.0, 0.5, 800), None);
    assert_eq!(again(400.0, 0.5, 800), Some(Encoding::Level(1)));
    assert_eq!(again(1e6, 0.5, 800), None);
    // Nearly done.
    assert_eq!(again(100.0, 0.5, 30), None);
    let error = policy.reconsider(&two, 2, 1, at(1.0, 0.0));
    assert_eq!(error, Err(Error::OutOfBounds { what: "level" }));
}

#[test]
fn bad_input_is_an_error() {
    let levels = [3, 2, 1];
    let good = chunks(1, 1, &levels);
    let first = Progress::default();
    assert_eq!(POLICY.decide(&[], first), Err(Error::Zero { what: "chunks" }));
    assert_eq!(POLICY.decide(&chunks(1, 0, &levels), first), Err(Error::Zero { what: "requests" }));
    assert_eq!(POLICY.decide(&chunks(1, 1, &[]), first), Err(Error::Zero { what: "levels" }));
    assert_eq!(POLICY.decide(&chunks(1, 1, &[1]), first), Err(Error::OutOfBounds { what: "level" }));
    assert_eq!(POLICY.decide(&chunks(1, 1, &[1; 17]), first), Err(Error::TooLarge));
    let mixed = [good[0], ChunkSizes { levels: &levels[1..], ..good[0] }];
    assert!(matches!(POLICY.decide(&mixed, first), Err(Error::Length { .. })));
    for (measured, elapsed) in [(0.0, 0.0), (f64::NAN, 0.0), (1.0, -1.0), (1.0, f64::INFINITY)] {
        assert_eq!(POLICY.decide(&good, at(measured, elapsed)), Err(Error::BadTiming));
    }
    let computing = Progress { computing: f64::NAN, ..first };
    assert_eq!(POLICY.decide(&good, computing), Err(Error::BadTiming));
}

/// The delay of a plan, request by request, if the link and the receiver start busy for some seconds.
fn naive(chunks: &[ChunkSizes<'_>], plan: &[Encoding], rate: f64, busy: (f64, f64)) -> f64 {
    let (mut link, mut receiver) = busy;
    for (chunk, encoding) in chunks.iter().zip(plan) {
        for _ in 0..chunk.requests {
            let (bytes, compute) = match *encoding {
                Encoding::Text => (chunk.text, chunk.recompute),
                Encoding::Level(level) => (chunk.levels[level], chunk.decode),
            };
            link += bytes as f64 / rate;
            receiver = f64::max(receiver, link) + compute;
        }
    }
    receiver
}

/// Every plan that is allowed, the least lossy first; those of a level with the most text first.
fn plans(n: usize, levels: usize, plans: Plans) -> Vec<Vec<Encoding>> {
    let mut all = std::vec![std::vec![Encoding::Text; n]];
    for level in 0..levels {
        let most = if plans == Plans::Uniform { 0 } else { n - 1 };
        for text in (0..=most).rev() {
            let plan = (0..n).map(|i| if i < text { Encoding::Text } else { Encoding::Level(level) });
            all.push(plan.collect());
        }
    }
    all
}

proptest! {
    /// The decision is the first plan in time (with text first, at half the rate); else, with text first, the
    /// first of the last level that is in time at any rate; else the fastest. `reconsider` abandons a
    /// transfer only if continuing is late and the decision saves a tenth.
    #[test]
    fn decisions_are_those_of_an_exhaustive_search(
        costs in prop::collection::vec((1..2_000_u64, 1..2_000_u64, 0.0..0.5, 0.0..2.0, 1..4_usize, 0..2_u64), 1..7),
        rate in 50.0..5_000.0,
        (slo, elapsed, computing) in (0.0..20.0, 0.0..2.0, 0.0..3.0),
        text_first: bool,
        left in 0..2_000_u64,
    ) {
        let levels: Vec<[u64; 2]> = costs.iter().map(|cost| [cost.0 + cost.1, cost.0]).collect();
        let chunks: Vec<_> = costs.iter().zip(&levels).map(|(&(_, _, decode, recompute, requests, text), levels)| {
            ChunkSizes { levels, decode, text: 100 * text, recompute, requests }
        }).collect();
        let kind = if text_first { Plans::TextFirst } else { Plans::Uniform };
        let policy = StreamPolicy { slo, first_level: 0, prior: None, plans: kind };
        let progress = Progress { measured: Some(rate), elapsed, computing };
        let remaining = slo - elapsed;
        let trust = if text_first { 0.5 } else { 1.0 };
        let best = |chunks: &[ChunkSizes<'_>], delay: &dyn Fn(&[Encoding], f64) -> f64| {
            let plans = plans(chunks.len(), 2, kind);
            let first = plans.iter().find(|plan| delay(plan, trust * rate) <= remaining);
            let mut last = plans.iter().filter(|plan| plan.last() == Some(&Encoding::Level(1)));
            let possible = last.find(|plan| text_first && delay(plan, f64::INFINITY) < remaining);
            let fastest = plans.iter().min_by(|a, b| delay(a, rate).total_cmp(&delay(b, rate)));
            let plan = first.or(possible).or(fastest).cloned().unwrap();
            (delay(&plan, rate), plan, first.is_some())
        };
        // Sums in another order: a plan that is in time by a rounding error may be late there.
        let (delay, plan, in_time) = best(&chunks, &|plan, rate| naive(&chunks, plan, rate, (0.0, computing)));
        let clear = |delay: f64| (delay - remaining).abs() > 1e-9;
        prop_assume!(plans(chunks.len(), 2, kind).iter().all(|plan| {
            [trust * rate, f64::INFINITY].iter().all(|&rate| clear(naive(&chunks, plan, rate, (0.0, computing))))
        }));
        let decision = policy.decide(&chunks, progress).unwrap();
        prop_assert!((decision.delay.unwrap() - delay).abs() < 1e-9, "{decision:?} {delay} {plan:?}");
        prop_assert_eq!(decision.reason == Reason::InTime, in_time);
        if decision.reason == Reason::InTime {
            prop_assert_eq!(decision.encoding, plan[0]);
        }

        // The transfer in flight ends at its own rate, then the best plan for the rest.
        let link = left as f64 / rate;
        let receiver = f64::max(computing, link) + chunks[0].decode * chunks[0].requests as f64;
        let on_its_way = |plan: &[Encoding], rate: f64| naive(&chunks[1..], plan, rate, (link, receiver));
        let kept = match chunks.len() {
            1 => on_its_way(&[], rate),
            _ => best(&chunks[1..], &on_its_way).0,
        };
        let abandoned = policy.reconsider(&chunks, 0, left, progress).unwrap();
        if let Some(decision) = abandoned {
            prop_assert!(kept > remaining - 1e-9 && decision.delay.unwrap() <= 0.9 * kept + 1e-9);
            prop_assert!(decision.encoding != Encoding::Level(0));
        }
    }
}
