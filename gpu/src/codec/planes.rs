//! The planes of a frame in the 32-bit words that kernels read, and the shape that kernels are compiled for.

use codec_core::{Coder, LANES, MAX_SYMBOLS, PRECISION, Plane, PlaneParts, Predictor, Scaling, family_table};
use half::f16;

use crate::compile::{Source, source};
use crate::{Error, Program, VectorElement};

const FAMILIES: usize = 256;
/// 32-bit words of a `Family` of the kernels.
const FAMILY_WORDS: usize = 2 + MAX_SYMBOLS;
/// `Symbol` of the kernels: the shift of its first slot, the flag of the escape, and the padding after the
/// last symbol.
const FIRST_SLOT_SHIFT: u32 = 32 - PRECISION;
const ESCAPE_BITS: u32 = 3 << (PRECISION + 1);
const NO_SYMBOL: u32 = !0 << (FIRST_SLOT_SHIFT - 1);
/// Minimum number of symbols that kernels are compiled for, so that most sets of planes share a shape.
const LEAST_SYMBOLS: usize = 16;

/// Compile-time shape of [`Decode`](super::Decode) and [`Encode`](super::Encode): see [`Planes::shape`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodecShape {
    channels: usize,
    head_dim: usize,
    contexts: usize,
    symbols: usize, // a power of two
    map_dim: usize, // elements of a head of the transform; 0 for none
    previous: bool,
    exact_points: bool, // whether points of bins up to 2048 are exact in f16
    /// Element type of the rows.
    pub element: VectorElement,
    /// Whether the rows are in pages.
    pub paged: bool,
}

impl CodecShape {
    /// The kernel of [`Decode`](super::Decode), for [`compile`](crate::compile) without a device.
    #[must_use]
    pub fn decode_program(&self) -> Program {
        self.tiles_program(source!("codec/decode.cu")).define_if(self.decodes_to_points(), "POINTS")
    }

    /// The kernel of [`Decode`](super::Decode) that turns reconstruction points of coefficients into rows, on
    /// tensor cores: for 16-bit rows, maps whose size is a multiple of 16 up to 128, bins that do not depend
    /// on the previous token's, and centroids as [`codec_core::PlaneBuf::fit`] makes them.
    #[must_use]
    pub fn points_program(&self) -> Option<Program> {
        self.decodes_to_points().then(|| self.mapped_tiles(source!("codec/points_mma.cu")))
    }

    /// The tile kernel of [`Encode`](super::Encode).
    #[must_use]
    pub fn encode_program(&self) -> Program {
        let source = source!("codec/encode.cu");
        if self.quantizes_on_tensor_cores() { self.mapped_tiles(source) } else { self.tiles_program(source) }
    }

    /// The kernel of [`Encode`](super::Encode) that transforms and quantizes rows on tensor cores: for maps
    /// whose size is a multiple of 16 up to 128, and bins that do not depend on the previous token's.
    #[must_use]
    pub fn quantize_program(&self) -> Option<Program> {
        self.quantizes_on_tensor_cores().then(|| self.mapped_tiles(source!("codec/quantize_mma.cu")))
    }

    /// The kernels of the transform, if the planes have one.
    #[must_use]
    pub fn transform_program(&self) -> Option<Program> {
        self.has_transform()
            .then(|| self.of_maps(source!("codec/transform.cu"), &[]).without_fused_multiply_add())
    }

    /// The tensor-core kernel of the inverse transform for shapes without a
    /// [`points_program`](Self::points_program): for 16-bit rows and maps whose size is a multiple of 16 up
    /// to 128, and blocks of up to `shared_memory` bytes ([`Device::shared_memory`](crate::Device)).
    #[must_use]
    pub fn tensor_core_program(&self, shared_memory: usize) -> Option<Program> {
        let (warps, _) = self.tensor_core_block(shared_memory)?;
        Some(self.of_maps(source!("codec/transform_mma.cu"), &[("WARPS", warps)]))
    }

    /// Warps and bytes of shared memory of its blocks.
    pub(super) fn tensor_core_block(&self, shared_memory: usize) -> Option<(usize, usize)> {
        if !self.transforms_back_on_tensor_cores() || self.exact_points {
            return None;
        }
        let dim = self.map_dim;
        let map = 2 * 2 * dim * (dim + 8) + 4 * dim; // two 16-bit matrices with padded rows, and the mean
        let tile = 4 * 16 * dim; // 16 tokens of a warp
        let warps = (shared_memory.saturating_sub(map) / tile).min(8);
        (warps > 0).then_some((warps, map + warps * tile))
    }

