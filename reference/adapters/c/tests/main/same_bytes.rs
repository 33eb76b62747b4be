//! What C saves is what Rust saves, and what either reads: codebooks, codes, caches, bases, profiles, frames.

use std::ptr::null_mut;
use std::sync::Arc;

use codec_core::{FitOptions, Frame, LayerRows, ModelInfo, Place, PlaneBuf, Profile, Steps};
use kv_attend::owner::AnyLayer;
use kv_attend::{Attention, ElementType, Rows, Window, Workspace};
use kv_owners::sq::{Basis, Bits, Samples};
use kvc::*;
use pq_core::{CodebookBuf, CodesBuf, HeadBooks, HeadCodes, LayerCache, PqShape, TrainOptions};

use super::support::{layer_of, nhd, ok, rows_of, saved};

const HEADS: usize = 2;
const DIM: usize = 16;
const TOKENS: usize = 150;

fn data(seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8e6 - 1.0
    };
    (0..TOKENS * HEADS * DIM).map(|i| noise() + (i % DIM) as f32 / 8.0).collect()
}

const TRAINING: kvc_training = kvc_training { iterations: 4, max_rows: 0, seed: 3 };
const WINDOW: kvc_window = kvc_window { sinks: 2, recent: 8, batch: 4 };
const RUST_WINDOW: Window = Window { sinks: 2, recent: 8, batch: 4 };

fn options() -> TrainOptions<'static> {
    TrainOptions { iterations: 4, seed: 3, ..TrainOptions::default() }
}

/// The attention of a cache through C.
fn attended(cache: *const kvc_cache, queries: &[f32]) -> Vec<f32> {
    let (mut workspace, mut out) = (null_mut(), vec![0.0; queries.len()]);
    let by = kvc_attention { scale: 0.25, softcap: 0.0, window: 0 };
    let queries = rows_of(queries, queries.len());
    unsafe {
        ok(kvc_workspace_new(&mut workspace));
        ok(kvc_cache_attend(cache, workspace, &by, &queries, out.as_mut_ptr(), out.len()));
        kvc_workspace_free(workspace);
    }
    out
}

#[test]
fn product_codes() {
    let (keys, values) = (data(1), data(2));
    let (row, shape) = (HEADS * DIM, PqShape::new(DIM, 4, 5).unwrap());
    let (k, v) = (Rows::contiguous(&keys, row).unwrap(), Rows::contiguous(&values, row).unwrap());
    let trained = HeadBooks::train_layer(k, v, HEADS, [shape; 2], &options()).unwrap();
    let mut expected = LayerCache::<f32>::new(&trained, RUST_WINDOW).unwrap();
    expected.append(k, v).unwrap();

    let (mut books, mut cache, mut restored) = (null_mut(), null_mut(), null_mut());
    unsafe {
        let (k, v) = (rows_of(&keys, row), rows_of(&values, row));
        ok(kvc_books_train(&k, &v, HEADS, 4, 5, 4, 5, &TRAINING, &mut books));
        for (head, expected) in trained.iter().enumerate() {
            let saved = saved(|out, len, n| kvc_books_save(books, head, out, len, n));
            assert_eq!(saved, expected.to_bytes_checked::<f32>());
        }
        ok(kvc_cache_pq(books, KVC_F32, &WINDOW, &mut cache));
        ok(kvc_cache_append(cache, &k, &v));
        let saved = saved(|out, len, n| kvc_cache_save(cache, out, len, n));
        assert_eq!(saved, expected.to_bytes_checked());
        // C reads Rust's bytes, Rust those of C.
        let unchecked = expected.to_bytes();
        ok(kvc_cache_load_pq(books, unchecked.as_ptr(), unchecked.len(), &mut restored));
        let rust = AnyLayer::<HeadCodes>::from_bytes(&saved, &trained).unwrap();
        let queries = &data(5)[..row];
        let mut out = vec![0.0; row];
        let by = Attention::scaled(0.25);
        rust.attend_into(&by, Rows::from(queries).into(), &mut Workspace::default(), &mut out).unwrap();
        assert_eq!([attended(cache, queries), attended(restored, queries)], [out.clone(), out]);
        kvc_cache_free(restored);
        kvc_cache_free(cache);
        kvc_books_free(books);
    }
}

