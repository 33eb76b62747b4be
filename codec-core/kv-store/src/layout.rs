//! The layout of a page of an engine's cache in memory.

use codec_core::{Place, Side, TokenPages};

use crate::{Error, Result};

/// A dimension: its length, and its stride in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    len: usize,
    stride: usize,
}

impl Axis {
    /// A dimension that the page does not have.
    const NONE: Self = Self { len: 1, stride: 0 };

    /// From the first index to the last, in elements.
    const fn span(self) -> usize {
        (self.len - 1) * self.stride
    }
}

/// The layout of a page: keys and values of all layers for a range of tokens, as an array whose dimensions
/// have these letters, from the outermost to the innermost:
///
/// | letter | dimension |
/// | --- | --- |
/// | `2` | keys, then values |
/// | `L` | layers |
/// | `T` | tokens |
/// | `H` | KV heads |
/// | `D` | components of a head, always the last |
/// | `B` | blocks of `T` tokens each, if the page has several |
/// | `W` | workers of `L` layers each, if it holds the rows of several |
///
/// LMCache's objects are `2LTHD`; vLLM's chunks are `WLBTH2D`, or `WLBHT2D` with heads first; SGLang's pages
/// are `2LTHD` or, `page_first`, `2TLHD`.
///
/// ```
/// use kv_store::PageLayout;
/// let layout = PageLayout::new("2LTHD", &[2, 32, 256, 8, 128])?; // 256 tokens
/// assert_eq!(layout.elements(), 2 * 32 * 256 * 8 * 128);
/// # Ok::<(), kv_store::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageLayout {
    sides: Axis,
    workers: Axis,
    layers: Axis,
    blocks: Axis,
    tokens: Axis,
    heads: Axis,
    head_dim: usize,
    table: Vec<u32>, // 0, 1, ... of the blocks
}

/// Blocks of a page at most.
const MOST_BLOCKS: usize = 1 << 20;

impl PageLayout {
    /// A page without gaps.
    ///
    /// # Errors
    /// [`Error::Argument`] for unknown, repeated or missing letters, `D` that is not the last, a length for
    /// each letter that is missing or zero, `2` of another length than 2, and too many elements.
    pub fn new(order: &str, shape: &[usize]) -> Result<Self> {
        let mut strides = vec![1_usize; shape.len()];
        for d in (1..shape.len()).rev() {
            let stride = strides[d].checked_mul(shape[d]);
            strides[d - 1] = stride.ok_or(Error::Argument("a page has too many elements"))?;
        }
        Self::with_strides(order, shape, &strides)
    }

