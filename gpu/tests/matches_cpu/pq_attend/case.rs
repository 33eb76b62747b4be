//! Cases of attention on codes: shapes, inputs, the device's launch and the CPU's definition of it.

mod check;
mod on_device;

use half::f16;
use kv_gpu::pq::{AttendShape, CodeLayout, Paging, Side, TILE};
use kv_gpu::{Device, Element};
use pq_core::{CodebookBuf, Codes, PqShape, SoftmaxStats};

use crate::common::{Random, SIDES, from_element, to_element};

/// A shape with one quantizer, without addends and norms, and with exact tokens in elements.
pub const fn plain(quantizer: PqShape, group: usize, element: Element, paging: Paging) -> AttendShape {
    let (addends, norms, exact_fp8) = (false, false, false);
    AttendShape { keys: quantizer, values: quantizer, group, element, paging, addends, norms, exact_fp8 }
}

/// Every quantizer that attention accepts.
pub fn quantizers() -> Vec<PqShape> {
    let all = [64, 128].into_iter().flat_map(|dim| {
        let subspaces = (0..8).map(move |i| dim >> i);
        subspaces.flat_map(move |m| (1..=12).filter_map(move |nbits| PqShape::new(dim, m, nbits).ok()))
    });
    all.filter(|&quantizer| plain(quantizer, 1, Element::F16, Paging::Contiguous).check().is_ok()).collect()
}

/// The shape of one launch, and the tokens of its sequences.
pub struct Case {
    pub shape: AttendShape,
    pub batch: usize,
    pub heads: usize,
    pub capacity: usize, // coded tokens of a sequence
    pub lengths: Vec<u32>,
    pub exact_capacity: usize, // 0: without exact tokens
    pub exact_lengths: Vec<u32>,
    pub page_tiles: usize, // half tiles if pages have these
}

/// The inputs of a case for the CPU. Pairs are [keys, values], indexed by [`Side`].
pub struct Inputs {
    pub queries: Vec<f32>,            // (batch, heads, group, dim)
    pub exact: [Vec<f32>; 2],         // (batch, heads, exact_capacity, dim), less the factors
    pub exact_factors: Vec<[f32; 2]>, // (heads,): 1 unless exact tokens are in FP8
    pub books: Vec<[CodebookBuf; 2]>, // (heads,)
    pub codes: Vec<[Vec<u8>; 2]>,     // (batch, heads), packed, of `capacity` tokens
    pub pages: Vec<usize>,            // (batch, max_pages) and an unused page; (batch,) without pages
    pub addends: Vec<f32>,            // (batch, heads, group, capacity)
    pub norms: [Vec<f32>; 2],         // (batch, heads, capacity)
    pub pdl: bool,
}

/// Bits of the outputs (batch, heads, group, dim) and of their log-sum-exps.
#[derive(Clone, PartialEq)]
pub struct Outputs {
    pub out: Vec<u16>,
    pub log_sum_exp: Vec<u32>,
}

/// Normalized outputs (batch, heads, group, dim) and their statistics.
pub struct Expected {
    pub out: Vec<f32>,
    pub stats: Vec<SoftmaxStats>,
}

/// A generator for addends and norms, so that a case is the same with and without them otherwise.
const fn other_random(random: &Random) -> Random {
    Random(!random.0)
}

/// A shape with a random choice of addends, norms and exact tokens in FP8.
pub fn adjusted(random: &Random, shape: AttendShape) -> AttendShape {
    let mut other = other_random(random);
    let [addends, norms, exact_fp8] = [(); 3].map(|()| other.below(2) == 1);
    AttendShape { addends, norms, exact_fp8, ..shape }
}

/// The number of an FP8 byte (E4M3).
pub(super) fn of_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match exponent {
        15 if mantissa == 7.0 => f32::NAN,
        0 => mantissa * 2_f32.powi(-9),
        _ => (8.0 + mantissa) * 2_f32.powi(exponent - 10),
    };
    if byte < 128 { magnitude } else { -magnitude }
}

/// The byte of the nearest number, or of NaN.
pub(super) fn to_e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 127;
    }
    let distance = |byte: u8| (of_e4m3(byte) - x.abs()).abs();
    let magnitude = (0..127).min_by(|&a, &b| distance(a).total_cmp(&distance(b)));
    magnitude.unwrap() | if x.is_sign_negative() { 128 } else { 0 }
}

fn codebook(random: &mut Random, shape: PqShape) -> CodebookBuf {
    let centroids: Vec<f32> = random.normals(shape.codebook_len());
    let halves: Vec<f32> = centroids.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    CodebookBuf::new(shape, &halves).unwrap()
}

