//! Cases of hybrid attention: shapes, inputs, the device's step and the CPU's definition of it.

mod check;
mod on_device;

use half::f16;
use kv_gpu::Element;
use kv_gpu::pq::{BlockMeans, CodeLayout, HybridShape, MEAN_TOKENS, Side, TILE};
use pq_core::{CodebookBuf, Codes, GroupRule, PqShape, decode_into, decode_norm};

use crate::common::{Random, SIDES, from_element, to_element};

/// Tokens of a part of a block that has a mean error, and parts of the last blocks.
const PART_TOKENS: usize = 16;
pub const RECENT_PARTS: usize = BlockMeans::recent_parts(40);
/// Deviation of the addends: of the order of the scores of a rotated mean.
const ADDEND: f32 = 3.0;

/// The shape of one step, and the tokens of its sequences.
#[derive(Debug)]
pub struct Case {
    pub shape: HybridShape,
    pub batch: usize,
    pub heads: usize,
    pub capacity: usize, // coded tokens of a sequence
    pub lengths: Vec<u32>,
    pub ks: Vec<u32>,
    pub selected_len: usize,
    pub exact_capacity: usize, // 0: without exact tokens
    pub exact_lengths: Vec<u32>,
    pub page_tiles: usize,
    pub has_errors: bool,
    pub index: Index,
    pub has_code_queries: bool,
    pub spread: f32, // factor of the queries
    pub bound: f32,  // if the shape is adaptive
}

/// [`RowIndex`] of a case. Slots of a list are in the reverse order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Index {
    Order,
    Token,
    List,
}

/// The inputs of a case for the CPU. Pairs are [keys, values], indexed by [`Side`].
pub struct Inputs {
    pub queries: Vec<f32>,            // (batch, heads, group, dim)
    pub code_queries: Vec<f32>,       // the same, or with their components in reverse order
    pub errors: Vec<f32>,             // (heads, dim)
    pub value_errors: Vec<f32>,       // (heads,)
    pub exact: [Vec<f32>; 2],         // (batch, heads, exact_capacity, dim)
    pub rows: [Vec<f32>; 2],          // (batch, heads, capacity, dim)
    pub books: Vec<[CodebookBuf; 2]>, // (heads,)
    pub codes: Vec<[Vec<u8>; 2]>,     // (batch, heads), packed, of `capacity` tokens
    pub pages: Vec<usize>,            // (batch, max_pages) and an unused page; (batch,) without pages
    pub pdl: bool,
    pub addends: Vec<f32>, // (batch, heads, group, capacity), halves, if the shape has some
    pub norms: [Vec<f32>; 2], // (batch, heads, capacity), halves from 1/4 to 4; ones if the shape has none
    pub means: Vec<f32>,   // (batch, heads, blocks, dim), halves, the mean errors of the values
}

/// The selection, how many tokens of each head (batch, heads) it has, and the bits of the outputs (batch,
/// heads, group, dim) and of their log-sum-exps.
#[derive(Clone, PartialEq)]
pub struct Outputs {
    pub found: Vec<u32>,
    pub selected: Vec<u32>,
    pub out: Vec<u16>,
    pub log_sum_exp: Vec<u32>,
}

