//! Streams a context over a network of varying speed, with each chunk at a level that meets the deadline.

use codec_core::*;

fn main() -> Result<(), Error> {
    // Bytes of each level, the least lossy first, as in a chunk's directory; bytes of the text; seconds to
    // recompute keys and values from it.
    let levels = [60_000_000, 45_000_000, 32_000_000, 23_000_000];
    let chunk = ChunkSizes { levels: &levels, text: 6_000, recompute: 0.4 };
    let chunks = [chunk; 6];
    let policy = StreamPolicy { slo: 2.0, first_level: 2, prior: None };

    let network = [300e6, 250e6, 60e6, 60e6, 200e6, 400e6]; // bytes per second while each chunk is sent
    let (mut elapsed, mut measured) = (0.0, None);
    for (i, rate) in network.into_iter().enumerate() {
        let decision = policy.decide(&chunks[i..], measured, elapsed, 1)?;
        let (bytes, computing) = match decision.encoding {
            Encoding::Text => (chunk.text, chunk.recompute),
            Encoding::Level(level) => (levels[level], 0.0),
        };
        println!(
            "{elapsed:.2} s: chunk {i} as {:?} ({:?}, {:.2} s left, {:?})",
            decision.encoding, decision.reason, decision.remaining, decision.throughput
        );
        elapsed += bytes as f64 / rate + computing;
        measured = Some(rate);
    }
    println!("{elapsed:.2} s: done, the objective was {:.1} s", policy.slo);
    Ok(())
}
