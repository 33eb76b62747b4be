//! The cache of one KV head of one sequence, with scalar codes.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use kv_attend::owner::{ExactRows, Head, Layer, Reader, Writer, check_queries};

use super::head_codes::HeadCodes;
use super::head_transform::HeadTransform;
use crate::error::check_at_least;
use crate::{
    Attention, Backend, Element, Error, Rows, SoftmaxStats, Window, attend_exact_into_with,
    attend_exact_scratch_len,
};

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones as exact
/// rows of `E`, all others as scalar codes in blocks. Keys are those after RoPE, values are in their Hadamard
/// basis and without their mean.
///
/// [`Window::batch`] is rounded up to a multiple of the block, so that only whole blocks are coded. Attention
/// runs over all parts in one softmax. [`LayerCache`] holds all heads of a layer.
#[derive(Clone, Debug)]
pub struct HeadCache<E> {
    exact: ExactRows<E>,
    codes: HeadCodes,
}

/// A [`HeadCache`] per KV head, with the methods of [`Layer`].
pub type LayerCache<E> = Layer<HeadCache<E>>;

impl<E: Element> HeadCache<E> {
    /// Number of tokens held as codes, which follow the sinks.
    #[must_use]
    pub fn coded(&self) -> usize {
        self.codes.len()
    }

    /// The codes.
    #[must_use]
    pub const fn codes(&self) -> &HeadCodes {
        &self.codes
    }

    /// The coded tokens that a query at position `at` sees.
    fn visible(&self, attention: &Attention, at: usize) -> Range<usize> {
        let (sinks, coded) = (self.exact.sinks(), self.codes.len());
        let start = attention.window.map_or(0, |window| (at + 1).saturating_sub(window));
        start.saturating_sub(sinks).min(coded)..(at + 1).saturating_sub(sinks).min(coded)
    }
}

/// The window with a batch of whole blocks.
fn whole_blocks(window: Window, transform: &HeadTransform) -> Window {
    Window { batch: window.batch.max(1).next_multiple_of(transform.block()), ..window }
}

impl<E: Element> Head for HeadCache<E> {
    type Element = E;
    type Shared = HeadTransform;
    type Evicted = ();
    type Error = Error;
    const NAME: &'static str = "a layer cache of scalar codes";
    const MAGIC: [u8; 4] = *b"SQLC";
    const VERSION: u32 = 1;

    fn new(transform: Arc<HeadTransform>, window: Window) -> Self {
        let dims = [transform.keys().dim(), transform.values().dim()];
        let exact = ExactRows::new(dims, whole_blocks(window, &transform));
        Self { exact, codes: HeadCodes::new(transform) }
    }

    fn dims(&self) -> [usize; 2] {
        self.exact.dims()
    }

    fn len(&self) -> usize {
        self.exact.sinks() + self.codes.len() + self.exact.recent()
    }

    fn size(&self) -> usize {
        self.exact.size() + self.codes.size()
    }

    fn append_with(&mut self, backend: Backend, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<(), Error> {
        backend.check()?;
        let mut evicted = [Vec::new(), Vec::new()];
        self.exact.append(self.codes.len(), [keys, values], |side, rows| {
            evicted[side].extend(rows.iter().flatten().map(|x| x.to_f32()));
            Ok::<_, Error>(())
        })?;
        let [keys, values] = evicted;
        self.codes.append(backend, self.exact.sinks() + self.codes.len(), &keys, &values)
    }

    fn truncate(&mut self, len: usize) {
        let coded = self.exact.truncate(len, self.codes.len());
        self.codes.truncate(coded);
    }

    fn scratch_len(&self, _query_tokens: usize, group: usize) -> usize {
        let dim = self.exact.dims()[0];
        let exact = attend_exact_scratch_len(group, dim);
        group.saturating_mul(dim).saturating_add(self.codes.scratch_len(group).max(exact))
    }

    fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        backend.check()?;
        let [dim, dim_v] = self.exact.dims();
        let group = check_queries(attention, queries, self.len(), [dim, dim_v], out, stats)?;
        if stats.is_empty() {
            return Ok(());
        }
        check_at_least("scratch", scratch.len(), self.scratch_len(queries.rows(), group))?;
        if self.is_empty() {
            return Ok(());
        }
        let (scaled, scratch) = scratch.split_at_mut(group * dim);
        let exact = Attention { scale: 1.0, ..*attention };
        let per_token = out.chunks_mut(group * dim_v).zip(stats.chunks_mut(group));
        for (i, (query, (out, stats))) in queries.iter().zip(per_token).enumerate() {
            scaled.iter_mut().zip(query).for_each(|(scaled, q)| *scaled = attention.scale * q.to_f32());
            let at = self.len() - queries.rows() + i;
            let (range, softcap) = (self.visible(attention, at), attention.softcap);
            self.codes.attend_into(backend, scaled, range, softcap, scratch, out, stats)?;
            for tokens in self.exact.tokens(self.codes.len(), at)? {
                let query = Rows::contiguous(scaled, group * dim)?;
                attend_exact_into_with(backend, &exact, query, &tokens, scratch, out, stats)?;
            }
        }
        Ok(())
    }

    fn write(&self, writer: &mut Writer) {
        self.codes.write(writer);
        self.exact.write(writer, self.codes.len(), |_, _| {});
    }

    fn read(reader: &mut Reader<'_>, transform: &Arc<HeadTransform>, window: Window) -> Result<Self, Error> {
        let codes = HeadCodes::read(reader, transform)?;
        let dims = [transform.keys().dim(), transform.values().dim()];
        let exact = ExactRows::read(reader, dims, whole_blocks(window, transform), |_, _, coded| {
            if coded == codes.len() { Ok(()) } else { Err(Error::BadField { what: "number of tokens" }) }
        })?;
        Ok(Self { exact, codes })
    }
}