impl Case {
    pub fn random(random: &mut Random) -> Self {
        const SHAPES: [(usize, usize, u32); 10] = [
            (128, 16, 8),
            (128, 16, 8),
            (128, 8, 8),
            (128, 32, 8),
            (128, 32, 4),
            (128, 16, 4),
            (64, 16, 8),
            (64, 8, 8),
            (64, 32, 4),
            (64, 8, 4),
        ];
        let (dim, m, nbits) = random.pick(&SHAPES);
        let keys = PqShape::new(dim, m, nbits).unwrap();
        let values = loop {
            let (other, m, nbits) = random.pick(&SHAPES);
            if other == dim {
                break PqShape::new(dim, m, nbits).unwrap();
            }
        };
        let (batch, heads) = (random.pick(&[1, 2, 4]), 1 + random.below(3));
        let shape = HybridShape {
            keys,
            values,
            group: 1 + random.below(8),
            element: random.pick(&[Element::F16, Element::Bf16]),
            rule: random.pick(&[GroupRule::SumOfSoftmax, GroupRule::MaxOfSoftmax]),
            paged: random.below(2) == 1,
            addends: false,
            key_norms: false,
            value_norms: false,
            mean_errors: false,
            adaptive: false,
        };
        let capacity = random.pick(&[1, 31, 32, 33, 100, 700, 3000, 9000]);
        let length = |random: &mut Random| match random.below(6) {
            0 => 0,
            1 => capacity,
            2 => 1.min(capacity),
            _ => random.below(capacity + 1),
        };
        let lengths: Vec<u32> = (0..batch).map(|_| length(random) as u32).collect();
        let k = |&n: &u32| match random.below(6) {
            0 => 0,
            1 => n + 5,
            2 => 1,
            _ => random.below(n as usize / 4 + 1) as u32,
        };
        let ks: Vec<u32> = lengths.iter().map(k).collect();
        let exact_capacity = random.pick(&[0, 1, 7, 40, 132]);
        Self {
            shape,
            batch,
            heads,
            capacity,
            selected_len: capacity.min(1 + random.below(2 * capacity)),
            exact_lengths: (0..batch).map(|_| random.below(exact_capacity + 1) as u32).collect(),
            lengths,
            ks,
            exact_capacity,
            page_tiles: if shape.paged {
                random.pick(&[1, 2, 3, 8])
            } else {
                capacity.div_ceil(TILE) + random.below(3)
            },
            has_errors: random.below(2) == 1,
            index: random.pick(&[Index::Order, Index::Token, Index::List]),
            has_code_queries: random.below(2) == 1,
            spread: random.pick(&[1.0, 1.0, 2.0]),
            bound: 0.0,
        }
    }

    /// Makes the number of rows depend on a bound, up to k of them.
    pub fn adapt(&mut self, bound: f32) {
        (self.shape.adaptive, self.bound) = (true, bound);
        let k = |(&n, k): (&u32, &u32)| if k % 3 == 0 { n } else { *k };
        self.ks = self.lengths.iter().zip(&self.ks).map(k).collect();
        self.selected_len = self.capacity;
    }

    pub fn scale(&self) -> f32 {
        1.0 / (self.shape.keys.dim() as f32).sqrt()
    }

    pub fn layouts(&self) -> [CodeLayout; 2] {
        let HybridShape { keys, values, .. } = self.shape;
        [CodeLayout::new(keys, Side::Keys), CodeLayout::new(values, Side::Values)].map(Result::unwrap)
    }

    pub fn max_pages(&self) -> usize {
        self.capacity.div_ceil(TILE).div_ceil(self.page_tiles)
    }

    /// Tokens that are selected in a sequence, or the most if the shape is adaptive.
    pub fn most(&self, sequence: usize) -> usize {
        (self.ks[sequence].min(self.lengths[sequence]) as usize).min(self.selected_len)
    }

    pub fn inputs(&self, random: &mut Random, spoil: impl Fn(&mut [f32])) -> Inputs {
        let Self { shape, batch, heads, capacity, .. } = *self;
        let dim = shape.keys.dim();
        let rounded = |x: f32| from_element(shape.element, to_element(shape.element, x));
        let mut queries: Vec<f32> = random.normals(batch * heads * shape.group * dim);
        queries.iter_mut().for_each(|x| *x = rounded(self.spread * *x));
        spoil(&mut queries);
        let mut code_queries = queries.clone();
        if self.has_code_queries {
            code_queries.chunks_exact_mut(dim).for_each(<[f32]>::reverse);
        }
        let errors = (0..heads * dim).map(|_| random.normal().abs()).collect();
        let value_errors = (0..heads).map(|head| 0.1 + 0.2 * head as f32).collect();
        let mut elements =
            |len: usize| SIDES.map(|_| random.normals(len).into_iter().map(rounded).collect::<Vec<_>>());
        let exact = elements(batch * heads * self.exact_capacity * dim);
        let rows = elements(batch * heads * capacity * dim);
        let quantizers = [shape.keys, shape.values];
        let book = |random: &mut Random, shape: PqShape| {
            let centroids = random.normals(shape.codebook_len());
            let halves: Vec<f32> = centroids.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            CodebookBuf::new(shape, &halves).unwrap()
        };
        let books = (0..heads).map(|_| quantizers.map(|shape| book(random, shape))).collect();
        let codes = (0..batch * heads)
            .map(|_| quantizers.map(|shape| random.bytes(shape.codes_len(capacity))))
            .collect();
        let page_count = if shape.paged { batch * self.max_pages() + 1 } else { batch };
        let mut pages: Vec<usize> = (0..page_count).collect();
        if shape.paged {
            (1..page_count).for_each(|i| pages.swap(i, random.below(i + 1)));
        }
        let pdl = random.below(2) == 1;
        let len = if shape.addends { batch * heads * shape.group * capacity } else { 0 };
        let addends = (0..len).map(|_| f16::from_f32(ADDEND * random.normal()).to_f32()).collect();
        let norms = [shape.key_norms, shape.value_norms].map(|has_norms| {
            let mut norm = || if has_norms { decode_norm(96 + random.below(65) as u8) } else { 1.0 };
            (0..batch * heads * capacity).map(|_| f16::from_f32(norm()).to_f32()).collect()
        });
        let means = (0..batch * heads * self.blocks() * dim).map(|_| f16::from_f32(random.normal()).to_f32());
        let mut means: Vec<f32> = means.collect();
        for (row, means) in means.chunks_exact_mut(self.blocks() * dim).enumerate() {
            let length = self.lengths[row / heads] as usize;
            let last = length / MEAN_TOKENS * dim;
            if length % MEAN_TOKENS < PART_TOKENS && last < means.len() {
                // The last block has no whole part, but the mean of the one before.
                let before = means[..last].rchunks(dim).next().map_or(vec![0.0; dim], <[f32]>::to_vec);
                means[last..last + dim].copy_from_slice(&before);
            }
        }
        Inputs {
            queries,
            code_queries,
            errors,
            value_errors,
            exact,
            rows,
            books,
            codes,
            pages,
            pdl,
            addends,
            norms,
            means,
        }
    }

