//! Codes of transformed rows, as plain data.

use kv_attend::owner::Pair;
use pq_core::CodebookBuf;

use crate::bases::BasisMaps;
use crate::hashed::{RANDOM_MEANS, hashed};
use crate::plan::{Heads, RowForm, TransformedHead};
use crate::shape::CacheShape;

/// What hashed codes of values count as: a number with which a bound has some effect on how many rows a step
/// reads.
const HASHED_VALUE_ERROR: f32 = 0.5;

/// Codes of transformed rows.
pub(crate) struct TransformedCodes {
    pub form: RowForm,
    pub codebooks: Option<Heads<Pair<CodebookBuf>>>, // or hashed ones
    pub maps: BasisMaps,
    pub key_means: Vec<f32>,    // (layer, heads, head_dim)
    pub key_errors: Vec<f32>,   // (layer, heads, head_dim): mean squares
    pub value_errors: Vec<f32>, // (layer, heads): mean squares over the variance
}

impl TransformedCodes {
    /// Those of these heads, or hashed ones.
    pub fn new(shape: &CacheShape, form: RowForm, heads: Option<Heads<TransformedHead>>) -> Self {
        let Some(heads) = heads else {
            let keys = shape.layers * shape.kv_dim();
            return Self {
                form,
                codebooks: None,
                maps: BasisMaps::random(shape),
                key_means: (0..keys as u64).map(|i| hashed(RANDOM_MEANS, i, 1.0)).collect(),
                key_errors: vec![0.0; keys],
                value_errors: vec![HASHED_VALUE_ERROR; shape.layers * shape.heads],
            };
        };
        let all = || heads.iter().flatten();
        let of_all = |part: fn(&TransformedHead) -> &[f32]| all().flat_map(part).copied().collect();
        Self {
            form,
            maps: BasisMaps {
                value_means: Some(of_all(|head| &head.value_mean)),
                ..BasisMaps::of(all().map(|head| &head.maps))
            },
            key_means: of_all(|head| &head.key_mean),
            key_errors: of_all(|head| &head.key_errors),
            value_errors: all().map(|head| head.value_error).collect(),
            codebooks: Some(
                heads
                    .into_iter()
                    .map(|layer| layer.into_iter().map(|head| head.codebooks).collect())
                    .collect(),
            ),
        }
    }
}