#[test]
fn a_codebook_and_its_codes() {
    let data = data(4);
    let shape = PqShape::new(DIM, 8, 6).unwrap();
    let trained = pq_core::train(shape, &data, &options()).unwrap();
    let expected = CodebookBuf::new(shape, &trained.centroids).unwrap();
    let (mut book, vectors) = (null_mut(), rows_of(&data, DIM));
    let mut codes = CodesBuf::new(shape);
    codes.append(&expected.view(), &data).unwrap();
    unsafe {
        ok(kvc_codebook_train(&vectors, 8, 6, &TRAINING, &mut book));
        let saved = saved(|out, len, n| kvc_codebook_save(book, out, len, n));
        assert_eq!(saved, expected.to_bytes_checked::<f32>());
        let mut len = 0;
        ok(kvc_codebook_codes_len(book, vectors.rows, &mut len));
        let mut packed = vec![0; len];
        ok(kvc_codebook_encode(book, &vectors, packed.as_mut_ptr(), len));
        assert_eq!(packed, codes.view().bytes());
        let mut decoded = vec![0.0; data.len()];
        let out = decoded.as_mut_ptr();
        ok(kvc_codebook_decode(book, packed.as_ptr(), len, vectors.rows, out, data.len()));
        let mut rust = vec![0.0; data.len()];
        pq_core::decode_into(&expected.view(), &codes.view(), 0, &mut rust).unwrap();
        assert_eq!(decoded, rust);
        // The vector nearest in direction to a query is found.
        let query: Vec<f32> = decoded[17 * DIM..18 * DIM].to_vec();
        let (mut indices, mut found) = ([0; 20], 0);
        let (query, at) = (rows_of(&query, DIM), indices.as_mut_ptr());
        ok(kvc_codebook_search(book, packed.as_ptr(), len, vectors.rows, &query, 20, at, 20, &mut found));
        assert_eq!(found, 20);
        assert!(indices.is_sorted());
        kvc_codebook_free(book);
    }
}

#[test]
fn scalar_codes() {
    let (keys, queries, values) = (data(1), data(2), data(3));
    let (row, frequencies) = (HEADS * DIM, [1.0_f32, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005]);
    let part = |x| Rows::contiguous(x, row).unwrap();
    let samples = Samples {
        keys: part(&keys),
        queries: part(&queries),
        values: part(&values),
        frequencies: &frequencies,
        rotated_from: Some(4),
    };
    let fitted = Basis::fit_layer(&samples, HEADS, 32).unwrap();
    let shared: Vec<Arc<_>> =
        fitted.iter().map(|basis| basis.head(&frequencies, &Bits::uniform(3)).unwrap()).collect();
    let mut expected = AnyLayer::<kv_owners::sq::Codes>::new(ElementType::F32, &shared, RUST_WINDOW).unwrap();
    expected.append(samples.keys.into(), samples.values.into()).unwrap();

    let (mut bases, mut heads, mut cache) = (null_mut(), null_mut(), null_mut());
    let samples = kvc_samples {
        keys: rows_of(&keys, row),
        queries: rows_of(&queries, row),
        values: rows_of(&values, row),
        frequencies: frequencies.as_ptr(),
        frequencies_len: DIM / 2,
        rotated: 1,
        first_position: 4,
    };
    let bits = kvc_bits { keys: 3.0, values: 3, mean_error: 0 };
    unsafe {
        ok(kvc_bases_fit(&samples, HEADS, 32, &mut bases));
        ok(kvc_heads_new(bases, frequencies.as_ptr(), DIM / 2, &bits, &mut heads));
        for head in 0..HEADS {
            assert_eq!(
                saved(|out, len, n| kvc_bases_save(bases, head, out, len, n)),
                fitted[head].to_bytes()
            );
            assert_eq!(
                saved(|out, len, n| kvc_heads_save(heads, head, out, len, n)),
                shared[head].to_bytes()
            );
        }
        ok(kvc_cache_sq(heads, KVC_F32, &WINDOW, &mut cache));
        ok(kvc_cache_append(cache, &samples.keys, &samples.values));
        assert_eq!(saved(|out, len, n| kvc_cache_save(cache, out, len, n)), expected.to_bytes_checked());
        let queries = &queries[..row];
        let mut out = vec![0.0; row];
        let by = Attention::scaled(0.25);
        expected.attend_into(&by, Rows::from(queries).into(), &mut Workspace::default(), &mut out).unwrap();
        assert_eq!(attended(cache, queries), out);
        kvc_cache_free(cache);
        kvc_heads_free(heads);
        kvc_bases_free(bases);
    }
}

