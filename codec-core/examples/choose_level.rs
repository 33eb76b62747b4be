//! Streams a context over a network of varying speed, with each chunk at a level that meets the deadline.

use codec_core::*;

fn main() -> Result<(), Error> {
    // Bytes of each level, the least lossy first, as in a chunk's directory; seconds to decode one of them,
    // and to recompute keys and values from the text, which the receiver has.
    let levels = [60_000_000, 45_000_000, 32_000_000, 23_000_000];
    let chunk = ChunkSizes { levels: &levels, decode: 0.02, text: 0, recompute: 0.4, requests: 1 };
    let chunks = [chunk; 6];
    let policy = StreamPolicy { slo: 2.0, first_level: 2, prior: None, plans: Plans::TextFirst };

    let network = [300e6, 250e6, 60e6, 60e6, 200e6, 400e6]; // bytes per second while each chunk is sent
    let (mut elapsed, mut computed, mut measured) = (0.0, 0.0_f64, None);
    for (i, rate) in network.into_iter().enumerate() {
        let progress = Progress { measured, elapsed, computing: (computed - elapsed).max(0.0) };
        let decision = policy.decide(&chunks[i..], progress)?;
        println!(
            "{elapsed:.2} s: chunk {i} as {:?} ({:?}, {:.2} s left, {:?})",
            decision.encoding, decision.reason, decision.remaining, decision.throughput
        );
        let compute = match decision.encoding {
            Encoding::Text => chunk.recompute,
            Encoding::Level(level) => {
                elapsed += levels[level] as f64 / rate;
                measured = Some(rate);
                chunk.decode
            }
        };
        computed = computed.max(elapsed) + compute;
    }
    println!("{computed:.2} s: done, the objective was {:.1} s", policy.slo);
    Ok(())
}
