//! The first token and the number of tokens of a launch, in device memory.

use kv_gpu::DevicePtr;

use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;

/// Index of the count: 16 bytes later.
const COUNT: usize = 4;

/// Consecutive tokens of one sequence as kernels read them: the first one, and how many.
pub(super) struct Span(Buffer<u32>);

impl Span {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self(Buffer::zeros(gpu, 2 * COUNT)?))
    }

    pub fn write(&self, gpu: &Gpu, first: usize, count: usize) -> Result<()> {
        self.0.write(gpu, &[first as u32, 0, 0, 0, count as u32, 0, 0, 0])
    }

    pub fn first(&self) -> DevicePtr<u32> {
        self.0.pointer()
    }

    pub fn count(&self) -> DevicePtr<u32> {
        self.0.pointer().offset(COUNT)
    }
}
