//! A GPU: its context and stream, and the kernels that are compiled or loaded once for it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute, CUlaunchAttributeID, CUstream};
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use crate::disk_cache::DiskCache;
use crate::launch::Grid;
use crate::library::has_driver;
use crate::module::Function;
use crate::{Error, Limit, Program, compile};

/// A kernel. The first thread that needs it loads it, while others wait.
type Slot = Arc<Mutex<Option<Function>>>;

/// A GPU with a stream and the kernels that were compiled for it.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    capability: (i32, i32),
    sm_count: usize,
    shared_memory: usize,
    l2_bytes: usize,
    is_limited: bool,
    functions: Mutex<HashMap<(Program, &'static str), Slot>>,
    disk: Option<DiskCache>,
}

impl Device {
    /// Opens device `ordinal` on its primary context, which PyTorch and the CUDA runtime use, too.
    ///
    /// # Errors
    /// [`Error::NoDriver`] on a machine without CUDA, [`Error::Driver`] if there is no such device.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        if !has_driver() {
            return Err(Error::NoDriver); // checked first: without the library, creating a context panics
        }
        let context = CudaContext::new(ordinal).map_err(Error::of("open device"))?;
        Self::on_context(context)
    }

    /// Uses an engine's own context.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn on_context(context: Arc<CudaContext>) -> Result<Self, Error> {
        let stream = context.new_stream().map_err(Error::of("make stream"))?;
        let attribute = |attribute| context.attribute(attribute).map_err(Error::of("read attribute"));
        let capability = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let sm_count = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_memory =
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let l2_bytes = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        Ok(Self {
            context,
            stream,
            capability,
            sm_count: sm_count as usize,
            shared_memory: shared_memory as usize,
            l2_bytes: l2_bytes as usize,
            is_limited: false,
            functions: Mutex::default(),
            disk: None,
        })
    }

    /// Also stores compiled kernels in a folder, for later processes. The folder is created, readable and
    /// writable by this user alone.
    ///
    /// A file that is damaged or holds another kernel is ignored and replaced. Code from the folder runs on
    /// the device, so only this user (or root) may be able to write it or the folders above it. Failures to
    /// write a kernel are ignored.
    ///
    /// # Errors
    /// [`Error::CacheFolder`] if the folder cannot be created, or if others can write it; the device then
    /// works without it.
    pub fn use_disk_cache(&mut self, folder: impl Into<PathBuf>) -> Result<(), Error> {
        self.disk = Some(DiskCache::open(folder.into())?);
        Ok(())
    }

    /// Compiles kernels as for an older device: to PTX of its compute capability, which the driver compiles
    /// when it loads a kernel, and within its shared memory.
    ///
    /// Kernels compiled for the device itself are faster. The limit runs the code paths of devices that are
    /// not available, such as (8, 0) with 163 KiB (A100) or with 99 KiB (consumer devices). Existing
    /// operations keep their kernels.
    ///
    /// # Errors
    /// [`Error::Argument`] for a capability below (8, 0), for a capability or memory beyond the device's, and
    /// for (9, 0) on a newer device, which does not have the `wgmma` instructions of its kernels.
    pub fn limit_to(&mut self, limit: Limit) -> Result<(), Error> {
        let Limit { capability, shared_memory } = limit;
        if !((8, 0)..=self.capability).contains(&capability) || shared_memory > self.shared_memory {
            let has = Limit { capability: self.capability, shared_memory: self.shared_memory };
            let problem = format!("{limit:?} is not between compute capability 8.0 and {has:?}");
            return Err(Error::Argument { operation: "Device::limit_to", problem });
        }
        if capability == (9, 0) && self.capability > capability {
            let problem = format!("only devices of 9.0 run its kernels, not {:?}", self.capability);
            return Err(Error::Argument { operation: "Device::limit_to", problem });
        }
        (self.capability, self.shared_memory, self.is_limited) = (capability, shared_memory, true);
        self.functions.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    }

    /// The stream that was opened with the device, for launches that need no other.
    #[must_use]
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// A new stream for background work: its blocks run when streams of higher priority leave multiprocessors
    /// free. Its own priority is 0, the lowest in CUDA and that of [`Device::stream`].
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn background_stream(&self) -> Result<Arc<CudaStream>, Error> {
        self.context.new_stream().map_err(Error::of("make background stream"))
    }

    /// The context, for memory and further streams.
    #[must_use]
    pub const fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Major and minor compute capability that kernels are compiled for: (9, 0) for an H200.
    #[must_use]
    pub const fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Number of streaming multiprocessors (SMs).
    #[must_use]
    pub const fn sm_count(&self) -> usize {
        self.sm_count
    }

    /// Maximum bytes of shared memory of a block, with the driver's opt-in.
    #[must_use]
    pub const fn shared_memory(&self) -> usize {
        self.shared_memory
    }

    /// Bytes of the L2 cache.
    #[must_use]
    pub const fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// A kernel of a program, compiled on first use, with `shared` bytes of dynamic shared memory. Threads
    /// that need different kernels compile them at the same time.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for more shared memory than a block can have, [`Error::NoNvrtc`],
    /// [`Error::Compile`] or [`Error::Driver`].
    pub fn kernel(&self, program: &Program, name: &'static str, shared: usize) -> Result<Kernel, Error> {
        if shared > self.shared_memory {
            return Err(Error::Unsupported {
                operation: format!("{program} with {shared} bytes of shared memory"),
                supported: "shapes whose blocks fit the device's shared memory",
            });
        }
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = functions.entry((program.clone(), name)).or_default().clone();
        drop(functions);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match slot.as_ref() {
            Some(function) => function.clone(),
            None => slot.insert(self.load(program, name)?).clone(),
        };
        let has_pdl = self.capability >= (9, 0);
        let context = self.context.clone();
        let kernel = Kernel { context, function, program: program.clone(), shared: shared as u32, has_pdl };
        kernel.bind_to_thread()?; // another thread may have loaded the function
        let allowed = kernel.function.allow_shared_memory(shared);
        allowed.map_err(Error::of(format_args!("{shared} bytes of shared memory for {program}")))?;
        drop(slot); // now: no other thread changes the function's limit meanwhile
        Ok(kernel)
    }

    /// Loads a kernel of a program from the disk cache, or compiles it if the cache has no image that loads.
    fn load(&self, program: &Program, name: &str) -> Result<Function, Error> {
        let (major, minor) = self.capability;
        let architecture = format!("{}_{major}{minor}", if self.is_limited { "compute" } else { "sm" });
        let load = |code: &[u8]| Function::load(&self.context, code, name);
        let key = self.disk.as_ref().map(|_| program.key(&architecture)).transpose()?;
        let cache = self.disk.as_ref().zip(key);
        let kept = cache.as_ref().and_then(|(disk, key)| disk.get(program.name(), key));
        if let Some(function) = kept.and_then(|code| load(&code).ok()) {
            return Ok(function);
        }
        let code = compile::code(program, &architecture)?;
        if let Some((disk, key)) = &cache {
            disk.put(program.name(), key, &code);
        }
        load(&code).map_err(Error::of(format_args!("load {program}")))
    }
}

