//! How many sequences and tokens of a method fit in memory.

use kv_methods::Method;
use kv_reference::{Error, Result};

/// Tokens of a pool whose bytes are taken, a multiple of any page.
const SAMPLE: usize = 4096;

/// How much more than the mean requests that fit in a pool get places: how long they are differs.
const SPARE: f64 = 1.25;

/// A method as it fits in memory.
#[derive(Debug)]
pub struct Fitted {
    /// The method, of a paged cache with its pool.
    pub method: Method,
    /// Sequences.
    pub places: usize,
    /// Tokens of all sequences together, of a paged cache.
    pub pool: Option<usize>,
}

/// The most sequences, at most `most`, of a method whose cache takes at most `memory` bytes: those that fit
/// with their longest length or, of a paged cache, as many as fit with a mean of `mean_held` tokens and a few
/// more, so that the pool decides how many run. `bytes` of a method and a number of sequences is the size of
/// their cache, which grows by the same for each sequence and each token of a pool.
///
/// # Errors
/// [`Error::Argument`] if not even one fits; errors of `bytes`.
pub fn fitted(
    method: &Method,
    (memory, most): (usize, usize),
    mean_held: f64,
    bytes: impl Fn(&Method, usize) -> Result<usize>,
) -> Result<Fitted> {
    let too_little = || {
        let spec = method.spec();
        Error::Argument(format!("--memory: no sequence of {spec} fits in {memory} bytes"))
    };
    let bytes = |method: &Method, places: usize| Ok::<_, Error>(bytes(method, places)? as f64);
    let memory = memory as f64;
    if !method.spec().contains(":pages=") {
        let (one, two) = (bytes(method, 1)?, bytes(method, 2)?);
        let places = (most as f64).min(1.0 + ((memory - one) / (two - one)).floor());
        return match places >= 1.0 {
            true => Ok(Fitted { method: method.clone(), places: places as usize, pool: None }),
            false => Err(too_little()),
        };
    }
    let with_pool =
        |tokens: usize| -> Result<Method> { Ok(format!("{}:pool={tokens}", method.spec()).parse()?) };
    let (sample, double) = (with_pool(SAMPLE)?, with_pool(2 * SAMPLE)?);
    let one = bytes(&sample, 1)?;
    let (of_place, of_pool) = (bytes(&sample, 2)? - one, bytes(&double, 1)? - one);
    let of_token = of_pool / SAMPLE as f64;
    let rest = memory - (one - of_place - of_pool);
    let places = (SPARE * rest / (mean_held * of_token + SPARE * of_place)).floor().clamp(1.0, most as f64);
    let pool = ((rest - places * of_place) / of_token).floor();
    match pool >= 1.0 {
        true => {
            let pool = pool as usize;
            Ok(Fitted { method: with_pool(pool)?, places: places as usize, pool: Some(pool) })
        }
        false => Err(too_little()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a cache of 1,000 for all, 100 for a sequence and 10 for a token.
    fn bytes(method: &Method, places: usize) -> Result<usize> {
        let spec = method.spec();
        let pool = spec.split(":pool=").nth(1).map(|tokens| tokens.parse::<usize>().unwrap());
        Ok(1000 + 100 * places + 10 * pool.unwrap_or(places * 500))
    }

    #[test]
    fn sequences_without_pages_take_their_longest_length() {
        let method: Method = "sq".parse().unwrap();
        let fit = |memory, most| fitted(&method, (memory, most), 50.0, bytes);
        assert_eq!(fit(1000 + 7 * 5100, 100).unwrap().places, 7);
        assert_eq!(fit(1000 + 8 * 5100 - 1, 100).unwrap().places, 7);
        assert_eq!(fit(1 << 30, 100).unwrap().places, 100);
        assert!(fit(6000, 100).is_err());
    }

    #[test]
    fn pools_take_the_memory_that_sequences_leave() {
        let method: Method = "dense:dtype=f16:pages=64".parse().unwrap();
        for (memory, mean, most) in [(100_000, 50.0, 100), (200_000, 300.0, 100), (50_000, 4000.0, 64)] {
            let fitted = fitted(&method, (memory, most), mean, bytes).unwrap();
            let (places, pool) = (fitted.places, fitted.pool.unwrap());
            let taken = bytes(&fitted.method, places).unwrap();
            assert!(taken <= memory && taken + 10 > memory, "{taken} of {memory}");
            let held = places as f64 * mean / pool as f64;
            assert!(places == most || places == 1 || (1.0..=SPARE).contains(&held), "{places} in {pool}");
        }
        assert!(fitted(&method, (1100, 10), 50.0, bytes).is_err());
    }
}
