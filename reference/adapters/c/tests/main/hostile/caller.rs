//! A caller with a valid handle of every type, who draws arguments that mostly fit.

use std::ptr::null_mut;

use kvc::*;

use crate::support::{layer_of, nhd, ok, rows_of, saved};

/// 64 kB, of which every buffer is a part.
pub const WORDS: usize = 1 << 13;

pub struct Caller {
    state: u64,
    memory: Vec<u64>,
    pages: Vec<u64>, // of page tables, which calls read while they write to the memory
    pub books: *mut kvc_books,
    pub heads: *mut kvc_heads,
    pub bases: *mut kvc_bases,
    pub codebook: *mut kvc_codebook,
    pub caches: [*mut kvc_cache; 2],
    pub workspace: *mut kvc_workspace,
    pub rotation: *mut kvc_rotation,
    pub map: *mut kvc_map,
    pub profile: *mut kvc_profile,
    pub store: *mut kvc_store,
    pub frame: Vec<u8>,
    saved: Vec<Vec<u8>>,
}

pub const HEADS: usize = 2;
pub const DIM: usize = 16;
pub const TOKENS: usize = 96;

impl Caller {
    /// With a valid handle of every type.
    pub fn new() -> Self {
        let mut caller = Self {
            state: 0x1234_5678_9abc_def1,
            memory: vec![0; WORDS],
            pages: vec![0; WORDS],
            books: null_mut(),
            heads: null_mut(),
            bases: null_mut(),
            codebook: null_mut(),
            caches: [null_mut(); 2],
            workspace: null_mut(),
            rotation: null_mut(),
            map: null_mut(),
            profile: null_mut(),
            store: null_mut(),
            frame: vec![],
            saved: vec![],
        };
        let data: Vec<f32> =
            (0..TOKENS * HEADS * DIM).map(|_| (caller.next() % 2001) as f32 / 1e3 - 1.0).collect();
        let (layer, head) = (rows_of(&data, HEADS * DIM), rows_of(&data, DIM));
        let training = kvc_training { iterations: 3, max_rows: 0, seed: 1 };
        let window = kvc_window { sinks: 2, recent: 4, batch: 8 };
        let frequencies = [0.5; DIM / 2];
        let samples = kvc_samples {
            keys: layer,
            queries: layer,
            values: layer,
            frequencies: frequencies.as_ptr(),
            frequencies_len: DIM / 2,
            rotated: 1,
            first_position: 0,
        };
        let bits = kvc_bits { keys: 4.0, values: 4, mean_error: 0 };
        let model = kvc_model { model_id: 1, layers: 1, heads: HEADS, head_dim: DIM, keys_rotated: 1 };
        let (place, rows) = (nhd(HEADS, DIM), layer_of(&data, &data));
        unsafe {
            ok(kvc_codebook_train(&head, 4, 4, &training, &mut caller.codebook));
            ok(kvc_books_train(&layer, &layer, HEADS, 4, 4, 8, 5, &training, &mut caller.books));
            ok(kvc_bases_fit(&samples, HEADS, 32, &mut caller.bases));
            ok(kvc_heads_new(caller.bases, frequencies.as_ptr(), DIM / 2, &bits, &mut caller.heads));
            ok(kvc_cache_pq(caller.books, KVC_F32, &window, &mut caller.caches[0]));
            ok(kvc_cache_sq(caller.heads, KVC_F32, &window, &mut caller.caches[1]));
            caller.caches.iter().for_each(|&cache| ok(kvc_cache_append(cache, &layer, &layer)));
            ok(kvc_workspace_new(&mut caller.workspace));
            ok(kvc_rotation_fit(KVC_SCORE_OPTIMAL, &head, &head, &mut caller.rotation));
            ok(kvc_rotation_map(caller.rotation, KVC_BASIS, 8, &mut caller.map));
            let steps = [0.1, 0.5];
            ok(kvc_profile_fit(
                &model,
                steps.as_ptr(),
                2,
                TOKENS,
                KVC_F32,
                &rows,
                1,
                &place,
                &mut caller.profile,
            ));
            let (url, name) = (c"memory:///".as_ptr(), c"weights".as_ptr());
            ok(kvc_store_open(url, name, caller.profile, 32, 8, &mut caller.store));
            let tokens: Vec<u32> = (0..TOKENS as u32).collect();
            let mut n = 0;
            ok(kvc_store_put(caller.store, tokens.as_ptr(), TOKENS, KVC_F32, &rows, 1, &place, &mut n));
            let mut len = 0;
            ok(kvc_profile_max_frame_len(caller.profile, TOKENS, &mut len));
            caller.frame = vec![0; len];
            let frame = caller.frame.as_mut_ptr();
            ok(kvc_profile_encode(
                caller.profile,
                0,
                0,
                TOKENS,
                KVC_F32,
                &rows,
                1,
                &place,
                frame,
                len,
                &mut n,
            ));
            caller.frame.truncate(n);
            caller.saved = vec![
                saved(|out, len, n| kvc_codebook_save(caller.codebook, out, len, n)),
                saved(|out, len, n| kvc_books_save(caller.books, 0, out, len, n)),
                saved(|out, len, n| kvc_bases_save(caller.bases, 1, out, len, n)),
                saved(|out, len, n| kvc_heads_save(caller.heads, 0, out, len, n)),
                saved(|out, len, n| kvc_profile_save(caller.profile, out, len, n)),
                saved(|out, len, n| kvc_cache_save(caller.caches[0], out, len, n)),
                saved(|out, len, n| kvc_cache_save(caller.caches[1], out, len, n)),
                caller.frame.clone(),
            ];
        }
        caller
    }

