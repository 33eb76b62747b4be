//! Every function with arguments of a hostile caller: NULL, misaligned pointers, lengths and sizes that do not fit,
//! numbers that are no constants, bytes and floats of any bits, handles of other sizes. Each call returns a code; none
//! panics, aborts, or writes a handle that it reports as failed. Wrong are all arguments that a callee can check:
//! lengths never exceed the memory behind a pointer, and no handle is used after it was freed.

mod caller;

use std::ffi::CString;
use std::ptr::{null, null_mut};

use kvc::*;

use super::support::{ok, rows_of};
use caller::{Caller, DIM, HEADS, TOKENS, WORDS};

/// Runs a function that makes a handle, and frees it: an error leaves NULL.
fn made<T>(
    caller: &mut Caller,
    make: impl FnOnce(&mut Caller, *mut *mut T) -> i32,
    free: unsafe extern "C" fn(*mut T),
) -> i32 {
    let mut handle = std::ptr::dangling_mut::<T>();
    let at = caller.handle(&raw mut handle);
    let is_valid = at == &raw mut handle;
    let code = make(caller, at);
    if is_valid {
        assert_eq!(code == KVC_OK, !handle.is_null(), "code {code}");
        unsafe { free(handle) };
    } else {
        assert_ne!(code, KVC_OK);
    }
    code
}

