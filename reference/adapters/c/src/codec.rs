//! The bitstream: a profile of a model, and frames of its contexts.

use std::ffi::c_void;

use codec_core::{
    Element, FitOptions, Frame, FrameInfo, LayerRows, ModelInfo, Place, PlaneBuf, Profile, Steps, TokenPages,
};

use crate::args;
use crate::error::{Result, call};
use crate::save::save;

/// The model of a profile.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_model {
    /// The engine's identifier of the model, such as a hash of its weights.
    pub model_id: u64,
    /// Number of layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub heads: usize,
    /// Components of a head.
    pub head_dim: usize,
    /// Not 0 if keys are stored after RoPE.
    pub keys_rotated: u32,
}

/// Keys and values of one layer to read, in a layout that a kvc_place names.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_layer {
    /// The keys.
    pub keys: *const c_void,
    /// Elements of `keys`.
    pub keys_len: usize,
    /// The values.
    pub values: *const c_void,
    /// Elements of `values`.
    pub values_len: usize,
}

/// Keys and values of one layer to write.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_layer_mut {
    /// The keys.
    pub keys: *mut c_void,
    /// Elements of `keys`.
    pub keys_len: usize,
    /// The values.
    pub values: *mut c_void,
    /// Elements of `values`.
    pub values_len: usize,
}

/// The layout of rows (tokens, heads, head_dim): strides in elements, with or without pages.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_place {
    /// Stride of tokens, within a page if there are pages: heads * head_dim if tokens come first.
    pub token_stride: usize,
    /// Stride of heads: head_dim if tokens come first.
    pub head_stride: usize,
    /// The position of the first token in these rows.
    pub first_token: usize,
    /// Page numbers in the order of the tokens; NULL if there are no pages.
    pub pages: *const u32,
    /// Number of pages.
    pub pages_len: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Stride of pages.
    pub page_stride: usize,
}

/// The header of a frame.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_frame {
    /// The model.
    pub model: kvc_model,
    /// The level of the profile.
    pub level: u32,
    /// Position of the first token.
    pub first_token: u64,
    /// Number of tokens.
    pub tokens: usize,
}

/// The probability models and steps of a model's keys and values, at one or several levels.
pub struct kvc_profile(pub(crate) Profile);

/// Calls a generic function with the element type of a constant.
macro_rules! for_element {
    ($element:expr, $E:ident => $result:expr) => {
        match $crate::rows::element($element)? {
            kv_attend::ElementType::F32 => {
                type $E = f32;
                $result
            }
            kv_attend::ElementType::F16 => {
                type $E = half::f16;
                $result
            }
            kv_attend::ElementType::Bf16 => {
                type $E = half::bf16;
                $result
            }
        }
    };
}
pub(crate) use for_element;

pub(crate) unsafe fn layers<'a, E: Element>(
    layers: *const kvc_layer,
    n: usize,
) -> Result<Vec<LayerRows<'a, E>>> {
    let rows = |layer: &kvc_layer| {
        Ok(LayerRows {
            keys: args::slice(layer.keys.cast(), layer.keys_len, "keys of a layer")?,
            values: args::slice(layer.values.cast(), layer.values_len, "values of a layer")?,
        })
    };
    args::slice(layers, n, "layers")?.iter().map(rows).collect()
}

impl kvc_place {
    pub(crate) unsafe fn read<'a>(place: *const Self) -> Result<Place<'a>> {
        let Self { token_stride, head_stride, first_token, pages, pages_len, page_tokens, page_stride } =
            *args::get(place, "place")?;
        let pages = match pages.is_null() {
            true => None,
            false => {
                let table = args::slice(pages, pages_len, "pages")?;
                Some(TokenPages { table, page_tokens, stride: page_stride })
            }
        };
        Ok(Place { token_stride, head_stride, first_token, pages })
    }
}

/// Fits a profile to sample rows of all layers, `tokens` tokens in the layout of `place`: a few thousand, similar
/// to later contexts. Level i has steps of `steps[i]` standard deviations of each channel, such as 0.1, 0.25
/// and 0.5; there are 1 to 256 levels.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_fit(
    model: *const kvc_model,
    steps: *const f32,
    levels: usize,
    tokens: usize,
    element_type: u32,
    sample: *const kvc_layer,
    n_layers: usize,
    place: *const kvc_place,
    profile: *mut *mut kvc_profile,
) -> i32 {
    call(|| {
        let profile = args::out_handle(profile)?;
        let kvc_model { model_id, layers: n, heads, head_dim, keys_rotated } = *args::get(model, "model")?;
        let model = ModelInfo { model_id, layers: n, heads, head_dim, keys_rotated: keys_rotated != 0 };
        let (steps, place) = (args::slice(steps, levels, "steps")?, kvc_place::read(place)?);
        let fit = |level: usize, rows: &[f32]| {
            let options = FitOptions { steps: Steps::Deviations(steps[level]), ..FitOptions::default() };
            PlaneBuf::fit(rows, model.channels(), None, &options)
        };
        let fitted = for_element!(element_type, E => {
            let rows = layers::<E>(sample, n_layers)?;
            Profile::fit(model, levels, tokens, &rows, &place, |level, _, _, rows| fit(level, rows))
        });
        profile.write(kvc_profile(fitted?));
        Ok(())
    })
}

