//! Codebooks of the prompt: a sequence's first chunk trains those of its keys (PQCache 3.3).

use cudarc::driver::CudaStream;
use kv_gpu::pq::{Train, TrainArguments, TrainShape};

use super::{PqCache, Shape};
use crate::device::Gpu;
use crate::device::cache::{Chunk, Rows};
use crate::device::memory::Buffer;
use crate::method::{Resolved, Retrieval};
use crate::{Error, Result};

/// The training of a cache's codebooks, of which every sequence has its own.
pub(super) struct Training {
    train: Train,
    iterations: Resolved,
    starts: Buffer<u32>, // (ksub,): the keys that the first centroids are
    workspace: Buffer<u8>,
    trained: Vec<bool>, // for each sequence
}

impl Training {
    /// The training of `batch` sequences, if the method trains.
    pub fn new(gpu: &Gpu, retrieval: &Retrieval, shape: TrainShape, batch: usize) -> Result<Option<Self>> {
        let new = |iterations| -> Result<Self> {
            Ok(Self {
                train: Train::new(&gpu.device, shape)?,
                iterations,
                starts: Buffer::zeros(gpu, shape.quantizer.ksub())?,
                workspace: Buffer::zeros(gpu, 0)?,
                trained: vec![false; batch],
            })
        };
        retrieval.training.map(new).transpose()
    }

    /// Makes all sequences have codebooks, or none.
    pub fn set_trained(&mut self, trained: bool) {
        self.trained.fill(trained);
    }

    /// A sequence has codebooks of all layers now.
    pub fn end(&mut self, sequence: usize) {
        self.trained[sequence] = true;
    }

    /// Refuses to go on without codebooks.
    pub fn check(&self, sinks: usize) -> Result<()> {
        match self.trained.iter().position(|trained| !trained) {
            Some(sequence) => Err(Error::Argument(format!(
                "pqcache trains its codebooks on a prompt of more than {sinks} tokens, and sequence {sequence} has \
                 had none: run one first, or pass codebooks=profile"
            ))),
            None => Ok(()),
        }
    }
}

impl PqCache {
    /// Prepares [`Self::train`] of all layers, where the chunk is the first one that its sequence keeps codes of.
    pub(super) fn begin_training(&mut self, gpu: &Gpu, chunk: &Chunk) -> Result<()> {
        let count = self.window.shape.stored_by(chunk).1;
        let Some(training) = &mut self.training else { return Ok(()) };
        if training.trained[chunk.sequence] || count == 0 {
            return Ok(());
        }
        let ksub = self.retrieval.quantizer.ksub();
        let starts: Vec<u32> = (0..ksub).map(|i| (i * count / ksub) as u32).collect();
        training.starts.write(gpu, &starts)?;
        let len = training.train.workspace_len(self.shape.heads, count);
        if training.workspace.len() < len {
            training.workspace = Buffer::zeros(gpu, len)?;
        }
        Ok(())
    }

    /// Launches the training of a layer's codebooks on the keys that a chunk's end stores, from the rows of all
    /// tokens.
    pub(super) fn train(&self, stream: &CudaStream, layer: usize, chunk: &Chunk) -> Result<()> {
        let Shape { heads, head_dim, sinks, .. } = self.shape;
        let (first, count) = self.window.shape.stored_by(chunk);
        let centroids = self.centroids(layer, chunk.sequence);
        let Rows { keys, capacity, .. } = self.window.past()?;
        let Some(training) = &self.training else { return Ok(()) };
        if training.trained[chunk.sequence] || count == 0 {
            return Ok(());
        }
        let arguments = TrainArguments {
            sets: heads,
            n: count,
            vectors: keys.cast::<u16>().offset((sinks + first) * head_dim).cast(),
            strides: [capacity * head_dim, head_dim],
            starts: Some(training.starts.pointer()),
            centroids,
            errors: None,
            iterations: training.iterations.of(count),
            tolerance: 0.0,
            workspace: training.workspace.pointer(),
        };
        // SAFETY: the rows have these keys until the next layer, which waits for this stream; `begin_training`
        // has written starts below their number and made room for the workspace.
        Ok(unsafe { training.train.launch(stream.cu_stream(), &arguments) }?)
    }
}
