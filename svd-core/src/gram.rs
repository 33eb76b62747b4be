//! Second moments of rows, summed in `f64` as the rows arrive.

// One index counts registers and the rows or columns that they hold.
#![allow(clippy::needless_range_loop)]

use alloc::vec;
use alloc::vec::Vec;
use core::marker::PhantomData;

use kv_attend::simd::{Kernel, Run, Simd};

use crate::error::check_len;
use crate::{Backend, Element, Error, Rows};

/// The side of the rotary embedding (RoPE) from which the rows of a [`Gram`] come. Sums from one side are
/// meaningless on the other, so the two have different types.
pub trait RopeSide: sealed::Sealed + Copy + Send + Sync + 'static {}

/// Queries and keys before the rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreRope;
/// Queries and keys after the rotary embedding: their inner products are the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostRope;
/// Rows without RoPE: values, rows of `W_O`, queries and keys of models without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRope;

mod sealed {
    pub trait Sealed {}
}
impl sealed::Sealed for PreRope {}
impl sealed::Sealed for PostRope {}
impl sealed::Sealed for NoRope {}
impl RopeSide for PreRope {}
impl RopeSide for PostRope {}
impl RopeSide for NoRope {}

/// Streaming second moment: the sums of `x^T x` and of `x` over rows, in `f64`. The rows themselves are not
/// kept.
///
/// A product of two `f32` is exact in `f64`, so the result depends only on the order of additions, which is
/// fixed: sums over 64 rows are added to sums over 4,096 rows, those to the sum of the call. Backends,
/// threads and fused multiply-adds do not change a bit. At the condition numbers of keys, sums in `f32` would
/// lose the small directions.
///
/// # Examples
/// ```
/// use svd_core::{Gram, PostRope, Rows};
/// let mut keys = Gram::<PostRope>::new(2)?;
/// keys.add_rows(Rows::contiguous(&[1.0_f32, 2.0, 3.0, 4.0], 2)?)?;
/// assert_eq!(keys.matrix(), [10.0, 14.0, 14.0, 20.0]);
/// assert_eq!(keys.mean(), [2.0, 3.0]);
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Gram<S> {
    dim: usize,
    rows: u64,        // number of summed rows, all finite `f32`, so no merge overflows
    blocks: Vec<f64>, // 16 x 16 blocks on and below the diagonal, row-major; above it nothing is read
    sums: Vec<f64>,   // (dim rounded up to 16,)
    side: PhantomData<S>,
}

/// Maximum dimension, wider than any head: a wrong argument must not exhaust memory.
pub(crate) const MOST_DIM: usize = 8192;
/// Rows and columns of a block.
const BLOCK: usize = 16;
/// Rows summed in registers.
const PANEL: usize = 64;
/// Rows per separate sum, a parallel task with `rayon`.
const CHUNK: usize = 4096;
/// Chunks whose sums are held at the same time.
#[cfg(feature = "rayon")]
const WAVE: usize = 16;

impl<S: RopeSide> Gram<S> {
    /// An empty sum for rows of `dim` components.
    ///
    /// # Errors
    /// [`Error::Zero`] for no components, [`Error::TooLarge`] for more than 8,192.
    pub fn new(dim: usize) -> Result<Self, Error> {
        if dim == 0 {
            return Err(Error::Zero { what: "dim" });
        }
        if dim > MOST_DIM {
            return Err(Error::TooLarge);
        }
        let n = dim.div_ceil(BLOCK);
        let blocks = vec![0.0; n * (n + 1) / 2 * BLOCK * BLOCK];
        Ok(Self { dim, rows: 0, blocks, sums: vec![0.0; n * BLOCK], side: PhantomData })
    }

    /// Adds rows, in any layout: one head of keys (n, heads, dim) is a range of columns of wider rows.
    ///
    /// # Shapes
    /// `rows` (n, dim).
    /// # Errors
    /// [`Error::Length`] for rows of another length, [`Error::NotFinite`], or [`Error::TooLarge`] for more
    /// than `u64::MAX` rows in total. The sum is then unchanged.
    /// # Cost
    /// About n * dim * (dim + 8) / 2 multiply-adds in `f64`. Every 4,096 rows allocate a sum and 64 rows in
    /// `f64`.
    /// # Examples
    /// ```
    /// use svd_core::{Gram, PostRope, Rows};
    /// let keys = [1.0_f32, 2.0, 9.0, 9.0, 3.0, 4.0, 9.0, 9.0]; // 2 tokens of 2 heads of 2 components
    /// let mut head = Gram::<PostRope>::new(2)?;
    /// head.add_rows(Rows::contiguous(&keys, 4)?.columns(0, 2)?)?; // head 0
    /// assert_eq!(head.mean(), [2.0, 3.0]);
    /// # Ok::<(), svd_core::Error>(())
    /// ```
    pub fn add_rows<E: Element>(&mut self, rows: Rows<'_, E>) -> Result<(), Error> {
        self.add_rows_with(Backend::detect(), rows)
    }