/// Frees a profile; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_free(profile: *mut kvc_profile) {
    args::free(profile);
}

/// Saves a profile to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_save(
    profile: *const kvc_profile,
    buffer: *mut u8,
    len: usize,
    written: *mut usize,
) -> i32 {
    call(|| save(&args::get(profile, "profile")?.0.to_bytes(), buffer, len, written))
}

/// Reads a saved profile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_load(
    data: *const u8,
    len: usize,
    profile: *mut *mut kvc_profile,
) -> i32 {
    call(|| {
        let profile = args::out_handle(profile)?;
        profile.write(kvc_profile(Profile::from_bytes(args::slice(data, len, "data")?)?));
        Ok(())
    })
}

/// Number of levels.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_levels(profile: *const kvc_profile, levels: *mut usize) -> i32 {
    call(|| {
        let levels = args::out(levels, "levels")?;
        levels.write(args::get(profile, "profile")?.0.levels());
        Ok(())
    })
}

/// The most bytes of a frame of `tokens` tokens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_max_frame_len(
    profile: *const kvc_profile,
    tokens: usize,
    len: *mut usize,
) -> i32 {
    call(|| {
        let len = args::out(len, "len")?;
        len.write(args::get(profile, "profile")?.0.frame_info(0, tokens).max_frame_len());
        Ok(())
    })
}

/// Encodes `tokens` tokens at a level to `frame`, a buffer of at least kvc_profile_max_frame_len bytes; `written`
/// becomes the bytes of the frame. `first_token` is the position of the first token in its context; `place` says
/// where its row is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_encode(
    profile: *const kvc_profile,
    level: u32,
    first_token: u64,
    tokens: usize,
    element_type: u32,
    rows: *const kvc_layer,
    n_layers: usize,
    place: *const kvc_place,
    frame: *mut u8,
    frame_len: usize,
    written: *mut usize,
) -> i32 {
    call(|| {
        let (profile, place) = (&args::get(profile, "profile")?.0, kvc_place::read(place)?);
        let (frame, written) = (args::slice_mut(frame, frame_len, "frame")?, args::out(written, "written")?);
        let level = u8::try_from(level).map_err(|_| codec_core::Error::OutOfBounds { what: "level" })?;
        let info = FrameInfo { first_token, ..profile.frame_info(level, tokens) };
        written.write(for_element!(element_type, E => {
            profile.encode_into(&info, &layers::<E>(rows, n_layers)?, &place, frame)?
        }));
        Ok(())
    })
}

/// Decodes one layer of a frame to its place in a cache, of any element type. `place` says where the row of the
/// frame's first token is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_profile_decode(
    profile: *const kvc_profile,
    frame: *const u8,
    frame_len: usize,
    layer: usize,
    element_type: u32,
    place: *const kvc_place,
    rows: *const kvc_layer_mut,
) -> i32 {
    call(|| {
        let (profile, place) = (&args::get(profile, "profile")?.0, kvc_place::read(place)?);
        let frame = Frame::parse(args::slice(frame, frame_len, "frame")?, usize::MAX)?;
        let rows = args::get(rows, "rows")?;
        for_element!(element_type, E => decode_layer::<E>(profile, &frame, layer, &place, rows))
    })
}

pub(crate) unsafe fn decode_layer<E: Element>(
    profile: &Profile,
    frame: &Frame<'_>,
    layer: usize,
    place: &Place<'_>,
    rows: &kvc_layer_mut,
) -> Result {
    let keys = args::slice_mut::<E>(rows.keys.cast(), rows.keys_len, "keys of a layer")?;
    let values = args::slice_mut::<E>(rows.values.cast(), rows.values_len, "values of a layer")?;
    Ok(profile.decode_layer_to(frame, layer, None, place, keys, values)?)
}

/// Reads and checks the header of a frame.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_frame_info(frame: *const u8, frame_len: usize, info: *mut kvc_frame) -> i32 {
    call(|| {
        let out = args::out(info, "info")?;
        let frame = Frame::parse(args::slice(frame, frame_len, "frame")?, usize::MAX)?;
        let info = frame.info();
        let model = kvc_model {
            model_id: info.model_id,
            layers: info.layers,
            heads: info.heads,
            head_dim: info.head_dim,
            keys_rotated: info.keys_rotated.into(),
        };
        let (level, first_token, tokens) = (info.level.into(), info.first_token, info.tokens);
        out.write(kvc_frame { model, level, first_token, tokens });
        Ok(())
    })
}
