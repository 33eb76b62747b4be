//! Machine code on a device. cudarc has a type for it, but only its newest releases expose the handle.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
};
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule, CUresult};
use cudarc::driver::{CudaContext, DriverError, result};

/// A kernel of a module; the module stays loaded as long as one of its kernels exists.
#[derive(Clone)]
pub(crate) struct Function {
    handle: CUfunction,
    module: Arc<Module>,
}

struct Module {
    handle: CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: the driver lets any thread use its handles, and nothing here changes after loading.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the module is loaded once and unloaded once, after its last kernel. A failure can be
            // ignored.
            let _ = unsafe { result::module::unload(self.handle) };
        }
    }
}

impl Function {
    /// Loads the kernel called `name` of a cubin, or of PTX that ends with a zero.
    pub(crate) fn load(context: &Arc<CudaContext>, code: &[u8], name: &str) -> Result<Self, DriverError> {
        let name = CString::new(name).map_err(|_| DriverError(CUresult::CUDA_ERROR_NOT_FOUND))?;
        context.bind_to_thread()?;
        // SAFETY: the context is current. NVRTC made the code, which may come from the disk cache: a cubin,
        // whose header has its length, or PTX with the zero at its end.
        let handle = unsafe { result::module::load_data(code.as_ptr().cast()) }?;
        let module = Arc::new(Module { handle, context: context.clone() });
        // SAFETY: the module has just been loaded.
        let handle = unsafe { result::module::get_function(module.handle, name) }?;
        Ok(Self { handle, module })
    }

    /// Raises the kernel's limit of dynamic shared memory to `bytes`, if it is lower. The default is 48 KiB,
    /// static shared memory included.
    pub(crate) fn allow_shared_memory(&self, bytes: usize) -> Result<(), DriverError> {
        let fixed = self.attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        if bytes + fixed as usize <= 48 << 10 {
            return Ok(());
        }
        let limit = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // Not lower: the function may have been handed out before, with more.
        let bytes = (bytes as i32).max(self.attribute(limit)?);
        // SAFETY: the module is loaded as long as `self` lives.
        unsafe { result::function::set_function_attribute(self.handle, limit, bytes) }
    }

    fn attribute(&self, attribute: CUfunction_attribute) -> Result<i32, DriverError> {
        // SAFETY: the module is loaded as long as `self` lives.
        unsafe { result::function::get_function_attribute(self.handle, attribute) }
    }

    /// Sets the preferred shared-memory carve-out to the shared memory of as many blocks as fit a
    /// multiprocessor, each of `threads` threads and `dynamic` bytes; the rest is L1.
    pub(crate) fn prefer_l1(&self, threads: u32, dynamic: u32) -> Result<(), DriverError> {
        let mut blocks = 0;
        // SAFETY: the module is loaded as long as `self` lives; `blocks` is written.
        unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.handle,
                threads as i32,
                dynamic as usize,
            )
        }
        .result()?;
        let fixed = self.attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let context = &self.module.context;
        let all = context.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?;
        let reserved = context.attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?;
        let shared = blocks * (fixed + dynamic as i32 + reserved);
        self.prefer_carve_out((100 * shared / all.max(1) + 1).min(100))
    }

    /// Sets the preferred shared-memory carve-out in percent of the maximum.
    pub(crate) fn prefer_carve_out(&self, percent: i32) -> Result<(), DriverError> {
        let preferred = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the module is loaded as long as `self` lives.
        unsafe { result::function::set_function_attribute(self.handle, preferred, percent) }
    }

    /// Allows clusters of more than 8 blocks, the portable maximum.
    pub(crate) fn allow_large_clusters(&self) -> Result<(), DriverError> {
        let allowed = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: the module is loaded as long as `self` lives.
        unsafe { result::function::set_function_attribute(self.handle, allowed, 1) }
    }

    /// For `cuLaunchKernelEx`; valid as long as `self` lives.
    pub(crate) const fn handle(&self) -> CUfunction {
        self.handle
    }
}
