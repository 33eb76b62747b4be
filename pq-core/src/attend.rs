//! Attention on codes.
//!
//! The tokens are processed in chunks with an online softmax, so that scores stay in cache and the size of
//! the scratch does not depend on the sequence length. The scalar form is MILLION's: it sums the weights per
//! centroid and multiplies every centroid once. The vector form looks the values of 64 tokens up into
//! registers, as the scan does with scores. One multiply-add per register and query is then cheaper than 64
//! scattered additions: at (64, 8) with one query, about 26 + 4 instructions against 64 dependent
//! read-modify-writes.

use core::ops::Range;

use crate::adc::{scan_chunk, scan_scalar, split_planes};
use crate::blocks::{Blocks, CHUNK, QUERIES, Room};
use crate::centroid_sums::{flush, flush_interval};
use crate::error::{check_at_least, check_len};
use crate::pack::unpack_run;
use crate::scan_group::score_together;
use crate::simd::{BLOCK, Kernel, Run, Simd, for_nbits, row_len};
use crate::softmax::{exponentiate, max};
use crate::{Backend, Codebook, CodedTokens, Codes, Error, Luts, PqShape, SoftmaxStats};

/// Elements of the scratch of [`attend_into`], given the shape of the values.
#[must_use]
pub const fn attend_scratch_len(values: PqShape, group: usize) -> usize {
    tables_len(values).saturating_add(group.saturating_mul(CHUNK))
}

/// Elements of the tables: one float per centroid and component, as byte planes. The scalar form needs two
/// per centroid and subspace.
const fn tables_len(values: PqShape) -> usize {
    let columns = if values.dsub() == 1 { 2 * values.m() } else { values.dim() };
    columns * row_len(values.ksub())
}

/// Attention of a GQA group of query heads over the coded tokens of its KV head, without decoding them to
/// memory.
///
/// The score of token t for query g is
/// `s[g, t] = key_scales[t] * (sum_j luts[g, j, keys[t, j]]) + bias[g, t]`, capped if
/// [`CodedTokens::with_softcap`] is set. The tokens are added to
/// `out[g] = sum_t exp(s[g, t] - max) * value_scales[t] * value_t` and to `stats[g]`. Start from zeros and
/// [`SoftmaxStats::EMPTY`], and finish with [`SoftmaxStats::normalize`]. Scale queries by
/// `1 / sqrt(head_dim)` before [`lut_into`](crate::lut_into).
///
/// # Shapes
/// `luts` (group, m, ksub) in the keys' shape; `scratch` at least [`attend_scratch_len`]; `out` (group, dim
/// of the values); `stats` (group,).
/// # Errors
/// [`Error::ShapeMismatch`], [`Error::Length`] or [`Error::TooShort`]; `out` and `stats` are then untouched.
/// # Cost
/// Per query n * m lookups for the scores, n exponentials, and n * dim multiply-adds on values, which are
/// looked up once per group; no allocation.
/// # Source
/// MILLION (DAC 2025), III-B, equations 6 and 7.
/// # Examples
/// ```
/// use pq_core::*;
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let (shape, n) = (PqShape::new(16, 8, 6)?, 300);
/// // One channel has an offset, as in most models.
/// let keys: Vec<f32> = (0..n * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// let trained = train(shape, &keys, &TrainOptions { encode: true, ..Default::default() })?;
/// let codebook = CodebookBuf::new(shape, &trained.centroids)?;
/// let codes = Codes::new(shape, n, &trained.codes)?;
/// let tokens = CodedTokens::new(codes, codes, codebook.view())?; // the values are the keys
///
/// let queries: Vec<f32> = (0..2 * 16).map(|i| noise(7 * i) / 4.0).collect(); // two heads, divided by sqrt(16)
/// let mut tables = vec![0.0; 2 * shape.lut_len()];
/// let luts = lut_into(&codebook.view(), &queries, &mut tables)?;
/// let mut scratch = vec![0.0; attend_scratch_len(shape, 2)];
/// let (mut out, mut stats) = (vec![0.0; 2 * 16], vec![SoftmaxStats::EMPTY; 2]);
/// attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert!((out[5] - 8.0).abs() < 0.5 && out[6].abs() < 0.5);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn attend_into(
    luts: &Luts<'_>,
    tokens: &CodedTokens<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    attend_into_with(Backend::detect(), luts, tokens, scratch, out, stats)
}

/// [`attend_into`] on a given backend.
///
/// # Errors
/// As [`attend_into`], and [`Error::BackendUnavailable`].
pub fn attend_into_with(
    backend: Backend,
    luts: &Luts<'_>,
    tokens: &CodedTokens<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    backend.check()?;
    let (group, shape) = (luts.group(), tokens.value_shape());
    tokens.check_queries(luts)?;
    check_len("stats", stats.len(), group)?;
    let scratch_len = attend_scratch_len(shape, group);
    check_at_least("scratch", scratch.len(), scratch_len)?;
    check_len("out", out.len(), group.saturating_mul(shape.dim()))?;
    let scratch = &mut scratch[..scratch_len];
    backend.run(Attend { luts, tokens, scratch, out, stats });
    Ok(())
}

