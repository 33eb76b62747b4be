//! The launches of a step.

use kv_device::{Buffer, Rows, SlotMapping};
use kv_gpu::{DevicePtr, Grid};

use super::super::gemv::{Gemv, GemvArguments};
use super::super::weights::Packed;
use super::{Activations, Decoder, Part};
use crate::Result;

#[derive(Clone, Copy)]
#[repr(C)]
struct BeginArguments {
    embedding: DevicePtr<u16>,
    tokens: DevicePtr<u32>,
    positions: DevicePtr<u32>,
    norm: DevicePtr<f32>,
    residual: DevicePtr<f32>,
    scaled: DevicePtr<u16>,
    squares: DevicePtr<f32>,
    slots: DevicePtr<u32>,
    exact_lengths: DevicePtr<u32>,
    coded_lengths: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    hidden: u32,
    sinks: u32,
    ring: u32,
    leaving: u32,
    max_pages: u32,
    heads: u32,
    capacity: u32,
    vocab: u32,
}

const _: () = assert!(size_of::<BeginArguments>() == 120);

#[derive(Clone, Copy)]
#[repr(C)]
struct ScaleArguments {
    residual: DevicePtr<f32>,
    norm: DevicePtr<f32>,
    scaled: DevicePtr<u16>,
    squares: DevicePtr<f32>,
    hidden: u32,
}

const _: () = assert!(size_of::<ScaleArguments>() == 40);

/// Components of a block of `scale`, a multiple of 32.
const SCALE_THREADS: u32 = 128;

impl Decoder {
    /// Launches the parts of a step.
    pub(super) fn launch(&self, parts: &[Part]) -> Result<()> {
        let has = |part| parts.contains(&part);
        if has(Part::Rest) {
            self.launch_begin()?;
        }
        for (l, layer) in self.weights.layers.iter().enumerate() {
            if has(Part::Products) {
                self.launch_qkv(l, &layer.qkv)?;
            }
            if has(Part::Attention) {
                let Activations { queries, attended, .. } = &self.activations;
                let (queries, out) = (queries.pointer().cast(), attended.pointer().cast());
                let sequences = self.sequences.of_cache();
                // SAFETY: the buffers have the lengths of `new`; `begin` has written lengths within the
                // capacity, and the products the rows.
                unsafe { self.cache.attend(&self.gpu, l, &sequences, queries, out) }?;
            }
            if has(Part::Products) {
                self.launch_after_attention(l)?;
            }
        }
        self.launch_end(parts)
    }

    /// Launches the part of a layer after attention.
    pub(super) fn launch_after_attention(&self, l: usize) -> Result<()> {
        let layers = &self.weights.layers;
        let layer = &layers[l];
        let next = layers.get(l + 1).map_or(&self.weights.norm, |next| &next.attention_norm);
        let Activations { attended, inner, .. } = &self.activations;
        self.launch_add(&self.products.o, &layer.o, attended, &layer.feed_forward_norm)?;
        self.launch_normed(&self.products.gate_up, &layer.gate_up, |a| a.out = Some(inner.pointer()))?;
        self.launch_add(&self.products.down, &layer.down, inner, next)
    }

    /// Launches the parts of a step after the layers.
    pub(super) fn launch_end(&self, parts: &[Part]) -> Result<()> {
        let logits = self.activations.logits.pointer();
        if parts.contains(&Part::Products) {
            self.launch_logits(logits)?;
        }
        match parts.contains(&Part::Rest) {
            true => self.picks.launch(&self.gpu, &self.sequences, logits, 0..self.batch),
            false => Ok(()),
        }
    }

    /// Launches the output projection: logits (batch, vocab_size).
    pub(super) fn launch_logits(&self, logits: DevicePtr<f32>) -> Result<()> {
        let (vocab, shard) = (self.weights.config.vocab_size, self.weights.shard);
        self.launch_normed(&self.products.output, &self.weights.output, |a| {
            a.residual = Some(logits.offset(shard.of(vocab).start));
            a.stride = vocab as u32;
        })?;
        let Some(communicator) = &self.communicator else { return Ok(()) };
        // SAFETY: there is a row for every sequence, of which the product writes the rank's part; all ranks
        // run the same steps.
        unsafe { communicator.gather(self.gpu.stream(), logits, self.batch, vocab) }
    }

