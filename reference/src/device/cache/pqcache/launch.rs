//! The launches of a step of a [`PqCache`].

use cudarc::driver::CudaStream;
use kv_gpu::pq::{EncodeGenericArguments, GatherArguments, LutArguments, SearchArguments};
use kv_gpu::svd::AttendArguments;
use kv_gpu::{AnyElement, DevicePtr, Grid};

use super::{PqCache, Scratch, Shape};
use crate::Result;
use crate::device::Gpu;
use crate::device::cache::{DeviceCache, Rows, Sequences};
use crate::method::Budget;
use crate::side::Side;

#[derive(Clone, Copy)]
#[repr(C)]
struct BudgetArguments {
    exact_lengths: DevicePtr<u32>,
    coded_lengths: DevicePtr<u32>,
    ks: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    attended: DevicePtr<u32>,
    ratio: f64,
    tokens: u32,
    reserved: u32,
    sequences: u32,
    heads: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LeaveArguments {
    keys: DevicePtr<AnyElement>,
    values: DevicePtr<AnyElement>,
    host_keys: DevicePtr<u16>,
    host_values: DevicePtr<u16>,
    staged: DevicePtr<u16>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    heads: u32,
    sinks: u32,
    ring: u32,
    capacity: u32,
    stored: u32,
    chunks: u32,
}

const _: () = assert!(size_of::<BudgetArguments>() == 64 && size_of::<LeaveArguments>() == 80);

impl PqCache {
    /// Launches what tells a step how many tokens it fetches and attends to.
    pub(super) fn launch_budget(&self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let Shape { batch, heads, sinks, ring, .. } = self.shape;
        let (ratio, tokens) = match self.retrieval.budget {
            Budget::Ratio(ratio) => (ratio, 0),
            Budget::Tokens(tokens) => (0.0, tokens as u32),
        };
        let arguments = BudgetArguments {
            exact_lengths: sequences.exact_lengths.pointer(),
            coded_lengths: sequences.coded_lengths.pointer(),
            ks: self.scratch.ks.pointer(),
            counts: self.scratch.counts.pointer(),
            attended: self.scratch.attended.pointer(),
            ratio,
            tokens,
            reserved: (sinks + ring) as u32,
            sequences: batch as u32,
            heads: heads as u32,
        };
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`.
        Ok(unsafe { self.kernels.budget.launch(gpu.stream(), Grid::new([1, 1, 1])?, 32, false, &arguments) }?)
    }

    /// Launches the choice of a layer's tokens.
    pub(super) fn launch_search(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let Shape { batch, heads, head_dim, stored, most, .. } = self.shape;
        let Scratch { ks, luts, tokens, found, search, .. } = &self.scratch;
        let lut = LutArguments {
            batch,
            heads,
            queries,
            scale: 1.0 / (head_dim as f32).sqrt(),
            centroids: self.centroids(layer),
            luts: luts.pointer(),
        };
        let search = SearchArguments {
            batch,
            heads,
            capacity: stored,
            luts: luts.pointer(),
            codes: self.codes(layer),
            lengths: sequences.coded_lengths.pointer(),
            ks: ks.pointer(),
            sinks: 0,
            recent: 0,
            workspace: search.pointer(),
            tokens: tokens.pointer(),
            tokens_len: most,
            counts: found.pointer(),
            stats: None,
            pdl: true,
        };
        // SAFETY: the buffers have the lengths of `new`; the decoder keeps lengths within the capacity. The
        // tables are launched without PDL, so that queries and `ks` are complete when they start; they write
        // neither codes nor lengths nor `ks`. The background stream writes codes of later tokens only.
        unsafe {
            self.kernels.lut.launch(gpu.stream(), &lut)?;
            self.kernels.search.launch(gpu.stream(), &search)?;
        }
        Ok(())
    }

    /// Launches the copy of the chosen rows that are not on the device from the host to their slots, which are
    /// behind the exact rows.
    pub(super) fn launch_gather(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, sinks, ring, stored, most, .. } = self.shape;
        let Rows { keys, values, capacity } = self.rows(layer);
        let behind_exact =
            |rows: DevicePtr<AnyElement>| rows.cast::<u16>().offset((sinks + ring) * head_dim).cast();
        let arguments = GatherArguments {
            heads: batch * heads,
            keys: self.host(Side::Keys, layer).cast(),
            values: self.host(Side::Values, layer).cast(),
            head_rows: stored,
            rows: self.reuse.misses(),
            places: Some(self.reuse.places()),
            counts: Some(self.reuse.miss_counts()),
            list_len: most,
            keys_out: behind_exact(keys),
            values_out: behind_exact(values),
            out_len: capacity,
        };
        // SAFETY: the buffers have the lengths of `new`, and the last slot is a head's last row. Slots are below
        // the number of tokens, which is at most `most`, and differ. The search has written tokens below
        // `stored`, whose rows this stream has written to the host.
        Ok(unsafe { self.kernels.gather.launch(gpu.stream(), &arguments) }?)
    }

    /// Copies the rows of the layer's tokens whose turn it is to the host, and their keys to the quantizer.
    pub(super) fn launch_leave(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, sinks, ring, stored, .. } = self.shape;
        let Rows { keys, values, capacity } = self.rows(layer);
        let arguments = LeaveArguments {
            keys,
            values,
            host_keys: self.host(Side::Keys, layer),
            host_values: self.host(Side::Values, layer),
            staged: self.staged(layer),
            firsts: self.turns.firsts(layer),
            counts: self.turns.counts(layer),
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            capacity: capacity as u32,
            stored: stored as u32,
            chunks: (head_dim / 8) as u32,
        };
        let grid = Grid::new([heads, batch, 2])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The plan
        // counts at most a ring of tokens, which come before tokens that fit. The background stream no longer
        // reads the staged keys: the event of the layer's last turn has been waited for.
        Ok(unsafe { self.kernels.leave.launch(gpu.stream(), grid, 256, false, &arguments) }?)
    }

    /// Encodes the staged keys of a layer.
    pub(super) fn launch_encode(&self, stream: &CudaStream, layer: usize) -> Result<()> {
        let Shape { batch, heads, head_dim, ring, stored, .. } = self.shape;
        let arguments = EncodeGenericArguments {
            batch,
            heads,
            max_count: ring,
            vectors: self.staged(layer).cast(),
            strides: [heads * ring * head_dim, ring * head_dim, head_dim],
            centroids: self.centroids(layer),
            firsts: self.turns.firsts(layer),
            counts: self.turns.counts(layer),
            capacity: stored,
            codes: self.codes(layer),
        };
        // SAFETY: the buffers have the lengths of `new`. The plan counts at most a ring of tokens, whose
        // codes fit since they come before tokens that fit. The search reads only codes before `firsts` until
        // the layer's next turn, which waits for this; bits of those keep their values.
        Ok(unsafe { self.kernels.encode.launch(stream.cu_stream(), &arguments) }?)
    }

    /// Launches attention to the exact rows and the chosen ones behind them.
    pub(super) fn launch_attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let Rows { keys, values, capacity } = self.rows(layer);
        let Shape { batch, heads, group, head_dim, .. } = self.shape;
        let arguments = AttendArguments {
            batch,
            heads,
            group,
            capacity,
            keys,
            values,
            queries,
            lengths: self.scratch.attended.pointer(),
            key_ranks: self.ranks.pointer(),
            value_ranks: self.ranks.pointer(),
            key_offsets: self.offsets.pointer(),
            value_offsets: self.offsets.pointer(),
            key_rank_sum: heads * head_dim,
            value_rank_sum: heads * head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out,
            log_sum_exp: None,
            pdl: true,
            workspace: self.scratch.attend.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`, ranks and offsets are those of full rank, and lengths
        // are at most the capacity: where tokens are fetched, sinks and ring are full. `pq::Gather`, which
        // runs before, writes rows, and they are read after the PDL wait; `budget` has written the lengths.
        Ok(unsafe { self.kernels.attend.launch(gpu.stream(), &arguments) }?)
    }
}