    /// The kernel of [`Decode::rotating`](super::Decode::rotating) that turns points or coefficients into
    /// rows, and rotates keys, with blocks of up to `shared_memory` bytes; `None` for shapes that it does not
    /// support.
    #[must_use]
    pub fn rotating_program(&self, shared_memory: usize) -> Option<Program> {
        let program = self.points_program().or_else(|| self.tensor_core_program(shared_memory));
        let program = program.or_else(|| self.transform_program());
        program.filter(|_| self.supports_rope()).map(|program| program.define_if(true, "ROPE"))
    }

    /// Whether [`Decode::rotating`](super::Decode::rotating) supports the shape: the planes have a transform
    /// whose maps consist of whole heads, and a head has a multiple of 4 components.
    #[must_use]
    pub const fn supports_rope(&self) -> bool {
        let whole_heads = self.map_dim.is_multiple_of(self.head_dim);
        self.has_transform() && whole_heads && self.head_dim.is_multiple_of(4)
    }

    pub(crate) fn decodes_to_points(&self) -> bool {
        self.transforms_back_on_tensor_cores() && self.exact_points
    }

    fn transforms_back_on_tensor_cores(&self) -> bool {
        self.map_fits_tensor_cores() && self.element != VectorElement::F32
    }

    fn map_fits_tensor_cores(&self) -> bool {
        self.map_dim.is_multiple_of(16) && (16..=128).contains(&self.map_dim)
    }

    fn quantizes_on_tensor_cores(&self) -> bool {
        self.map_fits_tensor_cores() && !self.previous
    }

