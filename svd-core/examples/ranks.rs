//! Chooses the ranks of four heads for a budget in bytes: by ZACK's common removal rate, and by weighted
//! loss.

use svd_core::{Budget, ranks_by_loss, ranks_by_removal};

fn main() -> Result<(), svd_core::Error> {
    // Singular values of four heads of 128 dimensions, from steep to flat.
    let spectrum =
        |decay: f64| -> Vec<f64> { (0..128).map(|c| 10.0 * (-decay * f64::from(c)).exp()).collect() };
    let spectra: Vec<Vec<f64>> = [0.08, 0.04, 0.02, 0.01].into_iter().map(spectrum).collect();
    let heads: Vec<&[f64]> = spectra.iter().map(Vec::as_slice).collect();

    for per_token in [768, 512, 256] {
        let budget = Budget::Bytes { per_token, per_component: 2 }; // of 1,024 bytes
        let by_removal = ranks_by_removal(&heads, budget, 16)?;
        let by_loss = ranks_by_loss(&heads, &[1.0; 4], budget, 16)?;
        println!("{per_token:4} bytes a token: by removal rate {by_removal:3?}, by loss {by_loss:3?}");
    }
    Ok(())
}