    /// Blocks of tokens that have a mean error, of a sequence.
    pub fn blocks(&self) -> usize {
        self.capacity.div_ceil(MEAN_TOKENS)
    }

    /// The mean errors on the device: those of whole blocks, and of the last one the sums of its whole parts.
    /// All others are not numbers.
    pub fn block_means(&self, inputs: &Inputs) -> (Vec<f16>, Vec<f32>) {
        let (dim, rows) = (self.shape.keys.dim(), self.batch * self.heads);
        let (mut whole, mut recent) = (vec![], vec![f32::NAN; rows * RECENT_PARTS * dim]);
        for (row, means) in inputs.means.chunks_exact(self.blocks() * dim).enumerate() {
            let length = self.lengths[row / self.heads] as usize;
            let last = length / MEAN_TOKENS * dim;
            whole.extend(means[..last].iter().map(|&x| f16::from_f32(x)));
            whole.resize((row + 1) * self.blocks() * dim, f16::NAN);
            let parts = length / MEAN_TOKENS * MEAN_TOKENS / PART_TOKENS..length / PART_TOKENS;
            let middle = (parts.len() as f32 - 1.0) / 2.0;
            for (i, part) in parts.enumerate() {
                let at = (row * RECENT_PARTS + part % RECENT_PARTS) * dim;
                let mean = means[last..].iter().take(dim).map(|x| x + i as f32 - middle);
                recent.splice(at..at + dim, mean.map(|x| PART_TOKENS as f32 * x));
            }
        }
        (whole, recent)
    }

    /// Makes the exact keys those that the codes and norms stand for.
    pub fn decode_rows(&self, inputs: &mut Inputs) {
        let keys = self.shape.keys;
        for (i, rows) in inputs.rows[0].chunks_exact_mut(self.capacity * keys.dim()).enumerate() {
            let codes = Codes::new(keys, self.capacity, &inputs.codes[i][0]).unwrap();
            decode_into(&inputs.books[i % self.heads][0].view(), &codes, 0, rows).unwrap();
            let element = self.shape.element;
            let norms = &inputs.norms[Side::Keys as usize][i * self.capacity..];
            for (row, norm) in rows.chunks_exact_mut(keys.dim()).zip(norms) {
                row.iter_mut().for_each(|x| *x = from_element(element, to_element(element, *x * norm)));
            }
        }
    }

