//! k-means in every subspace of every set at once, with fixed-point sums.

use cudarc::driver::sys::CUstream;
use pq_core::PqShape;

use super::nearest::{TILE, defines, shared_bytes};
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::{Device, Error, Program, VectorElement};

/// Vectors of a block: `PART` of the kernels.
const PART: usize = 2048;
/// Bytes of `State` of the kernels.
const STATE_BYTES: usize = 16;

/// Compile-time shape of [`Train`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainShape {
    /// The quantizer.
    pub quantizer: PqShape,
    /// Element type of the vectors.
    pub element: VectorElement,
}

impl TrainShape {
    /// The kernels, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the centroids of a subspace do not fit the shared memory of a block.
    pub fn program(&self) -> Result<Program, Error> {
        let defines = defines(self.quantizer, self.element, self.shared_bytes())?;
        Ok(Program::new(source!("pq_train.cu"), &defines))
    }

    /// Bytes of `Shared` of the kernels.
    fn shared_bytes(&self) -> usize {
        let (ksub, dsub) = (self.quantizer.ksub(), self.quantizer.dsub());
        let sums = (4 * ksub).saturating_mul(dsub + 1);
        shared_bytes(self.quantizer).saturating_add(sums).saturating_add(7 + 8 * TILE / 32) / 8 * 8
    }
}

const OPERATION: Operation = Operation("pq::Train");

/// Pointers and sizes of one launch of [`Train`].
#[derive(Clone, Copy, Debug)]
pub struct TrainArguments {
    /// Number of sets of vectors, such as the heads of a layer. Each gets its own codebook.
    pub sets: usize,
    /// Number of vectors of a set, at least 1.
    pub n: usize,
    /// Elements (sets, n, dim), with the strides below and a contiguous last dimension. NaN and infinity
    /// count as 0.
    pub vectors: DevicePtr<AnyElement>,
    /// Strides of sets and vectors in elements.
    pub strides: [usize; 2],
    /// `u32` (ksub,): indices of the vectors that are the initial centroids of every set, for example drawn
    /// at random. Without it, training starts from the contents of `centroids`.
    pub starts: Option<DevicePtr<u32>>,
    /// `f32` (sets, m, ksub, dsub), written.
    pub centroids: DevicePtr<f32>,
    /// `f64` (sets, m), written: the sum of squared errors before the last update of the centroids.
    pub errors: Option<DevicePtr<f64>>,
    /// Maximum number of iterations; 0 counts as 1.
    pub iterations: usize,
    /// A subspace stops when an iteration lowers its error by no more than this fraction.
    pub tolerance: f64,
    /// Bytes ([`Train::workspace_len`],), overwritten.
    pub workspace: DevicePtr<u8>,
}

/// `Arguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    vectors: DevicePtr<AnyElement>,
    starts: Option<DevicePtr<u32>>,
    centroids: DevicePtr<f32>,
    errors: Option<DevicePtr<f64>>,
    states: DevicePtr<u8>,
    sums: DevicePtr<i64>,
    part_errors: DevicePtr<f64>,
    set_stride: u64,
    vector_stride: u64,
    tolerance: f64,
    n: u32,
    parts: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 88);

/// `pq_core::train_batch` from given centroids or vectors: Lloyd's k-means, batched over sets and subspaces,
/// each of which stops independently. A launch does not synchronize. The budget is the number of iterations;
/// [`pq_core::ClusteringCost`] computes how many overlap with a prefill.
///
/// Sums are fixed-point integers in units of 2^-20 of the subspace's largest magnitude, so that two runs give
/// the same bytes.
///
/// # Cost
/// iterations * n * ksub * dim multiply-adds per set.
/// # Source
/// Jégou, Douze, Schmid, TPAMI 2011; PQCache (arXiv 2407.12820), 3.3.
pub struct Train {
    start: Kernel,
    largest: Kernel,
    assign: Kernel,
    update: Kernel,
    shape: TrainShape,
}

impl Train {
    /// Compiles the kernels for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: TrainShape) -> Result<Self, Error> {
        let program = shape.program()?;
        Ok(Self {
            start: device.kernel(&program, "pq_train_start", 0)?,
            largest: device.kernel(&program, "pq_train_largest", 0)?,
            assign: device.kernel(&program, "pq_train_assign", shape.shared_bytes())?,
            update: device.kernel(&program, "pq_train_update", 0)?,
            shape,
        })
    }

    /// Bytes of workspace for `sets` sets of `n` vectors.
    #[must_use]
    pub fn workspace_len(&self, sets: usize, n: usize) -> usize {
        let quantizer = self.shape.quantizer;
        let pair = STATE_BYTES + 8 * quantizer.ksub() * (quantizer.dsub() + 1) + 8 * n.div_ceil(PART);
        sets.saturating_mul(quantizer.m()).saturating_mul(pair)
    }

    /// Launches the training on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for no vectors or sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer but `vectors` aligned to 8
    /// bytes. Starts are below `n`: the kernels do not clamp them.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &TrainArguments) -> Result<(), Error> {
        let (a, quantizer) = (arguments, self.shape.quantizer);
        if a.n == 0 {
            return Err(OPERATION.error("no vectors"));
        }
        if a.sets == 0 {
            return Ok(());
        }
        let n = OPERATION.in_32_bits("vectors of a set", a.n)?;
        let parts = a.n.div_ceil(PART);
        let grid_of =
            |blocks| OPERATION.grid(&[("blocks", blocks), ("subspaces", quantizer.m()), ("sets", a.sets)]);
        let (start, largest, assign) = (grid_of(4)?, grid_of(parts.min(32))?, grid_of(parts)?);
        let update = OPERATION.grid(&[("subspaces", quantizer.m()), ("sets", a.sets)])?;
        let pairs = a.sets * quantizer.m(); // no overflow: the grids bound both factors
        let sums = a.workspace.offset(pairs * STATE_BYTES).cast::<i64>();
        let kernel_arguments = KernelArguments {
            vectors: a.vectors,
            starts: a.starts,
            centroids: a.centroids,
            errors: a.errors,
            states: a.workspace,
            sums,
            part_errors: sums.offset(pairs * quantizer.ksub() * (quantizer.dsub() + 1)).cast(),
            set_stride: a.strides[0] as u64,
            vector_stride: a.strides[1] as u64,
            tolerance: a.tolerance,
            n,
            parts: parts as u32,
        };
        let threads = TILE as u32;
        // SAFETY: the structure is the kernels' argument; the caller upholds the contract of its pointers.
        unsafe {
            let launch =
                |kernel: &Kernel, grid| kernel.launch(stream, grid, threads, false, &kernel_arguments);
            launch(&self.start, start)?;
            launch(&self.largest, largest)?;
            for _ in 0..a.iterations.max(1) {
                launch(&self.assign, assign)?;
                launch(&self.update, update)?;
            }
        }
        Ok(())
    }
}