    pub fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state >> 11
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.next() as usize % choices.len()]
    }

    /// A handle, or what is none.
    pub fn handle<T>(&mut self, handle: *mut T) -> *mut T {
        match self.next() % 20 {
            0 => null_mut(),
            1 => handle.wrapping_byte_add(1),
            _ => handle,
        }
    }

    /// A buffer of elements and its length: a part of the memory, empty, NULL or misaligned.
    pub fn buffer<T>(&mut self) -> (*mut T, usize) {
        let memory = self.memory.as_mut_ptr();
        self.part(memory)
    }

    pub fn part<T>(&mut self, memory: *mut u64) -> (*mut T, usize) {
        let most = WORDS * 8 / size_of::<T>() - 1;
        let sizes = [0, 1, 2, 7, 16, 31, 32, 64, 96, 512, 1024, TOKENS * HEADS * DIM, most];
        let (base, len) = (memory.cast::<T>(), self.of(&sizes).min(most));
        match self.next() % 24 {
            0 => (null_mut(), len),
            1 => (base.wrapping_byte_add(1), len),
            2 => (base, usize::MAX / self.of(&[1, 2])), // more than any memory
            _ => (base, len),
        }
    }

    pub fn size(&mut self) -> usize {
        let small = self.next() as usize % 40;
        self.of(&[0, 1, 2, 4, 8, DIM, HEADS * DIM, TOKENS, small, small, 1 << 20, usize::MAX / 2, usize::MAX])
    }

    /// Mostly sizes that fit.
    pub fn near(&mut self, size: usize) -> usize {
        if self.one_in(4) { self.size() } else { size }
    }

    pub fn element(&mut self) -> u32 {
        self.of(&[KVC_F32, KVC_F32, KVC_F32, KVC_F32, KVC_F16, KVC_BF16, 3, u32::MAX])
    }

    /// Half of them fit: calls with several of them get beyond their arguments.
    pub fn rows(&mut self, components: usize) -> kvc_rows {
        if self.one_in(2) {
            let (data, rows) = (self.memory.as_ptr().cast(), self.of(&[1, 2, 16, 33, TOKENS]));
            let (len, stride) = (rows * components, components);
            return kvc_rows { data, len, rows, components, stride, element: KVC_F32 };
        }
        let (data, len) = self.buffer::<f32>();
        let (rows, components) = (self.of(&[0, 1, 2, 16, 33, TOKENS, usize::MAX]), self.near(components));
        let stride = if self.one_in(3) { self.size() } else { components };
        kvc_rows { data: data.cast(), len, rows, components, stride, element: self.element() }
    }

    pub fn place(&mut self) -> kvc_place {
        let table = self.pages.as_mut_ptr();
        let (pages, pages_len) = if self.one_in(2) { (null_mut(), 0) } else { self.part::<u32>(table) };
        kvc_place {
            token_stride: self.near(HEADS * DIM),
            head_stride: self.near(DIM),
            first_token: self.of(&[0, 0, 0, 1, 40, usize::MAX]),
            pages,
            pages_len,
            page_tokens: self.size(),
            page_stride: self.size(),
        }
    }

    pub fn layer(&mut self) -> kvc_layer {
        let ((keys, keys_len), (values, values_len)) = (self.buffer::<f32>(), self.buffer::<f32>());
        kvc_layer { keys: keys.cast(), keys_len, values: values.cast(), values_len }
    }

    /// Parts that no call writes to at once: keys and values are apart.
    pub fn layer_mut(&mut self) -> kvc_layer_mut {
        let ((keys, keys_len), (values, values_len)) = (self.buffer::<f32>(), self.buffer::<f32>());
        let half = WORDS; // floats
        kvc_layer_mut {
            keys: keys.cast(),
            keys_len: if keys_len <= WORDS * 2 { keys_len.min(half) } else { keys_len },
            values: values.wrapping_add(if values.is_null() { 0 } else { half }).cast(),
            values_len: if values_len <= WORDS * 2 { values_len.min(half - 1) } else { values_len },
        }
    }

    /// Saved bytes of any type, some of them damaged, in memory of their own.
    pub fn saved(&mut self) -> Vec<u8> {
        let i = self.next() as usize % self.saved.len();
        let mut bytes = self.saved[i].clone();
        for _ in 0..self.of(&[0, 0, 1, 3]) {
            let at = self.next() as usize % bytes.len();
            bytes[at] ^= 1 << (self.next() % 8);
        }
        let cut = self.next() as usize % (bytes.len() + 1);
        bytes.truncate(if self.one_in(4) { cut } else { bytes.len() });
        bytes
    }

    /// Floats of any bits, or random ones; page numbers of any bits, or small ones.
    pub fn fill(&mut self) {
        let wild = self.one_in(6);
        for i in 0..WORDS {
            let float = |x: u64| ((x % 2001) as f32 / 1e3 - 1.0).to_bits();
            let x = self.next();
            self.memory[i] =
                if wild { x << 11 ^ x } else { u64::from(float(x)) << 32 | u64::from(float(x >> 9)) };
            self.pages[i] = if wild { x << 11 ^ x } else { ((x % 4) << 32) | (x / 4 % 4) };
        }
    }
}
