//! Product codes of a layer: the codebooks of its heads.

use std::sync::Arc;

use pq_core::HeadBooks;

use crate::args;
use crate::codebook::{kvc_training, shape};
use crate::error::{Result, call};
use crate::rows::{for_both_rows, kvc_rows, rows};
use crate::save::{kvc_bytes, load, save};

/// The codebooks of the keys and values of all KV heads of a layer, shared by the caches of all sequences.
pub struct kvc_books(pub(crate) Vec<Arc<HeadBooks>>);

/// Trains the codebooks of a layer on rows (n, heads * dim) of its keys after RoPE and of its values, such as
/// those of a prompt, with `m` subspaces and `nbits` bits per code for each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_books_train(
    keys: *const kvc_rows,
    values: *const kvc_rows,
    heads: usize,
    key_m: usize,
    key_nbits: u32,
    value_m: usize,
    value_nbits: u32,
    options: *const kvc_training,
    books: *mut *mut kvc_books,
) -> i32 {
    call(|| {
        let books = args::out_handle(books)?;
        let (keys, values) = (rows(keys, "keys")?, rows(values, "values")?);
        let options = kvc_training::read(options)?;
        if heads == 0 {
            return Err(pq_core::Error::Zero { what: "number of heads" }.into());
        }
        let trained: Result<_> = for_both_rows!(keys, values, (keys, values) => {
            let shapes = [
                shape(keys.components() / heads, key_m, key_nbits)?,
                shape(values.components() / heads, value_m, value_nbits)?,
            ];
            Ok(HeadBooks::train_layer(keys, values, heads, shapes, &options)?)
        });
        books.write(kvc_books(trained?));
        Ok(())
    })
}

/// Frees codebooks; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_books_free(books: *mut kvc_books) {
    args::free(books);
}

/// Number of KV heads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_books_heads(books: *const kvc_books, heads: *mut usize) -> i32 {
    call(|| {
        let heads = args::out(heads, "heads")?;
        heads.write(args::get(books, "books")?.0.len());
        Ok(())
    })
}

/// Saves the codebooks of one head to a buffer. `written` becomes their bytes, also with KVC_TOO_SHORT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_books_save(
    books: *const kvc_books,
    head: usize,
    buffer: *mut u8,
    len: usize,
    written: *mut usize,
) -> i32 {
    call(|| {
        let books = &args::get(books, "books")?.0;
        save(&of_head(books, head)?.to_bytes_checked::<f32>(), buffer, len, written)
    })
}

/// Reads the saved codebooks of `n` heads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_books_load(
    heads: *const kvc_bytes,
    n: usize,
    books: *mut *mut kvc_books,
) -> i32 {
    call(|| {
        let books = args::out_handle(books)?;
        books.write(kvc_books(load(heads, n, |bytes| HeadBooks::from_bytes(bytes).map(Arc::new))?));
        Ok(())
    })
}

/// What a layer has of one head.
pub(crate) fn of_head<T>(heads: &[T], head: usize) -> Result<&T> {
    let (what, needed, actual) = ("heads", head.saturating_add(1), heads.len());
    heads.get(head).ok_or_else(|| pq_core::Error::TooShort { what, needed, actual }.into())
}
