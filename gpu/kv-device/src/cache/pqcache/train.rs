//! Codebooks of the prompt: they are trained on the keys of a sequence's first chunk (PQCache 3.3).

use cudarc::driver::CudaStream;
use kv_gpu::pq::{Train, TrainArguments, TrainShape};
use kv_gpu::{AnyElement, DevicePtr};

use super::index::KeysToEncode;
use super::{PqCache, Shape};
use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::plan;
use crate::rows::{Chunk, Rows};

/// The training of a cache's codebooks, which are per sequence.
pub(super) struct Training {
    train: Train,
    plan: plan::Training,
    starts: Buffer<u32>, // (ksub,): indices of the keys that are the initial centroids
    workspace: Buffer<u8>,
    sequences: Vec<Sequence>,
}

#[derive(Clone, Copy)]
struct Sequence {
    is_trained: bool,
    length: Option<usize>, // tokens, as known to the host; none if it is idle
}

impl Sequence {
    const EMPTY: Self = Self { is_trained: false, length: Some(0) };
}

impl Training {
    /// The training of `batch` sequences, if the method trains.
    pub fn new(
        gpu: &Gpu,
        plan: Option<plan::Training>,
        shape: TrainShape,
        batch: usize,
    ) -> Result<Option<Self>> {
        let new = |plan| -> Result<Self> {
            Ok(Self {
                train: Train::new(&gpu.device, shape)?,
                plan,
                starts: Buffer::zeros(gpu, shape.quantizer.ksub())?,
                workspace: Buffer::zeros(gpu, 0)?,
                sequences: vec![Sequence::EMPTY; batch],
            })
        };
        plan.map(new).transpose()
    }

    /// Empties all sequences.
    pub fn clear(&mut self) {
        self.sequences.fill(Sequence::EMPTY);
    }

    /// Lets all sequences use the hashed codebooks, for timing.
    pub fn use_hashed(&mut self) {
        self.sequences.iter_mut().for_each(|sequence| sequence.is_trained = true);
    }

    /// Empties a sequence, which is idle then.
    pub fn invalidate(&mut self, sequence: usize) {
        self.sequences[sequence] = Sequence { length: None, ..Sequence::EMPTY };
    }

    /// Marks a sequence's codebooks as trained in all layers.
    pub fn end(&mut self, sequence: usize) {
        self.sequences[sequence].is_trained = true;
    }

    /// Prepares a training on some of `count` keys of each of `heads` heads.
    fn begin(&mut self, gpu: &Gpu, heads: usize, count: usize) -> Result<()> {
        let ksub = self.starts.len();
        let count = count.div_ceil(self.plan.step(count));
        let starts: Vec<u32> = (0..ksub).map(|i| (i * count / ksub) as u32).collect();
        self.starts.write(gpu, &starts)?;
        let len = self.train.workspace_len(heads, count);
        if self.workspace.len() < len {
            self.workspace = Buffer::zeros(gpu, len)?;
        }
        Ok(())
    }
}

impl PqCache {
    /// Sets a sequence to this length. With fewer keys than a ring it has none to train on: it ended before
    /// the step for which the host has trained it.
    pub(super) fn set_trained_length(&mut self, sequence: usize, length: usize) {
        let enough = self.shape.sinks + self.shape.ring;
        let Some(training) = &mut self.training else { return };
        let sequence = &mut training.sequences[sequence];
        sequence.is_trained &= length >= enough;
        sequence.length = Some(length);
    }

    /// Whether a chunk trains its sequence's codebooks: the first one that completes a ring of keys.
    pub(super) fn trains_on(&self, chunk: &Chunk) -> bool {
        let enough = self.shape.sinks + self.shape.ring;
        (chunk.position < enough && chunk.end() >= enough)
            && self.training.as_ref().is_some_and(|training| !training.sequences[chunk.sequence].is_trained)
    }