    fn launch_begin(&self) -> Result<()> {
        let (sequences, activations) = (&self.sequences, &self.activations);
        let first = self.weights.layers.first().map_or(&self.weights.norm, |layer| &layer.attention_norm);
        let SlotMapping { sinks, ring, leaving } = self.cache.slot_mapping();
        let (Rows { capacity, .. }, pages) = (self.cache.rows(0)?, self.cache.pages());
        let arguments = BeginArguments {
            embedding: self.weights.embedding.pointer(),
            tokens: sequences.tokens.pointer(),
            positions: sequences.positions.pointer(),
            norm: first.pointer(),
            residual: activations.residual.pointer(),
            scaled: activations.scaled.pointer(),
            squares: activations.squares.pointer(),
            slots: sequences.slots.pointer(),
            exact_lengths: sequences.exact_lengths.pointer(),
            coded_lengths: sequences.coded_lengths.pointer(),
            hidden: self.weights.config.hidden_size as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            leaving: leaving as u32,
            pages: pages.map(|pages| pages.table),
            max_pages: pages.map_or(0, |pages| pages.max_pages as u32),
            heads: self.weights.config.n_kv_heads as u32,
            capacity: capacity as u32,
            vocab: self.weights.config.vocab_size as u32,
        };
        // SAFETY: the structure is the kernel's argument; buffers have the lengths of `new`; the cache has
        // pages for the tokens.
        unsafe {
            self.begin.launch(self.gpu.stream(), Grid::new([self.batch, 1, 1])?, 256, false, &arguments)
        }?;
        Ok(())
    }

    fn launch_qkv(&self, l: usize, matrix: &Packed) -> Result<()> {
        let config = &self.weights.config;
        let Rows { keys, values, capacity } = self.cache.rows(l)?;
        let (queries, slots) = (self.activations.queries.pointer(), self.sequences.slots.pointer());
        self.launch_normed(&self.products.qkv, matrix, |a| {
            a.out = Some(queries);
            (a.keys, a.values) = (Some(keys), Some(values));
            (a.cos, a.sin) = (Some(self.cos.pointer()), Some(self.sin.pointer()));
            a.positions = Some(self.sequences.positions.pointer());
            a.slots = Some(slots);
            (a.query_heads, a.heads) = (config.n_heads as u32, config.n_kv_heads as u32);
            a.capacity = capacity as u32;
        })?;
        let Some(transform) = self.cache.transform() else { return Ok(()) };
        let (sequences, rows) = (self.sequences.of_cache(), Rows { keys, values, capacity });
        // SAFETY: the product writes these rows, and nothing else uses them before attention.
        Ok(unsafe { transform.step(&self.gpu, l, &sequences, queries, &rows, (slots, self.batch)) }?)
    }

    /// A product of the normalized residual stream.
    fn launch_normed(
        &self,
        gemv: &Gemv,
        matrix: &Packed,
        complete: impl FnOnce(&mut GemvArguments),
    ) -> Result<()> {
        let Activations { scaled, squares, .. } = &self.activations;
        let mut arguments = GemvArguments::of(matrix, scaled.pointer(), self.batch);
        arguments.squares = Some(squares.pointer());
        arguments.eps = self.weights.config.rms_norm_eps;
        complete(&mut arguments);
        // SAFETY: `complete` adds what the output uses; all buffers have the lengths of `new`, and positions
        // and slots are below the capacities of tables and rows.
        unsafe { gemv.launch(&self.gpu, &arguments) }
    }

    /// Adds a product, of ranks the sum of their products, to the residual stream, and prepares norm `next`.
    fn launch_add(
        &self,
        gemv: &Gemv,
        matrix: &Packed,
        input: &Buffer<u16>,
        next: &Buffer<f32>,
    ) -> Result<()> {
        let Activations { residual, scaled, squares, .. } = &self.activations;
        let mut arguments = GemvArguments::of(matrix, input.pointer(), self.batch);
        arguments.residual = Some(residual.pointer());
        arguments.norm = Some(next.pointer());
        arguments.out = Some(scaled.pointer());
        arguments.squares_out = Some(squares.pointer());
        let hidden = self.weights.config.hidden_size;
        if self.weights.shard.rank() > 0 {
            (arguments.bias, arguments.stride) = (None, hidden as u32);
        }
        // SAFETY: all buffers have the lengths of `build`.
        unsafe { gemv.launch(&self.gpu, &arguments) }?;
        let Some(communicator) = &self.communicator else { return Ok(()) };
        // SAFETY: these are all sequences' rows; all ranks run the same steps.
        unsafe { communicator.sum(self.gpu.stream(), residual.pointer(), self.batch * hidden) }?;
        let arguments = ScaleArguments {
            residual: residual.pointer(),
            norm: next.pointer(),
            scaled: scaled.pointer(),
            squares: squares.pointer(),
            hidden: hidden as u32,
        };
        let grid = Grid::new([hidden.div_ceil(SCALE_THREADS as usize), self.batch, 1])?;
        // SAFETY: the structure is the kernel's argument; buffers have the lengths of `build`.
        Ok(unsafe { self.scale.launch(self.gpu.stream(), grid, SCALE_THREADS, false, &arguments) }?)
    }
}
