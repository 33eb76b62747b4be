//! Host memory that kernels read and write over PCIe.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;
use std::{fs, ptr, slice};

use bytemuck::Pod;
use cudarc::driver::sys::CUmem_advise::{
    CU_MEM_ADVISE_SET_ACCESSED_BY, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
};
use cudarc::driver::sys::CUmemLocationType::{
    self, CU_MEM_LOCATION_TYPE_DEVICE as DEVICE, CU_MEM_LOCATION_TYPE_HOST as HOST,
};
use cudarc::driver::{CudaContext, DriverError, result, sys};
use kv_gpu::DevicePtr;

use crate::gpu::{Gpu, driver};
use crate::{Error, Result};

/// Elements in page-locked or managed host memory, which the device accesses at the same address. Their
/// initial values are undefined. As with [`Buffer`](crate::Buffer), streams order all work on them.
pub(crate) struct HostBuffer<T> {
    address: *mut c_void,
    len: usize,
    kind: Kind,
    context: Arc<CudaContext>,
    elements: PhantomData<T>,
}

/// The driver's kinds of host memory.
enum Kind {
    PageLocked,
    Managed,
}

// SAFETY: the buffer owns its memory, which any thread may use; a shared one is only read.
unsafe impl<T: Send> Send for HostBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for HostBuffer<T> {}

impl<T: Pod> HostBuffer<T> {
    /// Allocates page-locked memory for `len` elements.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the driver fails to allocate it.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<T>());
        let context = gpu.device.context().clone();
        context.bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; a buffer has at least one byte, since the driver rejects none.
        let address = unsafe { result::malloc_host(bytes.max(1), flags) };
        let address = address.map_err(|e| refused(bytes, e))?;
        Ok(Self { address, len, kind: Kind::PageLocked, context, elements: PhantomData })
    }

    /// Allocates memory for `len` elements that kernels read at random.
    ///
    /// The device maps page-locked memory in pages of 4 KB, more than its TLBs cover: scattered rows of 256
    /// bytes are read at 38 GB/s from 16 GiB, and at 10 GB/s from 64 GiB. Managed memory that stays on the
    /// host has pages of 2 MB: 50 GB/s from either (H200, `gpu/src/kernels/PERFORMANCE.md`). The driver's own
    /// copies of it are slow (15 GB/s, by the host), so kernels copy it. Devices without concurrent access to
    /// managed memory get page-locked memory.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the driver fails to allocate it.
    pub fn for_scattered_reads(gpu: &Gpu, len: usize) -> Result<Self> {
        let context = gpu.device.context().clone();
        let shared = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        if !context.attribute(shared).is_ok_and(|shared| shared != 0) {
            return Self::new(gpu, len);
        }
        let bytes = len.saturating_mul(size_of::<T>()).max(1);
        context.bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        let (host, device) = (location(HOST, 0), location(DEVICE, context.cu_device()));
        let refused = |e| refused(bytes, e);
        // SAFETY: the context is current.
        let address = unsafe { result::malloc_managed(bytes, sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL) };
        let address = address.map_err(refused)?;
        let kind = Kind::Managed;
        let buffer = Self { address: address as *mut c_void, len, kind, context, elements: PhantomData };
        // SAFETY: the range is the allocation, and nothing uses it yet.
        unsafe {
            result::mem_advise(address, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, host)
                .map_err(refused)?;
            result::mem_advise(address, bytes, CU_MEM_ADVISE_SET_ACCESSED_BY, device).map_err(refused)?;
            buffer.address.cast::<u8>().write_bytes(0, bytes); // first touch: large pages, all at once
        }
        Ok(buffer)
    }

    /// The device address, equal to the host address (unified addressing).
    pub fn pointer(&self) -> DevicePtr<T> {
        DevicePtr::new(self.address as u64).unwrap_or(DevicePtr::dangling())
    }

    pub const fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

/// Bytes in page-locked host memory. The device copies them asynchronously, at the rate of PCIe.
pub struct PageLocked(HostBuffer<u8>);

