//! The cache of a layer of one sequence, with either kind of codes.

use kv_attend::owner::AnyLayer;
use kv_attend::{AnyRows, Attention, Workspace};
use kv_owners::sq;

use crate::args;
use crate::error::{Result, call};
use crate::pq::kvc_books;
use crate::rows::{element, kvc_attention, kvc_rows, kvc_window, rows};
use crate::save::save;
use crate::sq::kvc_heads;

/// The keys and values of all KV heads of a layer of one sequence: the first and the most recent tokens as exact
/// rows, all others as codes. The position of a token is its index.
pub struct kvc_cache(Layer);

#[derive(Clone)]
enum Layer {
    Pq(AnyLayer<pq_core::HeadCodes>),
    Sq(AnyLayer<sq::Codes>),
}

/// Scratch memory of attention, which grows to what a call needs. One per thread serves all layers and steps.
pub struct kvc_workspace(Workspace);

/// Evaluates an expression with the cache of either kind of codes.
macro_rules! for_layer {
    ($layer:expr, $cache:ident => $result:expr) => {
        match $layer {
            Layer::Pq($cache) => $result,
            Layer::Sq($cache) => $result,
        }
    };
}

impl Layer {
    fn append(&mut self, keys: AnyRows<'_>, values: AnyRows<'_>) -> Result {
        match self {
            Self::Pq(cache) => {
                cache.append(keys, values)?;
            }
            Self::Sq(cache) => {
                cache.append(keys, values)?;
            }
        }
        Ok(())
    }

    fn append_heads(&mut self, keys: AnyRows<'_>, values: AnyRows<'_>) -> Result {
        match self {
            Self::Pq(cache) => {
                cache.append_heads(keys, values)?;
            }
            Self::Sq(cache) => {
                cache.append_heads(keys, values)?;
            }
        }
        Ok(())
    }

    fn attend(
        &self,
        by: &Attention,
        queries: AnyRows<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result {
        for_layer!(self, cache => Ok(cache.attend_into(by, queries, workspace, out)?))
    }
}

/// An empty cache with product codes. Its exact rows, and those to append, have the given element type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_pq(
    books: *const kvc_books,
    element_type: u32,
    window: *const kvc_window,
    cache: *mut *mut kvc_cache,
) -> i32 {
    call(|| {
        let cache = args::out_handle(cache)?;
        let (books, window) = (args::get(books, "books")?, kvc_window::read(window)?);
        cache.write(kvc_cache(Layer::Pq(AnyLayer::new(element(element_type)?, &books.0, window)?)));
        Ok(())
    })
}

/// An empty cache with scalar codes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_sq(
    heads: *const kvc_heads,
    element_type: u32,
    window: *const kvc_window,
    cache: *mut *mut kvc_cache,
) -> i32 {
    call(|| {
        let cache = args::out_handle(cache)?;
        let (heads, window) = (args::get(heads, "heads")?, kvc_window::read(window)?);
        cache.write(kvc_cache(Layer::Sq(AnyLayer::new(element(element_type)?, &heads.0, window)?)));
        Ok(())
    })
}

/// Reads a saved cache with product codes; `books` are those that it was saved under.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_load_pq(
    books: *const kvc_books,
    data: *const u8,
    len: usize,
    cache: *mut *mut kvc_cache,
) -> i32 {
    call(|| {
        let cache = args::out_handle(cache)?;
        let (books, data) = (args::get(books, "books")?, args::slice(data, len, "data")?);
        cache.write(kvc_cache(Layer::Pq(AnyLayer::from_bytes(data, &books.0)?)));
        Ok(())
    })
}

/// Reads a saved cache with scalar codes; `heads` are those that it was saved under.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_load_sq(
    heads: *const kvc_heads,
    data: *const u8,
    len: usize,
    cache: *mut *mut kvc_cache,
) -> i32 {
    call(|| {
        let cache = args::out_handle(cache)?;
        let (heads, data) = (args::get(heads, "heads")?, args::slice(data, len, "data")?);
        cache.write(kvc_cache(Layer::Sq(AnyLayer::from_bytes(data, &heads.0)?)));
        Ok(())
    })
}

