//! GEMMs of the activations of many tokens with weights: cuBLASLt, loaded at run time like the driver.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys;
use kv_device::{Buffer, Gpu, without_captures};
use kv_gpu::{DevicePtr, Element};

use crate::{Error, Result};

/// Bytes of workspace of a product: NVIDIA's recommendation for sm_90.
const WORKSPACE: usize = 32 << 20;

/// Bytes to which inputs and outputs are aligned.
const ALIGNMENT: u32 = 16;

/// The epilogue of a product.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    /// Stored, as elements.
    Store,
    /// Added to the residual stream, in `f32`.
    Add,
    /// Replaces the residual stream, in `f32`.
    Replace,
}

/// The shape of a product. Each shape has a plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GemmShape {
    /// Tokens: rows of the input and of the output.
    pub tokens: usize,
    /// Inputs of a token: columns of the weights.
    pub n_in: usize,
    /// Outputs of a token: rows of the weights.
    pub n_out: usize,
    /// Outputs from a token's first one to the next token's.
    pub stride: usize,
    pub output: Output,
}

/// `output (tokens, n_out) = input (tokens, n_in) * weight (n_out, n_in)^T`, all of them row-major, summed in
/// `f32`. Launches of a shape can be captured in a graph after the first one, at which the library loads a
/// kernel.
pub(crate) struct Gemm {
    handle: sys::cublasLtHandle_t,
    element: Element,
    workspace: Buffer<u8>,
    plans: RefCell<HashMap<GemmShape, Rc<Plan>>>,
}

/// Rejects a machine without the library for the products of prompts.
///
/// # Errors
/// [`Error::Blas`].
pub fn check_cublas() -> Result<()> {
    // SAFETY: it loads the library, if there is one, and calls nothing in it.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(Error::Blas("none here: install the CUDA toolkit, or the wheel nvidia-cublas".into()))
}

impl Gemm {
    /// # Errors
    /// [`Error::Blas`] if there is no cuBLASLt; [`Error::Device`].
    pub fn new(gpu: &Gpu, element: Element) -> Result<Self> {
        check_cublas()?; // first: calls into a missing library panic
        let workspace = Buffer::zeros(gpu, WORKSPACE)?; // makes the context current, too
        let _alone = without_captures();
        let handle = lt::create_handle().map_err(|e| blas("open", e))?;
        Ok(Self { handle, element, workspace, plans: RefCell::default() })
    }

    /// The plan of a shape, which its first launch makes.
    fn plan(&self, shape: GemmShape) -> Result<Rc<Plan>> {
        if let Some(plan) = self.plans.borrow().get(&shape) {
            return Ok(plan.clone());
        }
        let plan = Rc::new(Plan::new(self.handle, self.element, shape)?);
        self.plans.borrow_mut().insert(shape, plan.clone());
        Ok(plan)
    }