    fn of_maps(&self, source: Source, more: &[(&'static str, usize)]) -> Program {
        let defines = [&self.place_defines()[..], &[("MAP_DIM", self.map_dim)], more].concat();
        Program::new(source, &defines).define_if(self.paged, "PAGED")
    }

    /// The tile kernel. With a transform its rows are the coefficients in the workspace.
    fn tiles_program(&self, source: Source) -> Program {
        if self.has_transform() {
            let of_coefficients = Self { map_dim: 0, element: VectorElement::F32, paged: false, ..*self };
            return of_coefficients.tiles_program(source);
        }
        let defines = [&self.place_defines()[..], &self.tile_defines()].concat();
        Program::new(source, &defines)
            .define_if(self.previous, "PREVIOUS")
            .define_if(self.paged, "PAGED")
            .without_fused_multiply_add()
    }

    /// A tile kernel that transforms rows itself.
    fn mapped_tiles(&self, source: Source) -> Program {
        let map = [("MAP_DIM", self.map_dim)];
        let defines = [&self.place_defines()[..], &self.tile_defines(), &map].concat();
        Program::new(source, &defines).define_if(self.paged, "PAGED").without_fused_multiply_add()
    }

    pub(crate) const fn tiles(&self) -> usize {
        self.channels.div_ceil(LANES)
    }

    const fn tile_defines(&self) -> [(&'static str, usize); 4] {
        [
            ("CONTEXTS", self.contexts),
            ("SYMBOLS", self.symbols),
            ("FAMILY_BYTES", 4 * FAMILY_WORDS),
            ("TILE_MODEL_BYTES", 4 * self.tile_model_words()),
        ]
    }

    const fn place_defines(&self) -> [(&'static str, usize); 3] {
        [("CHANNELS", self.channels), ("HEAD_DIM", self.head_dim), ("ELEMENT", self.element as usize)]
    }

    pub(crate) const fn has_transform(&self) -> bool {
        self.map_dim > 0
    }

    pub(crate) const fn map_dim(&self) -> usize {
        self.map_dim
    }

    pub(crate) const fn head_dim(&self) -> usize {
        self.head_dim
    }

    pub(crate) const fn channels(&self) -> usize {
        self.channels
    }

    /// 32-bit words of a `TileModel` of the kernels.
    const fn tile_model_words(&self) -> usize {
        LANES * (7 + self.contexts + self.contexts * self.symbols) + 4
    }
}

/// The planes of a model in the layout of the kernels, to be packed and copied to the device once.
pub struct Planes {
    shape: CodecShape,
    ids: Vec<u32>,
    scaled_by_token: bool,
    words: Vec<u32>,
    maps_at: usize, // offset of the transforms in `words`
}

impl Planes {
    /// Packs planes (layers, 2): keys, then values, of each layer.
    ///
    /// # Errors
    /// [`Error::Argument`] for no planes, or planes of different channels. [`Error::Unsupported`] for planes
    /// whose transforms have different heads or of which only some have one, and for anchors or the range
    /// coder, whose tiles have no parallel decoder.
    pub fn pack(planes: &[Plane<'_>], head_dim: usize) -> Result<Self, Error> {
        let problem = |problem: &str| Error::Argument { operation: "codec::Planes", problem: problem.into() };
        let channels = planes.first().ok_or_else(|| problem("no planes"))?.channels();
        if head_dim == 0 || !channels.is_multiple_of(head_dim) {
            return Err(problem("heads that do not share the channels evenly"));
        }
        if planes.iter().any(|plane| plane.channels() != channels) {
            return Err(problem("planes of different numbers of channels"));
        }
        let map_dim = |plane: &Plane<'_>| plane.parts().transform.map_or(0, |transform| transform.head_dim());
        for plane in planes {
            let parts = plane.parts();
            let what = match (parts.predictor, parts.coder) {
                (Predictor::Anchor { .. }, _) => "anchors",
                (_, Coder::Range) => "the range coder",
                _ if map_dim(plane) != map_dim(&planes[0]) => "different heads of their transforms",
                _ if plane.coefficients() != channels => "leading coefficients alone",
                _ => continue,
            };
            let operation = format!("planes with {what} on the GPU");
            return Err(Error::Unsupported {
                operation,
                supported: "interleaved rANS without anchors; square transforms of the same heads, or none",
            });
        }
        let parts = || planes.iter().map(Plane::parts);
        let contexts = parts().map(|plane| plane.models.contexts()).max().unwrap_or(1);
        let tables = parts().flat_map(|plane| {
            (0..channels)
                .flat_map(move |channel| (0..plane.models.contexts()).map(move |context| (channel, context)))
                .filter_map(move |(channel, context)| plane.models.table(channel, context).ok())
        });
        let symbols = tables.map(|table| Model::new(&table).symbols()).max().unwrap_or(1);
        let shape = CodecShape {
            channels,
            head_dim,
            contexts,
            symbols: symbols.next_power_of_two().max(LEAST_SYMBOLS),
            map_dim: map_dim(&planes[0]),
            previous: parts().any(|plane| matches!(plane.predictor, Predictor::Previous(_))),
            exact_points: parts().all(|plane| has_exact_points(&plane)),
            element: VectorElement::F32,
            paged: false,
        };
        let mut words = Vec::with_capacity(FAMILIES * FAMILY_WORDS);
        for family in 0..=u8::MAX {
            let table = family_table(family);
            let model = Model::new(&table);
            words.extend([model.low_bits, model.symbols() as u32 - 1]);
            words.extend((0..MAX_SYMBOLS).map(|symbol| model.symbol(symbol)));
        }
        for plane in planes {
            for first in (0..channels).step_by(LANES) {
                push_tile(&shape, plane, first, &mut words)?;
            }
        }
        let maps_at = words.len();
        for plane in parts() {
            let Some(transform) = plane.transform else { continue };
            let maps = [transform.forward(), transform.inverse(), plane.mean];
            words.extend(maps.iter().flat_map(|numbers| numbers.iter().map(|x| x.to_bits())));
        }
        let scaled_by_token = parts().any(|plane| matches!(plane.scaling, Scaling::TokenAbsmax { .. }));
        Ok(Self { shape, ids: planes.iter().map(Plane::id).collect(), scaled_by_token, words, maps_at })
    }

    /// The words to copy to the device.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The shape to compile kernels for.
    #[must_use]
    pub const fn shape(&self, element: VectorElement, paged: bool) -> CodecShape {
        CodecShape { element, paged, ..self.shape }
    }

    /// Ids of the planes (layers, 2), for [`codec_core::assemble_frame`].
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Words before the transforms' maps.
    pub(crate) const fn maps_at(&self) -> usize {
        self.maps_at
    }

    pub(crate) const fn scaled_by_token(&self) -> bool {
        self.scaled_by_token
    }
}

/// Whether reconstruction points are exact in f16. Bins up to 2048 are; the points of bins 1 and 2 are if the
/// sums of bin and centroid have few bits.
fn has_exact_points(plane: &PlaneParts<'_>) -> bool {
    let is_exact = |(bin, centroid): (u8, f32)| {
        let point = f32::from(bin) + centroid;
        f16::from_f32(point).to_f32() == point
    };
    !matches!(plane.predictor, Predictor::Previous(_)) && (1..).zip(plane.centroids).all(is_exact)
}

/// Low bits and cumulative frequencies of one model.
struct Model<'a> {
    low_bits: u32,
    starts: &'a [u16],
}

impl<'a> Model<'a> {
    fn new(table: &'a [u16]) -> Self {
        Self { low_bits: table[0].into(), starts: &table[1..] }
    }

    fn symbols(&self) -> usize {
        self.starts.partition_point(|&start| start < 1 << PRECISION)
    }

    /// `Symbol` of the kernels. The only symbol of a lane without a channel is not an escape.
    fn symbol(&self, symbol: usize) -> u32 {
        let start = |symbol: usize| self.starts.get(symbol).map_or(1 << PRECISION, |&start| u32::from(start));
        let symbols = self.symbols();
        if symbol >= symbols {
            return NO_SYMBOL;
        }
        let escape = if symbol > 0 && symbol == symbols - 1 { ESCAPE_BITS } else { 0 };
        start(symbol) << FIRST_SLOT_SHIFT | escape | (start(symbol + 1) - start(symbol))
    }
}

/// `TileModel` of the kernels.
fn push_tile(shape: &CodecShape, plane: &Plane<'_>, first: usize, words: &mut Vec<u32>) -> Result<(), Error> {
    let parts = plane.parts();
    let lanes = || (0..LANES).map(|lane| Some(first + lane).filter(|&channel| channel < shape.channels));
    let unexpected = |error| Error::Argument { operation: "codec::Planes", problem: format!("{error}") };
    let expected = |channel| match channel {
        Some(channel) => parts.models.expectation(channel).map_err(unexpected),
        None => Ok((0, 1.0)),
    };
    let expected = lanes().map(expected).collect::<Result<Vec<_>, _>>()?;
    for (_, deviation) in &expected {
        let bits = deviation.to_bits();
        words.extend([bits as u32, (bits >> 32) as u32]);
    }
    words.extend(expected.iter().map(|&(family_shape, _)| family_shape as u32));
    // A lane without a channel has one symbol of probability 1, which takes no bits.
    let mut nothing = [1 << PRECISION; 1 + MAX_SYMBOLS];
    nothing[..2].fill(0);
    let table = |channel, context: usize| match channel {
        Some(channel) => {
            parts.models.table(channel, context.min(parts.models.contexts() - 1)).map_err(unexpected)
        }
        None => Ok(nothing),
    };
    for channel in lanes() {
        words.push(table(channel, 0)?[0].into());
    }
    let (steps, levels) = match parts.scaling {
        Scaling::Steps(steps) => (Some(steps), 0),
        Scaling::TokenAbsmax { levels } => (None, levels),
    };
    let factors = match parts.predictor {
        Predictor::Previous(factors) => Some(factors),
        _ => None,
    };
    // With a transform, `transform.cu` subtracts and adds the mean.
    let mean = if parts.transform.is_none() { Some(parts.mean) } else { None };
    for (numbers, otherwise) in [(steps, 1.0), (mean, 0.0), (factors, 0.0_f32)] {
        let number = |channel: Option<usize>| numbers.and_then(|numbers| numbers.get(channel?).copied());
        words.extend(lanes().map(|channel| number(channel).unwrap_or(otherwise).to_bits()));
    }
    words.extend(parts.centroids.map(f32::to_bits));
    words.extend([levels.into(), parts.models.contexts() as u32]);
    let tables = (0..shape.contexts).map(|context| lanes().map(|channel| table(channel, context)).collect());
    let tables = tables.collect::<Result<Vec<Vec<_>>, _>>()?;
    for tables in &tables {
        words.extend(tables.iter().map(|table| Model::new(table).symbols() as u32 - 1));
    }
    for tables in &tables {
        for symbol in 0..shape.symbols {
            words.extend(tables.iter().map(|table| Model::new(table).symbol(symbol)));
        }
    }
    Ok(())
}
