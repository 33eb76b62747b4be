//! Streams on the simulated clock: the choice of encodings, stalls, and wrong arguments.

#![allow(clippy::unwrap_used)] // helpers of tests, too

use codec_core::{Encoding, Plans, StreamPolicy};
use kv_stream::{Bandwidth, Choice, Error, GBPS, Machine, Options, Outcome, PrefillTime, Speeds, simulate};

const TEXT: Encoding = Encoding::Text;

fn given(encodings: &[Encoding]) -> Options {
    Options { choice: Choice::Given(encodings.to_vec()), batch: 8, timeout: 1.0, fall_back: true }
}

fn adaptive(slo: f64, first_level: usize, prior: Option<f64>) -> Options {
    let policy = StreamPolicy { slo, first_level, prior, plans: Plans::TextFirst };
    Options { choice: Choice::Adaptive(policy), ..given(&[TEXT]) }
}

/// A model of 8 billion parameters on a GPU.
fn machine() -> Machine {
    let prefill = PrefillTime::fit(&[(8192.0, 0.207), (32768.0, 1.201), (131_072.0, 10.712)]).unwrap();
    let speeds = Speeds { prefill, decode_rate: 53e9 };
    Machine { values_per_token: 65_536, bits: vec![4.1, 3.1, 2.1], speeds }
}

fn gbps(rate: f64) -> Bandwidth {
    Bandwidth::Steps(vec![(0.0, rate * GBPS)])
}

#[test]
fn prefill_times_are_fitted() {
    let time = machine().speeds.prefill;
    for (tokens, seconds) in [(8192, 0.207), (32_768, 1.201), (131_072, 10.712)] {
        assert!((time.of(0, tokens) / seconds - 1.0).abs() < 0.01, "{tokens}");
    }
    assert!((time.of(0, 1000) + time.of(1000, 3000) - time.of(0, 3000)).abs() < 1e-12);
    assert_eq!(PrefillTime::fit(&[(100.0, 0.2)]).unwrap(), PrefillTime { linear: 0.002, quadratic: 0.0 });
    let of_chunk =
        |start: u32, end: u32| (f64::from(start)..f64::from(end), time.of(start as usize, end as usize));
    let fitted = PrefillTime::fit_chunks(&[of_chunk(0, 512), of_chunk(4096, 4608)]).unwrap();
    assert!((fitted.linear / time.linear - 1.0).abs() < 1e-9, "{fitted:?}");
    assert!((fitted.quadratic / time.quadratic - 1.0).abs() < 1e-9, "{fitted:?}");
    for chunk in [(5.0..5.0, 1.0), (-1.0..5.0, 1.0), (0.0..5.0, 0.0), (0.0..f64::NAN, 1.0)] {
        assert!(matches!(PrefillTime::fit_chunks(&[chunk]), Err(Error::Argument(_))));
    }
    let concave = PrefillTime::fit(&[(100.0, 0.2), (1000.0, 1.0)]).unwrap();
    assert!(concave.quadratic == 0.0 && concave.linear > 0.0);
    for points in [&[][..], &[(0.0, 1.0)], &[(1.0, f64::NAN)], &[(1.0, -1.0)]] {
        assert!(matches!(PrefillTime::fit(points), Err(Error::Argument(_))));
    }
}

/// Without a known bandwidth, and never more than 5 % slower than the best of text and levels.
#[test]
fn adaptation_is_near_the_best_fixed_encoding_at_every_bandwidth() {
    for (tokens, requests) in [(8192, 1), (8192, 8), (32_768, 1), (1000, 1)] {
        let contexts = vec![machine().chunks(tokens, 1500).unwrap(); requests];
        for exponent in 0..=12 {
            let rate = 0.4 * 1000_f64.powf(f64::from(exponent) / 12.0);
            let seconds =
                |options: &Options| simulate(&contexts, gbps(rate), 0.0, options).unwrap().seconds();
            let fixed = [TEXT, Encoding::Level(0), Encoding::Level(1), Encoding::Level(2)];
            let best =
                fixed.map(|encoding| seconds(&given(&[encoding]))).into_iter().fold(f64::MAX, f64::min);
            let adapted = seconds(&adaptive(0.0, 2, None));
            assert!(adapted <= 1.05 * best, "{tokens} x {requests} at {rate:.2} Gbit/s: {adapted} of {best}");
        }
    }
}

