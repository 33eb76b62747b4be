//! Owned device memory.

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, result};
use kv_gpu::DevicePtr;

use crate::gpu::{Gpu, driver};
use crate::ledger::Ledger;
use crate::{Error, Result};

/// Elements on the device, freed on drop. Nothing tracks their uses: all work on them is ordered by the
/// streams of a [`Gpu`], which are synchronized before a buffer is dropped.
///
/// N.B. cudarc's own slices record events for every use, which a captured stream cannot wait for.
pub struct Buffer<T> {
    pointer: DevicePtr<T>,
    len: usize,
    context: Arc<CudaContext>,
    ledger: Arc<Ledger>,
    purpose: &'static str,
}

impl<T: Pod> Buffer<T> {
    /// Elements whose bytes are all zero.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if they do not fit; [`Error::Gpu`].
    pub fn zeros(gpu: &Gpu, len: usize) -> Result<Self> {
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or_else(|| Error::argument("more memory than addresses"))?;
        let context = gpu.device.context().clone();
        context.bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        let ledger = gpu.ledger.clone();
        let purpose = ledger.add(bytes)?;
        // SAFETY: the context is current; a buffer has at least one byte, since the driver rejects none.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|e| {
            ledger.subtract(bytes, purpose);
            match e.0 {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => ledger.full(bytes, purpose),
                _ => driver(&format!("allocate {bytes} bytes on the device"), e),
            }
        })?;
        let pointer = DevicePtr::new(address).unwrap_or(DevicePtr::dangling());
        let buffer = Self { pointer, len, context, ledger, purpose };
        buffer.fill(gpu, 0)?;
        Ok(buffer)
    }

    /// A copy of elements of the host.
    ///
    /// # Errors
    /// As [`Self::zeros`].
    pub fn of(gpu: &Gpu, data: &[T]) -> Result<Self> {
        let buffer = Self::zeros(gpu, data.len())?;
        buffer.write(gpu, data)?;
        Ok(buffer)
    }

    /// The address of the first element.
    #[must_use]
    pub const fn pointer(&self) -> DevicePtr<T> {
        self.pointer
    }

    /// Number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Their bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Sets every byte, in stream order.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn fill(&self, gpu: &Gpu, byte: u8) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        // SAFETY: the buffer has as many bytes, whose elements are plain numbers.
        unsafe { result::memset_d8_async(self.pointer.address(), byte, self.bytes(), gpu.stream()) }
            .map_err(|e| driver("fill memory", e))
    }

    /// Replaces the elements, in stream order.
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of elements; [`Error::Gpu`].
    pub fn write(&self, gpu: &Gpu, data: &[T]) -> Result<()> {
        if data.len() != self.len {
            return Err(Error::Argument(format!("{} elements for a buffer of {}", data.len(), self.len)));
        }
        self.write_first(gpu, data)
    }

    /// Replaces the first `data.len()` elements, in stream order.
    ///
    /// # Errors
    /// [`Error::Argument`] for more elements than the buffer has; [`Error::Gpu`].
    pub fn write_first(&self, gpu: &Gpu, data: &[T]) -> Result<()> {
        self.write_at(gpu, 0, data)
    }

    /// Replaces the `data.len()` elements from `at` on, in stream order.
    ///
    /// # Errors
    /// [`Error::Argument`] for elements out of bounds; [`Error::Gpu`].
    pub fn write_at(&self, gpu: &Gpu, at: usize, data: &[T]) -> Result<()> {
        let end = at.saturating_add(data.len());
        if end > self.len {
            return Err(Error::Argument(format!("elements to {end} for a buffer of {}", self.len)));
        }
        self.context.bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        // SAFETY: the buffer has as many elements; the driver has copied pageable memory when it returns.
        unsafe { result::memcpy_htod_async(self.pointer.offset(at).address(), data, gpu.stream()) }
            .map_err(|e| driver("copy to the device", e))
    }

    /// Replaces the elements from `at` on by `count` elements of another buffer from `from` on, in stream
    /// order.
    ///
    /// # Errors
    /// [`Error::Argument`] for elements out of bounds of either buffer; [`Error::Gpu`].
    pub fn copy(&self, gpu: &Gpu, at: usize, source: &Self, from: usize, count: usize) -> Result<()> {
        let (end, last) = (at.saturating_add(count), from.saturating_add(count));
        if end > self.len || last > source.len {
            let (to, of) = (self.len, source.len);
            return Err(Error::Argument(format!("elements to {last} of {of}, to {end} of {to}")));
        }
        self.context.bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        let (to, from) = (self.pointer.offset(at).address(), source.pointer.offset(from).address());
        // SAFETY: both buffers have the elements, as has just been checked.
        unsafe { result::memcpy_dtod_async(to, from, count * size_of::<T>(), gpu.stream()) }
            .map_err(|e| driver("copy on the device", e))
    }

    /// Reads the first `out.len()` elements, after all work on the stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for more elements than the buffer has; [`Error::Gpu`].
    pub fn read_into(&self, gpu: &Gpu, out: &mut [T]) -> Result<()> {
        let end = out.len();
        if end > self.len {
            return Err(Error::Argument(format!("elements to {end} of a buffer of {}", self.len)));
        }
        self.context.bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        // SAFETY: the buffer has as many elements; they are all plain numbers.
        unsafe { result::memcpy_dtoh_async(out, self.pointer.address(), gpu.stream()) }
            .map_err(|e| driver("copy to the host", e))?;
        gpu.synchronize()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated once and freed once; the driver waits for the work that uses it. A failure
            // here has been reported by the call that caused it.
            let _ = unsafe { result::free_sync(self.pointer.address()) };
        }
        self.ledger.subtract(self.len * size_of::<T>(), self.purpose);
    }
}
