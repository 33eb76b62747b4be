//! Rows of tokens and heads in arrays of any strides.

use std::borrow::Cow;

use codec_core::{LayerRows, Place};
use kv_attend::{Element, Rows};

use crate::array::{Array, Output, Typed};
use crate::error::{Error, Result};

/// The rows of an array (tokens, heads, dim), one token a row: in place where the components of a token
/// follow one another, else copied.
pub struct Tokens<'a, E: Typed> {
    elements: Cow<'a, [E]>,
    tokens: usize,
    components: usize,
    stride: usize,
}

impl<'a, E: Typed> Tokens<'a, E> {
    /// The array's rows, converted to `E` if they are of another type.
    pub fn of(array: &'a Array, [tokens, heads, dim]: [usize; 3]) -> Self {
        let components = heads.saturating_mul(dim);
        if array.dtype() != E::DTYPE {
            let elements = array.floats().iter().map(|&x| <E as Element>::from_f32(x)).collect();
            return Self { elements: Cow::Owned(elements), tokens, components, stride: components };
        }
        let &[of_token, of_head, of_component] = array.strides() else { unreachable!("three dimensions") };
        let joined = (dim == 1 || of_component == 1) && (heads == 1 || of_head == dim);
        match joined && (tokens <= 1 || of_token >= components) {
            true => Self {
                elements: array.elements().into(),
                tokens,
                components,
                stride: of_token.max(components),
            },
            false => Self { elements: array.contiguous(), tokens, components, stride: components },
        }
    }

    pub fn rows(&self) -> Result<Rows<'_, E>> {
        Ok(Rows::new(&self.elements, self.tokens, self.components, self.stride)?)
    }
}

/// The shape of the keys and values of a context: (layers, 2, tokens, heads, head_dim).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextShape {
    pub layers: usize,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl ContextShape {
    pub fn of(array: &Array, what: &str) -> Result<Self> {
        let shape = "(layers, 2, tokens, heads, head_dim)";
        let [layers, sides, tokens, heads, head_dim] = array.dims(what, shape)?;
        match sides {
            2 => Ok(Self { layers, tokens, heads, head_dim }),
            _ => Err(Error::argument(format!("{what} has {sides} sides, expected keys and values: {shape}"))),
        }
    }

    pub const fn elements(&self) -> usize {
        let channels = self.heads.saturating_mul(self.head_dim);
        channels.saturating_mul(self.tokens).saturating_mul(self.layers).saturating_mul(2)
    }
}

/// Where the planes of a context are in an array.
struct Planes {
    layer: usize,
    side: usize,
    len: usize,
    place: Place<'static>,
}

impl Planes {
    fn of(array: &Array, shape: ContextShape) -> Option<Self> {
        let &[layer, side, token, head, component] = array.strides() else { return None };
        let last = |n: usize, stride: usize| n.saturating_sub(1) * stride;
        let len = last(shape.tokens, token) + last(shape.heads, head) + shape.head_dim;
        let place = Place { token_stride: token, head_stride: head, first_token: 0, pages: None };
        (component == 1 || shape.head_dim <= 1).then_some(Self { layer, side, len, place })
    }
}

/// Passes the planes of a context to `take`: in place if components follow one another, else copied.
pub fn with_context<E: Typed, T>(
    array: &Array,
    shape: ContextShape,
    take: impl FnOnce(&[LayerRows<'_, E>], Place<'static>) -> Result<T>,
) -> Result<T> {
    let plane = shape.tokens * shape.heads * shape.head_dim;
    let (elements, planes) = match Planes::of(array, shape) {
        Some(planes) => (array.elements::<E>().into(), planes),
        None => {
            let place = Place::nhd(shape.heads, shape.head_dim);
            (array.contiguous::<E>(), Planes { layer: 2 * plane, side: plane, len: plane, place })
        }
    };
    if plane == 0 {
        return take(&vec![LayerRows { keys: &[], values: &[] }; shape.layers], planes.place);
    }
    let side = |l: usize, side: usize| &elements[l * planes.layer + side * planes.side..][..planes.len];
    let rows: Vec<_> =
        (0..shape.layers).map(|l| LayerRows { keys: side(l, 0), values: side(l, 1) }).collect();
    take(&rows, planes.place)
}

/// The planes of a context to write to, in order of layers: keys and values.
pub fn with_context_mut<E: Typed, T>(
    out: &mut Output,
    shape: ContextShape,
    take: impl FnOnce(Vec<[&mut [E]; 2]>, Place<'static>) -> Result<T>,
) -> Result<T> {
    let apart =
        || Error::argument("out: layers and the two sides must be the outermost dimensions in memory");
    let planes = Planes::of(out.array(), shape).ok_or_else(apart)?;
    if shape.elements() == 0 {
        return take((0..shape.layers).map(|_| [&mut [] as &mut [E], &mut []]).collect(), planes.place);
    }
    let is_apart =
        planes.side >= planes.len && (shape.layers == 1 || planes.layer >= planes.side + planes.len);
    if !is_apart {
        return Err(apart());
    }
    let mut rest = out.elements_mut::<E>();
    let mut layers = vec![];
    for l in 0..shape.layers {
        let (layer, after) = match l + 1 < shape.layers {
            true => rest.split_at_mut(planes.layer),
            false => (rest, &mut [] as &mut [E]),
        };
        let (keys, values) = layer.split_at_mut(planes.side);
        layers.push([&mut keys[..planes.len], &mut values[..planes.len]]);
        rest = after;
    }
    take(layers, planes.place)
}

/// [`with_context`] for the array's element type, which `$type` names in the expression.
macro_rules! for_context {
    ($array:expr, $shape:expr, $type:ident, $rows:ident, $place:ident => $result:expr) => {
        $crate::array::for_dtype!($array.dtype(), $type => $crate::layout::with_context::<$type, _>(
            $array, $shape, |$rows, $place| $result
        ))
    };
}
pub(crate) use for_context;

/// [`Tokens`] of the array's own type, as rows in an expression.
macro_rules! for_tokens {
    ($array:expr, $dims:expr, $rows:ident => $result:expr) => {
        $crate::array::for_dtype!($array.dtype(), E => {
            let tokens = $crate::layout::Tokens::<E>::of($array, $dims);
            let $rows = tokens.rows()?;
            $result
        })
    };
}
pub(crate) use for_tokens;
