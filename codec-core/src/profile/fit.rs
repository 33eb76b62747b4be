//! Fitting of profiles: every plane of every level from the rows of a sample text.

use alloc::vec;
use alloc::vec::Vec;

#[cfg(feature = "rayon")]
use rayon::prelude::*;

use super::{MAX_LEVELS, Profile};
use crate::error::check_len;
use crate::place::Gather;
use crate::{Backend, Element, Error, FrameInfo, LayerRows, ModelInfo, Place, PlaneBuf, Side};

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
        info.check()?;
        if levels > MAX_LEVELS {
            return Err(Error::TooLarge);
        }
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
            let out = &mut sample;
            Backend::detect().run(Gather { place, info, tokens: 0..tokens, rows, convert: E::widen, out });
            (0..levels).map(|level| fit(level, layer, side, &sample)).collect()
        };
        let planes = 0..2 * info.layers;
        #[cfg(feature = "rayon")]
        let planes = planes.into_par_iter();
        let fitted: Vec<Vec<PlaneBuf>> = planes.map(fit_plane).collect::<Result<_, Error>>()?;
        let mut fitted: Vec<_> = fitted.into_iter().map(Vec::into_iter).collect();
        let mut all = vec![];
        (0..levels).for_each(|_| all.extend(fitted.iter_mut().filter_map(Iterator::next)));
        Self::new(info, all)
    }
}
