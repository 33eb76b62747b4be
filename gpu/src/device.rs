use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream};
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use crate::{Error, KERNELS};

/// A GPU with a stream of its own and the modules that have been compiled for it.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    capability: (i32, i32),
    modules: Mutex<HashMap<&'static str, Arc<CudaModule>>>,
}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`Error::NoDriver`] on a machine without CUDA, [`Error::Driver`] when there is no such device.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        // SAFETY: it loads the driver library, if there is one, and runs nothing of it.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(Error::NoDriver); // asked first: without the library a context panics
        }
        let context = CudaContext::new(ordinal).map_err(Error::of("open device"))?;
        let stream = context.new_stream().map_err(Error::of("make stream"))?;
        let attribute = |attribute| context.attribute(attribute).map_err(Error::of("read capability"));
        let capability = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        Ok(Self { context, stream, capability, modules: Mutex::default() })
    }

    /// The stream that kernels are launched on.
    #[must_use]
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Major and minor compute capability: (9, 0) for an H200.
    #[must_use]
    pub const fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// A function of a kernel file, compiled on first use.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn function(&self, kernel: &'static str, function: &str) -> Result<CudaFunction, Error> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(kernel) {
            Some(module) => module.clone(),
            None => {
                let (major, minor) = self.capability;
                let ptx = compile(kernel, &format!("compute_{major}{minor}"))?;
                let module = self.context.load_module(ptx).map_err(Error::of("load module"))?;
                modules.entry(kernel).or_insert(module).clone()
            }
        };
        module.load_function(function).map_err(Error::of("load function"))
    }
}

/// Compiles a kernel of [`KERNELS`] to PTX for an architecture, such as `compute_80`. Needs NVRTC but no device.
///
/// # Errors
/// [`Error::NoNvrtc`] or [`Error::Compile`].
pub fn compile(kernel: &'static str, architecture: &str) -> Result<Ptx, Error> {
    let failed = |log: String| Error::Compile { kernel, log };
    let Some((_, source)) = KERNELS.iter().find(|(name, _)| *name == kernel) else {
        return Err(failed("there is no such kernel".into()));
    };
    // SAFETY: it loads the NVRTC library, if there is one, and runs nothing of it.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(Error::NoNvrtc);
    }
    let options = CompileOptions {
        options: vec![format!("--gpu-architecture={architecture}")],
        name: Some(format!("{kernel}.cu")),
        ..CompileOptions::default()
    };
    compile_ptx_with_opts(source, options).map_err(|e| match e {
        CompileError::CompileError { log, .. } => failed(log.to_string_lossy().into_owned()),
        other => failed(format!("{other:?}")),
    })
}
