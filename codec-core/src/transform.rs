//! Maps of a head to coefficients and back, and the rotation of decoded keys to their positions.

use crate::Error;
use crate::error::check_len;
use crate::quant::clamp_finite;
use crate::simd::Kernel;

/// The largest `head_dim` of a [`Transform`]: one is kept on the stack. A head of a transform may be several
/// of the model's, of one layer or of a group of layers that are one layer of a [`Frame`](crate::Frame).
pub const MAX_HEAD_DIM: usize = 4096;

/// A linear map per head to coefficients, and its inverse; borrowed.
///
/// Rows minus their mean become coefficients, which are quantized. With `svd-core`'s query-metric rotation,
/// `forward` is its basis and `inverse` the transpose of its dual.
///
/// A transform may have the leading coefficients alone. The others decode as zeros, and take no bits: at low
/// rates most coefficients of many heads together are zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transform<'a> {
    pub(crate) head_dim: usize,
    pub(crate) rank: usize,
    pub(crate) forward: &'a [f32], // (heads, head_dim, rank): row i holds the coefficients of component i
    pub(crate) inverse: &'a [f32], // (heads, rank, head_dim): row i holds the components of coefficient i
}

impl<'a> Transform<'a> {
    /// Maps of heads of `head_dim` components.
    ///
    /// # Shapes
    /// `forward`, `inverse` (heads, head_dim, head_dim): row `i` of a `forward` map holds the coefficients of
    /// component `i`, row `i` of an `inverse` map the components of coefficient `i`. It is not checked that
    /// they are inverse to each other.
    /// # Errors
    /// [`Error::Zero`], [`Error::TooLarge`] beyond [`MAX_HEAD_DIM`], [`Error::Length`], [`Error::NotFinite`].
    pub fn new(head_dim: usize, forward: &'a [f32], inverse: &'a [f32]) -> Result<Self, Error> {
        Self::leading(head_dim, head_dim, forward, inverse)
    }

    /// Maps of heads of `head_dim` components to their leading `rank` coefficients.
    ///
    /// # Shapes
    /// As for [`Self::new`], with `forward` (heads, head_dim, rank) and `inverse` (heads, rank, head_dim).
    /// # Errors
    /// As there; [`Error::BadPlane`] for a rank that is not within 1..=head_dim.
    pub fn leading(
        head_dim: usize,
        rank: usize,
        forward: &'a [f32],
        inverse: &'a [f32],
    ) -> Result<Self, Error> {
        if head_dim == 0 || forward.is_empty() {
            let what = if head_dim == 0 { "head_dim of the transform" } else { "heads of the transform" };
            return Err(Error::Zero { what });
        }
        if head_dim > MAX_HEAD_DIM {
            return Err(Error::TooLarge);
        }
        if !(1..=head_dim).contains(&rank) {
            return Err(Error::BadPlane { what: "the rank of a transform must be within 1..=head_dim" });
        }
        let heads = forward.len() / (head_dim * rank);
        check_len("forward", forward.len(), heads.max(1) * head_dim * rank)?;
        check_len("inverse", inverse.len(), forward.len())?;
        if forward.iter().chain(inverse).any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "transform" });
        }
        Ok(Self { head_dim, rank, forward, inverse })
    }

    /// Components of a head.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Coefficients of a head.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// The maps to coefficients, (heads, head_dim, rank).
    #[must_use]
    pub const fn forward(&self) -> &'a [f32] {
        self.forward
    }

    /// The maps from coefficients, (heads, rank, head_dim).
    #[must_use]
    pub const fn inverse(&self) -> &'a [f32] {
        self.inverse
    }

    pub(crate) const fn channels(&self) -> usize {
        self.forward.len() / self.rank
    }

    /// Coefficients of all heads.
    pub(crate) const fn coefficients(&self) -> usize {
        self.forward.len() / self.head_dim
    }

    /// All entries of both maps.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &'a f32> {
        self.forward.iter().chain(self.inverse)
    }

    /// Turns rows minus their mean into coefficients, in place: they are the first elements of each row.
    #[cfg(feature = "alloc")]
    pub(crate) const fn apply_forward<'b>(self, rows: &'b mut [f32]) -> Apply<'a, 'b> {
        Apply { from: self.head_dim, to: self.rank, maps: self.forward, rows }
    }

    /// Turns coefficients, the first elements of each row, into rows minus their mean, in place.
    pub(crate) const fn apply_inverse<'b>(self, rows: &'b mut [f32]) -> Apply<'a, 'b> {
        Apply { from: self.rank, to: self.head_dim, maps: self.inverse, rows }
    }
}

/// Sums on the stack: those of several tokens, which share the loads of a map.
const SUMS: usize = 4 * MAX_HEAD_DIM;

/// Maps every head of every row. Sums are in the order of the inputs and products are rounded separately, so
/// that all backends give the same bits. Inputs of zero are skipped; at low rates most coefficients are zero.
pub(crate) struct Apply<'a, 'b> {
    from: usize, // elements of a head before, which begin at a multiple of this in a row
    to: usize,   // and after
    maps: &'a [f32],
    rows: &'b mut [f32],
}

