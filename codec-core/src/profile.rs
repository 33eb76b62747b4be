//! The planes of a whole model.

mod bytes;
mod fit;

use alloc::vec;
use alloc::vec::Vec;

use crate::error::check_len;
use crate::frame::encode_elements_into;
use crate::{
    Element, Error, Frame, FrameInfo, LosslessPlane, LosslessPlaneBuf, Place, Plane, PlaneBuf, RopeTable,
    Side, encode_frame_into,
};

/// Levels that the header of a frame can name.
const MAX_LEVELS: usize = 1 << 8;

/// The model of a [`Profile`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ModelInfo {
    /// The user's identifier of the model: a hash of its weights, or [`Self::id_of`] its name.
    pub model_id: u64,
    /// Number of layers.
    pub layers: usize,
    /// Key/value heads per layer.
    pub heads: usize,
    /// Components per head.
    pub head_dim: usize,
    /// Whether keys are stored after RoPE.
    pub keys_rotated: bool,
}

impl ModelInfo {
    /// An identifier made of a name: its 64-bit FNV-1a hash.
    ///
    /// ```
    /// assert_eq!(codec_core::ModelInfo::id_of("a"), 0xaf63_dc4c_8601_ec8c);
    /// ```
    #[must_use]
    pub fn id_of(name: &str) -> u64 {
        let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// Elements of a token in one plane.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    fn check(&self) -> Result<(), Error> {
        FrameInfo::new(self.layers, self.heads, self.head_dim, 0).check()
    }
}

/// The rows of one layer, keys and values in the same layout ([`Place`]).
#[derive(Clone, Copy, Debug)]
pub struct LayerRows<'a, E> {
    /// Rows of the keys, in a layout that [`Place`] names.
    pub keys: &'a [E],
    /// Rows of the values, in the same layout.
    pub values: &'a [E],
}

/// The planes of a whole model: of the keys and the values of all layers, at one or several levels, of which
/// some may be without loss. It is fitted once for a model, and then encodes and decodes all of its contexts.
///
/// All functions run on [`Backend::detect`](crate::Backend::detect).
///
/// # Examples
/// ```
/// use codec_core::*;
/// use half::f16;
///
/// # let (layers, tokens) = (2, 64);
/// // One tensor (layers, 2, tokens, heads, head_dim) of a sample text, as vLLM or LMCache hand it over.
/// let model = ModelInfo {
///     model_id: ModelInfo::id_of("example/llama"),
///     layers,
///     heads: 2,
///     head_dim: 8,
///     keys_rotated: true,
/// };
/// let plane_len = tokens * model.channels();
/// # let mut state = 1_u32;
/// # let mut noise = || {
/// #     state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
/// #     (state >> 8) as f32 / 8e6
/// # };
/// # let tensor: Vec<f16> = (0..4 * plane_len).map(|i| f16::from_f32(noise() + (i % 16) as f32)).collect();
/// let rows: Vec<LayerRows<'_, f16>> = tensor
///     .chunks_exact(2 * plane_len)
///     .map(|layer| LayerRows { keys: &layer[..plane_len], values: &layer[plane_len..] })
///     .collect();
/// let place = Place::nhd(model.heads, model.head_dim);
///
/// // Two levels: steps of a tenth and of half of each channel's standard deviation.
/// let profile = Profile::fit(model, 2, tokens, &rows, &place, |level, _layer, _side, sample| {
///     let options = FitOptions { steps: Steps::Deviations([0.1, 0.5][level]), ..FitOptions::default() };
///     PlaneBuf::fit(sample, model.channels(), None, &options)
/// })?;
/// let profile = Profile::from_bytes(&profile.to_bytes())?; // a file, once per model
///
/// // Store a context.
/// let info = profile.frame_info(1, tokens);
/// let mut buffer = vec![0; info.max_frame_len()];
/// let len = profile.encode_into(&info, &rows, &place, &mut buffer)?;
///
/// // Load one layer into pages of 16 tokens.
/// let frame = Frame::parse(&buffer[..len], 1 << 20)?;
/// let pages = TokenPages { table: &[5, 0, 3, 2], page_tokens: 16, stride: 16 * model.channels() };
/// let place = Place { pages: Some(pages), ..place };
/// let (mut keys, mut values) = (vec![f16::ZERO; 6 * pages.stride], vec![f16::ZERO; 6 * pages.stride]);
/// profile.decode_layer_to(&frame, 1, None, &place, &mut keys, &mut values)?;
/// assert!((keys[5 * pages.stride].to_f32() - rows[1].keys[0].to_f32()).abs() < 0.5);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    info: ModelInfo,
    levels: Vec<Level>, // at least one
}

