//! The matrix products of a decode step: `kernels/gemv.cu`.

use kv_device::Gpu;
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use super::weights::DeviceMatrix;
use crate::{Error, Result};

/// Maximum columns (sequences) of a launch.
pub(crate) const MOST_COLUMNS: usize = 32;

/// The deepest ring of a warp, in chunks.
const MOST_DEPTH: usize = 6;

/// The kind of input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// Elements, used unchanged.
    Elements,
    /// The residual stream, to be normalized.
    Residual,
}

/// The epilogue of the product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// Added to the residual stream.
    Add,
    /// SwiGLU of gate and up, which are paired rows.
    SwiGlu,
    /// RoPE of queries and keys; keys and values are appended to the rows of a cache.
    Rope,
    /// Queries, keys and values, stored as elements.
    Heads,
    /// Stored in `f32`.
    Store,
}

/// Compile-time shape of a [`Gemv`].
#[derive(Clone, Copy)]
pub(crate) struct GemvShape {
    pub n_in: usize,
    pub columns: usize,
    pub element: Element,
    pub head_dim: usize,
    pub input: Input,
    pub output: Output,
}

impl GemvShape {
    fn tiles(&self) -> usize {
        self.columns.div_ceil(8)
    }

    /// Warps of a block: more columns need more registers.
    const fn warps(&self) -> usize {
        if self.columns <= 8 { 16 } else { 8 }
    }

    /// Bytes of shared memory: `Shared` of the kernel, which asserts that it agrees.
    fn shared_bytes(&self, depth: usize) -> usize {
        let column_lanes = (4 * self.columns).min(32);
        let stage = 16 * (4 * 32 + 2 * self.tiles() * column_lanes);
        self.warps() * depth * stage + 2 * self.warps() * 8 * self.tiles() * 20 * 4 + 8 * self.tiles() * 4
    }

    /// The deepest ring that fits.
    fn depth(&self, shared_memory: usize) -> usize {
        (1..=MOST_DEPTH).rev().find(|&depth| self.shared_bytes(depth) <= shared_memory).unwrap_or(1)
    }

    /// The kernel for blocks of up to `shared_memory` bytes.
    pub fn program(&self, shared_memory: usize) -> Program {
        let depth = self.depth(shared_memory);
        let output = match self.output {
            Output::Add => "ADD",
            Output::SwiGlu => "SWIGLU",
            Output::Rope => "ROPE",
            Output::Heads => "HEADS",
            Output::Store => "STORE",
        };
        let defines = [
            ("N_IN", self.n_in),
            ("COLUMNS", self.columns),
            ("ELEMENT", self.element as usize),
            ("HEAD_DIM", self.head_dim),
            ("WARPS", self.warps()),
            ("DEPTH", depth),
            ("SHARED_BYTES", self.shared_bytes(depth)),
        ];
        Program::own("gemv.cu", include_str!("kernels/gemv.cu"), &[], &defines)
            .define_if(self.input == Input::Residual, "NORM")
            .define_if(true, output)
    }
}

/// `Arguments` of the kernel; those that an output does not use are `None`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct GemvArguments {
    pub weight: DevicePtr<u16>,
    pub bias: Option<DevicePtr<f32>>,
    pub input: DevicePtr<u16>,
    pub squares: Option<DevicePtr<f32>>,
    pub residual: Option<DevicePtr<f32>>,
    pub norm: Option<DevicePtr<f32>>,
    pub out: Option<DevicePtr<u16>>,
    pub squares_out: Option<DevicePtr<f32>>,
    pub keys: Option<DevicePtr<AnyElement>>,
    pub values: Option<DevicePtr<AnyElement>>,
    pub cos: Option<DevicePtr<f32>>,
    pub sin: Option<DevicePtr<f32>>,
    pub positions: Option<DevicePtr<u32>>,
    pub slots: Option<DevicePtr<u32>>,
    pub rows: u32,
    pub columns: u32,
    pub query_heads: u32,
    pub heads: u32,
    pub capacity: u32,
    pub eps: f32,
    pub stride: u32,
}

const _: () = assert!(size_of::<GemvArguments>() == 144);

impl GemvArguments {
    /// The product of a matrix with `columns` inputs, with no arguments of an output yet.
    pub fn of(matrix: &DeviceMatrix, input: DevicePtr<u16>, columns: usize) -> Self {
        Self {
            weight: matrix.weight.pointer(),
            bias: matrix.bias(),
            input,
            squares: None,
            residual: None,
            norm: None,
            out: None,
            squares_out: None,
            keys: None,
            values: None,
            cos: None,
            sin: None,
            positions: None,
            slots: None,
            rows: matrix.rows as u32,
            columns: columns as u32,
            query_heads: 0,
            heads: 0,
            capacity: 0,
            eps: 0.0,
            stride: 0,
        }
    }
}

/// The product kernel of one shape.
pub(crate) struct Gemv {
    kernel: Kernel,
    threads: u32,
    sm_count: usize,
}

impl Gemv {
    /// `reserved` bytes of a multiprocessor's shared memory stay free for other kernels.
    pub fn new(gpu: &Gpu, shape: GemvShape, reserved: usize) -> Result<Self> {
        if shape.columns == 0 || shape.columns > MOST_COLUMNS || !shape.n_in.is_multiple_of(8) {
            return Err(Error::Argument(format!(
                "a step of {} sequences over {} inputs: only 1 to {MOST_COLUMNS}, and multiples of 8",
                shape.columns, shape.n_in
            )));
        }
        let memory = gpu.device().shared_memory().saturating_sub(reserved);
        let shared = shape.shared_bytes(shape.depth(memory));
        let kernel = gpu.device().kernel(&shape.program(memory), "gemv", shared)?;
        Ok(Self { kernel, threads: 32 * shape.warps() as u32, sm_count: gpu.device().sm_count() })
    }

    /// Launches it.
    ///
    /// # Safety
    /// The arguments are those that the shape's input and output use, with the lengths that the kernel
    /// states; the [contract of a launch](DevicePtr#launches) holds.
    pub unsafe fn launch(&self, gpu: &Gpu, arguments: &GemvArguments) -> Result<()> {
        let grid = Grid::new([(arguments.rows as usize).div_ceil(16).min(self.sm_count), 1, 1])?;
        // SAFETY: the caller's contract.
        Ok(unsafe { self.kernel.launch(gpu.stream(), grid, self.threads, true, arguments) }?)
    }
}
