//! The choice of the next tokens: the most likely ones, or a draw.

use std::ops::Range;

use kv_device::{Buffer, Gpu};
use kv_gpu::{DevicePtr, Element, Grid, Kernel, Program};
use kv_llama::Sampling;
use kv_model::Config;

use super::{Decoder, Sequences};
use crate::{Error, Result};

/// Blocks per sequence of the argmax.
const BLOCKS: usize = 32;

/// Threads of a block of `pick` and of `draw`: `THREADS` of `draw`.
const PICK_THREADS: u32 = 256;
const DRAW_THREADS: u32 = 1024;

/// The choice from logits that hold a NaN or an infinity: `NO_TOKEN` of the kernels. It ends the sequence.
pub(super) const NO_TOKEN: u32 = u32::MAX;

const HEADERS: &[(&str, &str)] = &[("picks.cuh", include_str!("../kernels/picks.cuh"))];

/// `begin` and `pick`.
pub(crate) fn step_program(element: Element) -> Program {
    Program::own("step.cu", include_str!("../kernels/step.cu"), HEADERS, &[("ELEMENT", element as usize)])
}

/// `draw`.
pub(crate) fn draw_program() -> Program {
    Program::own("draw.cu", include_str!("../kernels/draw.cu"), HEADERS, &[])
}

/// The choice of the next tokens, on the device.
pub(super) struct Picks {
    pick: Kernel,
    draw: Kernel,
    sampling: Sampling,
    picked: Buffer<u32>, // (batch, most)
    counts: Buffer<u32>, // (batch,)
    ends: Buffer<u32>,
    best: Buffer<f32>,    // (batch, BLOCKS)
    best_at: Buffer<u32>, // (batch, BLOCKS)
    arrived: Buffer<u32>, // (batch,)
    vocab: usize,
    most: usize, // tokens per sequence, at most
}

/// `Picks` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct PicksArguments {
    tokens: DevicePtr<u32>,
    positions: DevicePtr<u32>,
    running: DevicePtr<u32>,
    picked: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    ends: DevicePtr<u32>,
    n_ends: u32,
    most: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PickArguments {
    logits: DevicePtr<f32>,
    picks: PicksArguments,
    best: DevicePtr<f32>,
    best_at: DevicePtr<u32>,
    arrived: DevicePtr<u32>,
    vocab: u32,
    first: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DrawArguments {
    logits: DevicePtr<f32>,
    picks: PicksArguments,
    seed: u64,
    temperature: f32,
    top_p: f32,
    vocab: u32,
    first: u32,
}

const _: () = assert!(size_of::<PickArguments>() == 96 && size_of::<DrawArguments>() == 88);

impl Picks {
    /// Greedy sampling of up to `most` tokens for each sequence of a batch.
    pub fn new(gpu: &Gpu, config: &Config, element: Element, batch: usize, most: usize) -> Result<Self> {
        let words = |n| Buffer::<u32>::zeros(gpu, n);
        Ok(Self {
            pick: gpu.device().kernel(&step_program(element), "pick", 0)?,
            draw: gpu.device().kernel(&draw_program(), "draw", 0)?,
            sampling: Sampling::GREEDY,
            picked: words(batch * most)?,
            counts: words(batch)?,
            ends: Buffer::of(gpu, &config.eos_tokens)?,
            best: Buffer::zeros(gpu, batch * BLOCKS)?,
            best_at: words(batch * BLOCKS)?,
            arrived: words(batch)?,
            vocab: config.vocab_size,
            most,
        })
    }

    /// Sets the sampling of later launches.
    pub const fn choose(&mut self, sampling: Sampling) {
        self.sampling = sampling;
    }

    /// Clears the picked tokens of these sequences.
    pub fn restart(&mut self, gpu: &Gpu, of: Range<usize>) -> Result<()> {
        Ok(self.counts.write_at(gpu, of.start, &vec![0; of.len()])?)
    }

    /// The picked tokens of every sequence. Waits for the last launch.
    pub fn read(&self, gpu: &Gpu) -> Result<Vec<Vec<u32>>> {
        let (mut counts, mut picked) = (vec![0; self.counts.len()], vec![0; self.picked.len()]);
        self.counts.read_into(gpu, &mut counts)?;
        self.picked.read_into(gpu, &mut picked)?;
        let logs = picked.chunks_exact(self.most).zip(counts);
        Ok(logs.map(|(log, count)| log[..count as usize].to_vec()).collect())
    }

    /// Launches the choice of a token of these sequences from logits (batch, vocab_size).
    pub fn launch(
        &self,
        gpu: &Gpu,
        sequences: &Sequences,
        logits: DevicePtr<f32>,
        of: Range<usize>,
    ) -> Result<()> {
        let picks = PicksArguments {
            tokens: sequences.tokens.pointer(),
            positions: sequences.positions.pointer(),
            running: sequences.running.pointer(),
            picked: self.picked.pointer(),
            counts: self.counts.pointer(),
            ends: self.ends.pointer(),
            n_ends: self.ends.len() as u32,
            most: self.most as u32,
        };
        let (vocab, first) = (self.vocab as u32, of.start as u32);
        let (temperature, top_p, seed) =
            (self.sampling.temperature(), self.sampling.top_p(), self.sampling.seed());
        if temperature == 0.0 {
            let arguments = PickArguments {
                logits,
                picks,
                best: self.best.pointer(),
                best_at: self.best_at.pointer(),
                arrived: self.arrived.pointer(),
                vocab,
                first,
            };
            let grid = Grid::new([BLOCKS, of.len(), 1])?;
            // SAFETY: the structure is the kernel's argument; buffers have the lengths of `new`.
            return Ok(unsafe { self.pick.launch(gpu.stream(), grid, PICK_THREADS, true, &arguments) }?);
        }
        let (temperature, top_p) = (temperature as f32, top_p as f32);
        let arguments = DrawArguments { logits, picks, seed, temperature, top_p, vocab, first };
        let grid = Grid::new([of.len(), 1, 1])?;
        // SAFETY: as above.
        Ok(unsafe { self.draw.launch(gpu.stream(), grid, DRAW_THREADS, true, &arguments) }?)
    }
}

impl Decoder {
    /// Logits (batch, vocab_size) of the last step: those of a sequence may hold a NaN or an infinity, and
    /// those of an empty one are undefined. Waits for the step.
    pub(crate) fn unchecked_logits(&self) -> Result<Vec<f32>> {
        let mut logits = vec![0.0; self.activations.logits.len()];
        self.activations.logits.read_into(&self.gpu, &mut logits)?;
        Ok(logits)
    }

    /// The tokens that the next step feeds, (batch,); `None` of a sequence whose logits held a NaN or an
    /// infinity. Waits for the last step.
    pub(crate) fn choices(&self) -> Result<Vec<Option<u32>>> {
        let mut tokens = vec![0; self.batch];
        self.sequences.tokens.read_into(&self.gpu, &mut tokens)?;
        Ok(tokens.into_iter().map(|token| (token != NO_TOKEN).then_some(token)).collect())
    }

    pub(crate) fn check_finite(&self, finite: bool) -> Result<()> {
        match finite {
            true => Ok(()),
            false => Err(self.not_finite()),
        }
    }

    /// The error of logits that hold a NaN or an infinity.
    pub(crate) fn not_finite(&self) -> Error {
        kv_llama::Error::Logits { model: self.weights.name.clone() }.into()
    }
}
