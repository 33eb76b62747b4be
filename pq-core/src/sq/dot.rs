//! The integer dot products of codes with queries and weights.
//!
//! A word holds four codes in its bytes. Shifted and masked it is two pairs of 16-bit halves, bytes 0 and 2 and
//! bytes 1 and 3, which a multiply-add of pairs takes as they are: nothing is unpacked. Queries and weights come
//! as such pairs ([`pairs`]). Sums are exact.

use super::field::Field;
use super::shape::{COLUMNS, LANES, MAX_QUADS, QUAD, Shape, TILE};
use crate::simd::Simd;

/// The largest magnitude of an integer of a query: 127 * 128, two signed limbs of 8 and 7 bits on int8 tensor
/// cores. With 256 terms and codes of 8 bits sums stay below 2^31.
pub(super) const QUERY_LIMIT: f32 = 16_256.0;
/// The largest integer of a weight: 127 * 256, two unsigned limbs of 8 bits.
pub(super) const WEIGHT_LIMIT: f32 = 32_512.0;

/// Units of a row of a tile.
const UNITS: usize = 8;
/// Words of pairs per tile and query of weights.
pub(super) const TILE_PAIRS: usize = TILE / 2;

/// Four integers as two words: of the first and third, and of the second and fourth.
#[inline(always)]
pub(super) fn pairs(x: [i32; QUAD]) -> [u32; 2] {
    let pair = |low: i32, high: i32| (low as u32 & 0xffff) | (high as u32) << 16;
    [pair(x[0], x[2]), pair(x[1], x[3])]
}

/// Codes of some tokens: tiles of `stride` words, of which the first rows are of `shape`.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    pub shape: &'a Shape,
    pub stride: usize,
    pub words: &'a [u32],
}

