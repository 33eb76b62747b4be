//! RoPE of queries and keys, and the append of keys and values to the rows of a cache: `append` of
//! `kernels/rows.cu`.

use kv_device::{Chunk, Rows};
use kv_gpu::{DevicePtr, Grid, Kernel};
use kv_model::Config;

use super::rows::{THREADS, blocks, program};
use super::{Context, StepRows};
use crate::Result;

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    qkv: DevicePtr<u16>,
    bias: Option<DevicePtr<f32>>,
    cos: DevicePtr<f32>,
    sin: DevicePtr<f32>,
    queries: DevicePtr<u16>,
    keys: DevicePtr<u16>,
    values: DevicePtr<u16>,
    positions: Option<DevicePtr<u32>>,
    slots: Option<DevicePtr<u32>>,
    rows: u32,
    position: u32,
    query_heads: u32,
    heads: u32,
    capacity: u32,
}

const _: () = assert!(size_of::<Arguments>() == 96);

/// Products with `W_Q`, `W_K` and `W_V`, and the bias that is still to be added.
#[derive(Clone, Copy)]
pub(crate) struct Qkv {
    /// Elements (tokens, query heads and heads of keys and values, head_dim).
    pub elements: DevicePtr<u16>,
    pub bias: Option<DevicePtr<f32>>,
}

impl Qkv {
    /// Those from token `first` on.
    pub const fn from(self, first: usize, config: &Config) -> Self {
        let row = config.q_dim() + 2 * config.kv_dim();
        Self { elements: self.elements.offset(first * row), ..self }
    }
}

/// The kernel.
pub(crate) struct Append(Kernel);

impl Append {
    pub fn new(context: &Context<'_>) -> Result<Self> {
        let program = program(context.weights.element, context.weights.config.head_dim);
        Ok(Self(context.gpu.device().kernel(&program, "append", 0)?))
    }

    /// Appends a token to each of `count` sequences.
    ///
    /// # Safety
    /// As [`StepRows`] says, for `count` sequences; the [contract of a launch](DevicePtr#launches) holds.
    pub unsafe fn step(&self, context: &Context<'_>, qkv: Qkv, to: &StepRows, count: usize) -> Result<()> {
        let arguments = Arguments {
            positions: Some(to.positions),
            slots: Some(to.slots),
            ..arguments(context, qkv, to.queries, &to.rows, to.angles)
        };
        // SAFETY: the caller's contract.
        unsafe { self.launch(context, &arguments, count) }
    }

    /// Appends the tokens of a chunk, which has the `qkv`, to the rows of its sequence.
    ///
    /// # Safety
    /// The rows and the tables of angles have room for the chunk's end, and queries and `qkv` are those of
    /// its tokens; the [contract of a launch](DevicePtr#launches) holds.
    pub unsafe fn chunk(
        &self,
        context: &Context<'_>,
        qkv: Qkv,
        chunk: &Chunk,
        queries: DevicePtr<u16>,
        (rows, angles): (&Rows, [DevicePtr<f32>; 2]),
    ) -> Result<()> {
        let arguments =
            Arguments { position: chunk.position as u32, ..arguments(context, qkv, queries, rows, angles) };
        // SAFETY: the caller's contract.
        unsafe { self.launch(context, &arguments, chunk.count) }
    }

    unsafe fn launch(&self, context: &Context<'_>, arguments: &Arguments, rows: usize) -> Result<()> {
        let config = &context.weights.config;
        let arguments = Arguments { rows: rows as u32, ..*arguments };
        // A thread has eight components of the first half of a head.
        let parts = (config.q_dim() + 2 * config.kv_dim()) / 16;
        let grid = Grid::new([blocks(rows * parts), 1, 1])?;
        // SAFETY: the structure is the kernel's argument; the rest is the caller's contract.
        Ok(unsafe { self.0.launch(context.gpu.stream(), grid, THREADS, true, &arguments) }?)
    }
}

/// Arguments of no rows, from position 0 on.
fn arguments(
    context: &Context<'_>,
    Qkv { elements, bias }: Qkv,
    queries: DevicePtr<u16>,
    rows: &Rows,
    [cos, sin]: [DevicePtr<f32>; 2],
) -> Arguments {
    let config = &context.weights.config;
    Arguments {
        qkv: elements,
        bias,
        cos,
        sin,
        queries,
        keys: rows.keys.cast(),
        values: rows.values.cast(),
        positions: None,
        slots: None,
        rows: 0,
        position: 0,
        query_heads: config.n_heads as u32,
        heads: config.n_kv_heads as u32,
        capacity: rows.capacity as u32,
    }
}
