//! Product-quantizer codes: the setting, and attention on them.

use std::fmt::Display;
use std::str::FromStr;

use pq_core::{CodedTokens, PqShape, attend_into, attend_scratch_len};
use svd_core::SoftmaxStats;

use crate::model::Config;
use crate::side::{Pair, Side};
use crate::{Error, Result};

/// A product quantizer: `m` subspaces of `nbits` bits, written `MxB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PqCode {
    pub m: usize,
    pub nbits: u32,
}

impl PqCode {
    /// The quantizer of heads of `head_dim` components.
    pub fn shape(self, head_dim: usize) -> Result<PqShape> {
        Ok(PqShape::new(head_dim, self.m, self.nbits)?)
    }

    /// Refuses a model whose heads it does not fit.
    pub fn check(self, method: &str, config: &Config) -> Result<()> {
        let checked = PqShape::new(config.head_dim, self.m, self.nbits);
        checked.map(drop).map_err(|e| Error::Argument(format!("method {method}: {e}")))
    }
}

impl Pair<PqCode> {
    /// Refuses a model whose heads they do not fit.
    pub fn check(self, method: &str, config: &Config) -> Result<()> {
        Side::ALL.into_iter().try_for_each(|side| self[side].check(method, config))
    }
}

impl FromStr for PqCode {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parse = |text: &str| -> Option<Self> {
            let (m, nbits) = text.split_once('x')?;
            Some(Self { m: m.parse().ok()?, nbits: nbits.parse().ok()? })
        };
        parse(text).ok_or_else(|| "is not SUBSPACESxBITS, like 64x8".into())
    }
}

impl Display for PqCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.m, self.nbits)
    }
}

/// [`pq_core::attend_into`] with its own scratch, and with the softmax statistics of `svd-core`: the cores do not know each
/// other, and here is where their two types meet.
pub(super) fn attend_to_codes(
    luts: &[f32],
    tokens: &CodedTokens<'_>,
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<()> {
    let mut scratch = vec![0.0; attend_scratch_len(tokens.codebook.shape(), stats.len())];
    let mut pq_stats: Vec<_> =
        stats.iter().map(|&SoftmaxStats { max, sum }| pq_core::SoftmaxStats { max, sum }).collect();
    attend_into(luts, tokens, &mut scratch, out, &mut pq_stats)?;
    for (stats, pq_core::SoftmaxStats { max, sum }) in stats.iter_mut().zip(pq_stats) {
        *stats = SoftmaxStats { max, sum };
    }
    Ok(())
}
