//! Fitting of profiles: every plane of every level from the rows of a sample text.

use alloc::vec;
use alloc::vec::Vec;

#[cfg(feature = "rayon")]
use rayon::prelude::*;

use super::{MAX_LEVELS, Profile};
use crate::error::check_len;
use crate::frame::check_element;
use crate::place::Gather;
use crate::{
    Backend, Element, ElementType, Error, FrameInfo, LayerRows, LosslessPlaneBuf, ModelInfo, Place, PlaneBuf,
    Side,
};

impl Profile {
    /// Fits the planes of a model to the rows of a sample text: a few thousand tokens, similar to later
    /// contexts. Feature `rayon` fits them in parallel; the result is the same.
    ///
    /// `fit(level, layer, side, sample)` fits one plane to its rows (tokens, heads, head_dim), usually with
    /// [`PlaneBuf::fit`] or [`PlaneBuf::fit_best`].
    ///
    /// # Shapes
    /// `rows` (layers,): `tokens` tokens each, in the layout of `place`.
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`], [`Error::TooShort`], [`Error::TooLarge`], and those of `fit`.
    /// # Cost
    /// That of `fit` for each plane; a plane's rows are copied as `f32`.
    pub fn fit<E: Element>(
        info: ModelInfo,
        levels: usize,
        tokens: usize,
        rows: &[LayerRows<'_, E>],
        place: &Place<'_>,
        fit: impl Fn(usize, usize, Side, &[f32]) -> Result<PlaneBuf, Error> + Sync,
    ) -> Result<Self, Error> {
        if levels > MAX_LEVELS {
            return Err(Error::TooLarge);
        }
        let fit_levels = |layer, side, sample: &[f32]| {
            (0..levels).map(|level| fit(level, layer, side, sample)).collect::<Result<Vec<_>, _>>()
        };
        let fitted = fit_planes(&info, tokens, rows, place, E::widen, fit_levels)?;
        let mut fitted: Vec<_> = fitted.into_iter().map(Vec::into_iter).collect();
        let mut all = vec![];
        (0..levels).for_each(|_| all.extend(fitted.iter_mut().filter_map(Iterator::next)));
        Self::new(info, all)
    }

    /// Fits a profile of one level without loss to the rows of a sample text.
    ///
    /// # Shapes
    /// As for [`Self::fit`]; `element` is f16 or bf16. `f32` rows are rounded to it.
    /// # Errors
    /// As there, and [`Error::ElementNot16Bit`]; [`Error::WrongPlane`] for rows of the other 16-bit type.
    /// # Examples
    /// ```
    /// use codec_core::*;
    /// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
    /// # let model = ModelInfo { model_id: 1, layers: 1, heads: 2, head_dim: 4, keys_rotated: true };
    /// let layers = [LayerRows { keys: &rows, values: &rows }]; // 100 tokens
    /// let place = Place::nhd(model.heads, model.head_dim);
    /// let fit = |_, _, _, sample: &[f32]| PlaneBuf::fit(sample, 8, None, &FitOptions::default());
    /// let lossy = Profile::fit(model, 1, 100, &layers, &place, fit)?;
    /// let lossless = Profile::fit_lossless(model, ElementType::Bf16, 100, &layers, &place)?;
    /// // Level 0 keeps every bit, level 1 is smaller.
    /// let profile = Profile::join([lossless, lossy])?;
    /// let len = |level| {
    ///     let info = profile.frame_info(level, 100);
    ///     profile.encode_into(&info, &layers, &place, &mut vec![0; info.max_frame_len()])
    /// };
    /// assert!(len(1)? < len(0)? && len(0)? < 2 * 2 * 800);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn fit_lossless<E: Element>(
        info: ModelInfo,
        element: ElementType,
        tokens: usize,
        rows: &[LayerRows<'_, E>],
        place: &Place<'_>,
    ) -> Result<Self, Error> {
        check_element::<E>(element)?;
        let fit = |_, _, sample: &[u16]| LosslessPlaneBuf::fit(element, sample, info.channels());
        let planes = fit_planes(&info, tokens, rows, place, |x: E| x.to_u16(element), fit)?;
        Self::lossless(info, planes)
    }
}

/// Fits something to the rows of every plane, (layers, 2), in parallel with feature `rayon`.
fn fit_planes<E: Element, T, P: Send>(
    info: &ModelInfo,
    tokens: usize,
    rows: &[LayerRows<'_, E>],
    place: &Place<'_>,
    convert: impl Fn(E) -> T + Sync + Copy,
    fit: impl Fn(usize, Side, &[T]) -> Result<P, Error> + Sync,
) -> Result<Vec<P>, Error> {
    info.check()?;
    check_len("rows", rows.len(), info.layers)?;
    let frame = FrameInfo::new(info.layers, info.heads, info.head_dim, tokens);
    frame.check()?;
    for rows in rows.iter().flat_map(|rows| [rows.keys, rows.values]) {
        place.check("rows of a plane", rows.len(), &frame, 0..tokens)?;
    }
    let fit_plane = |plane: usize| {
        let (layer, side) = (plane / 2, [Side::Keys, Side::Values][plane % 2]);
        let LayerRows { keys, values } = rows[layer];
        let rows = if side == Side::Keys { keys } else { values };
        let (mut sample, info) = (vec![], &frame);
        Backend::detect().run(Gather { place, info, tokens: 0..tokens, rows, convert, out: &mut sample });
        fit(layer, side, &sample)
    };
    let planes = 0..2 * info.layers;
    #[cfg(feature = "rayon")]
    let planes = planes.into_par_iter();
    planes.map(fit_plane).collect()
}
