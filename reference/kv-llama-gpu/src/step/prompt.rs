//! Prefill: the tokens of prompts, layer by layer.
//!
//! Prompts run in segments of groups of pieces ([`plan`]). A segment passes through one layer after the
//! other, and through a layer in groups, whose products run together; a piece, a chunk of one prompt, is what
//! attends and what a cache takes. A layer's weights are thus unpacked once per segment, and a cache that
//! keeps rows elsewhere restores those before a segment once per layer, not once per chunk.

mod launch;
mod plan;

use kv_device::{Allocating, Buffer};
use kv_gpu::Kernel;
use kv_gpu::svd::{AttendShape, Prefill};

use super::{Activations, Decoder};
use crate::Result;
use crate::products::{self, Append, Context, PromptProducts};
use plan::{Group, Segment, Sizes, segments};

/// Kernels and buffers for segments of up to some sizes, made by the first prompts.
pub(super) struct Prompts {
    sizes: Sizes,
    columns: Option<usize>, // of products with packed weights
    products: PromptProducts,
    attend: Prefill,
    workspace: Buffer<u8>, // of `attend`
    embed: Kernel,
    append: Append,
    ids: Buffer<u32>,      // (segment,)
    residual: Buffer<f32>, // (segment, hidden)
    queries: Buffer<u16>,  // (group, n_heads, head_dim)
    attended: Buffer<u16>, // (group, n_heads, head_dim)
    lengths: Buffer<u32>,  // (pieces, LENGTHS): tokens with a piece, at COUNT those of the piece, at ONE 1
    ranks: Buffer<u32>,    // (n_kv_heads,)
    offsets: Buffer<u64>,  // (n_kv_heads,)
}

/// Words of a piece's `lengths`.
const LENGTHS: usize = 12;

/// Tokens to append to a sequence of `start` tokens.
pub(super) struct Prompt<'a> {
    pub sequence: usize,
    pub start: usize,
    pub tokens: &'a [u32],
}

impl Prompt<'_> {
    /// Length of the sequence, the prompt included.
    pub const fn end(&self) -> usize {
        self.start + self.tokens.len()
    }
}

impl Prompts {
    fn new(context: &Context<'_>, sizes: Sizes, columns: Option<usize>) -> Result<Self> {
        let _purpose = Allocating::new("prompts");
        let Context { gpu, weights, .. } = context;
        let (config, element) = (&weights.config, weights.element);
        let (heads, head_dim, q_dim) = (config.n_kv_heads, config.head_dim, config.q_dim());
        let attend = Prefill::new(gpu.device(), AttendShape { dim: head_dim, element })?;
        let offsets: Vec<u64> = (0..heads).map(|head| (head * head_dim) as u64).collect();
        Ok(Self {
            sizes,
            columns,
            products: match columns {
                Some(columns) => PromptProducts::fused(context, columns)?,
                None => PromptProducts::rows(context, sizes.group)?,
            },
            workspace: Buffer::zeros(gpu, attend.workspace_len())?,
            attend,
            embed: gpu.device().kernel(&products::program(element, head_dim), "embed", 0)?,
            append: Append::new(context)?,
            ids: Buffer::zeros(gpu, sizes.segment)?,
            residual: Buffer::zeros(gpu, sizes.segment.saturating_mul(config.hidden_size))?,
            queries: Buffer::zeros(gpu, sizes.group.saturating_mul(q_dim))?,
            attended: Buffer::zeros(gpu, sizes.group.saturating_mul(q_dim))?,
            lengths: Buffer::zeros(gpu, sizes.pieces * LENGTHS)?,
            ranks: Buffer::of(gpu, &vec![head_dim as u32; heads])?,
            offsets: Buffer::of(gpu, &offsets)?,
        })
    }
}

impl Decoder {
    /// Runs the prompts of sequences, at most `chunk` tokens of a sequence at a time. Attention's output for
    /// each prompt's last token, and its residual stream, are left in the activations of a step.
    pub(super) fn run_prompts(&mut self, prompts: &[Prompt<'_>], chunk: usize) -> Result<()> {
        let segments = segments(prompts, chunk);
        let needed = Sizes::of(&segments);
        let tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let columns = PromptProducts::columns(self.weights.layout, tokens);
        let made = if columns.is_some() { self.short_prompts.take() } else { self.prompts.take() };
        let made = made.filter(|state| state.columns == columns);
        // They only grow, so that prompts of changing sizes soon find room for each of them.
        let sizes = made.as_ref().map_or(needed, |state| state.sizes.max(needed));
        let state = match made.filter(|state| state.sizes == sizes) {
            Some(state) => state,
            None => Prompts::new(&self.context(), sizes, columns)?,
        };
        let run = segments.iter().try_for_each(|segment| self.run_segment(&state, segment));
        let kept = if columns.is_some() { &mut self.short_prompts } else { &mut self.prompts };
        *kept = Some(state);
        run
    }

    /// Runs a segment through all layers.
    fn run_segment(&mut self, state: &Prompts, segment: &Segment) -> Result<()> {
        self.start_segment(state, segment)?;
        for l in 0..self.weights.layers.len() {
            state.products.begin_layer(&self.context(), l)?;
            segment.groups.iter().try_for_each(|group| self.run_layer(state, group, l))?;
        }
        Ok(())
    }

    /// Runs a group through a layer, the last one up to attention, of which the last token of a prompt is
    /// left in the activations of a step.
    fn run_layer(&mut self, state: &Prompts, group: &Group, l: usize) -> Result<()> {
        let hidden = self.weights.config.hidden_size;
        let residual = state.residual.pointer().offset(group.start * hidden);
        let qkv = state.products.qkv(&self.context(), l, residual, group.count)?;
        let is_end = l + 1 == self.weights.layers.len();
        group.pieces.iter().try_for_each(|piece| self.run_piece(state, (qkv, piece), l, is_end))?;
        if is_end {
            return self.keep_last_tokens(state, group);
        }
        let of = (residual, state.attended.pointer());
        state.products.after_attention(&self.context(), l, of, group.count)
    }

    /// Copies the last tokens of the prompts that end in a group to the activations of a step.
    fn keep_last_tokens(&self, state: &Prompts, group: &Group) -> Result<()> {
        let (gpu, config) = (&*self.gpu, &self.weights.config);
        let (hidden, q_dim) = (config.hidden_size, config.q_dim());
        let Activations { residual, attended, .. } = &self.activations;
        group.pieces.iter().filter(|piece| piece.is_last).try_for_each(|piece| {
            let (i, last) = (piece.chunk.sequence, piece.start + piece.chunk.count - 1);
            residual.copy(gpu, i * hidden, &state.residual, (group.start + last) * hidden, hidden)?;
            Ok(attended.copy(gpu, i * q_dim, &state.attended, last * q_dim, q_dim)?)
        })
    }
}
