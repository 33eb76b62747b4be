//! What a caller from C writes again and again.

use std::ptr::{null, null_mut};

use kvc::*;

/// Checks that a call returned no error, or shows its text.
pub fn ok(code: i32) {
    let mut text = [0; 200];
    unsafe { kvc_last_error(text.as_mut_ptr().cast(), text.len()) };
    assert_eq!(code, KVC_OK, "{}", String::from_utf8_lossy(&text));
}

/// Contiguous rows.
pub fn rows_of(data: &[f32], components: usize) -> kvc_rows {
    let (len, rows) = (data.len(), data.len() / components);
    kvc_rows { data: data.as_ptr().cast(), len, rows, components, stride: components, element: KVC_F32 }
}

/// Rows (tokens, heads, dim), without pages.
pub const fn nhd(heads: usize, dim: usize) -> kvc_place {
    kvc_place {
        token_stride: heads * dim,
        head_stride: dim,
        first_token: 0,
        pages: null(),
        pages_len: 0,
        page_tokens: 0,
        page_stride: 0,
    }
}

/// The keys and values of one layer.
pub const fn layer_of(keys: &[f32], values: &[f32]) -> kvc_layer {
    let (keys_len, values_len) = (keys.len(), values.len());
    kvc_layer { keys: keys.as_ptr().cast(), keys_len, values: values.as_ptr().cast(), values_len }
}

/// The bytes of a function that saves, of which the first call asks for the length.
pub fn saved(save: impl Fn(*mut u8, usize, *mut usize) -> i32) -> Vec<u8> {
    let mut len = 0;
    assert_eq!(save(null_mut(), 0, &mut len), KVC_TOO_SHORT);
    let mut bytes = vec![0; len];
    ok(save(bytes.as_mut_ptr(), bytes.len(), &mut len));
    bytes
}
