//! Profiles a plane, then prints bits per number and the error at three bin sizes.

use codec_core::{PlaneProfile, Predictor, decode_into, encode};

fn main() -> Result<(), codec_core::Error> {
    let channels = 64;
    let row = |t: usize| {
        (0..channels).map(move |c| ((t * 31 + c * 17) as f32 * 0.61).sin() * (1.0 + c as f32 / 8.0))
    };
    let sample: Vec<f32> = (0..1000).flat_map(row).collect();
    let chunk: Vec<f32> = (1000..1256).flat_map(row).collect();
    for bin_size in [0.1, 0.5, 1.0] {
        let profile = PlaneProfile::fit(&sample, channels, Predictor::Mean, bin_size)?;
        let mut bytes = Vec::new();
        encode(&profile.plane()?, &chunk, &mut bytes)?;
        let mut decoded = vec![0.0; chunk.len()];
        decode_into(&profile.plane()?, &bytes, &mut decoded)?;
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = chunk.iter().zip(&decoded).map(|(a, b)| square(a - b)).sum();
        let power: f64 = chunk.iter().map(|&a| square(a)).sum();
        let bits = 8.0 * bytes.len() as f64 / chunk.len() as f64;
        println!(
            "bins of {bin_size} deviations: {bits:.2} bits a number, relative error {:.4}",
            error / power
        );
    }
    Ok(())
}
