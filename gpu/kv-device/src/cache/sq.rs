//! Scalar codes on a device: attention to exact rows and to the codes, as they are.

mod codes;
mod launch;
mod queries;
mod transform;

use kv_attend::owner::{Footprint, Pair, Side};
use kv_gpu::pq::RopeMeanScoresShape;
use kv_gpu::sq::{Attend, AttendShape};
use kv_gpu::{AnyElement, DevicePtr, Element, Kernel, Program};

use super::full_rank::FullRank;
use super::merge::{Merge, Parts};
use super::window::{Window, WindowShape};
use super::{ChunkCache, StepCache};
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::plan::{Heads, ScalarHead, ScalarPlan};
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;
use crate::{Error, Result};
use codes::{Codes, encoder};
use queries::BlockQueries;
use transform::{BlockRows, HeadData};

/// `prepare`, `restore`, `close_up` and `map_values`.
pub(crate) fn program(element: Element, head_dim: usize) -> Program {
    let headers = &[("turn.cuh", include_str!("../kernels/turn.cuh"))];
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("sq.cu", include_str!("../kernels/sq.cu"), headers, &defines)
}

/// Scalar codes: sinks, a window and the tokens whose block is not complete are exact, all others are codes
/// of whole blocks. `svd::Attend` runs over the rows and `sq::Attend` over the codes, and the results are
/// merged.
///
/// Values arrive and leave in their Hadamard basis and without their mean, since both are folded into the
/// model's weights. Keys and queries stay in the model's basis: a step turns its queries into the dual basis
/// of every block. The score of the keys' mean depends on the position alone (`KeyMeans`).
///
/// A block is encoded before the step whose token evicts it, on the stream of the steps, and the rows behind
/// it move up. The host launches this, so it counts steps, and reads the positions when a block may leave.
pub(crate) struct SqCache {
    exact: FullRank,
    attend: Attend,
    merge: Merge,
    queries: BlockQueries,
    close_up: Kernel,
    element: Element,
    window: Window,
    codes: Codes,
    scratch: Scratch,
    coded: Vec<usize>,    // coded tokens of each sequence
    furthest: Vec<usize>, // position of the next token of each sequence, which may have ended before it
    group: usize,
}

/// Scratch memory of a step, shared by all layers.
struct Scratch {
    out: Buffer<u16>,               // (batch, heads, group, head_dim): attention to the codes
    log_sum_exps: [Buffer<f32>; 2], // (batch, heads, group): of the exact tokens, and of the codes
    workspace: Buffer<u8>,
}

/// The shape of attention to the codes.
const fn kernel(shape: &CacheShape, plan: &ScalarPlan) -> AttendShape {
    AttendShape {
        dim: shape.head_dim,
        key_slots: plan.key_slots,
        uniform_keys: false, // heads have bits by variance
        value_bits: plan.value_bits,
        block: shape.window.batch,
        group: shape.group,
        element: shape.element,
        mean_errors: plan.mean_errors,
        addends: true,
        paged: false,
    }
}

/// Rows for the window and for a block that is not complete without the next token.
const fn window_shape(sizes: &CacheShape) -> WindowShape {
    let block = sizes.window.batch;
    WindowShape { ring: sizes.window.recent + block - 1, leaving: block, ..WindowShape::new(sizes) }
}

/// Rejects windows that do not keep the last token, and codes that the kernels do not support.
pub(crate) fn check(shape: &CacheShape, plan: &ScalarPlan) -> Result<()> {
    let &CacheShape { head_dim: dim, group, element, window, .. } = shape;
    if window.recent == 0 {
        return Err(Error::argument("scalar codes of a token's block need the token: a window of 1 or more"));
    }
    kernel(shape, plan).check()?;
    RopeMeanScoresShape { dim, group, element }.program()?;
    Side::ALL.into_iter().try_for_each(|side| Ok(encoder(shape, plan, side).program().map(drop)?))
}

