//! The cache of a decode loop: new keys enter an exact window, leave it in batches, and are encoded with the
//! codebook of the prompt. When the encoding error has drifted, the codebook is trained again and a new
//! segment starts, since existing codes keep their codebook.

use pq_core::{CodebookBuf, CodesBuf, Drift, PqShape, Start, TrainOptions, Window, train};

fn main() -> Result<(), pq_core::Error> {
    let dim = 32;
    let shape = PqShape::new(dim, 8, 6)?;
    // From token 1,500 on the keys have another distribution.
    let key = |t: usize| -> Vec<f32> {
        let shift = if t < 1500 { 0.0 } else { 2.0 };
        (0..dim).map(|d| ((t * 31 + d * 7) as f32 * 0.7).sin() + shift).collect()
    };
    let prompt: Vec<f32> = (0..1000).flat_map(key).collect();
    let options = TrainOptions { iterations: 8, encode: true, ..Default::default() };
    let trained = train(shape, &prompt, &options)?;
    let mut centroids = trained.centroids;
    let mut codes = CodesBuf::new(shape);
    let codebook = CodebookBuf::new(shape, &centroids)?;
    codes.append(&codebook.view(), &prompt)?;
    let mut segments = vec![(codebook, codes)];
    let mut drift = Drift::new(trained.error / 1000.0, 128.0);

    let window = Window { sinks: 0, recent: 128, batch: 64 };
    let mut recent: Vec<f32> = vec![];
    for t in 1000..2200 {
        recent.extend(key(t));
        let leaving = window.to_evict(recent.len() / dim);
        let evicted: Vec<f32> = recent.drain(..leaving * dim).collect();
        let Some((codebook, codes)) = segments.last_mut() else { break };
        drift.observe(codes.append(&codebook.view(), &evicted)?, leaving);
        if drift.ratio() > 2.0 {
            println!("token {t}: the error has grown {:.1} times; training again", drift.ratio());
            let refresh =
                TrainOptions { iterations: 4, start: Start::From(&centroids), ..Default::default() };
            let again = train(shape, &evicted, &refresh)?;
            drift = Drift::new(again.error / leaving as f64, 128.0);
            segments.push((CodebookBuf::new(shape, &again.centroids)?, CodesBuf::new(shape)));
            centroids = again.centroids;
        }
    }
    for (_, codes) in &segments {
        println!("a segment of {} tokens in {} bytes", codes.view().n(), codes.view().size());
    }
    println!("{} tokens exact", recent.len() / dim);
    Ok(())
}