    /// [`add_rows`](Self::add_rows) on a given backend.
    ///
    /// # Errors
    /// As for [`add_rows`](Self::add_rows), and [`Error::BackendUnavailable`].
    pub fn add_rows_with<E: Element>(&mut self, backend: Backend, rows: Rows<'_, E>) -> Result<(), Error> {
        backend.check()?;
        check_len("row", rows.components(), self.dim)?;
        let n = rows.rows();
        let mut call = self.empty();
        let sum_chunk = |c: usize| -> Result<Self, Error> {
            let rows = rows.slice(c * CHUNK..n.min((c + 1) * CHUNK))?;
            let mut chunk = self.empty();
            let mut panel = vec![0.0; PANEL * chunk.sums.len()];
            let Self { blocks, sums, .. } = &mut chunk;
            backend.run(AddRows { rows, blocks, sums, panel: &mut panel });
            Ok(chunk)
        };
        let chunks = n.div_ceil(CHUNK);
        #[cfg(feature = "rayon")]
        for wave in (0..chunks).step_by(WAVE) {
            use rayon::prelude::*;
            let wave = wave..chunks.min(wave + WAVE);
            let sums = wave.into_par_iter().map(sum_chunk).collect::<Result<Vec<Self>, Error>>()?;
            sums.iter().for_each(|chunk| call.add(chunk));
        }
        #[cfg(not(feature = "rayon"))]
        for c in 0..chunks {
            call.add(&sum_chunk(c)?);
        }
        call.rows = n as u64;
        // Squares of finite floats cannot overflow in f64, so the diagonal is finite unless a row has a NaN
        // or an infinity.
        if (0..self.dim).any(|d| !call.blocks[index(d, d)].is_finite()) {
            return Err(Error::NotFinite { what: "rows" });
        }
        self.merge(&call)
    }

    /// Adds another sum. The same sums merged in the same order give the same bits.
    ///
    /// # Errors
    /// [`Error::Length`] if the dimensions differ, [`Error::TooLarge`] for more than `u64::MAX` rows in
    /// total. The sum is then unchanged.
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        check_len("gram", other.dim, self.dim)?;
        self.rows = self.rows.checked_add(other.rows).ok_or(Error::TooLarge)?;
        self.add(other);
        Ok(())
    }

    /// Builds a Gram from sums that were computed elsewhere, for example on a GPU.
    ///
    /// # Shapes
    /// `matrix` (dim, dim), of which only the elements on and below the diagonal are used; `sums` (dim,).
    /// # Errors
    /// [`Error::Zero`], [`Error::TooLarge`], [`Error::Length`], [`Error::NotFinite`] for a NaN, an infinity,
    /// or a sum that exceeds what `rows` rows of finite `f32` can have.
    pub fn from_sums(dim: usize, rows: u64, matrix: &[f64], sums: &[f64]) -> Result<Self, Error> {
        let mut gram = Self::new(dim)?;
        check_len("matrix", matrix.len(), dim * dim)?;
        check_len("sums", sums.len(), dim)?;
        // Twice the bound of exact sums, since sums are rounded.
        let largest = f64::from(f32::MAX);
        let (most, most_squared) = (2.0 * largest * rows as f64, 2.0 * largest * largest * rows as f64);
        let within = |x: &[f64], most: f64| x.iter().all(|x| x.abs() <= most);
        if !(within(matrix, most_squared) && within(sums, most)) {
            return Err(Error::NotFinite { what: "sums" });
        }
        gram.rows = rows;
        gram.sums[..dim].copy_from_slice(sums);
        for r in 0..dim {
            for c in 0..=r {
                gram.blocks[index(r, c)] = matrix[r * dim + c];
            }
        }
        Ok(gram)
    }

    fn empty(&self) -> Self {
        let zeros = |like: &[f64]| vec![0.0; like.len()];
        Self { blocks: zeros(&self.blocks), sums: zeros(&self.sums), rows: 0, ..*self }
    }

    /// Adds the sums, but not the number of rows.
    fn add(&mut self, other: &Self) {
        let sums = self.blocks.iter_mut().chain(&mut self.sums);
        sums.zip(other.blocks.iter().chain(&other.sums)).for_each(|(sum, x)| *sum += x);
    }

    /// The sum of `(x - mean)^T (x - mean)`, whose own mean is zero.
    #[must_use]
    pub fn centred(&self) -> Self {
        let mut centred = self.clone();
        let mean = self.mean();
        for r in 0..self.dim {
            for c in 0..=r {
                centred.blocks[index(r, c)] -= mean[r] * self.sums[c];
            }
        }
        centred.sums.fill(0.0);
        centred
    }

    /// The second moment with the mean weighted by `weight`: `centred` plus `weight * rows * mean^T mean`.
    pub(crate) fn mean_weighed(&self, weight: f64) -> Self {
        let mut weighed = self.clone();
        let mean = self.mean();
        for r in 0..self.dim {
            for c in 0..=r {
                weighed.blocks[index(r, c)] += (weight - 1.0) * mean[r] * self.sums[c];
            }
        }
        weighed
    }

    /// Components of a row.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Rows added so far.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// The mean row (dim,); zeros without rows.
    #[must_use]
    pub fn mean(&self) -> Vec<f64> {
        let n = self.rows.max(1) as f64;
        self.sums[..self.dim].iter().map(|sum| sum / n).collect()
    }

    /// The full symmetric matrix (dim, dim).
    #[must_use]
    pub fn matrix(&self) -> Vec<f64> {
        let dim = self.dim;
        (0..dim * dim)
            .map(|i| (i / dim, i % dim))
            .map(|(r, c)| self.blocks[index(r.max(c), r.min(c))])
            .collect()
    }
}