impl SqCache {
    /// An empty cache; the transforms of the heads, or hashed ones.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new(
        gpu: &Gpu,
        sizes: &CacheShape,
        plan: &ScalarPlan,
        heads: Option<&Heads<ScalarHead>>,
    ) -> Result<Self> {
        let &CacheShape { heads: n_kv_heads, group, head_dim, element, batch, .. } = sizes;
        let attend = Attend::new(&gpu.device, kernel(sizes, plan))?;
        let data = HeadData::new(sizes, plan, heads)?;
        let codes = Codes::new(gpu, sizes, plan, &data)?;
        let n_heads = n_kv_heads * group;
        let close_up = gpu.device.kernel(&program(element, head_dim), "close_up", 0)?;
        let sums = || Buffer::zeros(gpu, batch * n_heads);
        let cache = Self {
            exact: FullRank::new(gpu, sizes, false)?,
            merge: Merge::new(gpu, element, head_dim, group)?,
            queries: BlockQueries::new(gpu, sizes, kernel(sizes, plan), &data.duals, codes.blocks)?,
            close_up,
            window: Window::new(gpu, window_shape(sizes))?,
            scratch: Scratch {
                out: Buffer::zeros(gpu, batch * n_heads * head_dim)?,
                log_sum_exps: [sums()?, sums()?],
                workspace: Buffer::zeros(gpu, attend.workspace_len(batch, n_kv_heads))?,
            },
            coded: vec![0; batch],
            furthest: vec![0; batch],
            attend,
            element,
            codes,
            group,
        };
        gpu.synchronize()?; // tables and maps are copied
        Ok(cache)
    }

    /// Sets one sequence to this length, with all complete blocks outside the window coded.
    fn place(&mut self, sequence: usize, length: usize) {
        self.coded[sequence] = self.window.shape.stored(length);
        self.furthest[sequence] = length;
    }

    /// The block that each sequence's next token evicts, if any.
    ///
    /// # Safety
    /// As `DeviceCache::attend`.
    unsafe fn leaving(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<Option<Vec<bool>>> {
        let shape = self.window.shape;
        let leaves = |(position, coded): (&usize, &usize)| shape.stored(position + 1) > *coded;
        if !self.furthest.iter().zip(&self.coded).any(leaves) {
            return Ok(None);
        }
        // SAFETY: the caller's contract.
        self.furthest = unsafe { sequences.read_positions(gpu, self.furthest.len()) }?;
        let leaving: Vec<bool> = self.furthest.iter().zip(&self.coded).map(leaves).collect();
        Ok(leaving.contains(&true).then_some(leaving))
    }

    /// Encodes a block of these sequences, and moves the rows behind it.
    fn encode(&mut self, gpu: &Gpu, leaving: &[bool]) -> Result<()> {
        let WindowShape { n_layers, head_dim, sinks, leaving: block, .. } = self.window.shape;
        let counts = leaving.iter().map(|&leaves| if leaves { block } else { 0 });
        self.codes.transform.set_spans(gpu, self.coded.iter().copied().zip(counts.clone()))?;
        for layer in 0..n_layers {
            let Rows { keys, values, capacity } = self.window.rows(layer);
            let [keys, values] = [keys, values].map(|rows| rows.cast::<u16>().offset(sinks * head_dim));
            let (sequences, rows) = (leaving.len(), Pair::new(keys, values));
            self.codes.encode(gpu, layer, &BlockRows { sequence: 0, sequences, rows, capacity }, block)?;
            self.launch_close_up(gpu, layer)?;
        }
        self.coded.iter_mut().zip(counts).for_each(|(coded, count)| *coded += count);
        Ok(())
    }

    /// Rows of all tokens of a chunk's sequence, from the first one after the sinks on.
    fn rows_of_all(&self, chunk: &Chunk, all: Rows) -> BlockRows {
        let WindowShape { head_dim, sinks, .. } = self.window.shape;
        let after_sinks = |side| all.side(side).cast::<u16>().offset(sinks * head_dim);
        let (sequence, capacity) = (chunk.sequence, all.capacity);
        BlockRows { sequence, sequences: 1, rows: Pair::of(after_sinks), capacity }
    }
}

impl StepCache for SqCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn slot_mapping(&self) -> SlotMapping {
        self.window.shape.slot_mapping()
    }

    unsafe fn turn_stored(&self, gpu: &Gpu, layer: usize, chunk: &Chunk, rows: &Rows) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.codes.transform.map_values(gpu, layer, chunk, rows) }
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let (rows, lengths) = ((self.rows(layer), None), sequences.exact_lengths);
        let log_sum_exps = self.scratch.log_sum_exps.each_ref().map(Buffer::pointer);
        let WindowShape { batch, heads, .. } = self.window.shape;
        let parts = Parts { out, stored: self.scratch.out.pointer(), log_sum_exps, ranks: None };
        // SAFETY: the buffers have the lengths of `new`, and exact rows are at most those of the window; the
        // caller's contract.
        unsafe {
            self.exact.launch(gpu, rows, lengths, queries, out, Some(log_sum_exps[0]))?;
            self.codes.transform.means.launch(gpu, layer, sequences, queries)?;
            self.queries.launch(gpu, layer, &self.codes, &self.window.shape, sequences, queries)?;
            self.launch_coded(gpu, layer, sequences)?;
            self.merge.launch(gpu, heads * self.group, batch, &parts)
        }
    }

    fn clear(&mut self, _gpu: &Gpu) -> Result<()> {
        (0..self.coded.len()).for_each(|sequence| self.place(sequence, 0));
        Ok(())
    }

    fn end(&mut self, _gpu: &Gpu, sequence: usize) -> Result<()> {
        self.place(sequence, 0);
        Ok(())
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        // SAFETY: the caller's contract.
        if let Some(leaving) = unsafe { self.leaving(gpu, sequences) }? {
            self.encode(gpu, &leaving)?;
        }
        self.furthest.iter_mut().for_each(|position| *position += 1);
        Ok(())
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let shape = self.window.shape;
        Footprint {
            kept: self.codes.bytes_of(shape.stored(tokens)) + shape.exact_bytes(tokens),
            working: self.queries.working_bytes() + self.codes.transform.working_bytes(),
            shared: self.queries.shared_bytes() + self.codes.shared_bytes(),
            ..Footprint::default()
        }
    }

    fn bytes(&self) -> usize {
        self.window.bytes() + self.codes.bytes() + self.queries.working_bytes() + self.queries.shared_bytes()
    }
}

impl Timed for SqCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        self.codes.fill_random(gpu)?;
        (0..self.coded.len()).for_each(|sequence| self.place(sequence, tokens));
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.footprint(tokens).kept
    }
}

impl ChunkCache for SqCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        let all = self.window.open(gpu, layer, chunk)?;
        let coded = self.window.shape.stored(chunk.position);
        self.codes.restore(gpu, layer, &self.rows_of_all(chunk, all), coded)?;
        Ok(all)
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let [first, end] = [chunk.position, chunk.end()].map(|tokens| self.window.shape.stored(tokens));
        // The rows before the chunk that are encoded now were not coded, so they are exact.
        let all = self.rows_of_all(chunk, self.window.prefix()?);
        self.codes.encode_span(gpu, layer, &all, first..end)
    }

    fn set_lengths(&mut self, _gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        lengths.iter().enumerate().for_each(|(sequence, &length)| self.place(sequence, length));
        Ok(())
    }

    fn set_length(&mut self, _gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.place(sequence, length);
        Ok(())
    }
}