    /// Launches a product.
    ///
    /// # Errors
    /// [`Error::Blas`] for a product that cuBLASLt does not support; [`Error::Device`].
    /// # Safety
    /// Input and weight have the elements of the shape, and the output has its elements or floats; all are
    /// aligned to 16 bytes, an output to its type if its row is not a multiple of 16 bytes. The [contract of
    /// a launch](DevicePtr#launches) holds.
    pub unsafe fn launch<T>(
        &self,
        gpu: &Gpu,
        shape: GemmShape,
        weight: DevicePtr<u16>,
        input: DevicePtr<u16>,
        output: DevicePtr<T>,
    ) -> Result<()> {
        gpu.device().context().bind_to_thread().map_err(|e| Error::driver("use device on this thread", e))?;
        let plan = self.plan(shape)?;
        let (one, beta) = (1.0_f32, if shape.output == Output::Add { 1.0_f32 } else { 0.0 });
        let (alpha, beta) = ((&raw const one).cast(), (&raw const beta).cast());
        let address = |address: u64| address as *mut c_void;
        let out = address(output.address());
        // SAFETY: the caller's contract; the plan is for these types and sizes, handle and plan live as long
        // as `self`, and the library has read the factors when it returns.
        unsafe {
            lt::matmul(
                self.handle,
                plan.product,
                alpha,
                beta,
                address(weight.address()),
                plan.weight.0,
                address(input.address()),
                plan.input.0,
                out,
                plan.output.0,
                out,
                plan.output.0,
                &raw const plan.algorithm,
                address(self.workspace.pointer().address()),
                WORKSPACE,
                gpu.stream().cast(),
            )
        }
        .map_err(|e| blas(&shape.describe(), e))
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        self.plans.get_mut().clear();
        let _alone = without_captures();
        // SAFETY: the handle is destroyed once, after the plans; work on the device does not use it. An error
        // of the device has been reported by the call that caused it.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

/// The descriptors of one product, and the algorithm that the library has chosen for it.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weight: Layout,
    input: Layout,
    output: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// The library's matrices are column-major, so `weight` is (n_in, n_out), transposed, `input` (n_in,
    /// tokens), and the product (n_out, tokens).
    fn new(handle: sys::cublasLtHandle_t, element: Element, shape: GemmShape) -> Result<Self> {
        use sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use sys::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        };
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let GemmShape { tokens, n_in, n_out, stride, output } = shape;
        let failed = |e| blas(&shape.describe(), e);
        let elements = match element {
            Element::F16 => CUDA_R_16F,
            Element::Bf16 => CUDA_R_16BF,
        };
        let results = if output == Output::Store { elements } else { CUDA_R_32F };
        let transposed = 1_i32; // CUBLAS_OP_T
        let most = WORKSPACE;
        // A rank's outputs begin at a multiple of their number in each row.
        let is_aligned = [n_out, stride].iter().all(|n| n.is_multiple_of(ALIGNMENT as usize / 2));
        let unit = if output == Output::Store { size_of::<u16>() } else { size_of::<f32>() };
        let alignment = if is_aligned { ALIGNMENT } else { unit as u32 };
        let weight = Layout::new(elements, n_in, n_out, n_in).map_err(failed)?;
        let input = Layout::new(elements, n_in, tokens, n_in).map_err(failed)?;
        let output = Layout::new(results, n_out, tokens, stride).map_err(failed)?;
        let product = lt::create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F).map_err(failed)?;
        let mut plan =
            Self { product, weight, input, output, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } };
        let preference = lt::create_matmul_pref().map_err(failed)?;
        // SAFETY: all descriptors exist; the attributes have the types that the library's manual gives them.
        let found = unsafe {
            lt::set_matmul_desc_attribute(
                plan.product,
                CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
            .and_then(|()| {
                lt::set_matmul_pref_attribute(
                    preference,
                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    (&raw const most).cast(),
                    size_of_val(&most),
                )
            })
            .and_then(|()| {
                let mut attributes =
                    [CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES]
                        .into_iter();
                attributes.try_for_each(|attribute| {
                    lt::set_matmul_pref_attribute(
                        preference,
                        attribute,
                        (&raw const alignment).cast(),
                        size_of_val(&alignment),
                    )
                })
            })
            .and_then(|()| {
                let Self { product, weight, input, output, .. } = &plan;
                let (weight, input, output) = (weight.0, input.0, output.0);
                lt::get_matmul_algo_heuristic(handle, *product, weight, input, output, output, preference)
            })
        };
        // SAFETY: it exists, and nothing uses it any more.
        let _ = unsafe { lt::destroy_matmul_pref(preference) };
        plan.algorithm = found.map_err(failed)?.algo;
        Ok(plan)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: it exists, and nothing uses it any more.
        let _ = unsafe { lt::destroy_matmul_desc(self.product) };
    }
}

/// A column-major matrix, whose columns are `stride` elements apart.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(
        element: sys::cudaDataType_t,
        rows: usize,
        columns: usize,
        stride: usize,
    ) -> std::result::Result<Self, CublasError> {
        lt::create_matrix_layout(element, rows as u64, columns as u64, stride as i64).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it exists, and nothing uses it any more.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

impl GemmShape {
    fn describe(&self) -> String {
        format!("product of ({}, {}) and ({}, {})^T", self.tokens, self.n_in, self.n_out, self.n_in)
    }
}

fn blas(what: &str, error: CublasError) -> Error {
    Error::Blas(format!("{what}: {error}"))
}
