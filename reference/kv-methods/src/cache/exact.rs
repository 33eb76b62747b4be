//! Exact rows, in 32 or 16 bits.

use std::ops::Range;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kv_attend::owner::ExactRows;
use kv_attend::{AnyRows, Element, ElementType, ExactTokens, Rows, Window};
use kv_llama::Footprint;
use kv_model::Rope;
use svd_core::{Attention, attend_exact_into};

use crate::Result;
use crate::cache::store::{Geometry, RotatedStore, Store, Sums};

/// The nearest finite element: an infinity would make attention NaN.
pub(crate) fn rounded<E: Element>(x: f32) -> E {
    E::from_f32(x).saturate()
}

/// Widens elements to `out`.
fn widen<E: Element>(elements: &[E], out: &mut [f32]) {
    match AnyRows::from(Rows::from(elements)) {
        AnyRows::F32(rows) => out.copy_from_slice(rows.row(0)),
        AnyRows::F16(rows) => rows.row(0).convert_to_f32_slice(out),
        AnyRows::Bf16(rows) => rows.row(0).convert_to_f32_slice(out),
    }
}

/// The elements of rows in some parts, in single precision.
pub(crate) fn widened<E: Element>(parts: &[Rows<'_, E>]) -> Vec<f32> {
    let mut all = vec![0.0; parts.iter().map(|rows| rows.rows() * rows.components()).sum()];
    let mut left = &mut all[..];
    for row in parts.iter().flat_map(|rows| rows.iter()) {
        let (out, rest) = left.split_at_mut(row.len());
        widen(row, out);
        left = rest;
    }
    all
}

/// Attention of one head over the tokens of `range`, whose keys are rotated on the fly, that of row 0 to
/// position `start`: [`attend_rows`].
pub(crate) fn attend_before_rope<E: Element>(
    rope: &Rope,
    start: usize,
    [keys, values]: [Rows<'_, E>; 2],
    range: Range<usize>,
    q: &[f32],
    sums: &mut Sums<'_>,
) -> Result<()> {
    /// Tokens widened at a time.
    const BLOCK: usize = 128;
    for first in range.clone().step_by(BLOCK) {
        let block = first..range.end.min(first + BLOCK);
        let mut k = widened(&[keys.slice(block.clone())?]);
        let v = widened(&[values.slice(block)?]);
        rope.rotate_rows(&mut k, keys.components(), start + first);
        attend_rows(q, &k, &v, sums)?;
    }
    Ok(())
}

/// One head's rows, whose element type is chosen at run time.
#[derive(Clone, Debug)]
pub(crate) enum HeadRows {
    F32(ExactRows<f32>),
    F16(ExactRows<f16>),
    Bf16(ExactRows<bf16>),
}

/// Evaluates an expression with the rows of a [`HeadRows`].
macro_rules! for_rows {
    ($any:expr, $rows:ident => $result:expr) => {
        match $any {
            HeadRows::F32($rows) => $result,
            HeadRows::F16($rows) => $result,
            HeadRows::Bf16($rows) => $result,
        }
    };
}

impl HeadRows {
    /// No rows, of `dim` components.
    pub const fn new(element: ElementType, dim: usize) -> Self {
        // None leaves: all are sinks.
        let (dims, window) = ([dim; 2], Window { sinks: usize::MAX, recent: 0, batch: 1 });
        match element {
            ElementType::F32 => Self::F32(ExactRows::new(dims, window)),
            ElementType::F16 => Self::F16(ExactRows::new(dims, window)),
            ElementType::Bf16 => Self::Bf16(ExactRows::new(dims, window)),
        }
    }

    pub const fn len(&self) -> usize {
        for_rows!(self, rows => rows.sinks())
    }

    pub fn bytes(&self) -> usize {
        for_rows!(self, rows => rows.size())
    }

    /// Appends rows (n, dim).
    pub fn push(&mut self, keys: Rows<'_, f32>, values: Rows<'_, f32>) -> Result<()> {
        fn push<E: Element>(exact: &mut ExactRows<E>, rows: [Rows<'_, f32>; 2]) -> Result<()> {
            let [k, v] = rows.map(|rows| rows.iter().flatten().map(|&x| rounded(x)).collect::<Vec<E>>());
            let [dim, dim_v] = rows.map(|rows| rows.components());
            exact.append(0, [Rows::contiguous(&k, dim)?, Rows::contiguous(&v, dim_v)?], |_| Ok(()))
        }
        for_rows!(self, exact => push(exact, [keys, values]))
    }

    /// Drops all rows but `kept`, ascending.
    pub fn retain(&mut self, kept: &[usize]) -> Result<()> {
        fn retain<E: Element>(exact: &mut ExactRows<E>, kept: &[usize]) -> Result<()> {
            let ([keys, values], [dim, dim_v]) = (exact.sink_rows(), exact.dims());
            let rows = |rows: &[E], dim: usize| -> Vec<E> {
                kept.iter().flat_map(|&i| &rows[i * dim..][..dim]).copied().collect()
            };
            let (keys, values) = (rows(keys, dim), rows(values, dim_v));
            exact.truncate(0, 0);
            exact.append(0, [Rows::contiguous(&keys, dim)?, Rows::contiguous(&values, dim_v)?], |_| Ok(()))
        }
        for_rows!(self, exact => retain(exact, kept))
    }

    pub fn truncate(&mut self, len: usize) {
        for_rows!(self, rows => _ = rows.truncate(len, 0));
    }

    /// The keys and values from token `first` on, as many as there is room for.
    pub fn read(&self, first: usize, keys: &mut [f32], values: &mut [f32]) {
        for_rows!(self, rows => {
            let ([k, v], [dim, dim_v]) = (rows.sink_rows(), rows.dims());
            widen(&k[first * dim..][..keys.len()], keys);
            widen(&v[first * dim_v..][..values.len()], values);
        });
    }

    /// Attention over the rows from `first` on, or over some of these: [`attend_tokens`].
    pub fn attend(&self, first: usize, chosen: Option<&[u32]>, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        for_rows!(self, rows => {
            let ([keys, values], [dim, dim_v]) = (rows.sink_rows(), rows.dims());
            let (keys, values) = (&keys[first * dim..], &values[first * dim_v..]);
            let tokens = ExactTokens::contiguous(keys, dim, values, dim_v)?;
            attend_tokens(q, &chosen.map_or(Ok(tokens), |chosen| tokens.chosen(chosen))?, sums)
        })
    }
}

/// Attention of scaled queries (group, dim_k) over contiguous rows, one value per key.
pub(crate) fn attend_rows<E: Element>(
    q: &[f32],
    keys: &[E],
    values: &[E],
    sums: &mut Sums<'_>,
) -> Result<()> {
    let group = sums.stats.len();
    let rows = ExactTokens::contiguous(keys, q.len() / group, values, sums.out.len() / group)?;
    attend_tokens(q, &rows, sums)
}

/// Attention of scaled queries (group, dim_k).
pub(crate) fn attend_tokens<E: Element>(
    q: &[f32],
    tokens: &ExactTokens<'_, E>,
    sums: &mut Sums<'_>,
) -> Result<()> {
    let mut scratch = vec![0.0; q.len()];
    let Sums { out, stats } = sums;
    Ok(attend_exact_into(&Attention::default(), Rows::from(q), tokens, &mut scratch, out, stats)?)
}

/// Exact rows with rotated keys: the baseline of all comparisons.
#[derive(Clone)]
pub(crate) struct DenseStore {
    geometry: Geometry,
    element: ElementType,
    rope: Arc<Rope>,
    heads: Vec<HeadRows>,
}

impl DenseStore {
    pub fn new(element: ElementType, geometry: Geometry, rope: Arc<Rope>) -> Self {
        let heads = (0..geometry.n_kv_heads).map(|_| HeadRows::new(element, geometry.head_dim)).collect();
        Self { geometry, element, rope, heads }
    }

    pub fn head(&self, head: usize) -> &HeadRows {
        &self.heads[head]
    }

    /// Bytes of one head's key and value of a token.
    pub const fn row_bytes(&self) -> usize {
        2 * self.geometry.head_dim * self.element.size()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.heads[0].len()
    }
}

impl RotatedStore for DenseStore {
    fn push_rotated(&mut self, k: &[f32], v: &[f32]) -> Result<()> {
        let mut heads = self.heads.iter_mut().enumerate();
        heads.try_for_each(|(h, rows)| rows.push(self.geometry.head(h, k)?, self.geometry.head(h, v)?))
    }
}

impl Store for DenseStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.push_rotated(&self.rope.rotated(k, self.geometry.kv_dim(), pos), v)
    }

    fn len(&self) -> usize {
        self.tokens()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().for_each(|rows| rows.truncate(len));
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        self.heads[head].attend(first, None, q, sums)
    }

    fn footprint(&self) -> Footprint {
        Footprint { kept: self.heads.iter().map(HeadRows::bytes).sum(), ..Footprint::default() }
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
            let mut rows = HeadRows::new(element, row.len());
            rows.push(Rows::from(&row[..]), Rows::from(&row[..])).unwrap();
            let (mut read, mut values) = ([f32::NAN; 7], [f32::NAN; 7]);
            rows.read(0, &mut read, &mut values);
            assert_eq!((read, rows.bytes()), (values, 2 * 7 * element.size()));
            for (x, got) in row.iter().zip(read) {
                let near = x.clamp(-most, most);
                assert!((got - near).abs() <= near.abs() / 256.0 + 1e-7, "{element:?}: {x} is {got}");
            }
        }
    }
}