#[test]
fn quality_grows_with_the_time_there_is() {
    let contexts = [machine().chunks(32_768, 1500).unwrap()];
    let mut least = f64::MAX; // bytes of level 2 only
    for slo in [0.5, 0.8, 1.0] {
        let trace = simulate(&contexts, gbps(40.0), 0.0, &adaptive(slo, 1, Some(40.0 * GBPS))).unwrap();
        assert!(trace.seconds() <= slo, "{slo}: {}", trace.seconds());
        let lossy = trace.events.iter().filter(|event| event.encoding != "text");
        let worst = lossy.map(|event| event.encoding.clone()).max();
        assert!(worst.is_none_or(|worst| worst == "level 0"), "{slo}");
        assert!((trace.bytes as f64) < least, "more text at {slo}");
        least = trace.bytes as f64;
    }
    assert_eq!(simulate(&contexts, gbps(40.0), 0.0, &adaptive(1.5, 1, Some(5e9))).unwrap().bytes, 0);
}

/// The early chunks of all requests as text, then the rest of one request after the other.
#[test]
fn requests_of_a_batch_are_complete_one_after_the_other() {
    let contexts = vec![machine().chunks(8192, 1500).unwrap(); 3];
    let trace = simulate(&contexts, gbps(5.0), 0.0, &adaptive(0.0, 2, Some(5.0 * GBPS))).unwrap();
    let chunks = |text: bool| {
        let events = trace.events.iter().filter(move |event| (event.encoding == "text") == text);
        events.map(|event| (event.chunk, event.request))
    };
    assert!(chunks(true).count() > 3 && chunks(true).is_sorted());
    assert!(chunks(false).count() > 3 && chunks(false).is_sorted_by_key(|(chunk, request)| (request, chunk)));
    assert!(trace.loaded.is_sorted() && trace.loaded[0] < trace.loaded[2]);
}

/// Eight requests with a second for each, over bandwidths of which a tenth is too low for all of them.
#[test]
fn an_eighth_of_the_requests_is_late() {
    let contexts = vec![machine().chunks(8192, 1500).unwrap(); 8];
    let late = |options: &Options| {
        let random: Bandwidth = "random:0.1-10".parse().unwrap();
        let runs =
            (0..200).map(|seed| simulate(&contexts, random.clone().seeded(seed), 0.0, options).unwrap());
        runs.map(|trace| trace.loaded.iter().filter(|loaded| **loaded > 1.0).count()).sum::<usize>()
    };
    let (fixed, adapted) = (late(&given(&[Encoding::Level(1)])), late(&adaptive(0.9, 1, None)));
    assert!(fixed == 1600 && 8 * adapted <= fixed, "{adapted} of {fixed}");
}

#[test]
fn transfers_follow_each_other_while_chunks_are_decoded() {
    let contexts = [machine().chunks(6000, 1500).unwrap()];
    let trace = simulate(&contexts, gbps(5.0), 0.0, &given(&[Encoding::Level(1)])).unwrap();
    for pair in trace.events.windows(2) {
        assert_eq!(pair[0].arrived, pair[1].requested);
        assert!(pair[0].computed_at.unwrap() > pair[1].requested);
    }
    let transfer = contexts[0].iter().map(|chunk| chunk.levels[1]).sum::<u64>() as f64 / (5.0 * GBPS);
    assert!((trace.transferred - transfer).abs() < 1e-6);
    assert!((trace.seconds() - transfer - contexts[0][3].decode).abs() < 1e-6);
}

#[test]
fn requests_of_different_lengths_share_a_batch() {
    let chunks = |tokens| machine().chunks(tokens, 1500).unwrap();
    let contexts = [chunks(4000), chunks(1000), chunks(3000)];
    let trace = simulate(&contexts, gbps(10.0), 0.0, &given(&[Encoding::Level(2)])).unwrap();
    let order: Vec<_> = trace.events.iter().map(|event| (event.chunk, event.request)).collect();
    assert_eq!(order, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 0)]);
    assert!(trace.loaded[1] < trace.loaded[2] && trace.loaded[2] < trace.loaded[0]);
    // The third request waits for a batch of two.
    let trace = simulate(&contexts, gbps(10.0), 0.0, &Options { batch: 2, ..given(&[TEXT]) }).unwrap();
    let order: Vec<_> = trace.events.iter().map(|event| (event.request, event.chunk)).collect();
    assert_eq!(order, [(0, 0), (1, 0), (0, 1), (0, 2), (2, 0), (2, 1)]);
    assert!(trace.events[4].requested >= trace.loaded[0]);
    let sum: f64 = contexts.iter().flatten().map(|chunk| chunk.recompute).sum();
    assert!((trace.loaded[2] - sum).abs() < 1e-9 && (trace.computing - sum).abs() < 1e-9);
}

