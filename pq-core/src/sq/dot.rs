//! The integer dot products of codes with queries and weights. Sums are exact.
//!
//! A word holds four codes in its bytes, which one shift and one mask take out. They are multiplied as they
//! are: by bytes of the integers where the machine multiplies bytes (AVX-512 VNNI: a product with the upper
//! and one with the lower bytes), else as pairs of 16-bit halves, bytes 0 and 2 and bytes 1 and 3. Queries
//! and weights come in that form ([`Dots::factors`]).
//!
//! N.B. AVX2 multiplies bytes, too, but adds their products to 16 bits: with 15 bits of the integers as two
//! bytes that is as many multiplications as pairs of halves take, and the sums must be widened.

use super::field::Field;
use super::plan::{KeyPlan, Place, ValuePlan};
use super::shape::{COLUMNS, LANES, Shape, TILE, chunks};
use crate::simd::{Simd, pairs};

/// The largest magnitude of an integer of a query. With 256 terms and codes of 8 bits sums stay below 2^31;
/// the nearest multiple of 256 and the rest are signed bytes.
pub(super) const QUERY_LIMIT: f32 = 16_256.0;
/// The largest integer of a weight: 127 * 256.
pub(super) const WEIGHT_LIMIT: f32 = 32_512.0;

/// The most queries that share the extraction of codes.
pub(super) const QUERIES: usize = 4;

/// Units of a row of a tile.
const UNITS: usize = 8;
/// Words of factors per tile and query of weights.
pub(super) const TILE_FACTORS: usize = TILE / 2;
/// Words of factors of 16 integers.
pub(super) const FACTORS: usize = LANES / 2;

/// Codes of some tokens: tiles of `stride` words, of which the first rows are of `shape`.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    pub shape: &'a Shape,
    pub stride: usize,
    pub words: &'a [u32],
}

impl Tiles<'_> {
    /// Tokens of all tiles.
    const fn n(&self) -> usize {
        self.words.len() / self.stride * TILE
    }
}

/// The dot products, in their scalar and their vector form.
pub(super) trait Dots: Copy {
    /// Integers as the products take them: two words for each quad.
    fn factors(self, integers: [i32; LANES]) -> [u32; FACTORS];

    /// The factors of a multiple of 16 integers.
    #[inline(always)]
    fn factors_of(self, integers: &[i32], factors: &mut [u32]) {
        for (integers, factors) in chunks(integers).iter().zip(factors.as_chunks_mut().0) {
            *factors = self.factors(*integers);
        }
    }

