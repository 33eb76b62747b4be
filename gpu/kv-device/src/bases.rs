//! Queries, keys and values in a basis per head, for a cache that codes or truncates transformed rows.
//!
//! A model's values leave `W_V` in their basis, minus their mean, since both are folded into it; the values
//! of a stored context, which another model has computed, do not.

use half::{bf16, f16};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use crate::gpu::Gpu;
use crate::hashed::{RANDOM_MAPS, hashed};
use crate::memory::Buffer;
use crate::plan::HeadMaps;
use crate::rows::{Chunk, Rows};
use crate::shape::CacheShape;
use crate::{Error, Result};

/// Columns of the maps of all layers and heads, (layer, heads, head_dim, head_dim) each.
pub(crate) struct BasisMaps {
    pub keys: Vec<f32>,
    pub queries: Vec<f32>,
    pub values: Vec<f32>,
    /// Means of the values in their basis, (layer, heads, head_dim), if the model subtracts them.
    pub value_means: Option<Vec<f32>>,
}

impl BasisMaps {
    /// The maps of all heads; values keep their mean.
    pub fn of<'a>(heads: impl Iterator<Item = &'a HeadMaps> + Clone) -> Self {
        Self {
            keys: heads.clone().flat_map(|maps| &maps.keys).copied().collect(),
            queries: heads.clone().flat_map(|maps| &maps.queries).copied().collect(),
            values: heads.flat_map(|maps| &maps.values).copied().collect(),
            value_means: None,
        }
    }

    /// Hashed maps, for timing.
    pub fn random(shape: &CacheShape) -> Self {
        let dim = shape.head_dim;
        let len = (shape.layers * shape.heads * dim * dim) as u64;
        let map = |tensor| (0..len).map(|i| hashed(tensor, i, (3.0 / dim as f32).sqrt())).collect();
        Self {
            keys: map(RANDOM_MAPS),
            queries: map(RANDOM_MAPS + 1),
            values: map(RANDOM_MAPS + 2),
            value_means: None,
        }
    }
}

/// Maps of the queries, keys and values of every layer and head, and the kernel that applies the maps of
/// queries and keys after RoPE.
///
/// Dot products of queries and keys are unchanged, so a cache sees the transformed rows alone.
pub(crate) struct Bases {
    kernel: Kernel,
    maps: Buffer<u16>, // (layer, heads, MAPS, head_dim, head_dim), in the order of `packed`
    value_means: Option<Buffer<f32>>, // (layer, heads, head_dim)
    element: Element,
    threads: u32,
    heads: usize,
    head_dim: usize,
    sm_count: usize,
}

/// Rows that [`Bases::turn`] replaces.
#[derive(Clone, Copy)]
pub(crate) struct TurnedRows {
    /// Elements (tokens, n_heads, head_dim).
    pub queries: DevicePtr<u16>,
    /// Elements (heads, capacity, head_dim) of the first token's sequence.
    pub keys: DevicePtr<AnyElement>,
    /// Rows of a head.
    pub capacity: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// The rows of the tokens' keys.
    pub place: Place,
}

/// Rows of keys of several tokens.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// `u32` (tokens,): rows of the first head, as [`Sequences`](super::cache::Sequences) has them.
    Slots(DevicePtr<u32>),
    /// One sequence, from this row on.
    From(usize),
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    queries: DevicePtr<u16>,
    keys: DevicePtr<AnyElement>,
    maps: DevicePtr<u16>,
    means: Option<DevicePtr<f32>>,
    slots: Option<DevicePtr<u32>>,
    tokens: u32,
    heads: u32,
    capacity: u32,
    first: u32,
}

const _: () = assert!(size_of::<Arguments>() == 56);

/// Maps of a head: of queries, keys and values.
const MAPS: usize = 3;

/// Tokens of a tile of the kernel.
const TILE: usize = 16;

/// `turn` of queries and keys; without queries (a group of 0) of keys or values alone.
pub(crate) fn program(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("bases.cu", include_str!("kernels/bases.cu"), &[], &defines)
}

