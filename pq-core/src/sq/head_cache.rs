//! The caches of a head and of a layer of one sequence, with scalar codes.

use alloc::sync::Arc;
use alloc::vec::Vec;

use kv_attend::owner::{EvictedRows, Layer, Queries, Reader, Store, Windowed, Writer};

use super::head_codes::HeadCodes;
use super::head_transform::HeadTransform;
use crate::{Backend, Element, Error, Evicted, Rows, SoftmaxStats};

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones as exact
/// rows of `E`, all others as scalar codes in blocks, with the methods of [`Windowed`]. Keys are those after
/// RoPE, values are in their Hadamard basis and without their mean.
///
/// [`Window::batch`](crate::Window::batch) is rounded up to a multiple of the block, so that only whole blocks
/// are coded.
pub type HeadCache<E> = Windowed<HeadCodes, E>;

/// A [`HeadCache`] per KV head, with the methods of [`Layer`].
pub type LayerCache<E> = Layer<HeadCodes, E>;

impl<E: Element> Store<E> for HeadCodes {
    type Shared = HeadTransform;
    type Report = Evicted;
    type Error = Error;
    const NAME: &'static str = "a layer cache of scalar codes";
    const MAGIC: [u8; 4] = *b"SQLC";
    const VERSION: u32 = 1;
    const QUERIES: usize = 16;

    fn new(transform: Arc<HeadTransform>) -> Self {
        Self::new(transform)
    }

    fn dims(&self) -> [usize; 2] {
        [self.transform().keys().dim(), self.transform().values().dim()]
    }

    fn block(&self) -> usize {
        self.transform().block()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>) -> Result<Evicted, Error> {
        let whole = |parts: &[Rows<'_, E>; 2]| -> Vec<f32> {
            parts.iter().flat_map(|rows| rows.iter().flatten()).map(|x| x.to_f32()).collect()
        };
        let [keys, values] = evicted.sides();
        self.append(backend, evicted.first(), &whole(keys), &whole(values))
    }

    fn truncate(&mut self, len: usize) {
        self.truncate(len);
    }

    fn scratch_len(&self, _query_tokens: usize, group: usize) -> usize {
        self.scratch_len(group)
    }

    fn attend_into(
        &self,
        backend: Backend,
        queries: &Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let (tokens, softcap) = (queries.tokens(), queries.attention().softcap);
        let scaled = queries.scaled().chunks_exact(queries.scaled().len() / tokens);
        let outs = out.chunks_exact_mut(out.len() / tokens).zip(stats.chunks_exact_mut(queries.group()));
        for (i, (scaled, (out, stats))) in scaled.zip(outs).enumerate() {
            let range = queries.visible(i, self.len());
            self.attend_into(backend, scaled, range, softcap, scratch, out, stats)?;
        }
        Ok(())
    }

    fn write(&self, writer: &mut Writer) {
        self.write(writer);
    }

    fn read(reader: &mut Reader<'_>, transform: &Arc<HeadTransform>) -> Result<Self, Error> {
        Self::read(reader, transform)
    }
}
