//! Arguments that several operations share.

use kv_attend::{Attention, Window};

use crate::error::{Error, Result};

/// The options of attention for keys of `dim` components; the default scale is `1 / sqrt(dim)`.
pub fn attention(
    dim: usize,
    scale: Option<f32>,
    softcap: Option<f32>,
    window: Option<usize>,
) -> Result<Attention> {
    let attention = Attention { scale: scale.unwrap_or(1.0 / (dim as f32).sqrt()), softcap, window };
    attention.check()?;
    Ok(attention)
}

/// The most tokens of a window.
const MOST: usize = 1 << 24;

pub fn window(sinks: usize, recent: usize, batch: usize) -> Result<Window> {
    match [sinks, recent, batch].into_iter().all(|n| n <= MOST) {
        true => Ok(Window { sinks, recent, batch }),
        false => Err(Error::argument(format!("a window of more than {MOST} tokens"))),
    }
}

/// A number of query heads that each of `heads` KV heads has the same share of.
pub fn check_group(query_heads: usize, heads: usize) -> Result<()> {
    match query_heads.is_multiple_of(heads) && query_heads > 0 {
        true => Ok(()),
        false => Err(Error::argument(format!("{query_heads} query heads for {heads} KV heads"))),
    }
}