/// Calls function `i` of the interface; none for the number after the last.
#[allow(clippy::too_many_lines)]
unsafe fn call(i: usize, c: &mut Caller) -> Option<i32> {
    let mut n = 0_usize;
    let n = c.handle(&raw mut n);
    Some(match i {
        0 => made(
            c,
            |c, out| {
                let (rows, m, options) =
                    (c.rows(DIM), c.near(4), kvc_training { iterations: 2, max_rows: c.size(), seed: 7 });
                kvc_codebook_train(&rows, m, c.of(&[0, 1, 4, 8, 12, 13, u32::MAX]), &options, out)
            },
            kvc_codebook_free,
        ),
        1 => made(
            c,
            |c, out| kvc_codebook_gaussian(c.near(DIM), c.near(4), c.of(&[0, 4, 8, 9, u32::MAX]), out),
            kvc_codebook_free,
        ),
        2 => {
            let (h, (out, len)) = (c.handle(c.codebook), c.buffer());
            kvc_codebook_save(h, out, len, n)
        }
        3 => {
            let data = c.saved();
            made(c, |_, out| kvc_codebook_load(data.as_ptr(), data.len(), out), kvc_codebook_free)
        }
        4 => kvc_codebook_codes_len(c.handle(c.codebook), c.size(), n),
        5 => {
            let mut codes = vec![0; c.of(&[0, 1, 128, 256, 4096])];
            let (h, rows) = (c.handle(c.codebook), c.rows(DIM));
            kvc_codebook_encode(h, &rows, codes.as_mut_ptr(), codes.len())
        }
        6 => {
            let codes = vec![0; c.of(&[0, 1, 128, 256, 4096])];
            let (h, count, (out, len)) = (c.handle(c.codebook), c.near(16), c.buffer());
            kvc_codebook_decode(h, codes.as_ptr(), codes.len(), count, out, len)
        }
        7 => {
            let (codes, mut found) =
                (vec![0; c.of(&[0, 1, 128, 256, 4096])], vec![0; c.of(&[0, 1, 16, 100])]);
            let (h, rows, count, k) = (c.handle(c.codebook), c.rows(DIM), c.near(64), c.size());
            kvc_codebook_search(
                h,
                codes.as_ptr(),
                codes.len(),
                count,
                &rows,
                k,
                found.as_mut_ptr(),
                found.len(),
                n,
            )
        }
        8 => made(
            c,
            |c, out| {
                let (keys, values) = (c.rows(HEADS * DIM), c.rows(HEADS * DIM));
                let options = kvc_training { iterations: 1, max_rows: 50, seed: 7 };
                let (heads, m, m_v) = (c.near(HEADS), c.near(4), c.near(4));
                kvc_books_train(
                    &keys,
                    &values,
                    heads,
                    m,
                    c.of(&[0, 2, 4, 99]),
                    m_v,
                    c.of(&[3, 0]),
                    &options,
                    out,
                )
            },
            kvc_books_free,
        ),
        9 => kvc_books_heads(c.handle(c.books), n),
        10 => {
            let (h, head, (out, len)) = (c.handle(c.books), c.size(), c.buffer());
            kvc_books_save(h, head, out, len, n)
        }
        11..=13 => {
            let parts = [c.saved(), c.saved()];
            let parts = parts.each_ref().map(|part| kvc_bytes { data: part.as_ptr(), len: part.len() });
            let (parts, len) = (c.handle(parts.as_ptr().cast_mut()), c.of(&[0, 1, 2]));
            match i {
                11 => made(c, |_, out| kvc_books_load(parts, len, out), kvc_books_free),
                12 => made(c, |_, out| kvc_bases_load(parts, len, out), kvc_bases_free),
                _ => made(c, |_, out| kvc_heads_load(parts, len, out), kvc_heads_free),
            }
        }
        14 => made(
            c,
            |c, out| {
                let (frequencies, frequencies_len) = c.buffer();
                let samples = kvc_samples {
                    keys: c.rows(HEADS * DIM),
                    queries: c.rows(HEADS * DIM),
                    values: c.rows(HEADS * DIM),
                    frequencies,
                    frequencies_len: if c.one_in(2) { DIM / 2 } else { frequencies_len },
                    rotated: c.next() as u32,
                    first_position: c.size(),
                };
                kvc_bases_fit(c.handle((&raw const samples).cast_mut()), c.near(HEADS), c.near(32), out)
            },
            kvc_bases_free,
        ),
        15 => {
            let (h, head, (out, len)) = (c.handle(c.bases), c.size(), c.buffer());
            kvc_bases_save(h, head, out, len, n)
        }
        16 => made(
            c,
            |c, out| {
                let (h, (frequencies, len)) = (c.handle(c.bases), c.buffer::<f32>());
                let bits = kvc_bits {
                    keys: c.of(&[4.0, 0.125, 0.0, -1.0, 8.0, 9.0, 1e30, f32::NAN, f32::INFINITY]),
                    values: c.of(&[4, 1, 8, 0, 9, u32::MAX]),
                    mean_error: c.next() as u32,
                };
                let len = if frequencies.is_aligned() && c.one_in(2) { DIM / 2 } else { len };
                kvc_heads_new(h, frequencies, len, &bits, out)
            },
            kvc_heads_free,
        ),
        17 => {
            let (h, head, (out, len)) = (c.handle(c.heads), c.size(), c.buffer());
            kvc_heads_save(h, head, out, len, n)
        }
        18 | 19 => made(
            c,
            |c, out| {
                let window = kvc_window { sinks: c.size(), recent: c.size(), batch: c.size() };
                let window = c.handle((&raw const window).cast_mut());
                match i {
                    18 => kvc_cache_pq(c.handle(c.books), c.element(), window, out),
                    _ => kvc_cache_sq(c.handle(c.heads), c.element(), window, out),
                }
            },
            kvc_cache_free,
        ),
        20 | 21 => {
            let data = c.saved();
            made(
                c,
                |c, out| match i {
                    20 => kvc_cache_load_pq(c.handle(c.books), data.as_ptr(), data.len(), out),
                    _ => kvc_cache_load_sq(c.handle(c.heads), data.as_ptr(), data.len(), out),
                },
                kvc_cache_free,
            )
        }
        22 => made(
            c,
            |c, out| {
                let h = c.of(&c.caches.clone());
                kvc_cache_clone(c.handle(h), out)
            },
            kvc_cache_free,
        ),
        23 => {
            let (h, (out, len)) = (c.of(&c.caches.clone()), c.buffer());
            kvc_cache_save(c.handle(h), out, len, n)
        }
        24 => {
            let h = c.of(&c.caches.clone());
            kvc_cache_len(c.handle(h), n)
        }
        25 => {
            let h = c.of(&c.caches.clone());
            kvc_cache_size(c.handle(h), n)
        }
        26 | 27 => {
            let h = c.of(&c.caches.clone());
            let components = if i == 26 { HEADS * DIM } else { DIM };
            let (h, keys, values) = (c.handle(h), c.rows(components), c.rows(components));
            if i == 26 {
                kvc_cache_append(h, &keys, &values)
            } else {
                kvc_cache_append_heads(h, &keys, &values)
            }
        }
        28 => {
            let h = c.of(&c.caches.clone());
            kvc_cache_truncate(c.handle(h), c.of(&[0, 50, 96, usize::MAX]))
        }
        29 => {
            let by = kvc_attention {
                scale: c.of(&[0.25, 0.0, -1.0, f32::NAN, f32::INFINITY]),
                softcap: c.of(&[0.0, 0.0, 5.0, -1.0, f32::NAN]),
                window: c.of(&[0, 0, 1, 10, usize::MAX]),
            };
            let h = c.of(&c.caches.clone());
            let (h, workspace, queries) = (c.handle(h), c.handle(c.workspace), c.rows(3 * HEADS * DIM));
            let mut out = vec![0.0; c.of(&[0, 1, 3 * HEADS * DIM, 6 * HEADS * DIM, 48 * HEADS * DIM])];
            kvc_cache_attend(h, workspace, &by, &queries, out.as_mut_ptr(), out.len())
        }
        30 => made(c, |_, out| kvc_workspace_new(out), kvc_workspace_free),
        31 => made(
            c,
            |c, out| {
                let (rows, queries) = (c.rows(DIM), c.rows(DIM));
                let queries = c.handle((&raw const queries).cast_mut());
                kvc_rotation_fit(c.of(&[0, 1, 2, 3, 4, u32::MAX]), &rows, queries, out)
            },
            kvc_rotation_free,
        ),
        32 => {
            let (h, part, (out, len)) = (c.handle(c.rotation), c.of(&[0, 1, 2, 3]), c.buffer());
            kvc_rotation_copy(
                h,
                part,
                out,
                if len <= WORDS { c.of(&[len, DIM, DIM * DIM]).min(WORDS - 1) } else { len },
            )
        }
        33 => {
            let removal = c.of(&[0.0, 0.1, 1.0, 2.0, -1.0, f64::NAN]);
            kvc_rotation_rank(c.handle(c.rotation), removal, n)
        }
        34 => made(
            c,
            |c, out| kvc_rotation_map(c.handle(c.rotation), c.of(&[0, 1, 2]), c.size(), out),
            kvc_map_free,
        ),
        35 => {
            let (h, rows, mut out) = (c.handle(c.map), c.rows(DIM), vec![0.0; c.of(&[0, 8, 16, 128, 7])]);
            kvc_map_project(h, &rows, out.as_mut_ptr(), out.len())
        }
        36 => {
            let (h, (rows, len), mut out) =
                (c.handle(c.map), c.buffer(), vec![0.0; c.of(&[0, 16, 32, 64, 7])]);
            kvc_map_reconstruct(h, rows, len, out.as_mut_ptr(), out.len())
        }
        37 => made(
            c,
            |c, out| {
                let model = kvc_model {
                    model_id: 1,
                    layers: c.near(1),
                    heads: c.near(HEADS),
                    head_dim: c.near(DIM),
                    keys_rotated: 1,
                };
                let (layer, place, steps) =
                    (c.layer(), c.place(), [c.of(&[0.1, 0.0, -1.0, f32::NAN, 1e-40]); 2]);
                let (tokens, element) = (c.near(40), c.element());
                let (levels, layers) = (c.of(&[0, 1, 2]), c.of(&[0, 1, 1, 1]));
                kvc_profile_fit(&model, steps.as_ptr(), levels, tokens, element, &layer, layers, &place, out)
            },
            kvc_profile_free,
        ),
        38 => {
            let (h, (out, len)) = (c.handle(c.profile), c.buffer());
            kvc_profile_save(h, out, len, n)
        }
        39 => {
            let data = c.saved();
            made(c, |_, out| kvc_profile_load(data.as_ptr(), data.len(), out), kvc_profile_free)
        }
        40 => kvc_profile_levels(c.handle(c.profile), n),
        41 => kvc_profile_max_frame_len(c.handle(c.profile), c.size(), n),
        42 => {
            let (h, layer, place, mut frame) =
                (c.handle(c.profile), c.layer(), c.place(), vec![0; c.of(&[0, 100, 20_000])]);
            let (level, first, tokens, element) = (c.of(&[0, 1, 2, 300]), c.next(), c.near(16), c.element());
            let (frame, len) = (frame.as_mut_ptr(), frame.len());
            kvc_profile_encode(
                h,
                level,
                first,
                tokens,
                element,
                &layer,
                c.of(&[1, 1, 0]),
                &place,
                frame,
                len,
                n,
            )
        }
        43 => {
            let frame = if c.one_in(2) { c.frame.clone() } else { c.saved() };
            let (h, place, rows, layer) = (c.handle(c.profile), c.place(), c.layer_mut(), c.near(0));
            kvc_profile_decode(h, frame.as_ptr(), frame.len(), layer, c.element(), &place, &rows)
        }
        44 => {
            let (frame, mut info) = (c.saved(), std::mem::MaybeUninit::<kvc_frame>::uninit());
            kvc_frame_info(frame.as_ptr(), frame.len(), c.handle(info.as_mut_ptr()))
        }
        45 => made(
            c,
            |c, out| {
                let text = c.of(&["memory:///", "", "ftp://x", "s3://x", "memory://x/y", "file:///\u{7f}"]);
                let url = match c.next() % 5 {
                    0 => CString::new(vec![0xff, 0xfe]),
                    _ => CString::new(text),
                };
                let (h, url) = (c.handle(c.profile), url.unwrap_or_default());
                let url = if text == "memory:///" || !c.one_in(8) { url.as_ptr() } else { null() };
                kvc_store_open(url, c"weights".as_ptr(), h, c.near(32), c.near(8), out)
            },
            kvc_store_free,
        ),
        46 => {
            let (h, (tokens, len), layer, place) = (c.handle(c.store), c.buffer(), c.layer(), c.place());
            kvc_store_put(h, tokens, len, c.element(), &layer, c.of(&[1, 1, 0]), &place, n)
        }
        47 => {
            let (h, (tokens, len)) = (c.handle(c.store), c.buffer());
            kvc_store_find(h, tokens, len, n)
        }
        48 => {
            let stored: Vec<u32> = (0..c.of(&[0, 40, TOKENS as u32])).collect();
            let (h, rows, place, level) =
                (c.handle(c.store), c.layer_mut(), c.place(), c.of(&[0, 1, 2, usize::MAX]));
            let (element, layers) = (c.element(), c.of(&[1, 1, 0]));
            kvc_store_get(h, stored.as_ptr(), stored.len(), level, element, &rows, layers, &place, n)
        }
        _ => return None,
    })
}

