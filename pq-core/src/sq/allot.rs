//! Bits of components by their deviations.

use super::shape::{COLUMNS, MAX_DIM, MAX_QUADS, QUAD, Shape, quads};
use crate::Error;
use crate::error::check_len;

/// Mean squared error of the optimal uniform quantizer of 0 to 8 bits for a Gaussian of unit variance (Max,
/// "Quantizing for Minimum Distortion", IRE Trans. 1960, table 2).
const DISTORTIONS: [f64; 9] = [1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.0003, 0.00009];

/// Divides `slots` slots, `16 slots` bits a row, among components by their variance, and orders the
/// components so that the columns of the layout have the same bits.
///
/// Components are sorted by deviation, and four neighbours share a width. Bits go one at a time to the four
/// components whose distortion falls most; padding has none to fall. Component `order[i]` of the transform
/// becomes component `i` of the code: order the columns of basis and dual by `order`.
///
/// # Shapes
/// `sigma` (dim,), the standard deviations in the units of the error; `order` (dim,), fully written.
/// # Errors
/// [`Error::NotFinite`]; [`Error::Length`]; [`Error::NbitsOutOfRange`] for more than 8 bits per component;
/// those of [`Shape::new`].
/// # Source
/// Gersho, Gray, "Vector Quantization and Signal Compression", 8.3 (greedy allocation).
/// # Examples
/// ```
/// // Bits per component come in steps of 16 / dim: 40 slots are 5 bits of 128 components. `dim.div_ceil(16)`
/// // slots are a bit for every component and the padding.
/// let sigma: Vec<f32> = (0..32).map(|i| 0.8_f32.powi(i)).collect();
/// let mut order = [0; 32];
/// let shape = pq_core::sq::allot(&sigma, 5, &mut order)?;
/// assert_eq!(shape.bits(), 2.5);
/// assert_eq!(shape.widths(), [5, 5, 5, 3, 0, 0, 0, 2]); // the quads 3 and 7 share a column
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn allot(sigma: &[f32], slots: usize, order: &mut [usize]) -> Result<Shape, Error> {
    let dim = sigma.len();
    Shape::uniform(dim, 1)?; // checks `dim`
    check_len("order", order.len(), dim)?;
    crate::error::check_finite("sigma", sigma)?;
    let quads = quads(dim);
    let deepest = quads / COLUMNS * 8;
    if slots > deepest {
        return Err(Error::NbitsOutOfRange {
            nbits: u32::try_from(slots.div_ceil(quads / COLUMNS)).unwrap_or(u32::MAX),
        });
    }
    let mut sorted = [0; MAX_DIM];
    sorted.iter_mut().enumerate().for_each(|(i, x)| *x = i);
    sorted[..dim].sort_unstable_by(|&a, &b| sigma[b].abs().total_cmp(&sigma[a].abs()).then(a.cmp(&b)));
    let mut quad = [Quad::default(); MAX_QUADS];
    let quad = &mut quad[..quads];
    for (q, quad) in quad.iter_mut().enumerate() {
        let components = sorted[..dim].iter().skip(QUAD * q).take(QUAD);
        let variance = components.map(|&i| f64::from(sigma[i]) * f64::from(sigma[i])).sum();
        *quad = Quad { first: QUAD * q, variance, width: 0 };
    }
    add_bits(quad, COLUMNS * slots);

    // Columns of the same number of quads: the widest quad goes to the column with the fewest bits, first to
    // those with fewer components. Quads with padding stay last, as the shape has them.
    let depth = quads / COLUMNS;
    let (full, partial) = quad.split_at_mut(dim / QUAD);
    full.sort_unstable_by(|a, b| b.width.cmp(&a.width).then(a.first.cmp(&b.first)));
    let mut columns = [[Quad::default(); MAX_QUADS / COLUMNS]; COLUMNS];
    let (mut sums, mut counts, mut depths) = ([0; COLUMNS], [0; COLUMNS], [depth; COLUMNS]);
    for (c, quad) in (COLUMNS - partial.len()..).zip(partial) {
        columns[c][depth - 1] = *quad;
        sums[c] += usize::from(quad.width);
        depths[c] -= 1;
    }
    for quad in full {
        let open = (0..COLUMNS).filter(|&c| counts[c] < depths[c]);
        let c = open.min_by_key(|&c| (sums[c], depths[c], counts[c])).unwrap_or(0);
        columns[c][counts[c]] = *quad;
        sums[c] += usize::from(quad.width);
        counts[c] += 1;
    }
    let mut widths = [0; MAX_QUADS];
    for (c, column) in columns.iter_mut().enumerate() {
        let column = &mut column[..depth];
        for _ in slots..sums[c] {
            take_bit(column);
        }
        add_bits(column, slots.saturating_sub(sums[c]));
        for (i, quad) in column.iter().enumerate() {
            let q = COLUMNS * i + c;
            widths[q] = quad.width;
            let order = order.iter_mut().skip(QUAD * q).take(QUAD);
            order.zip(&sorted[quad.first..]).for_each(|(component, &sorted)| *component = sorted);
        }
    }
    Shape::new(dim, &widths[..quads])
}

impl Shape {
    /// The mean squared error of coded rows whose components are Gaussians of the deviations `sigma` (dim,), in
    /// the order of the code: the sum of the errors of optimal uniform quantizers.
    ///
    /// If the basis is that of a query-weighted KLT, this is the mean squared error of a score. Codes of other
    /// texts that have much more, as appends report it, do not fit.
    ///
    /// # Errors
    /// [`Error::Length`].
    /// # Examples
    /// ```
    /// let shape = pq_core::sq::Shape::uniform(16, 3)?;
    /// assert!((shape.distortion(&[2.0; 16])? - 16.0 * 4.0 * 0.03744).abs() < 1e-6);
    /// # Ok::<(), pq_core::Error>(())
    /// ```
    pub fn distortion(&self, sigma: &[f32]) -> Result<f64, Error> {
        check_len("sigma", sigma.len(), self.dim())?;
        let error = |(i, &sigma): (usize, &f32)| {
            f64::from(sigma) * f64::from(sigma) * DISTORTIONS[self.width(i) as usize]
        };
        Ok(sigma.iter().enumerate().map(error).sum())
    }
}

/// Four components of similar deviation.
#[derive(Clone, Copy, Debug, Default)]
struct Quad {
    first: usize, // of the components in descending order
    variance: f64,
    width: u8,
}

impl Quad {
    /// How much the distortion falls from `width` to `width + 1`.
    fn gain(&self, width: u8) -> f64 {
        let width = usize::from(width);
        self.variance * (DISTORTIONS[width] - DISTORTIONS[width + 1])
    }
}

/// Adds bits one at a time where the distortion falls most, the first of equals; there is room for them.
fn add_bits(quads: &mut [Quad], bits: usize) {
    for _ in 0..bits {
        let mut best: Option<&mut Quad> = None;
        for quad in quads.iter_mut().filter(|quad| quad.width < 8) {
            if best.as_ref().is_none_or(|best| quad.gain(quad.width) > best.gain(best.width)) {
                best = Some(quad);
            }
        }
        if let Some(best) = best {
            best.width += 1;
        }
    }
}

/// Takes the bit whose loss raises the distortion least.
fn take_bit(quads: &mut [Quad]) {
    let wide = quads.iter_mut().filter(|quad| quad.width > 0);
    if let Some(quad) = wide.min_by(|a, b| a.gain(a.width - 1).total_cmp(&b.gain(b.width - 1))) {
        quad.width -= 1;
    }
}
