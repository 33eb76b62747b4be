//! When each layer encodes the tokens that its window evicts.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};
use kv_gpu::{DevicePtr, Grid, Kernel, Program};
use pq_core::Window;

use crate::gpu::{Gpu, driver};
use crate::memory::Buffer;
use crate::rows::Sequences;
use crate::{Error, Result};

/// `plan`, `stage` and `exact`.
pub(crate) fn program() -> Program {
    Program::own("evict.cu", include_str!("../kernels/evict.cu"), &[], &[])
}

/// When each layer evicts: every half window, so that a token has a code before the ring overwrites its row.
///
/// Every half ring, a layer encodes the tokens that will be overwritten within a ring, on the low-priority
/// stream, while decoding goes on. Each step evicts some layers, so that all have about the same work.
pub(super) struct Evictions {
    plan: Kernel,
    planned: Buffer<u32>, // (layer, batch): planned tokens after the sinks
    firsts: Buffer<u32>,  // (layer, batch): first tokens of the last eviction
    counts: Buffer<u32>,  // (layer, batch)
    background: Arc<CudaStream>,
    /// Whether encoding runs on the low-priority stream; else decoding waits for it.
    pub asynchronous: bool,
    encoded: Vec<Option<CudaEvent>>, // for each step of a half ring, of the background stream
    steps: usize,
    n_layers: usize,
    batch: usize,
    sinks: usize,
    ring: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PlanArguments {
    positions: DevicePtr<u32>,
    planned: DevicePtr<u32>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    sequences: u32,
    sinks: u32,
    ring: u32,
    horizon: u32,
}

/// An eviction whose tokens are planned.
pub(super) struct Eviction {
    index: usize,
    step: usize,
    n_layers: usize,
}

impl Eviction {
    /// The layers that evict.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        (self.index..self.n_layers).step_by(self.step)
    }
}

impl Evictions {
    /// The schedule of empty layers.
    ///
    /// # Errors
    /// [`Error::Argument`] for a window of less than two tokens or an odd number;
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, n_layers: usize, batch: usize, window: Window) -> Result<Self> {
        let Window { sinks, recent: ring, .. } = window;
        if ring < 2 || !ring.is_multiple_of(2) {
            return Err(Error::Argument(format!("a window of {ring} tokens: an even number, at least two")));
        }
        let words = || Buffer::<u32>::zeros(gpu, n_layers * batch);
        Ok(Self {
            plan: gpu.device.kernel(&program(), "plan", 0)?,
            planned: words()?,
            firsts: words()?,
            counts: words()?,
            background: gpu.device.background_stream()?,
            asynchronous: true,
            encoded: (0..ring / 2).map(|_| None).collect(),
            steps: 0,
            n_layers,
            batch,
            sinks,
            ring,
        })
    }

    /// The first token after the sinks that a layer's last eviction encodes, for every sequence.
    pub fn firsts(&self, layer: usize) -> DevicePtr<u32> {
        self.firsts.pointer().offset(layer * self.batch)
    }

    /// The number of tokens that it encodes: at most a ring.
    pub fn counts(&self, layer: usize) -> DevicePtr<u32> {
        self.counts.pointer().offset(layer * self.batch)
    }

    /// Plans the eviction of the next step, from the end of the tokens that its layers have encoded. None if
    /// no layer evicts.
    pub fn begin(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<Option<Eviction>> {
        let index = self.steps % self.encoded.len();
        self.steps += 1;
        if index >= self.n_layers {
            return Ok(None);
        }
        if let Some(encoded) = self.encoded[index].take() {
            gpu.stream.wait(&encoded).map_err(|e| driver("wait for codes", e))?;
        }
        let eviction = Eviction { index, step: self.encoded.len(), n_layers: self.n_layers };
        eviction.layers().try_for_each(|layer| self.plan(gpu, sequences, layer))?;
        Ok(Some(eviction))
    }

    fn plan(&self, gpu: &Gpu, sequences: &Sequences, layer: usize) -> Result<()> {
        let arguments = PlanArguments {
            positions: sequences.positions,
            planned: self.planned.pointer().offset(layer * self.batch),
            firsts: self.firsts(layer),
            counts: self.counts(layer),
            sequences: self.batch as u32,
            sinks: self.sinks as u32,
            ring: self.ring as u32,
            horizon: self.ring as u32,
        };
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The
        // background stream no longer reads what this writes: its event has been waited for.
        Ok(unsafe { self.plan.launch(gpu.stream(), Grid::new([1, 1, 1])?, 32, false, &arguments) }?)
    }

    /// The stream to encode on, after all work on the decoder's stream.
    pub fn background<'a>(&'a self, gpu: &'a Gpu) -> Result<&'a CudaStream> {
        if !self.asynchronous {
            return Ok(&gpu.stream);
        }
        let staged = gpu.stream.record_event(None).map_err(|e| driver("record staged tokens", e))?;
        self.background.wait(&staged).map_err(|e| driver("wait for staged tokens", e))?;
        Ok(&self.background)
    }

    /// Ends an eviction whose encoding has been launched on [`Self::background`].
    pub fn end(&mut self, eviction: &Eviction) -> Result<()> {
        if self.asynchronous {
            let encoded = self.background.record_event(None);
            self.encoded[eviction.index] = Some(encoded.map_err(|e| driver("record codes", e))?);
        }
        Ok(())
    }

    /// Makes the decoder's stream wait for all pending encoding.
    pub fn wait(&self, gpu: &Gpu) -> Result<()> {
        let encoded = self.background.record_event(None).map_err(|e| driver("record codes", e))?;
        gpu.stream.wait(&encoded).map_err(|e| driver("wait for codes", e))
    }

    /// Restarts with sequences of these lengths, (batch,), whose tokens are all encoded.
    pub fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        let encoded: Vec<usize> = lengths.iter().map(|length| length.saturating_sub(self.sinks)).collect();
        self.restart(gpu, &encoded)
    }

    /// As [`Self::set_lengths`] for one sequence, after all pending encoding; the others go on.
    pub fn set_length(&self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.wait(gpu)?;
        let encoded = [length.saturating_sub(self.sinks) as u32];
        (0..self.n_layers)
            .try_for_each(|layer| self.planned.write_at(gpu, layer * self.batch + sequence, &encoded))
    }

    /// Restarts with sequences of `tokens` tokens, as if the last evictions had been half a ring ago.
    pub fn reset(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        let encoded = (tokens + self.ring / 2).saturating_sub(self.sinks + self.ring);
        self.restart(gpu, &vec![encoded; self.batch])
    }

    /// Restarts with these numbers of encoded tokens after the sinks, (batch,).
    fn restart(&mut self, gpu: &Gpu, encoded: &[usize]) -> Result<()> {
        self.wait(gpu)?;
        self.encoded.iter_mut().for_each(|event| *event = None);
        self.steps = 0;
        let planned: Vec<u32> = encoded.iter().map(|&tokens| tokens as u32).collect();
        self.planned.write(gpu, &planned.repeat(self.n_layers))
    }
}