impl Bases {
    /// Bases with these maps, rounded to elements.
    ///
    /// # Errors
    /// [`Error::Profile`] for maps with components beyond the range of elements; [`Error::Gpu`].
    pub fn new(gpu: &Gpu, shape: &CacheShape, maps: &BasisMaps) -> Result<Self> {
        let &CacheShape { heads, group, head_dim, element, .. } = shape;
        let program = program(element, head_dim, group);
        let one = head_dim * head_dim;
        let [queries, keys, values] = [&maps.queries, &maps.keys, &maps.values].map(|m| m.chunks_exact(one));
        let all = queries.zip(keys).zip(values).flat_map(|((queries, keys), values)| [queries, keys, values]);
        let packed = all.map(|map| packed(map, head_dim, element)).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            kernel: gpu.device.kernel(&program, "turn", 0)?,
            maps: Buffer::of(gpu, &packed.concat())?,
            value_means: maps.value_means.as_ref().map(|means| Buffer::of(gpu, means)).transpose()?,
            element,
            threads: 2 * head_dim as u32,
            heads,
            head_dim,
            sm_count: gpu.device.sm_count(),
        })
    }

    /// Launches the maps of a layer over rows that RoPE has rotated, with PDL: the previous kernel may write
    /// the rows, but neither maps nor slots.
    ///
    /// # Safety
    /// The rows exist, and nothing else uses them at the same time.
    pub(crate) unsafe fn turn(&self, gpu: &Gpu, layer: usize, rows: &TurnedRows) -> Result<()> {
        let TurnedRows { queries, keys, capacity, tokens, place } = *rows;
        let (slots, first) = match place {
            Place::Slots(slots) => (Some(slots), 0),
            Place::From(first) => (None, first),
        };
        let arguments = Arguments {
            queries,
            keys,
            maps: self.maps_of(layer),
            means: None,
            slots,
            tokens: tokens as u32,
            heads: self.heads as u32,
            capacity: capacity as u32,
            first: first as u32,
        };
        let grid = Grid::new([self.heads, self.blocks(tokens), 1])?;
        // SAFETY: the structure is the kernel's argument; the caller's contract.
        Ok(unsafe { self.kernel.launch(gpu.stream(), grid, self.threads, true, &arguments) }?)
    }

    /// Launches the maps of a layer's rotated keys and of its values over the rows of a chunk, computed by a
    /// model without folded maps, and subtracts the means that a folded model would subtract.
    ///
    /// # Safety
    /// As [`Self::turn`].
    pub(crate) unsafe fn turn_stored(
        &self,
        gpu: &Gpu,
        layer: usize,
        chunk: &Chunk,
        rows: &Rows,
    ) -> Result<()> {
        let program = program(self.element, self.head_dim, 0);
        let kernel = gpu.device.kernel(&program, "turn", 0)?;
        let value_means = self.value_means.as_ref();
        let value_means = value_means.map(|all| all.pointer().offset(layer * self.heads * self.head_dim));
        let sides =
            [(self.key_maps(layer), rows.keys, None), (self.value_maps(layer), rows.values, value_means)];
        for (maps, of_side, means) in sides {
            let arguments = Arguments {
                queries: DevicePtr::dangling(),
                keys: of_side,
                maps,
                means,
                slots: None,
                tokens: chunk.count as u32,
                heads: self.heads as u32,
                capacity: rows.capacity as u32,
                first: chunk.position as u32,
            };
            let grid = Grid::new([self.heads, self.blocks(chunk.count), 1])?;
            // SAFETY: the structure is the kernel's argument, which without queries reads one map and its
            // means; the caller's contract.
            unsafe { kernel.launch(gpu.stream(), grid, self.threads, true, &arguments) }?;
        }
        Ok(())
    }

    /// Maps of a layer.
    fn maps_of(&self, layer: usize) -> DevicePtr<u16> {
        self.maps.pointer().offset(layer * self.heads * MAPS * self.head_dim * self.head_dim)
    }

    /// Maps of a layer's keys; the next head's are [`MAPS`] maps later.
    pub(crate) fn key_maps(&self, layer: usize) -> DevicePtr<u16> {
        self.maps_of(layer).offset(self.head_dim * self.head_dim)
    }

    /// Maps of a layer's values.
    fn value_maps(&self, layer: usize) -> DevicePtr<u16> {
        self.maps_of(layer).offset(2 * self.head_dim * self.head_dim)
    }

    /// Blocks per head.
    fn blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(TILE).min((2 * self.sm_count).div_ceil(self.heads))
    }

    /// Bytes of device memory.
    pub(crate) fn bytes(&self) -> usize {
        self.maps.bytes() + self.value_means.as_ref().map_or(0, Buffer::bytes)
    }
}

/// A map as elements in the order in which the kernel's lanes hold it: 16 columns per warp, 16 components per
/// step; a lane holds four pairs of components of both, in two columns 8 apart.
fn packed(map: &[f32], head_dim: usize, element: Element) -> Result<Vec<u16>> {
    let at = |component: usize, column: usize| map[component * head_dim + column];
    let mut all = Vec::with_capacity(map.len());
    for warp in 0..head_dim / 16 {
        for step in 0..head_dim / 16 {
            for lane in 0..32 {
                let (column, component) = (16 * warp + lane / 4, 16 * step + lane % 4 * 2);
                for column in [column, column + 8] {
                    for component in [component, component + 8] {
                        all.extend([at(component, column), at(component + 1, column)]);
                    }
                }
            }
        }
    }
    let element = |&x: &f32| match element {
        Element::F16 => (f16::from_f32(x).to_bits(), f16::from_f32(x).is_finite()),
        Element::Bf16 => (bf16::from_f32(x).to_bits(), bf16::from_f32(x).is_finite()),
    };
    let rounded = all.iter().map(|x| match element(x) {
        (bits, true) => Ok(bits),
        _ => Err(Error::Profile(format!("a map has the component {x}, which no 16-bit element holds"))),
    });
    rounded.collect()
}