/// Index of element (r, c), `c <= r`, in the blocks.
const fn index(r: usize, c: usize) -> usize {
    block_start(r / BLOCK, c / BLOCK) + r % BLOCK * BLOCK + c % BLOCK
}

const fn block_start(r: usize, c: usize) -> usize {
    (r * (r + 1) / 2 + c) * BLOCK * BLOCK
}

/// Adds rows to blocks and sums, panel by panel.
struct AddRows<'a, 'b, E> {
    rows: Rows<'a, E>,
    blocks: &'b mut [f64],
    sums: &'b mut [f64],
    panel: &'b mut [f64], // a panel's rows: per 16 columns, (PANEL, 16)
}

impl<E: Element> Kernel for AddRows<'_, '_, E> {
    type Output = ();

    fn scalar(self) {
        let dim = self.rows.components();
        for first in (0..self.rows.rows()).step_by(PANEL) {
            let n = PANEL.min(self.rows.rows() - first);
            for (b, strip) in self.panel.chunks_exact_mut(PANEL * BLOCK).enumerate() {
                let columns = b * BLOCK..dim.min((b + 1) * BLOCK);
                for (i, out) in strip.chunks_exact_mut(BLOCK).take(n).enumerate() {
                    let row = &self.rows.row(first + i)[columns.clone()];
                    out.iter_mut().zip(row).for_each(|(out, x)| *out = x.to_f32().into());
                }
            }
            add_sums(self.panel, n, self.sums);
            for r in 0..self.sums.len() / BLOCK {
                for c in 0..=r {
                    let (a, b) = (strip(self.panel, r, n), strip(self.panel, c, n));
                    let mut sums = [[0.0; BLOCK]; BLOCK];
                    for (a, b) in a.iter().zip(b) {
                        for (k, (sums, x)) in sums.iter_mut().zip(a).enumerate() {
                            let b = &b[..columns(r == c, k)];
                            sums.iter_mut().zip(b).for_each(|(sum, y)| *sum += x * y);
                        }
                    }
                    let block = &mut self.blocks[block_start(r, c)..][..BLOCK * BLOCK];
                    block.iter_mut().zip(sums.as_flattened()).for_each(|(total, sum)| *total += sum);
                }
            }
        }
    }

    /// Floor: on AVX-512, 8 rows of a block take 16 multiply-adds of 8 doubles and 10 loads per row of the
    /// panel.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (all, dim) = (self.rows.rows(), self.rows.components());
        for first in (0..all).step_by(PANEL) {
            let n = PANEL.min(all - first);
            for i in 0..n {
                let columns = self.rows.row(first + i).chunks(BLOCK);
                for (columns, strip) in columns.zip(self.panel.chunks_exact_mut(PANEL * BLOCK)) {
                    widen(s, columns, &mut strip.as_chunks_mut::<BLOCK>().0[i]);
                }
            }
            add_sums(self.panel, n, self.sums);
            // Every block prefetches a share of the next panel's rows, so that the loads overlap with the
            // multiplications. Wrapping: they may lie outside the rows, and a single row may have any stride.
            let (row, stride) = (self.rows.row(first).as_ptr(), self.rows.row_stride());
            let mut next = row.wrapping_add(PANEL.wrapping_mul(stride));
            let share = PANEL.div_ceil(self.blocks.len() / (BLOCK * BLOCK));
            for r in 0..self.sums.len() / BLOCK {
                for c in 0..=r {
                    for _ in 0..share {
                        let lines = (0..dim).step_by(64 / size_of::<E>());
                        lines.for_each(|at| s.prefetch(next.wrapping_add(at).cast()));
                        next = next.wrapping_add(stride);
                    }
                    let (a, b) = (strip(self.panel, r, n), strip(self.panel, c, n));
                    let block = &mut self.blocks[block_start(r, c)..][..BLOCK * BLOCK];
                    if S::WIDE {
                        add_block::<S, 8, 2>(s, a, b, r == c, block)
                    } else {
                        add_block::<S, 4, 2>(s, a, b, r == c, block)
                    }
                }
            }
        }
    }
}

