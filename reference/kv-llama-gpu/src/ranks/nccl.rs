//! Exchanges by NCCL, loaded at run time like the driver.

use std::ffi::c_int;
use std::ptr;
use std::sync::{PoisonError, RwLock};

use cudarc::driver::sys::CUstream;
use cudarc::nccl::{result, sys};
use kv_device::{Buffer, Gpu};
use kv_gpu::DevicePtr;

use super::{Communicator, Shard};
use crate::{Error, Result};

/// A rank of NCCL.
pub struct Nccl {
    shard: Shard,
    handle: RwLock<Option<Handle>>, // none once it has been aborted
}

#[derive(Clone, Copy)]
struct Handle(sys::ncclComm_t);

// SAFETY: NCCL's communicators may be used by any thread, by one at a time; `abort` waits for calls that
// enqueue.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Nccl {
    /// A communicator for each of these devices, which are in the process, connected.
    ///
    /// # Errors
    /// [`Error::Ranks`] without NCCL, for a device that is given twice, and for what NCCL rejects.
    pub fn ranks(gpus: &[&Gpu]) -> Result<Vec<Self>> {
        check()?; // first: calls into a missing library panic
        let devices: Vec<c_int> = gpus.iter().map(|gpu| gpu.device().context().ordinal() as c_int).collect();
        let mut handles = vec![ptr::null_mut(); devices.len()];
        // SAFETY: there are as many handles as devices.
        unsafe { result::comm_init_all(handles.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) }
            .map_err(|e| failed("connect devices", &e))?;
        let ranks = handles.len();
        let all: Vec<Self> = handles
            .into_iter()
            .enumerate()
            .map(|(rank, handle)| Self {
                shard: Shard { rank, ranks },
                handle: RwLock::new(Some(Handle(handle))),
            })
            .collect();
        Self::connect(&all, gpus)?;
        Ok(all)
    }

    /// Runs the first exchanges, which connect ranks with one another: a later one does not wait for a rank
    /// on the host.
    fn connect(all: &[Self], gpus: &[&Gpu]) -> Result<()> {
        let ranks = all.len();
        let data =
            gpus.iter().map(|gpu| Ok(Buffer::zeros(gpu, ranks)?)).collect::<Result<Vec<Buffer<f32>>>>()?;
        let each = all.iter().zip(gpus).zip(&data);
        // SAFETY: buffers have a float for each rank, and live until the exchanges have ended.
        let sum = |((rank, gpu), data): ((&Self, &&Gpu), &Buffer<f32>)| unsafe {
            rank.sum(gpu.stream(), data.pointer(), ranks)
        };
        // SAFETY: as above.
        let gather = |((rank, gpu), data): ((&Self, &&Gpu), &Buffer<f32>)| unsafe {
            rank.gather(gpu.stream(), data.pointer(), 1, ranks)
        };
        grouped(|| each.clone().try_for_each(sum))?;
        grouped(|| each.clone().try_for_each(gather))?;
        Ok(gpus.iter().try_for_each(|gpu| gpu.synchronize())?)
    }

    fn with(
        &self,
        what: &str,
        enqueue: impl FnOnce(sys::ncclComm_t) -> std::result::Result<(), result::NcclError>,
    ) -> Result<()> {
        match *self.handle.read().unwrap_or_else(PoisonError::into_inner) {
            Some(Handle(handle)) => enqueue(handle).map_err(|e| failed(what, &e)),
            None => Err(Error::Ranks("another rank has failed".into())),
        }
    }
}

impl Communicator for Nccl {
    fn shard(&self) -> Shard {
        self.shard
    }

    unsafe fn sum(&self, stream: CUstream, data: DevicePtr<f32>, len: usize) -> Result<()> {
        let data = data.address() as *mut _;
        let (float, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        self.with("sum over ranks", |handle| {
            // SAFETY: the caller's contract.
            unsafe { result::all_reduce(data, data, len, float, sum, handle, stream.cast()) }.map(drop)
        })
    }

    unsafe fn gather(&self, stream: CUstream, data: DevicePtr<f32>, rows: usize, len: usize) -> Result<()> {
        let own = self.shard.of(len);
        self.with("gather rows of ranks", |handle| {
            result::group_start()?;
            for row in 0..rows {
                let row = data.offset(row * len);
                let from = row.offset(own.start).address() as *const _;
                let float = sys::ncclDataType_t::ncclFloat32;
                // SAFETY: the caller's contract: the row has `len` floats, of which a rank has its part in
                // place.
                unsafe {
                    result::all_gather(from, row.address() as *mut _, own.len(), float, handle, stream.cast())
                }?;
            }
            result::group_end().map(drop)
        })
    }

    fn is_capturable(&self) -> bool {
        true
    }

    fn abort(&self) {
        if let Some(Handle(handle)) = self.handle.write().unwrap_or_else(PoisonError::into_inner).take() {
            // SAFETY: nothing else uses the handle. Kernels that wait for other ranks end; what they leave is
            // not used, since later exchanges are errors.
            let _ = unsafe { result::comm_abort(handle) };
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if let Some(Handle(handle)) = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // SAFETY: nothing else uses the handle; graphs with its exchanges have been dropped before.
            let _ = unsafe { result::comm_destroy(handle) };
        }
    }
}

/// Rejects a machine without the library.
pub(super) fn check() -> Result<()> {
    // SAFETY: it loads the library, if there is one, and calls nothing in it.
    match unsafe { sys::is_culib_present() } {
        true => Ok(()),
        false => Err(Error::Ranks("no NCCL here: install libnccl2, or the wheel nvidia-nccl".into())),
    }
}

/// Enqueues exchanges of several ranks on one thread.
fn grouped(enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
    result::group_start().map_err(|e| failed("begin a group", &e))?;
    enqueue()?;
    result::group_end().map(drop).map_err(|e| failed("end a group", &e))
}

fn failed(what: &str, error: &result::NcclError) -> Error {
    Error::Ranks(format!("NCCL: {what}: {:?}", error.0))
}
