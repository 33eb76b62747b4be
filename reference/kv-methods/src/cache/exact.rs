//! Exact rows, in 32 or 16 bits.

use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kv_attend::ElementType;
use kv_attend::owner::{Pair, Side};
use kv_llama::Footprint;
use kv_model::Rope;
use svd_core::{Attention, Element, ExactTokens, Rows, SoftmaxStats, attend_exact_into};

use crate::cache::store::{Geometry, RotatedStore, Store};
use crate::{Error, Result};

/// The nearest finite element: an infinity would make attention NaN.
pub(crate) fn rounded<E: Element>(x: f32) -> E {
    E::from_f32(x).saturate()
}

/// A growing list of elements of one type.
#[derive(Clone, Debug)]
pub(crate) enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Elements {
    pub fn new(element: ElementType) -> Self {
        match element {
            ElementType::F32 => Self::F32(vec![]),
            ElementType::F16 => Self::F16(vec![]),
            ElementType::Bf16 => Self::Bf16(vec![]),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    pub fn push(&mut self, values: &[f32]) {
        match self {
            Self::F32(x) => x.extend_from_slice(values),
            Self::F16(x) => x.extend(values.iter().map(|&v| rounded::<f16>(v))),
            Self::Bf16(x) => x.extend(values.iter().map(|&v| rounded::<bf16>(v))),
        }
    }

    /// Widens `out.len()` elements from `start` on.
    pub fn read(&self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(x) => out.copy_from_slice(&x[start..][..out.len()]),
            Self::F16(x) => x[start..][..out.len()].convert_to_f32_slice(out),
            Self::Bf16(x) => x[start..][..out.len()].convert_to_f32_slice(out),
        }
    }

    pub fn truncate(&mut self, len: usize) {
        match self {
            Self::F32(x) => x.truncate(len),
            Self::F16(x) => x.truncate(len),
            Self::Bf16(x) => x.truncate(len),
        }
    }

    /// [`attend_rows`] with these elements as keys and `values`, of the same type, as values, each from its
    /// `starts` on.
    pub fn attend(
        &self,
        values: &Self,
        starts: Pair<usize>,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let Pair { keys: i, values: j } = starts;
        match (self, values) {
            (Self::F32(k), Self::F32(v)) => attend_rows(q, &k[i..], &v[j..], out, stats)?,
            (Self::F16(k), Self::F16(v)) => attend_rows(q, &k[i..], &v[j..], out, stats)?,
            (Self::Bf16(k), Self::Bf16(v)) => attend_rows(q, &k[i..], &v[j..], out, stats)?,
            _ => return Err(Error::argument("keys and values of different types")),
        }
        Ok(())
    }

    /// [`Self::attend`] over the rows of `tokens` only.
    fn attend_chosen(
        &self,
        values: &Self,
        tokens: &[u32],
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        match (self, values) {
            (Self::F32(k), Self::F32(v)) => attend_chosen(q, k, v, tokens, out, stats),
            (Self::F16(k), Self::F16(v)) => attend_chosen(q, k, v, tokens, out, stats),
            (Self::Bf16(k), Self::Bf16(v)) => attend_chosen(q, k, v, tokens, out, stats),
            _ => Err(Error::argument("keys and values of different types")),
        }
    }

    fn drop_front(&mut self, n: usize) {
        match self {
            Self::F32(x) => drop(x.drain(..n)),
            Self::F16(x) => drop(x.drain(..n)),
            Self::Bf16(x) => drop(x.drain(..n)),
        }
    }
}

/// Exact keys and values, head by head.
#[derive(Clone, Debug)]
pub(crate) struct ExactRows {
    geometry: Geometry,
    element: ElementType,
    heads: Vec<Pair<Elements>>, // per head, (len, head_dim) each
}

/// Tokens widened to `f32` at a time.
const BLOCK: usize = 128;

impl ExactRows {
    pub fn new(element: ElementType, geometry: Geometry) -> Self {
        let heads = (0..geometry.n_kv_heads).map(|_| Pair::of(|_| Elements::new(element))).collect();
        Self { geometry, element, heads }
    }

    pub fn len(&self) -> usize {
        self.heads[0].keys.len() / self.geometry.head_dim
    }

    pub fn bytes(&self) -> usize {
        2 * self.len() * self.geometry.kv_dim() * self.element.size()
    }

    /// Bytes of one head's key and value of a token.
    pub fn row_bytes(&self) -> usize {
        2 * self.geometry.head_dim * self.element.size()
    }

    /// Appends rows (n, n_kv_heads * head_dim).
    pub fn push(&mut self, k: &[f32], v: &[f32]) {
        let head_dim = self.geometry.head_dim;
        for (rows, side) in [(k, Side::Keys), (v, Side::Values)] {
            for row in rows.chunks_exact(self.geometry.kv_dim()) {
                for (elements, x) in self.heads.iter_mut().zip(row.chunks_exact(head_dim)) {
                    elements[side].push(x);
                }
            }
        }
    }

    /// The first `n` rows.
    pub fn front(&self, n: usize) -> (Vec<f32>, Vec<f32>) {
        let Geometry { head_dim, .. } = self.geometry;
        let front = Pair::of(|side| {
            let mut rows = vec![0.0; n * self.geometry.kv_dim()];
            for (i, out) in rows.chunks_exact_mut(head_dim).enumerate() {
                let (token, head) = (i / self.heads.len(), i % self.heads.len());
                self.heads[head][side].read(token * head_dim, out);
            }
            rows
        });
        (front.keys, front.values)
    }

    /// Removes the first `n` rows.
    pub fn drop_front(&mut self, n: usize) {
        for elements in self.heads.iter_mut().flat_map(Pair::iter_mut) {
            elements.drop_front(n * self.geometry.head_dim);
        }
    }

    pub fn truncate(&mut self, len: usize) {
        for elements in self.heads.iter_mut().flat_map(Pair::iter_mut) {
            elements.truncate(len * self.geometry.head_dim);
        }
    }

    /// One head's key and value of token `t`.
    pub fn read(&self, head: usize, t: usize, k: &mut [f32], v: &mut [f32]) {
        let Pair { keys, values } = &self.heads[head];
        keys.read(t * self.geometry.head_dim, k);
        values.read(t * self.geometry.head_dim, v);
    }

    /// One head's keys from token `t` on, `k.len()` elements.
    pub fn read_keys(&self, head: usize, t: usize, k: &mut [f32]) {
        self.heads[head].keys.read(t * self.geometry.head_dim, k);
    }

    /// Attention over the rows of `tokens`, with rotated keys.
    pub fn attend_chosen(
        &self,
        head: usize,
        tokens: &[u32],
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let Pair { keys, values } = &self.heads[head];
        keys.attend_chosen(values, tokens, q, out, stats)
    }

    /// Attention over the rows from `first` on. Keys stored before RoPE are rotated on the fly, row 0 to the
    /// given position.
    pub fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        rope: Option<(&Rope, usize)>,
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let head_dim = self.geometry.head_dim;
        let Pair { keys, values } = &self.heads[head];
        let start = Pair::of(|_| first * head_dim);
        let Some((rope, pos)) = rope else { return keys.attend(values, start, q, out, stats) };
        let mut block = Pair::of(|_| vec![0.0; BLOCK.min(self.len()) * head_dim]);
        for first in (first..self.len()).step_by(BLOCK) {
            let len = BLOCK.min(self.len() - first) * head_dim;
            let (k, v) = (&mut block.keys[..len], &mut block.values[..len]);
            keys.read(first * head_dim, k);
            values.read(first * head_dim, v);
            rope.rotate_rows(k, head_dim, pos + first);
            attend_rows(q, k, v, out, stats)?;
        }
        Ok(())
    }
}