/// The first `n` rows of a panel, columns `16 b` to `16 b + 15`.
#[inline(always)]
fn strip(panel: &[f64], b: usize, n: usize) -> &[[f64; BLOCK]] {
    panel[b * PANEL * BLOCK..][..n * BLOCK].as_chunks().0
}

/// Adds the first `n` rows of a panel to the column sums.
#[inline(always)]
fn add_sums(panel: &[f64], n: usize, sums: &mut [f64]) {
    for (b, total) in sums.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let mut sums = [0.0; BLOCK];
        for row in strip(panel, b, n) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
}

/// Up to 16 elements as doubles.
#[inline(always)]
fn widen<S: Simd, E: Element>(s: S, row: &[E], out: &mut [f64; BLOCK]) {
    let mut floats = [0.0_f32; BLOCK];
    if row.len() == BLOCK {
        for v in 0..BLOCK / S::LANES {
            // SAFETY: 16 elements and 16 floats in registers of LANES.
            unsafe {
                s.store(floats.as_mut_ptr().add(v * S::LANES), E::load(s, row.as_ptr().add(v * S::LANES)))
            };
        }
    } else {
        floats.iter_mut().zip(row).for_each(|(float, x)| *float = x.to_f32());
    }
    out.iter_mut().zip(floats).for_each(|(out, x)| *out = x.into());
}

/// Adds `a^T b` to a block, `R` of its rows by `C` registers at a time.
#[inline(always)]
fn add_block<S: Simd, const R: usize, const C: usize>(
    s: S,
    a: &[[f64; BLOCK]],
    b: &[[f64; BLOCK]],
    diagonal: bool,
    block: &mut [f64],
) {
    let lanes = S::LANES / 2;
    for r in (0..BLOCK).step_by(R) {
        let (end, mut c) = (columns(diagonal, r), 0);
        while c + C * lanes <= end {
            add_tile::<S, R, C>(s, a, b, [r, c], block);
            c += C * lanes;
        }
        if c < end {
            add_tile::<S, R, 1>(s, a, b, [r, c], block);
        }
    }
}

/// Columns that row `r` of a block sums. A diagonal block skips its upper right quarter.
#[inline(always)]
fn columns(diagonal: bool, r: usize) -> usize {
    if diagonal && r < BLOCK / 2 { BLOCK / 2 } else { BLOCK }
}

/// The part of a block that begins at row and column `at`.
#[inline(always)]
fn add_tile<S: Simd, const R: usize, const C: usize>(
    s: S,
    a: &[[f64; BLOCK]],
    b: &[[f64; BLOCK]],
    at: [usize; 2],
    block: &mut [f64],
) {
    let (n, lanes, [r, c]) = (a.len(), S::LANES / 2, at);
    assert!(b.len() == n && block.len() == BLOCK * BLOCK && r + R <= BLOCK && c + C * lanes <= BLOCK);
    let mut sums = [[s.zero_f64(); C]; R];
    for i in 0..n {
        // SAFETY: n rows of 16 in a and b; r + R and c + C * lanes are at most 16.
        unsafe {
            let (a, b) = (a.as_ptr().add(i).cast::<f64>().add(r), b.as_ptr().add(i).cast::<f64>().add(c));
            let mut columns = [s.zero_f64(); C];
            for v in 0..C {
                columns[v] = s.load_f64(b.add(v * lanes));
            }
            for k in 0..R {
                let x = s.splat_f64(a.add(k));
                for v in 0..C {
                    sums[k][v] = s.mul_add_f64(x, columns[v], sums[k][v]);
                }
            }
        }
    }
    for k in 0..R {
        for v in 0..C {
            // SAFETY: 16 rows of 16 in the block.
            unsafe {
                let total = block.as_mut_ptr().add((r + k) * BLOCK + c + v * lanes);
                s.store_f64(total, s.add_f64(s.load_f64(total), sums[k][v]));
            }
        }
    }
}