impl Kernel for Apply<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { from, to, maps, rows } = self;
        let heads = maps.len() / (from * to);
        let channels = heads * from.max(to);
        let mut sums = [0.0_f32; SUMS];
        for rows in rows.chunks_mut(SUMS / to * channels) {
            let sums = &mut sums[..rows.len() / channels * to];
            for head in 0..heads {
                // No head is overwritten before its turn: heads that shrink go forwards, others backwards.
                let head = if to < from { head } else { heads - 1 - head };
                let map = &maps[head * from * to..][..from * to];
                sums.fill(0.0);
                for (i, map) in map.chunks_exact(to).enumerate() {
                    for (row, sum) in rows.chunks_exact(channels).zip(sums.chunks_exact_mut(to)) {
                        let x = row[head * from + i];
                        if x != 0.0 {
                            for (sum, m) in sum.iter_mut().zip(map) {
                                *sum += x * m;
                            }
                        }
                    }
                }
                for (row, sum) in rows.chunks_exact_mut(channels).zip(sums.chunks_exact(to)) {
                    row[head * to..][..to].copy_from_slice(sum);
                }
            }
        }
    }
}

/// Rotary position embedding of decoded keys: cosines and sines of the tokens' positions, in order.
///
/// Component `i` of a head is paired with component `i + head_dim / 2`, or with its neighbour.
#[derive(Clone, Copy, Debug)]
pub struct RopeTable<'a> {
    half: usize,
    cos: &'a [f32], // (tokens, half)
    sin: &'a [f32], // (tokens, half)
    neighbours: bool,
}

impl<'a> RopeTable<'a> {
    /// Pairs `i` and `i + head_dim / 2` (Hugging Face).
    ///
    /// # Shapes
    /// `cos`, `sin` (tokens, head_dim / 2).
    /// # Errors
    /// [`Error::OddHeadDim`], [`Error::Length`].
    /// # Examples
    /// ```
    /// use codec_core::RopeTable;
    /// let (head_dim, first_token, tokens) = (8, 100, 3);
    /// let angle = |token: usize, i: usize| token as f32 * 10_000_f32.powf(-2.0 * i as f32 / head_dim as f32);
    /// let angles: Vec<f32> = (first_token..first_token + tokens)
    ///     .flat_map(|token| (0..head_dim / 2).map(move |i| angle(token, i)))
    ///     .collect();
    /// let cos: Vec<f32> = angles.iter().map(|x| x.cos()).collect();
    /// let sin: Vec<f32> = angles.iter().map(|x| x.sin()).collect();
    /// let rope = RopeTable::halves(head_dim, &cos, &sin)?; // for `decode_plane_to` of 3 tokens
    /// # let _ = rope;
    /// # Ok::<(), codec_core::Error>(())
    /// ```
    pub fn halves(head_dim: usize, cos: &'a [f32], sin: &'a [f32]) -> Result<Self, Error> {
        Self::new(head_dim, cos, sin, false)
    }

    /// Pairs `2 i` and `2 i + 1` (the original layout, GPT-J, GGUF).
    ///
    /// # Errors
    /// As [`Self::halves`].
    pub fn neighbours(head_dim: usize, cos: &'a [f32], sin: &'a [f32]) -> Result<Self, Error> {
        Self::new(head_dim, cos, sin, true)
    }

    fn new(head_dim: usize, cos: &'a [f32], sin: &'a [f32], neighbours: bool) -> Result<Self, Error> {
        let half = head_dim / 2;
        if half == 0 || head_dim % 2 == 1 {
            return Err(Error::OddHeadDim { head_dim });
        }
        check_len("cos", cos.len(), cos.len() / half * half)?;
        check_len("sin", sin.len(), cos.len())?;
        Ok(Self { half, cos, sin, neighbours })
    }

    pub(crate) const fn head_dim(&self) -> usize {
        2 * self.half
    }

    pub(crate) const fn tokens(&self) -> usize {
        self.cos.len() / self.half
    }

    /// The rows of the given tokens.
    pub(crate) fn tokens_of(&self, tokens: core::ops::Range<usize>) -> Self {
        let part = tokens.start * self.half..tokens.end * self.half;
        Self { cos: &self.cos[part.clone()], sin: &self.sin[part], ..*self }
    }

    /// Rotates every head of a token's row and clamps the results to the finite `f32`.
    #[inline(always)]
    pub(crate) fn rotate(&self, token: usize, row: &mut [f32]) {
        let cos = &self.cos[token * self.half..][..self.half];
        let sin = &self.sin[token * self.half..][..self.half];
        for head in row.chunks_exact_mut(2 * self.half) {
            if self.neighbours {
                for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                    let [a, b] = *pair;
                    *pair = [clamp_finite(a * cos - b * sin), clamp_finite(b * cos + a * sin)];
                }
            } else {
                let (low, high) = head.split_at_mut(self.half);
                for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    (*a, *b) = (clamp_finite(*a * cos - *b * sin), clamp_finite(*b * cos + *a * sin));
                }
            }
        }
    }
}