impl Case {
    /// A case of a random number of sequences out of `batches`.
    pub fn random(random: &mut Random, batches: &[usize]) -> Self {
        let mut quantizers = quantizers();
        let keys = random.pick(&quantizers);
        quantizers.retain(|values| values.dim() == keys.dim());
        let values = random.pick(&quantizers);
        let (batch, heads) = (random.pick(batches), 1 + random.below(4));
        let (group, element) = (1 + random.below(16), random.pick(&[Element::F16, Element::Bf16]));
        let pagings = [Paging::Contiguous, Paging::Contiguous, Paging::Tiles, Paging::HalfTiles];
        let paging = random.pick(&pagings);
        let mut shape = adjusted(random, AttendShape { values, ..plain(keys, group, element, paging) });
        if shape.check().is_err() {
            shape.paging = Paging::Tiles; // a quantizer without half tiles
        }
        let capacity = random.pick(&[1, 31, 32, 33, 100, 700, 3000]);
        let lengths = (0..batch)
            .map(|_| match random.below(4) {
                0 => random.pick(&[0, 1, capacity]) as u32,
                _ => random.below(capacity + 1) as u32,
            })
            .collect();
        let exact_capacity = random.pick(&[0, 1, 7, 40, 132]);
        let exact_lengths = (0..batch).map(|_| random.below(exact_capacity + 1) as u32).collect();
        let page_tiles = if shape.paging == Paging::Contiguous {
            capacity.div_ceil(TILE) + random.below(3)
        } else {
            random.pick(&[1, 2, 3, 8])
        };
        Self { shape, batch, heads, capacity, lengths, exact_capacity, exact_lengths, page_tiles }
    }

    /// Runs the case on the device and compares with the CPU. `spoil` changes the queries.
    pub fn run(&self, device: &Device, random: &mut Random, spoil: impl Fn(&mut [f32])) {
        self.run_with(device, &self.inputs(random, spoil));
    }

    /// The same with given inputs.
    pub fn run_with(&self, device: &Device, inputs: &Inputs) {
        if let Some(outputs) = self.run_on_device(device, inputs) {
            self.compare(inputs, &outputs, &self.run_on_cpu(inputs));
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.keys.dim() as f32).sqrt()
    }

    fn layouts(&self) -> [CodeLayout; 2] {
        let AttendShape { keys, values, paging, .. } = self.shape;
        let layouts = [CodeLayout::new(keys, Side::Keys), CodeLayout::new(values, Side::Values)];
        let halves = paging == Paging::HalfTiles;
        layouts.map(Result::unwrap).map(|whole| if halves { whole.half_tiles().unwrap() } else { whole })
    }

    fn paged(&self) -> bool {
        self.shape.paging != Paging::Contiguous
    }

    /// Tokens of a tile in memory.
    fn tile_tokens(&self) -> usize {
        self.layouts()[0].tokens()
    }

    fn max_pages(&self) -> usize {
        self.capacity.div_ceil(self.tile_tokens()).div_ceil(self.page_tiles)
    }

    pub fn inputs(&self, random: &mut Random, spoil: impl Fn(&mut [f32])) -> Inputs {
        let Self { shape, batch, heads, .. } = *self;
        let dim = shape.keys.dim();
        let rounded = |x: f32| from_element(shape.element, to_element(shape.element, x));
        let mut queries: Vec<f32> = random.normals(batch * heads * shape.group * dim);
        queries.iter_mut().for_each(|x| *x = rounded(2.0 * *x));
        spoil(&mut queries);
        let mut other = other_random(random);
        let rounded_to_f16 = |x: f32| f16::from_f32(x).to_f32();
        let addends = other.normals(queries.len() / dim * self.capacity);
        let addends = addends.into_iter().map(|x| rounded_to_f16(3.0 * x)).collect();
        let norms = [1.0, 30.0].map(|spread: f32| {
            let normals = other.normals(batch * heads * self.capacity);
            normals.into_iter().map(|x| rounded_to_f16(0.1 + spread * x.abs())).collect()
        });
        let exact_len = batch * heads * self.exact_capacity * dim;
        let exact_number = |x| if shape.exact_fp8 { of_e4m3(to_e4m3(x)) } else { rounded(x) };
        let exact = SIDES.map(|_| random.normals(exact_len).into_iter().map(exact_number).collect());
        let factors =
            other.normals(2 * heads).into_iter().map(|x| if shape.exact_fp8 { 0.5 + x.abs() } else { 1.0 });
        let factors: Vec<f32> = factors.collect();
        let exact_factors = factors.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
        let quantizers = [shape.keys, shape.values];
        let books = (0..heads).map(|_| quantizers.map(|shape| codebook(random, shape))).collect();
        let codes = (0..batch * heads)
            .map(|_| quantizers.map(|shape| random.bytes(shape.codes_len(self.capacity))))
            .collect();
        let page_count = if self.paged() { batch * self.max_pages() + 1 } else { batch };
        let mut pages: Vec<usize> = (0..page_count).collect();
        if self.paged() {
            (1..page_count).for_each(|i| pages.swap(i, random.below(i + 1)));
        }
        let pdl = random.below(2) == 1;
        Inputs { queries, exact, exact_factors, books, codes, pages, addends, norms, pdl }
    }

