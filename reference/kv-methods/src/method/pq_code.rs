//! Product-quantizer codes: the setting.

use std::fmt::Display;
use std::str::FromStr;

use kv_attend::owner::{Pair, Side};
use kv_model::Config;
use pq_core::PqShape;

use super::settings::Settings;
use crate::{Error, Result};

/// Tokens per tile of codes on a device; a page consists of whole tiles.
pub(super) const CODE_TILE: usize = 32;

/// A product quantizer: `m` subspaces of `nbits` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PqCode {
    pub m: usize,
    pub nbits: u32,
}

/// A product quantizer in the command line's notation: `MxB`, or `B/D` for codes of `B` bits per `D`
/// components of a head.
enum Written {
    Code(PqCode),
    Rate { nbits: u32, components: usize },
}

impl PqCode {
    /// Takes a setting. The default is a code of `nbits` bits per `components` components of a head.
    pub fn take(s: &mut Settings<'_>, key: &'static str, nbits: u32, components: usize) -> Result<Self> {
        let head_dim = s.head_dim;
        s.resolved(key, Written::Rate { nbits, components }, |written| match written {
            Written::Code(code) => code,
            Written::Rate { nbits, components } => Self::of_rate(nbits, components, head_dim),
        })
    }

    /// The settings `k` and `v`.
    pub fn take_both(s: &mut Settings<'_>, nbits: u32, components: usize) -> Result<Pair<Self>> {
        Ok(Pair::new(Self::take(s, "k", nbits, components)?, Self::take(s, "v", nbits, components)?))
    }

    /// Subspaces of `components` components, or of the next smaller number that divides `head_dim`.
    fn of_rate(nbits: u32, components: usize, head_dim: usize) -> Self {
        let fits = |dsub: &usize| head_dim.is_multiple_of(*dsub);
        let dsub = (1..=components.min(head_dim)).rev().find(fits).unwrap_or(1);
        Self { m: head_dim / dsub, nbits }
    }

    /// The quantizer of heads of `head_dim` components.
    pub fn shape(self, head_dim: usize) -> Result<PqShape> {
        Ok(PqShape::new(head_dim, self.m, self.nbits)?)
    }

    /// Rejects a model whose heads this code, the setting `key`, does not fit.
    pub fn check(self, method: &str, key: impl Display, config: &Config) -> Result<()> {
        let checked = PqShape::new(config.head_dim, self.m, self.nbits);
        checked.map(drop).map_err(|e| Error::Argument(format!("method {method}: {key}={self}: {e}")))
    }
}

/// Rejects a model whose heads the codes do not fit.
pub(super) fn check_codes(codes: Pair<PqCode>, method: &str, config: &Config) -> Result<()> {
    Side::ALL.into_iter().try_for_each(|side| codes[side].check(method, side.letter(), config))
}

impl FromStr for Written {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let code = |(m, nbits): (&str, &str)| -> Option<Self> {
            Some(Self::Code(PqCode { m: m.parse().ok()?, nbits: nbits.parse().ok()? }))
        };
        let rate = |(nbits, components): (&str, &str)| -> Option<Self> {
            let components = components.parse().ok().filter(|&components| components > 0)?;
            Some(Self::Rate { nbits: nbits.parse().ok()?, components })
        };
        let parsed = text.split_once('x').and_then(code).or_else(|| text.split_once('/').and_then(rate));
        parsed.ok_or_else(|| "must be SUBSPACESxBITS, like 64x8, or BITS/COMPONENTS, like 8/2".into())
    }
}

impl Display for PqCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.m, self.nbits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::Place;

    #[test]
    fn rates_become_subspaces_that_divide_the_head() {
        let code = |spec: &str, head_dim| {
            let mut s = Settings::new(spec, head_dim, Place::Cpu).unwrap();
            PqCode::take(&mut s, "k", 8, 2).unwrap().to_string()
        };
        for (spec, head_dim, expected) in [
            ("million", 128, "64x8"),
            ("million", 8, "4x8"),
            ("million:k=6/64", 128, "2x6"),
            ("million:k=6/64", 8, "1x6"),
            ("million:k=8/4", 6, "2x8"),
            ("million:k=7/3", 128, "64x7"),
            ("million:k=3x5", 128, "3x5"),
        ] {
            assert_eq!(code(spec, head_dim), expected, "{spec}");
        }
    }
}
