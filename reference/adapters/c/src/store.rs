//! A store of caches, found by the longest stored prefix of a prompt.

use std::ffi::c_char;

use codec_core::{Element, Encoding, Frame, LayerRows, Place, Profile};
use kv_store::{Grid, KvStore, Options, Space, encode_chunk};

use crate::args;
use crate::codec::{decode_layer, for_element, kvc_layer, kvc_layer_mut, kvc_place, kvc_profile, layers};
use crate::error::{Error, Result, call};

/// Caches of one model in a store. All calls block; they may run at the same time, and in several processes.
pub struct kvc_store {
    store: KvStore,
    space: Space,
    profile: Profile,
}

/// Opens a store: a folder (which need not exist), "memory:///". `name` and its revision identify the weights:
/// caches under another name, profile or grid are never found. Contexts are stored in chunks of `chunk` tokens,
/// and a last one of a multiple of `tail`, which divides `chunk`; 1500 and 100 are usual.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_store_open(
    url: *const c_char,
    name: *const c_char,
    profile: *const kvc_profile,
    chunk: usize,
    tail: usize,
    store: *mut *mut kvc_store,
) -> i32 {
    call(|| {
        let store = args::out_handle(store)?;
        let (url, name) = (args::text(url, "url")?, args::text(name, "name")?);
        let profile = args::get(profile, "profile")?.0.clone();
        let space = Space::new(name, &profile, Grid { chunk, tail })?;
        store.write(kvc_store { store: KvStore::open(url, Options::default())?, space, profile });
        Ok(())
    })
}

/// Closes a store; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_store_free(store: *mut kvc_store) {
    args::free(store);
}

/// Stores the chunks of a context that are not there yet, at every level: `n` tokens, whose rows are in the layout
/// of `place`. `stored` becomes the number of tokens that a prompt with this beginning will find.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_store_put(
    store: *const kvc_store,
    tokens: *const u32,
    n: usize,
    element_type: u32,
    rows: *const kvc_layer,
    n_layers: usize,
    place: *const kvc_place,
    stored: *mut usize,
) -> i32 {
    call(|| {
        let (store, stored) = (args::get(store, "store")?, args::out(stored, "stored")?);
        let (tokens, place) = (args::slice(tokens, n, "tokens")?, kvc_place::read(place)?);
        stored.write(
            for_element!(element_type, E => store.put(tokens, &layers::<E>(rows, n_layers)?, &place))?,
        );
        Ok(())
    })
}

/// The number of tokens of the longest stored prefix of a prompt.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_store_find(
    store: *const kvc_store,
    tokens: *const u32,
    n: usize,
    prefix: *mut usize,
) -> i32 {
    call(|| {
        let (store, prefix) = (args::get(store, "store")?, args::out(prefix, "prefix")?);
        let found = store.store.find(&store.space, args::slice(tokens, n, "tokens")?)?;
        prefix.write(found.last().map_or(0, |chunk| chunk.key().tokens.end));
        Ok(())
    })
}

/// Loads the longest stored prefix of a prompt at a level, 0 being the first of the profile, to rows in the layout
/// of `place`, and writes its number of tokens to `loaded`. Every byte has been compared with its digest before it
/// is decoded. After an error, rows of the prefix may have been written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_store_get(
    store: *const kvc_store,
    tokens: *const u32,
    n: usize,
    level: usize,
    element_type: u32,
    rows: *const kvc_layer_mut,
    n_layers: usize,
    place: *const kvc_place,
    loaded: *mut usize,
) -> i32 {
    call(|| {
        let (store, loaded) = (args::get(store, "store")?, args::out(loaded, "loaded")?);
        let (tokens, place) = (args::slice(tokens, n, "tokens")?, kvc_place::read(place)?);
        let rows = args::slice(rows, n_layers, "layers")?;
        loaded.write(for_element!(element_type, E => store.get::<E>(tokens, level, rows, &place))?);
        Ok(())
    })
}

impl kvc_store {
    fn put<E: Element>(&self, tokens: &[u32], rows: &[LayerRows<'_, E>], place: &Place<'_>) -> Result<usize> {
        let found = self.store.find(&self.space, tokens)?.len();
        let keys = self.space.chunks(tokens);
        for key in keys.iter().skip(found) {
            let place = from(place, key.tokens.start)?;
            let object = encode_chunk(&self.profile, key, rows, &place)?;
            self.store.put_chunk(&self.space, key, object.into())?;
        }
        Ok(keys.last().map_or(0, |key| key.tokens.end))
    }

    unsafe fn get<E: Element>(
        &self,
        tokens: &[u32],
        level: usize,
        rows: &[kvc_layer_mut],
        place: &Place<'_>,
    ) -> Result<usize> {
        let (expected, actual) = (self.profile.info().layers, rows.len());
        if actual != expected {
            return Err(codec_core::Error::Length { what: "layers", expected, actual }.into());
        }
        let found = self.store.find(&self.space, tokens)?;
        let mut loaded = 0;
        self.store.load::<Error>(
            &self.space,
            &found,
            2,
            |_| Encoding::Level(level),
            |arrival| {
                let frame = Frame::parse(&arrival.frame, usize::MAX)?;
                let place = from(place, arrival.tokens.start)?;
                for (layer, rows) in rows.iter().enumerate() {
                    decode_layer::<E>(&self.profile, &frame, layer, &place, rows)?;
                }
                loaded = arrival.tokens.end;
                Ok(())
            },
        )?;
        Ok(loaded)
    }
}

/// The place of the rows of a chunk that begins at token `start` of the context.
fn from<'a>(place: &Place<'a>, start: usize) -> Result<Place<'a>> {
    let first_token = place.first_token.checked_add(start).ok_or(codec_core::Error::TooLarge)?;
    Ok(Place { first_token, ..*place })
}