/// The link ends after 0.3 s.
#[test]
fn a_stall_ends_in_an_error_or_in_text() {
    let contexts = [machine().chunks(32_768, 1500).unwrap()];
    let dead = Bandwidth::Steps(vec![(0.0, GBPS), (0.3, 0.0)]);
    for options in [given(&[Encoding::Level(0)]), adaptive(2.0, 1, None)] {
        let trace = simulate(&contexts, dead.clone(), 0.01, &options).unwrap();
        assert_eq!(
            trace
                .events
                .iter()
                .map(|event| event.tokens * usize::from(event.computed_at.is_some()))
                .sum::<usize>(),
            32_768
        );
        assert!(trace.seconds() < 0.3 + 1.1 + 1.3, "{}", trace.seconds());
        let strict = simulate(&contexts, dead.clone(), 0.01, &Options { fall_back: false, ..options });
        // An adaptive stream may have left the link on its own.
        assert!(
            strict.as_ref().is_ok_and(|trace| trace.seconds() < 2.0)
                || matches!(strict, Err(Error::Stalled { .. }))
        );
    }
    let stalled = simulate(&contexts, gbps(0.0), 0.0, &given(&[Encoding::Level(0)])).unwrap();
    assert!(matches!(&stalled.events[0].outcome, Outcome::Failed(what) if what.contains("stalled at 0 of")));
    assert!((stalled.events[0].arrived - 1.0).abs() < 0.02);
    assert_eq!(stalled.bytes, 0);
}

/// A machine that recomputes a chunk in seconds, and decodes it in a tenth of a second.
fn slow_machine() -> Machine {
    let speeds = Speeds { prefill: PrefillTime { linear: 2e-4, quadratic: 5e-8 }, decode_rate: 60e6 };
    Machine { values_per_token: 4096, ..Machine { speeds, ..machine() } }
}

/// A link of 100 MB/s that brings almost nothing at the beginning of every tenth of a second, as if a busy
/// machine did not run its threads.
#[test]
fn stalls_of_a_fast_link_are_waited_for() {
    let contexts = [slow_machine().chunks(13_600, 1500).unwrap()];
    for stall in [0.005, 0.01, 0.02, 0.03] {
        for slow in [0.0, 0.1e6, 0.5e6, 2e6] {
            let period = |i| [(0.1 * f64::from(i), slow), (0.1 * f64::from(i) + stall, 100e6)];
            let link = || Bandwidth::Steps((0..100).flat_map(period).collect());
            let seconds = |options: &Options| simulate(&contexts, link(), 0.0, options).unwrap();
            let (fixed, adapted) = (seconds(&given(&[Encoding::Level(2)])), seconds(&adaptive(0.0, 2, None)));
            assert_eq!(adapted.tokens(3).1, 0, "{stall} s at {slow}: {:?}", adapted.events);
            assert!(adapted.seconds() < 1.1 * fixed.seconds(), "{stall} s at {slow}: {}", adapted.seconds());
        }
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let contexts = [machine().chunks(3000, 1500).unwrap()];
    let run = |contexts: &[Vec<_>], options| {
        matches!(simulate(contexts, gbps(1.0), 0.0, &options), Err(Error::Argument(_)))
    };
    assert!(run(&contexts, given(&[])) && run(&contexts, given(&[Encoding::Level(3)])));
    assert!(run(&[vec![]], given(&[TEXT])) && run(&[], given(&[TEXT])));
    for (batch, timeout) in [(0, 1.0), (1, 0.0), (1, f64::NAN)] {
        assert!(run(&contexts, Options { batch, timeout, ..given(&[TEXT]) }));
    }
    let mixed = [machine().chunks(3000, 1500).unwrap(), vec![]];
    assert!(run(&mixed, given(&[TEXT])));
    assert!(machine().chunks(0, 1500).is_err() && machine().chunks(10, 0).is_err());
    assert!(machine().chunks(usize::MAX, 1500).is_err() && machine().chunks(1025, 1).is_err());
    assert!(Machine { bits: vec![], ..machine() }.chunks(10, 5).is_err());
    assert!(matches!(simulate(&contexts, gbps(1.0), 0.0, &adaptive(1.0, 9, None)), Err(Error::Codec(_))));
}

#[test]
fn texts_that_name_no_choice_and_no_link_are_refused() {
    let policy = StreamPolicy { slo: 1.0, first_level: 0, prior: None, plans: Plans::TextFirst };
    let parsed = |text| Choice::parse(text, 2, policy);
    assert_eq!(
        parsed("1, text,0").unwrap(),
        Choice::Given(vec![Encoding::Level(1), TEXT, Encoding::Level(0)])
    );
    assert_eq!(parsed("adaptive").unwrap(), Choice::Adaptive(policy));
    for text in ["2", "-1", "fast", "", "0,,1"] {
        assert!(
            matches!(parsed(text), Err(Error::Argument(what)) if what.contains("one of 2 levels")),
            "{text}"
        );
    }
    for text in ["no-such-file", "nan", "1e301", "random:1"] {
        assert!(text.parse::<Bandwidth>().is_err(), "{text}");
    }
    assert!(PrefillTime::fit(&[(1000.0, 0.0)]).is_err());
}