struct Attend<'a, 'b> {
    luts: &'a Luts<'a>,
    tokens: &'a CodedTokens<'a>,
    scratch: &'b mut [f32],
    out: &'b mut [f32],
    stats: &'b mut [SoftmaxStats],
}

impl Kernel for Attend<'_, '_> {
    type Output = ();

    fn scalar(self) {
        let Self { luts, tokens, scratch, out, stats } = self;
        let (codebook, n) = (tokens.codebook(), tokens.n());
        let shape = codebook.shape();
        let (tables, scratch) = scratch.split_at_mut(tables_len(shape));
        let weights = &mut tables[..2 * shape.lut_len()]; // sums, then totals
        for (g, (total, out)) in stats.iter_mut().zip(out.chunks_exact_mut(shape.dim())).enumerate() {
            let lut = luts.lut(g);
            let mut stats = SoftmaxStats::EMPTY;
            weights.fill(0.0);
            for start in (0..n).step_by(CHUNK) {
                let end = n.min(start + CHUNK);
                let scores = &mut scratch[..end - start];
                scan_scalar(&lut, &tokens.keys().part(start, end), scores);
                weigh(tokens, g, start, scores, &mut stats, weights);
                let (sums, totals) = weights.split_at_mut(shape.lut_len());
                add_per_centroid(&tokens.values().part(start, end), scores, sums);
                if end == n || end % flush_interval(shape.ksub()) == 0 {
                    flush(sums, totals);
                }
            }
            let scale = total.absorb(stats, out);
            let totals = &weights[shape.lut_len()..];
            let rows = totals.chunks_exact(shape.ksub()).zip(codebook.subspaces());
            for ((row, subspace), out) in rows.zip(out.chunks_exact_mut(shape.dsub())) {
                for (d, out) in out.iter_mut().enumerate() {
                    let sum: f32 = row.iter().zip(subspace.column(d)).map(|(&weight, &y)| weight * y).sum();
                    *out += scale * sum;
                }
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        if self.tokens.value_shape().nbits() > 8 {
            return self.scalar(); // registers hold tables of at most 256 entries
        }
        let Self { luts, tokens, scratch, out, stats } = self;
        let (shape, n) = (tokens.value_shape(), tokens.n());
        let dim = shape.dim();
        let (tables, scores) = scratch.split_at_mut(tables_len(shape));
        let planes = bytemuck::cast_slice_mut(tables);
        let codebook = &tokens.codebook();
        split_columns(codebook, planes);
        let mut room = None;
        for start in (0..n).step_by(CHUNK) {
            let end = n.min(start + CHUNK);
            let len = (end - start).next_multiple_of(BLOCK);
            let (mut key_parts, mut value_parts) = ([&[][..]; CHUNK / 16], [&[][..]; CHUNK / 16]);
            let keys = tokens.keys().part(start, end);
            let key_blocks = keys.blocks(0, &mut key_parts[..CHUNK / keys.block_vectors()]);
            for (i, scores) in scores.chunks_mut(QUERIES * CHUNK).enumerate() {
                if !score_together(s, luts, i * QUERIES, key_blocks, scores, &mut room) {
                    let queries = scores.len() / CHUNK;
                    let group: [_; QUERIES] =
                        core::array::from_fn(|g| luts.lut(i * QUERIES + g.min(queries - 1)));
                    let group = &group[..queries];
                    if keys.shape().nbits() <= 8 {
                        scan_chunk(s, group, key_blocks, scores, [end - start, CHUNK], &mut room);
                    } else {
                        for (lut, scores) in group.iter().zip(scores.chunks_exact_mut(CHUNK)) {
                            scan_scalar(lut, &keys, &mut scores[..end - start]);
                        }
                    }
                }
                for (g, scores) in scores.chunks_exact_mut(CHUNK).enumerate() {
                    let g = i * QUERIES + g;
                    let (scores, padding) = scores[..len].split_at_mut(end - start);
                    weigh(tokens, g, start, scores, &mut stats[g], &mut out[g * dim..][..dim]);
                    padding.fill(0.0);
                }
            }
            let value_parts = &mut value_parts[..CHUNK / tokens.values().block_vectors()];
            let blocks = tokens.values().blocks(start / BLOCK, value_parts);
            let values = Values { codebook, planes, blocks };
            let mut weights = scores.chunks_mut(4 * CHUNK);
            let mut outs = out.chunks_mut(4 * dim);
            for (weights, out) in (&mut weights).zip(&mut outs) {
                values.add_group(s, weights, out, &mut room);
            }
        }
    }
}

/// Turns the table scores of tokens `start` and on into softmax weights, in place. Adds the tokens to `stats`
/// and rescales `accumulated` if the maximum rises.
#[inline(always)]
fn weigh(
    tokens: &CodedTokens<'_>,
    g: usize,
    start: usize,
    scores: &mut [f32],
    stats: &mut SoftmaxStats,
    accumulated: &mut [f32],
) {
    tokens.finish_scores(g, start, scores);
    stats.raise_max(max(scores), accumulated);
    stats.sum += exponentiate(scores, stats.finite_max());
    tokens.scale_weights(start, scores);
}

/// Adds each token's weight to its centroids' sums (m, ksub).
fn add_per_centroid(codes: &Codes<'_>, weights: &[f32], sums: &mut [f32]) {
    let (shape, block) = (codes.shape(), codes.block_vectors());
    for (b, weights) in weights.chunks(block).enumerate() {
        let runs = codes.block(b).chunks_exact(codes.run_len());
        for (row, run) in sums.chunks_exact_mut(shape.ksub()).zip(runs) {
            for (&weight, c) in weights.iter().zip(unpack_run(run, shape.nbits(), block)) {
                row[usize::from(c)] += weight;
            }
        }
    }
}

/// The coded values of a chunk.
struct Values<'a> {
    codebook: &'a Codebook<'a>,
    planes: &'a [u8], // (dim, 4, max(16, ksub)): the bytes of every component of the centroids
    blocks: Blocks<'a>, // of codes
}

impl Values<'_> {
    /// Adds the weighted values to up to four queries' outputs. Reorders `weights` (queries, CHUNK) into
    /// block order.
    #[inline(always)]
    fn add_group<S: Simd>(&self, s: S, weights: &mut [f32], out: &mut [f32], room: &mut Room) {
        let (shape, tokens) = (self.codebook.shape(), self.blocks.len() * BLOCK);
        for weights in weights.chunks_exact_mut(CHUNK) {
            self.blocks.order_as_codes(shape.nbits(), &mut weights[..tokens]);
            for block in weights[..tokens].chunks_exact_mut(BLOCK) {
                // SAFETY: a block has 64 floats.
                unsafe { s.store_raw(block.as_mut_ptr(), s.load_block(block.as_ptr())) };
            }
        }
        let mut end = 0;
        while end < shape.m() {
            let (first, mut list) = (end, None);
            let runs = self.blocks.runs(s, shape.nbits(), (first, shape.m(), 1), room, &mut list);
            end = runs.end;
            for_nbits!(shape.nbits(), N => s.call(
                #[inline(always)]
                || match out.len() / shape.dim() {
                    1 => self.add::<S, N, 1, 4>(s, first..end, runs.blocks, weights, out),
                    2 => self.add::<S, N, 2, 2>(s, first..end, runs.blocks, weights, out),
                    3 => self.add::<S, N, 3, 1>(s, first..end, runs.blocks, weights, out),
                    _ => self.add::<S, N, 4, 1>(s, first..end, runs.blocks, weights, out),
                },
            ));
        }
    }