    /// Prepares [`Self::train`]. Chunks of several sequences may pass through a layer in turn.
    pub(super) fn begin_training(&mut self, gpu: &Gpu, chunk: &Chunk) -> Result<()> {
        let (trains, count) = (self.trains_on(chunk), self.window.shape.stored_by(chunk).1);
        match &mut self.training {
            Some(training) if trains => training.begin(gpu, self.shape.heads, count),
            _ => Ok(()),
        }
    }

    /// Trains the codebooks of sequences whose prompts were too short, once a ring of keys is complete and
    /// none has left it, and encodes those keys. No step reads codes before that.
    pub(super) fn train_on_ring(&mut self, gpu: &Gpu) -> Result<()> {
        let Shape { n_layers, heads, head_dim, sinks, ring, .. } = self.shape;
        let Some(training) = &mut self.training else { return Ok(()) };
        let is_due = |sequence: &Sequence| !sequence.is_trained && sequence.length == Some(sinks + ring);
        let due: Vec<usize> =
            (0..training.sequences.len()).filter(|&i| is_due(&training.sequences[i])).collect();
        training.sequences.iter_mut().filter_map(|sequence| sequence.length.as_mut()).for_each(|n| *n += 1);
        if due.is_empty() {
            return Ok(());
        }
        self.evictions.wait(gpu)?;
        training.begin(gpu, heads, ring)?;
        self.span.write(gpu, 0, ring)?;
        due.iter().for_each(|&sequence| training.end(sequence));
        for (sequence, layer) in due.into_iter().flat_map(|i| (0..n_layers).map(move |layer| (i, layer))) {
            let Rows { keys, capacity, .. } = self.window.rows(layer);
            let vectors = keys.cast::<u16>().offset((sequence * heads * capacity + sinks) * head_dim).cast();
            self.launch_train(&gpu.stream, layer, sequence, (vectors, capacity, ring))?;
            let keys = KeysToEncode {
                first: sequence,
                batch: 1,
                max_count: ring,
                vectors,
                strides: [0, capacity * head_dim, head_dim],
                firsts: self.span.first(),
                counts: self.span.count(),
            };
            // The ring is full, its first row has the first key after the sinks, and the background stream
            // has been waited for.
            self.index.encode(&gpu.stream, layer, &keys)?;
        }
        Ok(())
    }

    /// Launches the training of a layer's codebooks on the keys stored at a chunk's end, from the rows of all
    /// tokens, if the chunk trains them.
    pub(super) fn train(&self, stream: &CudaStream, layer: usize, chunk: &Chunk) -> Result<()> {
        if !self.trains_on(chunk) {
            return Ok(());
        }
        let Shape { head_dim, sinks, .. } = self.shape;
        let (first, count) = self.window.shape.stored_by(chunk);
        let Rows { keys, capacity, .. } = self.window.prefix()?;
        let vectors = keys.cast::<u16>().offset((sinks + first) * head_dim).cast();
        self.launch_train(stream, layer, chunk.sequence, (vectors, capacity, count))
    }

    /// Launches the training of a layer's codebooks of a sequence on some of `count` keys of each head; a
    /// head has `capacity` rows.
    fn launch_train(
        &self,
        stream: &CudaStream,
        layer: usize,
        sequence: usize,
        (vectors, capacity, count): (DevicePtr<AnyElement>, usize, usize),
    ) -> Result<()> {
        let Shape { heads, head_dim, .. } = self.shape;
        let Some(training) = &self.training else { return Ok(()) };
        let step = training.plan.step(count);
        let n = count.div_ceil(step);
        let arguments = TrainArguments {
            sets: heads,
            n,
            vectors,
            strides: [capacity * head_dim, step * head_dim],
            starts: Some(training.starts.pointer()),
            centroids: self.index.centroids(layer, sequence),
            errors: None,
            iterations: training.plan.iterations,
            tolerance: 0.0,
            workspace: training.workspace.pointer(),
        };
        // SAFETY: the rows have these keys until the stream has been waited for; `begin` has written starts
        // below their number and made room for the workspace.
        unsafe { training.train.launch(stream.cu_stream(), &arguments) }?;
        self.index.adopt(stream, layer, sequence)
    }
}