    /// The index of a tile of head `i` of all sequences among all tiles in memory.
    fn place(&self, inputs: &Inputs, i: usize, tile: usize) -> usize {
        let (sequence, head) = (i / self.heads, i % self.heads);
        let page = if self.paged() {
            inputs.pages[sequence * self.max_pages() + tile / self.page_tiles]
        } else {
            sequence
        };
        (page * self.heads + head) * self.page_tiles + tile % self.page_tiles
    }

    /// Tiles in memory.
    fn places(&self, inputs: &Inputs) -> usize {
        inputs.pages.len() * self.heads * self.page_tiles
    }

    /// The codes of all sequences in tiles; bytes without tokens are arbitrary.
    fn tiles(&self, inputs: &Inputs, side: Side) -> Vec<u8> {
        let layout = &self.layouts()[side as usize];
        let mut memory = vec![0xA5; self.places(inputs) * layout.tile_len()];
        for (i, codes) in inputs.codes.iter().enumerate() {
            let mut packed = vec![0; self.capacity.div_ceil(layout.tokens()) * layout.tile_len()];
            let codes = Codes::new(layout.shape(), self.capacity, &codes[side as usize]).unwrap();
            layout.pack_into(&codes, &mut packed).unwrap();
            for (tile, packed) in packed.chunks_exact(layout.tile_len()).enumerate() {
                let at = self.place(inputs, i, tile);
                memory[at * layout.tile_len()..][..layout.tile_len()].copy_from_slice(packed);
            }
        }
        memory
    }

    /// The norms of all sequences' tokens in tiles; elements without tokens are NaN.
    fn norms(&self, inputs: &Inputs, side: Side) -> Vec<f16> {
        let tokens = self.tile_tokens();
        let mut memory = vec![f16::NAN; self.places(inputs) * tokens];
        for (i, norms) in inputs.norms[side as usize].chunks_exact(self.capacity).enumerate() {
            let length = self.lengths[i / self.heads] as usize;
            for (token, &norm) in norms[..length].iter().enumerate() {
                let at = self.place(inputs, i, token / tokens);
                memory[at * tokens + token % tokens] = f16::from_f32(norm);
            }
        }
        memory
    }

    /// Tiles of a sequence's addends.
    fn addend_tiles(&self) -> usize {
        self.capacity.div_ceil(TILE) + 1
    }

    /// The addends of all sequences' tokens in tiles. Elements without tokens are NaN, and so are those of
    /// queries that are not finite.
    fn addends(&self, inputs: &Inputs) -> Vec<f16> {
        let (group, dim) = (self.shape.group, self.shape.keys.dim());
        let mut memory = vec![f16::NAN; self.batch * self.heads * self.addend_tiles() * group * TILE];
        for (i, addends) in inputs.addends.chunks_exact(self.capacity).enumerate() {
            let (head, query) = (i / group, i % group);
            if inputs.queries[i * dim..][..dim].iter().any(|x| !x.is_finite()) {
                continue;
            }
            let length = self.lengths[head / self.heads] as usize;
            for (token, &addend) in addends[..length].iter().enumerate() {
                let row = (head * self.addend_tiles() + token / TILE) * group + query;
                memory[row * TILE + token % TILE] = f16::from_f32(addend);
            }
        }
        memory
    }

    /// The codebooks of all heads as tables.
    fn tables(&self, inputs: &Inputs, side: Side) -> Vec<f16> {
        let layout = &self.layouts()[side as usize];
        let mut tables = vec![f16::ZERO; self.heads * layout.table_len()];
        for (table, books) in tables.chunks_exact_mut(layout.table_len()).zip(&inputs.books) {
            layout.table_into(&books[side as usize].view(), table).unwrap();
        }
        tables
    }

    /// The page table of all sequences; entries beyond the tokens of a sequence are invalid.
    fn page_table(&self, inputs: &Inputs) -> Vec<u32> {
        let max_pages = self.max_pages();
        (0..self.batch * max_pages)
            .map(|i| {
                let used =
                    (self.lengths[i / max_pages] as usize).div_ceil(self.tile_tokens() * self.page_tiles);
                if i % max_pages < used {
                    inputs.pages.get(i).map_or(0, |&page| page as u32)
                } else {
                    u32::MAX
                }
            })
            .collect()
    }
}
