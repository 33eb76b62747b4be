//! Rows of the caller's memory, windows and attention.

use std::ffi::c_void;

use half::{bf16, f16};
use kv_attend::{AnyRows, Attention, ElementType, Rows, Window};

use crate::args;
use crate::error::{Error, Result};

/// Elements are `float`.
pub const KVC_F32: u32 = 0;
/// Elements are IEEE half precision.
pub const KVC_F16: u32 = 1;
/// Elements are bfloat16.
pub const KVC_BF16: u32 = 2;

/// Rows of `components` elements each, `stride` elements apart: all heads of each token, or one head in a tensor
/// of any layout, without a copy.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_rows {
    /// The first element of the first row.
    pub data: *const c_void,
    /// Elements that may be read from `data` on: at least (rows - 1) * stride + components.
    pub len: usize,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub components: usize,
    /// Elements from the start of one row to the start of the next.
    pub stride: usize,
    /// KVC_F32, KVC_F16 or KVC_BF16.
    pub element: u32,
}

/// The tokens of a sequence that stay exact: the first `sinks` and at least the last `recent`. All others are
/// coded, `batch` at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_window {
    /// First tokens that are never coded; 4 is usual.
    pub sinks: usize,
    /// Least number of most recent exact tokens; 64 is usual.
    pub recent: usize,
    /// Tokens leave the window in multiples of this, and of the block of scalar codes; 0 counts as 1.
    pub batch: usize,
}

/// How scores become weights.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_attention {
    /// Multiplies scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// Scores become softcap * tanh(score / softcap); 0 for none.
    pub softcap: f32,
    /// A query sees at most this number of last tokens; 0 for all.
    pub window: usize,
}

/// Sizes beyond this are no numbers of tokens.
const MOST: usize = 1 << 40;

pub(crate) fn element(element: u32) -> Result<ElementType> {
    match element {
        KVC_F32 => Ok(ElementType::F32),
        KVC_F16 => Ok(ElementType::F16),
        KVC_BF16 => Ok(ElementType::Bf16),
        value => Err(Error::Constant { what: "element type", value }),
    }
}

pub(crate) unsafe fn rows<'a>(rows: *const kvc_rows, what: &'static str) -> Result<AnyRows<'a>> {
    let kvc_rows { data, len, rows, components, stride, element: kind } = *args::get(rows, what)?;
    Ok(match element(kind)? {
        ElementType::F32 => {
            AnyRows::F32(Rows::new(args::slice(data.cast::<f32>(), len, what)?, rows, components, stride)?)
        }
        ElementType::F16 => {
            AnyRows::F16(Rows::new(args::slice(data.cast::<f16>(), len, what)?, rows, components, stride)?)
        }
        ElementType::Bf16 => {
            AnyRows::Bf16(Rows::new(args::slice(data.cast::<bf16>(), len, what)?, rows, components, stride)?)
        }
    })
}

/// Two rows of the same element type, for a generic function.
macro_rules! for_both_rows {
    ($a:expr, $b:expr, ($x:ident, $y:ident) => $result:expr) => {
        match ($a, $b) {
            (kv_attend::AnyRows::F32($x), kv_attend::AnyRows::F32($y)) => $result,
            (kv_attend::AnyRows::F16($x), kv_attend::AnyRows::F16($y)) => $result,
            (kv_attend::AnyRows::Bf16($x), kv_attend::AnyRows::Bf16($y)) => $result,
            _ => Err(kv_attend::Error::ElementType.into()),
        }
    };
}
pub(crate) use for_both_rows;

impl kvc_window {
    pub(crate) unsafe fn read(window: *const Self) -> Result<Window> {
        let Self { sinks, recent, batch } = *args::get(window, "window")?;
        if sinks.max(recent).max(batch) > MOST {
            return Err(pq_core::Error::TooLarge.into());
        }
        Ok(Window { sinks, recent, batch })
    }
}

impl kvc_attention {
    pub(crate) unsafe fn read(attention: *const Self) -> Result<Attention> {
        let Self { scale, softcap, window } = *args::get(attention, "attention")?;
        let softcap = (softcap != 0.0).then_some(softcap);
        let window = (window != 0).then_some(window);
        Ok(Attention { scale, softcap, window })
    }
}