    /// The codes of all sequences in tiles; bytes without tokens are arbitrary.
    pub fn tiles(&self, inputs: &Inputs, side: Side) -> Vec<u8> {
        let layout = &self.layouts()[side as usize];
        let mut memory = vec![0xA5; inputs.pages.len() * self.heads * self.page_tiles * layout.tile_len()];
        for (i, codes) in inputs.codes.iter().enumerate() {
            let (sequence, head) = (i / self.heads, i % self.heads);
            let mut packed = vec![0; self.capacity.div_ceil(TILE) * layout.tile_len()];
            let codes = Codes::new(layout.shape(), self.capacity, &codes[side as usize]).unwrap();
            layout.pack_into(&codes, &mut packed).unwrap();
            for (tile, packed) in packed.chunks_exact(layout.tile_len()).enumerate() {
                let at = self.place_of(inputs, (sequence, head), tile);
                memory[at * layout.tile_len()..][..layout.tile_len()].copy_from_slice(packed);
            }
        }
        memory
    }

    /// The index of a head's tile among all tiles.
    fn place_of(&self, inputs: &Inputs, (sequence, head): (usize, usize), tile: usize) -> usize {
        let page = if self.shape.paged {
            inputs.pages[sequence * self.max_pages() + tile / self.page_tiles]
        } else {
            sequence
        };
        (page * self.heads + head) * self.page_tiles + tile % self.page_tiles
    }

    /// The norms of all sequences in tiles; those behind a sequence's length are not numbers.
    pub fn norms(&self, inputs: &Inputs, side: Side) -> Vec<f16> {
        let mut memory = vec![f16::NAN; inputs.pages.len() * self.heads * self.page_tiles * TILE];
        for (i, norms) in inputs.norms[side as usize].chunks_exact(self.capacity).enumerate() {
            let place = (i / self.heads, i % self.heads);
            for (t, &norm) in norms[..self.lengths[place.0] as usize].iter().enumerate() {
                memory[self.place_of(inputs, place, t / TILE) * TILE + t % TILE] = f16::from_f32(norm);
            }
        }
        memory
    }

    /// Tiles of a sequence's addends: another number than those of its codes.
    pub fn addend_tiles(&self) -> usize {
        self.capacity.div_ceil(TILE) + 1
    }

    /// The addends of all sequences in tiles; those behind a sequence's length are not numbers.
    pub fn addends(&self, inputs: &Inputs) -> Vec<f16> {
        let (group, tiles) = (self.shape.group, self.addend_tiles());
        let mut memory = vec![f16::NAN; self.batch * self.heads * tiles * group * TILE];
        for (query, addends) in inputs.addends.chunks_exact(self.capacity).enumerate() {
            let (head, g) = (query / group, query % group);
            for (t, &addend) in addends[..self.lengths[head / self.heads] as usize].iter().enumerate() {
                let at = ((head * tiles + t / TILE) * group + g) * TILE + t % TILE;
                memory[at] = f16::from_f32(addend);
            }
        }
        memory
    }

    /// The codebooks of all heads as tables.
    pub fn tables(&self, inputs: &Inputs, side: Side) -> Vec<f16> {
        let layout = &self.layouts()[side as usize];
        let mut tables = vec![f16::ZERO; self.heads * layout.table_len()];
        for (table, books) in tables.chunks_exact_mut(layout.table_len()).zip(&inputs.books) {
            layout.table_into(&books[side as usize].view(), table).unwrap();
        }
        tables
    }

    /// The page table of all sequences; entries beyond the tokens of a sequence are invalid.
    pub fn page_table(&self, inputs: &Inputs) -> Vec<u32> {
        let max_pages = self.max_pages();
        (0..self.batch * max_pages)
            .map(|i| {
                let used = (self.lengths[i / max_pages] as usize).div_ceil(TILE * self.page_tiles);
                if i % max_pages < used {
                    inputs.pages.get(i).map_or(0, |&page| page as u32)
                } else {
                    u32::MAX
                }
            })
            .collect()
    }

    /// Rows of the selected tokens in their order, or in their slots; other rows are not numbers.
    pub fn collect(&self, rows: &[u16], selected: &[u32], found: &[u32]) -> Vec<u16> {
        let dim = self.shape.keys.dim();
        let mut collected = vec![u16::MAX; self.batch * self.heads * self.selected_len * dim];
        for i in 0..self.batch * self.heads {
            let row = i * self.selected_len;
            for (place, &token) in selected[row..][..found[i] as usize].iter().enumerate() {
                let from = (i * self.capacity + token as usize) * dim;
                let place = if self.index == Index::List { self.selected_len - 1 - place } else { place };
                collected[(row + place) * dim..][..dim].copy_from_slice(&rows[from..][..dim]);
            }
        }
        collected
    }
}