/// A kernel that is loaded on a device, ready to launch.
#[derive(Clone)]
pub struct Kernel {
    context: Arc<CudaContext>,
    function: Function,
    program: Program,
    shared: u32,
    has_pdl: bool, // programmatic dependent launch, from sm_90 on
}

impl Kernel {
    /// Sets the kernel's preferred shared-memory carve-out to the need of its blocks of `threads` threads, so
    /// that the rest of a multiprocessor's memory is L1. For kernels that load through L1 into registers:
    /// loads in flight occupy lines of L1.
    ///
    /// Without a preference the driver keeps the previous kernel's carve-out. After a kernel with much shared
    /// memory, `svd::Attend` then reads 3.8 TB/s on an H200 instead of 4.5.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub(crate) fn prefer_l1(self, threads: u32) -> Result<Self, Error> {
        self.divided(|function, shared| function.prefer_l1(threads, shared))
    }

    /// Sets the kernel's preferred carve-out to the maximum. For kernels that should overlap with blocks of
    /// the next kernel that need much shared memory: a multiprocessor changes its carve-out only when it is
    /// idle.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn prefer_shared(self) -> Result<Self, Error> {
        self.divided(|function, _| function.prefer_carve_out(100))
    }

    /// Sets the kernel's carve-out by `set`, which receives its dynamic shared memory in bytes.
    fn divided(self, set: impl FnOnce(&Function, u32) -> Result<(), DriverError>) -> Result<Self, Error> {
        self.bind_to_thread()?; // another thread may have loaded the kernel
        let divided = set(&self.function, self.shared);
        divided.map_err(Error::of(format_args!("set the carve-out of {}", self.program)))?;
        Ok(self)
    }

    /// Makes the kernel's context current on this thread, for calls to the driver.
    pub(crate) fn bind_to_thread(&self) -> Result<(), Error> {
        self.context.bind_to_thread().map_err(Error::of("use device on this thread"))
    }

    /// Launches the kernel with one argument, a structure. With `pdl`, a programmatic dependent launch, its
    /// blocks may start before the previous kernel on the stream ends; the kernel itself waits
    /// (`griddepcontrol.wait`) before it reads that kernel's output.
    ///
    /// # Errors
    /// [`Error::Driver`].
    /// # Safety
    /// `A` must be the kernel's argument; for its pointers and the stream the contract of
    /// [`DevicePtr`](crate::DevicePtr#launches) must hold.
    pub unsafe fn launch<A: Copy>(
        &self,
        stream: CUstream,
        grid: Grid,
        threads: u32,
        pdl: bool,
        argument: &A,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { self.launch_in_clusters(stream, grid, 1, threads, pdl, argument) }
    }

    /// The same in clusters of `cluster` blocks along x. More than one block requires sm_90. More than 8,
    /// which not every device runs, must be enabled before, as this crate's own kernels do.
    ///
    /// # Errors
    /// [`Error::Driver`].
    /// # Safety
    /// As for [`Kernel::launch`].
    pub unsafe fn launch_in_clusters<A: Copy>(
        &self,
        stream: CUstream,
        grid: Grid,
        cluster: u32,
        threads: u32,
        pdl: bool,
        argument: &A,
    ) -> Result<(), Error> {
        let mut attributes = attributes(cluster);
        let pdl = pdl && self.has_pdl;
        let config = sys::CUlaunchConfig {
            hStream: stream,
            attrs: attributes[usize::from(!pdl)..].as_mut_ptr(),
            numAttrs: u32::from(pdl) + u32::from(cluster > 1),
            ..self.config(grid, threads)
        };
        self.bind_to_thread()?;
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        let function = self.function.handle();
        // SAFETY: the caller's contract; the driver copies configuration and argument before it returns.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(Error::of(format_args!("launch {}", self.program)))
    }

    /// Number of clusters of `cluster` blocks that the device runs at the same time, on sm_90. Also enables
    /// clusters of more than 8 blocks, which not every device supports.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub(crate) fn active_clusters(&self, cluster: u32, threads: u32) -> Result<usize, Error> {
        self.bind_to_thread()?;
        let allowed = self.function.allow_large_clusters();
        allowed.map_err(Error::of(format_args!("allow large clusters for {}", self.program)))?;
        let mut attributes = attributes(cluster);
        let config = sys::CUlaunchConfig {
            attrs: &raw mut attributes[1],
            numAttrs: 1,
            ..self.config(Grid([cluster, 1, 1]), threads)
        };
        let mut active = 0;
        // SAFETY: the function is loaded as long as `self` lives; `active` is written.
        let status = unsafe {
            sys::cuOccupancyMaxActiveClusters(&raw mut active, self.function.handle(), &raw const config)
        };
        match status {
            sys::CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE => Ok(0),
            _ => {
                status.result().map_err(Error::of(format_args!("count clusters of {}", self.program)))?;
                Ok(active as usize)
            }
        }
    }

    /// A launch without stream and attributes.
    const fn config(&self, Grid([x, y, z]): Grid, threads: u32) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: std::ptr::null_mut(),
            attrs: std::ptr::null_mut(),
            numAttrs: 0,
        }
    }
}

/// Attributes of a launch: programmatic dependent launch, and clusters of `cluster` blocks along x.
fn attributes(cluster: u32) -> [sys::CUlaunchAttribute; 2] {
    let attribute = |id| sys::CUlaunchAttribute {
        id,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let mut attributes = [
        attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION),
        attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION),
    ];
    let size = &mut attributes[1].value;
    size.clusterDim.x = cluster;
    size.clusterDim.y = 1;
    size.clusterDim.z = 1;
    attributes
}
