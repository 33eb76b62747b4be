//! Coded tokens, with scales, biases and a softcap.

use kv_attend::simd::tanh;

use crate::error::check_len;
use crate::{Attention, Codebook, Codes, Error, Luts, PqShape};

/// The coded tokens of one KV head: n keys and values, with optional scales and biases.
///
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, CodedTokens, Codes, PqShape};
/// let shape = PqShape::new(2, 1, 1)?;
/// let values = CodebookBuf::new(shape, &[1.0, 0.0, 0.0, 1.0])?;
/// let bytes = vec![0; shape.codes_len(3)];
/// let codes = Codes::new(shape, 3, &bytes)?;
/// let mask = [0.0, f32::NEG_INFINITY, 0.0]; // hides token 1 from the only query
/// let tokens = CodedTokens::new(codes, codes, values.view())?.with_bias(&mask[..]);
/// assert_eq!(tokens.n(), 3);
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CodedTokens<'a> {
    keys: Codes<'a>,
    values: Codes<'a>,               // n, in the shape of `codebook`
    codebook: Codebook<'a>,          // of the values
    key_scales: Option<&'a [f32]>,   // (n,)
    value_scales: Option<&'a [f32]>, // (n,)
    bias: Option<&'a [f32]>,         // (group, n), checked by `attend_into`
    softcap: Option<f32>,            // positive and finite
}

impl<'a> CodedTokens<'a> {
    /// Combines the codes of the keys, the codes of the values, and the codebook of the values.
    ///
    /// # Errors
    /// [`Error::Length`] when there are more or fewer values than keys; [`Error::ShapeMismatch`] when
    /// `codebook` is not of the values' shape.
    pub fn new(keys: Codes<'a>, values: Codes<'a>, codebook: Codebook<'a>) -> Result<Self, Error> {
        if values.shape() != codebook.shape() {
            return Err(Error::ShapeMismatch);
        }
        check_len("value codes", values.n(), keys.n())?;
        Ok(Self { keys, values, codebook, key_scales: None, value_scales: None, bias: None, softcap: None })
    }

    /// Sets the factors (n,) of the keys' scores, such as the norms that
    /// [`divide_by_norms`](crate::divide_by_norms) removed before encoding. Takes a slice or an `Option` of
    /// one.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn with_key_scales(mut self, scales: impl Into<Option<&'a [f32]>>) -> Result<Self, Error> {
        self.key_scales = scales.into();
        check_len("key scales", self.key_scales.map_or(self.n(), <[f32]>::len), self.n())?;
        Ok(self)
    }

    /// Sets the factors (n,) of the values. Takes a slice or an `Option` of one.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn with_value_scales(mut self, scales: impl Into<Option<&'a [f32]>>) -> Result<Self, Error> {
        self.value_scales = scales.into();
        check_len("value scales", self.value_scales.map_or(self.n(), <[f32]>::len), self.n())?;
        Ok(self)
    }

    /// Sets the terms (group, n) that are added to the scores: a position bias, the scores of a mean that was
    /// subtracted from the keys before encoding (see [`RopeMean`](crate::RopeMean)), or a mask. A token whose
    /// bias is minus infinity contributes nothing, whatever its scales are. Takes a slice or an `Option` of
    /// one. [`attend_into`](crate::attend_into) checks the length, since it depends on the group.
    #[must_use]
    pub fn with_bias(mut self, bias: impl Into<Option<&'a [f32]>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// Caps the scores, after scales and bias: a score becomes `softcap * tanh(score / softcap)`, as with
    /// [`Attention::softcap`]. Takes a number or an `Option` of one.
    ///
    /// # Errors
    /// The error of [`Attention::check`] for a cap that is not positive and finite.
    pub fn with_softcap(mut self, softcap: impl Into<Option<f32>>) -> Result<Self, Error> {
        self.softcap = softcap.into();
        Attention { softcap: self.softcap, ..Attention::default() }.check()?;
        Ok(self)
    }

    /// Number of tokens.
    #[must_use]
    pub const fn n(&self) -> usize {
        self.keys.n()
    }

    /// The shape of the keys' quantizer.
    #[must_use]
    pub const fn key_shape(&self) -> PqShape {
        self.keys.shape()
    }

    /// The shape of the values' quantizer.
    #[must_use]
    pub const fn value_shape(&self) -> PqShape {
        self.values.shape()
    }

    pub(crate) const fn keys(&self) -> Codes<'a> {
        self.keys
    }

    pub(crate) const fn values(&self) -> Codes<'a> {
        self.values
    }

    pub(crate) const fn codebook(&self) -> Codebook<'a> {
        self.codebook
    }

    /// Checks that the tables and the bias fit the tokens.
    pub(crate) fn check_queries(&self, luts: &Luts<'_>) -> Result<(), Error> {
        if luts.shape() != self.key_shape() {
            return Err(Error::ShapeMismatch);
        }
        let bias_len = luts.group().saturating_mul(self.n());
        self.bias.map_or(Ok(()), |bias| check_len("bias", bias.len(), bias_len))
    }

    /// Turns the table scores of tokens `start` and on into the scores of query `g`, in place.
    #[inline(always)]
    pub(crate) fn finish_scores(&self, g: usize, start: usize, scores: &mut [f32]) {
        if let Some(scales) = self.key_scales {
            for (score, &scale) in scores.iter_mut().zip(&scales[start..]) {
                *score *= scale;
            }
        }
        if let Some(bias) = self.bias {
            for (score, &bias) in scores.iter_mut().zip(&bias[g * self.n() + start..]) {
                // The score of a masked token may be NaN, since its scales need not be meaningful.
                *score = if bias == f32::NEG_INFINITY { bias } else { *score + bias };
            }
        }
        if let Some(cap) = self.softcap {
            for score in scores {
                // A masked token stays masked.
                *score = if *score == f32::NEG_INFINITY { *score } else { cap * tanh(*score / cap) };
            }
        }
    }

    /// Multiplies the weights of tokens `start` and on by the scales of their values.
    #[inline(always)]
    pub(crate) fn scale_weights(&self, start: usize, weights: &mut [f32]) {
        if let Some(scales) = self.value_scales {
            for (weight, &scale) in weights.iter_mut().zip(&scales[start..]) {
                // The scale of a token without weight may be NaN or infinite.
                *weight = if *weight == 0.0 { 0.0 } else { *weight * scale };
            }
        }
    }
}