/// The planes of a level, (layers, 2).
#[derive(Clone, Debug, PartialEq)]
enum Level {
    Lossy(Vec<PlaneBuf>),
    Lossless(Vec<LosslessPlaneBuf>), // of one element type
}

impl Profile {
    /// Assembles a profile from fitted planes.
    ///
    /// # Shapes
    /// `planes` (levels, layers, 2): keys, then values, of each layer, of one to 256 levels.
    /// # Errors
    /// [`Error::Zero`], [`Error::TooLarge`], [`Error::Length`] for a wrong number of planes, or planes with a
    /// wrong number of channels.
    pub fn new(info: ModelInfo, planes: Vec<PlaneBuf>) -> Result<Self, Error> {
        info.check()?;
        let per_level = 2 * info.layers;
        check_len("planes", planes.len(), planes.len().next_multiple_of(per_level))?;
        let n = planes.len() / per_level;
        let mut planes = planes.into_iter();
        let levels = (0..n).map(|_| Level::Lossy(planes.by_ref().take(per_level).collect()));
        Self::of_levels(info, levels.collect())
    }

    /// A profile of one level without loss, which stores the bits of 16-bit elements.
    ///
    /// # Shapes
    /// `planes` (layers, 2): keys, then values, of each layer.
    /// # Errors
    /// As [`Self::new`]; [`Error::BadPlane`] for planes of different element types.
    pub fn lossless(info: ModelInfo, planes: Vec<LosslessPlaneBuf>) -> Result<Self, Error> {
        info.check()?;
        Self::of_levels(info, vec![Level::Lossless(planes)])
    }

    /// The levels of profiles of one model, in order. Levels keep their planes; those of one transform share
    /// it if [`PlaneBuf`]s did.
    ///
    /// # Errors
    /// [`Error::Zero`] for no profiles, [`Error::WrongModel`] for those of several models,
    /// [`Error::TooLarge`].
    pub fn join(profiles: impl IntoIterator<Item = Self>) -> Result<Self, Error> {
        let mut profiles = profiles.into_iter();
        let Self { info, mut levels } = profiles.next().ok_or(Error::Zero { what: "levels" })?;
        for profile in profiles {
            if profile.info != info {
                return Err(Error::WrongModel);
            }
            levels.extend(profile.levels);
        }
        Self::of_levels(info, levels)
    }

    /// Checks the numbers of levels, planes and channels, and the element types.
    fn of_levels(info: ModelInfo, levels: Vec<Level>) -> Result<Self, Error> {
        if levels.is_empty() {
            return Err(Error::Zero { what: "levels" });
        }
        if levels.len() > MAX_LEVELS {
            return Err(Error::TooLarge);
        }
        for level in &levels {
            check_len("planes", level.len(), 2 * info.layers)?;
            for plane in 0..level.len() {
                check_len("channels of a plane", level.channels(plane), info.channels())?;
            }
            if let Level::Lossless(planes) = level
                && planes.iter().any(|plane| plane.element() != planes[0].element())
            {
                return Err(Error::BadPlane {
                    what: "the planes of a level without loss must have one element type",
                });
            }
        }
        Ok(Self { info, levels })
    }

    /// The model that the planes belong to.
    #[must_use]
    pub const fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Number of levels.
    #[must_use]
    pub const fn levels(&self) -> usize {
        self.levels.len()
    }