    /// Adds the weighted values of `G` queries for consecutive subspaces, given their runs in each block. `A`
    /// accumulators for each query hide the latency of the multiply-adds.
    #[inline(always)]
    fn add<S: Simd, const NBITS: u32, const G: usize, const A: usize>(
        &self,
        s: S,
        subspaces: Range<usize>,
        blocks: &[&[u8]],
        weights: &[f32],
        out: &mut [f32],
    ) {
        let shape = self.codebook.shape();
        let run_len = 8 * NBITS as usize;
        assert!(weights.len() == G * CHUNK && blocks.len() * BLOCK <= CHUNK);
        let (first, count) = (subspaces.start * shape.dsub(), subspaces.len() * shape.dsub());
        let columns = self.planes.chunks_exact(4 * row_len(shape.ksub())).zip(self.codebook.columns());
        for (i, (planes, column)) in columns.skip(first).take(count).enumerate() {
            // SAFETY: a column has ksub floats, its planes max(16, ksub) bytes each; both outlive the table.
            let table = unsafe { s.float_table::<NBITS>(column.as_ptr(), planes.as_ptr()) };
            let mut sums = [[s.splat(0.0); A]; G];
            for (b, block) in blocks.iter().enumerate() {
                let run = &block[i / shape.dsub() * run_len..][..run_len];
                // SAFETY: `run` is a run; there are weights for CHUNK tokens, at least as many as in the
                // blocks.
                unsafe {
                    let values = s.look_up_floats::<NBITS>(table, s.unpack::<NBITS>(run.as_ptr()));
                    for (v, &value) in values.as_ref().iter().enumerate() {
                        for (g, sums) in sums.iter_mut().enumerate() {
                            let at = g * CHUNK + b * BLOCK + v * S::LANES;
                            sums[v % A] = s.mul_add(s.load(weights.as_ptr().add(at)), value, sums[v % A]);
                        }
                    }
                }
            }
            for (out, sums) in out.chunks_exact_mut(shape.dim()).zip(sums) {
                let mut total = sums[0];
                for &sum in &sums[1..] {
                    total = s.add(total, sum);
                }
                out[first + i] += s.sum(total);
            }
        }
    }
}

/// Splits every component of the centroids, (m, dsub, ksub), into planes of bytes.
#[inline(always)]
fn split_columns(codebook: &Codebook<'_>, planes: &mut [u8]) {
    let len = 4 * row_len(codebook.shape().ksub());
    for (planes, column) in planes.chunks_exact_mut(len).zip(codebook.columns()) {
        split_planes(column, planes);
    }
}
