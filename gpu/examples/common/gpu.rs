//! Shared by the examples: buffers on the first device, and test data.

#![allow(dead_code)] // not every example uses all of it

use std::ops::Deref;

use cudarc::driver::{CudaSlice, DevicePtr as _, DeviceRepr, ValidAsZeroBits};
use half::f16;
use kv_gpu::{Device, DevicePtr};

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The first device.
pub struct Gpu(Device);

/// Device memory and its address. An engine has its own allocator; kernels take the pointer.
pub struct Buffer<T> {
    pub slice: CudaSlice<T>,
    pub pointer: DevicePtr<T>,
}

impl Deref for Gpu {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.0
    }
}

impl Gpu {
    pub fn open() -> Result<Self> {
        Ok(Self(Device::open(0).map_err(|error| error.to_string())?))
    }

    pub fn upload<T: DeviceRepr>(&self, data: &[T]) -> Result<Buffer<T>> {
        Ok(self.buffer(self.stream().clone_htod(data)?))
    }

    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, n: usize) -> Result<Buffer<T>> {
        Ok(self.buffer(self.stream().alloc_zeros(n)?))
    }

    fn buffer<T>(&self, slice: CudaSlice<T>) -> Buffer<T> {
        let address = slice.device_ptr(self.stream()).0; // 0 for no elements
        Buffer { slice, pointer: DevicePtr::new(address).unwrap_or(DevicePtr::dangling()) }
    }

    /// Copies the buffer to the host after all work on the stream.
    pub fn read<T: DeviceRepr>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        let data = self.stream().clone_dtoh(&buffer.slice)?;
        self.stream().synchronize()?;
        Ok(data)
    }
}

/// Test data.
pub fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.37).sin() + (i as f32 * 0.0113).cos()).collect()
}

pub fn halves(n: usize) -> Vec<f16> {
    numbers(n).into_iter().map(f16::from_f32).collect()
}