    /// The same levels of one layer, as those of a model of one layer: for caches that encode layers apart.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn layer(&self, layer: usize) -> Result<Self, Error> {
        self.check_layer(layer)?;
        let planes = 2 * layer..2 * layer + 2;
        let levels = self.levels.iter().map(|level| match level {
            Level::Lossy(all) => Level::Lossy(all[planes.clone()].to_vec()),
            Level::Lossless(all) => Level::Lossless(all[planes.clone()].to_vec()),
        });
        Self::of_levels(ModelInfo { layers: 1, ..self.info }, levels.collect())
    }

    /// The plane of a layer's keys or values at a level.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::WrongCoding`] for a level without loss.
    pub fn plane(&self, level: usize, layer: usize, side: Side) -> Result<&PlaneBuf, Error> {
        self.check_layer(layer)?;
        match self.level(level)? {
            Level::Lossy(planes) => Ok(&planes[plane_index(layer, side)]),
            Level::Lossless(_) => Err(Error::WrongCoding { lossless: true }),
        }
    }

    /// The plane of a layer's keys or values at a level without loss.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::WrongCoding`] for a level with loss.
    pub fn lossless_plane(&self, level: usize, layer: usize, side: Side) -> Result<&LosslessPlaneBuf, Error> {
        self.check_layer(layer)?;
        match self.level(level)? {
            Level::Lossless(planes) => Ok(&planes[plane_index(layer, side)]),
            Level::Lossy(_) => Err(Error::WrongCoding { lossless: false }),
        }
    }

    /// The id by which frames of a level name the plane of a layer's keys or values.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn plane_id(&self, level: usize, layer: usize, side: Side) -> Result<u32, Error> {
        self.check_layer(layer)?;
        Ok(match self.level(level)? {
            Level::Lossy(planes) => planes[plane_index(layer, side)].id(),
            Level::Lossless(planes) => planes[plane_index(layer, side)].id(),
        })
    }

    fn level(&self, level: usize) -> Result<&Level, Error> {
        self.levels.get(level).ok_or(Error::OutOfBounds { what: "level" })
    }

    fn check_layer(&self, layer: usize) -> Result<(), Error> {
        if layer < self.info.layers { Ok(()) } else { Err(Error::OutOfBounds { what: "layer" }) }
    }

    /// The header of a frame of `tokens` tokens at a level, with positions from 0 and blocks of 256 tokens;
    /// the caller may change these. A level without loss has the element type of its planes.
    /// [`FrameInfo::max_frame_len`] is the size of the buffer that [`Self::encode_into`] needs.
    #[must_use]
    pub fn frame_info(&self, level: u8, tokens: usize) -> FrameInfo {
        let ModelInfo { model_id, layers, heads, head_dim, keys_rotated } = self.info;
        let info =
            FrameInfo { level, model_id, keys_rotated, ..FrameInfo::new(layers, heads, head_dim, tokens) };
        match self.levels.get(usize::from(level)) {
            Some(Level::Lossless(planes)) => {
                FrameInfo { lossless: true, element: planes[0].element(), ..info }
            }
            _ => info,
        }
    }

    /// Encodes a context with [`encode_frame_into`], or without loss if the level is, and returns the length
    /// of the frame in bytes.
    ///
    /// A level without loss keeps every bit of elements of its type, NaN and infinities included; `f32` is
    /// rounded to the nearest of them, ties to even.
    ///
    /// # Shapes
    /// `info`: [`Self::frame_info`]; at a lossy level, its element type is replaced by that of the rows.
    /// `rows` (layers,): the tokens in the layout of `place`.
    /// # Errors
    /// [`Error::WrongModel`] for an `info` of another model, [`Error::OutOfBounds`] for a level that the
    /// profile does not have, [`Error::WrongCoding`] for an `info` that is lossless where the level is not,
    /// or the reverse, [`Error::WrongPlane`] for rows of the other 16-bit type than a level without loss, and
    /// those of [`encode_frame_into`]; `out` is then unchanged.
    pub fn encode_into<E: Element>(
        &self,
        info: &FrameInfo,
        rows: &[LayerRows<'_, E>],
        place: &Place<'_>,
        out: &mut [u8],
    ) -> Result<usize, Error> {
        self.check_model(info)?;
        check_len("rows", rows.len(), self.info.layers)?;
        let rows: Vec<&[E]> = rows.iter().flat_map(|rows| [rows.keys, rows.values]).collect();
        match self.level(info.level.into())? {
            Level::Lossy(planes) => {
                let info = FrameInfo { element: E::TYPE, ..*info };
                let planes: Vec<Plane<'_>> = planes.iter().map(PlaneBuf::view).collect();
                encode_frame_into(&info, &planes, &rows, place, out)
            }
            Level::Lossless(planes) => {
                let planes: Vec<LosslessPlane<'_>> = planes.iter().map(LosslessPlaneBuf::view).collect();
                encode_elements_into(info, &planes, &rows, place, out)
            }
        }
    }

    /// Decodes the keys and the values of a layer to their place in a cache of any [`Element`] type and
    /// layout, with [`Frame::decode_plane_to`]; a level without loss to a cache of its own element type, bit
    /// for bit, or of `f32`.
    ///
    /// # Shapes
    /// `keys`, `values`: rows in the layout of `place`; those of the frame's tokens are written. `rope`
    /// covers all tokens of the frame, and rotates keys that were stored before RoPE, in `f32`.
    /// # Errors
    /// [`Error::WrongModel`] for a frame of another model, [`Error::OutOfBounds`] for a level that the
    /// profile does not have, [`Error::WrongPlane`] for a frame encoded with other planes or with the planes
    /// of keys and values swapped, or without loss from the other 16-bit type, and those of
    /// [`Frame::decode_plane_to`].
    pub fn decode_layer_to<E: Element>(
        &self,
        frame: &Frame<'_>,
        layer: usize,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        keys: &mut [E],
        values: &mut [E],
    ) -> Result<(), Error> {
        self.decode_plane_to(frame, layer, Side::Keys, rope, place, keys)?;
        self.decode_plane_to(frame, layer, Side::Values, None, place, values)
    }

    /// Decodes the keys or the values of a layer: see [`Self::decode_layer_to`]. One plane at a time, `out`
    /// may hold the rows of other planes between those of this one.
    ///
    /// # Errors
    /// As there; [`Error::NotBeforeRope`] for a `rope` of values.
    pub fn decode_plane_to<E: Element>(
        &self,
        frame: &Frame<'_>,
        layer: usize,
        side: Side,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        self.check_model(frame.info())?;
        self.check_layer(layer)?;
        let i = plane_index(layer, side);
        match self.level(frame.info().level.into())? {
            Level::Lossy(planes) => frame.decode_plane_to(&planes[i].view(), layer, side, rope, place, out),
            Level::Lossless(planes) => {
                frame.decode_elements_to(&planes[i].view(), layer, side, rope, place, out)
            }
        }
    }

    fn check_model(&self, info: &FrameInfo) -> Result<(), Error> {
        let &FrameInfo { model_id, layers, heads, head_dim, keys_rotated, .. } = info;
        let model = ModelInfo { model_id, layers, heads, head_dim, keys_rotated };
        if model == self.info { Ok(()) } else { Err(Error::WrongModel) }
    }
}

impl Level {
    /// Number of planes.
    const fn len(&self) -> usize {
        match self {
            Self::Lossy(planes) => planes.len(),
            Self::Lossless(planes) => planes.len(),
        }
    }

    fn channels(&self, plane: usize) -> usize {
        match self {
            Self::Lossy(planes) => planes[plane].channels(),
            Self::Lossless(planes) => planes[plane].channels(),
        }
    }
}

fn plane_index(layer: usize, side: Side) -> usize {
    2 * layer + usize::from(side == Side::Values)
}