impl PageLocked {
    /// A copy of these bytes.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if they do not fit.
    pub fn of(gpu: &Gpu, bytes: &[u8]) -> Result<Self> {
        check_available(bytes.len())?;
        let buffer = HostBuffer::new(gpu, bytes.len())?;
        // SAFETY: the memory has just been allocated with that many bytes, and nothing else knows it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.address.cast(), bytes.len()) };
        Ok(Self(buffer))
    }
}

impl AsRef<[u8]> for PageLocked {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `of` has written all bytes, and nothing writes them again.
        unsafe { slice::from_raw_parts(self.0.address.cast_const().cast(), self.0.len) }
    }
}

/// A word in page-locked host memory that kernels write.
#[cfg(feature = "load")]
pub(crate) struct HostWord(HostBuffer<u32>);

#[cfg(feature = "load")]
impl HostWord {
    /// A word of 0.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the driver fails to allocate it.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let mut word = Self(HostBuffer::new(gpu, 1)?);
        word.set(0);
        Ok(word)
    }

    pub fn pointer(&self) -> DevicePtr<u32> {
        self.0.pointer()
    }

    /// Replaces the word. The device must no longer use it.
    pub fn set(&mut self, word: u32) {
        // SAFETY: the buffer has one word; the driver aligns it to a page.
        unsafe { self.0.address.cast::<u32>().write_volatile(word) }
    }

    /// The word; after a synchronization, the last one that the device wrote.
    pub fn get(&self) -> u32 {
        // SAFETY: as above, and `new` has written it.
        unsafe { self.0.address.cast_const().cast::<u32>().read_volatile() }
    }
}

impl<T> Drop for HostBuffer<T> {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated once and freed once. Freeing waits for the device's work, as with device
            // memory: tests drop caches inside a step.
            let _ = unsafe {
                match self.kind {
                    Kind::PageLocked => result::free_host(self.address),
                    Kind::Managed => result::free_sync(self.address as u64),
                }
            };
        }
    }
}

const fn location(kind: CUmemLocationType, id: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: kind, id }
}

fn refused(bytes: usize, error: DriverError) -> Error {
    Error::HostMemory { bytes, reason: error.to_string() }
}

/// Rejects more memory than the host has available: pages that the device reads are never swapped out, and
/// the OOM killer would end this process or others.
///
/// # Errors
/// [`Error::HostMemory`].
pub(crate) fn check_available(bytes: usize) -> Result<()> {
    let available = [available_memory(), room_in_group()].into_iter().flatten().min();
    match available.filter(|&available| bytes as u64 > available) {
        Some(available) => {
            Err(Error::HostMemory { bytes, reason: format!("only {available} bytes are available") })
        }
        None => Ok(()),
    }
}

/// Bytes available without swapping, according to Linux; none if it does not say.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes left in the memory cgroup of a container; none without a limit.
fn room_in_group() -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    room(&read("memory.max")?, &read("memory.current")?, &read("memory.stat")?)
}

/// The limit of a cgroup minus its usage. The page cache counts as free, except for shared memory, which is
/// counted with it.
fn room(limit: &str, current: &str, stat: &str) -> Option<u64> {
    let counted = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or(0)
    };
    let files = counted("file").saturating_sub(counted("shmem"));
    let taken = current.trim().parse::<u64>().ok()?.saturating_sub(files);
    Some(limit.trim().parse::<u64>().ok()?.saturating_sub(taken))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_gives_what_it_has_not_taken_and_cached_files() {
        let stat = "anon 500\nfile 400\nfile_mapped 7\nshmem 100\n";
        assert_eq!(room("1000\n", "900\n", stat), Some(400));
        assert_eq!(room("max\n", "900\n", stat), None);
        assert_eq!(room("500\n", "900\n", stat), Some(0));
        assert_eq!(room("1000\n", "900\n", "anon 500\n"), Some(100));
    }

    #[test]
    fn more_than_the_host_has_is_refused_with_numbers() {
        assert!(check_available(0).is_ok());
        if cfg!(target_os = "linux") {
            let error = check_available(usize::MAX).unwrap_err().to_string();
            let rest = error.strip_prefix(&format!("{} bytes of host memory: only ", usize::MAX));
            let (available, _) = rest.unwrap().split_once(' ').unwrap();
            assert!(available.parse::<u64>().unwrap() > 1 << 20, "{error}");
        }
    }
}