#[test]
fn profiles_and_frames() {
    let (keys, values) = (data(1), data(2));
    let model = ModelInfo { model_id: 9, layers: 1, heads: HEADS, head_dim: DIM, keys_rotated: true };
    let (layer, place) = ([LayerRows { keys: &keys[..], values: &values[..] }], Place::nhd(HEADS, DIM));
    let steps = [0.05_f32, 0.3];
    let expected = Profile::fit(model, 2, TOKENS, &layer, &place, |level, _, _, rows| {
        let options = FitOptions { steps: Steps::Deviations(steps[level]), ..FitOptions::default() };
        PlaneBuf::fit(rows, model.channels(), None, &options)
    })
    .unwrap();
    let info = expected.frame_info(1, TOKENS);
    let mut frame = vec![0; info.max_frame_len()];
    let len = expected.encode_into(&info, &layer, &place, &mut frame).unwrap();
    frame.truncate(len);

    let c_model = kvc_model { model_id: 9, layers: 1, heads: HEADS, head_dim: DIM, keys_rotated: 1 };
    let (rows, c_place) = (layer_of(&keys, &values), nhd(HEADS, DIM));
    let mut profile = null_mut();
    unsafe {
        let (steps, out) = (steps.as_ptr(), &mut profile);
        ok(kvc_profile_fit(&c_model, steps, 2, TOKENS, KVC_F32, &rows, 1, &c_place, out));
        assert_eq!(saved(|out, len, n| kvc_profile_save(profile, out, len, n)), expected.to_bytes());
        let (mut len, mut n) = (0, 0);
        ok(kvc_profile_max_frame_len(profile, TOKENS, &mut len));
        let mut made = vec![0; len];
        let out = made.as_mut_ptr();
        ok(kvc_profile_encode(profile, 1, 0, TOKENS, KVC_F32, &rows, 1, &c_place, out, len, &mut n));
        assert_eq!(made[..n], frame);
        let mut decoded = [vec![0.0_f32; keys.len()], vec![0.0; values.len()]];
        let [k, v] = &mut decoded;
        let to = kvc_layer_mut {
            keys: k.as_mut_ptr().cast(),
            keys_len: k.len(),
            values: v.as_mut_ptr().cast(),
            values_len: v.len(),
        };
        ok(kvc_profile_decode(profile, frame.as_ptr(), n, 0, KVC_F32, &c_place, &to));
        let mut rust = [vec![0.0_f32; keys.len()], vec![0.0; values.len()]];
        let [k, v] = &mut rust;
        expected.decode_layer_to(&Frame::parse(&frame, 1 << 20).unwrap(), 0, None, &place, k, v).unwrap();
        assert_eq!(decoded, rust);
        let mut info = std::mem::MaybeUninit::<kvc_frame>::uninit();
        ok(kvc_frame_info(frame.as_ptr(), n, info.as_mut_ptr()));
        let info = info.assume_init();
        assert_eq!((info.tokens, info.level, info.model.model_id), (TOKENS, 1, 9));
        kvc_profile_free(profile);
    }
}