    /// Sums over components: `sums[g, t] = sum_i queries[g, i] code[t, i]`.
    ///
    /// `queries` (group, padded dim / 2) factors of at most [`QUERIES`]; `sums` (group, tokens of all tiles).
    fn keys(self, tiles: Tiles<'_>, plan: &KeyPlan, queries: &[u32], sums: &mut [u32]);

    /// Sums over tokens: `sums[g, i] = sum_t weights[g, t] code[t, i]`.
    ///
    /// `weights` (group, tokens of all tiles / 2) factors of at most [`QUERIES`]; `sums` (group, padded dim).
    fn values(self, tiles: Tiles<'_>, plan: &ValuePlan, weights: &[u32], sums: &mut [u32]);
}

/// The definition.
#[derive(Clone, Copy)]
pub(super) struct Scalar;

impl Dots for Scalar {
    fn factors(self, integers: [i32; LANES]) -> [u32; FACTORS] {
        pairs(integers)
    }

    fn keys(self, tiles: Tiles<'_>, _: &KeyPlan, queries: &[u32], sums: &mut [u32]) {
        let (shape, n) = (tiles.shape, tiles.n());
        sums.fill(0);
        for (queries, sums) in queries.chunks_exact(shape.padded_dim() / 2).zip(sums.chunks_exact_mut(n)) {
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

    fn values(self, tiles: Tiles<'_>, _: &ValuePlan, weights: &[u32], sums: &mut [u32]) {
        let (shape, n) = (tiles.shape, tiles.n());
        sums.fill(0);
        for (weights, sums) in weights.chunks_exact(n / 2).zip(sums.chunks_exact_mut(shape.padded_dim())) {
            for (words, weights) in
                tiles.words.chunks_exact(tiles.stride).zip(weights.chunks_exact(TILE_FACTORS))
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

impl<S: Simd> Dots for Vector<S> {
    #[inline(always)]
    fn factors(self, integers: [i32; LANES]) -> [u32; FACTORS] {
        self.0.factors(integers)
    }

    #[inline(always)]
    fn keys(self, tiles: Tiles<'_>, plan: &KeyPlan, queries: &[u32], sums: &mut [u32]) {
        let places = plan.places();
        match queries.len() / (tiles.shape.padded_dim() / 2) {
            1 => add_keys::<S, 1, 4>(self.0, tiles, places, queries, sums),
            2 => add_keys::<S, 2, 4>(self.0, tiles, places, queries, sums),
            3 => add_keys::<S, 3, 2>(self.0, tiles, places, queries, sums),
            _ => add_keys::<S, QUERIES, 2>(self.0, tiles, places, queries, sums),
        }
    }

    #[inline(always)]
    fn values(self, tiles: Tiles<'_>, plan: &ValuePlan, weights: &[u32], sums: &mut [u32]) {
        sums.fill(0);
        for row in plan.rows() {
            match sums.len() / tiles.shape.padded_dim() {
                1 => add_row::<S, 1, 4>(self.0, tiles, row, weights, sums),
                2 => add_row::<S, 2, 4>(self.0, tiles, row, weights, sums),
                3 => add_row::<S, 3, 2>(self.0, tiles, row, weights, sums),
                _ => add_row::<S, QUERIES, 2>(self.0, tiles, row, weights, sums),
            }
        }
    }
}

/// The scores of `G` queries with all tokens, `R` registers of tokens at a time.
#[inline(always)]
fn add_keys<S: Simd, const G: usize, const R: usize>(
    s: S,
    tiles: Tiles<'_>,
    places: &[Place],
    queries: &[u32],
    sums: &mut [u32],
) {
    let registers = tiles.n() / S::LANES;
    let mut first = 0;
    while first + R <= registers {
        add_tokens::<S, G, R>(s, tiles, places, queries, first, sums);
        first += R;
    }
    // Two tiles at a time leave one: two registers of 16 tokens.
    while first < registers {
        add_tokens::<S, G, 2>(s, tiles, places, queries, first, sums);
        first += 2;
    }
}

/// The scores of `G` queries with `R` registers of tokens, from register `first` on.
#[inline(always)]
fn add_tokens<S: Simd, const G: usize, const R: usize>(
    s: S,
    tiles: Tiles<'_>,
    places: &[Place],
    queries: &[u32],
    first: usize,
    sums: &mut [u32],
) {
    let (factors, n) = (queries.as_chunks::<2>().0, tiles.n());
    let quads = factors.len() / G;
    // Of each register: its tile from the first of its tokens' words on, and the half of the tile.
    let mut of_register = [(&[][..], 0); R];
    for (r, of_register) in of_register.iter_mut().enumerate() {
        let token = (first + r) * S::LANES;
        *of_register = (&tiles.words[token / TILE * tiles.stride + token % LANES..], token / LANES % 2);
    }
    let mut products = [[s.no_products(); R]; G];
    for place in places {
        let mut quad = [[s.splat_u32(0); 2]; G];
        for (g, quad) in quad.iter_mut().enumerate() {
            *quad = splat(s, factors[g * quads + place.quad as usize]);
        }
        for (r, (words, half)) in of_register.iter().enumerate() {
            let words = &words[place.words[*half] as usize..][..S::LANES];
            // SAFETY: as many words as lanes.
            let codes = s.codes(unsafe { s.load_u32(words.as_ptr()) }, place.shifts[*half], place.mask);
            for (products, quad) in products.iter_mut().zip(quad) {
                products[r] = s.add_products(products[r], codes, quad);
            }
        }
    }
    for (products, sums) in products.iter().zip(sums.chunks_exact_mut(n)) {
        for (&products, sums) in products.iter().zip(sums[first * S::LANES..].chunks_exact_mut(S::LANES)) {
            // SAFETY: as many sums as lanes.
            unsafe { s.store_u32(sums.as_mut_ptr(), s.total(products)) };
        }
    }
}

/// Adds the weighted sums of `G` queries of the fields in one row of the tiles, at most `F` of them at a
/// time.
#[inline(always)]
fn add_row<S: Simd, const G: usize, const F: usize>(
    s: S,
    tiles: Tiles<'_>,
    fields: &[Field],
    weights: &[u32],
    sums: &mut [u32],
) {
    let (together, rest) = fields.as_chunks::<F>();
    for fields in together {
        add_fields::<S, G, F>(s, tiles, fields, weights, sums);
    }
    let (together, rest) = rest.as_chunks::<2>();
    for fields in together {
        add_fields::<S, G, 2>(s, tiles, fields, weights, sums);
    }
    if let [field] = rest {
        add_fields::<S, G, 1>(s, tiles, &[*field], weights, sums);
    }
}

#[inline(always)]
fn splat<S: Simd>(s: S, quad: [u32; 2]) -> [S::U32; 2] {
    [s.splat_u32(quad[0]), s.splat_u32(quad[1])]
}

/// Registers of a vector of 16 words, of an instruction set with at least 4 lanes.
const REGISTERS: usize = 4;

/// Adds the weighted sums of `G` queries of `F` fields in one row of the tiles.
#[inline(always)]
fn add_fields<S: Simd, const G: usize, const F: usize>(
    s: S,
    tiles: Tiles<'_>,
    fields: &[Field; F],
    weights: &[u32],
    sums: &mut [u32],
) {
    let dim = tiles.shape.padded_dim();
    let registers = LANES / S::LANES;
    let weights = weights.as_chunks::<2>().0;
    let units = weights.len() / G;
    let mut products = [[[s.no_products(); REGISTERS]; F]; G];
    let (first, slots) = fields[0].row();
    // The units of a row, slot by slot of their bytes.
    for up in (0..UNITS).step_by(slots) {
        let mut places = [(0, 0); F];
        for (place, field) in places.iter_mut().zip(fields) {
            *place = (field.place(up).1, u32::from(field.mask) * 0x0101_0101);
        }
        for (tile, words) in tiles.words.chunks_exact(tiles.stride).enumerate() {
            for (u, words) in words[LANES * first..][..LANES * slots].chunks_exact(LANES).enumerate() {
                let mut quad = [[s.splat_u32(0); 2]; G];
                for (g, quad) in quad.iter_mut().enumerate() {
                    *quad = splat(s, weights[g * units + UNITS * tile + up + u]);
                }
                for (r, words) in words.chunks_exact(S::LANES).enumerate() {
                    // SAFETY: as many words as lanes.
                    let words = unsafe { s.load_u32(words.as_ptr()) };
                    for (f, &(shift, mask)) in places.iter().enumerate() {
                        let codes = s.codes(words, shift, mask);
                        for (products, quad) in products.iter_mut().zip(quad) {
                            products[f][r] = s.add_products(products[f][r], codes, quad);
                        }
                    }
                }
            }
        }
    }
    for (products, sums) in products.iter().zip(sums.chunks_exact_mut(dim)) {
        for (products, field) in products.iter().zip(fields) {
            let sums = sums[LANES * field.part..][..LANES].chunks_exact_mut(S::LANES);
            for (&products, sums) in products.iter().take(registers).zip(sums) {
                // SAFETY: as many sums as lanes.
                unsafe {
                    let sum = s.add_u32(s.load_u32(sums.as_ptr()), s.total(products));
                    s.store_u32(sums.as_mut_ptr(), sum);
                }
            }
        }
    }
}
