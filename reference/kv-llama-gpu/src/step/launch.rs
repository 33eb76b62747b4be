//! The launches of a step.

use kv_device::{Rows, SlotMapping};
use kv_gpu::{DevicePtr, Grid};

use super::{Activations, Decoder, Part};
use crate::Result;
use crate::products::StepRows;

#[derive(Clone, Copy)]
#[repr(C)]
struct BeginArguments {
    embedding: DevicePtr<u16>,
    tokens: DevicePtr<u32>,
    positions: DevicePtr<u32>,
    norm: DevicePtr<f32>,
    residual: DevicePtr<f32>,
    scaled: Option<DevicePtr<u16>>,
    squares: Option<DevicePtr<f32>>,
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

impl Decoder {
    /// Launches the parts of a step.
    pub(super) fn launch(&self, parts: &[Part]) -> Result<()> {
        let has = |part| parts.contains(&part);
        if has(Part::Rest) {
            self.launch_begin()?;
        }
        for l in 0..self.weights.layers.len() {
            if has(Part::Products) {
                self.launch_qkv(l)?;
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
        let Activations { residual, attended, .. } = &self.activations;
        let of = (residual.pointer(), attended.pointer());
        self.products.after_attention(&self.context(), l, of, self.batch)
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
        let residual = self.activations.residual.pointer();
        self.products.logits(&self.context(), residual, logits, self.batch)
    }

    fn launch_begin(&self) -> Result<()> {
        let (sequences, activations) = (&self.sequences, &self.activations);
        let first = self.weights.layers.first().map_or(&self.weights.norm, |layer| &layer.attention_norm);
        let SlotMapping { sinks, ring, leaving } = self.cache.slot_mapping();
        let (Rows { capacity, .. }, pages) = (self.cache.rows(0)?, self.cache.pages());
        let (scaled, squares) = self.products.prepared().unzip();
        let arguments = BeginArguments {
            embedding: self.weights.embedding.pointer(),
            tokens: sequences.tokens.pointer(),
            positions: sequences.positions.pointer(),
            norm: first.pointer(),
            residual: activations.residual.pointer(),
            scaled,
            squares,
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

    fn launch_qkv(&self, l: usize) -> Result<()> {
        let rows = self.cache.rows(l)?;
        let (queries, slots) = (self.activations.queries.pointer(), self.sequences.slots.pointer());
        let to = StepRows {
            queries,
            rows,
            angles: self.angles(),
            positions: self.sequences.positions.pointer(),
            slots,
        };
        let residual = self.activations.residual.pointer();
        self.products.qkv(&self.context(), l, residual, &to, self.batch)?;
        let Some(transform) = self.cache.transform() else { return Ok(()) };
        let sequences = self.sequences.of_cache();
        // SAFETY: the product writes these rows, and nothing else uses them before attention.
        Ok(unsafe { transform.step(&self.gpu, l, &sequences, queries, &rows, (slots, self.batch)) }?)
    }
}