/// [`attend_rows`] over the rows of `tokens` only.
fn attend_chosen<E: Element>(
    q: &[f32],
    keys: &[E],
    values: &[E],
    tokens: &[u32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<()> {
    let rows = ExactTokens::contiguous(keys, q.len() / stats.len(), values, out.len() / stats.len())?;
    attend_tokens(q, &rows.chosen(tokens)?, out, stats)
}

/// Attention of scaled queries (group, dim_k) over contiguous rows, one value per key: adds to `out` (group,
/// dim_v) and `stats` (group,).
pub(crate) fn attend_rows<E: Element>(
    q: &[f32],
    keys: &[E],
    values: &[E],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<()> {
    let rows = ExactTokens::contiguous(keys, q.len() / stats.len(), values, out.len() / stats.len())?;
    attend_tokens(q, &rows, out, stats)
}

/// Attention of scaled queries (group, dim_k): adds to `out` (group, dim_v) and `stats` (group,).
pub(crate) fn attend_tokens<E: Element>(
    q: &[f32],
    tokens: &ExactTokens<'_, E>,
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<()> {
    let mut scratch = vec![0.0; q.len()];
    Ok(attend_exact_into(&Attention::default(), Rows::from(q), tokens, &mut scratch, out, stats)?)
}

/// Exact rows with rotated keys: the baseline of all comparisons.
#[derive(Clone)]
pub(crate) struct DenseStore {
    rows: ExactRows,
    rope: Arc<Rope>,
}

impl DenseStore {
    pub fn new(element: ElementType, geometry: Geometry, rope: Arc<Rope>) -> Self {
        Self { rows: ExactRows::new(element, geometry), rope }
    }

    pub fn rows(&self) -> &ExactRows {
        &self.rows
    }

    /// Bytes of one head's key and value of a token.
    pub fn row_bytes(&self) -> usize {
        self.rows.row_bytes()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.rows.len()
    }
}

impl RotatedStore for DenseStore {
    fn push_rotated(&mut self, k: &[f32], v: &[f32]) -> Result<()> {
        self.rows.push(k, v);
        Ok(())
    }
}

impl Store for DenseStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.push_rotated(&self.rope.rotated(k, self.rows.geometry.kv_dim(), pos), v)
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.rows.truncate(len);
        Ok(())
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        self.rows.attend(head, first, q, None, out, stats)
    }

    fn footprint(&self) -> Footprint {
        Footprint { kept: self.rows.bytes(), ..Footprint::default() }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_beyond_an_element_type_become_its_largest_elements() {
        let row = [f32::MAX, f32::MIN, 3.4e38, 65_520.0, -1e5, f32::MIN_POSITIVE, 0.0];
        for (element, most) in [
            (ElementType::F32, f32::MAX),
            (ElementType::F16, f16::MAX.to_f32()),
            (ElementType::Bf16, bf16::MAX.to_f32()),
        ] {
            let mut elements = Elements::new(element);
            elements.push(&row);
            let mut read = [f32::NAN; 7];
            elements.read(0, &mut read);
            for (x, got) in row.iter().zip(read) {
                let near = x.clamp(-most, most);
                assert!((got - near).abs() <= near.abs() / 256.0 + 1e-7, "{element:?}: {x} is {got}");
            }
        }
    }
}