    /// A page with gaps: `strides` are in elements.
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Argument`] for components that do not follow one another.
    pub fn with_strides(order: &str, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let wrong = |what| Err(Error::Argument(what));
        if order.len() != shape.len() || shape.len() != strides.len() {
            return wrong("a page needs a length for each letter of its order");
        }
        let mut axes = [None; 7];
        for (letter, (&len, &stride)) in order.chars().zip(shape.iter().zip(strides)) {
            let Some(i) = LETTERS.find(letter) else {
                return wrong("the order of a page has letters other than 2LTHD, B and W");
            };
            if axes[i].replace(Axis { len, stride }).is_some() {
                return wrong("the order of a page repeats a letter");
            }
        }
        let [Some(sides), Some(layers), Some(tokens), Some(heads), Some(components), blocks, workers] = axes
        else {
            return wrong("the order of a page needs each of the letters 2LTHD");
        };
        if !order.ends_with('D') || (components.len > 1 && components.stride != 1) {
            return wrong(
                "the components of a head must follow one another: the order of a page ends with D",
            );
        }
        let (blocks, workers) = (blocks.unwrap_or(Axis::NONE), workers.unwrap_or(Axis::NONE));
        if sides.len != 2 || shape.contains(&0) || blocks.len > MOST_BLOCKS {
            return wrong(
                "a page has two sides, at least one of everything else, and at most 1,048,576 blocks",
            );
        }
        let all = [sides, workers, layers, blocks, tokens, heads, components];
        let elements = all.iter().try_fold(8_usize, |n, axis| n.checked_mul(axis.len));
        let spans = all.iter().try_fold(8_usize, |sum, axis| {
            (axis.len - 1).checked_mul(axis.stride)?.checked_mul(8)?.checked_add(sum)
        });
        if elements.is_none() || spans.is_none() {
            return wrong("a page has too many elements");
        }
        let table = (0..blocks.len as u32).collect(); // checked above
        Ok(Self { sides, workers, layers, blocks, tokens, heads, head_dim: components.len, table })
    }

    /// Layers, those of all workers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.workers.len * self.layers.len
    }

    /// Tokens, those of all blocks.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.blocks.len * self.tokens.len
    }

    /// KV heads of a layer.
    #[must_use]
    pub const fn heads(&self) -> usize {
        self.heads.len
    }

    /// Components of a head.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Elements of the page, without gaps.
    #[must_use]
    pub const fn elements(&self) -> usize {
        2 * self.layers() * self.tokens() * self.heads.len * self.head_dim
    }

    /// Elements from the first to the last, with those in the gaps.
    #[must_use]
    pub const fn span(&self) -> usize {
        self.workers.span() + self.layers.span() + self.sides.span() + self.plane_span()
    }

    const fn plane_span(&self) -> usize {
        self.blocks.span() + self.tokens.span() + self.heads.span() + self.head_dim
    }

    /// The elements of a layer's keys or values, from the first to the last.
    pub(crate) fn plane(&self, layer: usize, side: Side) -> std::ops::Range<usize> {
        let (worker, layer) = (layer / self.layers.len, layer % self.layers.len);
        let side = usize::from(side == Side::Values) * self.sides.stride;
        let start = worker * self.workers.stride + layer * self.layers.stride + side;
        start..start + self.plane_span()
    }

    /// The layout of the rows in a plane.
    pub(crate) fn place(&self) -> Place<'_> {
        let pages =
            TokenPages { table: &self.table, page_tokens: self.tokens.len, stride: self.blocks.stride };
        Place {
            token_stride: self.tokens.stride,
            head_stride: self.heads.stride,
            first_token: 0,
            pages: (self.blocks.len > 1).then_some(pages),
        }
    }
}

/// The letters, in the order of [`PageLayout::with_strides`].
const LETTERS: &str = "2LTHDBW";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_are_where_the_order_says() {
        let layout = PageLayout::new("WLBTH2D", &[2, 3, 4, 5, 6, 2, 7]).unwrap();
        assert_eq!((layout.layers(), layout.tokens(), layout.heads(), layout.head_dim()), (6, 20, 6, 7));
        assert_eq!((layout.elements(), layout.span()), (2 * 6 * 20 * 6 * 7, 2 * 6 * 20 * 6 * 7));
        let layer = 4 * 5 * 6 * 2 * 7;
        assert_eq!(layout.plane(4, Side::Values).start, 4 * layer + 7);
        assert_eq!(layout.plane(5, Side::Values).end, layout.span());
        let place = layout.place();
        assert_eq!((place.token_stride, place.head_stride), (6 * 2 * 7, 2 * 7));
        assert_eq!(place.pages.unwrap().stride, 5 * 6 * 2 * 7);
        let strided = PageLayout::with_strides("2LTHD", &[2, 1, 3, 4, 5], &[900, 0, 20, 5, 1]).unwrap();
        assert_eq!((strided.span(), strided.plane(0, Side::Values)), (960, 900..960));
    }

    #[test]
    fn wrong_layouts_are_errors() {
        let max = usize::MAX;
        for (order, shape) in [
            ("", &[][..]),
            ("2LTHD", &[2, 3, 4, 5]),
            ("2LTHD", &[1, 3, 4, 5, 6]),
            ("2LTHD", &[2, 0, 4, 5, 6]),
            ("2LTH", &[2, 3, 4, 5]),
            ("2LTDH", &[2, 3, 4, 5, 6]),
            ("2LTHX", &[2, 3, 4, 5, 6]),
            ("2LTTD", &[2, 3, 4, 5, 6]),
            ("2LTHH\u{e9}", &[2, 3, 4, 5, 6, 7, 8]),
            ("2LTHD", &[2, max, max, 5, 6]),
            ("2LTHD", &[2, 1, max, 1, 1]),
            ("B2LTHD", &[1 << 21, 2, 1, 1, 1, 1]),
        ] {
            assert!(PageLayout::new(order, shape).is_err(), "{order} {shape:?}");
        }
        for strides in [[max, 1, 1, 1, 1], [9, 9, 9, 9, 2]] {
            assert!(PageLayout::with_strides("2LTHD", &[2, 3, 4, 5, 6], &strides).is_err(), "{strides:?}");
        }
    }
}