/// The dot products, in their scalar and their vector form.
pub(super) trait Dots: Copy {
    /// Sums over components: `sums[g, t] = sum_i queries[g, i] code[t, i]`.
    ///
    /// `queries` (group, dim / 2) pairs of the quads; `sums` (group, tokens of all tiles).
    fn keys(self, tiles: Tiles<'_>, queries: &[u32], sums: &mut [u32]);

    /// Sums over tokens: `sums[g, i] = sum_t weights[g, t] code[t, i]`.
    ///
    /// `weights` (group, tokens of all tiles / 2) pairs; `sums` (group, dim).
    fn values(self, tiles: Tiles<'_>, weights: &[u32], sums: &mut [u32]);
}

/// The definition.
#[derive(Clone, Copy)]
pub(super) struct Scalar;

impl Dots for Scalar {
    fn keys(self, tiles: Tiles<'_>, queries: &[u32], sums: &mut [u32]) {
        let (shape, n) = (tiles.shape, tiles.words.len() / tiles.stride * TILE);
        sums.fill(0);
        for (queries, sums) in queries.chunks_exact(shape.dim() / 2).zip(sums.chunks_exact_mut(n)) {
            for (words, sums) in tiles.words.chunks_exact(tiles.stride).zip(sums.chunks_exact_mut(TILE)) {
                shape.key_fields(|field| {
                    for (half, sums) in sums.chunks_exact_mut(LANES).enumerate() {
                        let unit = 2 * (field.part % COLUMNS) + half;
                        add_unit(&field, unit, words, &queries[2 * field.part..][..2], sums);
                    }
                });
            }
        }
    }

    fn values(self, tiles: Tiles<'_>, weights: &[u32], sums: &mut [u32]) {
        let (shape, n) = (tiles.shape, tiles.words.len() / tiles.stride * TILE);
        sums.fill(0);
        for (weights, sums) in weights.chunks_exact(n / 2).zip(sums.chunks_exact_mut(shape.dim())) {
            for (words, weights) in
                tiles.words.chunks_exact(tiles.stride).zip(weights.chunks_exact(TILE_PAIRS))
            {
                shape.value_fields(|field| {
                    let sums = &mut sums[LANES * field.part..][..LANES];
                    for unit in 0..UNITS {
                        add_unit(&field, unit, words, &weights[2 * unit..][..2], sums);
                    }
                });
            }
        }
    }
}

/// Adds the products of the four codes of each lane of a unit with a quad of integers.
fn add_unit(field: &Field, unit: usize, words: &[u32], quad: &[u32], sums: &mut [u32]) {
    let words = &words[LANES * field.place(unit).0..];
    for (sum, &word) in sums.iter_mut().zip(words) {
        for (j, pair) in [quad[0], quad[1], quad[0] >> 16, quad[1] >> 16].into_iter().enumerate() {
            let product = i32::from(pair as i16) * i32::from(field.get(unit, j, word));
            *sum = sum.wrapping_add(product as u32);
        }
    }
}

/// The products on the registers of an instruction set.
#[derive(Clone, Copy)]
pub(super) struct Vector<S>(pub S);

/// Where the vector form finds a field of keys.
#[derive(Clone, Copy, Default)]
struct Place {
    quad: u8,
    mask: u8,
    vector: u16, // of the first half of the tokens
    shift: i8,
    step: u8, // 1 if the second half is in the next vector, 0 if it is one bit further up
}

/// At most two stages of 16 quads, and 19 ends of rows, in each column.
const MAX_PLACES: usize = COLUMNS * (2 * MAX_QUADS / COLUMNS + 19);

impl<S: Simd> Dots for Vector<S> {
    #[inline(always)]
    fn keys(self, tiles: Tiles<'_>, queries: &[u32], sums: &mut [u32]) {
        let (mut places, mut len) = ([Place::default(); MAX_PLACES], 0);
        tiles.shape.key_fields(|field| {
            let unit = 2 * (field.part % COLUMNS);
            let (vector, shift) = field.place(unit);
            let step = field.place(unit + 1).0 - vector;
            let (quad, mask) = (field.part as u8, field.mask);
            places[len] = Place { quad, mask, vector: vector as u16, shift: shift as i8, step: step as u8 };
            len += 1;
        });
        let (dim, n) = (tiles.shape.dim(), tiles.words.len() / tiles.stride * TILE);
        let (mut queries, mut sums) = (queries, sums);
        loop {
            let group = queries.len() / (dim / 2);
            let together = together(group);
            let (some, rest) = queries.split_at(together * dim / 2);
            let (out, others) = sums.split_at_mut(together * n);
            match together {
                0 => return,
                1 => add_keys::<S, 1>(self.0, tiles, &places[..len], some, out),
                2 => add_keys::<S, 2>(self.0, tiles, &places[..len], some, out),
                _ => add_keys::<S, 4>(self.0, tiles, &places[..len], some, out),
            }
            (queries, sums) = (rest, others);
        }
    }

    #[inline(always)]
    fn values(self, tiles: Tiles<'_>, weights: &[u32], sums: &mut [u32]) {
        let (dim, n) = (tiles.shape.dim(), tiles.words.len() / tiles.stride * TILE);
        sums.fill(0);
        let (mut weights, mut sums) = (weights, sums);
        loop {
            let group = sums.len() / dim;
            let together = together(group);
            let (some, rest) = weights.split_at(together * n / 2);
            let (out, others) = sums.split_at_mut(together * dim);
            match together {
                0 => return,
                1 => tiles.shape.value_fields(|field| add_values::<S, 1>(self.0, tiles, &field, some, out)),
                2 => tiles.shape.value_fields(|field| add_values::<S, 2>(self.0, tiles, &field, some, out)),
                _ => tiles.shape.value_fields(|field| add_values::<S, 4>(self.0, tiles, &field, some, out)),
            }
            (weights, sums) = (rest, others);
        }
    }
}

/// Queries that share the extraction of codes, of `group` that are left.
#[inline(always)]
const fn together(group: usize) -> usize {
    match group {
        0 | 1 => group,
        2 | 3 => 2,
        _ => 4,
    }
}

/// Registers of a vector of 16 words, of an instruction set with at least 4 lanes.
type Registers<S> = [<S as Simd>::U32; 4];

/// The codes of a vector's bytes 0 and 2, and of its bytes 1 and 3, as 16-bit halves.
#[inline(always)]
fn extract<S: Simd>(s: S, word: S::U32, shift: i32, mask: S::U32) -> [S::U32; 2] {
    [shift, shift + 8].map(
        #[inline(always)]
        |shift| s.and_u32(s.shift_right_u32(word, shift), mask),
    )
}

#[inline(always)]
fn mask_of<S: Simd>(s: S, mask: u8) -> S::U32 {
    s.splat_u32(u32::from(mask) * 0x1_0001)
}

/// The scores of `G` queries.
#[inline(always)]
fn add_keys<S: Simd, const G: usize>(
    s: S,
    tiles: Tiles<'_>,
    places: &[Place],
    queries: &[u32],
    sums: &mut [u32],
) {
    let (dim, n) = (tiles.shape.dim(), tiles.words.len() / tiles.stride * TILE);
    let registers = LANES / S::LANES;
    assert!(queries.len() == G * dim / 2 && sums.len() == G * n);
    for (tile, words) in tiles.words.chunks_exact(tiles.stride).enumerate() {
        for half in 0..2 {
            let mut totals: [Registers<S>; G] = [[s.splat_u32(0); 4]; G];
            for place in places {
                let step = usize::from(place.step);
                let vector = &words[LANES * (usize::from(place.vector) + half * step)..][..LANES];
                let shift = i32::from(place.shift) + (half * (1 - step)) as i32;
                let mask = mask_of(s, place.mask);
                for r in 0..registers {
                    // SAFETY: a vector has 16 words, as many as all registers.
                    let word = unsafe { s.load_u32(vector.as_ptr().add(r * S::LANES)) };
                    let codes = extract(s, word, shift, mask);
                    for (g, totals) in totals.iter_mut().enumerate() {
                        let quad = &queries[g * dim / 2 + 2 * usize::from(place.quad)..][..2];
                        totals[r] = s.add_products(totals[r], codes[0], s.splat_u32(quad[0]));
                        totals[r] = s.add_products(totals[r], codes[1], s.splat_u32(quad[1]));
                    }
                }
            }
            for (g, totals) in totals.iter().enumerate() {
                let sums = &mut sums[g * n + TILE * tile + LANES * half..][..LANES];
                for (r, &total) in totals.iter().enumerate().take(registers) {
                    // SAFETY: 16 sums, as many as lanes of all registers.
                    unsafe { s.store_u32(sums.as_mut_ptr().add(r * S::LANES), total) };
                }
            }
        }
    }
}

/// Adds the weighted sums of one field's bits for `G` queries.
#[inline(always)]
fn add_values<S: Simd, const G: usize>(
    s: S,
    tiles: Tiles<'_>,
    field: &Field,
    weights: &[u32],
    sums: &mut [u32],
) {
    let (dim, n) = (tiles.shape.dim(), tiles.words.len() / tiles.stride * TILE);
    let registers = LANES / S::LANES;
    assert!(weights.len() == G * n / 2 && sums.len() == G * dim);
    let mask = mask_of(s, field.mask);
    let mut totals: [Registers<S>; G] = [[s.splat_u32(0); 4]; G];
    for (tile, words) in tiles.words.chunks_exact(tiles.stride).enumerate() {
        for unit in 0..UNITS {
            let (vector, shift) = field.place(unit);
            let vector = &words[LANES * vector..][..LANES];
            for r in 0..registers {
                // SAFETY: a vector has 16 words, as many as all registers.
                let word = unsafe { s.load_u32(vector.as_ptr().add(r * S::LANES)) };
                let codes = extract(s, word, shift, mask);
                for (g, totals) in totals.iter_mut().enumerate() {
                    let quad = &weights[g * n / 2 + TILE_PAIRS * tile + 2 * unit..][..2];
                    totals[r] = s.add_products(totals[r], codes[0], s.splat_u32(quad[0]));
                    totals[r] = s.add_products(totals[r], codes[1], s.splat_u32(quad[1]));
                }
            }
        }
    }
    for (g, totals) in totals.iter().enumerate() {
        let sums = &mut sums[g * dim + LANES * field.part..][..LANES];
        for (r, &total) in totals.iter().enumerate().take(registers) {
            let p = sums[r * S::LANES..].as_mut_ptr();
            // SAFETY: 16 sums, as many as lanes of all registers.
            unsafe { s.store_u32(p, s.add_u32(s.load_u32(p), total)) };
        }
    }
}