#[test]
fn every_function_answers_hostile_arguments_with_codes() {
    let mut caller = Caller::new();
    let functions = (0..).find(|&i| unsafe { call(i, &mut caller) }.is_none()).unwrap();
    assert_eq!(functions, 49);
    let mut codes = vec![std::collections::BTreeMap::<i32, usize>::new(); functions];
    for round in 0..4000 {
        if round % 4 == 0 {
            caller.fill();
        }
        for (i, codes) in codes.iter_mut().enumerate() {
            let Some(code) = (unsafe { call(i, &mut caller) }) else { continue };
            assert!((KVC_OK..KVC_PANIC).contains(&code), "function {i}: {code}");
            *codes.entry(code).or_default() += 1;
        }
    }
    for (i, codes) in codes.iter().enumerate() {
        assert!(codes.len() > 1 || [30].contains(&i), "function {i} was never refused: {codes:?}");
        assert!(codes.contains_key(&KVC_OK), "function {i} has never worked: {codes:?}");
        assert!(codes.contains_key(&KVC_NULL), "function {i} has never seen NULL: {codes:?}");
    }
    // What the caches were worth before: they still attend.
    let (queries, mut out) = ([0.1_f32; HEADS * DIM], [0.0; HEADS * DIM]);
    let by = kvc_attention { scale: 0.25, softcap: 0.0, window: 0 };
    for cache in caller.caches {
        let queries = rows_of(&queries, HEADS * DIM);
        ok(unsafe { kvc_cache_attend(cache, caller.workspace, &by, &queries, out.as_mut_ptr(), out.len()) });
    }
    unsafe {
        caller.caches.into_iter().for_each(|cache| kvc_cache_free(cache));
        kvc_books_free(caller.books);
        kvc_heads_free(caller.heads);
        kvc_bases_free(caller.bases);
        kvc_codebook_free(caller.codebook);
        kvc_workspace_free(caller.workspace);
        kvc_rotation_free(caller.rotation);
        kvc_map_free(caller.map);
        kvc_profile_free(caller.profile);
        kvc_store_free(caller.store);
        kvc_codebook_free(null_mut());
    }
}

#[test]
fn the_text_of_an_error_is_of_its_thread() {
    let text = || {
        let mut text = [1; 64];
        let needed = unsafe { kvc_last_error(text.as_mut_ptr().cast(), text.len()) };
        String::from_utf8(text[..needed - 1].to_vec()).unwrap()
    };
    let mut books = null_mut();
    assert_eq!(unsafe { kvc_books_load(null(), 0, &mut books) }, KVC_ZERO);
    assert_eq!(text(), "number of heads must not be zero");
    std::thread::spawn(move || assert_eq!(text(), "")).join().unwrap();
    let mut short = [1_u8; 5];
    assert_eq!(unsafe { kvc_last_error(short.as_mut_ptr().cast(), short.len()) }, 33);
    assert_eq!(&short, b"numb\0");
    assert_eq!(unsafe { kvc_last_error(null_mut(), 9) }, 33);
}
