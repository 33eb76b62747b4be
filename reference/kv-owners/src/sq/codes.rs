//! The coded tokens of a head, whose values come and go in their own basis.

use std::sync::Arc;

use kv_attend::owner::{EvictedRows, Queries, Reader, Store, Writer};
use kv_attend::{Backend, Element, Rows, SoftmaxStats};
use pq_core::Evicted;
use pq_core::sq::HeadCodes;

use super::Head;
use crate::Error;

/// Query heads that are attended together: their statistics are on the stack.
const HEADS: usize = 16;

/// [`HeadCodes`] with the transforms of a [`Head`].
#[derive(Clone, Debug)]
pub struct Codes {
    head: Arc<Head>,
    codes: HeadCodes,
}

impl Codes {
    /// The codes.
    #[must_use]
    pub const fn codes(&self) -> &HeadCodes {
        &self.codes
    }
}

impl<E: Element> Store<E> for Codes {
    type Shared = Head;
    type Report = Evicted;
    type Error = Error;
    const NAME: &'static str = "a layer cache of scalar codes with bases";
    const MAGIC: [u8; 4] = *b"SQBL";
    const VERSION: u32 = 1;
    const QUERIES: usize = HEADS;

    fn new(head: Arc<Head>) -> Self {
        Self { codes: HeadCodes::new(head.transform().clone()), head }
    }

    fn dims(&self) -> [usize; 2] {
        Store::<E>::dims(&self.codes)
    }

    fn block(&self) -> usize {
        Store::<E>::block(&self.codes)
    }

    fn len(&self) -> usize {
        self.codes.len()
    }

    fn size(&self) -> usize {
        self.codes.size()
    }

    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>) -> Result<Evicted, Error> {
        let whole = |parts: &[Rows<'_, E>; 2]| -> Vec<f32> {
            parts.iter().flat_map(|rows| rows.iter().flatten()).map(|x| x.to_f32()).collect()
        };
        let [keys, values] = evicted.sides();
        let (keys, mut values) = (whole(keys), whole(values));
        self.head.forward(&mut values)?;
        Ok(self.codes.append(backend, evicted.first(), &keys, &values)?)
    }

    fn truncate(&mut self, len: usize) {
        self.codes.truncate(len);
    }

    fn scratch_len(&self, _query_tokens: usize, group: usize) -> usize {
        let heads = group.min(HEADS);
        self.codes.scratch_len(heads).saturating_add(heads * self.head.value_mean().len())
    }

    fn attend_into(
        &self,
        backend: Backend,
        queries: &Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let [dim, dim_v] = Store::<E>::dims(&self.codes);
        let (group, softcap) = (queries.group(), queries.attention().softcap);
        // The parts of the scratch keep its alignment: codes first.
        let (scratch, parts) = scratch.split_at_mut(scratch.len() - group.min(HEADS) * dim_v);
        let each_token = queries.scaled().chunks_exact(group * dim);
        let outs = out.chunks_exact_mut(group * dim_v).zip(stats.chunks_exact_mut(group));
        for (i, (scaled, (out, stats))) in each_token.zip(outs).enumerate() {
            let range = queries.visible(i, self.codes.len());
            let outs = out.chunks_mut(HEADS * dim_v).zip(stats.chunks_mut(HEADS));
            for (scaled, (out, stats)) in scaled.chunks(HEADS * dim).zip(outs) {
                let (part, part_stats) = (&mut parts[..out.len()], &mut [SoftmaxStats::EMPTY; HEADS]);
                let part_stats = &mut part_stats[..stats.len()];
                part.fill(0.0);
                let range = range.clone();
                self.codes.attend_into(backend, scaled, range, softcap, scratch, part, part_stats)?;
                let rows = out.chunks_exact_mut(dim_v).zip(stats);
                for ((part, part_stats), (out, stats)) in
                    part.chunks_exact_mut(dim_v).zip(part_stats).zip(rows)
                {
                    self.head.inverse(part_stats.sum, part)?;
                    stats.merge(out, *part_stats, part)?;
                }
            }
        }
        Ok(())
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(self.head.id());
        Store::<E>::write(&self.codes, writer);
    }

    fn read(reader: &mut Reader<'_>, head: &Arc<Head>) -> Result<Self, Error> {
        if reader.u64()? != head.id() {
            return Err(kv_attend::Error::BadField { what: "mean of the values" }.into());
        }
        let codes = <HeadCodes as Store<E>>::read(reader, head.transform())?;
        Ok(Self { head: head.clone(), codes })
    }
}