/// A copy, which shares the books or heads: a sequence that branches off.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_clone(cache: *const kvc_cache, copy: *mut *mut kvc_cache) -> i32 {
    call(|| {
        let copy = args::out_handle(copy)?;
        copy.write(kvc_cache(args::get(cache, "cache")?.0.clone()));
        Ok(())
    })
}

/// Frees a cache; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_free(cache: *mut kvc_cache) {
    args::free(cache);
}

/// Saves a cache to a buffer, without its books or heads. `written` becomes its bytes, also with KVC_TOO_SHORT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_save(
    cache: *const kvc_cache,
    buffer: *mut u8,
    len: usize,
    written: *mut usize,
) -> i32 {
    call(|| {
        let bytes = for_layer!(&args::get(cache, "cache")?.0, cache => cache.to_bytes_checked());
        save(&bytes, buffer, len, written)
    })
}

/// Number of tokens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_len(cache: *const kvc_cache, len: *mut usize) -> i32 {
    call(|| {
        let len = args::out(len, "len")?;
        len.write(for_layer!(&args::get(cache, "cache")?.0, cache => cache.len()));
        Ok(())
    })
}

/// Bytes of all tokens, without the books or heads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_size(cache: *const kvc_cache, bytes: *mut usize) -> i32 {
    call(|| {
        let bytes = args::out(bytes, "bytes")?;
        bytes.write(for_layer!(&args::get(cache, "cache")?.0, cache => cache.size()));
        Ok(())
    })
}

/// Appends tokens, and codes those that leave the window: keys after RoPE (n, heads * dim) and values
/// (n, heads * dim of the values), tokens first. After an error the cache is as before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_append(
    cache: *mut kvc_cache,
    keys: *const kvc_rows,
    values: *const kvc_rows,
) -> i32 {
    call(|| args::get_mut(cache, "cache")?.0.append(rows(keys, "keys")?, rows(values, "values")?))
}

/// kvc_cache_append of rows with heads first: (heads * n, dim).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_append_heads(
    cache: *mut kvc_cache,
    keys: *const kvc_rows,
    values: *const kvc_rows,
) -> i32 {
    call(|| args::get_mut(cache, "cache")?.0.append_heads(rows(keys, "keys")?, rows(values, "values")?))
}

/// Keeps the first `len` tokens, to drop rejected drafts or to share a prefix. Coded tokens stay coded; the
/// window refills from the next token on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_truncate(cache: *mut kvc_cache, len: usize) -> i32 {
    call(|| {
        for_layer!(&mut args::get_mut(cache, "cache")?.0, cache => cache.truncate(len));
        Ok(())
    })
}

/// Attention of all query heads over all tokens. `queries` (n, heads * group * dim) after RoPE, of any element
/// type, are those of the last n tokens, which have been appended; query i sees the tokens up to its own. `out`
/// (n, heads, group, dim of the values) has `out_len` floats.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_cache_attend(
    cache: *const kvc_cache,
    workspace: *mut kvc_workspace,
    attention: *const kvc_attention,
    queries: *const kvc_rows,
    out: *mut f32,
    out_len: usize,
) -> i32 {
    call(|| {
        let (cache, workspace) = (args::get(cache, "cache")?, args::get_mut(workspace, "workspace")?);
        let (attention, queries) = (kvc_attention::read(attention)?, rows(queries, "queries")?);
        let out = args::slice_mut(out, out_len, "out")?;
        cache.0.attend(&attention, queries, &mut workspace.0, out)
    })
}

/// An empty workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_workspace_new(workspace: *mut *mut kvc_workspace) -> i32 {
    call(|| {
        args::out_handle(workspace)?.write(kvc_workspace(Workspace::default()));
        Ok(())
    })
}

/// Frees a workspace; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_workspace_free(workspace: *mut kvc_workspace) {
    args::free(workspace);
}
